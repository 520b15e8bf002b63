// For rows so few that reading the weights is all the work: small tiles, so that every multiprocessor reads some, and the
// warps of a block take parts of the depth in turn. Both factors go from global memory straight into fragments, weights
// before the kernel in front has ended. A row's sums have one order, whatever tiles there are and whichever rows beside
// it. Where a row is normalised, sums wait in the workspace for a second launch, which begins while the first one runs.
// Prediction: 2 us for 64 rows, 384 to 1,536 with GELU, from 7 as two kernels of a library; 4 us as two launches for
//   1,536 to 384 with LayerNorm, from 8: latency, and at most 100 KB a multiprocessor from L2.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/activation.cuh"
#include "common/linear.h"
#include "common/mma16.cuh"
#include "common/moments.cuh"

namespace tilerank {
namespace few_rows {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPart = 32;  // of depth: eight neighbouring factors a lane of a quad, for two products
constexpr int kNormWarps = 4;
constexpr int kMostColumns = 1024;  // of a row that is normalised

// Eight factors, or zeros where depth has ended.
template <typename Element>
__device__ __forceinline__ uint4 load_factors(const Element* row, int at, int depth) {
    return at < depth ? load_vector<uint4>(row + at) : uint4{0, 0, 0, 0};
}

__device__ __forceinline__ float activated(float value, int32_t activation) {
    if (activation == TILERANK_ACTIVATION_GELU) return gelu_approx(value);
    return activation == TILERANK_ACTIVATION_TANH ? tanhf(value) : value;
}

// A block: kRowTiles x 16 rows and kColumnTiles x 8 columns; a warp: each kWarps-th part of their depth, kAhead of them
// under way at once. Without gamma the result goes to out, else what is to be normalised to `sums`, [rows, columns].
template <typename Element, int kRowTiles, int kColumnTiles, int kAhead>
__global__ void __launch_bounds__(kThreads, 2) multiply(LinearArgs args, float* sums) {
    constexpr int kRows = 16 * kRowTiles, kColumns = 8 * kColumnTiles;
    constexpr int kOwn = (kRows * kColumns + kThreads - 1) / kThreads;  // elements of a thread, kRowStep rows apart
    constexpr int kRowStep = kThreads / kColumns;
    static_assert(kThreads % kColumns == 0 && kRows % kRowStep == 0);
    SHARED(float, partial, [kWarps][kRows][kColumns + 8]);
    let_next_begin();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const unsigned column_tiles = (static_cast<unsigned>(args.columns) + kColumns - 1) / kColumns;
    const int64_t first_row = static_cast<int64_t>(blockIdx.x / column_tiles) * kRows;
    const int64_t first_column = static_cast<int64_t>(blockIdx.x % column_tiles) * kColumns;
    const int depth = static_cast<int>(args.depth), parts = (depth + kPart - 1) / kPart;

    // Rows and columns that do not exist are the last one again: what they compute is not written.
    const Element* weight[kColumnTiles];
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
        const int64_t column = min(first_column + tile * 8 + lane / 4, args.columns - 1);
        weight[tile] = static_cast<const Element*>(args.weight) + column * args.weight_stride;
    }
    const Element* x[kRowTiles][2];
#pragma unroll
    for (int tile = 0; tile < kRowTiles * 2; ++tile) {
        const int64_t row = min(first_row + tile * 8 + lane / 4, args.rows - 1);
        x[tile / 2][tile % 2] = static_cast<const Element*>(args.x) + row * args.x_stride;
    }
    uint4 b[kAhead][kColumnTiles], a[kAhead][kRowTiles][2];
    const auto place = [&](int part) { return part * kPart + lane % 4 * 8; };
    const auto load_weights = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int tile = 0; tile < kColumnTiles; ++tile) {
                b[i][tile] = load_factors(weight[tile], place(first + i * kWarps), depth);
            }
        }
    };
    load_weights(warp);
    const int own_row = threadIdx.x / kColumns, own_column = threadIdx.x % kColumns;
    const int64_t column = first_column + own_column;
    const float bias = args.bias != nullptr && column < args.columns
                           ? to_float(static_cast<const Element*>(args.bias)[column])
                           : 0.0f;
    wait_for_previous();
    float ends[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int64_t row = first_row + own_row + i * kRowStep;
        ends[i] = bias;
        if (args.residual != nullptr && row < args.rows && column < args.columns) {
            ends[i] += to_float(static_cast<const Element*>(args.residual)[row * args.residual_stride + column]);
        }
    }

    Fragment products[kRowTiles][kColumnTiles] = {};
    for (int first = warp; first < parts; first += kWarps * kAhead) {
        if (first > warp) load_weights(first);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
            for (int tile = 0; tile < kRowTiles * 2; ++tile) {
                a[i][tile / 2][tile % 2] = load_factors(x[tile / 2][tile % 2], place(first + i * kWarps), depth);
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * kWarps >= parts) break;
            // Which factors meet in which place of a product is free, as long as both sides agree.
#pragma unroll
            for (int row = 0; row < kRowTiles; ++row) {
                const uint4 high = a[i][row][0], low = a[i][row][1];
#pragma unroll
                for (int tile = 0; tile < kColumnTiles; ++tile) {
                    const uint4 factors = b[i][tile];
                    mma_m16n8k16<Element>(products[row][tile], {high.x, low.x, high.y, low.y}, {factors.x, factors.y});
                    mma_m16n8k16<Element>(products[row][tile], {high.z, low.z, high.w, low.w}, {factors.z, factors.w});
                }
            }
        }
    }
