// TF32 warpgroups: split_warpgroups with the product of high terms alone, lossy. A term of fp16, brought into its range by
// a power of two, keeps the 11 bits that TF32 keeps and costs tensor cores half as much; rows out of that range are done
// again in double. Four warpgroups compute: there are no low terms to hold.
// Prediction: 70 us packed. Instructions a tile fall from 320 to 200 for each scheduler, products from 384 to 128 cycles;
//   it stays behind the 57 us of warpgroups by twice the bytes and by what rounds keys and values.
// Answer: metrics/<machine>/bench_attention_tf32_warpgroups.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/panels.cuh"
#include "common/wgmma.cuh"

namespace tilerank {
namespace tf32_warpgroups {

constexpr int kD = kPanelColumns;
constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;

// Warpgroups that compute, beside one that rounds and one of which a warp deals out the units. Scores, weights, sums and
// queries take 72 registers of theirs; a block has 65,536, in eights a thread.
constexpr int kGroups = 4;
constexpr int kRegisters = 104;
constexpr int kRoundRegisters = 48;
constexpr int kRoundThreads = kGroupThreads;
constexpr int kThreads = (kGroups + 2) * kGroupThreads;
constexpr int kChunks = 11;  // of the ring: a panel of keys and one of values each, 176 of 227 KB
constexpr int kResident = 8;
constexpr int kQueryPitch = kD + 8;  // a warp's reads of 8 bytes then meet no bank twice
using Queries = float[kUnitRows][kQueryPitch];
using Passes32 = Passes<kUnitRows, kGroups, kResident>;

using Ring = PanelRing<1, kChunks, kRoundThreads>;

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
        uint32_t k[4];
        ldmatrix_x4(k, panel + swizzled_offset<128>(n * 8 + lane % 8, lane / 8 * 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; ++c) mma_m16n8k16<__half>(scores[n], q.high[c], {k[c * 2], k[c * 2 + 1]});
    }
}

template <bool kAligned>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared& shared,
                                        const TaskQueues<kGroups>& queues, int group, int group_warp, int lane,
                                        const ScoreFactor& factor) {
    const uint32_t ring = shared_address(shared.ring.panels) / 16;
    constexpr int kPanelSize = kPanelBytes / 16;
    // A weight is at most its lane's sum over the tile; fp16 ends at 65,504.
    constexpr float kLargestSum = 65000.0f;

    Fragment scores[kSteps * 2];
    Fragment sums[kD / 8];
    uint32_t weights[kSteps][4] = {};
    SplitQueries<kD> q;

    const auto issue_scores = [&](int slot) {
        const uint32_t panel = ring + slot * (2 * kPanelSize);
        const auto multiply = [&](const uint32_t (&a)[4], int offset, int add) {
            wgmma_k16<__half, kChunkKeys, false>(scores, a, tile_descriptor<128>(panel + offset, 1), add);
        };
        multiply(q.high[0], 0, 0);  // 16 columns are 2 x 16 bytes
        multiply(q.high[1], 2, 1);
        wgmma_commit();
    };
    const auto issue_sums = [&](int slot, bool is_first) {
        const uint32_t panel = ring + slot * (2 * kPanelSize) + kPanelSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            wgmma_k16<__half, kD, true>(sums, weights[step], tile_descriptor<128>(panel + step * 128, 1),
                                        step > 0 || !is_first);
        }
        wgmma_commit();
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
    int passed = 0;  // chunks that this group has given back
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
        prepare(turn + 1);
        const int whole_tiles = uniform(task.whole_tiles);
        const bool is_last = uniform(task.is_last) != 0;
        const int first_row = first_row_of(task);
        const bool exists = first_row < uniform(task.rows);
        At at = place_of(task);
        after = at;
        wait_for(at);
        const int v_field = shared.ring.notes[at.slot].v_field;
        float unit[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int k_field = shared.ring.notes[at.slot].k_field;
            unit[half] = fmaxf(q.inverse[half] * inverse_power_of_two(k_field), 0x1p-126f);
        }
        const float largest_unit = fmaxf(unit[0], unit[1]);
        // As in Trust.
        bool broken = q.untrusted || !(largest_unit <= 0x1p60f);
        SplitSoftmax<10, 11> softmax[2];
        bool is_steep = false;

#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            wait_for(at);
            broken = broken || shared.ring.notes[at.slot].misfit == chunk + tile + 1;
            wgmma_fence();
            issue_scores(at.slot);
            wgmma_wait<0>();
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
                            weights[step][i] = pack16<__half>(one, other);
                        }
                    }
                    const bool fits = tile_sum[0] <= kLargestSum && tile_sum[1] <= kLargestSum;
                    if (looks_for_max || __all_sync(kFullMask, fits)) break;
                    looks_for_max = is_steep = true;  // from here on, references are raised before weights are too large
                    find_scores(scores, q, shared.ring.panels + at.slot * (2 * kPanelBytes), lane);
                }
                softmax[0].sum += tile_sum[0];
                softmax[1].sum += tile_sum[1];
            }
            wgmma_fence();
            issue_sums(at.slot, tile == 0);
            wgmma_wait<0>();
            if (tile + 1 < tiles) {
                if (is_last) give_back(at);
                at.advance();
            }
        }

        broken = exists && __any_sync(kFullMask, broken);
        if (broken) {
            QueryBlock block;
            block.q = static_cast<const float*>(task.q);
            block.out = static_cast<float*>(task.out);
            block.k = shared.ring.notes[at.slot].k;
            block.v = shared.ring.notes[at.slot].v;
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
            QueryBlock block;
            block.out = static_cast<float*>(task.out);
            block.rows = task.rows;
            store_split_rows<kD>(block, args.out_token_stride, first_row, softmax, v_field, kAligned,
                                 [&](int i, int half, int j) { return sums[i][half * 2 + j]; });
        }
        queues.done(group, turn, lane);
    }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor) {
    DynamicShared memory;
    const Shared shared = {Ring(memory), memory.take<Queries>(kGroups)};
    const TaskQueues<kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    shared.ring.init(kGroups * kGroupWarps);
    queues.init(kGroupWarps);
    UnitPlace places[2];
    if (warp >= kGroups * kGroupWarps) find_places<kUnitRows>(args, places, lane);
    __syncthreads();
    if (warp >= (kGroups + 1) * kGroupWarps) {
        give_registers_back<kRoundRegisters>();
        if (warp == (kGroups + 1) * kGroupWarps) deal<float, kChunks>(Passes32(args, places), queues, lane);
    } else if (warp >= kGroups * kGroupWarps) {
        give_registers_back<kRoundRegisters>();
        shared.ring.template fill<kAligned>(Passes32(args, places), threadIdx.x % kGroupThreads);
    } else {
        take_registers<kRegisters>();
        compute<kAligned>(args, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
    }
}

}  // namespace tf32_warpgroups

tilerank_status attention_tf32_warpgroups(const AttentionArgs& args, void*, void* stream) {
    using namespace tf32_warpgroups;
    constexpr size_t kSharedBytes =
        Ring::shared_bytes() + DynamicShared::bytes<Queries>(kGroups) + TaskQueues<kGroups>::bytes();
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant tf32_warpgroups: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
                      static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    const int64_t units = args.batch * args.heads * ((args.q_len + kUnitRows - 1) / kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks("tf32_warpgroups", rows_aligned_16(args) ? kernel<true> : kernel<false>, blocks, kThreads,
                         kSharedBytes, stream, args, score_factor(args));
}

}  // namespace tilerank
