// Split wgmma: split_fp16 on Hopper's warpgroup products (wgmma), which read k and v from shared memory themselves and
// run beside the block's other work: while the scores of a tile are computed, the next tile is split; while the first
// weights meet v, the next weights are found.
// Prediction: 62 us packed, from 100. A tile of 64 rows x 64 keys takes the tensor cores 384 cycles and each scheduler
//   410 instructions, together about 480: 44 us with a fifth of padding; ends, latency and idle SMs 18 us.
// Answer: metrics/<machine>/bench_attention_split_wgmma.json and docs/ladder.md.
#include "common/split_fp16.cuh"
#include "common/warpgroup_mma.cuh"

namespace tilerank {
namespace split_wgmma {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * kWarpgroupSize;
constexpr int kTileKeys = 64;
constexpr int kRows = kGroups * 64;
constexpr int kBlocksPerSm = 2;
constexpr int kD = 32;
using Splitter = TileSplitter<kD, kThreads, kTileKeys>;

// Sums of a warp's 16 rows over keys, as m16n8k16 has them: 16 elements of products of high terms, 16 of the others.
// Kept apart, since rounding off after every product would cost the large sums three times as much.
__device__ __forceinline__ void scale_sums(float (&sums)[16], int half, float factor) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) sums[i + half * 2] *= factor, sums[i + half * 2 + 1] *= factor;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor, bool aligned) {
    DynamicShared memory;
    Splitter splitter(memory, threadIdx.x, aligned);
    QueryBlock& block = *memory.take<QueryBlock>(1);
    if (threadIdx.x == 0) block = query_block(args, kRows, blockIdx.x);
    __syncthreads();
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int tiles = (block.any_row_sees + kTileKeys - 1) / kTileKeys;
    const int lane = threadIdx.x % kWarpSize;
    // From lane 0, which tells the compiler that it is one for the warp.
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int first_row = warp * 16;
    const bool works = warp / 4 * 64 < block.rows;  // one for the warpgroup

    for (int tile = 0; tile < 2 && tile < tiles; ++tile) splitter.copy(block, args, tile, tile);
    SplitQueries<kD> q;
    q.load(block, args.q_token_stride, first_row, factor, aligned);
    float sums_high[16] = {}; float sums_low[16] = {};
    SplitSoftmax<> softmax[2];
    Trust trust;
    TileFactors factors;
    TileFactors before;
    const auto split_tile = [&](int tile) {
        Span k_span, v_span;
        splitter.read_spans(tile, k_span, v_span);
        before = factors;
        factors = factors.next(k_span, v_span);
        trust.add_tile(k_span, v_span, q, fmaxf(q.inverse[0], q.inverse[1]) * inverse_power_of_two(factors.k_field));
        splitter.split_tile(tile, power_of_two(factors.k_field), power_of_two(factors.v_field));
        if (tile + 2 < tiles) splitter.copy(block, args, tile + 2, tile + 2);
    };
    if (tiles > 0) {
        copy_async_wait<0>();
        splitter.measure(0);
        __syncthreads();
        split_tile(0);
        if (tiles > 1) splitter.measure(1);
    }

    const auto prepare = [&](int tile) {
        if (tile + 2 < tiles) splitter.measure(tile + 2);
        if (tile + 1 < tiles) split_tile(tile + 1);
    };
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<0>();
        fence_shared_for_products();
        __syncthreads();  // the halves of this tile and the spans of the next are there; the other halves are read
        const int first = tile * kTileKeys;
        const float v_change = tile == 0 ? 1.0f : factors.v_change(before);
        const float k_inverse = inverse_power_of_two(factors.k_field);
        const __half* k_panel = splitter.k_halves[tile & 1][0];
        const __half* v_panel = splitter.v_halves[tile & 1][0];

        float score[32];
        if (!works) {
            prepare(tile);
            continue;
        }
        {
            const uint64_t k = matrix_descriptor(k_panel);
            hold(score);
            warpgroup_arrive();
            // Small products first: the sum is rounded off in its last place only when the large ones join. A step of
            // 16 columns is 2 in a descriptor, the low terms are 4 further on.
            multiply_64x64<false>(score, q.high[0], k + 4, false);
            multiply_64x64<false>(score, q.high[1], k + 6, true);
            multiply_64x64<false>(score, q.low[0], k, true);
            multiply_64x64<false>(score, q.low[1], k + 2, true);
            multiply_64x64<false>(score, q.high[0], k, true);
            multiply_64x64<false>(score, q.high[1], k + 2, true);
            warpgroup_commit();
        }
        prepare(tile);


        warpgroup_wait<0>();
        hold(score);
        if (v_change != 1.0f) {scale_sums(sums_high, 0, v_change), scale_sums(sums_high, 1, v_change);scale_sums(sums_low, 0, v_change), scale_sums(sums_low, 1, v_change);}
        if (first + kTileKeys > block.every_row_sees) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int keys = row_sees(block, first_row + half * 8 + lane / 4, first) - lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 8; ++n) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& s = score[n * 4 + half * 2 + j];
                        s = hide_unless(n * 8 + j < keys, s);
                    }
                }
            }
        }
        float unit[2];
        float max[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unit[half] = fmaxf(q.inverse[half] * k_inverse, 0x1p-126f);
            float largest = -INFINITY;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                largest = fmaxf(largest, fmaxf(score[n * 4 + half * 2], score[n * 4 + half * 2 + 1]));
            }
            max[half] = largest * unit[half];
        }
        if (__any_sync(kFullMask, softmax[0].lags(max[0]) || softmax[1].lags(max[1]))) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float of_row = fmaxf(max[half], __shfl_xor_sync(kFullMask, max[half], 1));
                of_row = fmaxf(of_row, __shfl_xor_sync(kFullMask, of_row, 2));
                const float f=softmax[half].rebase_if_lagging(of_row); scale_sums(sums_high, half, f); scale_sums(sums_low, half, f);
            }
        }

        hold(sums_high), hold(sums_low);
        warpgroup_arrive();
        uint32_t high[4][4];
        uint32_t low[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2;
                const int at = j * 8 + i / 2 * 4 + half * 2;
                const float first_weight = exp2_approx(score[at] * unit[half] - softmax[half].reference);
                const float second_weight = exp2_approx(score[at + 1] * unit[half] - softmax[half].reference);
                softmax[half].sum += first_weight + second_weight;
                const SplitPair terms = split(first_weight, second_weight);
                high[j][i] = terms.high;
                low[j][i] = terms.low;
            }
            const uint64_t v = matrix_descriptor(v_panel + j * 16 * kPanelPitch);
            multiply_64x32<true>(sums_low, low[j], v);
            multiply_64x32<true>(sums_low, high[j], v + 4);
            multiply_64x32<true>(sums_high, high[j], v);
        }
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(sums_high), hold(sums_low);
    }

    if (first_row >= block.rows) return;
    if (__any_sync(kFullMask, trust.is_broken())) {
        attend_exactly<kD>(args, block, first_row, 16);
        return;
    }
    store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, factors.v_field, aligned,
                         [&](int i, int half, int j) {
                             return sums_high[i * 4 + half * 2 + j] + sums_low[i * 4 + half * 2 + j];
                         });
}

}  // namespace split_wgmma

tilerank_status attention_split_wgmma(const AttentionArgs& args, void*, void* stream) {
    return launch_blocks("split_wgmma", split_wgmma::kernel, query_blocks(args, split_wgmma::kRows),
                         split_wgmma::kThreads,
                         split_wgmma::Splitter::shared_bytes() + DynamicShared::bytes<QueryBlock>(1), stream, args,
                         score_factor(args), rows_aligned_16(args));
}

}  // namespace tilerank
