// Shared policy of the attention block's fp32 kernels: attention by three products of TF32 terms each (mma.sync), of a
// team of four warps.
#pragma once

#include "common/block.cuh"
#include "common/gemm.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace block_split {

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarpSize;
constexpr int kTeamRows = kTeamWarps * 16;
constexpr int kTileKeys = 32;
constexpr int kStages = 2;
constexpr int kDepthsAtOnce = 4;  // of scores, in eights, that the matrix unit adds

template <int D>
constexpr int kPitch = D + 4;  // rows fall into different banks, also every second one

// Queries are split once and kept in shared memory, a lane's four terms side by side, where there is room for them (a
// block has 99 KB on sm_86); else they stay in registers and are split at each use.
template <int D>
constexpr bool kKeepsQueries = D <= 80;
template <int D>
constexpr int kKeptQueries = kKeepsQueries<D> ? D / 8 : 1;

template <int D>
struct KeyStages {
    float k[kStages][kTileKeys][kPitch<D>];
    float v[kStages][kTileKeys][kPitch<D>];
    uint32_t high[kTeamWarps][kKeptQueries<D>][kWarpSize][4];
    uint32_t low[kTeamWarps][kKeptQueries<D>][kWarpSize][4];
};

template <int D>
__device__ __forceinline__ void copy_tile(float (&tile)[kTileKeys][kPitch<D>], const float* source, int64_t stride,
                                          int count, int thread) {
    constexpr int kParts = D / 4;
#pragma unroll
    for (int at = thread; at < kTileKeys * kParts; at += kTeamThreads) {
        const int row = at / kParts;
        const int column = at % kParts * 4;
        copy_async<16>(&tile[row][column], source + (row < count ? row * stride + column : 0), row < count);
    }
}

// One head of one unit, by a team whose thread this is; sync() is its barrier.
template <int D, typename Sync>
__device__ __forceinline__ void attend(const BlockPlan& plan, KeyStages<D>& tiles, int64_t sequence, int64_t unit,
                                       int64_t head, float factor, int thread, const Sync& sync) {
    const AttentionArgs& args = plan.attention;
    const HeadView<float> view = head_view<float>(args, sequence, head);
    const QueryRows<float> block = query_rows<float>(args, view, unit * kTeamRows, kTeamRows);
    const int lane = thread % kWarpSize;
    const int g = lane / 4;
    const int t = lane % 4;
    const int warp = thread / kWarpSize;
    const int first_row = warp * 16;
    const int rows = block.rows - first_row;  // of this warp; it may have none and then only copies

    const auto copy_tiles = [&](int tile) {
        const int first = tile * kTileKeys;
        const int keys = block.any_row_sees - first;
        if (keys > 0) {
            copy_tile<D>(tiles.k[tile % kStages], block.k + first * args.k_token_stride, args.k_token_stride,
                         keys, thread);
            copy_tile<D>(tiles.v[tile % kStages], block.v + first * args.v_token_stride, args.v_token_stride,
                         keys, thread);
        }
        copy_async_commit();
    };
    copy_tiles(0);

    float q[kKeepsQueries<D> ? 1 : D / 8][4];  // of m16n8k8
    Fragment sums[D / 8] = {};
    SoftmaxState softmax[2];  // sum: of this lane's keys until the end
    if (rows > 0) {
#pragma unroll
        for (int depth = 0; depth < D / 8; ++depth) {
            uint32_t high[4];
            uint32_t low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* row = block.q + min(first_row + i % 2 * 8 + g, block.rows - 1) * args.q_token_stride;
                const float query = row[depth * 8 + i / 2 * 4 + t] * factor;
                const Terms terms = split_terms(query);
                high[i] = terms.high, low[i] = terms.low;
                if constexpr (!kKeepsQueries<D>) q[depth][i] = query;
            }
            if constexpr (kKeepsQueries<D>) {
                store_vector(tiles.high[warp][depth][lane], uint4{high[0], high[1], high[2], high[3]});
                store_vector(tiles.low[warp][depth][lane], uint4{low[0], low[1], low[2], low[3]});
            }
        }
    }
    // A depth's terms of the lane's queries: what it wrote itself.
    const auto queries_at = [&](int depth, uint32_t (&high)[4], uint32_t (&low)[4]) {
        if constexpr (kKeepsQueries<D>) {
            const uint4 all_high = load_vector<uint4>(tiles.high[warp][depth][lane]);
            const uint4 all_low = load_vector<uint4>(tiles.low[warp][depth][lane]);
            high[0] = all_high.x, high[1] = all_high.y, high[2] = all_high.z, high[3] = all_high.w;
            low[0] = all_low.x, low[1] = all_low.y, low[2] = all_low.z, low[3] = all_low.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Terms terms = split_terms(q[depth][i]);
                high[i] = terms.high, low[i] = terms.low;
            }
        }
    };

    int tile = 0;
    for (int first = 0; first < block.any_row_sees; first += kTileKeys, ++tile) {
        copy_tiles(tile + 1);
        copy_async_wait<1>();
        sync();  // this tile is there for all warps
        if (rows > 0) {
            const auto& k_tile = tiles.k[tile % kStages];
            const auto& v_tile = tiles.v[tile % kStages];
            Fragment scores[kTileKeys / 8] = {};
#pragma unroll
            for (int first_depth = 0; first_depth < D / 8; first_depth += kDepthsAtOnce) {
                Fragment of_depths[kTileKeys / 8] = {};  // as in multiply(): the matrix unit's sums would drift
#pragma unroll
                for (int depth = first_depth; depth < min(first_depth + kDepthsAtOnce, D / 8); ++depth) {
                    uint32_t a_high[4];
                    uint32_t a_low[4];
                    queries_at(depth, a_high, a_low);
#pragma unroll
                    for (int column = 0; column < kTileKeys / 8; ++column) {
                        const Terms first_terms = split_terms(k_tile[column * 8 + g][depth * 8 + t]);
                        const Terms second_terms = split_terms(k_tile[column * 8 + g][depth * 8 + t + 4]);
                        mma_split(of_depths[column], a_high, a_low, {first_terms.high, second_terms.high},
                                  {first_terms.low, second_terms.low});
                    }
                }
#pragma unroll
                for (int column = 0; column < kTileKeys / 8; ++column) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) scores[column][i] += of_depths[column][i];
                }
            }
            float largest[2] = {softmax[0].max, softmax[1].max};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int sees = block.row_sees(first_row + half * 8 + g) - first;
