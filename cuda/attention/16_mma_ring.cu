// MMA ring: mma_tiles with 32 query rows a warp, so that each K and V fragment serves two products, keys and values
// that arrive by cp.async two tiles ahead, and row sums by one more product with ones.
// Prediction: 66 us packed. The same with K, V resident took 59 us (32 rows a warp were worth 7 us, row sums by MMA 1);
//   a barrier for each tile of 64 keys costs a tenth.
// Answer: metrics/<machine>/bench_attention_mma_ring.json and docs/ladder.md.
#include "common/mma16.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace mma_ring {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTileKeys = 64;
constexpr int kStepKeys = 32;
constexpr int kSteps = kStepKeys / 16;  // of a product
constexpr int kStages = 3;

// Tiles of 16 rows a warp: two where sums (2 x D / 2 registers) and queries (2 x D / 4) leave room for scores.
template <int D>
constexpr int kRowTiles = D <= 64 ? 2 : 1;
template <int D>
constexpr int kWarpRows = kRowTiles<D> * 16;
template <int D>
constexpr int kRows = kWarps * kWarpRows<D>;

template <int D>
struct State {
    QueryFragments<D, kRowTiles<D>> q = {};
    Fragment sums[kRowTiles<D>][D / 8] = {};
    Fragment row_sums[kRowTiles<D>] = {};
    float largest[kRowTiles<D>][2];
};

// kStepKeys keys from row `key` of the tile on. kWhole: every row sees all of them; else the lane's rows see the tile's
// keys below sees[..].
template <typename Element, int D, bool kWhole>
__device__ __forceinline__ void attend(State<D>& state, const KeyTile<Element, kTileKeys, D>& k_tile,
                                       const KeyTile<Element, kTileKeys, D>& v_tile, int key,
                                       const int (&sees)[kRowTiles<D>][2], int lane, float factor) {
    constexpr int kTiles = kRowTiles<D>;
    Fragment scores[kSteps][kTiles][2] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        score_keys<Element, D>(scores[step], state.q, k_tile, key + step * 16, lane);
    }

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        float largest[2] = {state.largest[tile][0], state.largest[tile][1]};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                Fragment& score = scores[step][tile][block];
                if (!kWhole) hide_keys(score, key + step * 16 + block * 8, sees[tile], lane, hidden_score(factor));
#pragma unroll
                for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], score[i] * factor);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = quad_max(largest[half]);
            const float rescale = exp2_approx(state.largest[tile][half] - largest[half]);
            state.largest[tile][half] = largest[half];
            state.row_sums[tile][half * 2] *= rescale;
#pragma unroll
            for (int column = 0; column < D / 8; ++column) {
                state.sums[tile][column][half * 2] *= rescale;
                state.sums[tile][column][half * 2 + 1] *= rescale;
            }
        }
    }

#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t weights[kTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* score = &scores[step][tile][i / 2][i % 2 * 2];
                const float largest = state.largest[tile][i % 2];
                weights[tile][i] = pack16<Element>(exp2_approx(score[0] * factor - largest),
                                                   exp2_approx(score[1] * factor - largest));
            }
        }
        add_row_sums<Element>(state.row_sums, weights);
        add_values<Element, D>(state.sums, weights, v_tile, key + step * 16, lane);
    }
}

template <typename Element, int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, float factor, bool aligned) {
    constexpr int kTiles = kRowTiles<D>;
    DynamicShared memory;
    using Tile = KeyTile<Element, kTileKeys, D>;
    Tile* k_tiles = memory.take<Tile>(kStages);
    Tile* v_tiles = memory.take<Tile>(kStages);
    const QueryRows<Element> block = query_rows_at<Element>(args, kRows<D>, blockIdx.x);
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int lane = threadIdx.x % kWarpSize;
    const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows<D>;
    const int rows = block.rows - first_row;  // of this warp; it may have none and then only copies

    // Tile number `tile` into its place, or nothing; a group of copies either way, so that waits can count them.
    const auto copy_tiles = [&](int tile) {
        const int first = tile * kTileKeys;
        const int keys = block.any_row_sees - first;
        if (keys > 0) {
            copy_keys_async<D, kThreads>(k_tiles[tile % kStages], block.k + first * args.k_token_stride,
                                         args.k_token_stride, keys, threadIdx.x, aligned);
            copy_keys_async<D, kThreads>(v_tiles[tile % kStages], block.v + first * args.v_token_stride,
                                         args.v_token_stride, keys, threadIdx.x, aligned);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) copy_tiles(tile);

    State<D> state;
    int warp_sees[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            warp_sees[tile][half] = block.row_sees(first_row + tile * 16 + half * 8 + lane / 4);
            state.largest[tile][half] = kLowestReference;
        }
    }
    if (rows > 0) {
        load_queries<D, kTiles>(state.q, block.q + first_row * args.q_token_stride, args.q_token_stride, rows, lane,
                                aligned);
    }

    int tile = 0;
    for (int first = 0; first < block.any_row_sees; first += kTileKeys, ++tile) {
        copy_async_wait<kStages - 2>();
        __syncthreads();  // this tile is there for all warps, and the one before is no longer read
        copy_tiles(tile + kStages - 1);
        if (rows <= 0) continue;
        const auto& k_tile = k_tiles[tile % kStages];
        const auto& v_tile = v_tiles[tile % kStages];
        int sees[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sees[t][0] = warp_sees[t][0] - first, sees[t][1] = warp_sees[t][1] - first;
        for (int key = 0; key < kTileKeys && first + key < block.any_row_sees; key += kStepKeys) {
            if (first + key + kStepKeys <= block.every_row_sees) {
                attend<Element, D, true>(state, k_tile, v_tile, key, sees, lane, factor);
            } else {
                attend<Element, D, false>(state, k_tile, v_tile, key, sees, lane, factor);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        const float factors[2] = {normalizer(state.row_sums[t][0]), normalizer(state.row_sums[t][2])};
        store_rows<D>(block.out + (first_row + t * 16) * args.out_token_stride, args.out_token_stride, state.sums[t],
                      factors, rows - t * 16, lane, aligned);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using Tile = KeyTile<Element, kTileKeys, D>;
    return launch_blocks("mma_ring", kernel<Element, D>, row_blocks(args, kRows<D>), kThreads,
                         2 * DynamicShared::bytes<Tile>(kStages), stream, args, nonzero_scale_log2(args),
                         rows16_aligned(args));
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

}  // namespace mma_ring

tilerank_status attention_mma_ring(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? mma_ring::launch_typed<__half>(args, stream)
                                       : mma_ring::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
