// Shared policy of the persistent kernels: one block a multiprocessor, all of them with equal work.
//
// The queries of a (sequence, head) pair are cut into units of kUnitRows. All units, in the order sequence, head, unit,
// form one line on which each has a length, its cost; the blocks cut that line into equal parts. A unit is computed
// whole by one worker (a warp or a warpgroup), whatever block it falls to, so its result depends on its pair alone.
// Within a block the workers take units in turn, and all walk the same passes: some units of one pair and the chunks of
// kChunkKeys keys that they need, which go through a ring in shared memory.
#pragma once

#include <algorithm>

#include "common/barriers.cuh"
#include "common/mma16.cuh"

namespace tilerank {

constexpr int kChunkKeys = 64;

// A value that all lanes have alike, known to be so to the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// A position on the line: a unit of a (sequence, head). The end is sequence = batch.
struct UnitPlace {
    int sequence;
    int head;
    int unit;
};

// Where the queries and keys of a sequence are and how many count.
struct SequencePlace {
    int q_begin;
    int q_len;
    int k_begin;
    int k_len;
};

// packed_range in 32 bits, which hold every value of cu_seqlens.
__device__ __forceinline__ void packed_place(const int32_t* cu_seqlens, int sequence, int64_t total, int64_t most,
                                             int* begin, int* length) {
    const int end_of_all = static_cast<int>(min(total, static_cast<int64_t>(2147483647)));
    *begin = min(max(cu_seqlens[sequence], 0), end_of_all);
    const int end = min(max(cu_seqlens[sequence + 1], *begin), end_of_all);
    *length = min(end - *begin, static_cast<int>(most));
}

__device__ __forceinline__ SequencePlace sequence_place(const AttentionArgs& args, int sequence) {
    SequencePlace place = {0, static_cast<int>(args.q_len), 0, 0};
    if (args.cu_seqlens_q != nullptr) {
        packed_place(args.cu_seqlens_q, sequence, args.total_q, args.q_len, &place.q_begin, &place.q_len);
        packed_place(args.cu_seqlens_k, sequence, args.total_k, args.k_len, &place.k_begin, &place.k_len);
    } else {
        place.k_len = static_cast<int>(key_length(args, sequence));
    }
    return place;
}

// ---- Cutting the line ----

// What a unit costs, in chunks: those of its keys, and kUnitCost for beginning and ending it, as a fit to the times of
// blocks on an H200 has it. A partial chunk takes as long as a whole one, and so does a unit of fewer rows.
constexpr int kUnitCost = 3;

// Whole numbers, which double holds exactly where integers of 32 bits would not do.
struct SequenceCost {
    double unit;
    double pair;
    double all;  // of all heads
};

template <int kUnitRows, int kCost>
__device__ __forceinline__ SequenceCost sequence_cost(const AttentionArgs& args, const SequencePlace& place) {
    const int keys = args.causal ? min(place.q_len, place.k_len) / 2 : place.k_len;
    SequenceCost cost;
    cost.unit = (keys + kChunkKeys - 1) / kChunkKeys + kCost;
    cost.pair = (place.q_len + kUnitRows - 1) / kUnitRows * cost.unit;
    cost.all = static_cast<double>(args.heads) * cost.pair;
    return cost;
}

// Where the part of `block` of `blocks` begins and ends: places[0] and places[1]. By one warp. Its code is short,
// because every block waits for it, with no instruction in any cache yet.
template <int kUnitRows, int kCost = kUnitCost>
__device__ __forceinline__ void find_places(const AttentionArgs& args, UnitPlace (&places)[2], int lane, int block,
                                            int blocks) {
    const int batch = static_cast<int>(args.batch);
    double targets[2];
    places[0] = places[1] = {batch, 0, 0};
    double total = 0.0;
#pragma unroll 1
    for (int sweep = 0; sweep < 2; ++sweep) {  // the first finds the total
        double begin = 0.0;                     // of these 32 sequences
#pragma unroll 1
        for (int first = 0; first < batch; first += kWarpSize) {
            SequencePlace at = {0, 0, 0, 0};
            if (first + lane < batch) at = sequence_place(args, first + lane);
            const double own = sequence_cost<kUnitRows, kCost>(args, at).all;
            double end = own;
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const double before = __shfl_up_sync(kFullMask, end, distance);
                if (lane >= distance) end += before;
            }
            end += begin;
#pragma unroll 1
            for (int side = 0; side < 2 && sweep == 1; ++side) {
                const double target = side == 0 ? targets[0] : targets[1];
                const unsigned holder = __ballot_sync(kFullMask, target >= end - own && target < end);
                if (holder == 0) continue;
                // The first unit that begins at the target or after it. Quotients may be off by a rounding: it only
                // matters that all blocks find the same, and not less for a larger target.
                const int source = __ffs(static_cast<int>(holder)) - 1;
                const double rest = target - __shfl_sync(kFullMask, end - own, source);
                const SequencePlace there = {0, __shfl_sync(kFullMask, at.q_len, source), 0,
                                             __shfl_sync(kFullMask, at.k_len, source)};
                const SequenceCost cost = sequence_cost<kUnitRows, kCost>(args, there);
                const int head = static_cast<int>(__fdividef(static_cast<float>(rest), static_cast<float>(cost.pair)));
                const float in_pair = static_cast<float>(rest - head * cost.pair);
                const int unit = static_cast<int>(ceilf(__fdividef(in_pair, static_cast<float>(cost.unit))));
                UnitPlace place = {first + source, head, unit};
                if (place.unit * kUnitRows >= there.q_len) place = {place.sequence, head + 1, 0};
                if (place.head >= args.heads) place = {place.sequence + 1, 0, 0};
                if (side == 0) places[0] = place;
                if (side == 1) places[1] = place;
            }
            begin = __shfl_sync(kFullMask, end, kWarpSize - 1);
        }
        total = begin;
        const float share = 1.0f / static_cast<float>(blocks);
        targets[0] = floor(total * (static_cast<float>(block) * share));
        targets[1] = block + 1 == blocks ? total : floor(total * (static_cast<float>(block + 1) * share));
    }
}

