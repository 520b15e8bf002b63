// Split speculative: split_persistent with fewer instructions. Factors are chosen from the first tile of a part; later
// tiles are only checked against them, by the barrier that there is anyway, and a part that they do not fit is done in
// double. A row's maximum is taken from the first tile too; that weights stay in range shows in their sum, and where
// they do not, the warp finds the tile's scores again and looks for a maximum from there on.
// Prediction: 10 % less than split_persistent: 520 instructions a tile and warp instead of 710.
// Answer: metrics/<machine>/bench_attention_split_speculative.json and docs/ladder.md.
#include "common/split_fp16.cuh"
#include "common/warpgroup_mma.cuh"

namespace tilerank {
namespace split_speculative {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * kWarpgroupSize;
constexpr int kTileKeys = 64;
constexpr int kRows = kGroups * 64;
constexpr int kBlocksPerSm = 2;
constexpr int kD = 32;
constexpr int kPartsAtOnce = 32;  // of a block; it starts anew after them
constexpr int kQueryPitch = kD + 8;  // a warp's reads of 8 bytes then meet no bank twice
using Splitter = TileSplitter<kD, kThreads, kTileKeys>;
using Queries = float[kRows][kQueryPitch];

// Sums of a warp's 16 rows over keys, as m16n8k16 has them. The products with a low term are kept apart: rounding off
// after every product would cost the large sums three times as much.
struct Sums {
    float high[16];
    float low[16];

    __device__ __forceinline__ void scale(int half, float factor) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            high[i + half * 2] *= factor, high[i + half * 2 + 1] *= factor;
            low[i + half * 2] *= factor, low[i + half * 2 + 1] *= factor;
        }
    }
};

// Parts are 128 queries of one head; their order is that of sequences by falling key count (equal ones by number), in
// runs of kThreads sequences, then heads, then queries.
struct RunOfParts {
    struct Sequence {
        int first_part;
        int sequence;  // of the run
        int tiles;     // parts of a head
        int keys;
    };
    Sequence sequences[kThreads];
    int count;
    int parts;

    __device__ __forceinline__ void build(const AttentionArgs& args, int64_t first_sequence) {
        const int thread = threadIdx.x;
        const int here = static_cast<int>(min(args.batch - first_sequence, static_cast<int64_t>(kThreads)));
        int keys = 0;
        int tiles = 0;
        if (thread < here) {
            const HeadView<float> view = head_view<float>(args, first_sequence + thread, 0);
            keys = static_cast<int>(min(view.k_len, static_cast<int64_t>(kMaxKeys)));
            tiles = static_cast<int>((view.q_len + kRows - 1) / kRows);
            sequences[thread].keys = keys;
            sequences[thread].tiles = tiles;
        }
        if (thread == 0) count = here;
        __syncthreads();
        int rank = 0;
        int before = 0;
        int all = 0;
        if (thread < here) {
#pragma unroll 4
            for (int other = 0; other < here; ++other) {
                const int other_keys = sequences[other].keys;
                const bool is_first = other_keys > keys || (other_keys == keys && other < thread);
                rank += is_first;
                before += is_first ? sequences[other].tiles : 0;
                all += sequences[other].tiles;
            }
        }
        __syncthreads();
        const int heads = static_cast<int>(args.heads);
        if (thread < here) sequences[rank] = {before * heads, thread, tiles, keys};
        if (thread == 0) parts = all * heads;
        __syncthreads();
    }

    // Part number `index`, below `parts`.
    __device__ __forceinline__ QueryBlock part(const AttentionArgs& args, int64_t first_sequence, int64_t index) const {
        int low = 0;
        for (int high = count; high - low > 1;) {
            const int middle = (low + high) / 2;
            if (sequences[middle].first_part <= index) {
                low = middle;
            } else {
                high = middle;
            }
        }
        // Sequences without queries have no parts; the last of those that begin here has some.
        const Sequence& found = sequences[low];
        const int within = static_cast<int>(index) - found.first_part;
        return query_block_at(args, kRows, first_sequence + found.sequence, within / found.tiles,
                              static_cast<unsigned>(within % found.tiles));
    }
};

// What flows through the block: tiles of one part after another.
struct Stage {
    bool exists = false;
    bool is_first = false;  // of its part
};

// A warp's 16 rows of q, which it alone reads.
__device__ __forceinline__ void copy_queries(Queries& queries, const QueryBlock& block, int64_t token_stride,
                                             int first_row, bool aligned) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const int row = first_row + i + lane / 8;
        if (row >= block.rows) continue;
        const float* from = block.q + row * token_stride + lane % 8 * 4;
        float* to = &queries[row][lane % 8 * 4];
        if (aligned) {
            copy_async<16>(to, from);
        } else {
#pragma unroll
            for (int word = 0; word < 4; ++word) copy_async<4>(to + word, from + word);
        }
    }
}

