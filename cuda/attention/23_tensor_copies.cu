// Tensor copies: warpgroups, except that tiles come by the tensor copy engine, one instruction each, and that both
// products run behind the weights between them. While a tile's scores become weights, the sums of the tile before and the scores
// of the one after are computed, also across units; queries lie in shared memory.
// Prediction: 44 us packed, from 57. A group no longer waits for its own products nor for copies: 290 cycles for 64 x 64
//   scores instead of 450, of which exp takes 256; 8 us until the first scores, 3 us for blocks that end later than
//   others.
// Answer: metrics/<machine>/bench_attention_tensor_copies.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/softmax.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma_shared.cuh"

namespace tilerank {
namespace tensor_copies {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores and weights of two tiles and the sums take 96 + D / 2
    // registers of theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = D <= 32 ? 3 : 2;
    static constexpr int kRegisters = D <= 32 ? 152 : 224;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    // Of the group that copies: one has whole chunks copied by maps, one deals out the units.
    static constexpr int kCopyWarps = 2;
    // Tiles are in parts of kRowBytes a row: the widest swizzle that divides D.
    static constexpr int kColumns = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPartBytes = kChunkKeys * kRowBytes;
    static constexpr int kTileBytes = kChunkKeys * D * 2;  // of keys, of values and of a unit's queries
    // Row sums come out of the product with the values, as one more block of columns that is all ones, where the values
    // are one part and the block can lie anywhere beyond it.
    static constexpr bool kSumsByProduct = D == kColumns;
    static constexpr int kSumColumns = D + (kSumsByProduct ? 8 : 0);
    static constexpr int kOnesBytes = kSumsByProduct ? 16 * kRowBytes : 0;
    static constexpr int kDepth = D <= 64 ? 3 : 2;  // units that are dealt to a group at a time, with their queries
    static constexpr int kQueryBytes = kGroups * kDepth * kTileBytes;
    static constexpr int kChunks = (224 * 1024 - kQueryBytes - kOnesBytes) / (2 * kTileBytes);  // of the ring
    static constexpr int kResident = kChunks * 2 / 3;
    static constexpr int kRingBytes = kChunks * 2 * kTileBytes;
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
};

// What the warps of a block share.
template <int D>
struct Shared {
    using S = Shape<D>;
    static constexpr int kWorks = S::kGroups * S::kDepth;
    unsigned char* ring;
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

// ---- Where a block's part begins and ends ----

// find_places in fewer instructions: each lane has neighbouring sequences, and costs are fp32. They are sums of whole
// numbers that may be rounded: it only matters that all blocks find the same, and not less for a larger target.
template <int kUnitRows>
__device__ __forceinline__ void find_places_quickly(const AttentionArgs& args, UnitPlace (&places)[2], int lane) {
    const int batch = static_cast<int>(args.batch);
    const int count = (batch + kWarpSize - 1) / kWarpSize;  // of sequences a lane
    const float heads = static_cast<float>(static_cast<int>(args.heads));
    const float share = 1.0f / static_cast<float>(gridDim.x);
    float begin = 0.0f;
    float targets[2] = {INFINITY, INFINITY};
    UnitPlace found[2] = {{-1, 0, 0}, {-1, 0, 0}};
#pragma unroll 1
    for (int sweep = 0; sweep < 2; ++sweep) {  // the first finds the total
        float at = begin;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int sequence = lane * count + i;
            if (sequence >= batch) break;
            const SequencePlace place = sequence_place(args, sequence);
            const int keys = args.causal ? min(place.q_len, place.k_len) / 2 : place.k_len;
            const float unit_cost = static_cast<float>((keys + kChunkKeys - 1) / kChunkKeys + kUnitCost);
            const float pair_cost = static_cast<float>((place.q_len + kUnitRows - 1) / kUnitRows) * unit_cost;
            const float end = at + heads * pair_cost;
#pragma unroll 1
            for (int side = 0; side < 2; ++side) {
                const float target = side == 0 ? targets[0] : targets[1];
                if (target < at || target >= end) continue;
                // The first unit that begins at the target or after it.
                const int head = static_cast<int>(__fdividef(target - at, pair_cost));
                const float in_pair = target - at - static_cast<float>(head) * pair_cost;
                UnitPlace there = {sequence, head, max(static_cast<int>(ceilf(__fdividef(in_pair, unit_cost))), 0)};
                if (there.unit * kUnitRows >= place.q_len) there = {sequence, head + 1, 0};
                if (there.head >= args.heads) there = {sequence + 1, 0, 0};
                if (side == 0) found[0] = there;
                if (side == 1) found[1] = there;
            }
            at = end;
        }
        if (sweep == 1) break;
        float end = at;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const float before = __shfl_up_sync(kFullMask, end, distance);
            if (lane >= distance) end += before;
        }
        begin = __shfl_up_sync(kFullMask, end, 1);
        if (lane == 0) begin = 0.0f;
        const float total = __shfl_sync(kFullMask, end, kWarpSize - 1);
        targets[0] = floorf(total * (static_cast<float>(blockIdx.x) * share));
        targets[1] = floorf(total * (static_cast<float>(blockIdx.x + 1) * share));
        if (blockIdx.x + 1 == gridDim.x) targets[1] = INFINITY;
        float upper = __shfl_down_sync(kFullMask, begin, 1);
        if (lane == kWarpSize - 1) upper = INFINITY;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (!(targets[side] >= begin && targets[side] < upper)) targets[side] = -1.0f;  // another lane's
        }
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        // A target beyond this lane's rounded sums and not yet the next one's.
        if (targets[side] >= 0.0f && found[side].sequence < 0) found[side] = {min((lane + 1) * count, batch), 0, 0};
        const unsigned holders = __ballot_sync(kFullMask, found[side].sequence >= 0);
        const int source = __ffs(static_cast<int>(holders)) - 1;
        places[side] = {batch, 0, 0};
        if (holders != 0) {
            places[side] = {__shfl_sync(kFullMask, found[side].sequence, source),
                            __shfl_sync(kFullMask, found[side].head, source),
                            __shfl_sync(kFullMask, found[side].unit, source)};
        }
    }
}

