// Shared policy of the fp32 kernels on warpgroup products: warps that bring the keys and values of a pair into a ring as
// fp16 terms (common/split_fp16.cuh), once for all its units. One has chunks copied, the others split them where they lie.
// head_dim 32.
#pragma once

#include "common/balanced.cuh"
#include "common/split_fp16.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"

namespace tilerank {

// ---- Registers ----

// A value that the compiler may not compute again where it is used, but keeps.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Becomes whatever is there: what was in the register before has no use from here on.
__device__ __forceinline__ void let_go(uint32_t& value) { asm("" : "=r"(value)); }

// ---- Panels ----

// Rows of 128 bytes: the high terms, then the low ones; swizzled as wgmma likes it.
constexpr int kPanelBytes = kChunkKeys * kPanelPitch * 2;

// Rows of k and v for the copy engine, in boxes of a chunk's.
struct PanelMaps {
    TensorMap k;
    TensorMap v;
};

// False where the engine cannot copy them.
inline bool make_panel_maps(PanelMaps* maps, const AttentionArgs& args) {
    const bool packed = args.cu_seqlens_q != nullptr;
    const int64_t batch = packed ? 1 : args.batch;
    const int64_t tokens = packed ? args.total_k : args.k_len;
    // A number is two of the 16-bit elements that it counts.
    const auto make = [&](TensorMap* map, const void* begin, int64_t token_stride, int64_t head_stride,
                          int64_t batch_stride) {
        return make_tensor_map(map, begin, TILERANK_FP16, 2 * kPanelColumns, tokens, args.kv_heads, batch,
                               2 * token_stride, 2 * head_stride, 2 * batch_stride, kChunkKeys, 2 * kPanelColumns);
    };
    return tokens <= 1 << 30 && make(&maps->k, args.k, args.k_token_stride, args.k_head_stride, args.k_batch_stride) &&
           make(&maps->v, args.v, args.v_token_stride, args.v_head_stride, args.v_batch_stride);
}

// What is known of a chunk once it is split.
struct alignas(16) ChunkNotes {
    float k_unit;  // what its terms are worth: the inverse of what it was multiplied by
    float v_unit;
    int misfit;  // 1 + the number of the latest chunk here whose numbers span too much
    int keys;    // that exist of the sequence, from the chunk's first on
    int sequence;
    int head;
};

// A ring of kChunks chunks, a panel of keys and one of values each, that kWarps warps split.
template <int kChunks, int kWarps>
struct PanelRing {
    unsigned char* panels;
    uint64_t* landed;    // of each chunk: its numbers are there
    uint64_t* full;      // their terms are there
    uint64_t* empty;     // nobody needs them any more
    uint64_t* measured;  // [2]
    ChunkNotes* notes;
    uint2* largest;  // [2][kWarps]: of keys and values

    static constexpr size_t shared_bytes() {
        return DynamicShared::bytes<unsigned char>(kChunks * 2 * kPanelBytes + 1024) +
               DynamicShared::bytes<uint64_t>(3 * kChunks + 2) + DynamicShared::bytes<ChunkNotes>(kChunks) +
               DynamicShared::bytes<uint2>(2 * kWarps);
    }

    __device__ __forceinline__ explicit PanelRing(DynamicShared& memory) {
        unsigned char* unaligned = memory.take<unsigned char>(kChunks * 2 * kPanelBytes + 1024);
        panels = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        landed = memory.take<uint64_t>(3 * kChunks + 2);
        full = landed + kChunks;
        empty = full + kChunks;
        measured = empty + kChunks;
        notes = memory.take<ChunkNotes>(kChunks);
        largest = memory.take<uint2>(2 * kWarps);
    }

    // By the whole block, before a __syncthreads(). user_warps: those that each give every chunk back. mapped: the copy
    // engine brings chunks, else the lanes of a warp.
    __device__ __forceinline__ void init(int user_warps, bool mapped) const {
        if (threadIdx.x < 2) barrier_init(&measured[threadIdx.x], kWarps * kWarpSize);
        if (threadIdx.x >= kChunks) return;
        barrier_init(&landed[threadIdx.x], mapped ? 1 : kWarpSize);
        barrier_init(&full[threadIdx.x], kWarps * kWarpSize);
        barrier_init(&empty[threadIdx.x], user_warps);
        notes[threadIdx.x].misfit = 0;
    }

    // ---- The warp that has chunks copied ----

