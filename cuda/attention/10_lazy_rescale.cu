// Lazy rescale: row_pairs, whose running maximum moves only when a score passes it by 2^8, by a vote of the warp. Until
// then nothing is multiplied down: fp32 carries weights up to 256 as well as weights up to 1.
// Prediction: 265 us packed, from 280. 64 FMUL and two exponentials of the 1,307 issue slots a step become a compare
//   and a vote; scores of N(0,1) inputs rarely rise by 2^8 after their first step.
// Answer: metrics/<machine>/bench_attention_lazy_rescale.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace lazy_rescale {

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
    float step_max[kLaneRows<D>];
    bool lags = false;
#pragma unroll
    for (int r = 0; r < kLaneRows<D>; ++r) {
        step_max[r] = kLowestMax;
#pragma unroll
        for (int i = 0; i < kStepKeys; ++i) {
            if (!kWhole) score[r][i] = hide_unless(step + i < keys[r], score[r][i]);
            step_max[r] = fmaxf(step_max[r], score[r][i]);
        }
        lags = lags || softmax[r].lags(step_max[r]);
    }
    if (__any_sync(kFullMask, lags)) {
#pragma unroll
        for (int r = 0; r < kLaneRows<D>; ++r) {
            scale_row(accumulator[r], softmax[r].rebase_if_lagging(step_max[r]));
        }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows<D>; ++r) {
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
    return launch_blocks("lazy_rescale", kernel<D>, query_blocks(args, kRows<D>), kWarpSize, 0, stream, args,
                         scale_log2(args), rows_aligned_16(args));
}

}  // namespace lazy_rescale

tilerank_status attention_lazy_rescale(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return lazy_rescale::launch_for<32>(args, stream);
        default:
            return lazy_rescale::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
