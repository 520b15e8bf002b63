// Warpgroups: persistent on Hopper's warpgroup products. Units of 64 rows; the next tile's scores, also those of the
// next unit, are computed behind this tile's sums; three warps copy and one deals out the units.
// Prediction: 36 us packed, 2.3 x FA2. exp on the MUFU pipe is 8.3 cycles for 32 scores, 21 us, a twentieth more for
//   rows and keys that pad units; products overlap with it. 3 us launch, 4 us cold start, 1 us until the last unit
//   ends; 4 us for the ends of units.
// Answer: metrics/<machine>/bench_attention_warpgroups.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/softmax.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"

namespace tilerank {
namespace warpgroups {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores, weights, sums and the queries of two units take
    // 48 + D registers of theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = D <= 32 ? 4 : D <= 64 ? 3 : 2;
    static constexpr int kRegisters = D <= 32 ? 104 : D <= 64 ? 152 : 224;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static_assert(kGroupThreads * (kGroups * kRegisters + kCopyRegisters) <= registers_at_start(kThreads));
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
    // Rows of a warp, whose queries and results pass through it: an instruction then reads or writes 512 bytes of global
    // memory in 16-byte parts, where fragments would take 4 bytes a lane of 8 rows.
    static constexpr int kRowsBytes = 16 * D * 2;
    static constexpr int kBytes = kRingBytes + kOnesBytes + kGroups * kGroupWarps * kRowsBytes;
};

template <int D>
using PassesFor = Passes<kUnitRows, Shape<D>::kGroups, Shape<D>::kResident>;

// What the warps of a block share.
struct Shared {
    unsigned char* ring;
    unsigned char* rows;  // of each warp that computes
    uint64_t* full;       // of each chunk
    uint64_t* empty;
};

// ---- The groups that compute ----

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

template <typename Element, int D, bool kAligned>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared& shared,
                                        const TaskQueues<Shape<D>::kGroups>& queues, int group, int group_warp,
                                        int lane, float factor) {
    using S = Shape<D>;
    constexpr bool kSum = !S::kSumsByProduct;
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    // Keys of the first tile that give the first reference, in eights.
    constexpr int kFirstBlocks = 4;
    const uint32_t ring = shared_address(shared.ring) / 16;
    constexpr int kTileSize = S::kTileBytes / 16;

    Fragment scores[kSteps * 2];
    Fragment sums[S::kSumColumns / 8];
    uint32_t q[D / 16][4] = {};
    uint32_t weights[kSteps][4] = {};

    const auto issue_scores = [&](int slot) {
        const uint32_t tile = ring + slot * (2 * kTileSize);
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            const int column = depth * 16;
            const int offset = (column / S::kColumns * S::kPartBytes + column % S::kColumns * 2) / 16;
            wgmma_k16<Element, kChunkKeys, false>(scores, q[depth], tile_descriptor<S::kRowBytes>(tile + offset, 1),
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

    // Eight columns of one of this warp's rows on their way, and which eight of them are this lane's in turn.
    unsigned char* rows_begin = shared.rows + (group * kGroupWarps + group_warp) * S::kRowsBytes;
    const auto place_of = [&](int row, int column) {
        return rows_begin + column / S::kColumns * (16 * S::kRowBytes) +
               swizzled_offset<S::kRowBytes>(row, column % S::kColumns * 2);
    };
    const auto each_eight = [&](const auto& move) {
#pragma unroll
        for (int first = 0; first < 16 * D / 8; first += kWarpSize) {
            const int part = first + lane;
            move(part / (D / 8), part % (D / 8) * 8);
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
        if (next.rows <= 0) return;
        const Element* q = static_cast<const Element*>(next.q) + next_row * args.q_token_stride;
        each_eight([&](int row, int column) {
            // Rows that do not exist are the last one again: what they compute is not written.
            const Element* from = q + min(row, next.rows - 1) * args.q_token_stride + column;
            if (kAligned) {
                copy_async<16>(place_of(row, column), from, true);
            } else {
                store_vector(place_of(row, column), load_eight(from, false));
            }
        });
        copy_async_commit();
    };
    // Scores become positive multiples of what is asked for: the largest is the same before and after.
    const uint32_t signs = factor < 0.0f ? 0x80008000u : 0u;
    const float size = fabsf(factor);
    const auto use_next_queries = [&] {
        copy_async_wait<0>();
        __syncwarp();
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            ldmatrix_x4(q[depth], place_of(lane % 16, depth * 16 + lane / 16 * 8));
#pragma unroll
            for (int i = 0; i < 4; ++i) q[depth][i] ^= signs;
        }
        __syncwarp();
    };

    wait_for_previous();  // from here on queries are read and rows written
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
        if (rows <= 0) continue;
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &sums[depth * 2 + i / 2][i % 2 * 2];
                words[i] = pack16<Element>(pair[0] * factors[i % 2], pair[1] * factors[i % 2]);
            }
            store_matrices(place_of(lane % 16, depth * 16 + lane / 16 * 8), words);
        }
        __syncwarp();
        each_eight([&](int row, int column) {
            const uint4 eight = load_vector<uint4>(place_of(row, column));
            if (row < rows) store_eight(out + row * args.out_token_stride + column, eight, kAligned);
        });
        __syncwarp();  // before the next queries come to lie there
    }
}

