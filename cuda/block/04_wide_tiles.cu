// Wide tiles: warpgroup_block with products of 128 x 256 and more at a time. Rows are normalised once, into memory, by
// warps that have nothing else to do; attention takes 128 keys at a time, queries, keys and values by bulk copies, scores
// from factors that both lie in shared memory.
// Prediction: at 4 x 4096 tokens of width 1024 690 us beside 830 unfused; at 4 x 128 33 us beside 42: the first products
//   at cuBLAS's rate without normalising beside them, attention at 128 keys a tile, wide tiles of the projection.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include "common/block_wide.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace wide_tiles {

using namespace block_wide;

constexpr const char* kName = "wide_tiles";
constexpr int D = 64;  // of a head: rows of 128 bytes, the swizzle's width
constexpr int kGroups = 3;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kRegisters = 160;
constexpr int kCopyRegisters = 32;
static_assert(kGroups * kRegisters + kCopyRegisters <= (kGroups + 1) * launch_registers(kThreads));

constexpr int kTileRows = kGroups * kUnitRows;
constexpr int kTileKeys = 128;
constexpr int kSteps = kTileKeys / 16;
constexpr int kQueryBytes = kTileRows * kRowBytes;
constexpr int kKeyBytes = kTileKeys * kRowBytes;  // of keys, and of values
constexpr int kQueryStages = 2;
constexpr int kStages = 4;
constexpr int kOnesBytes = 16 * kRowBytes;
constexpr int kQueriesAt = kStages * 2 * kKeyBytes;
constexpr int kOnesAt = kQueriesAt + kQueryStages * kQueryBytes;
constexpr int kAttentionBytes = kOnesAt + kOnesBytes;
// Row sums come out of the product with the values, as one more block of columns that is all ones.
constexpr int kSumColumns = D + 8;
constexpr int kTurnBarrier = 1 + kGroups;  // behind those of the groups

// In the projection two groups multiply and have the third one's registers.
constexpr int kOutRegisters = 224;
constexpr int kIdleRegisters = 24;
static_assert(kMultiplyGroups * kOutRegisters + kIdleRegisters + kCopyRegisters <=
              (kGroups + 1) * launch_registers(kThreads));
// A warp begins with 128 registers: not enough for an instruction with 256 columns of sums, whatever it takes later.
template <int kColumns>
using OutShape = WideShape<kColumns, (kColumns > 128 ? 128 : kColumns)>;
// The rings of the attention and of the projection have the same place.
template <int kColumns>
constexpr int kMemoryBytes = kAttentionBytes > OutShape<kColumns>::kBytes ? kAttentionBytes
                                                                         : OutShape<kColumns>::kBytes;

struct AttentionMaps {
    TensorMap q;
    TensorMap k;
    TensorMap v;
};

// ---- A tile of the attention ----

struct Tile {
    int sequence;
    int head;
    int first_row;    // of the sequence
    int k_len;        // keys that count
    int key_tiles;    // at least one, also without keys: all of it is hidden then
    bool causal;

    // Keys that a row sees.
    __device__ __forceinline__ int sees(int row) const { return causal ? min(k_len, row + 1) : k_len; }
};

__device__ __forceinline__ int tiles_of_sequence(const BlockPlan& plan) {
    return (static_cast<int>(plan.args.tokens) + kTileRows - 1) / kTileRows;
}

// Numbers are in the order sequence, tile, head, the head fastest. The shortest come last: the last tiles of sequences,
// where they have fewer rows, or, if causal, the first ones, which see the fewest keys.
__device__ __forceinline__ Tile tile_at(const BlockPlan& plan, int number) {
    const int heads = static_cast<int>(plan.args.num_heads);
    const int tiles = tiles_of_sequence(plan);
    Tile tile;
    tile.head = number % heads;
    tile.causal = plan.args.causal != 0;
    const int whole = tile.causal ? tiles : static_cast<int>(plan.args.tokens) / kTileRows;  // of a sequence
    const int unit = number / heads;
    const int beyond = unit - static_cast<int>(plan.args.batch) * whole;
    tile.sequence = beyond < 0 ? unit / whole : beyond;
    const int at = beyond < 0 ? unit % whole : whole;
    tile.first_row = (tile.causal ? tiles - 1 - at : at) * kTileRows;
    tile.k_len = static_cast<int>(key_length(plan.attention, tile.sequence));
    const int last_row = min(tile.first_row + kTileRows, static_cast<int>(plan.args.tokens)) - 1;
    tile.key_tiles = max((tile.sees(last_row) + kTileKeys - 1) / kTileKeys, 1);
    return tile;
}

