// Ping-pong: wide heads by two warpgroups that multiply in turn. A block takes 64 rows a group of one pair; the
// scores of a tile of 128 keys and the sums of the tile before are issued together, also across units, and its weights
// are computed behind those sums while the other groups have the matrix unit. All tiles come by the copy engine.
// Prediction: head_dim 128, 4 x 16 x 2048 x 2048: 230 us, from 550: products take 134 us and are issued seven
//   tenths of the time; head_dim 64: 155 us, from 167.
// Answer: metrics/<machine>/bench_attention_ping_pong.json, bench_micro.json and docs/attention.md.
#include "common/equal_parts.cuh"
#include "common/named_barriers.cuh"
#include "common/softmax.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma_shared.cuh"

namespace tilerank {
namespace ping_pong {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kGroupRows = kGroupWarps * 16;

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores, weights and sums take 96 + D / 2 registers of
    // theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = 2;
    static constexpr int kRegisters = 224;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static_assert(kGroupThreads * (kGroups * kRegisters + kCopyRegisters) <= registers_at_start(kThreads));
    static constexpr int kUnitRows = kGroups * kGroupRows;
    static constexpr int kKeys = 128;  // of a tile
    static constexpr int kSteps = kKeys / 16;
    // Tiles are in parts of kRowBytes a row: the widest swizzle that divides D.
    static constexpr int kColumns = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
    static constexpr int kParts = D / kColumns;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPartBytes = kKeys * kRowBytes;
    static constexpr int kTileBytes = kKeys * D * 2;  // of keys, and of values
    static constexpr int kQueryPartBytes = kGroupRows * kRowBytes;
    static constexpr int kQueryBytes = kGroupRows * D * 2;  // of a group's part of a unit
    static constexpr int kDepth = 2;                        // units whose queries are in shared memory
    static constexpr int kAllQueryBytes = kDepth * kGroups * kQueryBytes;
    static constexpr int kMostStages = (225 * 1024 - kAllQueryBytes) / (2 * kTileBytes);
    static constexpr int kStages = kMostStages < 4 ? kMostStages : 4;  // of keys, and of values
    static constexpr int kBytes = kAllQueryBytes + 2 * kStages * kTileBytes;
    static_assert(kStages >= 2 && kPartBytes % 1024 == 0 && kQueryPartBytes % 1024 == 0);
};

// Each pass is one unit: its tiles are copied for it.
template <int D>
using PassesFor = Passes<Shape<D>::kUnitRows, 1, 0>;

// A unit on its way to the groups. The end: no tiles.
struct Work {
    void* out;        // of the unit's first row
    int rows;         // of the unit that exist
    int k_len;        // keys that count
    int causal_keys;  // what the first row may see if causality alone counted
    int tiles;        // that some row sees keys of; at least one
};

// What the warps of a block share.
template <int D>
struct Shared {
    using S = Shape<D>;
    unsigned char* queries;  // [kDepth][kGroups]
    unsigned char* keys;     // [kStages]
    unsigned char* values;   // [kStages]
    Work* works;             // [kDepth]
    uint64_t* dealt;         // of each work: it and its queries are there
    uint64_t* taken;
    uint64_t* keys_full;
    uint64_t* keys_empty;
    uint64_t* values_full;
    uint64_t* values_empty;

    __device__ __forceinline__ explicit Shared(DynamicShared& memory) {
        unsigned char* unaligned = memory.take<unsigned char>(S::kBytes + 1024);
        queries = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        keys = queries + S::kAllQueryBytes;
        values = keys + S::kStages * S::kTileBytes;
        works = memory.take<Work>(S::kDepth);
        dealt = memory.take<uint64_t>(S::kDepth);
        taken = memory.take<uint64_t>(S::kDepth);
        keys_full = memory.take<uint64_t>(S::kStages);
        keys_empty = memory.take<uint64_t>(S::kStages);
        values_full = memory.take<uint64_t>(S::kStages);
        values_empty = memory.take<uint64_t>(S::kStages);
    }

