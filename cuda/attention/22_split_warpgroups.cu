// Split warpgroups: one block a multiprocessor with an equal part of all 64-row units, whose warps do one thing each.
// Three split the keys of a (sequence, head) pair, once for all its units, into a ring that holds whole pairs; one
// deals out units; three warpgroups compute, each alone, without a barrier between them.
// Prediction: 70 us packed, from 120. A tile of 64 rows x 64 keys takes each scheduler 320 instructions in the groups
//   and 50 for splitting instead of 590; at 0.6 instructions a cycle 60 us, and 10 us for start and end.
// Answer: metrics/<machine>/bench_attention_split_warpgroups.json and docs/ladder.md.
#include <type_traits>

#include "common/balanced.cuh"
#include "common/split_fp16.cuh"
#include "common/wgmma.cuh"

namespace tilerank {
namespace split_warpgroups {

constexpr int kD = 32;
constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;

// Warpgroups that compute, beside the one that splits. Scores, weights, sums and queries take 112 registers of theirs;
// a block has 65,536, in eights a thread.
constexpr int kGroups = 3;
constexpr int kRegisters = 144;
constexpr int kSplitRegisters = 80;
constexpr int kChunks = 12;  // of the ring: a panel of keys and one of values each, 192 of 227 KB
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kSplitThreads = kGroupThreads - kWarpSize;  // the last warp deals out the units
constexpr int kPanelBytes = kChunkKeys * kPanelPitch * 2;
constexpr int kResident = 8;
constexpr int kQueryPitch = kD + 8;  // a warp's reads of 8 bytes then meet no bank twice
using Queries = float[kUnitRows][kQueryPitch];
using Passes32 = Passes<kUnitRows, kGroups, kResident>;

// What is known of a chunk once it is split.
struct ChunkNotes {
    int k_field;  // what it was multiplied by
    int v_field;
    int misfit;  // 1 + the number of the latest chunk here whose numbers do not fit that
    const float* k;  // first of the sequence's keys
    const float* v;
};

// What the warps of a block share.
struct Shared {
    unsigned char* ring;
    uint64_t* full;  // of each chunk
    uint64_t* empty;
    ChunkNotes* notes;
    Queries* queries;  // [kGroups]
    uint4* spans;      // [2][kSplitThreads / kWarpSize]
};

// ---- The warps that split ----

constexpr int kRowParts = kD / 4;                   // a thread has four columns
constexpr int kRowStep = kSplitThreads / kRowParts;  // of every kRowStep-th row
constexpr int kRounds = (kChunkKeys + kRowStep - 1) / kRowStep;
constexpr int kLag = 2;  // chunks on their way while one is split

// Where a thread's four columns are in a panel, before they are split.
__device__ __forceinline__ int raw_at(int thread, int round) {
    return swizzled_offset<128>(thread / kRowParts + round * kRowStep, thread % kRowParts * 16);
}
// A warp has whole rows, and so all of them or none.
__device__ __forceinline__ bool has_round(int thread, int round) {
    return kChunkKeys % kRowStep == 0 || thread / kRowParts + round * kRowStep < kChunkKeys;
}

template <bool kAligned>
__device__ __forceinline__ void copy_panel(unsigned char* panel, const float* source, int64_t token_stride, int count,
                                           int thread) {
    const int row = thread / kRowParts;
    const float* from = source + row * token_stride + thread % kRowParts * 4;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (has_round(thread, round)) {
            unsigned char* to = panel + raw_at(thread, round);
            const bool exists = row + round * kRowStep < count;
            if (kAligned) {
                copy_async<16>(to, from, exists);
            } else {
#pragma unroll
                for (int word = 0; word < 4; ++word) copy_async<4>(to + word * 4, from + word, exists);
            }
        }
        from += kRowStep * token_stride;
    }
}

__device__ __forceinline__ unsigned largest_of(const unsigned char* panel, int thread) {
    unsigned largest = 0;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (!has_round(thread, round)) continue;
        const float4 four = load_vector<float4>(panel + raw_at(thread, round));
        largest = max(largest, max(max(absolute_bits(four.x), absolute_bits(four.y)),
                                   max(absolute_bits(four.z), absolute_bits(four.w))));
    }
    return warp_max(largest);
}

