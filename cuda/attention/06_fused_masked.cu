// Fused and masked: fused with the key range right: key lengths (clamped here, on the device) and causal. All tiles are
// computed, as when lengths are not looked at before the scores exist, and scores out of range are replaced.
// Prediction: 720 us masked or not, from 700. A compare and a select a score are 2 issue slots of 92, and shared
//   memory, not issue slots, limits fused. The work on padding is still all done.
// Answer: metrics/<machine>/bench_attention_fused_masked.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace fused_masked {

constexpr int kRows = 32;      // one a lane
constexpr int kTileKeys = 32;  // 8 KB of K and V at head_dim 32: a full SM of such blocks holds them all
constexpr int kStepKeys = 8;   // scores in registers at a time; each step costs one rescaling of the accumulator

template <int D>
using Tile = float[kTileKeys][D];

// Keys step .. step+kStepKeys-1 of the tile, of which this lane's row sees those below `keys`.
template <int D>
__device__ __forceinline__ void attend(const float (&q)[D], const Tile<D>& k_tile, const Tile<D>& v_tile, int step,
                                       int keys, SoftmaxState& softmax, float (&accumulator)[D]) {
    float score[kStepKeys];
    float new_max = softmax.max;
#pragma unroll
    for (int i = 0; i < kStepKeys; ++i) {
        score[i] = hide_unless(step + i < keys, dot(q, k_tile[step + i]));
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

    const int sees = row_sees(block, row);

    for (int first = 0; first < args.k_len; first += kTileKeys) {
        const int tile_keys = keys_below(block.k_len, first, kTileKeys);
        const int keys = keys_below(sees, first, kTileKeys);
        __syncwarp();  // the tile before is no longer read
        load_tile<D, kRows>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, tile_keys, threadIdx.x,
                            aligned);
        load_tile<D, kRows>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, tile_keys, threadIdx.x,
                            aligned);
        __syncwarp();
        for (int step = 0; step < kTileKeys; step += kStepKeys) {
            attend(q, k_tile, v_tile, step, keys, softmax, accumulator);
        }
    }

    if (has_row) store_row(block.out + row * args.out_token_stride, accumulator, normalizer(softmax.sum), aligned);
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("fused_masked", kernel<D>, query_blocks(args, kRows), kRows, 0, stream, args, scale_log2(args),
                         rows_aligned_16(args));
}

}  // namespace fused_masked

tilerank_status attention_fused_masked(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return fused_masked::launch_for<32>(args, stream);
        default:
            return fused_masked::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