// What the warps of a block share in the attention.
struct Shared {
    unsigned char* memory;
    uint64_t* full;  // of each stage of keys and values
    uint64_t* empty;
    uint64_t* queries_full;
    uint64_t* queries_empty;
    int* numbers;  // of each stage of queries
};

// By one thread: takes numbers and brings their queries, keys and values.
__device__ __forceinline__ void fill_attention(const BlockPlan& plan, const AttentionMaps& maps, const Shared& shared,
                                               int all) {
    const int tokens = static_cast<int>(plan.args.tokens);
    RingPlace<kQueryStages> queries;
    RingPlace<kStages> at;
#pragma unroll 1
    for (;;) {
        barrier_wait(&shared.queries_empty[queries.stage], queries.parity ^ 1);
        const int number = take_ticket(plan.counters);
        shared.numbers[queries.stage] = number;
        if (number >= all) {
            barrier_arrive(&shared.queries_full[queries.stage]);
            return;
        }
        const Tile tile = tile_at(plan, number);
        const int first = tile.sequence * tokens;
        const int column = tile.head * D;
        barrier_expect(&shared.queries_full[queries.stage], kQueryBytes);
        copy_box(shared.memory + kQueriesAt + queries.stage * kQueryBytes, maps.q, first + tile.first_row, column,
                 &shared.queries_full[queries.stage]);
        queries.advance();
#pragma unroll 1
        for (int key_tile = 0; key_tile < tile.key_tiles; ++key_tile) {
            unsigned char* keys = shared.memory + at.stage * 2 * kKeyBytes;
            barrier_wait(&shared.empty[at.stage], at.parity ^ 1);
            barrier_expect(&shared.full[at.stage], 2 * kKeyBytes);
            copy_box(keys, maps.k, first + key_tile * kTileKeys, column, &shared.full[at.stage]);
            copy_box(keys + kKeyBytes, maps.v, first + key_tile * kTileKeys, column, &shared.full[at.stage]);
            at.advance();
        }
    }
}

// The weights of a tile, relative to each row's reference; is one of them, on any lane, too large? kWhole: every row of
// the warp sees all keys; else none sees those from any_sees on. kFused: by one multiply-add a score; else (then the
// answer means nothing) as rounded as references are, so that a weight never exceeds 1 by a large score's last place.
template <typename Element, bool kWhole, bool kFused>
__device__ __forceinline__ bool weigh(const Fragment (&scores)[kSteps * 2], uint32_t (&weights)[kSteps][4],
                                      const float (&reference)[2], float factor, int any_sees) {
    constexpr float kLargestWeight = 16384.0f;  // fp16 ends at 65,504
    uint32_t largest = 0;
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
            weights[step][at] = pack16<Element>(weight[0], weight[1]);
        }
        largest = max16<Element>(largest, max16<Element>(max16<Element>(weights[step][0], weights[step][1]),
                                                         max16<Element>(weights[step][2], weights[step][3])));
    }
    return kFused && __any_sync(kFullMask, exceeds16<Element>(largest, kLargestWeight));
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

// Values of keys that do not count become zeros: a weight of 0 times NaN would be NaN. Every group does it, before its
// own product reads them.
__device__ __forceinline__ void clear_values(unsigned char* values, int first, int group, int group_warp, int lane) {
    for (int at = first * 8 + group_warp * kWarpSize + lane; at < kTileKeys * 8; at += kGroupThreads) {
        store_vector(values + at * 16, uint4{0, 0, 0, 0});
    }
    fence_async_proxy();
    group_barrier(1 + group, kGroupThreads);
}