// The same where every block works on its own part.
template <int kUnitRows, int kCost = kUnitCost>
__device__ __forceinline__ void find_places(const AttentionArgs& args, UnitPlace (&places)[2], int lane) {
    find_places<kUnitRows, kCost>(args, places, lane, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

// The same for a kernel that copies before it knows all: each lane has neighbouring sequences, so that one read of the
// lengths and one sum along the lanes are all that is waited for. begin(place, rows): called as soon as it is known where
// the part begins, unless behind all sequences; rows.k_len is -1 where `rows` is not its place. It takes more registers:
// `split_warpgroups` and `bulk_units` were slower with it.
template <int kUnitRows, typename Begin>
__device__ __forceinline__ void find_places_early(const AttentionArgs& args, UnitPlace (&places)[2], int lane,
                                                  const Begin& begin) {
    const int block = static_cast<int>(blockIdx.x);
    const int blocks = static_cast<int>(gridDim.x);
    const int batch = static_cast<int>(args.batch);
    const int each = (batch + kWarpSize - 1) / kWarpSize;
    const int first = min(lane * each, batch);
    const int last = min(first + each, batch);
    double own = 0.0;
#pragma unroll 1
    for (int sequence = first; sequence < last; ++sequence) {
        own += sequence_cost<kUnitRows, kUnitCost>(args, sequence_place(args, sequence)).all;
    }
    double end = own;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const double before = __shfl_up_sync(kFullMask, end, distance);
        if (lane >= distance) end += before;
    }
    const double total = __shfl_sync(kFullMask, end, kWarpSize - 1);
    const float share = __fdividef(1.0f, static_cast<float>(blocks));
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        const int part = block + side;
        // Rounded as it may be: it only matters that all blocks find the same, and not less for a later part.
        const double target = part == blocks ? total : floor(total * (static_cast<float>(part) * share));
        const bool holds = target >= end - own && target < end;
        UnitPlace place = {batch, 0, 0};
        SequencePlace rows = {0, 0, 0, -1};
        if (holds) {
            double rest = target - (end - own);
            int sequence = first;
            rows = sequence_place(args, sequence);
            SequenceCost cost = sequence_cost<kUnitRows, kUnitCost>(args, rows);
#pragma unroll 1
            while (rest >= cost.all) {
                rest -= cost.all;
                rows = sequence_place(args, ++sequence);
                cost = sequence_cost<kUnitRows, kUnitCost>(args, rows);
            }
            // The first unit that begins at the target or after it; as above with quotients.
            const int head = static_cast<int>(__fdividef(static_cast<float>(rest), static_cast<float>(cost.pair)));
            const float in_pair = static_cast<float>(rest - head * cost.pair);
            place = {sequence, head, static_cast<int>(ceilf(__fdividef(in_pair, static_cast<float>(cost.unit))))};
            if (place.unit * kUnitRows >= rows.q_len) place = {sequence, head + 1, 0};
            if (place.head >= args.heads) {
                place = {sequence + 1, 0, 0};
                rows.k_len = -1;
            }
        }
        const unsigned holder = __ballot_sync(kFullMask, holds);
        const int source = holder == 0 ? 0 : __ffs(static_cast<int>(holder)) - 1;
        place = {__shfl_sync(kFullMask, place.sequence, source), __shfl_sync(kFullMask, place.head, source),
                 __shfl_sync(kFullMask, place.unit, source)};
        if (side == 0) places[0] = place;
        if (side == 1) places[1] = place;
        if (side == 0) {
            rows.k_begin = __shfl_sync(kFullMask, rows.k_begin, source);
            rows.k_len = __shfl_sync(kFullMask, rows.k_len, source);
            begin(place, rows);
        }
    }
}