// Splits a panel where it lies: the two terms of a row take its place.
__device__ __forceinline__ void split_panel(unsigned char* panel, float factor, int thread, Fit& fit) {
    constexpr int kAtOnce = 3;
    static_assert(kRounds % kAtOnce == 0);
#pragma unroll
    for (int first = 0; first < kRounds; first += kAtOnce) {
        float4 fours[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (has_round(thread, first + i)) fours[i] = load_vector<float4>(panel + raw_at(thread, first + i));
        }
        __syncwarp();  // these rows have been read
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int round = first + i;
            if (!has_round(thread, round)) continue;
            const int row = thread / kRowParts + round * kRowStep;
            const int column = thread % kRowParts * 4;
            float4 four = fours[i];
            four = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
            fit.add_group(four);
            const SplitPair one = split(four.x, four.y);
            const SplitPair other = split(four.z, four.w);
            // Rows next to each other store different terms at a time, which then lie in different banks.
            const bool low_first = row % 2 != 0;
            const int high_at = swizzled_offset<128>(row, column * 2);
            const int low_at = swizzled_offset<128>(row, column * 2 + 64);
            store_vector(panel + (low_first ? low_at : high_at),
                         low_first ? uint2{one.low, other.low} : uint2{one.high, other.high});
            store_vector(panel + (low_first ? high_at : low_at),
                         low_first ? uint2{one.high, other.high} : uint2{one.low, other.low});
        }
    }
}

template <bool kAligned>
__device__ __forceinline__ void split_chunks(Passes32 passes, const Shared& shared, int thread) {
    const AttentionArgs& args = passes.args;
    int slot = 0;
    uint32_t parity = 1;  // of the phase before the first: nothing to wait for
    int split_slot = 0;
    int number = 0;
    int pending = 0;      // chunks on their way
    unsigned firsts = 0;  // which of them are the first of a pass, a bit each
    int measured = 0;
    int k_field = 0;
    int v_field = 0;
    // The one that has been on its way longest, once it is there.
    const auto split_oldest = [&] {
        unsigned char* panels = shared.ring + split_slot * 2 * kPanelBytes;
        if (firsts & 1) {
            // The factors of a pair are those of its first keys; the others are checked.
            const unsigned k_largest = largest_of(panels, thread);
            const unsigned v_largest = largest_of(panels + kPanelBytes, thread);
            uint4* spans = shared.spans + measured % 2 * (kSplitThreads / kWarpSize);
            ++measured;
            if (thread % kWarpSize == 0) spans[thread / kWarpSize] = uint4{k_largest, v_largest, 0, 0};
            barrier_among<kSplitThreads>();
            unsigned largest[2] = {0, 0};
#pragma unroll
            for (int warp = 0; warp < kSplitThreads / kWarpSize; ++warp) {
                largest[0] = max(largest[0], spans[warp].x);
                largest[1] = max(largest[1], spans[warp].y);
            }
            k_field = field_to_reach(largest[0], 10);
            v_field = field_to_reach(largest[1], 12);
        }
        __syncwarp();  // what other lanes have copied is there
        Fit k_fit;
        Fit v_fit;
        split_panel(panels, power_of_two(k_field), thread, k_fit);
        split_panel(panels + kPanelBytes, power_of_two(v_field), thread, v_fit);
        ++number;
        if (thread == 0) shared.notes[split_slot].k_field = k_field, shared.notes[split_slot].v_field = v_field;
        if (k_fit.fails(0x1p-4f, 0x1p15f) || v_fit.fails(0x1p-1f, 0x1p15f)) shared.notes[split_slot].misfit = number;
        fence_async_proxy();
        barrier_arrive(&shared.full[split_slot]);
        if (++split_slot == kChunks) split_slot = 0;
        firsts >>= 1;
        --pending;
    };
#pragma unroll 1
    while (passes.next()) {
        const HeadView<float> view = head_view<float>(args, passes.sequence, passes.head);
#pragma unroll 1
        for (int chunk = 0; chunk < passes.chunks; ++chunk) {
            if (!__all_sync(kFullMask, barrier_test(&shared.empty[slot], parity))) {
                copy_async_wait<0>();
#pragma unroll 1
                while (pending > 0) split_oldest();
                barrier_wait(&shared.empty[slot], parity);
                __syncwarp();
            }
            const int first = chunk * kChunkKeys;
            const int count = passes.place.k_len - first;
            unsigned char* panels = shared.ring + slot * 2 * kPanelBytes;
            if (thread == 0) shared.notes[slot].k = view.k, shared.notes[slot].v = view.v;
            copy_panel<kAligned>(panels, view.k + first * args.k_token_stride, args.k_token_stride, count, thread);
            copy_panel<kAligned>(panels + kPanelBytes, view.v + first * args.v_token_stride, args.v_token_stride, count,
                                 thread);
            copy_async_commit();
            firsts |= (chunk == 0 ? 1u : 0u) << pending;
            if (++pending > kLag) {
                copy_async_wait<kLag>();
                split_oldest();
            }
            if (++slot == kChunks) {
                slot = 0;
                parity ^= 1;
            }
        }
    }
    copy_async_wait<0>();
#pragma unroll 1
    while (pending > 0) split_oldest();
}