    static constexpr size_t bytes() {
        return DynamicShared::bytes<unsigned char>(S::kBytes + 1024) + DynamicShared::bytes<Work>(S::kDepth) +
               2 * DynamicShared::bytes<uint64_t>(S::kDepth) + 4 * DynamicShared::bytes<uint64_t>(S::kStages);
    }

    __device__ __forceinline__ void init() const {
        constexpr int kGroupsWarps = S::kGroups * kGroupWarps;
        const int at = static_cast<int>(threadIdx.x);
        if (at < S::kDepth) {
            barrier_init(&dealt[at], kWarpSize);
            barrier_init(&taken[at], kGroupsWarps);
        }
        if (at < S::kStages) {
            barrier_init(&keys_full[at], kWarpSize);
            barrier_init(&keys_empty[at], kGroupsWarps);
            barrier_init(&values_full[at], kWarpSize);
            barrier_init(&values_empty[at], kGroupsWarps);
        }
    }
};

// Rows of q, k and v for the copy engine, in boxes of a group's queries and of a tile's keys or values.
struct Maps {
    TensorMap q;
    TensorMap k;
    TensorMap v;
};

// ---- The warps that copy ----

// Rows 0..count-1 of source into a tile of kRows rows, the rest zeros; by one warp.
template <typename Element, int D, int kRows>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const Element* source, int64_t token_stride, int count,
                                          int lane, bool aligned) {
    using S = Shape<D>;
    constexpr int kEights = D / 8;
#pragma unroll 1
    for (int at = lane; at < kRows * kEights; at += kWarpSize) {
        const int row = at / kEights;
        const int column = at % kEights * 8;
        unsigned char* to = tile + column / S::kColumns * (kRows * S::kRowBytes) +
                            swizzled_offset<S::kRowBytes>(row, column % S::kColumns * 2);
        const Element* from = source + row * token_stride + column;
        if (aligned) {
            copy_async<16>(to, from, row < count);
        } else {
            uint4 eight = {0, 0, 0, 0};
            if (row < count) eight = load_eight(from, false);
            store_vector(to, eight);
        }
    }
    copy_async_commit();
}

// One box of kColumns columns each, one below the other. By one lane.
template <int D, int kRows>
__device__ __forceinline__ void copy_boxes(unsigned char* tile, const TensorMap& map, int token, int head, int sequence,
                                           uint64_t* barrier) {
    using S = Shape<D>;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
        copy_box(tile + part * kRows * S::kRowBytes, map, part * S::kColumns, token, head, sequence, barrier);
    }
}

template <int D>
__device__ __forceinline__ int tiles_of(const PassesFor<D>& passes) {
    constexpr int kKeys = Shape<D>::kKeys;
    return max((passes.any_row_sees(passes.first_unit) + kKeys - 1) / kKeys, 1);
}

// Copies keys and values of all units in the order in which they are used: keys of a tile before values of the one
// before. By maps: one warp, all but values whose tile has rows that do not count: these must be zeros and not only
// hidden, which its lanes see to. Without maps: one of kCopyWarps warps, every kCopyWarps-th tile.
template <typename Element, int D, int kCopyWarps>
__device__ __forceinline__ void fill(PassesFor<D> passes, const Shared<D>& shared, const Maps& maps, int copy_warp,
                                     int lane, bool aligned, bool mapped) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    const int heads_a_group = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
    struct Tile {
        int head;
        int sequence;
        int first;  // of its keys
        int begin;  // of the sequence's, where packed
        int count;  // of its keys that count
    };
    const auto copy = [&](const Tile& from, int number, bool values) {
        if (number % kCopyWarps != copy_warp) return;
        const int stage = number % S::kStages;
        unsigned char* to = (values ? shared.values : shared.keys) + stage * S::kTileBytes;
        uint64_t* full = &(values ? shared.values_full : shared.keys_full)[stage];
        barrier_wait(&(values ? shared.values_empty : shared.keys_empty)[stage], number / S::kStages % 2 ^ 1);
        if (mapped && (!values || from.count >= S::kKeys)) {
            if (lane == 0) {
                barrier_arrive_expecting(full, S::kTileBytes);
                copy_boxes<D, S::kKeys>(to, values ? maps.v : maps.k, from.begin + from.first, from.head,
                                        args.cu_seqlens_q != nullptr ? 0 : from.sequence, full);
            } else {
                barrier_arrive(full);
            }
            return;
        }
        const int64_t stride = values ? args.v_token_stride : args.k_token_stride;
        const int64_t offset = row_offset(from.sequence, from.head, from.begin + from.first,
                                          values ? args.v_batch_stride : args.k_batch_stride,
                                          values ? args.v_head_stride : args.k_head_stride, stride);
        copy_tile<Element, D, S::kKeys>(to, static_cast<const Element*>(values ? args.v : args.k) + offset, stride,
                                        from.count, lane, aligned);
        copy_async_wait<0>();
        fence_async_proxy();
        barrier_arrive(full);
    };
    int number = 0;  // of the tile, among the block's
    Tile before = {};