// Rows of q, k and v for the copy engine, in boxes of 16 queries and of a chunk's keys or values.
struct Maps {
    TensorMap q;
    TensorMap k;
    TensorMap v;
};

// ---- The warps that copy ----

// Has chunks copied that exist whole: their last rows are the sequence's own.
template <int D>
__device__ __forceinline__ void fill_by_maps(PassesFor<D> passes, const Shared<D>& shared, const Maps& maps, int lane) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    const int heads_a_group = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
#pragma unroll 1
    while (passes.next()) {
        const int head = passes.head / heads_a_group;
        const int sequence = args.cu_seqlens_q != nullptr ? 0 : passes.sequence;
        const int whole = min(passes.place.k_len / kChunkKeys, passes.chunks);
#pragma unroll 1
        for (int chunk = passes.chunk; chunk < passes.chunk + whole; ++chunk) {
            const int slot = chunk % S::kChunks;
            barrier_wait(&shared.empty[slot], chunk / S::kChunks % 2 ^ 1);
            if (lane == 0) {
                const int token = passes.place.k_begin + (chunk - passes.chunk) * kChunkKeys;
                unsigned char* tile = shared.ring + slot * 2 * S::kTileBytes;
                barrier_arrive_expecting(&shared.full[slot], 2 * S::kTileBytes);
#pragma unroll
                for (int part = 0; part < D / S::kColumns; ++part) {
                    copy_box(tile + part * S::kPartBytes, maps.k, part * S::kColumns, token, head, sequence,
                             &shared.full[slot]);
                }
#pragma unroll
                for (int part = 0; part < D / S::kColumns; ++part) {
                    copy_box(tile + S::kTileBytes + part * S::kPartBytes, maps.v, part * S::kColumns, token, head,
                             sequence, &shared.full[slot]);
                }
            } else {
                barrier_arrive(&shared.full[slot]);
            }
        }
    }
}

