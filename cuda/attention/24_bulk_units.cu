// Bulk units: warpgroups' four groups and their order, with little left that takes turns with exponentials. Keys,
// values and queries come by the copy engine, and rows of the result leave by it: what reads or writes eight rows an
// instruction keeps exponentials waiting.
// Prediction: 40 us packed, from 57. The first scores after 3.5 us instead of 9; a unit's begin and end 150 clocks
//   instead of 600; 350 clocks for 64 x 64 scores; blocks end within 3 us.
// Answer: metrics/<machine>/bench_attention_bulk_units.json and docs/attention.md.
#include "common/equal_parts.cuh"
#include "common/softmax.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma_shared.cuh"

namespace tilerank {
namespace bulk_units {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kBoxRows = 16;  // of queries and of the result: a warp's
constexpr int kSteps = kChunkKeys / 16;

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores, weights and sums take 52 + D / 2 registers of
    // theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = D <= 32 ? 4 : 3;
    static constexpr int kRegisters = D <= 32 ? 104 : 152;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static_assert(kGroupThreads * (kGroups * kRegisters + kCopyRegisters) <= registers_at_start(kThreads));
    // Of the group that copies, where there are no maps: else one. One deals out the units.
    static constexpr int kCopyWarps = 2;
    // Tiles are rows of kRowBytes, which a swizzle has: head_dim is 32 or 64.
    static constexpr int kColumns = D;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPartBytes = kChunkKeys * kRowBytes;
    static constexpr int kTileBytes = kChunkKeys * D * 2;  // of keys, of values and of a unit's queries
    // Row sums come out of the product with the values, as one more block of columns that is all ones.
    static constexpr int kSumColumns = D + 8;
    static constexpr int kOnesBytes = 16 * kRowBytes;
    static constexpr int kDepth = 3;  // units that are dealt to a group at a time, with their queries
    static constexpr int kQueryBytes = kGroups * kDepth * kTileBytes;
    static constexpr int kWarpOutBytes = kBoxRows * kRowBytes;
    static constexpr int kOutBytes = kGroups * kGroupWarps * kWarpOutBytes;  // rows on their way out
    static constexpr int kRest = 222 * 1024 - kQueryBytes - kOutBytes - kOnesBytes;
    static constexpr int kChunks = kRest / (2 * kTileBytes);  // of the ring
    static constexpr int kResident = kChunks * 2 / 3;
    static constexpr int kRingBytes = kChunks * 2 * kTileBytes;
    static constexpr int kBytes = kRingBytes + kOnesBytes + kOutBytes + kQueryBytes;
};
static_assert(kUnitRows == kChunkKeys);

template <int D>
using PassesFor = Passes<kUnitRows, Shape<D>::kGroups, Shape<D>::kResident>;

// A unit on its way to a group. Its queries lie in shared memory, 16 rows of them for each warp.
struct Work {
    void* out;        // of the unit's first row
    int rows;         // of the unit that exist
    int k_len;        // keys that count
    int causal_keys;  // what the first row may see if causality alone counted
    int tiles;        // chunks that some row sees keys of; at least one, 0: there is no further unit
    int whole_tiles;  // of those, the ones that every row sees all of
    int chunk;        // number of the first of them; where there is no unit, one beyond the last
    int slot;         // its place in the ring
    int parity;       // its turn there
    int is_last;      // of the group's units in the pass: chunks are given back behind it
    int rotation;     // rows go to warps in turn, so that the last ones do not all fall to the same quarter
    int sequence;     // where the first row is for the copy engine
    int head;
    int token;
};

// What the warps of a block share.
template <int D>
struct Shared {
    using S = Shape<D>;
    static constexpr int kWorks = S::kGroups * S::kDepth;
    unsigned char* ring;
    unsigned char* out;
    unsigned char* queries;
    uint64_t* full;  // of each chunk
    uint64_t* empty;
    Work* works;
    uint64_t* dealt;  // of each work
    uint64_t* taken;