#pragma unroll
    for (int row = 0; row < kRowTiles * 2; ++row) {
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
            const float* both = &products[row / 2][tile][row % 2 * 2];
            store_vector(&partial[warp][row * 8 + lane / 4][tile * 8 + lane % 4 * 2], float2{both[0], both[1]});
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int own = own_row + i * kRowStep;
        const int64_t row = first_row + own;
        if (row >= args.rows || column >= args.columns) break;
        float sum = partial[0][own][own_column];
#pragma unroll
        for (int other = 1; other < kWarps; ++other) sum += partial[other][own][own_column];
        sum += ends[i];
        if (args.gamma != nullptr) {
            sums[row * args.columns + column] = sum;
        } else {
            static_cast<Element*>(args.out)[row * args.out_stride + column] =
                from_float<Element>(activated(sum, args.activation));
        }
    }
}

// A warp a row, of up to kOwn columns a lane.
template <typename Element, int kOwn>
__global__ void __launch_bounds__(kNormWarps* kWarpSize) normalise(LinearArgs args, const float* sums) {
    let_next_begin();
    const int lane = threadIdx.x % kWarpSize;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kNormWarps + threadIdx.x / kWarpSize;
    const int columns = static_cast<int>(args.columns);
    float gamma[kOwn], beta[kOwn], values[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int column = i * kWarpSize + lane;
        if (column >= columns) continue;
        gamma[i] = to_float(static_cast<const Element*>(args.gamma)[column]);
        beta[i] = to_float(static_cast<const Element*>(args.beta)[column]);
    }
    wait_for_previous();
    if (row >= args.rows) return;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int column = i * kWarpSize + lane;
        values[i] = column < columns ? sums[row * columns + column] : 0.0f;
        sum += values[i];
    }
    const float mean = warp_sum(sum) / static_cast<float>(columns);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const float distance = i * kWarpSize + lane < columns ? values[i] - mean : 0.0f;
        squares += distance * distance;
    }
    const float factor =
        1.0f / sqrtf(warp_sum(squares) / static_cast<float>(columns) + static_cast<float>(args.epsilon));
    Element* out = static_cast<Element*>(args.out) + row * args.out_stride;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int column = i * kWarpSize + lane;
        if (column < columns) out[column] = from_float<Element>((values[i] - mean) * factor * gamma[i] + beta[i]);
    }
}

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

// Blocks of rows x columns each.
int64_t tiles(const LinearArgs& args, int rows, int columns) {
    return ((args.rows + rows - 1) / rows) * ((args.columns + columns - 1) / columns);
}

tilerank_status check_served(const LinearArgs& args) {
    if (args.weight_format != TILERANK_FORMAT_PLAIN) {
        return refuse(TILERANK_UNSUPPORTED, "variant few_rows: weight_format is %d; it serves: 0 (plain)",
                      args.weight_format);
    }
    if (args.depth % 8 != 0 || args.depth > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant few_rows: depth is %lld; it serves: multiples of 8",
                      static_cast<long long>(args.depth));
    }
    if (args.gamma != nullptr && args.columns > kMostColumns) {
        return refuse(TILERANK_UNSUPPORTED, "variant few_rows: columns is %lld; where gamma is given it serves: up to %d",
                      static_cast<long long>(args.columns), kMostColumns);
    }
    if (args.rows > INT32_MAX || args.columns > INT32_MAX || tiles(args, 32, 32) > INT32_MAX) {
        return refuse(TILERANK_UNSUPPORTED, "variant few_rows: rows is %lld, too many for %lld columns",
                      static_cast<long long>(args.rows), static_cast<long long>(args.columns));
    }
    if (!aligned16(args.x, args.x_stride) || !aligned16(args.weight, args.weight_stride)) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant few_rows: a row of x or weight does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

template <typename Element>
tilerank_status launch_typed(const LinearArgs& args, float* sums, void* stream) {
    // Larger tiles read less in all, once there are enough of them for some 132 multiprocessors.
    constexpr int64_t kEnough = 96;
    const bool is_large = tiles(args, 32, 32) >= kEnough;
    const tilerank_status multiplied = launch_blocks_overlapped(
        args.overlap != 0, "few_rows", is_large ? multiply<Element, 2, 4, 2> : multiply<Element, 1, 2, 6>,
        is_large ? tiles(args, 32, 32) : tiles(args, 16, 16), kThreads, 0, stream, args, sums);
    if (multiplied != TILERANK_OK || args.gamma == nullptr) return multiplied;
    const auto run = args.columns <= 384 ? normalise<Element, 384 / kWarpSize>
                                         : normalise<Element, kMostColumns / kWarpSize>;
    return launch_blocks_overlapped(args.overlap != 0, "few_rows", run, (args.rows + kNormWarps - 1) / kNormWarps,
                                    kNormWarps * kWarpSize, 0, stream, args, sums);
}

}  // namespace few_rows

size_t linear_few_rows_workspace(const LinearArgs& args) {
    return args.gamma == nullptr ? 0 : static_cast<size_t>(args.rows) * static_cast<size_t>(args.columns) * sizeof(float);
}

tilerank_status linear_few_rows(const LinearArgs& args, void* workspace, void* stream) {
    const tilerank_status served = few_rows::check_served(args);
    if (served != TILERANK_OK) return served;
    float* sums = static_cast<float*>(workspace);
    return args.dtype == TILERANK_FP16 ? few_rows::launch_typed<__half>(args, sums, stream)
                                       : few_rows::launch_typed<__nv_bfloat16>(args, sums, stream);
}

}  // namespace tilerank