#pragma unroll 1
    while (passes.next()) {
        const int tiles = tiles_of<D>(passes);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int first = tile * S::kKeys;
            const Tile now = {passes.head / heads_a_group, passes.sequence, first, passes.place.k_begin,
                              passes.place.k_len - first};
            copy(now, number, false);
            if (number > 0) copy(before, number - 1, true);
            before = now;
            ++number;
        }
    }
    if (number > 0) copy(before, number - 1, true);
}

// Walks the units and tells the groups, with their queries.
template <typename Element, int D>
__device__ __forceinline__ void deal(PassesFor<D> passes, const Shared<D>& shared, const Maps& maps, int lane,
                                     bool aligned, bool mapped) {
    using S = Shape<D>;
    const AttentionArgs& args = passes.args;
    int turn = 0;
    Work work = {};
#pragma unroll 1
    while (passes.next()) {
        const SequencePlace& place = passes.place;
        const int row = passes.first_row(passes.first_unit);
        work.rows = min(place.q_len - row, S::kUnitRows);
        work.out = static_cast<Element*>(args.out) + row_offset(passes.sequence, passes.head, place.q_begin + row,
                                                                args.out_batch_stride, args.out_head_stride,
                                                                args.out_token_stride);
        work.k_len = place.k_len;
        work.causal_keys = args.causal ? row + 1 : kMostKeys16;
        work.tiles = tiles_of<D>(passes);
        const int at = turn % S::kDepth;
        barrier_wait(&shared.taken[at], turn / S::kDepth % 2 ^ 1);
        ++turn;
        if (lane == 0) shared.works[at] = work;
        const int groups = (work.rows + kGroupRows - 1) / kGroupRows;  // of those that have rows
        unsigned char* queries = shared.queries + at * S::kGroups * S::kQueryBytes;
        if (mapped) {
            if (lane == 0) {
                barrier_arrive_expecting(&shared.dealt[at], groups * S::kQueryBytes);
#pragma unroll 1
                for (int group = 0; group < groups; ++group) {
                    copy_boxes<D, kGroupRows>(queries + group * S::kQueryBytes, maps.q,
                                              place.q_begin + row + group * kGroupRows, passes.head,
                                              args.cu_seqlens_q != nullptr ? 0 : passes.sequence, &shared.dealt[at]);
                }
            } else {
                barrier_arrive(&shared.dealt[at]);
            }
        } else {
            const Element* q = static_cast<const Element*>(args.q) +
                               row_offset(passes.sequence, passes.head, place.q_begin + row, args.q_batch_stride,
                                          args.q_head_stride, args.q_token_stride);
#pragma unroll 1
            for (int group = 0; group < groups; ++group) {
                const int first = group * kGroupRows;
                copy_tile<Element, D, kGroupRows>(queries + group * S::kQueryBytes, q + first * args.q_token_stride,
                                                  args.q_token_stride, work.rows - first, lane, aligned);
            }
            copy_async_wait<0>();
            fence_async_proxy();
            barrier_arrive(&shared.dealt[at]);
        }
    }
    work.tiles = 0;
    const int at = turn % S::kDepth;
    barrier_wait(&shared.taken[at], turn / S::kDepth % 2 ^ 1);
    if (lane == 0) shared.works[at] = work;
    barrier_arrive(&shared.dealt[at]);
}