// ---- Walking a block's part ----

// Units of one pair whose chunks go through the ring once: all that the block has of it where the chunks fit (kResident
// of them), else one for each worker.
template <int kUnitRows, int kWorkers_, int kResident>
struct Passes {
    static constexpr int kRows = kUnitRows;
    static constexpr int kWorkers = kWorkers_;
    const AttentionArgs& args;
    UnitPlace end;
    int sequence;
    int head;
    SequencePlace place = {0, 0, 0, 0};
    int first_unit = 0;
    int last_unit;    // one beyond
    int ordinal = 0;  // of first_unit, among the block's units
    int chunk = 0;    // number of the first chunk, among the block's
    int chunks = 0;
    int known = -1;  // the sequence that `place` is of

    // By one warp, from what find_places found.
    __device__ __forceinline__ Passes(const AttentionArgs& args, const UnitPlace (&places)[2])
        : args(args),
          end{uniform(places[1].sequence), uniform(places[1].head), uniform(places[1].unit)},
          sequence(uniform(places[0].sequence)),
          head(uniform(places[0].head)),
          last_unit(uniform(places[0].unit)) {}

    __device__ __forceinline__ int units() const { return (place.q_len + kUnitRows - 1) / kUnitRows; }

    // Causal units differ in length: they are taken from both ends of the pair in turn, the longest first.
    __device__ __forceinline__ int first_row(int unit) const {
        return (!args.causal ? unit : unit % 2 == 0 ? units() - 1 - unit / 2 : unit / 2) * kUnitRows;
    }

    // Keys that some query of the unit sees.
    __device__ __forceinline__ int any_row_sees(int unit) const {
        return args.causal ? min(place.k_len, min(first_row(unit) + kUnitRows, place.q_len)) : place.k_len;
    }

    // Chunks that the unit needs. One without keys has one chunk of zeros, all of it hidden.
    __device__ __forceinline__ int chunks_of(int unit) const {
        return max((any_row_sees(unit) + kChunkKeys - 1) / kChunkKeys, 1);
    }

