// The whole row of 384 columns is one block's, so that bias, residual and LayerNorm are the end of the product: 128 rows
// a block, 64 a warpgroup, the weights fetched once for the two blocks of a cluster. The residual comes through the same
// ring of stages, behind the factors.
// Prediction: 13 us for 16,830 rows of depth 384, from 17 + 31 as three kernels: 10 us move rows in, residual in and
//   result out. Depth 1536: 30 us from 65; L2 delivers 40 KB a part and block, 23 us; start and end 7.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/linear.h"
#include "common/mma16.cuh"
#include "common/softmax.cuh"
#include "common/tma.cuh"

namespace tilerank {
namespace row_layernorm {

constexpr int kRows = 128;
constexpr int kColumns = 384;
constexpr int kHalf = kColumns / 2;  // columns of one product, and rows of the weights that one block fetches
constexpr int kDepth = 64;           // of a stage
constexpr int kRowBytes = kDepth * 2;
constexpr int kXBytes = kRows * kRowBytes;
constexpr int kWeightBytes = kColumns * kRowBytes;
constexpr int kStageBytes = kXBytes + kWeightBytes;
constexpr int kStages = 3;
// After the product the residual takes the same way, up to kStageColumns columns a stage.
constexpr int kStageColumns = kStageBytes / kXBytes * kDepth;
constexpr int kVectorBytes = kColumns * 2;  // bias, gamma or beta
constexpr int kSharedBytes = kStages * kStageBytes + 3 * kVectorBytes + 2 * kStages * 8;
constexpr int kThreads = 3 * 128;
constexpr int kWarps = 4;  // of a group

struct Problem {
    CUtensorMap x;
    CUtensorMap weight;
    CUtensorMap residual;
    const void* bias;
    const void* gamma;
    const void* beta;
    void* out;
    int64_t out_stride;
    int rows;
    int parts;  // of depth
    float epsilon;
    bool overlap;
};

__device__ __forceinline__ void load(const Problem& problem, unsigned char* stages, uint64_t* full, uint64_t* empty,
                                     int rank) {
    const int row = static_cast<int>(blockIdx.x) * kRows;
    int stage = 0, turn = 0;
    const auto next = [&](int bytes) {
        if (turn > 0) barrier_wait(&empty[stage], (turn - 1) & 1);
        barrier_expect(&full[stage], bytes);
        return stages + stage * kStageBytes;
    };
    const auto advance = [&] {
        if (++stage == kStages) stage = 0, ++turn;
    };
    const auto copy_weight = [&](unsigned char* target, int part, int at) {
        copy_box_to_cluster(target + kXBytes + rank * (kWeightBytes / 2), &problem.weight, &full[at], part * kDepth,
                            rank * kHalf, 3);
    };
    // The first weights need not wait for what x is made by.
    const int early = min(problem.parts, kStages);
    for (int part = 0; part < early; ++part) {
        barrier_expect(&full[part], kStageBytes);
        copy_weight(stages + part * kStageBytes, part, part);
    }
    if (problem.overlap) wait_for_previous();
    for (int part = 0; part < early; ++part) {
        copy_box(stages + part * kStageBytes, &problem.x, &full[part], part * kDepth, row);
        advance();
    }
    for (int part = early; part < problem.parts; ++part) {
        unsigned char* x = next(kStageBytes);
        copy_weight(x, part, stage);
        copy_box(x, &problem.x, &full[stage], part * kDepth, row);
        advance();
    }
    for (int column = 0; column < kColumns; column += kStageColumns) {
        const int parts = min(kStageColumns, kColumns - column) / kDepth;
        unsigned char* residual = next(parts * kXBytes);
        for (int part = 0; part < parts; ++part) {
            copy_box(residual + part * kXBytes, &problem.residual, &full[stage], column + part * kDepth, row);
        }
        advance();
    }
}

template <typename Element>
__device__ __forceinline__ void unpack8(float (&values)[8], const unsigned char* source) {
    const uint4 packed = load_vector<uint4>(source);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpack16<Element>(words[i]);
        values[2 * i] = both.x, values[2 * i + 1] = both.y;
    }
}

template <typename Element>
__device__ __forceinline__ void compute(const Problem& problem, const unsigned char* stages,
                                        const unsigned char* vectors, uint64_t* full, uint64_t* empty, int group,
                                        int warp, int lane) {
    if (problem.overlap) wait_for_previous();  // out may be what the kernel before reads
    const uint32_t begin = shared_address(stages) / 16;
    const int row = group * 64 + warp * 16 + lane / 4;  // and eight below
    Fragment sums[2][kHalf / 8];
    uint32_t a[2][2][4];  // of half a stage each, the fragments of a step: see TILERANK_FORMAT_INTERLEAVED
    int stage = 0, turn = 0, last_stage = 0;
    for (int part = 0; part < problem.parts; ++part) {
        barrier_wait(&full[stage], turn & 1);
        const unsigned char* x = stages + stage * kStageBytes;
        const uint32_t weight = begin + (stage * kStageBytes + kXBytes) / 16;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const uint4 eight =
                    load_vector<uint4>(x + swizzled_offset<kRowBytes>(row + low * 8, side * 64 + lane % 4 * 16));
                a[side][0][low] = eight.x, a[side][0][low + 2] = eight.y;
                a[side][1][low] = eight.z, a[side][1][low + 2] = eight.w;
            }
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 2; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    wgmma_k16<Element, kHalf, false>(
                        sums[half], a[side][step],
                        tile_descriptor<kRowBytes>(weight + half * (kWeightBytes / 2 / 16) + side * 4 + step * 2, 1),
                        part > 0 || side > 0 || step > 0);
                }
            }
            wgmma_commit();
            if (side > 0 || part > 0) wgmma_wait<1>();
            if (side == 0 && part > 0 && lane < 2) barrier_arrive_at(&empty[last_stage], lane);
        }
        last_stage = stage;
        if (++stage == kStages) stage = 0, ++turn;
    }
    wgmma_wait<0>();
    if (lane < 2) barrier_arrive_at(&empty[last_stage], lane);

    // A quad's four threads have eight neighbouring columns of every 32 each: see TILERANK_FORMAT_INTERLEAVED.
    float mean[2] = {}, scale[2] = {};