// Copies every kCopyWarps-th chunk, or of those (mapped) what the copy engine does not: zeros follow the last row.
template <typename Element, int D>
__device__ __forceinline__ void fill_by_copies(PassesFor<D> passes, const Shared<D>& shared, int copy_warp, int lane,
                                               bool aligned, bool mapped) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    const int heads_a_group = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
    int told = -1;  // slot of the chunk under way: its barrier is told one chunk later, when the data is there
    const auto tell = [&] {
        if (told < 0) return;
        fence_async_proxy();
        barrier_arrive(&shared.full[told]);
        told = -1;
    };
#pragma unroll 1
    while (passes.next()) {
        const int end = passes.chunk + passes.chunks;
        int chunk = mapped ? max(end - 1, passes.chunk) : passes.chunk;
        chunk += (chunk + copy_warp) % S::kCopyWarps;
        if (mapped && passes.place.k_len >= passes.chunks * kChunkKeys) continue;
        const int kv_head = passes.head / heads_a_group;
        const Element* k = static_cast<const Element*>(args.k) + row_offset(passes.sequence, kv_head,
                                                                            passes.place.k_begin, args.k_batch_stride,
                                                                            args.k_head_stride, args.k_token_stride);
        const Element* v = static_cast<const Element*>(args.v) + row_offset(passes.sequence, kv_head,
                                                                            passes.place.k_begin, args.v_batch_stride,
                                                                            args.v_head_stride, args.v_token_stride);
#pragma unroll 1
        for (; chunk < end; chunk += S::kCopyWarps) {
            const int slot = chunk % S::kChunks;
            const uint32_t parity = chunk / S::kChunks % 2 ^ 1;
            if (mapped || !barrier_test(&shared.empty[slot], parity)) {
                copy_async_wait<0>();
                tell();
                barrier_wait(&shared.empty[slot], parity);
            }
            const int first = (chunk - passes.chunk) * kChunkKeys;
#pragma unroll 1
            for (int values = 0; values < 2; ++values) {
                const int64_t stride = values == 0 ? args.k_token_stride : args.v_token_stride;
                copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes>(
                    shared.ring + (slot * 2 + values) * S::kTileBytes, (values == 0 ? k : v) + first * stride, stride,
                    passes.place.k_len - first, lane, aligned,
                    [](int row, int column) { return swizzled_offset<S::kRowBytes>(row, column * 2); });
            }
            copy_async_commit();
            if (mapped) {
                copy_async_wait<0>();
                told = slot;
                tell();
            } else {
                copy_async_wait<1>();
                tell();
                told = slot;
            }
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
    constexpr int kBoxRows = 16;
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
#pragma unroll 1
        for (int unit = passes.first_unit; unit < passes.last_unit; ++unit) {
            const int at = next_place();
            const int row = passes.first_row(unit);
            work.rows = min(place.q_len - row, kUnitRows);
            work.out = out + row * args.out_token_stride;
            work.causal_keys = args.causal ? row + 1 : kMostKeys16;
            work.tiles = passes.chunks_of(unit);
            work.whole_tiles = min(work.k_len, work.causal_keys) / kChunkKeys;
            work.is_last = unit + S::kGroups >= passes.last_unit;
            if (lane == 0) shared.works[at] = work;
            unsigned char* tile = shared.queries + at * S::kTileBytes;
            if (mapped && lane * kBoxRows < work.rows) {
                barrier_arrive_expecting(&shared.dealt[at], kBoxRows * D * 2);
                const int sequence = args.cu_seqlens_q != nullptr ? 0 : passes.sequence;
                tile += (lane + work.rotation) % kGroupWarps * kBoxRows * S::kRowBytes;
#pragma unroll
                for (int part = 0; part < D / S::kColumns; ++part) {
                    copy_box(tile + part * S::kPartBytes, maps.q, part * S::kColumns,
                             place.q_begin + row + lane * kBoxRows, passes.head, sequence, &shared.dealt[at]);
                }
            } else {
                if (!mapped) {
                    const Element* q = static_cast<const Element*>(args.q) +
                                       row_offset(passes.sequence, passes.head, place.q_begin + row,
                                                  args.q_batch_stride, args.q_head_stride, args.q_token_stride);
                    copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes>(
                        tile, q, args.q_token_stride, work.rows, lane, aligned, [&](int to, int column) {
                            return swizzled_offset<S::kRowBytes>((to + work.rotation * kBoxRows) % kUnitRows,
                                                                 column * 2);
                        });
                    copy_async_commit();
                    copy_async_wait<0>();
                    fence_async_proxy();
                }
                barrier_arrive(&shared.dealt[at]);
            }
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
// the warp sees all keys; else none sees those from any_sees on. kSum: tile_sum is their sum over the lane's keys.
template <typename Element, bool kWhole, bool kSum>
__device__ __forceinline__ bool weigh(const Fragment (&scores)[kSteps * 2], uint32_t (&weights)[kSteps][4],
                                      float (&tile_sum)[2], const float (&reference)[2], float factor, int any_sees) {
    constexpr float kLargestWeight = 16384.0f;  // fp16 ends at 65,504
    tile_sum[0] = tile_sum[1] = 0.0f;
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
        is_off = !(tile_sum[0] <= 2 * kLargestWeight && tile_sum[1] <= 2 * kLargestWeight);
    } else {
        static_assert(kSteps == 4);
        is_off = exceeds16<Element>(
            max16<Element>(max16<Element>(largest[0], largest[1]), max16<Element>(largest[2], largest[3])),
            kLargestWeight);
    }
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

// Word l of the four lanes of each quad, in their order, for lane l.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&words)[4], int lane) {
    const bool odd = lane % 2 != 0;
    const bool high = lane / 2 % 2 != 0;
    const uint32_t first = __shfl_xor_sync(kFullMask, odd ? words[0] : words[1], 1);
    const uint32_t second = __shfl_xor_sync(kFullMask, odd ? words[2] : words[3], 1);
    // Of the pair of lanes: words l % 2, then words 2 + l % 2.
    const uint32_t low_pair[2] = {odd ? first : words[0], odd ? words[1] : first};
    const uint32_t high_pair[2] = {odd ? second : words[2], odd ? words[3] : second};
    const uint32_t a = __shfl_xor_sync(kFullMask, high ? low_pair[0] : high_pair[0], 2);
    const uint32_t b = __shfl_xor_sync(kFullMask, high ? low_pair[1] : high_pair[1], 2);
    return high ? uint4{a, b, high_pair[0], high_pair[1]} : uint4{low_pair[0], low_pair[1], a, b};
}

// The same of numbers that have a sign.
__device__ __forceinline__ int warp_register(int value) {
    return static_cast<int>(tilerank::warp_register(static_cast<uint32_t>(value)));
}

template <typename Element, int D>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared<D>& shared, int group, int group_warp,
                                        int lane, float factor, bool aligned) {
    using S = Shape<D>;
    constexpr bool kSum = !S::kSumsByProduct;
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    // Keys of the first tile that give the first reference, in eights.
    constexpr int kFirstBlocks = 4;
    constexpr int kTileSize = S::kTileBytes / 16;
    const uint32_t ring = shared_address(shared.ring) / 16;
    const uint32_t queries = shared_address(shared.queries) / 16;

    // Of two tiles: that whose scores become weights, and the one before or after it.
    Fragment scores[2][kSteps * 2];
    uint32_t weights[2][kSteps][4] = {};
    Fragment sums[S::kSumColumns / 8];
    float reference[2];
    float row_sum[2] = {0.0f, 0.0f};

    const auto issue_scores = [&](Fragment (&target)[kSteps * 2], int work, int slot) {
        const uint32_t q = queries + work * kTileSize;
        const uint32_t k = ring + slot * (2 * kTileSize);
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            const int column = depth * 16;
            const int offset = (column / S::kColumns * S::kPartBytes + column % S::kColumns * 2) / 16;
            wgmma_k16<Element, kChunkKeys>(target, tile_descriptor<S::kRowBytes>(q + offset, 1),
                                           tile_descriptor<S::kRowBytes>(k + offset, 1), depth > 0);
        }
    };
    const auto issue_sums = [&](const uint32_t (&source)[kSteps][4], int slot, bool is_first) {
        const uint32_t v = ring + slot * (2 * kTileSize) + kTileSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = v + step * S::kRowBytes;
            // Beyond the values: their next part, or the ones.
            const uint32_t stride = S::kSumsByProduct ? ring + S::kRingBytes / 16 - begin : S::kPartBytes / 16;
            wgmma_k16<Element, S::kSumColumns, true>(sums, source[step], tile_descriptor<S::kRowBytes>(begin, stride),
                                                     step > 0 || !is_first);
        }
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
    const auto give_back = [&](int slot) {
        if (lane == 0) barrier_arrive(&shared.empty[slot]);
    };
    // Gives back chunks that this group has no use for; each must have come before.
    const auto skip = [&](At at, int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            wait_for(at);
            give_back(at.slot);
            at.advance();
        }
    };
    const auto work_at = [&](int turn) -> const Work& { return shared.works[Shared<D>::place(group, turn)]; };
    const auto look = [&](int turn) -> const Work& {
        barrier_wait(&shared.dealt[Shared<D>::place(group, turn)], Shared<D>::parity(turn));
        return work_at(turn);
    };
    // Of the unit, the first of this warp's 16.
    const auto first_row = [&](const Work& work) {
        return warp_register((group_warp + kGroupWarps - work.rotation) % kGroupWarps * 16);
    };

    // Writes a unit's rows, whose sums are complete.
    const auto finish = [&](int turn) {
        const Work& work = work_at(turn);
        const int row = first_row(work);
        const int rows = warp_register(work.rows) - row;
        if (rows > 0) {
            if (kSum) row_sum[0] = quad_sum(row_sum[0]), row_sum[1] = quad_sum(row_sum[1]);
            if (!kSum) row_sum[0] = sums[S::kSumColumns / 8 - 1][0], row_sum[1] = sums[S::kSumColumns / 8 - 1][2];
            const float factors[2] = {normalizer(row_sum[0]), normalizer(row_sum[1])};
            Element* out = static_cast<Element*>(work.out) + row * args.out_token_stride;
            if (D % 32 != 0 || !aligned) {
                store_rows<D>(out, args.out_token_stride, reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors,
                              rows, lane, aligned);
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Element* target = out + (half * 8 + lane / 4) * args.out_token_stride + lane % 4 * 8;
#pragma unroll
                    for (int column = 0; column < D / 32; ++column) {
                        uint32_t words[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float* pair = &sums[column * 4 + i][half * 2];
                            words[i] = pack16<Element>(pair[0] * factors[half], pair[1] * factors[half]);
                        }
                        const uint4 eight = transpose_quad(words, lane);
                        if (half * 8 + lane / 4 < rows) store_vector(target + column * 32, eight);
                    }
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.taken[Shared<D>::place(group, turn)]);
    };

    // The unit under way, as this warp sees it, and its tile whose scores become weights.
    int turn = 0;
    int tiles;
    int whole_tiles;
    int rows;
    int is_last;
    int end_chunk;
    int tile = 0;
    At at = {0, 0};
    const auto begin_unit = [&] {
        const Work& work = work_at(turn);
        tiles = warp_register(work.tiles);
        whole_tiles = warp_register(work.whole_tiles);
        is_last = warp_register(work.is_last);
        end_chunk = warp_register(work.chunk) + tiles;
        rows = warp_register(work.rows) - first_row(work);
    };
    const auto start = [&](Fragment (&target)[kSteps * 2]) {
        wgmma_fence();
        issue_scores(target, Shared<D>::place(group, turn), at.slot);
        wgmma_commit();
        wgmma_wait<0>();
    };
    skip({0, 0}, warp_register(look(0).chunk));
    if (warp_register(work_at(0).tiles) == 0) return;
    begin_unit();
    at = {warp_register(work_at(0).slot), warp_register(work_at(0).parity)};
    wait_for(at);
    start(scores[0]);

    // The tile before: its sums run behind this one's weights. Where there is none, some sums that nobody looks at.
    bool has_before = false;
    bool is_first_before = true;  // of its unit
    bool frees_before = false;
    int slot_before = at.slot;
    bool is_steep = false;  // some weight grew too large: from then on scores are looked at before they become weights

    // One tile, whose scores are scores[now]. False: it was the last one.
    const auto step = [&](int now) {
        auto& these = scores[now];
        auto& new_weights = weights[now];
        const bool is_last_tile = tile + 1 == tiles;
        At next = at;
        int next_turn = turn;
        bool drains = false;
        if (!is_last_tile) {
            next.advance();
            wait_for(next);
        } else {
            // Chunks that this group has no use for are given back without keeping any: the ring has to go on.
            const Work& following = look(turn + 1);
            drains = warp_register(following.tiles == 0 || following.chunk > end_chunk) != 0;
            if (!drains) {
                next = {warp_register(following.slot), warp_register(following.parity)};
                wait_for(next);
                ++next_turn;
            }
        }
        wgmma_fence();
        issue_sums(weights[now ^ 1], slot_before, is_first_before);
        issue_scores(scores[now ^ 1], Shared<D>::place(group, next_turn), next.slot);
        wgmma_commit();

        bool is_raised = false;
        float rescale[2];
        float tile_sum[2] = {0.0f, 0.0f};
        if (rows > 0) {
            const bool is_whole = tile < whole_tiles;
            int any_sees = kChunkKeys;
            if (!is_whole) {
                const Work& work = work_at(turn);
                const int first_key = tile * kChunkKeys;
                const int causal_keys = work.causal_keys + first_row(work);
                any_sees = warp_register(min(work.k_len, causal_keys + 15) - first_key);
                int sees[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    sees[half] = min(work.k_len, causal_keys + half * 8 + lane / 4) - first_key;
                }
                const int every_sees = warp_register(min(work.k_len, causal_keys) - first_key);
#pragma unroll
                for (int at_step = 0; at_step < kSteps; ++at_step) {
                    if (at_step * 16 + 16 <= every_sees) continue;
                    hide_keys(these[at_step * 2], at_step * 16, sees, lane, hidden_score(factor));
                    hide_keys(these[at_step * 2 + 1], at_step * 16 + 8, sees, lane, hidden_score(factor));
                }
            }
            if (tile == 0) {
                find_largest<kFirstBlocks>(reference, these, factor);
                is_steep = false;
            }
#pragma unroll 1
            for (;;) {
                if (is_steep) {
                    float largest[2];
                    find_largest<kSteps * 2>(largest, these, factor);
                    is_raised = __any_sync(kFullMask, largest[0] > reference[0] + kMostAbove ||
                                                          largest[1] > reference[1] + kMostAbove);
                    if (is_raised) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            largest[half] = fmaxf(largest[half], reference[half]);
                            rescale[half] = exp2_approx(reference[half] - largest[half]);
                            reference[half] = largest[half];
                        }
                    }
                }
                const bool is_off =
                    is_whole ? weigh<Element, true, kSum>(these, new_weights, tile_sum, reference, factor, 0)
                             : weigh<Element, false, kSum>(these, new_weights, tile_sum, reference, factor, any_sees);
                if (is_steep || !is_off) break;
                is_steep = true;
            }
        }
        wgmma_wait<0>();
        if (frees_before) give_back(slot_before);
        if (tile == 0) {
            if (has_before) finish(turn - 1);
            row_sum[0] = row_sum[1] = 0.0f;
        } else if (is_raised) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_sum[half] *= rescale[half];
