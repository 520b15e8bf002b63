// Shared policy of the attention block's products on mma.sync: tiles of kGemmRows x kGemmColumns by four warps, factors
// through shared memory in steps of 64 bytes of depth, 16-bit as they are and fp32 as three products of TF32 terms.
#pragma once

#include "common/mma16.cuh"

namespace tilerank {

constexpr int kGemmWarps = 4;
constexpr int kGemmThreads = kGemmWarps * kWarpSize;
constexpr int kGemmRows = 64;
constexpr int kGemmColumns = 128;
constexpr int kGemmStages = 3;

template <typename Element>
constexpr int kPartElements = 16 / sizeof(Element);  // of a 16-byte vector
template <typename Element>
constexpr int kGemmDepth = 64 / sizeof(Element);  // of a step
// Rows lie so far apart that a fragment's rows fall into different banks.
template <typename Element>
constexpr int kDepthPitch = kGemmDepth<Element> + kPartElements<Element>;
template <typename Element>
constexpr int kColumnPitch = kGemmColumns + (sizeof(Element) == 4 ? 8 : kPartElements<Element>);

// The right factor's step in shared memory: [columns][depth] or, where rows of memory are inputs, [depth][columns].
template <typename Element, bool kInOut>
constexpr int kRightElements = kInOut ? kGemmDepth<Element> * kColumnPitch<Element>
                                      : kGemmColumns * kDepthPitch<Element>;

template <typename Element, bool kInOut>
struct GemmStage {
    Element left[kGemmRows][kDepthPitch<Element>];
    Element right[kRightElements<Element, kInOut>];
};

// A warp's 32 x 64 sums: 2 x 8 fragments.
using GemmSums = Fragment[2][8];

// ---- fp32 as two TF32 terms each: high terms times high terms, and high times low both ways ----

struct Terms {
    uint32_t high;
    uint32_t low;
};

__device__ __forceinline__ Terms split_terms(float value) {
    const uint32_t high = to_tf32(value);
    return {high, to_tf32(value - __uint_as_float(high))};
}

__device__ __forceinline__ void mma_split(float (&sums)[4], const uint32_t (&a_high)[4], const uint32_t (&a_low)[4],
                                          const uint32_t (&b_high)[2], const uint32_t (&b_low)[2]) {
    mma_m16n8k8_tf32(sums, a_low, b_high);
    mma_m16n8k8_tf32(sums, a_high, b_low);
    mma_m16n8k8_tf32(sums, a_high, b_high);
}

// ---- Copying ----

// A part of a row to shared memory, zeros from `count` elements on. Lands at copy_async_wait where it is whole and
// aligned.
template <typename Element>
__device__ __forceinline__ void copy_part(Element* target, const Element* source, int64_t count, bool aligned) {
    constexpr int kPart = kPartElements<Element>;
    if (count <= 0) {
        store_vector(target, uint4{0, 0, 0, 0});
    } else if (aligned && count >= kPart) {
        copy_async<16>(target, source);
    } else {
#pragma unroll
        for (int i = 0; i < kPart; ++i) target[i] = i < count ? source[i] : from_float<Element>(0.0f);
    }
}

// A matrix of weights, as outputs x inputs: rows of memory are outputs or, where kInOut, inputs.
template <typename Element>
struct WeightView {
    const Element* base;
    int64_t stride;
    int64_t outputs;
    int64_t inputs;
    bool aligned;  // rows begin at multiples of 16 bytes
};

// The step of the right factor that begins at input `depth`, outputs column .. column + kGemmColumns - 1.
template <typename Element, bool kInOut>
__device__ __forceinline__ void copy_right(GemmStage<Element, kInOut>& stage, const WeightView<Element>& weights,
                                           int64_t column, int64_t depth, int thread) {
    constexpr int kPart = kPartElements<Element>;
    constexpr int kRows = kInOut ? kGemmDepth<Element> : kGemmColumns;
    constexpr int kParts = (kInOut ? kGemmColumns : kGemmDepth<Element>) / kPart;
    constexpr int kPitch = kInOut ? kColumnPitch<Element> : kDepthPitch<Element>;
    const int64_t first_row = kInOut ? depth : column;
    const int64_t first_column = kInOut ? column : depth;
    const int64_t rows = (kInOut ? weights.inputs : weights.outputs) - first_row;
    const int64_t columns = (kInOut ? weights.outputs : weights.inputs) - first_column;
#pragma unroll
    for (int at = thread; at < kRows * kParts; at += kGemmThreads) {
        const int row = at / kParts;
        const int part = at % kParts * kPart;
        copy_part(&stage.right[row * kPitch + part],
                  weights.base + (row < rows ? (first_row + row) * weights.stride + first_column + part : 0),
                  row < rows ? columns - part : 0, weights.aligned);
    }
}

// ---- A step's products ----

// sums += left right of the stage, for the warp's 32 rows and 64 columns.
template <typename Element, bool kInOut>
__device__ __forceinline__ void multiply(GemmSums& sums, const GemmStage<Element, kInOut>& stage, int warp, int lane) {
    const int row = warp / 2 * 32;
    const int column = warp % 2 * 64;
    if constexpr (sizeof(Element) == 2) {
#pragma unroll
        for (int depth = 0; depth < kGemmDepth<Element>; depth += 16) {
            uint32_t a[2][4];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                ldmatrix_x4(a[tile], &stage.left[row + tile * 16 + lane % 16][depth + lane / 16 * 8]);
            }
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                uint32_t b[4];
                const int first = column + pair * 16;
                if constexpr (kInOut) {
                    ldmatrix_x4_trans(
                        b, &stage.right[(depth + lane % 16) * kColumnPitch<Element> + first + lane / 16 * 8]);
                } else {
                    ldmatrix_x4(b, &stage.right[(first + lane / 16 * 8 + lane % 8) * kDepthPitch<Element> + depth +
                                                lane / 8 % 2 * 8]);
                }
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    mma_m16n8k16<Element>(sums[tile][pair * 2], a[tile], {b[0], b[1]});
                    mma_m16n8k16<Element>(sums[tile][pair * 2 + 1], a[tile], {b[2], b[3]});
                }
            }
        }
    } else {
        // The matrix unit rounds towards zero as it adds: a thousand inputs added there would drift. A step's are, and
        // their sum is added by the ordinary rounding.
        constexpr int kDepths = kGemmDepth<Element> / 8;
        const int g = lane / 4;
        const int t = lane % 4;
        uint32_t a_high[2][kDepths][4];
        uint32_t a_low[2][kDepths][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Terms terms =
                        split_terms(stage.left[row + tile * 16 + i % 2 * 8 + g][depth * 8 + i / 2 * 4 + t]);
                    a_high[tile][depth][i] = terms.high;
                    a_low[tile][depth][i] = terms.low;
                }
            }
        }