    // The place of a group's unit number `turn`.
    static __device__ __forceinline__ int place(int group, int turn) { return group * S::kDepth + turn % S::kDepth; }
    static __device__ __forceinline__ uint32_t parity(int turn) { return turn / S::kDepth % 2; }
};

// Rows of q, k, v and out for the copy engine, in boxes of 16 rows and of a chunk's keys or values.
struct Maps {
    TensorMap q;
    TensorMap k;
    TensorMap v;
    TensorMap out;
};

// ---- The warps that copy ----

// Keys and values of a chunk by one warp, zeros behind the last row. What it starts ends at copy_async_wait.
template <typename Element, int D>
__device__ __forceinline__ void copy_chunk(const PassesFor<D>& passes, const Shared<D>& shared, int chunk, int lane,
                                           bool aligned) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    const int kv_head = passes.head / (static_cast<int>(args.heads) / static_cast<int>(args.kv_heads));
    const int first = (chunk - passes.chunk) * kChunkKeys;
#pragma unroll 1
    for (int values = 0; values < 2; ++values) {
        const int64_t stride = values == 0 ? args.k_token_stride : args.v_token_stride;
        const int64_t offset = row_offset(passes.sequence, kv_head, passes.place.k_begin + first,
                                          values == 0 ? args.k_batch_stride : args.v_batch_stride,
                                          values == 0 ? args.k_head_stride : args.v_head_stride, stride);
        copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes>(
            shared.ring + (chunk % S::kChunks * 2 + values) * S::kTileBytes,
            static_cast<const Element*>(values == 0 ? args.k : args.v) + offset, stride, passes.place.k_len - first,
            lane, aligned, [](int row, int column) { return swizzled_offset<S::kRowBytes>(row, column * 2); });
    }
    copy_async_commit();
}

// Fills the ring by maps, except for chunks whose last rows are another sequence's or nobody's: those by its lanes.
template <typename Element, int D>
__device__ __forceinline__ void fill_by_maps(PassesFor<D> passes, const Shared<D>& shared, const Maps& maps, int lane) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    const int heads_a_group = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
#pragma unroll 1
    while (passes.next()) {
        const int head = passes.head / heads_a_group;
        const int sequence = args.cu_seqlens_q != nullptr ? 0 : passes.sequence;
        const int whole = passes.place.k_len / kChunkKeys;
#pragma unroll 1
        for (int chunk = passes.chunk; chunk < passes.chunk + passes.chunks; ++chunk) {
            const int slot = chunk % S::kChunks;
            barrier_wait(&shared.empty[slot], chunk / S::kChunks % 2 ^ 1);
            if (chunk - passes.chunk >= whole) {
                copy_chunk<Element, D>(passes, shared, chunk, lane, true);
                copy_async_wait<0>();
                fence_async_proxy();
                barrier_arrive(&shared.full[slot]);
            } else if (lane == 0) {
                const int token = passes.place.k_begin + (chunk - passes.chunk) * kChunkKeys;
                unsigned char* tile = shared.ring + slot * 2 * S::kTileBytes;
                barrier_arrive_expecting(&shared.full[slot], 2 * S::kTileBytes);
                copy_box(tile, maps.k, 0, token, head, sequence, &shared.full[slot]);
                copy_box(tile + S::kTileBytes, maps.v, 0, token, head, sequence, &shared.full[slot]);
            } else {
                barrier_arrive(&shared.full[slot]);
            }
        }
    }
}

