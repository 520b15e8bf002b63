// Two launches: layer normalisation in the prologue of one product for q, k and v, then attention and the output
// projection in one grid whose projection tiles wait for the heads of their rows. All products on mma.sync.
// Prediction: at 4 x 128 tokens of width 1024, 25 us beside 35 us unfused, whose seven launches cost more than their
//   work; at 4 x 4096, 1,300 us beside 830 us: mma.sync reaches 60 % of the rate that cuBLAS has from warpgroups.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include <algorithm>

#include "common/block_mma.cuh"
#include "common/parts.h"
#include "common/softmax.cuh"

namespace tilerank {
namespace two_launches {

constexpr int kThreads = kGemmThreads;
constexpr int kTileKeys = 64;
constexpr int kStepKeys = 32;
constexpr int kSteps = kStepKeys / 16;  // of a product

// Tiles of 16 rows a warp: two where sums (2 x D / 2 registers) and queries (2 x D / 4) leave room for scores.
template <int D>
constexpr int kRowTiles = D <= 64 ? 2 : 1;
template <int D>
constexpr int kWarpRows = kRowTiles<D> * 16;
template <int D>
constexpr int kUnitRows = kGemmWarps * kWarpRows<D>;
template <int D>
constexpr int kStages = D <= 80 ? 3 : 2;  // of keys and values: blocks have 99 KB on sm_86

template <typename Element, int D>
struct KeyStages {
    KeyTile<Element, kTileKeys, D> k[kStages<D>];
    KeyTile<Element, kTileKeys, D> v[kStages<D>];
};

// What a block has in shared memory, now for one thing, now for the other.
template <typename Element, int D, bool kInOut>
union Memory {
    KeyStages<Element, D> keys;
    GemmStage<Element, kInOut> stages[kGemmStages];
    __host__ __device__ Memory() {}
};

template <int D>
struct State {
    QueryFragments<D, kRowTiles<D>> q = {};
    Fragment sums[kRowTiles<D>][D / 8] = {};
    Fragment row_sums[kRowTiles<D>] = {};
    References<kRowTiles<D>> references;
};

// kStepKeys keys from row `key` of the tile on. kWhole: every row sees all of them; else the lane's rows see the tile's
// keys below sees[..].
template <typename Element, int D, bool kWhole>
__device__ __forceinline__ void attend_step(State<D>& state, const KeyTile<Element, kTileKeys, D>& k_tile,
                                            const KeyTile<Element, kTileKeys, D>& v_tile, int key,
                                            const int (&sees)[kRowTiles<D>][2], bool is_first, int lane,
                                            float factor) {
    constexpr int kTiles = kRowTiles<D>;
    Fragment scores[kSteps][kTiles][2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        score_keys<Element, D>(scores[step], state.q, k_tile, key + step * 16, lane);
    }
    if (!kWhole) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    hide_keys(scores[step][tile][block], key + step * 16 + block * 8, sees[tile], lane, -INFINITY);
                }
            }
        }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t weights[kTiles][4];
        if (is_first && step == 0) state.references.begin(scores[step], factor);
        guarded_weights<Element, D>(weights, scores[step], state.references, state.row_sums, state.sums, factor);
        add_row_sums<Element>(state.row_sums, weights);
        add_values<Element, D>(state.sums, weights, v_tile, key + step * 16, lane);
    }
}

