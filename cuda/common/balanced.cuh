// Shared policy of the persistent kernels: one block a multiprocessor, all of them with equal work.
//
// The queries of a (sequence, head) pair are cut into units of kUnitRows. All units, in the order sequence, head, unit,
// form one line on which each has a length, its cost; the blocks cut that line into equal parts. A unit is computed
// whole by one worker (a warp or a warpgroup), whatever block it falls to, so its result depends on its pair alone.
// Within a block the workers take units in turn, and all walk the same passes: some units of one pair and the chunks of
// kChunkKeys keys that they need, which go through a ring in shared memory.
#pragma once

#include <algorithm>

#include "common/mma16.cuh"

namespace tilerank {

constexpr int kChunkKeys = 64;

// A position on the line: a unit of a (sequence, head). The end is sequence = batch.
struct UnitPlace {
    int sequence;
    int head;
    int unit;
};

// How many queries and keys of a sequence count.
struct SequenceSize {
    int q_len;
    int k_len;
};

__device__ __forceinline__ SequenceSize sequence_size(const AttentionArgs& args, int sequence) {
    if (args.cu_seqlens_q != nullptr) {
        return {static_cast<int>(packed_range(args.cu_seqlens_q, sequence, args.total_q, args.q_len).length),
                static_cast<int>(packed_range(args.cu_seqlens_k, sequence, args.total_k, args.k_len).length)};
    }
    return {static_cast<int>(args.q_len), static_cast<int>(key_length(args, sequence))};
}

// ---- Cutting the line ----

// The cost of 16 queries of a sequence, in steps of 16 keys; the constant stands for a unit's beginning and end.
__device__ __forceinline__ int64_t row_tile_cost(const AttentionArgs& args, SequenceSize size) {
    constexpr int kUnitCost = 4;
    const int keys = args.causal ? min(size.q_len, size.k_len) / 2 : size.k_len;
    return (keys + 15) / 16 + kUnitCost;
}

__device__ __forceinline__ int64_t pair_cost(const AttentionArgs& args, SequenceSize size) {
    return (size.q_len + 15) / 16 * row_tile_cost(args, size);
}

// Finds where this block's part begins and ends, among all kThreads threads of the block. places[0..1] is shared.
template <int kUnitRows, int kThreads>
__device__ __forceinline__ void find_places(const AttentionArgs& args, UnitPlace (&places)[2],
                                            int64_t (&warp_costs)[kThreads / kWarpSize]) {
    const int thread = threadIdx.x;
    const int lane = thread % kWarpSize;
    const int warp = thread / kWarpSize;
    const int batch = static_cast<int>(args.batch);
    // A thread counts the neighbours first .. last-1: usually one sequence, or none.
    const int share = (batch + kThreads - 1) / kThreads;
    const int first = min(thread * share, batch);
    const int last = min(first + share, batch);
    int64_t own = 0;
#pragma unroll 1
    for (int s = first; s < last; ++s) own += args.heads * pair_cost(args, sequence_size(args, s));
    int64_t up_to = own;  // of this warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int64_t before = __shfl_up_sync(kFullMask, up_to, distance);
        if (lane >= distance) up_to += before;
    }
    if (lane == kWarpSize - 1) warp_costs[warp] = up_to;
    if (thread < 2) places[thread] = {batch, 0, 0};
    __syncthreads();
    int64_t begin = up_to - own;
    int64_t total = 0;
#pragma unroll
    for (int other = 0; other < kThreads / kWarpSize; ++other) {
        if (other < warp) begin += warp_costs[other];
        total += warp_costs[other];
    }
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        // In double, whose division is quicker than that of 64-bit integers; all blocks round alike.
        const double share_end = static_cast<double>(blockIdx.x + side) / gridDim.x;
        const int64_t target = static_cast<int64_t>(static_cast<double>(total) * share_end);
        if (target < begin || target >= begin + own) continue;
        // The first unit that begins at the target or after it.
        int s = first;
        int64_t rest = target - begin;
        SequenceSize size = sequence_size(args, s);
#pragma unroll 1
        for (;;) {
            const int64_t cost = args.heads * pair_cost(args, size);
            if (rest < cost) break;
            rest -= cost;
            size = sequence_size(args, ++s);
        }
        const int64_t one_pair = pair_cost(args, size);
        int head = static_cast<int>(static_cast<double>(rest) / static_cast<double>(one_pair));
        rest -= head * one_pair;
        const double one_unit = static_cast<double>(kUnitRows / 16 * row_tile_cost(args, size));
        int unit = static_cast<int>(ceil(static_cast<double>(rest) / one_unit));
        if (unit * kUnitRows >= size.q_len) {
            unit = 0;
            ++head;
        }
        if (head == args.heads) {
            head = 0;
            ++s;
        }
        places[side] = {s, head, unit};
    }
    __syncthreads();
}

