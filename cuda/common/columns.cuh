// What kernels share whose tokens are a product's columns (sm_90a): a fragment's two by two eights, of tokens and of the
// product's rows, as rows of tokens in shared memory, and from there to global memory.
#pragma once

#include "common/activation.cuh"
#include "common/mma16.cuh"
#include "common/tma.cuh"

namespace tilerank {

constexpr int kPartRowBytes = 128;  // of a token, in a part of 64 columns

// Where ldmatrix and stmatrix, transposed, want a lane's row of the first 16 tokens of a part and of the 16 columns that are
// a warp's of 64; kPairBytes further on are the next 16.
__device__ __forceinline__ int eights_offset(int warp, int lane) {
    return swizzled_offset<kPartRowBytes>(lane / 16 * 8 + lane % 8, warp * 32 + (lane / 8 & 1) * 16);
}
constexpr int kPairBytes = 16 * kPartRowBytes;

// The same of a pair of eights of N tokens; beyond the last eight lanes name those before once more.
template <int N>
__device__ __forceinline__ int pair_offset(int offset, int pair, int lane) {
    const bool is_beyond = N % 16 != 0 && pair * 16 + 16 > N && lane >= 16;
    return offset + pair * kPairBytes - (is_beyond ? 8 * kPartRowBytes : 0);
}

// words: of eight tokens by eight columns each, tokens first in pairs.
template <int N>
__device__ __forceinline__ void store_eights(unsigned char* part, int offset, int pair, int lane,
                                             const uint32_t (&words)[4]) {
    const uint32_t row = shared_address(part + pair_offset<N>(offset, pair, lane));
    if (pair * 16 + 16 <= N) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(words[0]),
                     "r"(words[1])
                     : "memory");
    }
}

// A warp's 16 columns of all N tokens, with what follows the product, to a part.
template <typename Element, int N, bool kGelu>
__device__ __forceinline__ void stage_tokens(const Fragment (&sums)[N / 8], const float (&bias)[2], unsigned char* part,
                                             int warp, int lane) {
    const auto word = [&](int eight, int half) {
        if (eight >= N / 8) return 0u;
        float first = sums[eight][half * 2] + bias[half], second = sums[eight][half * 2 + 1] + bias[half];
        if (kGelu) first = gelu_approx(first), second = gelu_approx(second);
        return pack16<Element>(first, second);
    };
    const int offset = eights_offset(warp, lane);
#pragma unroll
    for (int pair = 0; pair < (N + 15) / 16; ++pair) {
        const int eight = pair * 2;
        const uint32_t words[4] = {word(eight, 0), word(eight, 1), word(eight + 1, 0), word(eight + 1, 1)};
        store_eights<N>(part, offset, pair, lane, words);
    }
}

// Adds up over the eight lanes that have other columns: sums[i] is of token 8 (i / 2) + 2 (lane % 4) + i % 2. Of the four
// the lane gets that back whose i is lane / 8.
__device__ __forceinline__ float sum_over_columns(const float (&sums)[4], int lane) {
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
    float kept[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sent = upper ? sums[i] : sums[i + 2];
        kept[i] = (upper ? sums[i + 2] : sums[i]) + __shfl_xor_sync(kFullMask, sent, 16);
    }
    const float sent = odd ? kept[0] : kept[1];
    const float sum = (odd ? kept[1] : kept[0]) + __shfl_xor_sync(kFullMask, sent, 8);
    return sum + __shfl_xor_sync(kFullMask, sum, 4);
}

// ---- Copies from shared memory by one thread ----

// A box of `map` from (row, column) on, as far as it exists.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* shared, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(shared)), "r"(column), "r"(row)
                 : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all that the thread has committed has been read, or lies in global memory.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Among kThreads threads, whole warps, that use this name.
template <int kThreads>
__device__ __forceinline__ void barrier_named(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

}  // namespace tilerank
