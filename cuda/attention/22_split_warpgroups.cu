// Split warpgroups: one block a multiprocessor with an equal part of all 64-row units, whose warps do one thing each.
// One has the copy engine bring the keys of a (sequence, head) pair, once for all its units, into a ring that holds whole
// pairs, and deals out units; three split them; three warpgroups compute, each alone, without a barrier between them.
// Prediction: 70 us packed, from 120. A tile of 64 rows x 64 keys takes each scheduler 320 instructions in the groups
//   and 50 for splitting instead of 590; at 0.6 instructions a cycle 60 us, and 10 us for start and end.
// Answer: metrics/<machine>/bench_attention_split_warpgroups.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/panels.cuh"
#include "common/wgmma.cuh"

namespace tilerank {
namespace split_warpgroups {

constexpr int kD = kPanelColumns;
constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;

// Warpgroups that compute, beside the one that brings and splits. Scores, weights, sums and queries take 112 registers
// of theirs; a block has 65,536, in eights a thread.
constexpr int kGroups = 3;
constexpr int kRegisters = 144;
constexpr int kSplitRegisters = 80;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
static_assert(kGroupThreads * (kGroups * kRegisters + kSplitRegisters) <= registers_at_start(kThreads));
constexpr int kChunks = 12;  // of the ring: a panel of keys and one of values each, 192 of 227 KB
constexpr int kResident = 8;
constexpr int kCost = 2;     // of a unit's begin and end, in chunks, as kUnitCost
constexpr int kQueryPitch = kD + 8;  // a warp's reads of 8 bytes then meet no bank twice
using Queries = float[kUnitRows][kQueryPitch];
using Passes32 = Passes<kUnitRows, kGroups, kResident>;

using Ring = PanelRing<kChunks, kGroupWarps - 1>;

// What the warps of a block share.
struct Shared {
    Ring ring;
    Queries* queries;  // [kGroups]
};

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
    const uint32_t ring = kept(shared_address(shared.ring.panels) / 16);  // else it is computed again for every tile
    constexpr int kPanelSize = kPanelBytes / 16;
    // A weight is at most its lane's sum over the tile; fp16 ends at 65,504.
    constexpr float kLargestSum = 65000.0f;

    Fragment scores[kSteps * 2];
    Fragment sums[kD / 8];
    Fragment tile_sums[kD / 8];
    uint32_t high[kSteps][4];
    uint32_t low[kSteps][4];
    SplitQueries<kD> q;

