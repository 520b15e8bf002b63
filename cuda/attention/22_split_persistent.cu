// Split persistent: split_wgmma in blocks that stay and take one part of a sequence after another, the longest first.
// The next part's keys and queries are on their way before this one ends, so no part waits for its first tile.
// Prediction: 52 us packed, from 62. Of a part's 6 tiles' time, 40 % was its start (sequence lengths, queries, first
//   tile), which the other block of the SM hid in part.
// Answer: metrics/<machine>/bench_attention_split_persistent.json and docs/ladder.md.
#include "common/split_fp16.cuh"
#include "common/warpgroup_mma.cuh"

namespace tilerank {
namespace split_persistent {

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

// What is known of a tile by the time that it is split.
struct TileNotes {
    TileFactors factors;
    bool untrusted = false;  // numbers too large, or values too far apart, up to this tile
    bool k_is_wide = false;
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

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor, bool aligned) {
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
        SplitSoftmax<> softmax[2];
        TileNotes notes;       // of the tile computed with
        TileNotes next_notes;  // of the tile after
        Span v_span;           // of the part up to the tile after
        bool broken = false;
        int part = -1;
        int tile = 0;
        int tiles = 0;
        for (int at = -2; at < 0 || now.exists; ++at) {
            copy_async_wait<0>();
            fence_shared_for_products();
            __syncthreads();  // the halves of this tile and the spans of the next are there; the other halves are read
            float v_change = 1.0f;
            if (now.is_first) {
                ++part;
                tile = 0;
                tiles = tiles_of(part);
                q.load(blocks[part].rows - first_row, factor,
                       [&](int row, int column) { return load_vector<float2>(&queries[first_row + row][column]); });
                __syncwarp();
                softmax[0] = softmax[1] = SplitSoftmax<>{};
#pragma unroll
                for (int i = 0; i < 16; ++i) sums.high[i] = sums.low[i] = 0.0f;
                broken = q.untrusted;
            } else {
                v_change = next_notes.factors.v_change(notes.factors);
            }
            notes = next_notes;
            const auto prepare = [&]() {
                if (to_measure.exists) splitter.measure(at + 2);
                if (to_split.exists) {
                    Span k_tile, v_tile;
                    splitter.read_spans(at + 1, k_tile, v_tile);
                    if (to_split.is_first) next_notes.factors = TileFactors{}, v_span = Span{};
                    v_span.add(v_tile);
                    next_notes.factors = next_notes.factors.next(k_tile, v_tile);
                    next_notes.untrusted = k_tile.is_beyond() || v_span.is_beyond() || v_span.is_wide();
                    next_notes.k_is_wide = k_tile.is_wide();
                    splitter.split_tile(at + 1, power_of_two(next_notes.factors.k_field),
                                        power_of_two(next_notes.factors.v_field));
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
            const float k_inverse = inverse_power_of_two(notes.factors.k_field);
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

            float unit[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) unit[half] = fmaxf(q.inverse[half] * k_inverse, 0x1p-126f);
            const float largest_unit = fmaxf(unit[0], unit[1]);
            // As in Trust.
            broken = broken || notes.untrusted || !(largest_unit <= 0x1p60f) ||
                     ((q.wide || notes.k_is_wide) && largest_unit > 0x1p-18f);
            warpgroup_wait<0>();
            hold(score);
            if (v_change != 1.0f) sums.scale(0, v_change), sums.scale(1, v_change);
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
            float max[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
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
                    sums.scale(half, softmax[half].rebase_if_lagging(of_row));
                }
            }

            hold(sums.high), hold(sums.low);
            warpgroup_arrive();
            uint32_t high[4][4];
            uint32_t low[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int half = i % 2;
                    const int element = j * 8 + i / 2 * 4 + half * 2;
                    const float one = exp2_approx(score[element] * unit[half] - softmax[half].reference);
                    const float other = exp2_approx(score[element + 1] * unit[half] - softmax[half].reference);
                    softmax[half].sum += one + other;
                    const SplitPair terms = split(one, other);
                    high[j][i] = terms.high;
                    low[j][i] = terms.low;
                }
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
                store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, notes.factors.v_field, aligned,
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

}  // namespace split_persistent

tilerank_status attention_split_persistent(const AttentionArgs& args, void*, void* stream) {
    using namespace split_persistent;
    constexpr size_t kSharedBytes = Splitter::shared_bytes() + DynamicShared::bytes<Queries>(1) +
                                    DynamicShared::bytes<QueryBlock>(kPartsAtOnce + 1) +
                                    DynamicShared::bytes<RunOfParts>(1);
    const int64_t blocks = min(query_blocks(args, kRows), static_cast<int64_t>(multiprocessors()) * kBlocksPerSm);
    return launch_blocks("split_persistent", kernel, blocks, kThreads, kSharedBytes, stream, args, score_factor(args),
                         rows_aligned_16(args));
}

}  // namespace tilerank
