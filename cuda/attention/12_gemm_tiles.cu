// GEMM tiles: both products as register-tiled matrix products. A lane computes 8 rows x 8 keys of the scores and 8 rows
// x 4 columns of the result (head_dim 32); in between the weights change lanes through shared memory.
// Prediction: 235 us packed, from 250. A tile of 32 rows x 64 keys takes 4,096 FFMA in 5,060 issue slots, 190 us with
//   the ends, and 2,820 cycles of shared memory, 110 us instead of 163; three warps a scheduler instead of two, blocks
//   end sooner.
// Answer: metrics/<machine>/bench_attention_gemm_tiles.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace gemm_tiles {

constexpr int kWarps = 2;
constexpr int kThreads = kWarps * kWarpSize;

// At least: three warps a scheduler and 168 registers a lane, or two and 255.
template <int D>
constexpr int kBlocksPerSm = D <= 32 ? 6 : 4;

constexpr int kRowLanes = 4;     // lanes of a warp that differ in their rows
constexpr int kKeyLanes = 8;     // and in their keys (scores) or columns (result)
constexpr int kLaneRows = 8;
constexpr int kLaneKeys = 8;
constexpr int kWarpRows = kRowLanes * kLaneRows;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kTileKeys = kKeyLanes * kLaneKeys;
constexpr int kExchangeKeys = kTileKeys / 2;  // keys whose weights change lanes at a time: spares shared memory

// Rows in shared memory are 4 words longer than their content: lanes that read one column of 8 rows, 16 bytes each,
// then fall into different banks. V is read along its rows and needs no such gap.
template <int D>
constexpr int kPitch = D + 4;
template <int D>
using Queries = float[kRows][kPitch<D>];
template <int D>
using Keys = float[kTileKeys][kPitch<D>];
template <int D>
using Values = float[kTileKeys][D];
using Weights = float[kExchangeKeys][kWarpRows + 4];  // of one warp: [key][row_lane * kLaneRows + r]

template <int D>
using Accumulator = float[kLaneRows][D / kKeyLanes];

// A lane's place: rows row + 4 r of the warp's 32, keys key + 8 i of the tile, columns 4 key + 32 c + 0..3 of the
// result. Lanes that differ in bit 0 read the same queries and weights, those that differ in bit 1 the same keys and
// values: 16-byte reads that lanes l and l^1, or l and l^2, share take 2 cycles instead of 4. Eight neighbours store
// weights into different banks.
struct Lane {
    int row;
    int key;

    __device__ __forceinline__ explicit Lane(int lane)
        : row((lane & 2) | lane >> 4), key((lane & 1) | (lane >> 1 & 6)) {}
};

// The largest value among the lanes that share rows.
__device__ __forceinline__ float max_over_keys(float value) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 4));
    return fmaxf(value, __shfl_xor_sync(kFullMask, value, 8));
}

__device__ __forceinline__ float sum_over_keys(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    value += __shfl_xor_sync(kFullMask, value, 4);
    return value + __shfl_xor_sync(kFullMask, value, 8);
}

// score[r][i] += <q row r, k row i> for the first kKeys of a lane's keys.
template <int D, int kKeys>
__device__ __forceinline__ void add_scores(float (&score)[kLaneRows][kLaneKeys], const float* q_row,
                                           const float* k_row) {
#pragma unroll 1  // 256 FFMA
    for (int d = 0; d < D; d += 4) {
        float4 q[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) q[r] = load_vector<float4>(q_row + r * kRowLanes * kPitch<D> + d);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const float4 k = load_vector<float4>(k_row + i * kKeyLanes * kPitch<D> + d);
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                score[r][i] += q[r].x * k.x;
                score[r][i] += q[r].y * k.y;
                score[r][i] += q[r].z * k.z;
                score[r][i] += q[r].w * k.w;
            }
        }
    }
}

// accumulator += weights x values for kExchangeKeys keys.
template <int D>
__device__ __forceinline__ void add_values(Accumulator<D>& accumulator, const float* weight_row, const float* v_row) {
#pragma unroll 4
    for (int key = 0; key < kExchangeKeys; ++key) {
        float weight[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; r += 4) {
            const float4 four = load_vector<float4>(weight_row + key * (kWarpRows + 4) + r);
            weight[r] = four.x, weight[r + 1] = four.y, weight[r + 2] = four.z, weight[r + 3] = four.w;
        }
#pragma unroll
        for (int c = 0; c < D / kKeyLanes; c += 4) {
            const float4 v = load_vector<float4>(v_row + key * D + c * kKeyLanes);
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                accumulator[r][c] += weight[r] * v.x;
                accumulator[r][c + 1] += weight[r] * v.y;
                accumulator[r][c + 2] += weight[r] * v.z;
                accumulator[r][c + 3] += weight[r] * v.w;
            }
        }
    }
}

// Makes scores weights. kWhole: every row sees the tile's keys; else a lane's row r sees those below keys[r]. Beyond
// kKeys of a lane there are none.
template <int D, int kKeys, bool kWhole>
__device__ __forceinline__ void weigh(float (&score)[kLaneRows][kLaneKeys], const Lane& lane,
                                      const int (&keys)[kLaneRows], SoftmaxState (&softmax)[kLaneRows],
                                      Accumulator<D>& accumulator) {
    float tile_max[kLaneRows];
    bool lags = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        tile_max[r] = kLowestMax;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            if (!kWhole) score[r][i] = hide_unless(lane.key + i * kKeyLanes < keys[r], score[r][i]);
            tile_max[r] = fmaxf(tile_max[r], score[r][i]);
        }
        lags = lags || softmax[r].lags(tile_max[r]);
    }
    if (__any_sync(kFullMask, lags)) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            scale_row(accumulator[r], softmax[r].rebase_if_lagging(max_over_keys(tile_max[r])));
        }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) score[r][i] = softmax[r].add(score[r][i]);
    }
}