    // To the next pass; false at the end, with `chunk` one beyond the last.
    __device__ __forceinline__ bool next() {
        ordinal += last_unit - first_unit;
        chunk += chunks;
        chunks = 0;
        first_unit = last_unit;
#pragma unroll 1
        for (;;) {
            const bool is_last = sequence == end.sequence && head == end.head;
            if (sequence >= args.batch || (is_last && first_unit >= end.unit)) return false;
            if (known != sequence) {
                place = sequence_place(args, sequence);
                known = sequence;
            }
            if (first_unit < units()) {
                last_unit = is_last ? min(units(), end.unit) : units();
                break;
            }
            if (is_last) return false;
            first_unit = last_unit = 0;
            if (++head == args.heads) {
                head = 0;
                ++sequence;
            }
        }
        chunks = chunks_of(first_unit);
        if (args.causal && first_unit + 1 < last_unit) chunks = max(chunks, chunks_of(first_unit + 1));
        if (chunks > kResident) last_unit = min(last_unit, first_unit + kWorkers);
        return true;
    }
};

// Elements from a tensor's begin to a row of it.
__device__ __forceinline__ int64_t row_offset(int sequence, int head, int token, int64_t batch_stride,
                                                int64_t head_stride, int64_t token_stride) {
    return sequence * batch_stride + head * head_stride + token * token_stride;
}

// ---- Copying chunks ----

// Rows 0..count-1 of source into a tile of a chunk, the rest zeros; by one warp, 16 bytes a lane. Parts of kColumns
// columns lie kPartBytes from each other. target: (row, column of a part) -> bytes from its begin. kUnrolled: of its
// turns; few where the first chunk waits for this code to be fetched.
template <typename Element, int D, int kColumns, int kPartBytes, int kUnrolled = 2, typename Target>
__device__ __forceinline__ void copy_chunk_tile(unsigned char* tile, const Element* source, int64_t token_stride,
                                                int count, int lane, bool aligned, const Target& target) {
    constexpr int kParts = kColumns / 8;
    constexpr int kRows = kWarpSize / kParts;
    const int column = lane % kParts * 8;
#pragma unroll 1
    for (int part = 0; part < D / kColumns; ++part) {
        int row = lane / kParts;
        unsigned char* to = tile + part * kPartBytes;
        const Element* from = source + row * token_stride + part * kColumns + column;
#pragma unroll kUnrolled
        for (int turn = 0; turn < kChunkKeys / kRows; ++turn, row += kRows, from += kRows * token_stride) {
            if (aligned) {
                copy_async<16>(to + target(row, column), from, row < count);
            } else {
                uint4 eight = {0, 0, 0, 0};
                if (row < count) eight = load_eight(from, false);
                store_vector(to + target(row, column), eight);
            }
        }
    }
}

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// Keeps the ring filled: kCopyWarps warps, each of which copies every kCopyWarps-th chunk. full and empty: barriers of
// the kChunks slots, of which full counts the lanes of a warp. copy_tile(slot, values, source, stride, rows): starts
// the copy of keys or values. fence: what else must come between the data's arrival and the barrier. ready: what must
// come before a pass's first copy. kEarly: each warp's first chunk is told as soon as it is there; begun: its copy is
// under way already.
template <typename Element, int kChunks, int kCopyWarps, bool kEarly = false, typename P, typename CopyTile,
          typename Fence, typename Ready = Nothing>