// The same without maps: every kCopyWarps-th chunk, each told of one chunk later, when it is there.
template <typename Element, int D>
__device__ __forceinline__ void fill_by_copies(PassesFor<D> passes, const Shared<D>& shared, int copy_warp, int lane,
                                               bool aligned) {
    using S = Shape<D>;
    int told = -1;  // slot of the chunk under way
    const auto tell = [&] {
        if (told < 0) return;
        fence_async_proxy();
        barrier_arrive(&shared.full[told]);
        told = -1;
    };
    int chunk = copy_warp;  // number of the next one of this warp's
#pragma unroll 1
    while (passes.next()) {
#pragma unroll 1
        for (; chunk < passes.chunk + passes.chunks; chunk += S::kCopyWarps) {
            const int slot = chunk % S::kChunks;
            const uint32_t parity = chunk / S::kChunks % 2 ^ 1;
            if (!barrier_test(&shared.empty[slot], parity)) {
                copy_async_wait<0>();
                tell();
                barrier_wait(&shared.empty[slot], parity);
            }
            copy_chunk<Element, D>(passes, shared, chunk, lane, aligned);
            copy_async_wait<1>();
            tell();
            told = slot;
        }
    }
    copy_async_wait<0>();
    tell();
}

// Walks the passes and tells each group its next units, with their queries.
template <typename Element, int D>
__device__ __forceinline__ void deal(PassesFor<D> passes, const Shared<D>& shared, const Maps& maps, int lane,
                                     bool aligned, bool mapped) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    int dealt = 0;
    const auto next_place = [&] {
        const int turn = dealt / S::kGroups;
        const int at = Shared<D>::place(dealt % S::kGroups, turn);
        ++dealt;
        barrier_wait(&shared.taken[at], Shared<D>::parity(turn) ^ 1);
        return at;
    };
    Work work = {};
#pragma unroll 1
    while (passes.next()) {
        const SequencePlace& place = passes.place;
        Element* out = static_cast<Element*>(args.out) + row_offset(passes.sequence, passes.head, place.q_begin,
                                                                    args.out_batch_stride, args.out_head_stride,
                                                                    args.out_token_stride);
        work.k_len = place.k_len;
        work.chunk = passes.chunk;
        work.slot = passes.chunk % S::kChunks;
        work.parity = passes.chunk / S::kChunks % 2;
        work.rotation = (passes.head + passes.sequence) % kGroupWarps;
        work.sequence = args.cu_seqlens_q != nullptr ? 0 : passes.sequence;
        work.head = passes.head;
#pragma unroll 1
        for (int unit = passes.first_unit; unit < passes.last_unit; ++unit) {
            const int at = next_place();
            const int row = passes.first_row(unit);
            work.rows = min(place.q_len - row, kUnitRows);
            work.out = out + row * args.out_token_stride;
            work.token = place.q_begin + row;
            work.causal_keys = args.causal ? row + 1 : kMostKeys16;
            work.tiles = passes.chunks_of(unit);
            work.whole_tiles = min(work.k_len, work.causal_keys) / kChunkKeys;
            work.is_last = unit + S::kGroups >= passes.last_unit;
            if (lane == 0) shared.works[at] = work;
            unsigned char* tile = shared.queries + at * S::kTileBytes;
            // Where rows lie: those of each warp together.
            const auto place_of = [&](int to) { return (to + work.rotation * kBoxRows) % kUnitRows; };
            const int whole = mapped ? work.rows / kBoxRows : 0;  // boxes that the copy engine brings
            if (lane < whole) {
                barrier_expect(&shared.dealt[at], kBoxRows * S::kRowBytes);
                copy_box(tile + place_of(lane * kBoxRows) * S::kRowBytes, maps.q, 0, work.token + lane * kBoxRows,
                         passes.head, work.sequence, &shared.dealt[at]);
            }
            // Rows that are not there are zeros: what they hold must not move the others' references.
            if (work.rows > whole * kBoxRows) {
                const Element* q = static_cast<const Element*>(args.q) +
                                   row_offset(passes.sequence, passes.head, place.q_begin + row, args.q_batch_stride,
                                              args.q_head_stride, args.q_token_stride);
                const int end = mapped ? (whole + 1) * kBoxRows : kUnitRows;
#pragma unroll 1
                for (int part = whole * kBoxRows * (D / 8) + lane; part < end * (D / 8); part += kWarpSize) {
                    const int from = part / (D / 8);
                    const int column = part % (D / 8) * 8;
                    unsigned char* to = tile + swizzled_offset<S::kRowBytes>(place_of(from), column * 2);
                    const Element* source = q + from * args.q_token_stride + column;
                    if (aligned) {
                        copy_async<16>(to, source, from < work.rows);
                    } else {
                        uint4 eight = {0, 0, 0, 0};
                        if (from < work.rows) eight = load_eight(source, false);
                        store_vector(to, eight);
                    }
                }
                copy_async_commit();
                copy_async_wait<0>();
                fence_async_proxy();
            }
            barrier_arrive(&shared.dealt[at]);
        }
    }
    work.tiles = 0;
    work.chunk = passes.chunk;