#pragma unroll
    for (int block = 0; block < kColumns / 32; ++block) {
        constexpr int kBlocks = kStageColumns / 32;  // of a stage
        if (block % kBlocks == 0) {
            if (block > 0 && ++stage == kStages) stage = 0, ++turn;
            barrier_wait(&full[stage], turn & 1);
        }
        // Parts of kDepth columns, two blocks each.
        const unsigned char* residual = stages + stage * kStageBytes + block % kBlocks / 2 * kXBytes;
        float bias[8], values[8];
        unpack8<Element>(bias, vectors + block * 64 + lane % 4 * 16);
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            unpack8<Element>(values, residual + swizzled_offset<kRowBytes>(row + low * 8, block % 2 * 64 + lane % 4 * 16));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& sum = sums[block / 6][block % 6 * 4 + i / 2][low * 2 + i % 2];
                sum += bias[i] + values[i];
                mean[low] += sum;
            }
        }
    }
#pragma unroll
    for (int low = 0; low < 2; ++low) mean[low] = quad_sum(mean[low]) * (1.0f / kColumns);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kHalf / 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float distance = sums[half][block][i] - mean[i / 2];
                scale[i / 2] = fmaf(distance, distance, scale[i / 2]);
            }
        }
    }
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        scale[low] = 1.0f / sqrtf(quad_sum(scale[low]) * (1.0f / kColumns) + problem.epsilon);
    }
    const int first_row = static_cast<int>(blockIdx.x) * kRows + row;
    Element* out = static_cast<Element*>(problem.out) + first_row * problem.out_stride + lane % 4 * 8;
    const bool exists[2] = {first_row < problem.rows, first_row + 8 < problem.rows};