// ---- The groups that compute ----

// The same of numbers that have a sign.
__device__ __forceinline__ int warp_register(int value) {
    return static_cast<int>(tilerank::warp_register(static_cast<uint32_t>(value)));
}

// The groups take turns: each waits for its own, and gives the next one its turn.
template <int kGroups>
__device__ __forceinline__ void wait_for_turn(int group) {
    named_barrier_wait<2 * kGroupThreads>(group + 2);
}
template <int kGroups>
__device__ __forceinline__ void give_turn_after(int group) {
    named_barrier_arrive<2 * kGroupThreads>((group + 1) % kGroups + 2);
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

template <typename Element, int D>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Shared<D>& shared, int group, int group_warp,
                                        int lane, float factor, bool aligned) {
    using S = Shape<D>;
    // Powers of two that a weight may reach before its row's reference is raised.
    constexpr float kMostAbove = 8.0f;
    constexpr int kTileSize = S::kTileBytes / 16;
    const uint32_t all_queries = warp_register(shared_address(shared.queries) / 16 + group * (S::kQueryBytes / 16));
    const uint32_t all_keys = warp_register(shared_address(shared.keys) / 16);
    const uint32_t all_values = warp_register(shared_address(shared.values) / 16);
    const float size = fabsf(factor);

    Fragment scores[S::kKeys / 8];  // and then weights
    Fragment sums[D / 8];
    uint32_t weights[S::kSteps][4];
    float reference[2];
    float row_sum[2];

    const auto issue_scores = [&](int depth, int stage) {
        const uint32_t queries = all_queries + depth * (S::kGroups * S::kQueryBytes / 16);
        const uint32_t keys = all_keys + stage * kTileSize;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const int part = step * 16 / S::kColumns;
            const int offset = step * 16 % S::kColumns * 2 / 16;
            wgmma_k16<Element, S::kKeys>(
                scores, tile_descriptor<S::kRowBytes>(queries + part * (S::kQueryPartBytes / 16) + offset, 1),
                tile_descriptor<S::kRowBytes>(keys + part * (S::kPartBytes / 16) + offset, 1), step > 0);
        }
        wgmma_commit();
    };
    const auto issue_sums = [&](int stage, bool is_first) {
        const uint32_t values = all_values + stage * kTileSize;
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
            wgmma_k16<Element, D, true>(sums, weights[step],
                                        tile_descriptor<S::kRowBytes>(values + step * S::kRowBytes, S::kPartBytes / 16),
                                        step > 0 || !is_first);
        }
        wgmma_commit();
    };
    const auto give_back = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    const auto look = [&](int turn) -> const Work& {
        barrier_wait(&shared.dealt[turn % S::kDepth], turn / S::kDepth % 2);
        return shared.works[turn % S::kDepth];
    };

    // The unit whose scores come next, as this warp sees it, and where its first tile is.
    int turn = 0;
    int tiles;
    int rows;
    int k_len;
    int causal_keys;
    int whole_tiles;
    int tile = 0;    // of the unit
    int number = 0;  // of the tile, among the block's
    const auto begin_unit = [&](const Work& work) {
        const int first = group * kGroupRows + group_warp * 16;
        tiles = warp_register(work.tiles);
        rows = warp_register(work.rows) - first;
        k_len = warp_register(work.k_len);
        causal_keys = warp_register(work.causal_keys) + first;
        whole_tiles = min(k_len, causal_keys) / S::kKeys;
    };

    // Scores become weights, and the row's reference and sum follow; the factor that sums so far must take is
    // `rescale`. True: it is not 1 for some row of the warp.
    const auto weigh = [&](float (&rescale)[2]) {
        if (rows <= 0) return false;
        if (factor < 0.0f) {
#pragma unroll
            for (int block = 0; block < S::kKeys / 8; ++block) {
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[block][i] = -scores[block][i];
            }
        }
        if (tile >= whole_tiles) {
            int sees[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sees[half] = min(k_len, causal_keys + half * 8 + lane / 4) - tile * S::kKeys;
            }
#pragma unroll
            for (int block = 0; block < S::kKeys / 8; ++block) {
                hide_keys(scores[block], block * 8, sees, lane, -INFINITY);
            }
        }
        float largest[2] = {kLowestReference, kLowestReference};
#pragma unroll
        for (int block = 0; block < S::kKeys / 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], scores[block][i]);
        }
        bool is_raised[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = fmaxf(quad_max(largest[half]) * size, kLowestReference);
            if (tile == 0) {
                reference[half] = largest[half];
                row_sum[half] = 0.0f;
            }
            is_raised[half] = largest[half] > reference[half] + kMostAbove;
        }
        const bool is_any_raised = __any_sync(kFullMask, is_raised[0] || is_raised[1]);
        if (is_any_raised) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float raised = is_raised[half] ? largest[half] : reference[half];
                rescale[half] = exp2_approx(reference[half] - raised);
                reference[half] = raised;
                row_sum[half] *= rescale[half];
            }
        }
