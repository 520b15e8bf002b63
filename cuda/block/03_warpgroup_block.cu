// Warpgroup block: the block in two launches on Hopper. The first brings rows and weights by bulk copies, normalises
// the rows where they lie and multiplies; the second is attention as rung 19 of the attention has it, and the output
// projection in the same blocks, as soon as the heads of its rows are there.
// Prediction: at 4 x 128 tokens of width 1024 22 us beside 43 us unfused; at 4 x 1024 118 us beside 125; at 4 x 4096
//   800 us beside 830: the products at 600 TFLOP/s, one launch's worth of memory traffic and five launches saved.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include "common/block_hopper.cuh"
#include "common/parts.h"
#include "common/softmax.cuh"

namespace tilerank {
namespace warpgroup_block {

using namespace block_hopper;

constexpr const char* kName = "warpgroup_block";
constexpr int kSteps = kChunkKeys / 16;

// ---- Launch 2: attention, then the output projection ----

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores, weights, sums and the queries of two units take
    // 48 + D registers of theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = D <= 32 ? 4 : D <= 64 ? 3 : 2;
    static constexpr int kRegisters = D <= 32 ? 104 : D <= 64 ? 152 : 224;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kCopyWarps = 3;  // the fourth deals out the units
    // A chunk is a tile of keys and one of values, each in parts of kRowBytes a row: the widest swizzle that divides D.
    static constexpr int kColumns = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPartBytes = kChunkKeys * kRowBytes;
    static constexpr int kTileBytes = kChunkKeys * D * 2;
    // Row sums come out of the product with the values, as one more block of columns that is all ones, where the values
    // are one part and the block can lie anywhere beyond it.
    static constexpr bool kSumsByProduct = D == kColumns;
    static constexpr int kSumColumns = D + (kSumsByProduct ? 8 : 0);
    static constexpr int kOnesBytes = kSumsByProduct ? 16 * kRowBytes : 0;
    static constexpr int kChunks = 196608 / (2 * kTileBytes);  // of the ring: 192 of 227 KB
    static constexpr int kResident = kChunks * 2 / 3;
    static constexpr int kRingBytes = kChunks * 2 * kTileBytes;
};

template <int D>
constexpr bool shares_registers =
    Shape<D>::kGroups * Shape<D>::kRegisters + Shape<D>::kCopyRegisters <=
    (Shape<D>::kGroups + 1) * launch_registers(Shape<D>::kThreads);
static_assert(shares_registers<32> && shares_registers<64> && shares_registers<80> && shares_registers<96> &&
              shares_registers<128>);

template <int D>
using PassesFor = Passes<kUnitRows, Shape<D>::kGroups, Shape<D>::kResident>;

// What the warps of a block share in the attention.
struct Shared {
    unsigned char* ring;
    uint64_t* full;  // of each chunk
    uint64_t* empty;
};

// The counter of finished heads, kGroupWarps a head, of the unit whose attended rows begin at `out`.
__device__ __forceinline__ uint32_t* unit_counter(const BlockPlan& plan, const void* out) {
    const int64_t elements = (static_cast<const char*>(out) - static_cast<const char*>(plan.attention.out)) / 2;
    const uint32_t row = static_cast<uint32_t>(elements / plan.columns);
    const uint32_t tokens = static_cast<uint32_t>(plan.args.tokens);
    return plan.counters + 1 + row / tokens * static_cast<uint32_t>(plan.row_blocks) + row % tokens / kUnitRows;
}

// The weights of a tile, relative to each row's reference; is one of them, on any lane, too large? kWhole: every row of
// the warp sees all keys; else none sees those from any_sees on. kFused: by one multiply-add a score; else (then the
// answer means nothing) as rounded as references are, so that a weight never exceeds 1 by a large score's last place.
// kSum: their sums over the lane's keys go to row_sum.
template <typename Element, bool kWhole, bool kFused, bool kSum>
__device__ __forceinline__ bool weigh(const Fragment (&scores)[kSteps * 2], uint32_t (&weights)[kSteps][4],
                                      float (&row_sum)[2], const float (&reference)[2], float factor, int any_sees) {
    constexpr float kLargestWeight = 16384.0f;  // fp16 ends at 65,504
    float tile_sum[2] = {0.0f, 0.0f};
    uint32_t largest[kSteps] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (!kWhole && step * 16 >= any_sees) {
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[step][i] = 0;
            continue;
        }
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            const float* score = &scores[step * 2 + at / 2][at % 2 * 2];
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                weight[i] = exp2_approx(kFused ? score[i] * factor - reference[at % 2]
                                               : __fmul_rn(score[i], factor) - reference[at % 2]);
            }
            if (kSum) tile_sum[at % 2] += weight[0] + weight[1];
            weights[step][at] = pack16<Element>(weight[0], weight[1]);
        }
        if (!kSum) {
            largest[step] = max16<Element>(max16<Element>(weights[step][0], weights[step][1]),
                                           max16<Element>(weights[step][2], weights[step][3]));
        }
    }
    bool is_off;
    if constexpr (kSum) {  // no weight is larger than the sum
        is_off = tile_sum[0] > 2 * kLargestWeight || tile_sum[1] > 2 * kLargestWeight;
        if (kFused) is_off = __any_sync(kFullMask, is_off);
        if (!kFused || !is_off) row_sum[0] += tile_sum[0], row_sum[1] += tile_sum[1];
        return is_off;
    } else {
        static_assert(kSteps == 4);
        is_off = exceeds16<Element>(
            max16<Element>(max16<Element>(largest[0], largest[1]), max16<Element>(largest[2], largest[3])),
            kLargestWeight);
        return kFused && __any_sync(kFullMask, is_off);
    }
}

