// Fused: one sweep over the keys instead of two. The softmax runs along, eight keys a step, in base 2; what was
// accumulated is multiplied down as its maximum rises. A block is one warp with 32 rows: many small blocks.
// Prediction: 700 us unmasked, from 1,000. A score now takes 16 reads of 16 bytes instead of 24: 600 us of shared
//   memory. Issue slots (713 for 8 keys, 512 of them FFMA) would allow 450 us.
// Answer: metrics/<machine>/bench_attention_fused.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace fused {

constexpr int kRows = 32;      // one a lane
constexpr int kTileKeys = 32;  // 8 KB of K and V at head_dim 32: a full SM of such blocks holds them all
constexpr int kStepKeys = 8;   // scores in registers at a time; each step costs one rescaling of the accumulator

template <int D>
using Tile = float[kTileKeys][D];

// Keys step .. step+kStepKeys-1 of the tile. kWhole: all of them exist; else those from `keys` on are left out.
template <int D, bool kWhole>
__device__ __forceinline__ void attend(const float (&q)[D], const Tile<D>& k_tile, const Tile<D>& v_tile, int step,
                                       int keys, SoftmaxState& softmax, float (&accumulator)[D]) {
    float score[kStepKeys];
    float new_max = softmax.max;
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {
        score[i] = dot(q, k_tile[step + i]);
        if (!kWhole) score[i] = hide_unless(step + i < keys, score[i]);
        new_max = fmaxf(new_max, score[i]);
    }
    scale_row(accumulator, softmax.rebase(new_max));
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) add_scaled(accumulator, softmax.add(score[i]), v_tile[step + i]);
}

template <int D>
__global__ void __launch_bounds__(kRows) kernel(AttentionArgs args, float q_factor, bool aligned) {
    SHARED(float, k_tile, [kTileKeys][D]);
    SHARED(float, v_tile, [kTileKeys][D]);
    const QueryBlock block = query_block(args, kRows, blockIdx.x);
    const int row = threadIdx.x;
    const bool has_row = row < block.rows;

    float q[D];
    load_row(q, block.q + (has_row ? row : 0) * args.q_token_stride, q_factor, aligned);
    float accumulator[D] = {};
    SoftmaxState softmax;

    for (int first = 0; first < block.k_len; first += kTileKeys) {
        const int keys = keys_below(block.k_len, first, kTileKeys);
        __syncwarp();  // the tile before is no longer read
        load_tile<D, kRows>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys, threadIdx.x,
                            aligned);
        load_tile<D, kRows>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, keys, threadIdx.x,
                            aligned);
        __syncwarp();
        int step = 0;
        for (; step + kStepKeys <= keys; step += kStepKeys) {
            attend<D, true>(q, k_tile, v_tile, step, keys, softmax, accumulator);
        }
        if (step < keys) attend<D, false>(q, k_tile, v_tile, step, keys, softmax, accumulator);
    }

    if (has_row) store_row(block.out + row * args.out_token_stride, accumulator, normalizer(softmax.sum), aligned);
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("fused", kernel<D>, query_blocks(args, kRows), kRows, 0, stream, args, scale_log2(args),
                         rows_aligned_16(args));
}

}  // namespace fused

tilerank_status attention_fused(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return fused::launch_for<32>(args, stream);
        default:
            return fused::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
