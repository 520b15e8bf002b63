// Persistent: mma_guarded with one block a multiprocessor, each with an equal part of all units of 32 rows. Warps work
// alone: one keeps whole (sequence, head) pairs in a ring, one deals units, and 14 compute, without a barrier between
// them. Units have equal parts instead of the longest first: blocks then end within one unit of each other.
// Prediction: 48 us packed, from 58. Longest tasks first with a producer took 49.5; rows and keys that pad units cost a
//   twentieth, and warps no longer wait for one another.
// Answer: metrics/<machine>/bench_attention_persistent.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace persistent {

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Tiles of 16 rows a warp, as in mma_ring; their sums and queries take 3 D / 4 registers each.
    static constexpr int kRowTiles = D <= 64 ? 2 : 1;
    static constexpr int kUnitRows = kRowTiles * 16;
    // Warps that compute, beside the two that copy and deal: a block has 65,536 registers.
    static constexpr int kWorkers = D <= 32 ? 14 : D <= 64 ? 6 : 10;
    static constexpr int kThreads = (kWorkers + 2) * kWarpSize;
    // Chunks of the ring: 96 KB, what a block can have on sm_86 and sm_89 as well.
    static constexpr int kChunkBytes = 2 * kChunkKeys * kPitch16<D> * 2;
    static constexpr int kChunks = 98304 / kChunkBytes;
    static constexpr int kResident = kChunks > 4 ? kChunks - 2 : kChunks;
};

template <int D>
using PassesFor = Passes<Shape<D>::kUnitRows, Shape<D>::kWorkers, Shape<D>::kResident>;

template <typename Element, int D>
using Tile = KeyTile<Element, kChunkKeys, D>;

// What the warps of a block share.
template <typename Element, int D>
struct Ring {
    Tile<Element, D>* k_tiles;
    Tile<Element, D>* v_tiles;
    uint64_t* full;
    uint64_t* empty;
};

// ---- The warps that compute ----

template <int D>
struct State {
    static constexpr int kRowTiles = Shape<D>::kRowTiles;
    QueryFragments<D, kRowTiles> q;
    Fragment sums[kRowTiles][D / 8];
    Fragment row_sums[kRowTiles];
    References<kRowTiles> references;
};

// Weighs and adds 16 keys whose scores are known.
template <typename Element, int D>
__device__ __forceinline__ void add_keys(State<D>& state, const Fragment (&scores)[Shape<D>::kRowTiles][2],
                                         const Tile<Element, D>& v_tile, int key, bool is_first, int lane,
                                         float factor) {
    uint32_t weights[Shape<D>::kRowTiles][4];
    if (is_first) state.references.begin(scores, factor);
    guarded_weights<Element, D>(weights, scores, state.references, state.row_sums, state.sums, factor);
    add_row_sums<Element>(state.row_sums, weights);
    add_values<Element, D>(state.sums, weights, v_tile, key, lane);
}

