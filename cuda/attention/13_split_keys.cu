// Split keys: register tiles of 4 rows x 8 keys a lane without any exchange of weights. The four lanes that share rows
// keep the softmax and the accumulator of their own keys, in registers, and meet once, at the end.
// Prediction: 225 us packed, from 235. A tile of 32 rows x 32 keys takes 2,048 FFMA in 2,420 issue slots and 1,280
//   cycles of shared memory (lanes in pairs read the same 16 bytes): 187 us with the ends, 102 of shared memory; idle
//   SMs at the end a tenth.
// Answer: metrics/<machine>/bench_attention_split_keys.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace split_keys {

constexpr int kWarps = 2;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowLanes = 8;  // lanes of a warp that differ in their rows; the other factor 4 is split below
constexpr int kLaneRows = 4;
constexpr int kLaneKeys = 8;
constexpr int kWarpRows = kRowLanes * kLaneRows;
constexpr int kRows = kWarps * kWarpRows;

// How the four lanes that share rows split a tile: by keys at head_dim 32; above, first by columns, because 4 rows of
// more than 32 columns would not fit in a lane's registers. Scores are then summed over the lanes that share a key.
template <int D>
struct Shape {
    static constexpr int kColumnLanes = D <= 32 ? 1 : D <= 64 ? 2 : 4;
    static constexpr int kKeyLanes = 4 / kColumnLanes;
    static constexpr int kColumns = D / kColumnLanes;  // of a lane
    static constexpr int kTileKeys = kKeyLanes * kLaneKeys;
    // Rows of a tile lie so that the lanes of a read fall into different banks.
    static constexpr int kPitch = D + 4 * kColumnLanes;
    using Queries = float[kRows][kPitch];
    using Keys = float[kTileKeys][kPitch];
};

// A lane's place. Lanes that differ in bit 1 read the same keys, lanes that differ in bit 0 or 4 the same queries (as
// far as columns allow): 16-byte reads that lanes l and l^1, or l and l^2, share take 2 cycles instead of 4.
template <int D>
struct Lane {
    int row;     // rows row + 8 r of the warp's 32
    int key;     // keys key + kKeyLanes i of a tile
    int column;  // columns column + 4 kColumnLanes c + 0..3

    __device__ __forceinline__ explicit Lane(int lane) {
        const int share = (lane & 1) | (lane >> 4) << 1;
        row = lane >> 1 & 7;
        key = share / Shape<D>::kColumnLanes;
        column = share % Shape<D>::kColumnLanes * 4;
    }
};

template <int D>
using Accumulator = float[kLaneRows][Shape<D>::kColumns];

// One tile, the first kKeys of each lane's keys. kWhole: every row sees all of them; else a lane's row r sees those
// below keys[r].
template <int D, int kKeys, bool kWhole>
__device__ __forceinline__ void attend(const float (&q_rows)[kWarpRows][Shape<D>::kPitch],
                                       const typename Shape<D>::Keys& k_tile, const typename Shape<D>::Keys& v_tile,
                                       const Lane<D>& lane, const int (&keys)[kLaneRows],
                                       SoftmaxState (&softmax)[kLaneRows], Accumulator<D>& accumulator) {
    constexpr int kKeyLanes = Shape<D>::kKeyLanes;
    constexpr int kColumnLanes = Shape<D>::kColumnLanes;
    constexpr int kColumns = Shape<D>::kColumns;

    float score[kLaneRows][kKeys] = {};
#pragma unroll 2  // 256 FFMA: more would leave the instruction cache
    for (int c = 0; c < kColumns; c += 4) {
        const int column = lane.column + c * kColumnLanes;
        float4 q[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) q[r] = load_vector<float4>(&q_rows[lane.row + r * kRowLanes][column]);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const float4 k = load_vector<float4>(&k_tile[lane.key + i * kKeyLanes][column]);
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                score[r][i] += q[r].x * k.x;
                score[r][i] += q[r].y * k.y;
                score[r][i] += q[r].z * k.z;
                score[r][i] += q[r].w * k.w;
            }
        }
    }

    float tile_max[kLaneRows];
    bool lags = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        tile_max[r] = kLowestMax;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            if (kColumnLanes > 1) score[r][i] += __shfl_xor_sync(kFullMask, score[r][i], 1);
            if (kColumnLanes > 2) score[r][i] += __shfl_xor_sync(kFullMask, score[r][i], 16);
            if (!kWhole) score[r][i] = hide_unless(lane.key + i * kKeyLanes < keys[r], score[r][i]);
            tile_max[r] = fmaxf(tile_max[r], score[r][i]);
        }
        lags = lags || softmax[r].lags(tile_max[r]);
    }
    if (__any_sync(kFullMask, lags)) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            scale_row(accumulator[r], softmax[r].rebase_if_lagging(tile_max[r]));
        }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) score[r][i] = softmax[r].add(score[r][i]);
    }

#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 4) {
            const float4 v =
                load_vector<float4>(&v_tile[lane.key + i * kKeyLanes][lane.column + c * kColumnLanes]);
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) {
                accumulator[r][c] += score[r][i] * v.x;
                accumulator[r][c + 1] += score[r][i] * v.y;
                accumulator[r][c + 2] += score[r][i] * v.z;
                accumulator[r][c + 3] += score[r][i] * v.w;
            }
        }
    }
}

