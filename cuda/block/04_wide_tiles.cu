// Wide tiles: warpgroup_block whose attention takes 128 keys at a time, all of them and the queries by bulk copies, and
// scores from products whose factors both lie in shared memory. A product of a warpgroup that has its left factor in
// registers takes as long for 64 columns as for 128.
// Prediction: at 4 x 4096 tokens of width 1024 670 us beside 790 of warpgroup_block: 64 keys of 64 rows took it 500
//   cycles of the matrix unit, 384 here; at 4 x 512 55 us beside 60.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include "common/block_hopper.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace wide_tiles {

using namespace block_hopper;

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

template <bool kMany>
using Out = OutShape<kGroups, kMany>;
template <bool kMany>
constexpr int kMemoryBytes = kAttentionBytes > Out<kMany>::kRingBytes ? kAttentionBytes : Out<kMany>::kRingBytes;

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

// Numbers are in the order sequence, tile, head, the head fastest; causal tiles differ in length: the longest come
// first.
__device__ __forceinline__ Tile tile_at(const BlockPlan& plan, int number) {
    const int heads = static_cast<int>(plan.args.num_heads);
    const int tiles = tiles_of_sequence(plan);
    Tile tile;
    tile.head = number % heads;
    const int at = number / heads % tiles;
    tile.sequence = number / heads / tiles;
    tile.causal = plan.args.causal != 0;
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
        const int number = static_cast<int>(counter_add(plan.counters, 1));
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

    barrier_wait(&shared.queries_full[queries.stage], queries.parity);
    int number = uniform(shared.numbers[queries.stage]);
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

#pragma unroll 1
        for (int key_tile = 0;; ++key_tile) {
            const bool is_last = key_tile + 1 == tile.key_tiles;
            RingPlace<kStages> following = at;
            following.advance();
            if (!is_last) barrier_wait(&shared.full[following.stage], following.parity);
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
            // Rows beyond the sequence hold another's queries: they see nothing, so that nothing comes of them.
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
            issue_sums(at.stage, key_tile == 0);
            at = following;
            if (is_last) break;
            issue_scores(at.stage, queries.stage);
        }
        // The next tile's scores are computed while this one's sums are written.
        RingPlace<kQueryStages> next = queries;
        next.advance();
        barrier_wait(&shared.queries_full[next.stage], next.parity);
        const int next_number = uniform(shared.numbers[next.stage]);
        if (next_number >= all) {
            wgmma_wait<0>();
        } else {
            barrier_wait(&shared.full[at.stage], at.parity);
            issue_scores(at.stage, next.stage);
            wgmma_wait<1>();
        }
        give_back(&shared.empty[before]);
        give_back(&shared.queries_empty[queries.stage]);
        queries = next;
        number = next_number;

        const float factors[2] = {normalizer(sums[kSumColumns / 8 - 1][0]), normalizer(sums[kSumColumns / 8 - 1][2])};
        const int64_t row = static_cast<int64_t>(tile.sequence) * tokens + warp_row;
        Element* out = static_cast<Element*>(plan.attention.out) + row * plan.columns + tile.head * D;
        store_rows<D>(out, plan.columns, reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors, tokens - warp_row,
                      lane, true);
        fence_async_proxy_global();
        __syncwarp();
        const int unit = (tile.first_row + group * kUnitRows) / kUnitRows;
        const int units = static_cast<int>(plan.row_blocks);
        if (lane == 0 && unit < units) counter_add(plan.counters + 1 + tile.sequence * units + unit, 1);
    }
}