template <typename Element>
__device__ __forceinline__ void attend(const BlockPlan& plan, const Shared& shared, int all, int group, int group_warp,
                                       int lane, float factor) {
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    constexpr int kFirstBlocks = 4;      // keys of the first tile that give the first reference, in eights
    const int tokens = static_cast<int>(plan.args.tokens);
    const uint32_t memory = shared_address(shared.memory) / 16;
    const uint32_t ones = memory + kOnesAt / 16;
    // Scores become positive multiples of what is asked for: a negative factor turns the queries' signs, which here
    // turns the scores'.
    const float sign = factor < 0.0f ? -1.0f : 1.0f;
    const float size = fabsf(factor);

    Fragment scores[kSteps * 2];
    Fragment sums[kSumColumns / 8];
    uint32_t weights[kSteps][4] = {};
    RingPlace<kQueryStages> queries;
    RingPlace<kStages> at;

    const auto issue_scores = [&](int stage, int query_stage) {
        const uint32_t left = memory + (kQueriesAt + query_stage * kQueryBytes + group * kUnitRows * kRowBytes) / 16;
        const uint32_t right = memory + stage * 2 * kKeyBytes / 16;
        wgmma_fence();
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            wgmma_shared_k16<Element, kTileKeys, false>(scores, tile_descriptor<kRowBytes>(left + depth * 2, 1),
                                                        tile_descriptor<kRowBytes>(right + depth * 2, 1), depth > 0);
        }
        wgmma_commit();
    };
    const auto issue_sums = [&](int stage, bool is_first) {
        const uint32_t right = memory + (stage * 2 + 1) * kKeyBytes / 16;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = right + step * kRowBytes;
            wgmma_k16<Element, kSumColumns, true>(sums, weights[step],
                                                  tile_descriptor<kRowBytes>(begin, ones - begin),
                                                  step > 0 || !is_first);
        }
        wgmma_commit();
    };
    const auto give_back = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

    // Groups take turns with the matrix unit: what one has issued is done before the next one's begins. Else all would
    // wait for their products at the same time, and then weigh at the same time.
    const auto take_turn = [&] { group_barrier(kTurnBarrier + group, 2 * kGroupThreads); };
    const auto give_turn = [&] { group_arrive(kTurnBarrier + (group + 1) % kGroups, 2 * kGroupThreads); };
    if (group == kGroups - 1) give_turn();

    barrier_wait(&shared.queries_full[queries.stage], queries.parity);
    const auto number_at = [&](int stage) { return uniform(lane == 0 ? shared.numbers[stage] : 0); };
    int number = number_at(queries.stage);
    if (number >= all) return;
    barrier_wait(&shared.full[at.stage], at.parity);
    issue_scores(at.stage, queries.stage);

#pragma unroll 1
    while (number < all) {
        const Tile tile = tile_at(plan, number);
        const int warp_row = tile.first_row + group * kUnitRows + group_warp * 16;
        float reference[2] = {kLowestReference, kLowestReference};
        bool is_steep = false;
        int before = 0;
        RingPlace<kQueryStages> next = queries;

#pragma unroll 1
        for (int key_tile = 0; key_tile < tile.key_tiles; ++key_tile) {
            // Whose scores are next: those of the next keys, or the next tile's first. Where there is none, the same
            // once more, for nothing.
            RingPlace<kStages> following = at;
            following.advance();
            if (key_tile + 1 == tile.key_tiles) {
                next.advance();
                barrier_wait(&shared.queries_full[next.stage], next.parity);
                number = number_at(next.stage);
            }
            const bool is_end = number >= all;
            if (is_end) following = at;
            if (!is_end) barrier_wait(&shared.full[following.stage], following.parity);
            wgmma_wait<0>();
            if (key_tile > 0) give_back(&shared.empty[before]);
            before = at.stage;
            const int first_key = key_tile * kTileKeys;
            if (tile.k_len - first_key < kTileKeys) {
                clear_values(shared.memory + (at.stage * 2 + 1) * kKeyBytes, max(tile.k_len - first_key, 0), group,
                             group_warp, lane);
            }
            if (sign < 0.0f) {
#pragma unroll
                for (int block = 0; block < kSteps * 2; ++block) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) scores[block][i] = -scores[block][i];
                }
            }
            // Rows beyond the sequence hold another's queries: they see nothing, so that nothing comes of them. A warp
            // that has no others weighs nothing: what it multiplies is never stored.
            if (warp_row < tokens) {
                const int every_sees = warp_row + 15 < tokens ? tile.sees(warp_row) - first_key : 0;
                const int any_sees = tile.sees(warp_row + 15) - first_key;
                const bool is_whole = every_sees >= kTileKeys;
                if (!is_whole) {
                    int sees[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = warp_row + half * 8 + lane / 4;
                        sees[half] = row < tokens ? tile.sees(row) - first_key : 0;
                    }
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step * 16 + 16 <= every_sees) continue;
                        hide_keys(scores[step * 2], step * 16, sees, lane, -INFINITY);
                        hide_keys(scores[step * 2 + 1], step * 16 + 8, sees, lane, -INFINITY);
                    }
                }
                if (key_tile == 0) {
                    // A little below the largest, by which a fused product can differ: that weight is then at least 1.
                    constexpr float kRounding = 0x1p-22f;
                    find_largest<kFirstBlocks>(reference, scores, size);
                    reference[0] -= fabsf(reference[0]) * kRounding;
                    reference[1] -= fabsf(reference[1]) * kRounding;
                }
                if (!is_steep) {
                    is_steep = is_whole ? weigh<Element, true, true>(scores, weights, reference, size, 0)
                                        : weigh<Element, false, true>(scores, weights, reference, size, any_sees);
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
#pragma unroll
                            for (int column = 0; column < kSumColumns / 8; ++column) {
                                sums[column][half * 2] *= rescale;
                                sums[column][half * 2 + 1] *= rescale;
                            }
                        }
                    }
                    weigh<Element, false, false>(scores, weights, reference, size, any_sees);
                }
            }
            take_turn();
            issue_sums(at.stage, key_tile == 0);
            issue_scores(following.stage, next.stage);
            give_turn();
            at = following;
        }
        wgmma_wait<1>();
        give_back(&shared.empty[before]);
        give_back(&shared.queries_empty[queries.stage]);
        queries = next;

        const float factors[2] = {normalizer(sums[kSumColumns / 8 - 1][0]), normalizer(sums[kSumColumns / 8 - 1][2])};
        const int64_t row = static_cast<int64_t>(tile.sequence) * tokens + warp_row;
        Element* out = static_cast<Element*>(plan.attention.out) + row * plan.columns + tile.head * D;
        store_rows<D>(out, plan.columns, reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors, tokens - warp_row,
                      lane, true);
        fence_async_proxy_global();
        __syncwarp();
        const int unit = warp_row / kUnitRows;
        const int units = static_cast<int>(plan.row_blocks);
        if (lane == 0 && unit < units) count_done(heads_done(plan, tile.sequence * units + unit));
    }
    wgmma_wait<0>();
}