#pragma unroll
    for (int block = 0; block < kColumns / 32; ++block) {
        float gamma[8], beta[8];
        unpack8<Element>(gamma, vectors + kVectorBytes + block * 64 + lane % 4 * 16);
        unpack8<Element>(beta, vectors + 2 * kVectorBytes + block * 64 + lane % 4 * 16);
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* sum = &sums[block / 6][block % 6 * 4 + i][low * 2];
                words[i] = pack16<Element>(fmaf((sum[0] - mean[low]) * scale[low], gamma[2 * i], beta[2 * i]),
                                           fmaf((sum[1] - mean[low]) * scale[low], gamma[2 * i + 1], beta[2 * i + 1]));
            }
            if (exists[low]) {
                store_vector(out + low * 8 * problem.out_stride + block * 32,
                             uint4{words[0], words[1], words[2], words[3]});
            }
        }
    }
}

template <typename Element>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    unsigned char* stages = aligned_shared();
    unsigned char* vectors = stages + kStages * kStageBytes;
    uint64_t* full = reinterpret_cast<uint64_t*>(vectors + 3 * kVectorBytes);
    uint64_t* empty = full + kStages;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], 2 * 2 * kWarps);
        }
        fence_barrier_init();
    }
    for (int at = threadIdx.x; at < 3 * kVectorBytes / 16; at += kThreads) {
        constexpr int kParts = kVectorBytes / 16;
        const void* source = at < kParts ? problem.bias : at < 2 * kParts ? problem.gamma : problem.beta;
        store_vector(vectors + at * 16,
                     load_vector<uint4>(static_cast<const unsigned char*>(source) + at % kParts * 16));
    }
    cluster_sync();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (threadIdx.x == 0) load(problem, stages, full, empty, cluster_rank());
        __syncwarp();
    } else {
        take_registers<240>();
        compute<Element>(problem, stages, vectors, full, empty, warp / kWarps - 1, warp % kWarps, lane);
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

tilerank_status check_served(const LinearArgs& args) {
    if (args.gamma == nullptr || args.residual == nullptr || args.bias == nullptr) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: bias, residual or gamma is NULL; it serves: all given");
    }
    if (args.weight_format != TILERANK_FORMAT_INTERLEAVED) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: weight_format is %d; it serves: 1 (interleaved)",
                      args.weight_format);
    }
    if (args.columns != kColumns) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: columns is %lld; it serves: %d",
                      static_cast<long long>(args.columns), kColumns);
    }
    if (args.depth % kDepth != 0 || args.depth > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: depth is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.depth), kDepth);
    }
    if (args.rows > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: rows is %lld; it serves: up to %d",
                      static_cast<long long>(args.rows), INT32_MAX / 2);
    }
    if (!aligned16(args.x, args.x_stride) || !aligned16(args.weight, args.weight_stride) ||
        !aligned16(args.out, args.out_stride) || !aligned16(args.residual, args.residual_stride) ||
        !aligned16(args.bias, 0) || !aligned16(args.gamma, 0) || !aligned16(args.beta, 0)) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: a row does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

template <typename Element>
tilerank_status launch_typed(const LinearArgs& args, void* stream) {
    const tilerank_status served = check_served(args);
    if (served != TILERANK_OK) return served;
    Problem problem{};
    if (!encode_tiles(&problem.x, args.x, args.dtype, args.rows, args.depth, args.x_stride, kRows, kRowBytes) ||
        !encode_tiles(&problem.weight, args.weight, args.dtype, args.columns, args.depth, args.weight_stride, kHalf,
                      kRowBytes) ||
        !encode_tiles(&problem.residual, args.residual, args.dtype, args.rows, args.columns, args.residual_stride, kRows,
                      kRowBytes)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant row_layernorm: the driver refused a tensor map");
    }
    problem.bias = args.bias, problem.gamma = args.gamma, problem.beta = args.beta;
    problem.out = args.out, problem.out_stride = args.out_stride;
    problem.rows = static_cast<int>(args.rows), problem.parts = static_cast<int>(args.depth / kDepth);
    problem.epsilon = static_cast<float>(args.epsilon), problem.overlap = args.overlap != 0;
    const int64_t pairs = (args.rows + 2 * kRows - 1) / (2 * kRows);
    const int error = launch_overlapped(problem.overlap, kernel<Element>, dim3(static_cast<unsigned>(2 * pairs)),
                                        dim3(kThreads), kSharedBytes, stream, problem);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant row_layernorm: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace row_layernorm

tilerank_status linear_row_layernorm(const LinearArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? row_layernorm::launch_typed<__half>(args, stream)
                                       : row_layernorm::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