#pragma unroll
                for (int column = 0; column < S::kSumColumns / 8; ++column) {
                    sums[column][half * 2] *= rescale[half];
                    sums[column][half * 2 + 1] *= rescale[half];
                }
            }
        }
        if (kSum) row_sum[0] += tile_sum[0], row_sum[1] += tile_sum[1];
        has_before = true;
        is_first_before = tile == 0;
        frees_before = is_last != 0;
        slot_before = at.slot;
        ++tile;
        if (drains) {
            wgmma_fence();
            issue_sums(new_weights, slot_before, is_first_before);
            wgmma_commit();
            wgmma_wait<0>();
            if (frees_before) give_back(slot_before);
            finish(turn);
            ++turn;
            const Work& following = work_at(turn);
            at.advance();
            skip(at, warp_register(following.chunk) - end_chunk);
            if (warp_register(following.tiles) == 0) return false;
            at = {warp_register(following.slot), warp_register(following.parity)};
            wait_for(at);
            start(scores[now ^ 1]);
            has_before = frees_before = false;
            begin_unit();
            tile = 0;
        } else {
            at = next;
            if (is_last_tile) {
                turn = next_turn;
                begin_unit();
                tile = 0;
            }
        }
        return true;
    };
#pragma unroll 1
    while (step(0) && step(1)) {
    }
}