    // Has every chunk of the block's passes copied, then tells the warps that split that there are no more. beside(): what
    // else there is to do for the warp, a little at a time; true once that is done.
    template <typename P, typename Beside>
    __device__ __forceinline__ void bring(P passes, const PanelMaps& maps, bool mapped, int lane,
                                          const Beside& beside) const {
        int slot = 0;
        uint32_t parity = 1;  // of the phase before the first: there is nothing to wait for
        int chunk = 0;        // of the pass
        bool has_more = passes.next();
        bool is_told = false;
#pragma unroll 1
        while (true) {
            const bool may_copy = !is_told && __all_sync(kFullMask, barrier_peek(&empty[slot], parity));
            if (may_copy) {
                if (has_more) {
                    copy(passes, maps, mapped, chunk * kChunkKeys, slot, lane);
                    if (++chunk == passes.chunks) {
                        chunk = 0;
                        has_more = passes.next();
                    }
                } else {
                    is_told = true;
                    if (lane == 0) notes[slot].keys = kNoChunk;
                    if (lane == 0 || !mapped) barrier_arrive(&landed[slot]);
                }
                if (++slot == kChunks) slot = 0, parity ^= 1;
            }
            const bool is_done = beside();
            if (is_done && is_told) return;
            if (!may_copy) __nanosleep(32);
        }
    }

    // ---- The warps that split ----

    // Splits every chunk; warp: 0..kWarps-1.
    __device__ __forceinline__ void split_all(int warp, int lane) const {
        const Share share(warp, lane);
        int slot = 0;
        uint32_t parity = 0;
#pragma unroll 1
        for (int number = 0;; ++number) {
            barrier_wait(&landed[slot], parity);
            const int keys = notes[slot].keys;
            if (keys == kNoChunk) return;
            split_chunk(slot, number, keys, share, warp, lane);
            if (++slot == kChunks) slot = 0, parity ^= 1;
        }
    }

  private:
    static constexpr int kNoChunk = -2147483647;
    // A warp splits every kWarps-th four rows of the panel of keys and that of values behind it, a lane four columns.
    // Rows four apart share a 16-lane store, which then meets no bank twice.
    static constexpr int kRowParts = kPanelColumns / 4;
    static constexpr int kFours = 2 * kChunkKeys / 4;
    static constexpr int kRounds = (kFours + kWarps - 1) / kWarps;
    static_assert(kWarpSize / kRowParts == 4 && kWarps % 2 == 1);

    struct Share {
        int warp;
        int row;     // of eight, in the first round; two on or back in each odd one
        int column;

        __device__ __forceinline__ Share(int warp, int lane)
            : warp(warp), row(warp % 2 * 2 + lane / kRowParts % 2 * 4 + lane / (2 * kRowParts)),
              column(lane % kRowParts * 4) {}

        __device__ __forceinline__ int four(int round) const { return warp + round * kWarps; }
        __device__ __forceinline__ bool has(int round) const { return kFours % kWarps == 0 || four(round) < kFours; }
        __device__ __forceinline__ bool is_of_values(int round) const {
            if ((kWarps - 1) + round * kWarps < kFours / 2) return false;
            return round * kWarps >= kFours / 2 || four(round) >= kFours / 2;
        }
        __device__ __forceinline__ int row_at(int round) const {  // in its panel
            return four(round) % (kFours / 2) / 2 * 8 + (row ^ round % 2 * 2);
        }
        // Where bytes of the lane's row lie, from the begin of both panels on.
        __device__ __forceinline__ int at(int round, int byte) const {
            return four(round) / 2 * 8 * 128 + swizzled_offset<128>(row ^ round % 2 * 2, byte);
        }
    };

