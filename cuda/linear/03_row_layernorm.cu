// The whole row of 384 columns is one block's, so that bias, residual and LayerNorm are the end of the product: 128 rows
// a block, 64 a warpgroup, the weights fetched once for the two blocks of a cluster.
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
constexpr int kRowBytes = kPartColumns * 2;
constexpr int kXBytes = kRows * kRowBytes;
constexpr int kWeightBytes = kColumns * kRowBytes;
constexpr int kStageBytes = kXBytes + kWeightBytes;
constexpr int kStages = 3;
constexpr int kThreads = 3 * 128;
constexpr int kWarps = 4;  // of a group

struct Problem {
    CUtensorMap x;
    CUtensorMap weight;
    const void* bias;
    const void* residual;
    const void* gamma;
    const void* beta;
    void* out;
    int64_t residual_stride;
    int64_t out_stride;
    int rows;
    int parts;  // of depth
    float epsilon;
};

__device__ __forceinline__ void load(const Problem& problem, unsigned char* stages, uint64_t* full, uint64_t* empty,
                                     int rank) {
    for (int part = 0, stage = 0, turn = 0; part < problem.parts; ++part) {
        if (turn > 0) barrier_wait(&empty[stage], (turn - 1) & 1);
        barrier_expect(&full[stage], kStageBytes);
        unsigned char* x = stages + stage * kStageBytes;
        copy_box(x, &problem.x, &full[stage], part * kPartColumns, static_cast<int>(blockIdx.x) * kRows);
        copy_box_to_cluster(x + kXBytes + rank * (kWeightBytes / 2), &problem.weight, &full[stage], part * kPartColumns,
                            rank * kHalf, 3);
        if (++stage == kStages) stage = 0, ++turn;
    }
}

template <typename Element>
__device__ __forceinline__ void unpack8(float (&values)[8], const void* source) {
    const uint4 packed = load_vector<uint4>(static_cast<const Element*>(source));
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpack16<Element>(words[i]);
        values[2 * i] = both.x, values[2 * i + 1] = both.y;
    }
}

template <typename Element>
__device__ __forceinline__ void compute(const Problem& problem, unsigned char* stages, uint64_t* full, uint64_t* empty,
                                        int group, int warp, int lane) {
    const uint32_t begin = shared_address(stages) / 16;
    Fragment sums[2][kHalf / 8];
    int last_stage = 0;
    for (int part = 0, stage = 0, turn = 0; part < problem.parts; ++part) {
        barrier_wait(&full[stage], turn & 1);
        const uint32_t x = begin + (stage * kStageBytes + group * (kXBytes / 2)) / 16;
        const uint32_t weight = begin + (stage * kStageBytes + kXBytes) / 16;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kPartColumns / 16; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_shared_k16<Element, kHalf>(
                    sums[half], tile_descriptor<128>(x + step * 2, 1),
                    tile_descriptor<128>(weight + half * (kWeightBytes / 2 / 16) + step * 2, 1), part > 0 || step > 0);
            }
        }
        wgmma_commit();
        if (part > 0) {
            wgmma_wait<1>();
            if (lane < 2) barrier_arrive_at(&empty[last_stage], lane);
        }
        last_stage = stage;
        if (++stage == kStages) stage = 0, ++turn;
    }
    wgmma_wait<0>();

    // A quad's four threads have eight neighbouring columns of every 32 each: see TILERANK_FORMAT_INTERLEAVED.
    const int first_row = static_cast<int>(blockIdx.x) * kRows + group * 64 + warp * 16 + lane / 4;
    const int first_column = lane % 4 * 8;
    const bool exists[2] = {first_row < problem.rows, first_row + 8 < problem.rows};
    const Element* residual[2];
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        residual[low] = static_cast<const Element*>(problem.residual) +
                        (exists[low] ? first_row + low * 8 : 0) * problem.residual_stride + first_column;
    }
    float mean[2] = {}, scale[2] = {};
#pragma unroll
    for (int block = 0; block < kColumns / 32; ++block) {
        float bias[8], values[8];
        unpack8<Element>(bias, static_cast<const Element*>(problem.bias) + first_column + block * 32);
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            unpack8<Element>(values, residual[low] + block * 32);
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
#pragma unroll
    for (int block = 0; block < kColumns / 32; ++block) {
        float gamma[8], beta[8];
        unpack8<Element>(gamma, static_cast<const Element*>(problem.gamma) + first_column + block * 32);
        unpack8<Element>(beta, static_cast<const Element*>(problem.beta) + first_column + block * 32);
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
                store_vector(static_cast<Element*>(problem.out) + (first_row + low * 8) * problem.out_stride +
                                 first_column + block * 32,
                             uint4{words[0], words[1], words[2], words[3]});
            }
        }
    }
}

template <typename Element>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(kStages * kStageBytes + 1024);
    uint64_t* full = memory.take<uint64_t>(kStages);
    uint64_t* empty = memory.take<uint64_t>(kStages);
    unsigned char* stages = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], 2 * 2 * kWarps);
        }
        fence_barrier_init();
    }
    cluster_sync();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (threadIdx.x == 0) load(problem, stages, full, empty, cluster_rank());
        __syncwarp();
    } else {
        take_registers<240>();
        compute<Element>(problem, stages, full, empty, warp / kWarps - 1, warp % kWarps, lane);
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
    if (args.depth % kPartColumns != 0 || args.depth > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant row_layernorm: depth is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.depth), kPartColumns);
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
    if (!encode_tiles(&problem.x, args.x, args.dtype, args.rows, args.depth, args.x_stride, kRows) ||
        !encode_tiles(&problem.weight, args.weight, args.dtype, args.columns, args.depth, args.weight_stride, kHalf)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant row_layernorm: the driver refused a tensor map");
    }
    problem.bias = args.bias, problem.residual = args.residual, problem.gamma = args.gamma, problem.beta = args.beta;
    problem.out = args.out, problem.residual_stride = args.residual_stride, problem.out_stride = args.out_stride;
    problem.rows = static_cast<int>(args.rows), problem.parts = static_cast<int>(args.depth / kPartColumns);
    problem.epsilon = static_cast<float>(args.epsilon);
    const int64_t pairs = (args.rows + 2 * kRows - 1) / (2 * kRows);
    const int error = launch(kernel<Element>, dim3(static_cast<unsigned>(2 * pairs)), dim3(kThreads),
                             DynamicShared::bytes<unsigned char>(kStages * kStageBytes + 1024) +
                                 2 * DynamicShared::bytes<uint64_t>(kStages),
                             stream, problem);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant row_layernorm: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace row_layernorm

tilerank_status linear_row_layernorm(const LinearArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? row_layernorm::launch_typed<__half>(args, stream)
                                       : row_layernorm::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