#pragma unroll
        for (int block = 0; block < S::kKeys / 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[block][i] = exp2_approx(scores[block][i] * size - reference[i / 2]);
                row_sum[i / 2] += scores[block][i];
            }
        }
        return is_any_raised;
    };
    const auto pack_weights = [&] {
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &scores[step * 2 + i / 2][i % 2 * 2];
                weights[step][i] = pack16<Element>(pair[0], pair[1]);
            }
        }
    };
    // Writes a unit's rows, whose sums are complete.
    const auto finish = [&](const float (&lane_sums)[2], int rows_before, Element* out) {
        if (rows_before <= 0) return;
        const float factors[2] = {normalizer(quad_sum(lane_sums[0])), normalizer(quad_sum(lane_sums[1]))};
        if constexpr (D % 32 == 0) {
            if (aligned) {
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
                        if (half * 8 + lane / 4 < rows_before) store_vector(target + column * 32, eight);
                    }
                }
                return;
            }
        }
        store_rows<D>(out, args.out_token_stride, sums, factors, rows_before, lane, aligned);
    };
    const auto out_of = [&](const Work& work) {
        return static_cast<Element*>(work.out) + (group * kGroupRows + group_warp * 16) * args.out_token_stride;
    };

    begin_unit(look(0));
    if (tiles == 0) return;
    if (group == S::kGroups - 1) give_turn_after<S::kGroups>(group);  // the first one begins
    Element* out = out_of(shared.works[0]);
    barrier_wait(&shared.keys_full[0], 0);
    wait_for_turn<S::kGroups>(group);
    wgmma_fence();
    issue_scores(0, 0);
    give_turn_after<S::kGroups>(group);
    wgmma_wait<0>();
    give_back(&shared.keys_empty[0]);
    float rescale[2];
    weigh(rescale);
    pack_weights();

    // The tile whose weights are there and whose sums come next is number - 1.
    bool is_first_before = true;  // of its unit
    int rows_before = rows;
#pragma unroll 1
    for (;;) {
        ++number;
        const bool begins_unit = ++tile == tiles;
        const float row_sum_before[2] = {row_sum[0], row_sum[1]};
        if (begins_unit) {
            give_back(&shared.taken[turn % S::kDepth]);
            ++turn;
            begin_unit(look(turn));
            if (tiles == 0) break;
            tile = 0;
        }
        const int stage = number % S::kStages;
        const int stage_before = (number - 1) % S::kStages;
        barrier_wait(&shared.keys_full[stage], number / S::kStages % 2);
        barrier_wait(&shared.values_full[stage_before], (number - 1) / S::kStages % 2);
        wait_for_turn<S::kGroups>(group);
        wgmma_fence();
        issue_scores(turn % S::kDepth, stage);
        issue_sums(stage_before, is_first_before);
        give_turn_after<S::kGroups>(group);
        wgmma_wait<1>();
        give_back(&shared.keys_empty[stage]);
        const bool is_raised = weigh(rescale);
        wgmma_wait<0>();
        give_back(&shared.values_empty[stage_before]);
        if (begins_unit) {
            finish(row_sum_before, rows_before, out);
            out = out_of(shared.works[turn % S::kDepth]);
        } else if (is_raised) {
#pragma unroll
            for (int column = 0; column < D / 8; ++column) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[column][i] *= rescale[i / 2];
            }
        }
        is_first_before = begins_unit;
        rows_before = rows;
        pack_weights();
    }
    const int stage = (number - 1) % S::kStages;
    barrier_wait(&shared.values_full[stage], (number - 1) / S::kStages % 2);
    wait_for_turn<S::kGroups>(group);
    wgmma_fence();
    issue_sums(stage, is_first_before);
    if (group + 1 < S::kGroups) give_turn_after<S::kGroups>(group);
    wgmma_wait<0>();
    finish(row_sum, rows_before, out);
}

