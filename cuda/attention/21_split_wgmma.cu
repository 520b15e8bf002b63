// Split wgmma: split_fp16 on Hopper's warpgroup products (wgmma), which read k and v from shared memory themselves and
// run beside the block's other work: while a tile's scores are computed, the next tile is split. Blocks stay and take
// one part of a sequence after another, the longest first; the next part's first tile is there when one ends. Factors
// and references come from a part's first tile. Later tiles are checked: numbers by the barrier that there is anyway
// (a part they do not fit goes to attend_exactly), weights by their sum (then scores are found again).
// Prediction: 52 us packed, from 100. A tile of 64 rows x 64 keys takes the tensor cores 384 cycles and each scheduler
//   410 instructions, together about 480: 44 us with a fifth of padding; start, end and latency 8 us.
// Answer: metrics/<machine>/bench_attention_split_wgmma.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/split_fp16.cuh"
#include "common/wgmma.cuh"

namespace tilerank {
namespace split_wgmma {

constexpr int kGroups = 2;
constexpr int kThreads = kGroups * 128;
constexpr int kTileKeys = 64;
constexpr int kRows = kGroups * 64;
constexpr int kBlocksPerSm = 2;
constexpr int kD = 32;
constexpr int kPartsAtOnce = 32;     // of a block; it starts anew after them
constexpr int kQueryPitch = kD + 8;  // a warp's reads of 8 bytes then meet no bank twice
using Splitter = TileSplitter<kD, kThreads, kTileKeys>;
using Queries = float[kRows][kQueryPitch];

// Sums of a warp's 16 rows over keys, as m16n8k16 has them. The products with a low term are kept apart: rounding off
// after every product would cost the large sums three times as much.
struct Sums {
    Fragment high[kD / 8];
    Fragment low[kD / 8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) high[column][i] = low[column][i] = 0.0f;
        }
    }

    __device__ __forceinline__ void scale(int half, float factor) {
#pragma unroll
        for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) high[column][i] *= factor, low[column][i] *= factor;
        }
    }
};