// ---- The groups that compute ----

// Sets the reference of a row by the largest of its first kBlocks x 8 scores, if that is too far above it. Returns what
// was summed so far must be multiplied by.
template <int kBlocks>
__device__ __forceinline__ float find_reference(SplitSoftmax<10, 11>& softmax, const Fragment (&scores)[kSteps * 2],
                                                int half, float unit) {
    float largest = -INFINITY;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        largest = fmaxf(largest, fmaxf(scores[block][half * 2], scores[block][half * 2 + 1]));
    }
    return softmax.rebase_if_lagging(quad_max(largest) * unit);
}

// The scores of a warp's 16 rows with a tile's keys, as wgmma finds them, by the warp alone.
__device__ __forceinline__ void find_scores(Fragment (&scores)[kSteps * 2], const SplitQueries<kD>& q,
                                            const unsigned char* panel, int lane) {
    // A number that is known only here: else the compiler prepares addresses where they are hardly ever needed.
    lane = __shfl_sync(kFullMask, lane, lane);
#pragma unroll
    for (int n = 0; n < kSteps * 2; ++n) {
        uint32_t high[4];
        uint32_t low[4];
        ldmatrix_x4(high, panel + swizzled_offset<128>(n * 8 + lane % 8, lane / 8 * 16));
        ldmatrix_x4(low, panel + swizzled_offset<128>(n * 8 + lane % 8, lane / 8 * 16 + 64));
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(scores[n], q.high[c], {low[c * 2], low[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(scores[n], q.low[c], {high[c * 2], high[c * 2 + 1]});
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(scores[n], q.high[c], {high[c * 2], high[c * 2 + 1]});
    }
}

template <bool kAligned>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared& shared,
                                        const TaskQueues<kGroups>& queues, int group, int group_warp, int lane,
                                        const ScoreFactor& factor) {
    const uint32_t ring = shared_address(shared.ring) / 16;
    constexpr int kPanelSize = kPanelBytes / 16;
    // A weight is at most its lane's sum over the tile; fp16 ends at 65,504.
    constexpr float kLargestSum = 65000.0f;

    Fragment scores[kSteps * 2];
    Fragment sums[kD / 8];
    Fragment tile_sums[kD / 8];
    uint32_t high[kSteps][4] = {};
    uint32_t low[kSteps][4] = {};
    SplitQueries<kD> q;

    const auto issue_scores = [&](int slot) {
        const uint32_t panel = ring + slot * (2 * kPanelSize);
        const auto multiply = [&](const uint32_t (&a)[4], int offset, int add) {
            wgmma_k16<__half, kChunkKeys, false>(scores, a, tile_descriptor<128>(panel + offset, 1), add);
        };
        // Small products first: the sum is rounded off in its last place only when the large ones join. 16 columns are
        // 2 x 16 bytes, the low terms begin after 4.
        multiply(q.high[0], 4, 0);
        multiply(q.high[1], 6, 1);
        multiply(q.low[0], 0, 1);
        multiply(q.low[1], 2, 1);
        multiply(q.high[0], 0, 1);
        multiply(q.high[1], 2, 1);
        wgmma_commit();
    };
    // Of one tile, small products first again. Tensor cores cut off what does not fit a sum, always towards zero, which
    // adds up over many tiles: these join the sums of all by an addition that rounds to the nearest.
    const auto issue_tile_sums = [&](int slot) {
        const uint32_t panel = ring + slot * (2 * kPanelSize) + kPanelSize;
        const auto multiply = [&](const uint32_t (&a)[4], int offset, int add) {
            wgmma_k16<__half, kD, true>(tile_sums, a, tile_descriptor<128>(panel + offset, 1), add);
        };
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            multiply(high[step], step * 128 + 4, step > 0);
            multiply(low[step], step * 128, 1);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) multiply(high[step], step * 128, 1);
        wgmma_commit();
    };
    const auto add_tile_sums = [&] {
#pragma unroll
        for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[column][i] += tile_sums[column][i];
        }
    };
    // A chunk's place and turn in the ring.
    struct At {
        int slot;
        int parity;
        __device__ __forceinline__ void advance() {
            if (++slot == kChunks) {
                slot = 0;
                parity ^= 1;
            }
        }
    };
    const auto wait_for = [&](At at) { barrier_wait(&shared.full[at.slot], at.parity); };
    const auto give_back = [&](At at) {
        if (lane == 0) barrier_arrive(&shared.empty[at.slot]);
    };
    // Gives back chunks that this group has no use for; each must have come before.
    const auto skip = [&](At at, int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            wait_for(at);
            give_back(at);
            at.advance();
        }
    };

    // Rows go to warps in turn, so that the last rows of units do not all fall to the same quarter.
    const auto first_row_of = [&](const Task& task) {
        return uniform((group_warp + task.rotation) % kGroupWarps * 16);
    };
    const auto place_of = [](const Task& task) { return At{uniform(task.slot), uniform(task.parity)}; };
    // Waits for the task of a turn and starts the copy of its queries: each warp copies and reads its own.
    float(*queries)[kQueryPitch] = shared.queries[group] + group_warp * 16;
    const auto prepare = [&](int turn) {
        const Task& task = queues.look(group, turn);
        const int first_row = first_row_of(task);
        __syncwarp();  // the queries before have been read
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const int row = i + lane / 8;
            const bool exists = first_row + row < task.rows;
            const float* from = static_cast<const float*>(task.q) +
                                (exists ? first_row + row : 0) * args.q_token_stride + lane % 8 * 4;
            float* to = &queries[row][lane % 8 * 4];
            if (kAligned) {
                copy_async<16>(to, from, exists);
            } else {
#pragma unroll
                for (int word = 0; word < 4; ++word) copy_async<4>(to + word, from + word, exists);
            }
        }
        copy_async_commit();
    };
    const auto use_queries = [&] {
        copy_async_wait<0>();
        __syncwarp();
        q.load(16, factor, [&](int row, int column) { return load_vector<float2>(&queries[row][column]); });
    };

    prepare(0);
    {
        const Task& first = queues.look(group, 0);
        skip({0, 0}, uniform(first.chunk));
        if (uniform(first.tiles) == 0) return;
        use_queries();
        const At at = place_of(first);
        wait_for(at);
        wgmma_fence();
        issue_scores(at.slot);
    }
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        prepare(turn + 1);
        const Task& task = queues.look(group, turn);
        const int tiles = uniform(task.tiles);
        const int whole_tiles = uniform(task.whole_tiles);
        const bool is_last = uniform(task.is_last) != 0;
        const int first_row = first_row_of(task);
        const bool exists = first_row < uniform(task.rows);
        At at = place_of(task);
        const int v_field = shared.notes[at.slot].v_field;
        float unit[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int k_field = shared.notes[at.slot].k_field;
            unit[half] = fmaxf(q.inverse[half] * inverse_power_of_two(k_field), 0x1p-126f);
        }
        const float largest_unit = fmaxf(unit[0], unit[1]);
        // As in Trust.
        bool broken = q.untrusted || !(largest_unit <= 0x1p60f) || (q.wide && largest_unit > 0x1p-18f);
        SplitSoftmax<10, 11> softmax[2];
        bool is_steep = false;