// The largest score of each of the lane's rows, among the first kBlocks x 8 keys of the tile.
template <int kBlocks>
__device__ __forceinline__ void find_largest(float (&largest)[2], const Fragment (&scores)[kSteps * 2], float factor) {
    largest[0] = largest[1] = kLowestReference;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], scores[block][i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = __fmul_rn(quad_max(largest[half]), factor);
}

template <typename Element, int D>
__device__ __forceinline__ void attend(const BlockPlan& plan, const Shared& shared,
                                       const TaskQueues<Shape<D>::kGroups>& queues, int group, int group_warp, int lane,
                                       float factor) {
    constexpr bool aligned = true;
    const AttentionArgs& args = plan.attention;
    using S = Shape<D>;
    constexpr bool kSum = !S::kSumsByProduct;
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    // Keys of the first tile that give the first reference, in eights.
    constexpr int kFirstBlocks = 4;
    const uint32_t ring = shared_address(shared.ring) / 16;
    constexpr int kTileSize = S::kTileBytes / 16;

    Fragment scores[kSteps * 2];
    Fragment sums[S::kSumColumns / 8];
    uint32_t q[1][D / 16][4] = {};
    uint32_t next_q[1][D / 16][4] = {};
    uint32_t weights[kSteps][4] = {};

    const auto issue_scores = [&](int slot) {
        const uint32_t tile = ring + slot * (2 * kTileSize);
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            const int column = depth * 16;
            const int offset = (column / S::kColumns * S::kPartBytes + column % S::kColumns * 2) / 16;
            wgmma_k16<Element, kChunkKeys, false>(scores, q[0][depth], tile_descriptor<S::kRowBytes>(tile + offset, 1),
                                                  depth > 0);
        }
        wgmma_commit();
    };
    const auto issue_sums = [&](int slot, bool is_first) {
        const uint32_t tile = ring + slot * (2 * kTileSize) + kTileSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = tile + step * S::kRowBytes;
            // Beyond the values: their next part, or the ones.
            const uint32_t stride = S::kSumsByProduct ? ring + S::kRingBytes / 16 - begin : S::kPartBytes / 16;
            wgmma_k16<Element, S::kSumColumns, true>(sums, weights[step],
                                                     tile_descriptor<S::kRowBytes>(begin, stride),
                                                     step > 0 || !is_first);
        }
        wgmma_commit();
    };
    // A chunk's place and turn in the ring.
    struct At {
        int slot;
        int parity;
        __device__ __forceinline__ void advance() {
            if (++slot == S::kChunks) {
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

    // The unit under way, as this warp sees it, and the next one.
    int turn = 0;
    Task next;
    int next_row = 0;  // of the unit, the first of this warp's 16
    const auto take = [&] {
        next = queues.take(group, turn++, lane);
        next.tiles = uniform(next.tiles);
        next.whole_tiles = uniform(next.whole_tiles);
        next.slot = uniform(next.slot);
        next.parity = uniform(next.parity);
        next.chunk = uniform(next.chunk);
        next.is_last = uniform(next.is_last);
        // Rows go to warps in turn, so that the last rows of units do not all fall to the same quarter.
        next_row = uniform((group_warp + next.rotation) % kGroupWarps * 16);
        next.rows = uniform(next.rows) - next_row;
        if (next.rows > 0) {
            load_queries<D, 1>(next_q, static_cast<const Element*>(next.q) + next_row * args.q_token_stride,
                               args.q_token_stride, next.rows, lane, aligned);
        }
    };
    // Scores become positive multiples of what is asked for: the largest is the same before and after.
    const uint32_t signs = factor < 0.0f ? 0x80008000u : 0u;
    const float size = fabsf(factor);
    const auto use_next_queries = [&] {
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[0][depth][i] = next_q[0][depth][i] ^ signs;
        }
    };

    take();
    skip({0, 0}, next.chunk);
    if (next.tiles == 0) return;
    use_next_queries();
    wait_for({next.slot, next.parity});
    wgmma_fence();
    issue_scores(next.slot);

#pragma unroll 1
    while (next.tiles > 0) {
        const int tiles = next.tiles;
        const int whole_tiles = next.whole_tiles;
        const int rows = next.rows;
        const bool is_last = next.is_last != 0;
        const int end_chunk = next.chunk + tiles;
        const int k_len = next.k_len;
        const int causal_keys = next.causal_keys + next_row;
        uint32_t* heads_done = unit_counter(plan, next.out);
        Element* out = static_cast<Element*>(next.out) + next_row * args.out_token_stride;
        At at = {next.slot, next.parity};
        take();
        float reference[2] = {kLowestReference, kLowestReference};
        float row_sum[2] = {0.0f, 0.0f};
        bool holds_tile = is_last;
        bool is_steep = false;

#pragma unroll 1
        for (int tile = 0;; ++tile) {
            const bool is_last_tile = tile + 1 == tiles;
            At following = at;
            following.advance();
            if (!is_last_tile) wait_for(following);
            wgmma_wait<0>();
            if (is_last && tile > 0) give_back({(at.slot == 0 ? S::kChunks : at.slot) - 1, 0});
            if (rows > 0) {
                const int any_sees = min(k_len, causal_keys + 15) - tile * kChunkKeys;
                const bool is_whole = tile < whole_tiles;
                if (!is_whole) {
                    int sees[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sees[half] = min(k_len, causal_keys + half * 8 + lane / 4) - tile * kChunkKeys;
                    }
                    const int every_sees = min(k_len, causal_keys) - tile * kChunkKeys;
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step * 16 + 16 <= every_sees) continue;
                        hide_keys(scores[step * 2], step * 16, sees, lane, -INFINITY);
                        hide_keys(scores[step * 2 + 1], step * 16 + 8, sees, lane, -INFINITY);
                    }
                }
                if (tile == 0) {
                    // A little below the largest, by which a fused product can differ: that weight is then at least 1.
                    constexpr float kRounding = 0x1p-22f;
                    find_largest<kFirstBlocks>(reference, scores, size);
                    reference[0] -= fabsf(reference[0]) * kRounding;
                    reference[1] -= fabsf(reference[1]) * kRounding;
                }
                if (!is_steep) {
                    is_steep = is_whole ? weigh<Element, true, true, kSum>(scores, weights, row_sum, reference, size, 0)
                                        : weigh<Element, false, true, kSum>(scores, weights, row_sum, reference, size,
                                                                            any_sees);
                }
                if (is_steep) {  // from here on, references are raised before weights can grow too large
                    float largest[2];
                    find_largest<kSteps * 2>(largest, scores, size);
                    if (__any_sync(kFullMask,
                                   largest[0] > reference[0] + kMostAbove || largest[1] > reference[1] + kMostAbove)) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            largest[half] = fmaxf(largest[half], reference[half]);
                            const float rescale = exp2_approx(reference[half] - largest[half]);
                            reference[half] = largest[half];
                            row_sum[half] *= rescale;
#pragma unroll
                            for (int column = 0; column < S::kSumColumns / 8; ++column) {
                                sums[column][half * 2] *= rescale;
                                sums[column][half * 2 + 1] *= rescale;
                            }
                        }
                    }
                    weigh<Element, false, false, kSum>(scores, weights, row_sum, reference, size, any_sees);
                }
            }
            wgmma_fence();
            issue_sums(at.slot, tile == 0);
            if (is_last_tile) break;
            at = following;
            issue_scores(at.slot);
        }
        if (next.tiles > 0) {
            if (is_last && end_chunk < next.chunk) {
                // Nothing may be kept while waiting for chunks so far on that they could need its place.
                wgmma_wait<0>();
                give_back(at);
                at.advance();
                skip(at, next.chunk - end_chunk);
                holds_tile = false;
            }
            use_next_queries();
            wait_for({next.slot, next.parity});
            wgmma_fence();
            issue_scores(next.slot);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        if (holds_tile) {
            give_back(at);
            at.advance();
            if (next.tiles == 0) skip(at, next.chunk - end_chunk);
        }
        if (kSum) row_sum[0] = quad_sum(row_sum[0]), row_sum[1] = quad_sum(row_sum[1]);
        if (!kSum) row_sum[0] = sums[S::kSumColumns / 8 - 1][0], row_sum[1] = sums[S::kSumColumns / 8 - 1][2];
        const float factors[2] = {normalizer(row_sum[0]), normalizer(row_sum[1])};
        store_rows<D>(out, args.out_token_stride, reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors, rows, lane,
                      aligned);
        fence_async_proxy_global();
        __syncwarp();
        if (lane == 0) counter_add(heads_done, 1);
    }
}