#pragma unroll 1
    for (int group = 0; group < S::kGroups; ++group) {
        const int at = next_place();
        if (lane == 0) shared.works[at] = work;
        barrier_arrive(&shared.dealt[at]);
    }
}

// ---- The groups that compute ----

// The weights of a tile, relative to each row's reference; is one of them, on any lane, too large? kWhole: every row of
// the warp sees all keys; else none sees those from any_sees on.
template <typename Element, bool kWhole>
__device__ __forceinline__ bool weigh(const Fragment (&scores)[kSteps * 2], uint32_t (&weights)[kSteps][4],
                                      const float (&reference)[2], float factor, int any_sees) {
    constexpr float kLargestWeight = 16384.0f;  // fp16 ends at 65,504
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
            for (int i = 0; i < 2; ++i) weight[i] = exp2_approx(score[i] * factor - reference[at % 2]);
            weights[step][at] = pack16<Element>(weight[0], weight[1]);
        }
        largest[step] = max16<Element>(max16<Element>(weights[step][0], weights[step][1]),
                                       max16<Element>(weights[step][2], weights[step][3]));
    }
    static_assert(kSteps == 4);
    const bool is_off = exceeds16<Element>(
        max16<Element>(max16<Element>(largest[0], largest[1]), max16<Element>(largest[2], largest[3])), kLargestWeight);
    return __any_sync(kFullMask, is_off);
}

// The largest score of each of the lane's rows, times the factor, among the first kBlocks x 8 keys of the tile.
template <int kBlocks>
__device__ __forceinline__ void find_largest(float (&largest)[2], const Fragment (&scores)[kSteps * 2], float factor) {
    largest[0] = largest[1] = kLowestReference;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], __fmul_rn(scores[block][i], factor));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // A little below the largest, by which a fused product can differ: that weight is then at least 1.
        constexpr float kRounding = 0x1p-22f;
        const float product = quad_max(largest[half]);
        largest[half] = product - fabsf(product) * kRounding;
    }
}

// The same of numbers that have a sign.
__device__ __forceinline__ int warp_register(int value) {
    return static_cast<int>(tilerank::warp_register(static_cast<uint32_t>(value)));
}