// Adds up what the lanes that share rows have found for their keys; all of them then hold the whole.
template <int kColumns>
__device__ __forceinline__ void merge(SoftmaxState& softmax, float (&accumulator)[kColumns], int lane_bit) {
    scale_row(accumulator, softmax.rebase(fmaxf(softmax.max, __shfl_xor_sync(kFullMask, softmax.max, lane_bit))));
    softmax.sum += __shfl_xor_sync(kFullMask, softmax.sum, lane_bit);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) accumulator[c] += __shfl_xor_sync(kFullMask, accumulator[c], lane_bit);
}

template <int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, float q_factor, bool aligned) {
    constexpr int kTileKeys = Shape<D>::kTileKeys;
    DynamicShared memory;
    typename Shape<D>::Queries& q_tile = *memory.take<typename Shape<D>::Queries>(1);
    typename Shape<D>::Keys* k_tiles = memory.take<typename Shape<D>::Keys>(2);
    typename Shape<D>::Keys* v_tiles = memory.take<typename Shape<D>::Keys>(2);
    SHARED(QueryBlock, shared_block, [1]);  // read where needed: in registers it would take some that the tiles need
    if (threadIdx.x == 0) shared_block[0] = query_block(args, kRows, blockIdx.x);
    __syncthreads();
    const QueryBlock& block = shared_block[0];
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    // From lane 0, which tells the compiler that it is one for the warp.
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int first_row = warp * kWarpRows;
    const Lane<D> lane(threadIdx.x % kWarpSize);

    const auto copy_tiles = [&](int first, int buffer) {
        const int keys = keys_below(block.any_row_sees, first, kTileKeys);
        copy_tile_async<D, kThreads>(k_tiles[buffer], block.k + first * args.k_token_stride, args.k_token_stride, keys,
                                     threadIdx.x, aligned);
        copy_tile_async<D, kThreads>(v_tiles[buffer], block.v + first * args.v_token_stride, args.v_token_stride, keys,
                                     threadIdx.x, aligned);
        copy_async_commit();
    };
    copy_tiles(0, 0);
    load_tile<D, kThreads>(q_tile, block.q, args.q_token_stride, block.rows, threadIdx.x, aligned, q_factor);

    Accumulator<D> accumulator = {};
    SoftmaxState softmax[kLaneRows];
    const auto& q_rows = *reinterpret_cast<const float(*)[kWarpRows][Shape<D>::kPitch]>(&q_tile[first_row]);

    int buffer = 0;
    for (int first = 0; first < block.any_row_sees; first += kTileKeys) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there for all warps, and the other buffer is no longer read
        if (first + kTileKeys < block.any_row_sees) copy_tiles(first + kTileKeys, buffer ^ 1);
        if (first_row < block.rows) {
            int keys[kLaneRows];
#pragma unroll
            for (int r = 0; r < kLaneRows; ++r) keys[r] = row_sees(block, first_row + lane.row + r * kRowLanes, first);
            const auto& k_tile = k_tiles[buffer];
            const auto& v_tile = v_tiles[buffer];
            if (first + kTileKeys <= block.every_row_sees) {
                attend<D, kLaneKeys, true>(q_rows, k_tile, v_tile, lane, keys, softmax, accumulator);
            } else if (first + kTileKeys / 2 < block.any_row_sees) {
                attend<D, kLaneKeys, false>(q_rows, k_tile, v_tile, lane, keys, softmax, accumulator);
            } else {
                attend<D, kLaneKeys / 2, false>(q_rows, k_tile, v_tile, lane, keys, softmax, accumulator);
            }
        }
        buffer ^= 1;
    }

#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        if (Shape<D>::kKeyLanes > 2) merge(softmax[r], accumulator[r], 1);
        if (Shape<D>::kKeyLanes > 1) merge(softmax[r], accumulator[r], 16);
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        const int row = first_row + lane.row + r * kRowLanes;
        // Each of the lanes that share rows writes some of them.
        if (r % Shape<D>::kKeyLanes != lane.key || row >= block.rows) continue;
        const float factor = normalizer(softmax[r].sum);
#pragma unroll
        for (int c = 0; c < Shape<D>::kColumns; c += 4) {
            store4(block.out + row * args.out_token_stride + lane.column + c * Shape<D>::kColumnLanes,
                   {accumulator[r][c] * factor, accumulator[r][c + 1] * factor, accumulator[r][c + 2] * factor,
                    accumulator[r][c + 3] * factor},
                   aligned);
        }
    }
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    constexpr size_t kSharedBytes = DynamicShared::bytes<typename Shape<D>::Queries>(1) +
                                    2 * DynamicShared::bytes<typename Shape<D>::Keys>(2);
    return launch_blocks("split_keys", kernel<D>, query_blocks(args, kRows), kThreads, kSharedBytes, stream, args,
                         scale_log2(args), rows_aligned_16(args));
}

}  // namespace split_keys

tilerank_status attention_split_keys(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return split_keys::launch_for<32>(args, stream);
        case 64:
            return split_keys::launch_for<64>(args, stream);
        case 96:
            return split_keys::launch_for<96>(args, stream);
        default:
            return split_keys::launch_for<128>(args, stream);
    }
}

}  // namespace tilerank