__device__ __forceinline__ void fill_ring(P passes, uint64_t* full, uint64_t* empty, int copy_warp,
                                          const CopyTile& copy_tile, const Fence& fence, const Ready& ready = {},
                                          bool begun = false) {
    const AttentionArgs& args = passes.args;
    const int heads_a_group = static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
    int told = -1;  // slot of the chunk under way: its barrier is told one chunk later, when the data is there
    const auto tell = [&] {
        if (told < 0) return;
        fence();
        barrier_arrive(&full[told]);
        told = -1;
    };
    int slot = copy_warp % kChunks;
    uint32_t parity = copy_warp / kChunks % 2 ^ 1;  // of the phase before: for the first there is nothing to wait for
    int chunk = copy_warp;                          // number of the next one of this warp's
#pragma unroll 1
    while (passes.next()) {
        if (chunk >= passes.chunk + passes.chunks) continue;
        const int kv_head = passes.head / heads_a_group;
        const Element* k = static_cast<const Element*>(args.k) + row_offset(passes.sequence, kv_head,
                                                                            passes.place.k_begin, args.k_batch_stride,
                                                                            args.k_head_stride, args.k_token_stride);
        const Element* v = static_cast<const Element*>(args.v) + row_offset(passes.sequence, kv_head,
                                                                            passes.place.k_begin, args.v_batch_stride,
                                                                            args.v_head_stride, args.v_token_stride);
        ready();
#pragma unroll 1
        for (; chunk < passes.chunk + passes.chunks; chunk += kCopyWarps) {
            if (!barrier_test(&empty[slot], parity)) {
                copy_async_wait<0>();
                tell();
                barrier_wait(&empty[slot], parity);
            }
            const int first = (chunk - passes.chunk) * kChunkKeys;
            const int count = passes.place.k_len - first;
#pragma unroll 1
            for (int values = kEarly && begun ? 2 : 0; values < 2; ++values) {
                const int64_t stride = values == 0 ? args.k_token_stride : args.v_token_stride;
                copy_tile(slot, values, (values == 0 ? k : v) + first * stride, stride, count);
            }
            begun = false;
            copy_async_commit();
            if (kEarly && chunk < kCopyWarps) {
                told = slot;
                copy_async_wait<0>();
                tell();
            } else {
                copy_async_wait<1>();
                tell();
                told = slot;
            }
            slot += kCopyWarps;
            if (slot >= kChunks) {
                slot -= kChunks;
                parity ^= 1;
            }
        }
    }
    copy_async_wait<0>();
    tell();
}

// ---- Dealing a block's units ----

// One warp walks the passes and tells each worker its next units, so that the warps that compute need not.
struct Task {
    const void* q;  // first of the unit's rows
    void* out;
    int rows;         // of the unit that exist
    int k_len;        // keys that count
    int causal_keys;  // what the first row may see if causality alone counted
    int tiles;        // chunks that some row sees keys of; at least one, 0: there is no further unit
    int whole_tiles;  // of those, the ones that every row sees all of
    int chunk;        // number of the first of them; where there is no unit, one beyond the last
    int slot;         // its place in the ring
    int parity;       // its turn there
    int is_last;      // of the worker's units in the pass: chunks are given back behind it
    int rotation;     // differs from pair to pair
};

// Tasks on their way to each worker, in shared memory.
template <int kWorkers_>
struct TaskQueues {
    static constexpr int kWorkers = kWorkers_;
    static constexpr int kDepth = 4;
    Task* tasks;      // [kWorkers][kDepth]
    uint64_t* dealt;  // barriers
    uint64_t* taken;

    __host__ __device__ static constexpr size_t bytes() {
        return DynamicShared::bytes<Task>(kWorkers * kDepth) + 2 * DynamicShared::bytes<uint64_t>(kWorkers * kDepth);
    }

    __device__ __forceinline__ explicit TaskQueues(DynamicShared& memory)
        : tasks(memory.take<Task>(kWorkers * kDepth)),
          dealt(memory.take<uint64_t>(kWorkers * kDepth)),
          taken(memory.take<uint64_t>(kWorkers * kDepth)) {}

    // By all threads of the block, before a __syncthreads(). worker_warps: warps that take each task.
    __device__ __forceinline__ void init(int worker_warps) const {
        for (int at = static_cast<int>(threadIdx.x); at < kWorkers * kDepth; at += static_cast<int>(blockDim.x)) {
            barrier_init(&dealt[at], 1);
            barrier_init(&taken[at], worker_warps);
        }
    }

