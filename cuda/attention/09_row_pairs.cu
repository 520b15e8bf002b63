// Row pairs: fused_packed with two rows a lane, so that each read of K or V from shared memory feeds two multiply-adds.
// Prediction: 280 us packed, from 370. Per step of 64 rows x 8 keys 1,307 issue slots (1,024 FFMA, 128 LDS), 203 us,
//   and 1,024 cycles of shared memory, 153 us; one warp works 80 us on 64 rows of 512 keys, which leaves SMs idle at
//   the end.
// Answer: metrics/<machine>/bench_attention_row_pairs.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace row_pairs {

constexpr int kTileKeys = 32;
constexpr int kStepKeys = 8;

// Rows of a lane: q and the accumulator of two rows of 32 take 128 registers, as many as one row of 64 does.
template <int D>
constexpr int kLaneRows = D <= 32 ? 2 : 1;

// Rows of a block: lane l has the rows l, l + 32, ...
template <int D>
constexpr int kRows = kWarpSize * kLaneRows<D>;

template <int D>
using Rows = float[kLaneRows<D>][D];
template <int D>
using Tile = float[kTileKeys][D];

// Keys step .. step+kStepKeys-1 of the tile. kWhole: every row sees all of them; else a lane's row r sees those below
// keys[r].
template <int D, bool kWhole>
__device__ __forceinline__ void attend(const Rows<D>& q, const Tile<D>& k_tile, const Tile<D>& v_tile, int step,
                                       const int (&keys)[kLaneRows<D>], SoftmaxState (&softmax)[kLaneRows<D>],
                                       Rows<D>& accumulator) {
    float score[kLaneRows<D>][kStepKeys] = {};
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {
#pragma unroll
        for (int d = 0; d < D; d += 4) {
            const float4 k = load_vector<float4>(&k_tile[step + i][d]);
#pragma unroll
            for (int r = 0; r < kLaneRows<D>; ++r) {
                score[r][i] += q[r][d] * k.x;
                score[r][i] += q[r][d + 1] * k.y;
                score[r][i] += q[r][d + 2] * k.z;
                score[r][i] += q[r][d + 3] * k.w;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows<D>; ++r) {
        float new_max = softmax[r].max;
#pragma unroll
        for (int i = 0; i < kStepKeys; ++i) {
            if (!kWhole) score[r][i] = hide_unless(step + i < keys[r], score[r][i]);
            new_max = fmaxf(new_max, score[r][i]);
        }
        scale_row(accumulator[r], softmax[r].rebase(new_max));
#pragma unroll
        for (int i = 0; i < kStepKeys; ++i) score[r][i] = softmax[r].add(score[r][i]);
    }
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {
#pragma unroll
        for (int d = 0; d < D; d += 4) {
            const float4 v = load_vector<float4>(&v_tile[step + i][d]);
#pragma unroll
            for (int r = 0; r < kLaneRows<D>; ++r) {
                accumulator[r][d] += score[r][i] * v.x;
                accumulator[r][d + 1] += score[r][i] * v.y;
                accumulator[r][d + 2] += score[r][i] * v.z;
                accumulator[r][d + 3] += score[r][i] * v.w;
            }
        }
    }
}

template <int D>
__global__ void __launch_bounds__(kWarpSize) kernel(AttentionArgs args, float q_factor, bool aligned) {
    SHARED(float, k_tile, [kTileKeys][D]);
    SHARED(float, v_tile, [kTileKeys][D]);
    const QueryBlock block = query_block(args, kRows<D>, blockIdx.x);
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int lane = threadIdx.x;

    Rows<D> q;
    int sees[kLaneRows<D>];
#pragma unroll
    for (int r = 0; r < kLaneRows<D>; ++r) {
        const int row = r * kWarpSize + lane;
        sees[r] = row_sees(block, row);
        // A row that does not exist computes what its block's first row does, and writes nothing.
        load_row(q[r], block.q + (row < block.rows ? row : 0) * args.q_token_stride, q_factor, aligned);
    }
    Rows<D> accumulator = {};
    SoftmaxState softmax[kLaneRows<D>];

    for (int first = 0; first < block.any_row_sees; first += kTileKeys) {
        const int tile_keys = keys_below(block.any_row_sees, first, kTileKeys);
        const int whole_keys = keys_below(block.every_row_sees, first, kTileKeys);
        int keys[kLaneRows<D>];
#pragma unroll
        for (int r = 0; r < kLaneRows<D>; ++r) keys[r] = keys_below(sees[r], first, kTileKeys);
        __syncwarp();  // the tile before is no longer read
        load_tile<D, kWarpSize>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, tile_keys, lane,
                                aligned);
        load_tile<D, kWarpSize>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, tile_keys, lane,
                                aligned);
        __syncwarp();
        int step = 0;
        for (; step + kStepKeys <= whole_keys; step += kStepKeys) {
            attend<D, true>(q, k_tile, v_tile, step, keys, softmax, accumulator);
        }
        for (; step < tile_keys; step += kStepKeys) {
            attend<D, false>(q, k_tile, v_tile, step, keys, softmax, accumulator);
        }
    }

#pragma unroll
    for (int r = 0; r < kLaneRows<D>; ++r) {
        const int row = r * kWarpSize + lane;
        if (row < block.rows) {
            store_row(block.out + row * args.out_token_stride, accumulator[r], normalizer(softmax[r].sum), aligned);
        }
    }
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("row_pairs", kernel<D>, query_blocks(args, kRows<D>), kWarpSize, 0, stream, args,
                         scale_log2(args), rows_aligned_16(args));
}

}  // namespace row_pairs

tilerank_status attention_row_pairs(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return row_pairs::launch_for<32>(args, stream);
        default:
            return row_pairs::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