// Hands the weights of a lane's keys first .. first+3 to the lanes that hold their columns of the result.
template <int D>
__device__ __forceinline__ void exchange(const float (&score)[kLaneRows][kLaneKeys], int first, const Lane& lane,
                                         Weights& weights) {
    __syncwarp();  // the weights before are no longer read
#pragma unroll
    for (int i = 0; i < kLaneKeys / 2; ++i) {
#pragma unroll
        for (int r = 0; r < kLaneRows; r += 4) {
            store_vector(&weights[lane.key + i * kKeyLanes][lane.row * kLaneRows + r],
                         float4{score[r][first + i], score[r + 1][first + i], score[r + 2][first + i],
                                score[r + 3][first + i]});
        }
    }
    __syncwarp();
}

template <int D>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<D>) kernel(AttentionArgs args, float q_factor, bool aligned) {
    DynamicShared memory;
    Queries<D>& q_tile = *memory.take<Queries<D>>(1);
    Keys<D>& k_tile = *memory.take<Keys<D>>(1);
    Values<D>& v_tile = *memory.take<Values<D>>(1);
    Weights* all_weights = memory.take<Weights>(kWarps);
    SHARED(QueryBlock, shared_block, [1]);  // read where needed: in registers it would take some that the tiles need
    if (threadIdx.x == 0) shared_block[0] = query_block(args, kRows, blockIdx.x);
    __syncthreads();
    const QueryBlock& block = shared_block[0];
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    // From lane 0, which tells the compiler that it is one for the warp.
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int first_row = warp * kWarpRows;
    const Lane lane(threadIdx.x % kWarpSize);
    Weights& weights = all_weights[warp];

    const auto copy_keys = [&](int first) {
        copy_tile_async<D, kThreads>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride,
                                     keys_below(block.any_row_sees, first, kTileKeys), threadIdx.x, aligned);
        copy_async_commit();
    };
    const auto copy_values = [&](int first) {
        copy_tile_async<D, kThreads>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride,
                                     keys_below(block.any_row_sees, first, kTileKeys), threadIdx.x, aligned);
        copy_async_commit();
    };
    copy_keys(0);
    load_tile<D, kThreads>(q_tile, block.q, args.q_token_stride, block.rows, threadIdx.x, aligned, q_factor);

    Accumulator<D> accumulator = {};
    SoftmaxState softmax[kLaneRows];
    const float* q_row = q_tile[first_row + lane.row];
    const float* k_row = k_tile[lane.key];
    const float* weight_row = &weights[0][lane.row * kLaneRows];
    const float* v_row = &v_tile[0][lane.key * 4];

    for (int first = 0; first < block.any_row_sees; first += kTileKeys) {
        const bool has_rows = first_row < block.rows;
        const bool is_short = block.any_row_sees - first <= kExchangeKeys;  // a last tile of at most half the keys
        float score[kLaneRows][kLaneKeys] = {};

        // Each tensor has one buffer, which is copied into while the other product is computed.
        copy_async_wait<0>();
        __syncthreads();  // these keys are there for all warps; the values before are no longer read
        copy_values(first);
        if (has_rows && !is_short) add_scores<D, kLaneKeys>(score, q_row, k_row);
        if (has_rows && is_short) add_scores<D, kLaneKeys / 2>(score, q_row, k_row);

        copy_async_wait<0>();
        __syncthreads();  // the same for these values and the keys before
        if (first + kTileKeys < block.any_row_sees) copy_keys(first + kTileKeys);
        if (!has_rows) continue;
        int keys[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) keys[r] = row_sees(block, first_row + lane.row + r * kRowLanes, first);
        if (first + kTileKeys <= block.every_row_sees) {
            weigh<D, kLaneKeys, true>(score, lane, keys, softmax, accumulator);
        } else if (!is_short) {
            weigh<D, kLaneKeys, false>(score, lane, keys, softmax, accumulator);
        } else {
            weigh<D, kLaneKeys / 2, false>(score, lane, keys, softmax, accumulator);
        }
        exchange<D>(score, 0, lane, weights);
        add_values<D>(accumulator, weight_row, v_row);
        if (is_short) continue;
        exchange<D>(score, kLaneKeys / 2, lane, weights);
        add_values<D>(accumulator, weight_row, v_row + kExchangeKeys * D);
    }

#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        const float factor = normalizer(sum_over_keys(softmax[r].sum));
        const int row = first_row + lane.row + r * kRowLanes;
        if (row < block.rows) {
#pragma unroll
            for (int c = 0; c < D / kKeyLanes; c += 4) {
                store4(block.out + row * args.out_token_stride + lane.key * 4 + c * kKeyLanes,
                       {accumulator[r][c] * factor, accumulator[r][c + 1] * factor, accumulator[r][c + 2] * factor,
                        accumulator[r][c + 3] * factor},
                       aligned);
            }
        }
    }
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    constexpr size_t kSharedBytes = DynamicShared::bytes<Queries<D>>(1) + DynamicShared::bytes<Keys<D>>(1) +
                                    DynamicShared::bytes<Values<D>>(1) + DynamicShared::bytes<Weights>(kWarps);
    return launch_blocks("gemm_tiles", kernel<D>, query_blocks(args, kRows), kThreads, kSharedBytes, stream, args,
                         scale_log2(args), rows_aligned_16(args));
}

}  // namespace gemm_tiles

tilerank_status attention_gemm_tiles(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return gemm_tiles::launch_for<32>(args, stream);
        default:
            return gemm_tiles::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
