// Fused and packed: fused_skip for sequences that lie one after another. Blocks beyond the end of their sequence leave
// at once, so that padding costs no rows either. Padded input is served as before.
// Prediction: 370 us packed, from 500 padded: length x length scores a head remain, 74.6 M instead of 103 M, and 16
//   rows are lost at the end of a sequence. 300 us of shared memory, 225 of issue slots.
// Answer: metrics/<machine>/bench_attention_fused_packed.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace fused_packed {

constexpr int kRows = 32;      // one a lane
constexpr int kTileKeys = 32;  // 8 KB of K and V at head_dim 32: a full SM of such blocks holds them all
constexpr int kStepKeys = 8;   // scores in registers at a time; each step costs one rescaling of the accumulator

template <int D>
using Tile = float[kTileKeys][D];

// Keys step .. step+kStepKeys-1 of the tile. kWhole: this lane's row sees all of them; else those below `keys`.
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
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int row = threadIdx.x;
    const bool has_row = row < block.rows;

    float q[D];
    load_row(q, block.q + (has_row ? row : 0) * args.q_token_stride, q_factor, aligned);
    float accumulator[D] = {};
    SoftmaxState softmax;

    const int sees = row_sees(block, row);

    for (int first = 0; first < block.any_row_sees; first += kTileKeys) {
        const int tile_keys = keys_below(block.any_row_sees, first, kTileKeys);
        const int whole_keys = keys_below(block.every_row_sees, first, kTileKeys);
        const int keys = keys_below(sees, first, kTileKeys);
        __syncwarp();  // the tile before is no longer read
        load_tile<D, kRows>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, tile_keys, threadIdx.x,
                            aligned);
        load_tile<D, kRows>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, tile_keys, threadIdx.x,
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

    if (has_row) store_row(block.out + row * args.out_token_stride, accumulator, normalizer(softmax.sum), aligned);
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("fused_packed", kernel<D>, query_blocks(args, kRows), kRows, 0, stream, args, scale_log2(args),
                         rows_aligned_16(args));
}

}  // namespace fused_packed

tilerank_status attention_fused_packed(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return fused_packed::launch_for<32>(args, stream);
        default:
            return fused_packed::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
