// fp32 as three fp16 products: rows of x are split into a high and a low term between shared memory and the product's
// registers, the weights were split when they were loaded. 128 rows x 192 columns a block, the weights fetched once for
// the two blocks of a cluster; blocks stay and take tile after tile.
// Prediction: 85 us for 16,830 rows, 384 -> 1152: 45 GFLOP in fp16 at 550 TFLOP/s; 384 -> 1536 with GELU 140 us, of which
//   30 us are the error function behind the products. cuBLAS takes 330 us and 440 us for these in fp32 proper.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/linear.h"
#include "common/mma16.cuh"
#include "common/split_fp16.cuh"
#include "common/tma.cuh"

namespace tilerank {
namespace split_rows {

constexpr int kRows = 128;
constexpr int kColumns = 192;
constexpr int kDepth = 64;  // of a stage, and of one sum
constexpr int kXPartBytes = kRows * 128;  // 32 columns of x
constexpr int kXBytes = kDepth / 32 * kXPartBytes;
constexpr int kTermBytes = kColumns * kDepth * 2;  // high or low terms of the weights
constexpr int kStageBytes = kXBytes + 2 * kTermBytes;
constexpr int kStages = 2;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8;
constexpr int kThreads = 3 * 128;
constexpr int kWarps = 4;  // of a group

struct Problem {
    CUtensorMap x;
    CUtensorMap weight;
    const float* bias;
    float* out;
    int64_t out_stride;
    int rows;
    int row_pairs;     // pairs of tiles, one a cluster's block each
    int column_tiles;
    int depth;
    float x_scale;    // 2^x_exponent
    float sum_scale;  // 2^-(x_exponent + weight_exponent)
    bool overlap;
};

// Units are (row pair, column tile), column tiles first; a cluster takes a range of them.
struct Range {
    int begin;
    int end;
};
__device__ __forceinline__ Range units_of(const Problem& problem) {
    const int64_t units = static_cast<int64_t>(problem.row_pairs) * problem.column_tiles;
    const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
    return {static_cast<int>(units * cluster / clusters), static_cast<int>(units * (cluster + 1) / clusters)};
}

__device__ __forceinline__ void load(const Problem& problem, unsigned char* stages, uint64_t* full, uint64_t* empty,
                                     int rank) {
    const Range range = units_of(problem);
    if (problem.overlap) wait_for_previous();
    int stage = 0, turn = 0;
    for (int unit = range.begin; unit < range.end; ++unit) {
        const int row = (unit / problem.column_tiles * 2 + rank) * kRows;
        const int column = unit % problem.column_tiles * kColumns + rank * (kColumns / 2);
        for (int depth = 0; depth < problem.depth; depth += kDepth) {
            if (turn > 0) barrier_wait(&empty[stage], (turn - 1) & 1);
            barrier_expect(&full[stage], kStageBytes);
            unsigned char* x = stages + stage * kStageBytes;
            for (int part = 0; part < kDepth / 32; ++part) {
                copy_box(x + part * kXPartBytes, &problem.x, &full[stage], depth + part * 32, row);
            }
            unsigned char* weight = x + kXBytes + rank * (kTermBytes / 2);
            copy_box_to_cluster(weight, &problem.weight, &full[stage], depth, column, 3);
            copy_box_to_cluster(weight + kTermBytes, &problem.weight, &full[stage], problem.depth + depth, column, 3);
            if (++stage == kStages) stage = 0, ++turn;
        }
    }
}

// The terms of a warp's 16 rows and 16 columns, as fragments of m16n8k16: within the columns factor 4 t + 2 h + e stands
// where the product has 8 h + 2 t + e, so that a thread reads four neighbours at once.
struct Terms {
    uint32_t high[4];
    uint32_t low[4];
};

template <bool kGelu>
__device__ __forceinline__ void compute(const Problem& problem, const unsigned char* stages, uint64_t* full,
                                        uint64_t* empty, int rank, int group, int warp, int lane) {
    constexpr int kSteps = kDepth / 16;
    const Range range = units_of(problem);
    if (problem.overlap) wait_for_previous();  // out may be what the kernel before reads
    const uint32_t begin = shared_address(stages) / 16;
    // Eight lanes read rows four apart, whose 16-byte parts lie in different banks.
    const int rows_of_lane = lane / 8 + (lane / 4 & 1) * 4;
    int stage = 0, turn = 0;
    for (int unit = range.begin; unit < range.end; ++unit) {
        // A product's own sums are cut off, not rounded, at every step. So they begin anew with every stage, and the totals
        // are ordinary fp32 sums.
        Fragment totals[kColumns / 8] = {};
        Fragment sums[kColumns / 8];
        for (int depth = 0; depth < problem.depth; depth += kDepth) {
            Terms terms[kSteps];
            barrier_wait(&full[stage], turn & 1);
            const unsigned char* x = stages + stage * kStageBytes;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int low_rows = 0; low_rows < 2; ++low_rows) {
                    const int row = group * 64 + warp * 16 + low_rows * 8 + rows_of_lane;
                    const float4 four = load_vector<float4>(
                        x + step / 2 * kXPartBytes + swizzled_offset<128>(row, step % 2 * 64 + lane % 4 * 16));
                    const SplitPair first = split(four.x * problem.x_scale, four.y * problem.x_scale);
                    const SplitPair second = split(four.z * problem.x_scale, four.w * problem.x_scale);
                    terms[step].high[low_rows] = first.high, terms[step].low[low_rows] = first.low;
                    terms[step].high[low_rows + 2] = second.high, terms[step].low[low_rows + 2] = second.low;
                }
            }
            const uint32_t high = begin + (stage * kStageBytes + kXBytes) / 16, low = high + kTermBytes / 16;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                wgmma_k16<__half, kColumns, false>(sums, terms[step].high, tile_descriptor<128>(low + step * 2, 1), step > 0);
                wgmma_k16<__half, kColumns, false>(sums, terms[step].low, tile_descriptor<128>(high + step * 2, 1), 1);
                wgmma_k16<__half, kColumns, false>(sums, terms[step].high, tile_descriptor<128>(high + step * 2, 1), 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            if (lane < 2) barrier_arrive_at(&empty[stage], lane);
            if (++stage == kStages) stage = 0, ++turn;
#pragma unroll
            for (int block = 0; block < kColumns / 8; ++block) {
#pragma unroll
                for (int i = 0; i < 4; ++i) totals[block][i] += sums[block][i];
            }
        }

        // A quad's four threads have eight neighbouring columns of every 32 each: see TILERANK_FORMAT_INTERLEAVED.
        const int first_row = (unit / problem.column_tiles * 2 + rank) * kRows + group * 64 + warp * 16 + rows_of_lane;
        const int first_column = unit % problem.column_tiles * kColumns + lane % 4 * 8;
#pragma unroll
        for (int block = 0; block < kColumns / 32; ++block) {
            const int column = first_column + block * 32;
            float bias[8] = {};
            if (problem.bias != nullptr) {
                const float4 left = load_vector<float4>(problem.bias + column);
                const float4 right = load_vector<float4>(problem.bias + column + 4);
                bias[0] = left.x, bias[1] = left.y, bias[2] = left.z, bias[3] = left.w;
                bias[4] = right.x, bias[5] = right.y, bias[6] = right.z, bias[7] = right.w;
            }
#pragma unroll
            for (int low_rows = 0; low_rows < 2; ++low_rows) {
                float values[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float sum =
                        fmaf(totals[block * 4 + i / 2][low_rows * 2 + i % 2], problem.sum_scale, bias[i]);
                    values[i] = kGelu ? 0.5f * sum * (1.0f + erff(sum * 0.70710678f)) : sum;
                }
                const int row = first_row + low_rows * 8;
                if (row < problem.rows) {
                    float* out = problem.out + row * problem.out_stride + column;
                    store_vector(out, float4{values[0], values[1], values[2], values[3]});
                    store_vector(out + 4, float4{values[4], values[5], values[6], values[7]});
                }
            }
        }
    }
}

template <bool kGelu>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    unsigned char* stages = aligned_shared();
    uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * kStageBytes);
    uint64_t* empty = full + kStages;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], 2 * 2 * kWarps);
        }
        fence_barrier_init();
    }
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (threadIdx.x == 0) load(problem, stages, full, empty, rank);
        __syncwarp();
    } else {
        take_registers<240>();
        compute<kGelu>(problem, stages, full, empty, rank, warp / kWarps - 1, warp % kWarps, lane);
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

bool aligned16(const void* pointer, int64_t stride, int bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * bytes % 16 == 0;
}

tilerank_status check_served(const LinearArgs& args) {
    const tilerank_status usual = check_usual_ends("split_rows", args);
    if (usual != TILERANK_OK) return usual;
    if (args.gamma != nullptr) return refuse(TILERANK_UNSUPPORTED, "variant split_rows: gamma is given; it serves: NULL");
    if (args.weight_format != TILERANK_FORMAT_SPLIT) {
        return refuse(TILERANK_UNSUPPORTED, "variant split_rows: weight_format is %d; it serves: 2 (split)",
                      args.weight_format);
    }
    if (args.columns % kColumns != 0) {
        return refuse(TILERANK_UNSUPPORTED, "variant split_rows: columns is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.columns), kColumns);
    }
    if (args.depth % kDepth != 0 || args.depth > INT32_MAX / 4) {
        return refuse(TILERANK_UNSUPPORTED, "variant split_rows: depth is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.depth), kDepth);
    }
    // Units and rows are counted in 32 bits.
    if (args.rows > INT32_MAX / 2 || args.rows / (2 * kRows) * (args.columns / kColumns) > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant split_rows: rows is %lld, too many for %lld columns",
                      static_cast<long long>(args.rows), static_cast<long long>(args.columns));
    }
    if (!aligned16(args.x, args.x_stride, 4) || !aligned16(args.weight, args.weight_stride, 2) ||
        !aligned16(args.out, args.out_stride, 4) || !aligned16(args.bias, 0, 4)) {
        return refuse(TILERANK_UNSUPPORTED, "variant split_rows: a row does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

}  // namespace split_rows

tilerank_status linear_split_rows(const LinearArgs& args, void*, void* stream) {
    using namespace split_rows;
    const tilerank_status served = check_served(args);
    if (served != TILERANK_OK) return served;
    Problem problem{};
    if (!encode_tiles(&problem.x, args.x, TILERANK_FP32, args.rows, args.depth, args.x_stride, kRows) ||
        !encode_tiles(&problem.weight, args.weight, TILERANK_FP16, args.columns, 2 * args.depth, args.weight_stride,
                      kColumns / 2)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant split_rows: the driver refused a tensor map");
    }
    problem.bias = static_cast<const float*>(args.bias);
    problem.out = static_cast<float*>(args.out), problem.out_stride = args.out_stride;
    problem.rows = static_cast<int>(args.rows), problem.depth = static_cast<int>(args.depth);
    problem.row_pairs = static_cast<int>((args.rows + 2 * kRows - 1) / (2 * kRows));
    problem.column_tiles = static_cast<int>(args.columns / kColumns);
    problem.overlap = args.overlap != 0;
    problem.x_scale = std::ldexp(1.0f, args.x_exponent);
    problem.sum_scale = std::ldexp(1.0f, -args.x_exponent - args.weight_exponent);
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int64_t units = static_cast<int64_t>(problem.row_pairs) * problem.column_tiles;
    const int64_t clusters = units < processors / 2 ? units : processors / 2;
    const int error =
        launch_overlapped(problem.overlap, args.activation == TILERANK_ACTIVATION_GELU ? kernel<true> : kernel<false>,
                          dim3(static_cast<unsigned>(2 * clusters)), dim3(kThreads), kSharedBytes, stream, problem);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant split_rows: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace tilerank