template <typename Element, int D>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared<D>& shared, const Maps& maps, int group,
                                        int group_warp, int lane, float factor, bool aligned, bool mapped) {
    using S = Shape<D>;
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    // Keys of the first tile that give the first reference, in eights.
    constexpr int kFirstBlocks = 4;
    constexpr int kTileSize = S::kTileBytes / 16;
    const uint32_t ring = warp_register(shared_address(shared.ring) / 16);
    const uint32_t queries = warp_register(shared_address(shared.queries) / 16);
    unsigned char* warp_out = shared.out + (group * kGroupWarps + group_warp) * S::kWarpOutBytes;

    Fragment scores[kSteps * 2];
    Fragment sums[S::kSumColumns / 8];
    uint32_t weights[kSteps][4] = {};

    const auto issue_scores = [&](int work, int slot) {
        const uint32_t q = queries + work * kTileSize;
        const uint32_t k = ring + slot * (2 * kTileSize);
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            wgmma_k16<Element, kChunkKeys>(scores, tile_descriptor<S::kRowBytes>(q + depth * 2, 1),
                                           tile_descriptor<S::kRowBytes>(k + depth * 2, 1), depth > 0);
        }
        wgmma_commit();
    };
    const auto issue_sums = [&](int slot, bool is_first) {
        const uint32_t v = ring + slot * (2 * kTileSize) + kTileSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = v + step * S::kRowBytes;
            // Beyond the values: the ones.
            wgmma_k16<Element, S::kSumColumns, true>(
                sums, weights[step], tile_descriptor<S::kRowBytes>(begin, ring + S::kRingBytes / 16 - begin),
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
    const auto work_at = [&](int turn) -> const Work& { return shared.works[Shared<D>::place(group, turn)]; };

    // The next unit, as this warp sees it.
    int turn = 0;
    struct {
        int place;
        int tiles;
        int whole_tiles;
        int rows;
        int is_last;
        int chunk;
        int row;  // of the unit, the first of this warp's 16
        At at;
    } next;
    const auto look = [&] {
        next.place = Shared<D>::place(group, turn);
        barrier_wait(&shared.dealt[next.place], Shared<D>::parity(turn));
        const Work& work = shared.works[next.place];
        next.tiles = warp_register(work.tiles);
        next.whole_tiles = warp_register(work.whole_tiles);
        next.is_last = warp_register(work.is_last);
        next.chunk = warp_register(work.chunk);
        next.at = {warp_register(work.slot), warp_register(work.parity)};
        next.row = warp_register((group_warp + kGroupWarps - work.rotation) % kGroupWarps * 16);
        next.rows = warp_register(work.rows) - next.row;
    };

    // Writes a unit's rows, whose sums are complete. The last 8 columns of sums are the weights'.
    const auto finish = [&](const Work& work, int row, int rows) {
        if (rows <= 0) return;
        const float factors[2] = {normalizer(sums[D / 8][0]), normalizer(sums[D / 8][2])};
        if (!mapped || rows < kBoxRows) {
            store_rows<D>(static_cast<Element*>(work.out) + row * args.out_token_stride, args.out_token_stride,
                          reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors, rows, lane, aligned);
            return;
        }
        if (lane == 0) wait_for_stores_to_read();  // the unit before's
        __syncwarp();
#pragma unroll
        for (int column = 0; column < D / 16; ++column) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &sums[column * 2 + i / 2][i % 2 * 2];
                words[i] = pack16<Element>(pair[0] * factors[i % 2], pair[1] * factors[i % 2]);
            }
            store_matrices(warp_out + swizzled_offset<S::kRowBytes>(lane % 16, column * 32 + lane / 16 * 16), words);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) store_box(warp_out, maps.out, 0, work.token + row, work.head, work.sequence);
    };

    look();
    skip({0, 0}, next.chunk);
    if (next.tiles == 0) return;
    wait_for(next.at);
    wgmma_fence();
    issue_scores(next.place, next.at.slot);

