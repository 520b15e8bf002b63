// Persistent: mma_guarded with one block a multiprocessor, each with an equal part of all units of 32 rows. Warps work
// alone: one that copies keeps whole (sequence, head) pairs in a ring, and 15 take units in turn, without a barrier
// between them. Units have equal parts instead of the longest first: blocks then end within one unit of each other.
// Prediction: 48 us packed, from 58. Longest tasks first with a producer took 49.5; rows and keys that pad units cost a
//   twentieth, and warps no longer wait for one another.
// Answer: metrics/<machine>/bench_attention_persistent.json and docs/ladder.md.
#include "common/balanced.cuh"
#include "common/barriers.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace persistent {

constexpr float kNoReference = -3.0e+38f;  // every score exceeds it by far: the first weights raise it
constexpr float kLargestWeight = 16384.0f;

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Tiles of 16 rows a warp, as in mma_ring; their sums and queries take 3 D / 4 registers each.
    static constexpr int kRowTiles = D <= 64 ? 2 : 1;
    static constexpr int kUnitRows = kRowTiles * 16;
    // Warps that compute, beside the one that copies: a block has 65,536 registers.
    static constexpr int kWorkers = D <= 32 ? 15 : D <= 64 ? 7 : 11;
    static constexpr int kThreads = (kWorkers + 1) * kWarpSize;
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

// ---- The warp that copies ----

template <typename Element, int D>
__device__ __forceinline__ void produce(const AttentionArgs& args, const UnitPlace (&places)[2],
                                        const Ring<Element, D>& ring, int lane, bool aligned) {
    constexpr int kChunks = Shape<D>::kChunks;
    PassesFor<D> passes(args, places);
    int slot = 0;
    uint32_t parity = 1;
    // Chunks under way: their barriers are told kLag chunks later, when the data is there.
    constexpr int kLag = kChunks > 4 ? 4 : kChunks - 1;
    int pending = 0;
    int pending_slot = 0;
    const auto tell_first = [&] {
        barrier_arrive(&ring.full[pending_slot]);
        pending_slot = pending_slot + 1 == kChunks ? 0 : pending_slot + 1;
        --pending;
    };
    while (passes.next()) {
        const HeadView<Element> view = head_view<Element>(args, passes.sequence, passes.head);
        for (int chunk = 0; chunk < passes.chunks; ++chunk) {
            if (!barrier_test(&ring.empty[slot], parity)) {
                copy_async_wait<0>();
                while (pending > 0) tell_first();
                barrier_wait(&ring.empty[slot], parity);
            }
            const int first = chunk * kChunkKeys;
            const int count = passes.size.k_len - first;
            copy_keys_async<D, kWarpSize>(ring.k_tiles[slot], view.k + first * args.k_token_stride, args.k_token_stride,
                                          count, lane, aligned);
            copy_keys_async<D, kWarpSize>(ring.v_tiles[slot], view.v + first * args.v_token_stride, args.v_token_stride,
                                          count, lane, aligned);
            copy_async_commit();
            if (++pending > kLag) {
                copy_async_wait<kLag>();
                tell_first();
            }
            if (++slot == kChunks) {
                slot = 0;
                parity ^= 1;
            }
        }
    }
    copy_async_wait<0>();
    while (pending > 0) tell_first();
}

// ---- The warps that compute ----

template <int D>
struct State {
    static constexpr int kRowTiles = Shape<D>::kRowTiles;
    QueryFragments<D, kRowTiles> q;
    Fragment sums[kRowTiles][D / 8];
    Fragment row_sums[kRowTiles];
    float reference[kRowTiles][2];  // what weights are relative to
};

// Weighs and adds 16 keys whose scores are known.
template <typename Element, int D>
__device__ __forceinline__ void add_keys(State<D>& state, const Fragment (&scores)[Shape<D>::kRowTiles][2],
                                         const Tile<Element, D>& v_tile, int key, int lane, float factor) {
    uint32_t weights[Shape<D>::kRowTiles][4];
    if (guarded_weights<Element, true>(weights, scores, state.reference, factor, kLargestWeight)) {
        raise_references<D>(state.reference, state.row_sums, state.sums, scores, factor);
        guarded_weights<Element, false>(weights, scores, state.reference, factor, kLargestWeight);
    }
    add_row_sums<Element>(state.row_sums, weights);
    add_values<Element, D>(state.sums, weights, v_tile, key, lane);
}