#pragma unroll
        for (int block = 0; block < 8; ++block) {
            Fragment of_step[2] = {};
#pragma unroll
            for (int depth = 0; depth < kDepths; ++depth) {
                uint32_t b_high[2];
                uint32_t b_low[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int input = depth * 8 + i * 4 + t;
                    const int output = column + block * 8 + g;
                    const Terms terms = split_terms(stage.right[kInOut ? input * kColumnPitch<Element> + output
                                                                       : output * kDepthPitch<Element> + input]);
                    b_high[i] = terms.high;
                    b_low[i] = terms.low;
                }
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    mma_split(of_step[tile], a_high[tile][depth], a_low[tile][depth], b_high, b_low);
                }
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][block][i] += of_step[tile][i];
            }
        }
    }
}

// sums = left weights^T for a tile. The left factor comes in one of two ways, and the other calls do nothing:
// copy_left(stage, depth) starts to copy a step of it into shared memory; or fetch_left(depth) starts to load it into
// registers, from which store_left(stage) puts it into shared memory a step later.
template <typename Element, bool kInOut, typename CopyLeft, typename FetchLeft, typename StoreLeft>
__device__ __forceinline__ void gemm_tile(GemmSums& sums, GemmStage<Element, kInOut>* stages,
                                          const WeightView<Element>& weights, int64_t column, const CopyLeft& copy_left,
                                          const FetchLeft& fetch_left, const StoreLeft& store_left, int warp,
                                          int lane) {
    constexpr int kDepth = kGemmDepth<Element>;
    constexpr int kAhead = kGemmStages - 1;
    const int thread = warp * kWarpSize + lane;
    const int steps = static_cast<int>((weights.inputs + kDepth - 1) / kDepth);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int block = 0; block < 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][block][i] = 0.0f;
        }
    }
    const auto load = [&](int step) {  // a group of copies, empty or not, so that waits can count them
        if (step < steps) {
            auto& stage = stages[step % kGemmStages];
            copy_right<Element, kInOut>(stage, weights, column, static_cast<int64_t>(step) * kDepth, thread);
            copy_left(stage, static_cast<int64_t>(step) * kDepth);
            store_left(stage);
        }
        copy_async_commit();
        if (step + 1 < steps) fetch_left(static_cast<int64_t>(step + 1) * kDepth);
    };
    fetch_left(0);
#pragma unroll 1
    for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<kGemmStages - 2>();
        __syncthreads();  // this step is there for all warps, and the one before is no longer read
        load(step + kAhead);
        multiply<Element, kInOut>(sums, stages[step % kGemmStages], warp, lane);
    }
    copy_async_wait<0>();
    __syncthreads();  // the stages may be used for something else
}

// Calls use(row, column, low, high) for each two neighbouring sums of the lane, positions within the tile.
template <typename Use>
__device__ __forceinline__ void each_pair(const GemmSums& sums, int warp, int lane, const Use& use) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int block = 0; block < 8; ++block) {
                use(warp / 2 * 32 + tile * 16 + half * 8 + lane / 4, warp % 2 * 64 + block * 8 + lane % 4 * 2,
                    sums[tile][block][half * 2], sums[tile][block][half * 2 + 1]);
            }
        }
    }
}

}  // namespace tilerank