#pragma unroll 1
    while (next.tiles > 0) {
        const auto now = next;
        const int end_chunk = now.chunk + now.tiles;
        const Work& work = work_at(turn);
        ++turn;
        At at = now.at;
        float reference[2] = {kLowestReference, kLowestReference};
        bool holds_tile = now.is_last != 0;
        bool is_steep = false;  // some weight grew too large: from then on scores are looked at before

#pragma unroll 1
        for (int tile = 0;; ++tile) {
            const bool is_last_tile = tile + 1 == now.tiles;
            At following = at;
            following.advance();
            if (!is_last_tile) {
                wait_for(following);
            } else {
                look();
            }
            wgmma_wait<0>();
            if (now.is_last && tile > 0) give_back({(at.slot == 0 ? S::kChunks : at.slot) - 1, 0});
            if (now.rows > 0) {
                const bool is_whole = tile < now.whole_tiles;
                int any_sees = kChunkKeys;
                if (!is_whole) {
                    const int first_key = tile * kChunkKeys;
                    const int causal_keys = work.causal_keys + now.row;
                    any_sees = warp_register(min(work.k_len, causal_keys + 15) - first_key);
                    int sees[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sees[half] = min(work.k_len, causal_keys + half * 8 + lane / 4) - first_key;
                    }
                    const int every_sees = warp_register(min(work.k_len, causal_keys) - first_key);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step * 16 + 16 <= every_sees) continue;
                        hide_keys(scores[step * 2], step * 16, sees, lane, hidden_score(factor));
                        hide_keys(scores[step * 2 + 1], step * 16 + 8, sees, lane, hidden_score(factor));
                    }
                }
                if (tile == 0) find_largest<kFirstBlocks>(reference, scores, factor);
                if (!is_steep) {
                    is_steep = is_whole ? weigh<Element, true>(scores, weights, reference, factor, 0)
                                        : weigh<Element, false>(scores, weights, reference, factor, any_sees);
                }
                if (is_steep) {
                    float largest[2];
                    find_largest<kSteps * 2>(largest, scores, factor);
                    if (__any_sync(kFullMask,
                                   largest[0] > reference[0] + kMostAbove || largest[1] > reference[1] + kMostAbove)) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            largest[half] = fmaxf(largest[half], reference[half]);
                            const float rescale = exp2_approx(reference[half] - largest[half]);
                            reference[half] = largest[half];
#pragma unroll
                            for (int column = 0; column < S::kSumColumns / 8; ++column) {
                                sums[column][half * 2] *= rescale;
                                sums[column][half * 2 + 1] *= rescale;
                            }
                        }
                    }
                    weigh<Element, false>(scores, weights, reference, factor, any_sees);
                }
            }
            wgmma_fence();
            issue_sums(at.slot, tile == 0);
            if (is_last_tile) break;
            at = following;
            issue_scores(now.place, at.slot);
        }
        if (next.tiles > 0) {
            if (now.is_last && end_chunk < next.chunk) {
                // Nothing may be kept while waiting for chunks so far on that they could need its place.
                wgmma_wait<0>();
                give_back(at);
                at.advance();
                skip(at, next.chunk - end_chunk);
                holds_tile = false;
            }
            wait_for(next.at);
            wgmma_fence();
            issue_scores(next.place, next.at.slot);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        if (holds_tile) {
            give_back(at);
            at.advance();
            if (next.tiles == 0) skip(at, next.chunk - end_chunk);
        }
        finish(work, now.row, now.rows);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.taken[now.place]);
    }
    if (lane == 0) wait_for_stores_to_read();  // before the block's memory is another's
}