// The scores of 16 rows with a tile's keys as wgmma finds them, by one warp alone.
__device__ __forceinline__ void find_scores(float (&score)[32], const SplitQueries<kD>& q, const __half* k_panel) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        float sum[4] = {};
        uint32_t high[4];
        uint32_t low[4];
        const int key = n * 8 + lane % 8;
        ldmatrix_x4(high, k_panel + panel_offset(key, lane / 8));
        ldmatrix_x4(low, k_panel + panel_offset(key, lane / 8 + 4));
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.high[c], {low[c * 2], low[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.low[c], {high[c * 2], high[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.high[c], {high[c * 2], high[c * 2 + 1]});
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n * 4 + i] = sum[i];
    }
}

template <bool aligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor) {
    DynamicShared memory;
    Splitter splitter(memory, threadIdx.x, aligned);
    Queries& queries = *memory.take<Queries>(1);
    QueryBlock* blocks = memory.take<QueryBlock>(kPartsAtOnce + 1);
    RunOfParts& run = *memory.take<RunOfParts>(1);
    const int lane = threadIdx.x % kWarpSize;
    // From lane 0, which tells the compiler that it is one for the warp.
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int first_row = warp * 16;

    const auto tiles_of = [&](int part) {
        const QueryBlock& block = blocks[part];
        return block.rows == 0 ? 0 : max(1, (block.any_row_sees + kTileKeys - 1) / kTileKeys);
    };

    int64_t first_sequence = 0;
    int64_t turn = 0;  // the block's parts are every gridDim.x-th, from the front and from the back in turn
    run.build(args, 0);
    while (true) {
        __syncthreads();
        if (threadIdx.x <= kPartsAtOnce) {
            const int64_t my_turn = turn + threadIdx.x;
            const int64_t index =
                my_turn * gridDim.x + (my_turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
            if (threadIdx.x < kPartsAtOnce && index < run.parts) {
                blocks[threadIdx.x] = run.part(args, first_sequence, index);
            } else {
                blocks[threadIdx.x].rows = 0;  // the end
            }
        }
        turn += kPartsAtOnce;
        __syncthreads();

        int copied_part = 0;
        int copied_tile = 0;
        int copied_tiles = tiles_of(0);
        int copies = 0;
        const auto copy_next = [&]() {
            Stage stage;
            if (copied_tiles > 0) {
                stage = {true, copied_tile == 0};
                splitter.copy(blocks[copied_part], args, copied_tile, copies);
                ++copies;
                if (++copied_tile == copied_tiles) {
                    copied_tile = 0;
                    copied_tiles = tiles_of(++copied_part);
                }
            }
            return stage;
        };
        // Three tiles are ahead of the one that is computed with: split, measured, copied in this round.
        const Stage first = copy_next();
        const Stage second = copy_next();
        Stage now;
        Stage to_split;
        Stage to_measure = first;

        SplitQueries<kD> q;
        Sums sums;
        SplitSoftmax<10, 11> softmax[2];
        int k_field = 0, v_field = 0;            // factors of the part computed with
        int next_k_field = 0, next_v_field = 0;  // of the part split
        bool misfit = false;                     // of what this thread has split
        bool broken = false;
        bool careful = false;
        float unit[2] = {};
        int part = -1;
        int tile = 0;
        int tiles = 0;
        for (int at = -2; at < 0 || now.exists; ++at) {
            copy_async_wait<0>();
            fence_shared_for_products();
            // The halves of this tile and the spans of the next are there; the other halves are read.
            const bool tile_is_misfit = __syncthreads_or(misfit);
            if (now.is_first) {
                ++part;
                tile = 0;
                tiles = tiles_of(part);
                q.load(blocks[part].rows - first_row, factor,
                       [&](int row, int column) { return load_vector<float2>(&queries[first_row + row][column]); });
                __syncwarp();
                softmax[0] = softmax[1] = SplitSoftmax<10, 11>{};
#pragma unroll
                for (int i = 0; i < 16; ++i) sums.high[i] = sums.low[i] = 0.0f;
                careful = false;
                k_field = next_k_field, v_field = next_v_field;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    unit[half] = fmaxf(q.inverse[half] * inverse_power_of_two(k_field), 0x1p-126f);
                }
                const float largest_unit = fmaxf(unit[0], unit[1]);
                // As in Trust.
                broken = q.untrusted || !(largest_unit <= 0x1p60f) || (q.wide && largest_unit > 0x1p-18f);
            }
            broken = broken || tile_is_misfit;
            const auto prepare = [&]() {
                if (to_measure.is_first) splitter.measure(at + 2);
                misfit = false;
                if (to_split.exists) {
                    if (to_split.is_first) {
                        Span k_tile, v_tile;
                        splitter.read_spans(at + 1, k_tile, v_tile);
                        next_k_field = field_to_reach(k_tile.largest, 10);
                        next_v_field = field_to_reach(v_tile.largest, 12);
                    }
                    misfit = splitter.split_tile_as_before(at + 1, power_of_two(next_k_field),
                                                           power_of_two(next_v_field));
                    if (to_split.is_first) {
                        copy_queries(queries, blocks[part + 1], args.q_token_stride, first_row, aligned);
                        copy_async_commit();
                    }
                }
                now = to_split;
                to_split = to_measure;
                to_measure = at == -2 ? second : copy_next();
            };
            const QueryBlock& block = blocks[max(part, 0)];
            // One for the warpgroup.
            if (!now.exists || warp / 4 * 64 >= block.rows) {
                prepare();
                ++tile;
                continue;
            }

            const int first_key = tile * kTileKeys;
            float score[32];
            const uint64_t k = matrix_descriptor(splitter.k_halves[at & 1][0]);
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
            const __half* v_panel = splitter.v_halves[at & 1][0];
            prepare();

            warpgroup_wait<0>();
            hold(score);
            uint32_t high[4][4];
            uint32_t low[4][4];
            float tile_sum[2];
            bool looks_for_max = tile == 0 || careful;
            while (true) {
                if (first_key + kTileKeys > block.every_row_sees) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int keys = row_sees(block, first_row + half * 8 + lane / 4, first_key) - lane % 4 * 2;
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
                if (looks_for_max) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float largest = -INFINITY;
#pragma unroll
                        for (int n = 0; n < 8; ++n) {
                            largest = fmaxf(largest, fmaxf(score[n * 4 + half * 2], score[n * 4 + half * 2 + 1]));
                        }
                        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
                        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
                        const float change = softmax[half].rebase_if_lagging(largest * unit[half]);
                        if (__any_sync(kFullMask, change != 1.0f)) sums.scale(half, change);
                    }
                }
                tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int half = i % 2;
                        const int element = j * 8 + i / 2 * 4 + half * 2;
                        const float one = exp2_approx(score[element] * unit[half] - softmax[half].reference);
                        const float other = exp2_approx(score[element + 1] * unit[half] - softmax[half].reference);
                        tile_sum[half] += one + other;
                        const SplitPair terms = split(one, other);
                        high[j][i] = terms.high;
                        low[j][i] = terms.low;
                    }
                }
                const bool fits = tile_sum[0] <= 65000.0f && tile_sum[1] <= 65000.0f;
                if (looks_for_max || __all_sync(kFullMask, fits)) break;
                looks_for_max = careful = true;
                find_scores(score, q, splitter.k_halves[at & 1][0]);
            }
            softmax[0].sum += tile_sum[0];
            softmax[1].sum += tile_sum[1];

            hold(sums.high), hold(sums.low);
            warpgroup_arrive();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint64_t v = matrix_descriptor(v_panel + j * 16 * kPanelPitch);
                multiply_64x32<true>(sums.low, low[j], v);
                multiply_64x32<true>(sums.low, high[j], v + 4);
                multiply_64x32<true>(sums.high, high[j], v);
            }
            warpgroup_commit();
            warpgroup_wait<0>();
            hold(sums.high), hold(sums.low);

            if (++tile < tiles || first_row >= block.rows) continue;
            if (__any_sync(kFullMask, broken)) {
                attend_exactly<kD>(args, block, first_row, 16);
            } else {
                store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, v_field, aligned,
                                     [&](int i, int half, int j) {
                                         return sums.high[i * 4 + half * 2 + j] + sums.low[i * 4 + half * 2 + j];
                                     });
            }
        }

        // More of this run, or the next run of sequences.
        if (turn * gridDim.x < run.parts) continue;
        first_sequence += kThreads;
        if (first_sequence >= args.batch) return;
        turn = 0;
        __syncthreads();
        run.build(args, first_sequence);
    }
}

int multiprocessors() {
    int device = 0;
    int count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    return count;
}

}  // namespace split_speculative

tilerank_status attention_split_speculative(const AttentionArgs& args, void*, void* stream) {
    using namespace split_speculative;
    constexpr size_t kSharedBytes = Splitter::shared_bytes() + DynamicShared::bytes<Queries>(1) +
                                    DynamicShared::bytes<QueryBlock>(kPartsAtOnce + 1) +
                                    DynamicShared::bytes<RunOfParts>(1);
    const int64_t blocks = min(query_blocks(args, kRows), static_cast<int64_t>(multiprocessors()) * kBlocksPerSm);
    return launch_blocks("split_speculative", rows_aligned_16(args) ? kernel<true> : kernel<false>, blocks, kThreads,
                         kSharedBytes, stream, args, score_factor(args));
}

}  // namespace tilerank