// ---- Walking a block's part ----

// Units of one pair whose chunks go through the ring once: all that the block has of it where the chunks fit (kResident
// of them), else one for each worker.
template <int kUnitRows, int kWorkers, int kResident>
struct Passes {
    const AttentionArgs& args;
    UnitPlace end;
    int sequence;
    int head;
    SequenceSize size = {0, 0};
    int first_unit = 0;
    int last_unit;     // one beyond
    int ordinal = 0;   // of first_unit, among the block's units
    int chunk = 0;     // number of the first chunk, among the block's
    int chunks = 0;

    __device__ __forceinline__ Passes(const AttentionArgs& args, const UnitPlace (&places)[2])
        : args(args), end(places[1]), sequence(places[0].sequence), head(places[0].head), last_unit(places[0].unit) {
        if (sequence < args.batch) size = sequence_size(args, sequence);
    }

    // Causal units differ in length: they are taken from both ends of the pair in turn, the longest first.
    __device__ __forceinline__ int first_row(int unit) const {
        const int units = (size.q_len + kUnitRows - 1) / kUnitRows;
        return (!args.causal ? unit : unit % 2 == 0 ? units - 1 - unit / 2 : unit / 2) * kUnitRows;
    }

    // Keys that some query of the unit sees.
    __device__ __forceinline__ int any_row_sees(int unit) const {
        return args.causal ? min(size.k_len, min(first_row(unit) + kUnitRows, size.q_len)) : size.k_len;
    }

    // To the next pass; false at the end, with `chunk` one beyond the last.
    __device__ __forceinline__ bool next() {
        ordinal += last_unit - first_unit;
        chunk += chunks;
        chunks = 0;
        first_unit = last_unit;
#pragma unroll 1
        for (;;) {
            if (sequence > end.sequence || (sequence == end.sequence && head > end.head)) return false;
            const bool is_last = sequence == end.sequence && head == end.head;
            if (sequence >= args.batch || (is_last && first_unit >= end.unit)) return false;
            const int units = (size.q_len + kUnitRows - 1) / kUnitRows;
            if (first_unit < units) {
                last_unit = is_last ? min(units, end.unit) : units;
                break;
            }
            first_unit = last_unit = 0;
            if (++head == args.heads) {
                head = 0;
                if (++sequence < args.batch) size = sequence_size(args, sequence);
            }
        }
        // A pair without keys has one chunk of zeros, all of it hidden.
        const auto chunks_of = [&](int unit) { return max((any_row_sees(unit) + kChunkKeys - 1) / kChunkKeys, 1); };
        chunks = chunks_of(first_unit);
        if (args.causal && first_unit + 1 < last_unit) chunks = max(chunks, chunks_of(first_unit + 1));
        if (chunks > kResident) last_unit = min(last_unit, first_unit + kWorkers);
        return true;
    }
};

// ---- Launching ----

// Multiprocessors of the current device; 0 when CUDA cannot say.
inline int multiprocessors() {
#if defined(TILERANK_HOST_BUILD)
    return 3;
#else
    int device = 0;
    int count = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
#endif
}

// Launches kernel(args, factor, aligned) with one block a multiprocessor.
inline tilerank_status launch_balanced(const char* name, void (*kernel)(AttentionArgs, float, bool), int unit_rows,
                                       int threads, size_t shared_bytes, const AttentionArgs& args, void* stream) {
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED, "variant %s: batch, heads and queries are %lld, %lld, %lld; at most %lld each",
                      name, static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    const int64_t units = args.batch * args.heads * ((args.q_len + unit_rows - 1) / unit_rows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks(name, kernel, blocks, threads, shared_bytes, stream, args, nonzero_scale_log2(args),
                         rows16_aligned(args));
}

}  // namespace tilerank