template <typename Element, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    kernel(AttentionArgs args, const __grid_constant__ Maps maps, EqualParts parts, float factor, bool aligned,
           bool mapped) {
    using S = Shape<D>;
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(S::kBytes + 1024);
    Shared<D> shared;
    shared.ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    shared.out = shared.ring + S::kRingBytes + S::kOnesBytes;
    shared.queries = shared.out + S::kOutBytes;
    shared.full = memory.take<uint64_t>(S::kChunks);
    shared.empty = memory.take<uint64_t>(S::kChunks);
    shared.works = memory.take<Work>(Shared<D>::kWorks);
    shared.dealt = memory.take<uint64_t>(Shared<D>::kWorks);
    shared.taken = memory.take<uint64_t>(Shared<D>::kWorks);
    static_assert(S::kOnesBytes % 1024 == 0 && S::kOutBytes % 1024 == 0);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    const bool copies = warp >= S::kGroups * kGroupWarps;
    UnitPlace places[2] = {};
    if (copies) {
        if (mapped && threadIdx.x == S::kThreads - 1) {
            prefetch_tensor_map(maps.k);
            prefetch_tensor_map(maps.v);
            prefetch_tensor_map(maps.q);
            prefetch_tensor_map(maps.out);
        }
        if (parts.each > 0) {
            find_equal_places<kUnitRows>(args, parts, places);
        } else {
            find_places<kUnitRows>(args, places, lane);
        }
    } else {
        if (threadIdx.x < S::kChunks) {
            barrier_init(&shared.full[threadIdx.x], kWarpSize);
            barrier_init(&shared.empty[threadIdx.x], S::kGroups * kGroupWarps);
        }
        if (threadIdx.x < Shared<D>::kWorks) {
            barrier_init(&shared.dealt[threadIdx.x], kWarpSize);
            barrier_init(&shared.taken[threadIdx.x], kGroupWarps);
        }
        for (int at = static_cast<int>(threadIdx.x) * 16; at < S::kOnesBytes; at += S::kGroups * kGroupThreads * 16) {
            const uint32_t ones = pack16<Element>(1.0f, 1.0f);
            store_vector(shared.ring + S::kRingBytes + at, uint4{ones, ones, ones, ones});
        }
        fence_async_proxy();
    }
    __syncthreads();
    if (!copies) {
        take_registers<S::kRegisters>();
        compute<Element, D>(args, shared, maps, warp_register(warp / kGroupWarps), warp % kGroupWarps, lane, factor,
                            aligned, mapped);
        return;
    }
    give_registers_back<S::kCopyRegisters>();
    const PassesFor<D> passes(args, places);
    const int copy_warp = warp - S::kGroups * kGroupWarps;
    if (copy_warp == S::kCopyWarps) {
        deal<Element, D>(passes, shared, maps, lane, aligned, mapped);
    } else if (copy_warp > S::kCopyWarps) {
        if (mapped) fill_by_maps<Element, D>(passes, shared, maps, lane);
    } else {
        if (!mapped) fill_by_copies<Element, D>(passes, shared, copy_warp, lane, aligned);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(S::kBytes + 1024) + 2 * DynamicShared::bytes<uint64_t>(S::kChunks) +
        DynamicShared::bytes<Work>(Shared<D>::kWorks) + 2 * DynamicShared::bytes<uint64_t>(Shared<D>::kWorks);
    static_assert(kSharedBytes <= 227 * 1024);
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant bulk_units: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
                      static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    const bool aligned = rows16_aligned(args);
    const bool packed = args.cu_seqlens_q != nullptr;
    const int64_t batch = packed ? 1 : args.batch;
    const int64_t q_tokens = packed ? args.total_q : args.q_len;
    const int64_t k_tokens = packed ? args.total_k : args.k_len;
    Maps maps = {};
    const bool mapped =
        aligned && q_tokens <= kMost && k_tokens <= kMost &&
        make_tensor_map(&maps.q, args.q, args.dtype, D, q_tokens, args.heads, batch, args.q_token_stride,
                        args.q_head_stride, args.q_batch_stride, kBoxRows, S::kColumns) &&
        make_tensor_map(&maps.k, args.k, args.dtype, D, k_tokens, args.kv_heads, batch, args.k_token_stride,
                        args.k_head_stride, args.k_batch_stride, kChunkKeys, S::kColumns) &&
        make_tensor_map(&maps.v, args.v, args.dtype, D, k_tokens, args.kv_heads, batch, args.v_token_stride,
                        args.v_head_stride, args.v_batch_stride, kChunkKeys, S::kColumns) &&
        make_tensor_map(&maps.out, args.out, args.dtype, D, q_tokens, args.heads, batch, args.out_token_stride,
                        args.out_head_stride, args.out_batch_stride, kBoxRows, S::kColumns);
    const int64_t units = args.batch * args.heads * ((args.q_len + kUnitRows - 1) / kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks("bulk_units", kernel<Element, D>, blocks, S::kThreads, kSharedBytes, stream, args, maps,
                         equal_parts(args, kUnitRows, blocks), nonzero_scale_log2(args), aligned, mapped);
}

template <typename Element>
tilerank_status launch_typed(const AttentionArgs& args, void* stream) {
    switch (args.head_dim) {
        case 32:
            return launch_for<Element, 32>(args, stream);
        default:
            return launch_for<Element, 64>(args, stream);
    }
}

}  // namespace bulk_units

tilerank_status attention_bulk_units(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? bulk_units::launch_typed<__half>(args, stream)
                                       : bulk_units::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