template <typename Element, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    kernel(AttentionArgs args, const __grid_constant__ Maps maps, EqualParts parts, float factor, bool aligned,
           bool mapped) {
    using S = Shape<D>;
    DynamicShared memory;
    const Shared<D> shared(memory);
    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (mapped && threadIdx.x == S::kThreads - 1) {
        prefetch_tensor_map(maps.q);
        prefetch_tensor_map(maps.k);
        prefetch_tensor_map(maps.v);
    }
    UnitPlace places[2] = {};
    if (warp >= S::kGroups * kGroupWarps) {
        if (parts.each > 0) {
            find_equal_places<S::kUnitRows>(args, parts, places);
        } else {
            find_places<S::kUnitRows>(args, places, lane);
        }
    }
    shared.init();
    __syncthreads();
    if (warp >= S::kGroups * kGroupWarps) {
        give_registers_back<S::kCopyRegisters>();
        const PassesFor<D> passes(args, places);
        constexpr int kCopyWarps = 2;  // that copy without maps
        const int copy_warp = warp - S::kGroups * kGroupWarps;
        if (copy_warp < kCopyWarps) {
            if (!mapped) fill<Element, D, kCopyWarps>(passes, shared, maps, copy_warp, lane, aligned, false);
        } else if (copy_warp == kCopyWarps) {
            if (mapped) fill<Element, D, 1>(passes, shared, maps, 0, lane, true, true);
        } else {
            deal<Element, D>(passes, shared, maps, lane, aligned, mapped);
        }
    } else {
        take_registers<S::kRegisters>();
        compute<Element, D>(args, shared, warp_register(warp / kGroupWarps), warp % kGroupWarps, lane, factor, aligned);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes = Shared<D>::bytes();
    static_assert(kSharedBytes <= 227 * 1024);
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant ping_pong: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
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
                        args.q_head_stride, args.q_batch_stride, kGroupRows, S::kColumns) &&
        make_tensor_map(&maps.k, args.k, args.dtype, D, k_tokens, args.kv_heads, batch, args.k_token_stride,
                        args.k_head_stride, args.k_batch_stride, S::kKeys, S::kColumns) &&
        make_tensor_map(&maps.v, args.v, args.dtype, D, k_tokens, args.kv_heads, batch, args.v_token_stride,
                        args.v_head_stride, args.v_batch_stride, S::kKeys, S::kColumns);
    const int64_t units = args.batch * args.heads * ((args.q_len + S::kUnitRows - 1) / S::kUnitRows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks("ping_pong", kernel<Element, D>, blocks, S::kThreads, kSharedBytes, stream, args, maps,
                         equal_parts(args, S::kUnitRows, blocks), nonzero_scale_log2(args), aligned, mapped);
}

template <typename Element>
tilerank_status launch_typed(const AttentionArgs& args, void* stream) {
    switch (args.head_dim) {
        case 80:
            return launch_for<Element, 80>(args, stream);
        case 96:
            return launch_for<Element, 96>(args, stream);
        default:
            return launch_for<Element, 128>(args, stream);
    }
}

}  // namespace ping_pong

tilerank_status attention_ping_pong(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? ping_pong::launch_typed<__half>(args, stream)
                                       : ping_pong::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