    const auto issue_scores = [&](uint32_t panel) {
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
    const auto issue_tile_sums = [&](uint32_t panel) {
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
    const auto add_tile_sums = [&](float v_unit) {
#pragma unroll
        for (int column = 0; column < kD / 8; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[column][i] += tile_sums[column][i] * v_unit;
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
    const auto wait_for = [&](At at) { barrier_wait(&shared.ring.full[at.slot], at.parity); };
    const auto give_back = [&](At at) {
        if (lane == 0) barrier_arrive(&shared.ring.empty[at.slot]);
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
        const int row = first_row_of(task) + lane / 8;
        const int rows = task.rows;
        // Behind the last row nothing is read.
        const float* from = static_cast<const float*>(task.q) + row * args.q_token_stride + lane % 8 * 4;
        __syncwarp();  // the queries before have been read
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const bool exists = row + i < rows;
            float* to = &queries[lane / 8 + i][lane % 8 * 4];
            if (kAligned) {
                copy_async<16>(to, from, exists);
            } else {
#pragma unroll
                for (int word = 0; word < 4; ++word) copy_async<4>(to + word, from + word, exists);
            }
            from += 4 * args.q_token_stride;
        }
        copy_async_commit();
    };
    const auto use_queries = [&] {
        copy_async_wait<0>();
        __syncwarp();
        q.load(16, factor, [&](int row, int column) { return load_vector<float2>(&queries[row][column]); });
    };

    wait_for_previous();  // from here on queries are read and rows written
    prepare(0);
    int passed = 0;     // chunks that this group has given back
    At after = {0, 0};  // the one behind them
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        const Task& task = queues.look(group, turn);
        const int tiles = uniform(task.tiles);
        const int chunk = uniform(task.chunk);
        skip(after, chunk - passed);
        passed = max(passed, chunk);
        if (tiles == 0) return;
        use_queries();
        const int whole_tiles = uniform(task.whole_tiles);
        const bool is_last = uniform(task.is_last) != 0;
        const int first_row = first_row_of(task);
        const bool exists = first_row < uniform(task.rows);
        At at = place_of(task);
        after = at;
        // As in Trust.
        const float most_unit = q.wide ? 0x1p-18f : 0x1p60f;
        bool broken = q.untrusted;
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
            const uint32_t panel = warp_register(ring + at.slot * (2 * kPanelSize));
            wait_for(at);
            const uint4 notes = load_vector<uint4>(&shared.ring.notes[at.slot]);
            wgmma_fence();
            issue_scores(panel);
            if (tile == 0) prepare(turn + 1);  // behind the products
            wgmma_wait<0>();
            float unit[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unit[half] = fmaxf(q.inverse[half] * __uint_as_float(notes.x), 0x1p-126f);
            }
            broken = broken || notes.z == static_cast<unsigned>(chunk + tile + 1) ||
                     !(fmaxf(unit[0], unit[1]) <= most_unit);
            if (exists) {
                float tile_sum[2];
                bool looks_for_max = tile == 0 || is_steep;
                while (true) {
                    if (tile >= whole_tiles) {
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
                    tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
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
                    const bool fits = tile_sum[0] <= kLargestSum && tile_sum[1] <= kLargestSum;
                    if (looks_for_max || __all_sync(kFullMask, fits)) break;
                    looks_for_max = is_steep = true;  // from here on, references are raised before weights are too large
                    find_scores(scores, q, shared.ring.panels + at.slot * (2 * kPanelBytes), lane);
                }
                softmax[0].sum += tile_sum[0];
                softmax[1].sum += tile_sum[1];
            } else {  // of rows that are not there: else weights would live on from tile to tile
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) let_go(high[step][i]), let_go(low[step][i]);
                }
            }
            wgmma_fence();
            issue_tile_sums(panel + kPanelSize);
            wgmma_wait<0>();
            add_tile_sums(__uint_as_float(notes.y));
            if (is_last_tile) break;
            if (is_last) give_back(at);
            at.advance();
        }

        broken = exists && __any_sync(kFullMask, broken);
        if (broken) {
            const ChunkNotes& notes = shared.ring.notes[at.slot];
            const HeadView<float> view = head_view<float>(args, notes.sequence, notes.head);
            QueryBlock block;
            block.q = static_cast<const float*>(task.q);
            block.out = static_cast<float*>(task.out);
            block.k = view.k;
            block.v = view.v;
            block.rows = task.rows;
            block.k_len = task.k_len;
            block.causal_keys = task.causal_keys;
            attend_exactly<kD>(args, block, first_row, 16);
        }
        if (is_last) {
            give_back(at);
            at.advance();
            after = at;
            passed = chunk + tiles;
        }
        if (exists && !broken) {
            const int rows = task.rows;
            const int row = first_row + lane / 4;
            float* out = static_cast<float*>(task.out) + row * args.out_token_stride + lane % 4 * 2;
            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = softmax[half].sum;
                sum += __shfl_xor_sync(kFullMask, sum, 1);
                sum += __shfl_xor_sync(kFullMask, sum, 2);
                inverse[half] = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (row + half * 8 < rows) {
#pragma unroll
                    for (int i = 0; i < kD / 8; ++i) {
                        const float2 pair = {sums[i][half * 2] * inverse[half], sums[i][half * 2 + 1] * inverse[half]};
                        if (kAligned) {
                            store_vector(out + i * 8, pair);
                        } else {
                            out[i * 8] = pair.x, out[i * 8 + 1] = pair.y;
                        }
                    }
                }
                out += 8 * args.out_token_stride;
            }
        }
        queues.done(group, turn, lane);
    }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ AttentionArgs args, const __grid_constant__ PanelMaps maps, ScoreFactor factor) {
    let_next_begin();  // a block that needs a multiprocessor's memory gets it when one of these ends
    DynamicShared memory;
    const Shared shared = {Ring(memory), memory.take<Queries>(kGroups)};
    const TaskQueues<kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (kAligned && threadIdx.x == kThreads - kWarpSize) {
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
    }
    shared.ring.init(kGroups * kGroupWarps, kAligned);
    queues.init(kGroupWarps);
    UnitPlace places[2];
    const bool brings = warp + 1 == kThreads / kWarpSize;
    if (brings) find_places<kUnitRows, kCost>(args, places, lane);
    __syncthreads();
    if (warp >= kGroups * kGroupWarps) {
        give_registers_back<kSplitRegisters>();
        if (brings) {
            const Passes32 passes(args, places);
            Dealer<float, kChunks, Passes32> dealer(passes, queues);
            wait_for_previous();
            shared.ring.bring(passes, maps, kAligned, lane, [&] {
                dealer.step(lane);
                return dealer.is_done;
            });
        } else {
            shared.ring.split_all(warp % kGroupWarps, lane);
        }
    } else {
        take_registers<kRegisters>();
        compute<kAligned>(args, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
    }
}

template <bool kAligned>
tilerank_status launch_for(const AttentionArgs& args, const PanelMaps& maps, void* stream) {
    constexpr size_t kSharedBytes = Ring::shared_bytes() + DynamicShared::bytes<Queries>(kGroups) +
                                    TaskQueues<kGroups>::bytes();
    static_assert(kSharedBytes <= 227 * 1024);
    const int64_t units = args.batch * args.heads * ((args.q_len + kUnitRows - 1) / kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks_overlapped(args.overlap != 0, "split_warpgroups", kernel<kAligned>, blocks, kThreads,
                                    kSharedBytes, stream, args, maps, score_factor(args));
}

}  // namespace split_warpgroups

tilerank_status attention_split_warpgroups(const AttentionArgs& args, void*, void* stream) {
    using namespace split_warpgroups;
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant split_warpgroups: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
                      static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    PanelMaps maps = {};
    return rows_aligned_16(args) && make_panel_maps(&maps, args) ? launch_for<true>(args, maps, stream)
                                                                 : launch_for<false>(args, maps, stream);
}

}  // namespace tilerank