#pragma unroll
        for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[column][i] = 0.0f;
        }

#pragma unroll 1
        for (int tile = 0;; ++tile) {
            const bool is_last_tile = tile + 1 == tiles;
            At following = at;
            following.advance();
            broken = broken || shared.notes[at.slot].misfit == task.chunk + tile + 1;
            if (!is_last_tile) wait_for(following);
            wgmma_wait<0>();
            if (tile > 0) {
                add_tile_sums();
                if (is_last) give_back({(at.slot == 0 ? kChunks : at.slot) - 1, 0});
            }
            if (exists) {
                const bool is_whole = tile < whole_tiles;
                const int most_seen = min(task.k_len, task.causal_keys + first_row + 15) - tile * kChunkKeys;
                float tile_sum[2];
                // The weights of the keys that a row of the warp sees (kWhole: all of them), and their sums.
                const auto weigh = [&](auto whole) {
                    constexpr bool kWhole = decltype(whole)::value;
                    tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (!kWhole && step * 16 >= most_seen) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) high[step][i] = low[step][i] = 0;
                            continue;
                        }
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int half = i % 2;
                            const Fragment& score = scores[step * 2 + i / 2];
                            const float one = exp2_approx(score[half * 2] * unit[half] - softmax[half].reference);
                            const float other = exp2_approx(score[half * 2 + 1] * unit[half] - softmax[half].reference);
                            tile_sum[half] += one + other;
                            const SplitPair terms = split(one, other);
                            high[step][i] = terms.high;
                            low[step][i] = terms.low;
                        }
                    }
                };
                bool looks_for_max = tile == 0 || is_steep;
                while (true) {
                    if (!is_whole) {
                        int sees[2];
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            sees[half] = min(task.k_len, task.causal_keys + first_row + half * 8 + lane / 4) -
                                         tile * kChunkKeys;
                        }
#pragma unroll
                        for (int block = 0; block < kSteps * 2; ++block) {
                            hide_keys(scores[block], block * 8, sees, lane, -INFINITY);
                        }
                    }
                    if (looks_for_max) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const float change = find_reference<kSteps * 2>(softmax[half], scores, half, unit[half]);
                            if (tile > 0) {
#pragma unroll
                                for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
                                    for (int i = half * 2; i < half * 2 + 2; ++i) sums[column][i] *= change;
                                }
                            }
                        }
                    }
                    if (is_whole) {
                        weigh(std::true_type{});
                    } else {
                        weigh(std::false_type{});
                    }
                    const bool fits = tile_sum[0] <= kLargestSum && tile_sum[1] <= kLargestSum;
                    if (looks_for_max || __all_sync(kFullMask, fits)) break;
                    looks_for_max = is_steep = true;  // from here on, references are raised before weights are too large
                    find_scores(scores, q, shared.ring + at.slot * (2 * kPanelBytes), lane);
                }
                softmax[0].sum += tile_sum[0];
                softmax[1].sum += tile_sum[1];
            }
            wgmma_fence();
            issue_tile_sums(at.slot);
            if (is_last_tile) break;
            at = following;
            wgmma_fence();
            issue_scores(at.slot);
        }

        broken = exists && __any_sync(kFullMask, broken);
        if (broken) {
            wgmma_wait<0>();
            QueryBlock block;
            block.q = static_cast<const float*>(task.q);
            block.out = static_cast<float*>(task.out);
            block.k = shared.notes[at.slot].k;
            block.v = shared.notes[at.slot].v;
            block.rows = task.rows;
            block.k_len = task.k_len;
            block.causal_keys = task.causal_keys;
            attend_exactly<kD>(args, block, first_row, 16);
        }
        const Task& next = queues.look(group, turn + 1);
        const bool has_next = uniform(next.tiles) != 0;
        const int unused = uniform(next.chunk) - uniform(task.chunk) - tiles;  // chunks between this unit and the next
        const auto end_sums = [&] {
            wgmma_wait<0>();
            add_tile_sums();
            if (is_last) {
                give_back(at);
                at.advance();
                skip(at, unused);
            }
        };
        const auto store = [&] {
            if (exists && !broken) {
                QueryBlock block;
                block.out = static_cast<float*>(task.out);
                block.rows = task.rows;
                store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, v_field, kAligned,
                                     [&](int i, int half, int j) { return sums[i][half * 2 + j]; });
            }
            queues.done(group, turn, lane);
        };
        if (!has_next) {
            end_sums();
            store();
            return;
        }
        use_queries();
        end_sums();
        const At first = place_of(next);
        wait_for(first);
        wgmma_fence();
        issue_scores(first.slot);
        store();
    }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor) {
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(kChunks * 2 * kPanelBytes + 1024);
    Shared shared;
    shared.ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    shared.full = memory.take<uint64_t>(kChunks);
    shared.empty = memory.take<uint64_t>(kChunks);
    shared.notes = memory.take<ChunkNotes>(kChunks);
    shared.queries = memory.take<Queries>(kGroups);
    shared.spans = memory.take<uint4>(2 * (kSplitThreads / kWarpSize));
    const TaskQueues<kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < kChunks) {
        barrier_init(&shared.full[threadIdx.x], kSplitThreads);
        barrier_init(&shared.empty[threadIdx.x], kGroups * kGroupWarps);
        shared.notes[threadIdx.x].misfit = 0;
    }
    queues.init(kGroupWarps);
    __syncthreads();
    if (warp >= kGroups * kGroupWarps) {
        give_registers_back<kSplitRegisters>();
        const Passes32 passes(args, lane);
        if (warp == kThreads / kWarpSize - 1) {
            deal<float, kChunks>(passes, queues, lane);
        } else {
            split_chunks<kAligned>(passes, shared, threadIdx.x % kGroupThreads);
        }
    } else {
        take_registers<kRegisters>();
        compute<kAligned>(args, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
    }
}

}  // namespace split_warpgroups

tilerank_status attention_split_warpgroups(const AttentionArgs& args, void*, void* stream) {
    using namespace split_warpgroups;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(kChunks * 2 * kPanelBytes + 1024) +
        2 * DynamicShared::bytes<uint64_t>(kChunks) + DynamicShared::bytes<ChunkNotes>(kChunks) +
        DynamicShared::bytes<Queries>(kGroups) + DynamicShared::bytes<uint4>(2 * (kSplitThreads / kWarpSize)) +
        TaskQueues<kGroups>::bytes();
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant split_warpgroups: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
                      static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    const int64_t units = args.batch * args.heads * ((args.q_len + kUnitRows - 1) / kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks("split_warpgroups", rows_aligned_16(args) ? kernel<true> : kernel<false>, blocks, kThreads,
                         kSharedBytes, stream, args, score_factor(args));
}

}  // namespace tilerank