template <typename Element, int D>
__device__ __forceinline__ void consume(const AttentionArgs& args, const UnitPlace (&places)[2],
                                        const Ring<Element, D>& ring, int worker, int lane, float factor,
                                        bool aligned) {
    constexpr int kRowTiles = Shape<D>::kRowTiles;
    constexpr int kWorkers = Shape<D>::kWorkers;
    constexpr int kChunks = Shape<D>::kChunks;
    PassesFor<D> passes(args, places);
    int released = 0;  // chunks given back
    int known = 0;     // chunks below have been waited for
    const auto wait_for = [&](int chunk) {
        if (chunk < known) return;
        barrier_wait(&ring.full[chunk % kChunks], chunk / kChunks % 2);
        known = chunk + 1;
    };
    // Gives back all chunks below `end`, also those that this warp had no use for: each must have come first.
    const auto release = [&](int end) {
        for (; released < end; ++released) {
            wait_for(released);
            __syncwarp();
            if (lane == 0) barrier_arrive(&ring.empty[released % kChunks]);
        }
    };

    while (passes.next()) {
        release(passes.chunk);
        int unit = passes.first_unit + (worker + kWorkers - passes.ordinal % kWorkers) % kWorkers;
        for (; unit < passes.last_unit; unit += kWorkers) {
            const bool is_last = unit + kWorkers >= passes.last_unit;  // of this warp's in the pass
            const HeadView<Element> view = head_view<Element>(args, passes.sequence, passes.head);
            const QueryRows<Element> block = query_rows<Element>(args, view, passes.first_row(unit),
                                                                  Shape<D>::kUnitRows);
            State<D> state = {};
            int sees[kRowTiles][2];
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    sees[tile][half] = block.row_sees(tile * 16 + half * 8 + lane / 4);
                    state.reference[tile][half] = kNoReference;
                }
            }
            load_queries<D, kRowTiles>(state.q, block.q, args.q_token_stride, block.rows, lane, aligned);

            int chunk = passes.chunk;
            for (int first = 0; first < block.any_row_sees; first += kChunkKeys, ++chunk) {
                wait_for(chunk);
                const auto& k_tile = ring.k_tiles[chunk % kChunks];
                const auto& v_tile = ring.v_tiles[chunk % kChunks];
                int key = 0;
                if (first + kChunkKeys <= block.every_row_sees) {
                    // The next 16 scores are computed behind the weights of these.
                    Fragment scores[2][kRowTiles][2] = {};
                    score_keys<Element, D>(scores[0], state.q, k_tile, 0, lane);
#pragma unroll
                    for (; key < kChunkKeys; key += 16) {
                        auto& these = scores[key / 16 % 2];
                        auto& next = scores[key / 16 % 2 ^ 1];
                        if (key + 16 < kChunkKeys) {
#pragma unroll
                            for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
                                for (int i = 0; i < 4; ++i) next[tile][0][i] = next[tile][1][i] = 0.0f;
                            }
                            score_keys<Element, D>(next, state.q, k_tile, key + 16, lane);
                        }
                        add_keys<Element, D>(state, these, v_tile, key, lane, factor);
                    }
                } else {
#pragma unroll 1
                    for (; key < kChunkKeys && first + key < block.any_row_sees; key += 16) {
                        Fragment scores[kRowTiles][2] = {};
                        score_keys<Element, D>(scores, state.q, k_tile, key, lane);
#pragma unroll
                        for (int tile = 0; tile < kRowTiles; ++tile) {
                            const int tile_sees[2] = {sees[tile][0] - first, sees[tile][1] - first};
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                hide_keys(scores[tile][half], key + half * 8, tile_sees, lane, hidden_score(factor));
                            }
                        }
                        add_keys<Element, D>(state, scores, v_tile, key, lane, factor);
                    }
                }
                if (is_last) release(chunk + 1);
            }
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
                const float factors[2] = {normalizer(state.row_sums[tile][0]), normalizer(state.row_sums[tile][2])};
                store_rows<D>(block.out + tile * 16 * args.out_token_stride, args.out_token_stride, state.sums[tile],
                              factors, block.rows - tile * 16, lane, aligned);
            }
        }
    }
    release(passes.chunk);
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
    SHARED(UnitPlace, places, [2]);
    SHARED(int64_t, warp_costs, [S::kThreads / kWarpSize]);

    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < S::kChunks; ++slot) {
            barrier_init(&ring.full[slot], kWarpSize);
            barrier_init(&ring.empty[slot], S::kWorkers);
        }
    }
    find_places<S::kUnitRows, S::kThreads>(args, places, warp_costs);
    if (warp == S::kWorkers) {
        produce<Element, D>(args, places, ring, lane, aligned);
    } else {
        consume<Element, D>(args, places, ring, warp, lane, factor, aligned);
    }
}

template <typename Element, int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    using S = Shape<D>;
    constexpr size_t kSharedBytes = 2 * DynamicShared::bytes<Tile<Element, D>>(S::kChunks) +
                                    2 * DynamicShared::bytes<uint64_t>(S::kChunks);
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
