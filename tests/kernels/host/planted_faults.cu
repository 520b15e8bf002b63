// Mistakes that kernels make, each beside the same code without it: what the host build's checks are tested on.
//     planted_faults NAME clean|planted
// Exit status 0: the result is right. 3: the launch failed, the report is on stdout. 4: the result is wrong. Sanitizers
// end the process in their own ways.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/barriers.cuh"
#include "common/device.h"

namespace {

using namespace tilerank;

constexpr int kThreads = 64;

// Runs kernel<planted>(in, out, n) and compares out with what `expected` says of every element.
template <typename Kernel, typename Expected>
int verdict(Kernel kernel, const std::vector<float>& in, size_t count, int n, size_t shared_bytes,
            const Expected& expected, unsigned blocks = 1) {
    std::vector<float> out(count, -1.0f);
    const int error = launch(kernel, blocks, kThreads, shared_bytes, nullptr, in.data(), out.data(), n);
    if (error != 0) {
        std::printf("%s\n", launch_error_text(error));
        return 3;
    }
    for (size_t at = 0; at < count; ++at) {
        const float right = expected(static_cast<int>(at));
        if (!(out[at] == right)) {
            std::printf("element %zu is %g, not %g\n", at, out[at], right);
            return 4;
        }
    }
    return 0;
}

std::vector<float> counting(int count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (int at = 0; at < count; ++at) values[static_cast<size_t>(at)] = static_cast<float>(at + 1);
    return values;
}

#define FAULT_ARGUMENTS [[maybe_unused]] const float *in, float *out, [[maybe_unused]] int n

// ---- Bounds ---------------------------------------------------------------------------------------------------------

// The last tile is partial; its missing elements count nothing.
template <bool kPlanted>
__global__ void read_beyond_a_partial_tile(FAULT_ARGUMENTS) {
    float sum = 0.0f;
    for (int tile = 0; tile < n; tile += kThreads) {
        const int at = tile + static_cast<int>(threadIdx.x);
        const float value = (kPlanted || at < n) ? in[at] : 0.0f;
        sum += at < n ? value : 0.0f;
    }
    out[threadIdx.x] = sum;
}

template <bool kPlanted>
__global__ void overrun_shared_memory(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    SHARED(float, neighbour, [kThreads]);
    const int thread = static_cast<int>(threadIdx.x);
    tile[thread] = in[thread];
    neighbour[thread] = 0.0f;
    __syncthreads();
    const int next = kPlanted ? thread + 1 : (thread + 1) % kThreads;
    out[thread] = thread + 1 == kThreads ? tile[next] * 0.0f + 1.0f : tile[next];
}

template <bool kPlanted>
__global__ void overrun_dynamic_shared_memory(FAULT_ARGUMENTS) {
    DynamicShared memory;
    float* tile = memory.take<float>(kThreads);
    float* neighbour = memory.take<float>(kThreads);
    const int thread = static_cast<int>(threadIdx.x);
    tile[thread] = in[thread];
    neighbour[thread] = 1.0f;
    __syncthreads();
    const int next = kPlanted ? thread + 1 : (thread + 1) % kThreads;
    out[thread] = thread + 1 == kThreads ? tile[next] * 0.0f + 1.0f : tile[next];
}

template <bool kPlanted>
__global__ void take_more_shared_memory_than_launched(FAULT_ARGUMENTS) {
    DynamicShared memory;
    float* tile = memory.take<float>(kPlanted ? 2 * kThreads : kThreads);
    tile[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = tile[threadIdx.x];
}

// ---- Barriers -------------------------------------------------------------------------------------------------------

template <bool kPlanted>
__global__ void no_barrier_before_use(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    tile[threadIdx.x] = in[threadIdx.x];
    if (!kPlanted) __syncthreads();
    out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

template <bool kPlanted>
__global__ void no_barrier_before_overwrite(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    float sum = 0.0f;
    for (int round = 0; round < n; ++round) {
        tile[threadIdx.x] = in[threadIdx.x] + static_cast<float>(round);
        __syncthreads();
        sum += tile[kThreads - 1 - threadIdx.x];
        if (!kPlanted) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

template <bool kPlanted>
__global__ void no_warp_barrier(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    tile[threadIdx.x] = in[threadIdx.x];
    if (!kPlanted) __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// A shuffle brings the lanes together but orders no memory.
template <bool kPlanted>
__global__ void shuffle_as_a_barrier(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    tile[threadIdx.x] = in[threadIdx.x];
    const float one = __shfl_sync(kFullMask, 1.0f, 0);
    if (!kPlanted) __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1] * one;
}

template <bool kPlanted>
__global__ void divergent_barrier(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    tile[threadIdx.x] = in[threadIdx.x];
    if (kPlanted) {
        if (threadIdx.x < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

template <bool kPlanted>
__global__ void early_return_before_a_barrier(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    const bool has_row = static_cast<int>(threadIdx.x) < n;
    if (kPlanted && !has_row) return;
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (has_row) out[threadIdx.x] = tile[n - 1 - static_cast<int>(threadIdx.x)];
}

template <bool kPlanted>
__global__ void barrier_that_one_warp_skips(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    tile[threadIdx.x] = in[threadIdx.x];
    if (!kPlanted || threadIdx.x >= 32) __syncthreads();
    const float value = tile[kThreads - 1 - threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = value;
}

// Half a warp waits for the other half, which waits for the whole block.
template <bool kPlanted>
__global__ void barriers_that_wait_for_each_other(FAULT_ARGUMENTS) {
    if (!kPlanted || threadIdx.x < 16) __syncwarp();
    __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
}

// ---- Warp operations ------------------------------------------------------------------------------------------------

template <bool kPlanted>
__global__ void shuffle_in_a_branch(FAULT_ARGUMENTS) {
    float value = in[threadIdx.x];
    if (!kPlanted || threadIdx.x % 32 < 20) value = __shfl_xor_sync(kFullMask, value, 1);
    out[threadIdx.x] = value;
}

template <bool kPlanted>
__global__ void mask_without_the_caller(FAULT_ARGUMENTS) {
    const unsigned mask = kPlanted ? 0x0000ffffu : kFullMask;
    out[threadIdx.x] = __shfl_xor_sync(mask, in[threadIdx.x], 1);
}

template <bool kPlanted>
__global__ void shuffle_from_outside_the_mask(FAULT_ARGUMENTS) {
    float value = in[threadIdx.x];
    if (threadIdx.x % 32 < 16) {
        value = __shfl_xor_sync(0x0000ffffu, value, kPlanted ? 16 : 1);
    } else {
        value = __shfl_xor_sync(0xffff0000u, value, 1);
    }
    out[threadIdx.x] = value;
}

// ---- Alignment ------------------------------------------------------------------------------------------------------

template <bool kPlanted>
__global__ void misaligned_vector_load(FAULT_ARGUMENTS) {
    const float* row = in + 4 * threadIdx.x + (kPlanted ? 1 : 0);
    const float4 vector = load_vector<float4>(row);
    out[threadIdx.x] = vector.x;
}

// Without load_vector: left to UBSan.
template <bool kPlanted>
__global__ void misaligned_vector_cast(FAULT_ARGUMENTS) {
    const float* row = in + 4 * threadIdx.x + (kPlanted ? 1 : 0);
    const float4 vector = *reinterpret_cast<const float4*>(row);
    out[threadIdx.x] = vector.x;
}

template <bool kPlanted>
__global__ void misaligned_vector_store(FAULT_ARGUMENTS) {
    float* row = out + 4 * threadIdx.x;
    const float value = in[threadIdx.x];
    const float4 vector = make_float4(value, value, value, value);
    if (kPlanted && threadIdx.x + 1 < kThreads) row += 2;
    store_vector(row, vector);
}

// fp16 rows padded by 4 bytes: not every row starts at a multiple of 16.
template <bool kPlanted>
__global__ void misaligned_ldmatrix_row(FAULT_ARGUMENTS) {
    constexpr int kPitch = kPlanted ? 10 : 16;
    SHARED(__half, tile, [2][8][kPitch]);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int at = lane; at < 64; at += 32) tile[warp][at / 8][at % 8] = __float2half(in[at]);
    __syncwarp();
    uint32_t fragment[2];
    ldmatrix_x2(fragment, tile[warp][lane % 8]);
    out[threadIdx.x] = __half2float(__ushort_as_half(static_cast<unsigned short>(fragment[0])));
}

// ---- Asynchronous copies --------------------------------------------------------------------------------------------

// What is left out of a correct pipeline.
enum class Missing { kNothing, kWait, kCommit, kBarrier };

template <Missing kMissing>
__device__ void copy_then_use(const float* in, float* out) {
    SHARED(float, tile, [4 * kThreads]);
    copy_async<16>(tile + 4 * threadIdx.x, in + 4 * threadIdx.x);
    if (kMissing != Missing::kCommit) copy_async_commit();
    if (kMissing != Missing::kWait) copy_async_wait<0>();
    if (kMissing != Missing::kBarrier) __syncthreads();
    out[threadIdx.x] = tile[4 * (kThreads - 1 - threadIdx.x)];
}

template <bool kPlanted>
__global__ void no_wait_for_a_copy(FAULT_ARGUMENTS) {
    copy_then_use<kPlanted ? Missing::kWait : Missing::kNothing>(in, out);
}

template <bool kPlanted>
__global__ void no_commit_of_a_copy(FAULT_ARGUMENTS) {
    copy_then_use<kPlanted ? Missing::kCommit : Missing::kNothing>(in, out);
}

template <bool kPlanted>
__global__ void no_barrier_after_the_wait(FAULT_ARGUMENTS) {
    copy_then_use<kPlanted ? Missing::kBarrier : Missing::kNothing>(in, out);
}

template <bool kPlanted>
__global__ void wait_for_too_few_groups(FAULT_ARGUMENTS) {
    SHARED(float, tile, [2][kThreads]);
    copy_async<4>(&tile[0][threadIdx.x], in + threadIdx.x);
    copy_async_commit();
    copy_async<4>(&tile[1][threadIdx.x], in + kThreads + threadIdx.x);
    copy_async_commit();
    copy_async_wait<(kPlanted ? 1 : 0)>();
    __syncthreads();
    out[threadIdx.x] = tile[0][threadIdx.x] + tile[1][threadIdx.x];
}

template <bool kPlanted>
__global__ void misaligned_copy(FAULT_ARGUMENTS) {
    SHARED(float, tile, [4 * kThreads]);
    copy_async<16>(tile + 4 * threadIdx.x, in + 4 * threadIdx.x + (kPlanted ? 2 : 0));
    copy_async_commit();
    copy_async_wait<0>();
    out[threadIdx.x] = tile[4 * threadIdx.x];
}

template <bool kPlanted>
__global__ void copy_to_global_memory(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    copy_async<4>(kPlanted ? out + threadIdx.x : tile + threadIdx.x, in + threadIdx.x);
    copy_async_commit();
    copy_async_wait<0>();
    if (!kPlanted) out[threadIdx.x] = tile[threadIdx.x];
}

template <bool kPlanted>
__global__ void copy_from_beyond_the_end(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    const bool in_range = static_cast<int>(threadIdx.x) < n;
    copy_async<4>(tile + threadIdx.x, in + threadIdx.x, kPlanted || in_range);
    copy_async_commit();
    copy_async_wait<0>();
    out[threadIdx.x] = in_range ? tile[threadIdx.x] : 0.0f;
}

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

// What is left out of a ring of two slots that one warp fills and another empties, n times.
enum class Ring { kWhole, kNoInit, kNoWaitForSpace, kNoWaitForData, kNoArrival };

template <Ring kRing>
__device__ void fill_and_empty(const float* in, float* out, int n) {
    SHARED(float, slots, [2][kWarpSize]);
    SHARED(uint64_t, full, [2]);
    SHARED(uint64_t, empty, [2]);
    if (threadIdx.x < 2) {
        barrier_init(&full[threadIdx.x], kWarpSize);
        if (kRing != Ring::kNoInit) barrier_init(&empty[threadIdx.x], kWarpSize);
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sum = 0.0f;
    for (int step = 0; step < n; ++step) {
        const int slot = step % 2;
        const uint32_t parity = static_cast<uint32_t>(step / 2 % 2);
        if (threadIdx.x < kWarpSize) {
            if (kRing != Ring::kNoWaitForSpace) barrier_wait(&empty[slot], parity ^ 1);
            slots[slot][lane] = in[step * kWarpSize + lane];
            if (kRing != Ring::kNoArrival) barrier_arrive(&full[slot]);
        } else {
            if (kRing != Ring::kNoWaitForData) barrier_wait(&full[slot], parity);
            sum += slots[slot][kWarpSize - 1 - lane];
            barrier_arrive(&empty[slot]);
        }
    }
    if (threadIdx.x >= kWarpSize) out[lane] = sum;
}

template <bool kPlanted>
__global__ void barrier_without_init(FAULT_ARGUMENTS) {
    fill_and_empty<kPlanted ? Ring::kNoInit : Ring::kWhole>(in, out, n);
}

template <bool kPlanted>
__global__ void ring_filled_without_waiting(FAULT_ARGUMENTS) {
    fill_and_empty<kPlanted ? Ring::kNoWaitForSpace : Ring::kWhole>(in, out, n);
}

template <bool kPlanted>
__global__ void ring_emptied_without_waiting(FAULT_ARGUMENTS) {
    fill_and_empty<kPlanted ? Ring::kNoWaitForData : Ring::kWhole>(in, out, n);
}

template <bool kPlanted>
__global__ void ring_without_arrival(FAULT_ARGUMENTS) {
    fill_and_empty<kPlanted ? Ring::kNoArrival : Ring::kWhole>(in, out, n);
}

// ---- Values ---------------------------------------------------------------------------------------------------------

template <bool kPlanted>
__global__ void read_before_any_write(FAULT_ARGUMENTS) {
    SHARED(float, sums, [kThreads]);
    if (!kPlanted) sums[threadIdx.x] = 0.0f;
    sums[threadIdx.x] += in[threadIdx.x];
    out[threadIdx.x] = sums[threadIdx.x];
}

// The last tile is partial, and the rows of the tile before it are still in shared memory.
template <bool kPlanted>
__global__ void rows_left_from_the_last_tile(FAULT_ARGUMENTS) {
    SHARED(float, tile, [kThreads]);
    float sum = 0.0f;
    for (int first = 0; first < n; first += kThreads) {
        const int at = first + static_cast<int>(threadIdx.x);
        if (at < n) {
            tile[threadIdx.x] = in[at];
        } else if (!kPlanted) {
            tile[threadIdx.x] = 0.0f;
        }
        __syncthreads();
        for (int row = 0; row < kThreads; ++row) sum += tile[row];
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// Both blocks write the same element (the same value, so that nothing but the race shows).
template <bool kPlanted>
__global__ void two_blocks_write_one_row(FAULT_ARGUMENTS) {
    __syncthreads();
    const int row = kPlanted ? static_cast<int>(threadIdx.x)
                             : static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    out[row] = in[threadIdx.x];
    if (kPlanted) out[kThreads + row] = in[threadIdx.x];
}

// ---- The list -------------------------------------------------------------------------------------------------------

struct Fault {
    const char* name;
    int (*run)(bool planted);
};

float next_of(int at) { return static_cast<float>(at + 1 == kThreads ? 1 : at + 2); }
float reversed(int at) { return static_cast<float>(kThreads - at); }
float neighbour(int at) { return static_cast<float>((at ^ 1) + 1); }
float ring_sum(int at) { return static_cast<float>(10 * kWarpSize - 4 * at); }
float same(int at) { return static_cast<float>(at + 1); }

// A partial tile: 40 elements beyond a whole one.
constexpr int kPartial = kThreads + 40;

#define FAULT_ENTRY(name, in_count, out_count, n, shared_bytes, expected, ...)                                        \
    {#name, [](bool planted) {                                                                                        \
         const std::vector<float> in = counting(in_count);                                                            \
         return verdict(planted ? name<true> : name<false>, in, out_count, n, shared_bytes, expected, ##__VA_ARGS__); \
     }}

constexpr Fault kFaults[] = {
    FAULT_ENTRY(read_beyond_a_partial_tile, kPartial, kThreads, kPartial, 0,
                [](int at) { return static_cast<float>(at + 1) + (at < 40 ? static_cast<float>(at + 65) : 0.0f); }),
    FAULT_ENTRY(overrun_shared_memory, kThreads, kThreads, 0, 0, next_of),
    FAULT_ENTRY(overrun_dynamic_shared_memory, kThreads, kThreads, 0, 2 * DynamicShared::bytes<float>(kThreads),
                next_of),
    FAULT_ENTRY(take_more_shared_memory_than_launched, kThreads, kThreads, 0, DynamicShared::bytes<float>(kThreads),
                same),
    FAULT_ENTRY(no_barrier_before_use, kThreads, kThreads, 0, 0, reversed),
    FAULT_ENTRY(no_barrier_before_overwrite, kThreads, kThreads, 3, 0, [](int at) { return 3 * reversed(at) + 3; }),
    FAULT_ENTRY(no_warp_barrier, kThreads, kThreads, 0, 0, neighbour),
    FAULT_ENTRY(shuffle_as_a_barrier, kThreads, kThreads, 0, 0, neighbour),
    FAULT_ENTRY(divergent_barrier, kThreads, kThreads, 0, 0, reversed),
    FAULT_ENTRY(early_return_before_a_barrier, kThreads, 40, 40, 0, [](int at) { return static_cast<float>(40 - at); }),
    FAULT_ENTRY(barrier_that_one_warp_skips, kThreads, kThreads, 0, 0, reversed),
    FAULT_ENTRY(barriers_that_wait_for_each_other, kThreads, kThreads, 0, 0, same),
    FAULT_ENTRY(shuffle_in_a_branch, kThreads, kThreads, 0, 0, neighbour),
    FAULT_ENTRY(mask_without_the_caller, kThreads, kThreads, 0, 0, neighbour),
    FAULT_ENTRY(shuffle_from_outside_the_mask, kThreads, kThreads, 0, 0, neighbour),
    FAULT_ENTRY(misaligned_vector_load, 4 * kThreads + 4, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * at + 1); }),
    FAULT_ENTRY(misaligned_vector_cast, 4 * kThreads + 4, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * at + 1); }),
    FAULT_ENTRY(misaligned_vector_store, kThreads, 4 * kThreads, 0, 0,
                [](int at) { return static_cast<float>(at / 4 + 1); }),
    FAULT_ENTRY(misaligned_ldmatrix_row, kThreads, kThreads, 0, 0,
                [](int at) { return static_cast<float>(at % 32 / 4 * 8 + 2 * (at % 4) + 1); }),
    FAULT_ENTRY(no_wait_for_a_copy, 4 * kThreads, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * (kThreads - 1 - at) + 1); }),
    FAULT_ENTRY(no_commit_of_a_copy, 4 * kThreads, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * (kThreads - 1 - at) + 1); }),
    FAULT_ENTRY(no_barrier_after_the_wait, 4 * kThreads, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * (kThreads - 1 - at) + 1); }),
    FAULT_ENTRY(wait_for_too_few_groups, 2 * kThreads, kThreads, 0, 0,
                [](int at) { return static_cast<float>(2 * at + 2 + kThreads); }),
    FAULT_ENTRY(misaligned_copy, 4 * kThreads + 4, kThreads, 0, 0,
                [](int at) { return static_cast<float>(4 * at + 1); }),
    FAULT_ENTRY(copy_to_global_memory, kThreads, kThreads, 0, 0, same),
    FAULT_ENTRY(copy_from_beyond_the_end, 40, kThreads, 40, 0, [](int at) { return at < 40 ? same(at) : 0.0f; }),
    FAULT_ENTRY(barrier_without_init, 4 * kWarpSize, kWarpSize, 4, 0, ring_sum),
    FAULT_ENTRY(ring_filled_without_waiting, 4 * kWarpSize, kWarpSize, 4, 0, ring_sum),
    FAULT_ENTRY(ring_emptied_without_waiting, 4 * kWarpSize, kWarpSize, 4, 0, ring_sum),
    FAULT_ENTRY(ring_without_arrival, 4 * kWarpSize, kWarpSize, 4, 0, ring_sum),
    FAULT_ENTRY(read_before_any_write, kThreads, kThreads, 0, 0, same),
    FAULT_ENTRY(rows_left_from_the_last_tile, kPartial, kThreads, kPartial, 0,
                [](int) { return kPartial * (kPartial + 1) / 2.0f; }),
    FAULT_ENTRY(
        two_blocks_write_one_row, kThreads, 2 * kThreads, 0, 0,
        [](int at) { return static_cast<float>(at % kThreads + 1); }, 2),
};

}  // namespace

int main(int argc, char** argv) {
    for (const Fault& fault : kFaults) {
        if (argc == 3 && std::strcmp(argv[1], fault.name) == 0) return fault.run(std::strcmp(argv[2], "planted") == 0);
    }
    std::printf("usage: planted_faults NAME clean|planted, with NAME one of\n");
    for (const Fault& fault : kFaults) std::printf("%s\n", fault.name);
    return 2;
}