#pragma unroll
                for (int column = 0; column < kTileKeys / 8; ++column) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& score = scores[column][half * 2 + i];
                        score = hide_unless(column * 8 + t * 2 + i < sees, score);
                        largest[half] = fmaxf(largest[half], score);
                    }
                }
                const float rescale = softmax[half].rebase(quad_max(largest[half]));
#pragma unroll
                for (int column = 0; column < D / 8; ++column) {
                    sums[column][half * 2] *= rescale;
                    sums[column][half * 2 + 1] *= rescale;
                }
            }
            // A lane's sums of scores are those of keys 2t and 2t + 1. Taking these for the keys t and t + 4 of the
            // left factor, and the rows of values likewise, the product is the same and nothing moves between lanes.
            uint32_t a_high[kTileKeys / 8][4];
            uint32_t a_low[kTileKeys / 8][4];
#pragma unroll
            for (int column = 0; column < kTileKeys / 8; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Terms terms = split_terms(softmax[i % 2].add(scores[column][i % 2 * 2 + i / 2]));
                    a_high[column][i] = terms.high, a_low[column][i] = terms.low;
                }
            }
#pragma unroll
            for (int d = 0; d < D / 8; ++d) {
                Fragment of_tile = {};  // likewise
#pragma unroll
                for (int column = 0; column < kTileKeys / 8; ++column) {
                    const int key = column * 8 + t * 2;
                    const Terms first_terms = split_terms(v_tile[key][d * 8 + g]);
                    const Terms second_terms = split_terms(v_tile[key + 1][d * 8 + g]);
                    mma_split(of_tile, a_high[column], a_low[column], {first_terms.high, second_terms.high},
                              {first_terms.low, second_terms.low});
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[d][i] += of_tile[i];
            }
        }
        sync();  // the tile is no longer read
    }
    copy_async_wait<0>();
    const float factors[2] = {normalizer(quad_sum(softmax[0].sum)), normalizer(quad_sum(softmax[1].sum))};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half * 8 + g >= rows) continue;
        float* row = block.out + (first_row + half * 8 + g) * args.out_token_stride + t * 2;
#pragma unroll
        for (int column = 0; column < D / 8; ++column) {
            store_vector(row + column * 8, float2{sums[column][half * 2] * factors[half],
                                                  sums[column][half * 2 + 1] * factors[half]});
        }
    }
}

}  // namespace block_split
}  // namespace tilerank