    template <typename P>
    __device__ __forceinline__ void copy(const P& passes, const PanelMaps& maps, bool mapped, int first, int slot,
                                         int lane) const {
        const AttentionArgs& args = passes.args;
        const SequencePlace& place = passes.place;
        const int keys = place.k_len - first;
        const int head = passes.head / (static_cast<int>(args.heads) / static_cast<int>(args.kv_heads));
        unsigned char* panel = panels + slot * 2 * kPanelBytes;
        if (lane == 0) {
            notes[slot].keys = keys;
            notes[slot].sequence = passes.sequence;
            notes[slot].head = passes.head;
        }
        if (mapped) {  // behind the last key there may come what follows the sequence
            if (lane != 0) return;
            const int sequence = args.cu_seqlens_q != nullptr ? 0 : passes.sequence;
            barrier_arrive_expecting(&landed[slot], 2 * kPanelBytes);
            copy_box(panel, maps.k, 0, place.k_begin + first, head, sequence, &landed[slot]);
            copy_box(panel + kPanelBytes, maps.v, 0, place.k_begin + first, head, sequence, &landed[slot]);
            return;
        }
        const float* k = static_cast<const float*>(args.k) + row_offset(passes.sequence, head, place.k_begin + first,
                                                                          args.k_batch_stride, args.k_head_stride,
                                                                          args.k_token_stride);
        const float* v = static_cast<const float*>(args.v) + row_offset(passes.sequence, head, place.k_begin + first,
                                                                          args.v_batch_stride, args.v_head_stride,
                                                                          args.v_token_stride);
#pragma unroll 4
        for (int row = 0; row < min(keys, kChunkKeys); ++row) {
            const int at = swizzled_offset<128>(row, lane * 4);
            store_vector(panel + at, k[row * args.k_token_stride + lane]);
            store_vector(panel + kPanelBytes + at, v[row * args.v_token_stride + lane]);
        }
        barrier_arrive(&landed[slot]);
    }

    // Are there numbers too large for a sum over many keys, or some that are below 2^least once they are multiplied, so
    // that their low term is cut off?
    static __device__ __forceinline__ bool misfits(const Span& own, unsigned largest, int field, int least) {
        constexpr unsigned kMost = static_cast<unsigned>(kBias + 80) << 23;
        const unsigned least_bits = static_cast<unsigned>(2 * kBias + least - field) << 23;
        return largest >= kMost || ~own.smallest_negated < least_bits - 1u;  // the smallest less 1; none: the most
    }

    // The terms of rows take their place. The largest number of keys and of values is brought to 2^14.
    __device__ __forceinline__ void split_chunk(int slot, int number, int keys, const Share& share, int warp,
                                                int lane) const {
        unsigned char* panel = panels + slot * 2 * kPanelBytes;
        float4 fours[kRounds];
        Span spans[2];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (share.has(round)) fours[round] = load_vector<float4>(panel + share.at(round, share.column * 4));
        }
        if (keys < kChunkKeys) {
#pragma unroll
            for (int round = 0; round < kRounds; ++round) {
                if (share.has(round) && share.row_at(round) >= keys) fours[round] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            }
        }
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (!share.has(round)) continue;
            const float4& four = fours[round];
            const unsigned group = absolute_bits(max_or_nan(max_or_nan(fabsf(four.x), fabsf(four.y)),
                                                            max_or_nan(fabsf(four.z), fabsf(four.w))));
            if (share.is_of_values(round)) {
                spans[1].add_group(group);
            } else {
                spans[0].add_group(group);
            }
        }
        const uint2 of_warp = {warp_max(spans[0].largest), warp_max(spans[1].largest)};
        uint2* of_warps = largest + number % 2 * kWarps;
        uint64_t* barrier = &measured[number % 2];
        if (lane == 0) of_warps[warp] = of_warp;
        barrier_arrive(barrier);
        barrier_wait(barrier, number / 2 % 2);  // now all rows have been read, too
        uint2 of_all = of_warps[0];
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
            of_all = {max(of_all.x, of_warps[other].x), max(of_all.y, of_warps[other].y)};
        }
        const int k_field = field_to_reach(of_all.x, 14);
        const int v_field = field_to_reach(of_all.y, 14);
        if (misfits(spans[0], of_all.x, k_field, -4) || misfits(spans[1], of_all.y, v_field, -1)) {
            notes[slot].misfit = number + 1;
        }
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (!share.has(round)) continue;
            const float factor = power_of_two(share.is_of_values(round) ? v_field : k_field);
            const float4 four = fours[round];
            const SplitPair one = split(four.x * factor, four.y * factor);
            const SplitPair other = split(four.z * factor, four.w * factor);
            store_vector(panel + share.at(round, share.column * 2), uint2{one.high, other.high});
            store_vector(panel + share.at(round, share.column * 2 + 64), uint2{one.low, other.low});
        }
        if (warp == 0 && lane == 0) {
            notes[slot].k_unit = inverse_power_of_two(k_field);
            notes[slot].v_unit = inverse_power_of_two(v_field);
        }
        fence_async_proxy();
        barrier_arrive(&full[slot]);
    }
};

}  // namespace tilerank