template <typename Element, int kColumns, bool kInOut>
__global__ void __launch_bounds__(kThreads, 1)
    attend_and_project(const __grid_constant__ BlockPlan plan, const __grid_constant__ WideMaps maps,
                       const __grid_constant__ AttentionMaps attention_maps, const NormalRows<Element> normal,
                       int units, float factor, int all) {
    using S = OutShape<kColumns>;
    DynamicShared dynamic;
    unsigned char* unaligned = dynamic.take<unsigned char>(kMemoryBytes<kColumns> + 1024);
    Shared shared;
    shared.memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    shared.full = dynamic.take<uint64_t>(kStages);
    shared.empty = dynamic.take<uint64_t>(kStages);
    shared.queries_full = dynamic.take<uint64_t>(kQueryStages);
    shared.queries_empty = dynamic.take<uint64_t>(kQueryStages);
    shared.numbers = dynamic.take<int>(kQueryStages);
    const WideRing<S> ring = {shared.memory, dynamic.take<uint64_t>(S::kStages), dynamic.take<uint64_t>(S::kStages),
                              dynamic.take<int>(S::kStages)};
    uint64_t* left = dynamic.take<uint64_t>(1);  // the attention, by those that compute it

    const int thread = static_cast<int>(threadIdx.x);
    const int warp = uniform(thread / kWarpSize);
    const int lane = thread % kWarpSize;
    if (thread < kStages) {
        barrier_init(&shared.full[thread], 1);
        barrier_init(&shared.empty[thread], kGroups * kGroupWarps);
    }
    if (thread < kQueryStages) {
        barrier_init(&shared.queries_full[thread], 1);
        barrier_init(&shared.queries_empty[thread], kGroups * kGroupWarps);
    }
    ring.init(thread);
    if (thread == 0) barrier_init(left, kGroups * kGroupThreads);
    for (int at = thread * 16; at < kOnesBytes; at += kThreads * 16) {
        const uint32_t ones = pack16<Element>(1.0f, 1.0f);
        store_vector(shared.memory + kOnesAt + at, uint4{ones, ones, ones, ones});
    }
    prefetch_weights<Element, kInOut>(plan);
    fence_async_proxy();
    __syncthreads();
    wait_for_launch_before();
    for (int unit = static_cast<int>(blockIdx.x) * kThreads + thread; unit < units;
         unit += static_cast<int>(gridDim.x) * kThreads) {
        normal.done[unit] = 0;
    }
    if (warp >= kGroups * kGroupWarps) {
        give_registers_back<kCopyRegisters>();
        if (thread == kGroups * kGroupThreads) {
            fence_async_proxy_global();
            fill_attention(plan, attention_maps, shared, all);
        }
        __syncwarp();
        if (warp != kGroups * kGroupWarps) return;
        barrier_wait(left, 0);  // the attention's memory is free for the projection
        fill_out<S, kInOut>(plan, maps, ring, lane);
    } else {
        take_registers<kRegisters>();
        attend<Element>(plan, shared, all, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
        fence_async_proxy();
        barrier_meet(left, 0);
        if (warp >= kMultiplyWarps) {
            give_registers_back<kIdleRegisters>();
        } else {
            take_registers<kOutRegisters>();
            project_out<Element, S, kInOut>(plan, ring, warp, lane);
        }
    }
}

// ---- Launching ----

template <typename Element, int kColumns, bool kInOut>
tilerank_status launch_second(const BlockPlan& plan, const WideMaps& maps, const AttentionMaps& attention_maps,
                              const NormalRows<Element>& normal, void* stream) {
    using S = OutShape<kColumns>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(kMemoryBytes<kColumns> + 1024) +
        2 * DynamicShared::bytes<uint64_t>(kStages) + 2 * DynamicShared::bytes<uint64_t>(kQueryStages) +
        DynamicShared::bytes<int>(kQueryStages) + 2 * DynamicShared::bytes<uint64_t>(S::kStages) +
        DynamicShared::bytes<int>(S::kStages) + DynamicShared::bytes<uint64_t>(1);
    static_assert(kSharedBytes <= kMostShared);
    const int64_t all = plan.args.batch * plan.args.num_heads * ceil_divide(plan.args.tokens, kTileRows);
    const int64_t work = std::max<int64_t>(all, WideTiles<S>(plan.rows, ceil_parts(plan.args.width)).all);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), work);
    return launched(kName, launch_dependent(attend_and_project<Element, kColumns, kInOut>,
                                            dim3(static_cast<unsigned>(blocks)), dim3(kThreads), kSharedBytes, stream,
                                            plan, maps, attention_maps, normal,
                                            static_cast<int>(normal_units(plan.args)),
                                            nonzero_scale_log2(plan.attention), static_cast<int>(all)));
}