// Parts are 128 queries of one head; their order is that of sequences by falling key count (equal ones by number), in
// runs of kThreads sequences, then heads, then queries.
struct RunOfParts {
    struct Sequence {
        int64_t first_part;
        int sequence;  // of the run
        int tiles;     // parts of a head
        int keys;
    };
    Sequence sequences[kThreads];
    int count;
    int64_t parts;

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
        int64_t before = 0;
        int64_t all = 0;
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
        if (thread < here) sequences[rank] = {before * args.heads, thread, tiles, keys};
        if (thread == 0) parts = all * args.heads;
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
        const int64_t within = index - found.first_part;
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

// The scores of a warp's 16 rows with a tile's keys, as wgmma finds them, by the warp alone.
__device__ __forceinline__ void find_scores(Fragment (&scores)[kTileKeys / 8], const SplitQueries<kD>& q,
                                            const __half* k_panel, int lane) {
    // A number that is known only here: else the compiler prepares addresses where they are hardly ever needed.
    lane = __shfl_sync(kFullMask, lane, lane);
#pragma unroll
    for (int block = 0; block < kTileKeys / 8; ++block) {
        uint32_t high[4];
        uint32_t low[4];
        const int key = block * 8 + lane % 8;
        ldmatrix_x4(high, k_panel + panel_offset(key, lane / 8));
        ldmatrix_x4(low, k_panel + panel_offset(key, lane / 8 + 4));
        Fragment& sum = scores[block];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.high[c], {low[c * 2], low[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.low[c], {high[c * 2], high[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(sum, q.high[c], {high[c * 2], high[c * 2 + 1]});
    }
}

// What begins here as a factor of a product: rows of 128 bytes.
__device__ __forceinline__ uint64_t panel_descriptor(const __half* begin, int offset_16 = 0) {
    return tile_descriptor<128>(shared_address(begin) / 16 + offset_16, 1);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor) {
    DynamicShared memory;
    Splitter splitter(memory, threadIdx.x, kAligned);
    // What wgmma reads is laid out by its address modulo 1024, which the start of a block's memory is a multiple of.
    if (shared_address(splitter.k_halves) % 1024 != 0) __trap();
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
                if (copied_tile == 0) splitter.begin(blocks[copied_part], args);
                splitter.copy_next(args, blocks[copied_part].any_row_sees - copied_tile * kTileKeys, copies);
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
            fence_async_proxy();
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
                sums.clear();
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
                        copy_queries(queries, blocks[part + 1], args.q_token_stride, first_row, kAligned);
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
            Fragment scores[kTileKeys / 8];
            const __half* k_panel = splitter.k_halves[at & 1][0];
            const auto multiply = [&](const uint32_t (&a)[4], int part_of_row, int add) {
                wgmma_k16<__half, kTileKeys, false>(scores, a, panel_descriptor(k_panel, part_of_row), add);
            };
            wgmma_fence();
            // Small products first: the sum is rounded off in its last place only when the large ones join. 16 columns
            // are two parts of a row, the low terms are four further on.
            multiply(q.high[0], 4, 0);
            multiply(q.high[1], 6, 1);
            multiply(q.low[0], 0, 1);
            multiply(q.low[1], 2, 1);
            multiply(q.high[0], 0, 1);
            multiply(q.high[1], 2, 1);
            wgmma_commit();
            const __half* v_panel = splitter.v_halves[at & 1][0];
            prepare();

            wgmma_wait<0>();
            uint32_t high[4][4];
            uint32_t low[4][4];
            float tile_sum[2];
            bool looks_for_max = tile == 0 || careful;
            while (true) {
                if (first_key + kTileKeys > block.every_row_sees) {
                    int sees[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sees[half] = row_sees(block, first_row + half * 8 + lane / 4, first_key);
                    }
#pragma unroll
                    for (int n = 0; n < kTileKeys / 8; ++n) hide_keys(scores[n], n * 8, sees, lane, -INFINITY);
                }
                if (looks_for_max) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float largest = -INFINITY;
#pragma unroll
                        for (int n = 0; n < kTileKeys / 8; ++n) {
                            largest = fmaxf(largest, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
                        }
                        const float change = softmax[half].rebase_if_lagging(quad_max(largest) * unit[half]);
                        if (__any_sync(kFullMask, change != 1.0f)) sums.scale(half, change);
                    }
                }
                tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int half = i % 2;
                        const Fragment& of_row = scores[j * 2 + i / 2];
                        const float one = exp2_approx(of_row[half * 2] * unit[half] - softmax[half].reference);
                        const float other = exp2_approx(of_row[half * 2 + 1] * unit[half] - softmax[half].reference);
                        tile_sum[half] += one + other;
                        const SplitPair terms = split(one, other);
                        high[j][i] = terms.high;
                        low[j][i] = terms.low;
                    }
                }
                // A weight is at most its lane's sum over the tile; fp16 ends at 65,504.
                const bool fits = tile_sum[0] <= 65000.0f && tile_sum[1] <= 65000.0f;
                if (looks_for_max || __all_sync(kFullMask, fits)) break;
                looks_for_max = careful = true;
                find_scores(scores, q, k_panel, lane);
            }
            softmax[0].sum += tile_sum[0];
            softmax[1].sum += tile_sum[1];

            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const __half* rows = v_panel + j * 16 * kPanelPitch;
                wgmma_k16<__half, kD, true>(sums.low, low[j], panel_descriptor(rows), 1);
                wgmma_k16<__half, kD, true>(sums.low, high[j], panel_descriptor(rows, 4), 1);
                wgmma_k16<__half, kD, true>(sums.high, high[j], panel_descriptor(rows), 1);
            }
            wgmma_commit();
            wgmma_wait<0>();

            if (++tile < tiles || first_row >= block.rows) continue;
            if (__any_sync(kFullMask, broken)) {
                attend_exactly<kD>(args, block, first_row, 16);
            } else {
                store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, v_field, kAligned,
                                     [&](int i, int half, int j) {
                                         return sums.high[i][half * 2 + j] + sums.low[i][half * 2 + j];
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

}  // namespace split_wgmma

tilerank_status attention_split_wgmma(const AttentionArgs& args, void*, void* stream) {
    using namespace split_wgmma;
    constexpr size_t kSharedBytes = Splitter::shared_bytes() + DynamicShared::bytes<Queries>(1) +
                                    DynamicShared::bytes<QueryBlock>(kPartsAtOnce + 1) +
                                    DynamicShared::bytes<RunOfParts>(1);
    const int64_t blocks =
        std::min<int64_t>(query_blocks(args, kRows), std::max(multiprocessors(), 1) * kBlocksPerSm);
    return launch_blocks("split_wgmma", rows_aligned_16(args) ? kernel<true> : kernel<false>, blocks, kThreads,
                         kSharedBytes, stream, args, score_factor(args));
}

}  // namespace tilerank