template <typename Element, int D, bool kAligned>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1) kernel(AttentionArgs args, float factor,
                                                                           bool /*aligned*/) {
    using S = Shape<D>;
    let_next_begin();  // a block that needs a multiprocessor's memory gets it when one of these ends
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(S::kBytes + 1024);
    Shared shared;
    shared.ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    shared.rows = shared.ring + S::kRingBytes + S::kOnesBytes;
    shared.full = memory.take<uint64_t>(S::kChunks);
    shared.empty = memory.take<uint64_t>(S::kChunks);
    const TaskQueues<S::kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    queues.init_by_warps(kGroupWarps);
    const int copy_warp = warp - S::kGroups * kGroupWarps;
    const auto copy_tile = [&](int slot, int values, const Element* source, int64_t stride, int count) {
        copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes, 8>(
            shared.ring + (slot * 2 + values) * S::kTileBytes, source, stride, count, lane, kAligned,
            [](int row, int column) { return swizzled_offset<S::kRowBytes>(row, column * 2); });
    };
    bool begun = false;
    // Starts the copy of this warp's first chunk. Not where it had to wait for the kernel before: units are dealt first
    // then, meanwhile.
    const auto begin = [&](const UnitPlace& place, const SequencePlace& rows) {
        const int first = copy_warp * kChunkKeys;
        begun = kAligned && args.overlap == 0 && !args.causal && copy_warp < S::kCopyWarps && first < rows.k_len;
        if (!begun) return;
        const int kv_head = place.head / (static_cast<int>(args.heads) / static_cast<int>(args.kv_heads));
#pragma unroll 1
        for (int values = 0; values < 2; ++values) {
            const int64_t stride = values == 0 ? args.k_token_stride : args.v_token_stride;
            const int64_t offset = row_offset(place.sequence, kv_head, rows.k_begin + first,
                                              values == 0 ? args.k_batch_stride : args.v_batch_stride,
                                              values == 0 ? args.k_head_stride : args.v_head_stride, stride);
            copy_tile(copy_warp, values, static_cast<const Element*>(values == 0 ? args.k : args.v) + offset, stride,
                      rows.k_len - first);
        }
    };
    UnitPlace places[2];
    if (copy_warp >= 0) {
        find_places_early<kUnitRows>(args, places, lane, begin);  // meanwhile the others get the barriers ready
    } else {
        each_barrier(S::kChunks, S::kGroups * kGroupWarps, [&](int slot) {
            barrier_init(&shared.full[slot], kWarpSize);
            barrier_init(&shared.empty[slot], S::kGroups * kGroupWarps);
        });
        for (int at = threadIdx.x * 16; at < S::kOnesBytes; at += S::kGroups * kGroupThreads * 16) {
            const uint32_t ones = pack16<Element>(1.0f, 1.0f);
            store_vector(shared.ring + S::kRingBytes + at, uint4{ones, ones, ones, ones});
        }
        fence_async_proxy();
    }
    __syncthreads();
    if (copy_warp >= 0) {
        give_registers_back<S::kCopyRegisters>();
        const PassesFor<D> passes(args, places);
        if (copy_warp == S::kCopyWarps) {
            deal<Element, S::kChunks>(passes, queues, lane);
        } else {
            fill_ring<Element, S::kChunks, S::kCopyWarps, true>(
                passes, shared.full, shared.empty, copy_warp, copy_tile, [] { fence_async_proxy(); },
                [] { wait_for_previous(); }, begun);
        }
    } else {
        take_registers<S::kRegisters>();
        compute<Element, D, kAligned>(args, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(S::kBytes + 1024) + 2 * DynamicShared::bytes<uint64_t>(S::kChunks) +
        TaskQueues<S::kGroups>::bytes();
    return launch_balanced("warpgroups", rows16_aligned(args) ? kernel<Element, D, true> : kernel<Element, D, false>,
                           kUnitRows, S::kThreads, kSharedBytes, args, stream, /*overlaps=*/true);
}

template <typename Element>
tilerank_status launch_typed(const AttentionArgs& args, void* stream) {
    switch (args.head_dim) {
        case 32:
            return launch_for<Element, 32>(args, stream);
        case 64:
            return launch_for<Element, 64>(args, stream);
        case 80:
            return launch_for<Element, 80>(args, stream);
        case 96:
            return launch_for<Element, 96>(args, stream);
        default:
            return launch_for<Element, 128>(args, stream);
    }
}

}  // namespace warpgroups

tilerank_status attention_warpgroups(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? warpgroups::launch_typed<__half>(args, stream)
                                       : warpgroups::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
