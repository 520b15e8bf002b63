// wgmma (sm_90a): products of a warpgroup's 64 rows in registers with a matrix in shared memory, fp16 in, fp32 out.
// The host build has none of this: rows that use it say host_exempt.
#pragma once

#include "common/device.h"

#if !defined(TILERANK_HOST_BUILD)
namespace tilerank {

constexpr int kWarpgroupSize = 4 * kWarpSize;

// A matrix in shared memory whose rows are 128 bytes, their 16-byte parts permuted by the row's number modulo 8
// (panel_offset of split_fp16.cuh), eight rows in a row of atoms of 1024 bytes. start: its first byte; advance it by 32
// bytes for the next 16 columns, by 1024 for the next 8 rows.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* start) {
    constexpr uint64_t kSwizzle128 = 1ull << 62;
    constexpr uint64_t kStride = 1024 >> 4;
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(start));
    return kSwizzle128 | kStride << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// Before the first product of a row of them: what registers and shared memory hold is seen by them.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Shared memory written by this thread is seen by products that follow a barrier.
__device__ __forceinline__ void fence_shared_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Keeps the compiler from moving accesses to registers that products in flight use.
template <int Count>
__device__ __forceinline__ void hold(float (&registers)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#define TILERANK_F8(r, i) \
    "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3]), "+f"(r[i + 4]), "+f"(r[i + 5]), "+f"(r[i + 6]), "+f"(r[i + 7])

// accumulator (+)= a b. a: 16 columns of 64 rows, a warp's 16 rows as in m16n8k16; accumulator: 4 elements for every 8
// columns, as there. kTransposed: b's rows in memory are its 16 rows (else they are its columns).
template <bool kTransposed>
__device__ __forceinline__ void multiply_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : TILERANK_F8(d, 0), TILERANK_F8(d, 8), TILERANK_F8(d, 16), TILERANK_F8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(kTransposed ? 1 : 0));
}

// The same for 32 columns.
template <bool kTransposed>
__device__ __forceinline__ void multiply_64x32(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, %21;\n"
        : TILERANK_F8(d, 0), TILERANK_F8(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed ? 1 : 0));
}

#undef TILERANK_F8

}  // namespace tilerank
#endif