// The rings of the attention and of the projection have the same place.
template <typename S, typename Out>
constexpr int ring_bytes =
    S::kRingBytes + S::kOnesBytes > Out::kRingBytes ? S::kRingBytes + S::kOnesBytes : Out::kRingBytes;

template <typename Element, int D, bool kInOut, bool kMany>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    attend_and_project(const __grid_constant__ BlockPlan plan, const __grid_constant__ Maps maps, float factor) {
    using S = Shape<D>;
    using Out = OutShape<S::kGroups, kMany>;
    constexpr int kRingBytes = ring_bytes<S, Out>;
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(kRingBytes + 1024);
    Shared shared;
    shared.ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    shared.full = memory.take<uint64_t>(S::kChunks);
    shared.empty = memory.take<uint64_t>(S::kChunks);
    uint64_t* out_full = memory.take<uint64_t>(Out::kStages);
    uint64_t* out_empty = memory.take<uint64_t>(Out::kStages);
    uint64_t* met = memory.take<uint64_t>(1);
    uint32_t* words = memory.take<uint32_t>(1 + S::kGroups);  // the part taken; of each group: is it the last?
    const TaskQueues<S::kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < Out::kStages) {
        barrier_init(&out_full[threadIdx.x], 1);
        barrier_init(&out_empty[threadIdx.x], S::kGroups * kGroupWarps);
    }
    if (threadIdx.x == 0) barrier_init(met, S::kThreads);
    __syncthreads();
    wait_for_launch_before();
    uint32_t parity = 0;
    const auto meet = [&] {  // all threads, from their roles
        barrier_meet(met, parity);
        parity ^= 1;
    };

    // Each block takes one part of the attention, as a rule. Where blocks begin late, because others have the GPU too,
    // those that run take theirs: whatever the projection waits for is under way.
    const int parts = static_cast<int>(gridDim.x);
    if (warp >= S::kGroups * kGroupWarps) {
        give_registers_back<S::kCopyRegisters>();
        const int copy_warp = warp - S::kGroups * kGroupWarps;
#pragma unroll 1
        for (;;) {
            meet();  // the part is taken
            const int part = uniform(static_cast<int>(words[0]));
            if (part >= parts) break;
            UnitPlace places[2];
            find_places<kUnitRows>(plan.attention, places, lane, part, parts);  // meanwhile the others get the barriers ready
            const PassesFor<D> passes(plan.attention, places);
            meet();
            if (copy_warp == S::kCopyWarps) {
                deal<Element, S::kChunks>(passes, queues, lane);
            } else {
                const auto copy_tile = [&](int slot, int values, const Element* source, int64_t stride, int count) {
                    copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes>(
                        shared.ring + (slot * 2 + values) * S::kTileBytes, source, stride, count, lane, true,
                        [](int row, int column) { return swizzled_offset<S::kRowBytes>(row, column * 2); });
                };
                fill_ring<Element, S::kChunks, S::kCopyWarps>(passes, shared.full, shared.empty, copy_warp, copy_tile,
                                                              [] { fence_async_proxy(); });
            }
            meet();
        }
        if (threadIdx.x == S::kGroups * kGroupThreads) {
            fence_async_proxy();  // the ring was the attention's
            fill_out<Out, kInOut>(plan, maps, shared.ring, out_full, out_empty);
        }
    } else {
        take_registers<S::kRegisters>();
        const auto each_barrier = [&](const auto& of_ring, const auto& of_queues) {
            if (threadIdx.x < S::kChunks) of_ring(threadIdx.x);
            if (threadIdx.x < S::kGroups * TaskQueues<S::kGroups>::kDepth) of_queues(threadIdx.x);
        };
#pragma unroll 1
        for (bool is_first = true;; is_first = false) {
            if (threadIdx.x == 0) words[0] = counter_add(plan.counters, 1);
            if (!is_first) {
                each_barrier([&](int at) { barrier_end(&shared.full[at]), barrier_end(&shared.empty[at]); },
                             [&](int at) { barrier_end(&queues.dealt[at]), barrier_end(&queues.taken[at]); });
            }
            meet();  // the part is taken
            if (static_cast<int>(words[0]) >= parts) break;
            each_barrier(
                [&](int at) {
                    barrier_init(&shared.full[at], kWarpSize);
                    barrier_init(&shared.empty[at], S::kGroups * kGroupWarps);
                },
                [&](int at) {
                    barrier_init(&queues.dealt[at], 1);
                    barrier_init(&queues.taken[at], kGroupWarps);
                });
            for (int at = threadIdx.x * 16; at < S::kOnesBytes; at += S::kGroups * kGroupThreads * 16) {
                const uint32_t ones = pack16<Element>(1.0f, 1.0f);
                store_vector(shared.ring + S::kRingBytes + at, uint4{ones, ones, ones, ones});
            }
            fence_async_proxy();
            meet();
            attend<Element, D>(plan, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
            meet();
        }
        project_out<Element, Out, kInOut>(plan, shared.ring, out_full, out_empty, words + 1, warp / kGroupWarps,
                                          warp % kGroupWarps, lane);
    }
}