    // The same by a lane of each warp, which is sooner and takes more code.
    __device__ __forceinline__ void init_by_warps(int worker_warps) const {
        each_barrier(kWorkers * kDepth, static_cast<int>(blockDim.x) / kWarpSize, [&](int at) {
            barrier_init(&dealt[at], 1);
            barrier_init(&taken[at], worker_warps);
        });
    }

    // The task with that number among all of the block's.
    __device__ __forceinline__ void put(int ordinal, const Task& task) const {
        const int turn = ordinal / kWorkers;
        const int at = ordinal % kWorkers * kDepth + turn % kDepth;
        barrier_wait(&taken[at], turn / kDepth % 2 ^ 1);
        tasks[at] = task;
        barrier_arrive(&dealt[at]);
    }

    // Would `put` of that task not wait?
    __device__ __forceinline__ bool has_room(int ordinal) const {
        const int turn = ordinal / kWorkers;
        return barrier_peek(&taken[ordinal % kWorkers * kDepth + turn % kDepth], turn / kDepth % 2 ^ 1);
    }

    // The task with that number among the worker's, where it lies until `done`.
    __device__ __forceinline__ const Task& look(int worker, int turn) const {
        const int at = worker * kDepth + turn % kDepth;
        barrier_wait(&dealt[at], turn / kDepth % 2);
        return tasks[at];
    }

    // By whole warps, which have read what they need of that task.
    __device__ __forceinline__ void done(int worker, int turn, int lane) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(&taken[worker * kDepth + turn % kDepth]);
    }

    // Both at once, for a copy.
    __device__ __forceinline__ Task take(int worker, int turn, int lane) const {
        const Task task = look(worker, turn);
        done(worker, turn, lane);
        return task;
    }
};

// Deals all of a block's units, whose keys go through a ring of kChunks; by one warp. Each lane deals one unit of a
// pass.
template <typename Element, int kChunks, int kUnitRows, int kWorkers, int kResident>
__device__ __forceinline__ void deal(Passes<kUnitRows, kWorkers, kResident> passes, const TaskQueues<kWorkers>& queues,
                                     int lane) {
    const AttentionArgs& args = passes.args;
    constexpr int kAtOnce = kWorkers * TaskQueues<kWorkers>::kDepth < kWarpSize
                                ? kWorkers * TaskQueues<kWorkers>::kDepth
                                : kWarpSize;
    int dealt = 0;
    Task task = {};
#pragma unroll 1
    while (passes.next()) {
        const SequencePlace& place = passes.place;
        const Element* q = static_cast<const Element*>(args.q) + row_offset(passes.sequence, passes.head, place.q_begin,
                                                                              args.q_batch_stride, args.q_head_stride,
                                                                              args.q_token_stride);
        Element* out = static_cast<Element*>(args.out) + row_offset(passes.sequence, passes.head, place.q_begin,
                                                                      args.out_batch_stride, args.out_head_stride,
                                                                      args.out_token_stride);
        task.k_len = place.k_len;
        task.chunk = passes.chunk;
        task.slot = passes.chunk % kChunks;
        task.parity = passes.chunk / kChunks % 2;
        task.rotation = passes.head + passes.sequence;
#pragma unroll 1
        for (int first = passes.first_unit; first < passes.last_unit; first += kAtOnce) {
            const int unit = first + lane;
            const int count = min(passes.last_unit - first, kAtOnce);
            if (lane < count) {
                const int row = passes.first_row(unit);
                task.q = q + row * args.q_token_stride;
                task.out = out + row * args.out_token_stride;
                task.rows = min(place.q_len - row, kUnitRows);
                task.causal_keys = args.causal ? row + 1 : kMostKeys16;
                task.tiles = passes.chunks_of(unit);
                task.whole_tiles = min(task.k_len, task.causal_keys) / kChunkKeys;
                task.is_last = unit + kWorkers >= passes.last_unit;
                queues.put(dealt + lane, task);
            }
            __syncwarp();
            dealt += count;
        }
    }
    task.tiles = 0;
    task.rows = 0;
    task.chunk = passes.chunk;
    if (lane < kWorkers) queues.put(dealt + lane, task);
}

