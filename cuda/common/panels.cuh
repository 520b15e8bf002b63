// Shared policy of the fp32 kernels on warpgroup products: warps that bring the keys and values of a pair into a ring as
// fp16 terms (common/split_fp16.cuh), once for all its units. head_dim 32.
#pragma once

#include "common/balanced.cuh"
#include "common/split_fp16.cuh"
#include "common/wgmma.cuh"

namespace tilerank {

// Rows of 128 bytes: the high terms, then the low ones; swizzled as wgmma likes it.
constexpr int kPanelBytes = kChunkKeys * kPanelPitch * 2;

// What is known of a chunk once it is split.
struct ChunkNotes {
    int k_field;  // what it was multiplied by
    int v_field;
    int misfit;  // 1 + the number of the latest chunk here whose numbers do not fit that
    const float* k;  // first of the sequence's keys
    const float* v;
};

// A ring of kChunks chunks, a panel of keys and one of values each, that kThreads threads fill. kTerms: 2, or 1 where
// numbers are rounded to fp16: then only their size must fit.
template <int kTerms, int kChunks, int kThreads>
struct PanelRing {
    unsigned char* panels;
    uint64_t* full;  // of each chunk
    uint64_t* empty;
    ChunkNotes* notes;
    uint4* spans;  // [2][kWarps]

    static constexpr int kWarps = kThreads / kWarpSize;

    static constexpr size_t shared_bytes() {
        return DynamicShared::bytes<unsigned char>(kChunks * 2 * kPanelBytes + 1024) +
               2 * DynamicShared::bytes<uint64_t>(kChunks) + DynamicShared::bytes<ChunkNotes>(kChunks) +
               DynamicShared::bytes<uint4>(2 * kWarps);
    }

    __device__ __forceinline__ explicit PanelRing(DynamicShared& memory) {
        unsigned char* unaligned = memory.take<unsigned char>(kChunks * 2 * kPanelBytes + 1024);
        panels = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
        full = memory.take<uint64_t>(kChunks);
        empty = memory.take<uint64_t>(kChunks);
        notes = memory.take<ChunkNotes>(kChunks);
        spans = memory.take<uint4>(2 * kWarps);
    }

    // By the whole block, before a __syncthreads(). user_warps: those that each give every chunk back.
    __device__ __forceinline__ void init(int user_warps) const {
        if (threadIdx.x >= kChunks) return;
        barrier_init(&full[threadIdx.x], kThreads);
        barrier_init(&empty[threadIdx.x], user_warps);
        notes[threadIdx.x].misfit = 0;
    }

    // Brings every chunk of the block's passes; thread: 0..kThreads-1.
    template <bool kAligned, typename P>
    __device__ __forceinline__ void fill(P passes, int thread) const {
        const AttentionArgs& args = passes.args;
        const Share share(thread);
        int slot = 0;
        uint32_t parity = 1;  // of the phase before the first: nothing to wait for
        int split_slot = 0;
        int number = 0;       // of the chunk that is split next
        int pending = 0;      // chunks on their way
        unsigned firsts = 0;  // which of them are the first of a pass, a bit each
        int measured = 0;
        int k_field = 0;
        int v_field = 0;
        int chunk = 0;  // of the pass
        bool has_more = passes.next();
        HeadView<float> view = {};
        if (has_more) view = head_view<float>(args, passes.sequence, passes.head);
        // One place that copies and one that splits: what every warp waits for should not be long.
#pragma unroll 1
        while (has_more || pending > 0) {
            const bool is_free = has_more && __all_sync(kFullMask, barrier_test(&empty[slot], parity));
            if (is_free) {
                const int first = chunk * kChunkKeys;
                const int count = passes.place.k_len - first;
                if (thread == 0) notes[slot].k = view.k, notes[slot].v = view.v;
                unsigned char* k_panel = panels + slot * 2 * kPanelBytes;
                copy<kAligned>(k_panel, view.k + first * args.k_token_stride, args.k_token_stride, count, share);
                copy<kAligned>(k_panel + kPanelBytes, view.v + first * args.v_token_stride, args.v_token_stride, count,
                               share);
                copy_async_commit();
                firsts |= (chunk == 0 ? 1u : 0u) << pending;
                ++pending;
                if (++slot == kChunks) slot = 0, parity ^= 1;
                if (++chunk == passes.chunks) {
                    chunk = 0;
                    has_more = passes.next();
                    if (has_more) view = head_view<float>(args, passes.sequence, passes.head);
                }
                if (pending <= kLag) continue;
                copy_async_wait<kLag>();
            } else if (pending == 0) {
                barrier_wait(&empty[slot], parity);
                __syncwarp();
                continue;
            } else {
                copy_async_wait<0>();
            }
            // The one that has been on its way longest is there.
            unsigned char* k_panel = panels + split_slot * 2 * kPanelBytes;
            unsigned char* v_panel = k_panel + kPanelBytes;
            if (firsts & 1) {
                // The factors of a pair are those of its first keys; the others are checked.
                const unsigned k_largest = largest_of(k_panel, share);
                const unsigned v_largest = largest_of(v_panel, share);
                uint4* of_warps = spans + measured % 2 * kWarps;
                ++measured;
                if (thread % kWarpSize == 0) of_warps[thread / kWarpSize] = uint4{k_largest, v_largest, 0, 0};
                barrier_among<kThreads>();
                unsigned largest[2] = {0, 0};
#pragma unroll
                for (int warp = 0; warp < kWarps; ++warp) {
                    largest[0] = max(largest[0], of_warps[warp].x);
                    largest[1] = max(largest[1], of_warps[warp].y);
                }
                k_field = field_to_reach(largest[0], 10);
                v_field = field_to_reach(largest[1], 12);
            }
            __syncwarp();  // what other lanes have copied is there
            Fit k_fit;
            Fit v_fit;
            split_panel(k_panel, power_of_two(k_field), share, k_fit);
            split_panel(v_panel, power_of_two(v_field), share, v_fit);
            ++number;
            if (thread == 0) notes[split_slot].k_field = k_field, notes[split_slot].v_field = v_field;
            const float k_least = kTerms == 1 ? 0x1p-149f : 0x1p-4f;
            const float v_least = kTerms == 1 ? 0x1p-149f : 0x1p-1f;
            if (k_fit.fails(k_least, 0x1p15f) || v_fit.fails(v_least, 0x1p15f)) notes[split_slot].misfit = number;
            fence_async_proxy();
            barrier_arrive(&full[split_slot]);
            if (++split_slot == kChunks) split_slot = 0;
            firsts >>= 1;
            --pending;
        }
    }