template <typename Element, int D>
__device__ __forceinline__ void compute(const AttentionArgs& args, const Ring<Element, D>& ring,
                                        const TaskQueues<Shape<D>::kWorkers>& queues, int worker, int lane,
                                        float factor, bool aligned) {
    constexpr int kRowTiles = Shape<D>::kRowTiles;
    constexpr int kChunks = Shape<D>::kChunks;
    const float size = fabsf(factor);
    int released = 0;  // chunks given back
    // Gives back all chunks below `end`, also those that this warp had no use for: each must have come first. Every lane
    // answers for what it has read: one that arrived for all of them, after __syncwarp(), would be as right, but
    // racecheck does not follow that.
    const auto release = [&](int end) {
        for (; released < end; ++released) {
            barrier_wait(&ring.full[released % kChunks], released / kChunks % 2);
            barrier_arrive(&ring.empty[released % kChunks]);
        }
    };

    for (int turn = 0;; ++turn) {
        const Task task = queues.take(worker, turn, lane);
        release(uniform(task.chunk));
        const int tiles = uniform(task.tiles);
        if (tiles == 0) return;
        const int whole_tiles = uniform(task.whole_tiles);
        State<D> state = {};
        load_queries<D, kRowTiles>(state.q, static_cast<const Element*>(task.q), args.q_token_stride, task.rows, lane,
                                   aligned);
        make_factor_positive<D>(state.q, factor);

        int slot = uniform(task.slot);
        int parity = task.parity;
        for (int tile = 0; tile < tiles; ++tile) {
            barrier_wait(&ring.full[slot], parity);
            const auto& k_tile = ring.k_tiles[slot];
            const auto& v_tile = ring.v_tiles[slot];
            if (tile < whole_tiles) {
                // The next 16 scores are computed behind the weights of these.
                Fragment scores[2][kRowTiles][2] = {};
                score_keys<Element, D>(scores[0], state.q, k_tile, 0, lane);
#pragma unroll
                for (int key = 0; key < kChunkKeys; key += 16) {
                    auto& these = scores[key / 16 % 2];
                    auto& next = scores[key / 16 % 2 ^ 1];
                    if (key + 16 < kChunkKeys) {
#pragma unroll
                        for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) next[t][0][i] = next[t][1][i] = 0.0f;
                        }
                        score_keys<Element, D>(next, state.q, k_tile, key + 16, lane);
                    }
                    add_keys<Element, D>(state, these, v_tile, key, tile == 0 && key == 0, lane, size);
                }
            } else {
                const int first = tile * kChunkKeys;
                const int last = min(task.k_len, task.causal_keys + task.rows - 1) - first;  // keys that some row sees
#pragma unroll 1
                for (int key = 0; key < kChunkKeys && key < last; key += 16) {
                    Fragment scores[kRowTiles][2] = {};
                    score_keys<Element, D>(scores, state.q, k_tile, key, lane);
#pragma unroll
                    for (int t = 0; t < kRowTiles; ++t) {
                        int sees[2];
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            sees[half] = min(task.k_len, task.causal_keys + t * 16 + half * 8 + lane / 4) - first;
                        }
                        hide_keys(scores[t][0], key, sees, lane, -INFINITY);
                        hide_keys(scores[t][1], key + 8, sees, lane, -INFINITY);
                    }
                    add_keys<Element, D>(state, scores, v_tile, key, first + key == 0, lane, size);
                }
            }
            if (task.is_last != 0) release(task.chunk + tile + 1);
            if (++slot == kChunks) {
                slot = 0;
                parity ^= 1;
            }
        }
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
            const float factors[2] = {normalizer(state.row_sums[t][0]), normalizer(state.row_sums[t][2])};
            store_rows<D>(static_cast<Element*>(task.out) + t * 16 * args.out_token_stride, args.out_token_stride,
                          state.sums[t], factors, task.rows - t * 16, lane, aligned);
        }
    }
}

template <typename Element, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1) kernel(AttentionArgs args, float factor, bool aligned) {
    using S = Shape<D>;
    DynamicShared memory;
    Ring<Element, D> ring;
    ring.k_tiles = memory.take<Tile<Element, D>>(S::kChunks);
    ring.v_tiles = memory.take<Tile<Element, D>>(S::kChunks);
    ring.full = memory.take<uint64_t>(S::kChunks);
    ring.empty = memory.take<uint64_t>(S::kChunks);
    const TaskQueues<S::kWorkers> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < S::kChunks) {
        barrier_init(&ring.full[threadIdx.x], kWarpSize);
        barrier_init(&ring.empty[threadIdx.x], S::kWorkers * kWarpSize);
    }
    queues.init(1);
    __syncthreads();
    if (warp < S::kWorkers) {
        compute<Element, D>(args, ring, queues, warp, lane, factor, aligned);
        return;
    }
    UnitPlace places[2];
    find_places<S::kUnitRows>(args, places, lane);
    const PassesFor<D> passes(args, places);
    if (warp == S::kWorkers) {
        const auto copy_tile = [&](int slot, int values, const Element* source, int64_t stride, int count) {
            constexpr int kColumns = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
            constexpr int kRowBytes = 2 * kPitch16<D>;
            copy_chunk_tile<Element, D, kColumns, 2 * kColumns>(
                reinterpret_cast<unsigned char*>((values == 0 ? ring.k_tiles : ring.v_tiles)[slot]), source, stride,
                count, lane, aligned, [](int row, int column) { return row * kRowBytes + 2 * column; });
        };
        fill_ring<Element, S::kChunks, 1>(passes, ring.full, ring.empty, 0, copy_tile, [] {});
    } else {
        deal<Element, S::kChunks>(passes, queues, lane);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes = 2 * DynamicShared::bytes<Tile<Element, D>>(S::kChunks) +
                                    2 * DynamicShared::bytes<uint64_t>(S::kChunks) + TaskQueues<S::kWorkers>::bytes();
    return launch_balanced("persistent", kernel<Element, D>, S::kUnitRows, S::kThreads, kSharedBytes, args, stream);
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

}  // namespace persistent

tilerank_status attention_persistent(const AttentionArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? persistent::launch_typed<__half>(args, stream)
                                       : persistent::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