// The same by a warp that has other work as well: `step` never waits. Each lane deals the next unit of one worker.
template <typename Element, int kChunks, typename P>
struct Dealer {
    P passes;
    TaskQueues<P::kWorkers> queues;
    int dealt = 0;
    int unit = 0;  // of the pass, to be dealt next
    bool has_pass = false;
    bool is_done = false;

    __device__ __forceinline__ Dealer(const P& passes, const TaskQueues<P::kWorkers>& queues)
        : passes(passes), queues(queues) {
        next_pass();
    }

    __device__ __forceinline__ void step(int lane) {
        if (is_done) return;
        const int count = has_pass ? min(passes.last_unit - unit, P::kWorkers) : P::kWorkers;
        const bool deals = lane < count;
        if (!__all_sync(kFullMask, !deals || queues.has_room(dealt + lane))) return;
        if (deals) queues.put(dealt + lane, task_of(unit + lane));
        __syncwarp();
        dealt += count;
        unit += count;
        is_done = !has_pass;
        if (has_pass && unit >= passes.last_unit) next_pass();
    }

  private:
    __device__ __forceinline__ void next_pass() {
        has_pass = passes.next();
        unit = passes.first_unit;
    }

    __device__ __forceinline__ Task task_of(int unit) const {
        Task task = {};
        task.chunk = passes.chunk;
        if (!has_pass) return task;
        const AttentionArgs& args = passes.args;
        const SequencePlace& place = passes.place;
        const int row = passes.first_row(unit);
        task.q = static_cast<const Element*>(args.q) + row_offset(passes.sequence, passes.head, place.q_begin + row,
                                                                    args.q_batch_stride, args.q_head_stride,
                                                                    args.q_token_stride);
        task.out = static_cast<Element*>(args.out) + row_offset(passes.sequence, passes.head, place.q_begin + row,
                                                                  args.out_batch_stride, args.out_head_stride,
                                                                  args.out_token_stride);
        task.rows = min(place.q_len - row, P::kRows);
        task.k_len = place.k_len;
        task.causal_keys = args.causal ? row + 1 : kMostKeys16;
        task.tiles = passes.chunks_of(unit);
        task.whole_tiles = min(task.k_len, task.causal_keys) / kChunkKeys;
        task.slot = passes.chunk % kChunks;
        task.parity = passes.chunk / kChunks % 2;
        task.is_last = unit + P::kWorkers >= passes.last_unit;
        task.rotation = passes.head + passes.sequence;
        return task;
    }
};

// ---- Launching ----

// Launches kernel(args, factor, aligned) with one block a multiprocessor. overlaps: the kernel calls wait_for_previous().
inline tilerank_status launch_balanced(const char* name, void (*kernel)(AttentionArgs, float, bool), int unit_rows,
                                       int threads, size_t shared_bytes, const AttentionArgs& args, void* stream,
                                       bool overlaps = false) {
    constexpr int64_t kMost = 1 << 30;  // of a 32-bit position
    if (args.batch > kMost || args.heads > kMost || args.q_len > kMost) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant %s: batch, heads and queries are %lld, %lld, %lld; at most %lld each", name,
                      static_cast<long long>(args.batch), static_cast<long long>(args.heads),
                      static_cast<long long>(args.q_len), static_cast<long long>(kMost));
    }
    const int64_t units = args.batch * args.heads * ((args.q_len + unit_rows - 1) / unit_rows);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), units);
    return launch_blocks_overlapped(overlaps && args.overlap != 0, name, kernel, blocks, threads, shared_bytes, stream,
                                    args, nonzero_scale_log2(args), rows16_aligned(args));
}

}  // namespace tilerank