  private:
    static constexpr int kLag = 2;  // chunks on their way while one is split
    // A lane has four columns of every kRowStep-th row, first of the keys, then of the values.
    static constexpr int kRowParts = kPanelColumns / 4;
    static constexpr int kRowStep = kThreads / kRowParts;
    static_assert(kChunkKeys % kRowStep == 0 && kRowStep % 8 == 0);
    static constexpr int kRounds = kChunkKeys / kRowStep;

    struct Share {
        int row;
        int column;
        // Rows four apart share a 16-lane store, which then meets no bank twice.
        __device__ __forceinline__ explicit Share(int thread)
            : row(thread / (8 * kRowParts) * 8 + thread / kRowParts % 2 * 4 + thread / (2 * kRowParts) % 4),
              column(thread % kRowParts * 4) {}
        // Where the columns are in a panel before they are split.
        __device__ __forceinline__ int raw_at(int round) const {
            return swizzled_offset<128>(row, column * 4) + round * kRowStep * 128;
        }
        // And their terms: 0 the high ones, 1 the low ones.
        __device__ __forceinline__ int term_at(int round, int term) const {
            return swizzled_offset<128>(row, column * 2 + term * 64) + round * kRowStep * 128;
        }
    };

    // Rows 0..count-1 into a panel, the rest zeros.
    template <bool kAligned>
    static __device__ __forceinline__ void copy(unsigned char* panel, const float* source, int64_t token_stride,
                                                int count, const Share& share) {
        const float* from = source + share.row * token_stride + share.column;
#pragma unroll
        for (int round = 0; round < kRounds; ++round, from += kRowStep * token_stride) {
            unsigned char* to = panel + share.raw_at(round);
            const bool exists = share.row + round * kRowStep < count;
            if (kAligned) {
                copy_async<16>(to, from, exists);
            } else {
#pragma unroll
                for (int word = 0; word < 4; ++word) copy_async<4>(to + word * 4, from + word, exists);
            }
        }
    }

    static __device__ __forceinline__ unsigned largest_of(const unsigned char* panel, const Share& share) {
        unsigned largest = 0;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const float4 four = load_vector<float4>(panel + share.raw_at(round));
            largest = max(largest, max(max(absolute_bits(four.x), absolute_bits(four.y)),
                                       max(absolute_bits(four.z), absolute_bits(four.w))));
        }
        return warp_max(largest);
    }

    // Splits a panel where it lies: the terms of a row take its place.
    static __device__ __forceinline__ void split_panel(unsigned char* panel, float factor, const Share& share,
                                                       Fit& fit) {
        constexpr int kAtOnce = kRounds < 4 ? kRounds : 4;
#pragma unroll
        for (int first = 0; first < kRounds; first += kAtOnce) {
            float4 fours[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) fours[i] = load_vector<float4>(panel + share.raw_at(first + i));
            __syncwarp();  // these rows have been read
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float4 four = fours[i];
                four = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
                fit.add_group(four);
                const SplitPair one = split(four.x, four.y);
                const SplitPair other = split(four.z, four.w);
                store_vector(panel + share.term_at(first + i, 0), uint2{one.high, other.high});
                if (kTerms > 1) store_vector(panel + share.term_at(first + i, 1), uint2{one.low, other.low});
            }
        }
    }
};

}  // namespace tilerank