template <typename Element, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    kernel(AttentionArgs args, const __grid_constant__ Maps maps, float factor, bool aligned, bool mapped) {
    using S = Shape<D>;
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(S::kRingBytes + S::kOnesBytes + S::kQueryBytes + 1024);
    Shared<D> shared;
    shared.ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    shared.queries = shared.ring + S::kRingBytes + S::kOnesBytes;
    shared.full = memory.take<uint64_t>(S::kChunks);
    shared.empty = memory.take<uint64_t>(S::kChunks);
    shared.works = memory.take<Work>(Shared<D>::kWorks);
    shared.dealt = memory.take<uint64_t>(Shared<D>::kWorks);
    shared.taken = memory.take<uint64_t>(Shared<D>::kWorks);
    static_assert(S::kOnesBytes % 1024 == 0);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (mapped && threadIdx.x == S::kThreads - 1) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
    }
    UnitPlace places[2] = {};
    if (warp >= S::kGroups * kGroupWarps) find_places_quickly<kUnitRows>(args, places, lane);
    if (threadIdx.x < S::kChunks) {
        barrier_init(&shared.full[threadIdx.x], kWarpSize);
        barrier_init(&shared.empty[threadIdx.x], S::kGroups * kGroupWarps);
    }
    if (threadIdx.x < Shared<D>::kWorks) {
        barrier_init(&shared.dealt[threadIdx.x], kWarpSize);
        barrier_init(&shared.taken[threadIdx.x], kGroupWarps);
    }
    for (int at = static_cast<int>(threadIdx.x) * 16; at < S::kOnesBytes; at += S::kThreads * 16) {
        const uint32_t ones = pack16<Element>(1.0f, 1.0f);
        store_vector(shared.ring + S::kRingBytes + at, uint4{ones, ones, ones, ones});
        fence_async_proxy();
    }
    __syncthreads();
    if (warp >= S::kGroups * kGroupWarps) {
        give_registers_back<S::kCopyRegisters>();
        const PassesFor<D> passes(args, places);
        const int copy_warp = warp - S::kGroups * kGroupWarps;
        if (copy_warp == S::kCopyWarps) {
            deal<Element, D>(passes, shared, maps, lane, aligned, mapped);
        } else if (copy_warp > S::kCopyWarps) {
            if (mapped) fill_by_maps<D>(passes, shared, maps, lane);
        } else {
            fill_by_copies<Element, D>(passes, shared, copy_warp, lane, aligned, mapped);
        }
    } else {
        take_registers<S::kRegisters>();
        compute<Element, D>(args, shared, warp_register(warp / kGroupWarps), warp % kGroupWarps, lane, factor, aligned);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(S::kRingBytes + S::kOnesBytes + S::kQueryBytes + 1024) +
        2 * DynamicShared::bytes<uint64_t>(S::kChunks) + DynamicShared::bytes<Work>(Shared<D>::kWorks) +
        2 * DynamicShared::bytes<uint64_t>(Shared<D>::kWorks);
    static_assert(kSharedBytes <= 227 * 1024);
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant tensor_copies: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
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
                        args.q_head_stride, args.q_batch_stride, 16, S::kColumns) &&
        make_tensor_map(&maps.k, args.k, args.dtype, D, k_tokens, args.kv_heads, batch, args.k_token_stride,
                        args.k_head_stride, args.k_batch_stride, kChunkKeys, S::kColumns) &&
        make_tensor_map(&maps.v, args.v, args.dtype, D, k_tokens, args.kv_heads, batch, args.v_token_stride,
                        args.v_head_stride, args.v_batch_stride, kChunkKeys, S::kColumns);
    const int64_t units = args.batch * args.heads * ((args.q_len + kUnitRows - 1) / kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks("tensor_copies", kernel<Element, D>, blocks, S::kThreads, kSharedBytes, stream, args, maps,
                         nonzero_scale_log2(args), aligned, mapped);
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

}  // namespace tensor_copies

tilerank_status attention_tensor_copies(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? tensor_copies::launch_typed<__half>(args, stream)
                                       : tensor_copies::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