// ---- Launching ----

template <typename Element, int D, bool kInOut, bool kMany>
tilerank_status launch_second(const BlockPlan& plan, const Maps& maps, void* stream) {
    using S = Shape<D>;
    using Out = OutShape<S::kGroups, kMany>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(ring_bytes<S, Out> + 1024) +
        2 * DynamicShared::bytes<uint64_t>(S::kChunks) + 2 * DynamicShared::bytes<uint64_t>(Out::kStages) +
        DynamicShared::bytes<uint64_t>(1) + DynamicShared::bytes<uint32_t>(1 + S::kGroups) +
        TaskQueues<S::kGroups>::bytes();
    static_assert(kSharedBytes <= kMostShared);
    const int64_t work = std::max(plan.args.batch * plan.args.num_heads * plan.row_blocks, out_tiles<Out>(plan));
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), work);
    return launched(kName, launch_dependent(attend_and_project<Element, D, kInOut, kMany>,
                                            dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), kSharedBytes,
                                            stream, plan, maps, nonzero_scale_log2(plan.attention)));
}

template <typename Element, int D, bool kInOut>
tilerank_status launch_for(const BlockPlan& plan, void* stream) {
    constexpr int kGroups = Shape<D>::kGroups;
    const Choice choice = Choice::of<kGroups>(plan);
    Maps maps;
    tilerank_status status = describe<kGroups, kInOut>(kName, plan, choice, &maps);
    if (status == TILERANK_OK) status = launch_project<Element, kInOut>(kName, plan, choice, maps, stream);
    if (status != TILERANK_OK) return status;
    return choice.many ? launch_second<Element, D, kInOut, true>(plan, maps, stream)
                       : launch_second<Element, D, kInOut, false>(plan, maps, stream);
}