template <typename Element, bool kInOut>
tilerank_status launch_typed(const BlockPlan& plan, void* workspace, void* stream) {
    const BlockArgs& args = plan.args;
    const AttentionArgs& a = plan.attention;
    const NormalRows<Element> normal = normal_rows<Element>(plan, workspace);
    const void* x = args.pre_ln ? normal.rows : args.x;
    WideMaps maps;
    tilerank_status status =
        describe_wide<kInOut>(kName, plan, x, args.pre_ln ? args.width : args.x_strides[1], &maps);
    if (status != TILERANK_OK) return status;
    AttentionMaps attention_maps;
    if (!describe_matrix(&attention_maps.q, args.dtype, a.q, plan.rows, plan.columns, plan.columns, kTileRows) ||
        !describe_matrix(&attention_maps.k, args.dtype, a.k, plan.rows, plan.columns, plan.columns, kTileKeys) ||
        !describe_matrix(&attention_maps.v, args.dtype, a.v, plan.rows, plan.columns, plan.columns, kTileKeys)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant %s: the driver describes no matrix to the copy engine", kName);
    }
    const WideColumns columns = WideColumns::of(plan);
    const auto first = columns.project == 256   ? launch_project<Element, 256, kInOut>
                       : columns.project == 192 ? launch_project<Element, 192, kInOut>
                                                : launch_project<Element, 128, kInOut>;
    status = first(kName, plan, maps, normal, wide_counters(args), stream);
    if (status != TILERANK_OK) return status;
    const auto second = columns.out == 256   ? launch_second<Element, 256, kInOut>
                        : columns.out == 128 ? launch_second<Element, 128, kInOut>
                                             : launch_second<Element, 64, kInOut>;
    return second(plan, maps, attention_maps, normal, stream);
}

}  // namespace wide_tiles

size_t block_wide_tiles_workspace(const BlockArgs& args) { return block_wide::workspace_bytes(args); }

tilerank_status block_wide_tiles(const BlockArgs& args, void* workspace, void* stream) {
    using namespace wide_tiles;
    const BlockPlan plan = make_plan(args, workspace, kUnitRows);
    const tilerank_status status = check_call(kName, plan);
    if (status != TILERANK_OK) return status;
    const bool in_out = args.weight_layout == TILERANK_WEIGHTS_IN_OUT;
    if (args.dtype == TILERANK_FP16) {
        return in_out ? launch_typed<__half, true>(plan, workspace, stream)
                      : launch_typed<__half, false>(plan, workspace, stream);
    }
    return in_out ? launch_typed<__nv_bfloat16, true>(plan, workspace, stream)
                  : launch_typed<__nv_bfloat16, false>(plan, workspace, stream);
}

}  // namespace tilerank
