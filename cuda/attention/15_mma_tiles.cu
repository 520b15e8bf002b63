// MMA tiles: both products on tensor cores. A warp has 16 query rows; its scores leave m16n8k16 in the registers in
// which the next one takes the weights, so they never touch shared memory. fp16 on sm_75 too; bfloat16 begins with the
// next rung.
// Prediction: 110 us packed in fp16. Exact online softmax with 16 rows a warp reached 66 us with asynchronous copies
//   and K, V resident; a copy that waits for each tile of 64 keys leaves the pipes idle for 1 us in about 2.
// Answer: metrics/<machine>/bench_attention_mma_tiles.json and docs/ladder.md.
#include "common/mma16.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace mma_tiles {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = 16;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kTileKeys = 64;
constexpr int kSteps = kTileKeys / 16;

// One tile. kWhole: every row sees all of its keys; else the lane's rows see those below sees[0] and sees[1].
template <int D, bool kWhole>
__device__ __forceinline__ void attend(const QueryFragments<D, 1>& q, const KeyTile<__half, kTileKeys, D>& k_tile,
                                       const KeyTile<__half, kTileKeys, D>& v_tile, const int (&sees)[2], int lane,
                                       float factor, SoftmaxState (&softmax)[2],
                                       Fragment (&accumulator)[1][D / 8]) {
    Fragment scores[kSteps][1][2] = {};
    float tile_max[2] = {kLowestReference, kLowestReference};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        score_keys<__half, D>(scores[step], q, k_tile, step * 16, lane);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            Fragment& score = scores[step][0][block];
            if (!kWhole) hide_keys(score, step * 16 + block * 8, sees, lane, hidden_score(factor));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                score[i] *= factor;
                tile_max[i / 2] = fmaxf(tile_max[i / 2], score[i]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float rescale = softmax[half].rebase(fmaxf(softmax[half].max, quad_max(tile_max[half])));
#pragma unroll
        for (int column = 0; column < D / 8; ++column) {
            accumulator[0][column][half * 2] *= rescale;
            accumulator[0][column][half * 2 + 1] *= rescale;
        }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t weights[1][4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const Fragment& score = scores[step][0][block];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float low = softmax[half].add(score[half * 2]);
                const float high = softmax[half].add(score[half * 2 + 1]);
                weights[0][block * 2 + half] = pack16<__half>(low, high);
            }
        }
        add_values<__half, D>(accumulator, weights, v_tile, step * 16, lane);
    }
}

template <int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, float factor, bool aligned) {
    SHARED(__half, k_tile, [kTileKeys][kPitch16<D>]);
    SHARED(__half, v_tile, [kTileKeys][kPitch16<D>]);
    const QueryRows<__half> block = query_rows_at<__half>(args, kRows, blockIdx.x);
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int lane = threadIdx.x % kWarpSize;
    const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows;
    const int rows = block.rows - first_row;  // of this warp; it may have none and then only copies

    QueryFragments<D, 1> q = {};
    if (rows > 0) {
        load_queries<D, 1>(q, block.q + first_row * args.q_token_stride, args.q_token_stride, rows, lane, aligned);
    }
    Fragment accumulator[1][D / 8] = {};
    SoftmaxState softmax[2];

    for (int first = 0; first < block.any_row_sees; first += kTileKeys) {
        __syncthreads();  // the tile before is no longer read
        const int keys = block.any_row_sees - first;
        load_keys<D, kThreads>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys, threadIdx.x,
                               aligned);
        load_keys<D, kThreads>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, keys, threadIdx.x,
                               aligned);
        __syncthreads();
        if (rows <= 0) continue;
        int sees[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) sees[half] = block.row_sees(first_row + half * 8 + lane / 4) - first;
        if (first + kTileKeys <= block.every_row_sees) {
            attend<D, true>(q, k_tile, v_tile, sees, lane, factor, softmax, accumulator);
        } else {
            attend<D, false>(q, k_tile, v_tile, sees, lane, factor, softmax, accumulator);
        }
    }
    if (rows <= 0) return;
    const float factors[2] = {normalizer(quad_sum(softmax[0].sum)), normalizer(quad_sum(softmax[1].sum))};
    store_rows<D>(block.out + first_row * args.out_token_stride, args.out_token_stride, accumulator[0], factors, rows,
                  lane, aligned);
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("mma_tiles", kernel<D>, row_blocks(args, kRows), kThreads, 0, stream, args,
                         nonzero_scale_log2(args), rows16_aligned(args));
}

}  // namespace mma_tiles

tilerank_status attention_mma_tiles(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return mma_tiles::launch_for<32>(args, stream);
        case 64:
            return mma_tiles::launch_for<64>(args, stream);
        case 80:
            return mma_tiles::launch_for<80>(args, stream);
        case 96:
            return mma_tiles::launch_for<96>(args, stream);
        default:
            return mma_tiles::launch_for<128>(args, stream);
    }
}

}  // namespace tilerank