template <typename Element, bool kInOut>
tilerank_status launch_typed(const BlockPlan& plan, void* stream) {
    switch (plan.args.head_dim) {
        case 32:
            return launch_for<Element, 32, kInOut>(plan, stream);
        case 64:
            return launch_for<Element, 64, kInOut>(plan, stream);
        case 80:
            return launch_for<Element, 80, kInOut>(plan, stream);
        case 96:
            return launch_for<Element, 96, kInOut>(plan, stream);
        default:
            return launch_for<Element, 128, kInOut>(plan, stream);
    }
}

TILERANK_PART_0 template tilerank_status launch_typed<__half, true>(const BlockPlan&, void*);
TILERANK_PART_1 template tilerank_status launch_typed<__half, false>(const BlockPlan&, void*);
TILERANK_PART_2 template tilerank_status launch_typed<__nv_bfloat16, true>(const BlockPlan&, void*);
TILERANK_PART_3 template tilerank_status launch_typed<__nv_bfloat16, false>(const BlockPlan&, void*);

}  // namespace warpgroup_block

#if TILERANK_FIRST_PART
size_t block_warpgroup_block_workspace(const BlockArgs& args) { return plan_bytes(args, warpgroup_block::kUnitRows); }

tilerank_status block_warpgroup_block(const BlockArgs& args, void* workspace, void* stream) {
    using namespace warpgroup_block;
    const BlockPlan plan = make_plan(args, workspace, kUnitRows);
    const tilerank_status status = check_call(kName, plan);
    if (status != TILERANK_OK) return status;
    const bool in_out = args.weight_layout == TILERANK_WEIGHTS_IN_OUT;
    if (args.dtype == TILERANK_FP16) {
        return in_out ? launch_typed<__half, true>(plan, stream) : launch_typed<__half, false>(plan, stream);
    }
    return in_out ? launch_typed<__nv_bfloat16, true>(plan, stream) : launch_typed<__nv_bfloat16, false>(plan, stream);
}
#endif

}  // namespace tilerank