// One head of one unit.
template <typename Element, int D>
__device__ __forceinline__ void attend(const BlockPlan& plan, KeyStages<Element, D>& tiles, int64_t sequence,
                                       int64_t unit, int64_t head, float factor) {
    constexpr int kTiles = kRowTiles<D>;
    constexpr int kRing = kStages<D>;
    const AttentionArgs& args = plan.attention;
    const HeadView<Element> view = head_view<Element>(args, sequence, head);
    const QueryRows<Element> block = query_rows<Element>(args, view, unit * kUnitRows<D>, kUnitRows<D>);
    const int lane = threadIdx.x % kWarpSize;
    const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows<D>;
    const int rows = block.rows - first_row;  // of this warp; it may have none and then only copies

    // Tile number `tile` into its place, or nothing; a group of copies either way, so that waits can count them.
    const auto copy_tiles = [&](int tile) {
        const int first = tile * kTileKeys;
        const int keys = block.any_row_sees - first;
        if (keys > 0) {
            copy_keys_async<D, kThreads>(tiles.k[tile % kRing], block.k + first * args.k_token_stride,
                                         args.k_token_stride, keys, threadIdx.x, true);
            copy_keys_async<D, kThreads>(tiles.v[tile % kRing], block.v + first * args.v_token_stride,
                                         args.v_token_stride, keys, threadIdx.x, true);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < kRing - 1; ++tile) copy_tiles(tile);

    State<D> state;
    int warp_sees[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            warp_sees[tile][half] = block.row_sees(first_row + tile * 16 + half * 8 + lane / 4);
        }
    }
    if (rows > 0) {
        load_queries<D, kTiles>(state.q, block.q + first_row * args.q_token_stride, args.q_token_stride, rows, lane,
                                true);
        make_factor_positive<D>(state.q, factor);
    }
    const float size = fabsf(factor);

    int tile = 0;
    for (int first = 0; first < block.any_row_sees; first += kTileKeys, ++tile) {
        copy_async_wait<kRing - 2>();
        __syncthreads();  // this tile is there for all warps, and the one before is no longer read
        copy_tiles(tile + kRing - 1);
        if (rows <= 0) continue;
        const auto& k_tile = tiles.k[tile % kRing];
        const auto& v_tile = tiles.v[tile % kRing];
        int sees[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sees[t][0] = warp_sees[t][0] - first, sees[t][1] = warp_sees[t][1] - first;
        for (int key = 0; key < kTileKeys && first + key < block.any_row_sees; key += kStepKeys) {
            if (first + key + kStepKeys <= block.every_row_sees) {
                attend_step<Element, D, true>(state, k_tile, v_tile, key, sees, first + key == 0, lane, size);
            } else {
                attend_step<Element, D, false>(state, k_tile, v_tile, key, sees, first + key == 0, lane, size);
            }
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        const float factors[2] = {normalizer(state.row_sums[t][0]), normalizer(state.row_sums[t][2])};
        store_rows<D>(block.out + (first_row + t * 16) * args.out_token_stride, args.out_token_stride, state.sums[t],
                      factors, rows - t * 16, lane, true);
    }
}

template <typename Element, int D, bool kInOut>
__global__ void __launch_bounds__(kThreads) attend_and_project(BlockPlan plan, float factor) {
    DynamicShared memory;
    auto* tiles = memory.take<Memory<Element, D, kInOut>>(1);
    SHARED(uint32_t, number_slot, [1]);
    const BlockWork work(plan);
    const int64_t all = work.all(plan);
    for (;;) {
        const int64_t number = take_number(plan, number_slot[0]);
        if (number >= all) return;
        if (number < work.attention) {
            const int64_t heads = plan.args.num_heads;
            const int64_t sequence = number / heads / plan.row_blocks;
            // Causal units differ in length: the longest come first.
            const int64_t at = number / heads % plan.row_blocks;
            const int64_t unit = plan.args.causal ? plan.row_blocks - 1 - at : at;
            attend<Element, D>(plan, tiles->keys, sequence, unit, number % heads, factor);
            head_done(plan, sequence, unit);
        } else {
            project_out_tile<Element, kInOut>(plan, tiles->stages, work, number - work.attention, number_slot[0]);
        }
    }
}

template <typename Element, int D, bool kInOut>
tilerank_status launch_second(const BlockPlan& plan, void* stream) {
    constexpr int kBlocksAMultiprocessor = 3;  // more than fit take no number until the others are done
    const int64_t blocks =
        std::min<int64_t>(BlockWork(plan).all(plan), kBlocksAMultiprocessor * std::max(multiprocessors(), 1));
    return launch_blocks("two_launches", attend_and_project<Element, D, kInOut>, blocks, kThreads,
                         DynamicShared::bytes<Memory<Element, D, kInOut>>(1), stream, plan,
                         nonzero_scale_log2(plan.attention));
}

template <typename Element, int D>
tilerank_status launch_for(const BlockArgs& args, void* workspace, void* stream) {
    const BlockPlan plan = make_plan(args, workspace, kUnitRows<D>);
    const tilerank_status status = block_mma::launch_project<Element>("two_launches", plan, stream);
    if (status != TILERANK_OK) return status;
    return args.weight_layout == TILERANK_WEIGHTS_IN_OUT ? launch_second<Element, D, true>(plan, stream)
                                                         : launch_second<Element, D, false>(plan, stream);
}

template <typename Element>
tilerank_status launch_typed(const BlockArgs& args, void* workspace, void* stream) {
    switch (args.head_dim) {
        case 32:
            return launch_for<Element, 32>(args, workspace, stream);
        case 64:
            return launch_for<Element, 64>(args, workspace, stream);
        case 80:
            return launch_for<Element, 80>(args, workspace, stream);
        case 96:
            return launch_for<Element, 96>(args, workspace, stream);
        default:
            return launch_for<Element, 128>(args, workspace, stream);
    }
}

TILERANK_PART_0 template tilerank_status launch_typed<__half>(const BlockArgs&, void*, void*);
TILERANK_PART_1 template tilerank_status launch_typed<__nv_bfloat16>(const BlockArgs&, void*, void*);

}  // namespace two_launches

#if TILERANK_FIRST_PART
size_t block_two_launches_workspace(const BlockArgs& args) { return plan_bytes(args, args.head_dim <= 64 ? 128 : 64); }

tilerank_status block_two_launches(const BlockArgs& args, void* workspace, void* stream) {
    return args.dtype == TILERANK_FP16 ? two_launches::launch_typed<__half>(args, workspace, stream)
                                       : two_launches::launch_typed<__nv_bfloat16>(args, workspace, stream);
}
#endif

}  // namespace tilerank