template <typename Element, bool kInOut, bool kMany>
__global__ void __launch_bounds__(kThreads, 1)
    attend_and_project(const __grid_constant__ BlockPlan plan, const __grid_constant__ Maps maps,
                       const __grid_constant__ AttentionMaps attention_maps, float factor, int all) {
    DynamicShared dynamic;
    unsigned char* unaligned = dynamic.take<unsigned char>(kMemoryBytes<kMany> + 1024);
    Shared shared;
    shared.memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    shared.full = dynamic.take<uint64_t>(kStages);
    shared.empty = dynamic.take<uint64_t>(kStages);
    shared.queries_full = dynamic.take<uint64_t>(kQueryStages);
    shared.queries_empty = dynamic.take<uint64_t>(kQueryStages);
    shared.numbers = dynamic.take<int>(kQueryStages);
    uint64_t* out_full = dynamic.take<uint64_t>(Out<kMany>::kStages);
    uint64_t* out_empty = dynamic.take<uint64_t>(Out<kMany>::kStages);
    uint32_t* is_last = dynamic.take<uint32_t>(kGroups);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < kStages) {
        barrier_init(&shared.full[threadIdx.x], 1);
        barrier_init(&shared.empty[threadIdx.x], kGroups * kGroupWarps);
    }
    if (threadIdx.x < kQueryStages) {
        barrier_init(&shared.queries_full[threadIdx.x], 1);
        barrier_init(&shared.queries_empty[threadIdx.x], kGroups * kGroupWarps);
    }
    if (threadIdx.x < Out<kMany>::kStages) {
        barrier_init(&out_full[threadIdx.x], 1);
        barrier_init(&out_empty[threadIdx.x], kGroups * kGroupWarps);
    }
    for (int at = threadIdx.x * 16; at < kOnesBytes; at += kThreads * 16) {
        const uint32_t ones = pack16<Element>(1.0f, 1.0f);
        store_vector(shared.memory + kOnesAt + at, uint4{ones, ones, ones, ones});
    }
    fence_async_proxy();
    __syncthreads();
    wait_for_launch_before();
    if (warp >= kGroups * kGroupWarps) {
        give_registers_back<kCopyRegisters>();
        const bool copies = threadIdx.x == kGroups * kGroupThreads;
        if (copies) {
            fence_async_proxy_global();
            fill_attention(plan, attention_maps, shared, all);
        }
        __syncthreads();  // the attention is over, its memory free
        if (copies) {
            fence_async_proxy();
            fill_out<Out<kMany>, kInOut>(plan, maps, shared.memory, out_full, out_empty);
        }
    } else {
        take_registers<kRegisters>();
        attend<Element>(plan, shared, all, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
        __syncthreads();
        project_out<Element, Out<kMany>, kInOut>(plan, shared.memory, out_full, out_empty, is_last, warp / kGroupWarps,
                                                 warp % kGroupWarps, lane);
    }
}

// ---- Launching ----

template <typename Element, bool kInOut, bool kMany>
tilerank_status launch_second(const BlockPlan& plan, const Maps& maps, void* stream) {
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(kMemoryBytes<kMany> + 1024) + 2 * DynamicShared::bytes<uint64_t>(kStages) +
        2 * DynamicShared::bytes<uint64_t>(kQueryStages) + DynamicShared::bytes<int>(kQueryStages) +
        2 * DynamicShared::bytes<uint64_t>(Out<kMany>::kStages) + DynamicShared::bytes<uint32_t>(kGroups);
    static_assert(kSharedBytes <= kMostShared);
    AttentionMaps attention_maps;
    const AttentionArgs& a = plan.attention;
    if (!describe_matrix(&attention_maps.q, plan.args.dtype, a.q, plan.rows, plan.columns, plan.columns, kTileRows) ||
        !describe_matrix(&attention_maps.k, plan.args.dtype, a.k, plan.rows, plan.columns, plan.columns, kTileKeys) ||
        !describe_matrix(&attention_maps.v, plan.args.dtype, a.v, plan.rows, plan.columns, plan.columns, kTileKeys)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant %s: the driver describes no matrix to the copy engine", kName);
    }
    const int64_t all = plan.args.batch * plan.args.num_heads * ceil_divide(plan.args.tokens, kTileRows);
    const int64_t work = std::max(all, out_tiles<Out<kMany>>(plan));
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), work);
    return launched(kName, launch_dependent(attend_and_project<Element, kInOut, kMany>,
                                            dim3(static_cast<unsigned>(blocks)), dim3(kThreads), kSharedBytes, stream,
                                            plan, maps, attention_maps, nonzero_scale_log2(a), static_cast<int>(all)));
}

template <typename Element, bool kInOut>
tilerank_status launch_typed(const BlockPlan& plan, void* stream) {
    const Choice choice = Choice::of<kGroups>(plan);
    Maps maps;
    tilerank_status status = describe<kGroups, kInOut>(kName, plan, choice, &maps);
    if (status == TILERANK_OK) status = launch_project<Element, kInOut>(kName, plan, choice, maps, stream);
    if (status != TILERANK_OK) return status;
    return choice.many ? launch_second<Element, kInOut, true>(plan, maps, stream)
                       : launch_second<Element, kInOut, false>(plan, maps, stream);
}

}  // namespace wide_tiles

size_t block_wide_tiles_workspace(const BlockArgs& args) { return plan_bytes(args, wide_tiles::kUnitRows); }

tilerank_status block_wide_tiles(const BlockArgs& args, void* workspace, void* stream) {
    using namespace wide_tiles;
    const BlockPlan plan = make_plan(args, workspace, kUnitRows);
    const tilerank_status status = check_call(kName, plan);
    if (status != TILERANK_OK) return status;
    const bool in_out = args.weight_layout == TILERANK_WEIGHTS_IN_OUT;
    if (args.dtype == TILERANK_FP16) {
        return in_out ? launch_typed<__half, true>(plan, stream) : launch_typed<__half, false>(plan, stream);
    }
    return in_out ? launch_typed<__nv_bfloat16, true>(plan, stream) : launch_typed<__nv_bfloat16, false>(plan, stream);
}

}  // namespace tilerank
