// Hopper's own instructions (sm_90a): products of a warpgroup and how its warps share registers. Compiled for another
// architecture they trap. No host version: rows whose files include this say host_exempt.
#pragma once

#include <type_traits>

#include "common/device.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

namespace tilerank {

// Shared memory that ordinary stores and copies wrote becomes visible to warpgroup products.
__device__ __forceinline__ void fence_async_proxy() { TILERANK_HOPPER("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Registers of a warpgroup ----
// A block starts with the same number for all; each warpgroup then takes what it needs, first those that give some
// back.

template <int Registers>
__device__ __forceinline__ void give_registers_back() {
    TILERANK_HOPPER("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
    TILERANK_HOPPER("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- Products of a warpgroup: four warps from a multiple of four on ----

// The right factor in shared memory as rows of kRowBytes (32, 64 or 128) with the swizzle of that width: 16-byte parts
// lie at swizzled_offset. The pattern must begin at a multiple of 8 kRowBytes.
template <int kRowBytes>
__host__ __device__ constexpr int swizzled_offset(int row, int byte) {
    const int offset = row * kRowBytes + byte;
    return offset ^ ((offset >> 7 & (kRowBytes / 16 - 1)) << 4);
}

// What describes such rows to wgmma, in units of 16 bytes: where in shared memory they begin, and how far it is from
// one part of columns to the next.
template <int kRowBytes>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t begin, uint32_t stride) {
    constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
    constexpr uint32_t kHigh = 8 * kRowBytes >> 4 | kSwizzle << 30;
    return static_cast<uint64_t>(kHigh) << 32 | (begin + (stride << 16));
}

// Before a warp's first product and after it has touched registers of one.
__device__ __forceinline__ void wgmma_fence() { TILERANK_HOPPER("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { TILERANK_HOPPER("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    TILERANK_HOPPER("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

#define TILERANK_SUMS(block) "+f"(block[0]), "+f"(block[1]), "+f"(block[2]), "+f"(block[3])
#define TILERANK_WGMMA_TYPED(shape, type, sums, factors, add, transposed, ...)                                     \
    TILERANK_HOPPER("{\n.reg .pred add;\nsetp.ne.b32 add, " add                                                       \
                 ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" sums "}, " factors          \
                 ", add, 1, 1, " transposed ";\n}\n"                                                               \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add_flag), "n"(kTransposed ? 1 : 0))
#define TILERANK_WGMMA(shape, sums, factors, add, transposed, ...)                        \
    if constexpr (std::is_same_v<Element, __half>) {                                      \
        TILERANK_WGMMA_TYPED(shape, "f16", sums, factors, add, transposed, __VA_ARGS__);  \
    } else {                                                                              \
        TILERANK_WGMMA_TYPED(shape, "bf16", sums, factors, add, transposed, __VA_ARGS__); \
    }

template <int N>
struct Wgmma;

template <>
struct Wgmma<32> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[4][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n32k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                       "{%16, %17, %18, %19}, %20", "%21", "%22",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]));
    }
};

template <>
struct Wgmma<40> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[5][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n40k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19",
                       "{%20, %21, %22, %23}, %24", "%25", "%26",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]));
    }
};

template <>
struct Wgmma<64> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n64k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                       "{%32, %33, %34, %35}, %36", "%37", "%38",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]));
    }
};

template <>
struct Wgmma<72> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[9][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n72k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                       "%34, %35",
                       "{%36, %37, %38, %39}, %40", "%41", "%42",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]), TILERANK_SUMS(sums[8]));
    }
};

template <>
struct Wgmma<80> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[10][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n80k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                       "%34, %35, %36, %37, %38, %39",
                       "{%40, %41, %42, %43}, %44", "%45", "%46",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]), TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]));
    }
};

template <>
struct Wgmma<96> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[12][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n96k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                       "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                       "{%48, %49, %50, %51}, %52", "%53", "%54",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]), TILERANK_SUMS(sums[8]),
                       TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]));
    }
};

template <>
struct Wgmma<128> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[16][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n128k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                       "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                       "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                       "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                       "{%64, %65, %66, %67}, %68", "%69", "%70",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]), TILERANK_SUMS(sums[8]),
                       TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]),
                       TILERANK_SUMS(sums[15]));
    }
};

template <>
struct Wgmma<192> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[24][4], const uint32_t (&a)[4], uint64_t b,
                                               int add_flag) {
        TILERANK_WGMMA("m64n192k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
                       "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
                       "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "
                       "%87, %88, %89, %90, %91, %92, %93, %94, %95",
                       "{%96, %97, %98, %99}, %100", "%101", "%102",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]),
                       TILERANK_SUMS(sums[3]), TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]), TILERANK_SUMS(sums[8]),
                       TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]),
                       TILERANK_SUMS(sums[15]), TILERANK_SUMS(sums[16]), TILERANK_SUMS(sums[17]),
                       TILERANK_SUMS(sums[18]), TILERANK_SUMS(sums[19]), TILERANK_SUMS(sums[20]),
                       TILERANK_SUMS(sums[21]), TILERANK_SUMS(sums[22]), TILERANK_SUMS(sums[23]));
    }
};

#undef TILERANK_WGMMA
#undef TILERANK_WGMMA_TYPED
#undef TILERANK_SUMS
#undef TILERANK_HOPPER

// sums (64 x N, fp32) = a b, or += a b where add_flag is not 0. a: 64 x 16 in registers, a warp's 16 rows as in
// m16n8k16; b: 16 x N in shared memory; its rows there are columns of b (N of them), or where kTransposed rows of b.
// A warp's sums are N / 8 fragments of m16n8k16. They and a belong to the product until wgmma_wait.
template <typename Element, int N, bool kTransposed>
__device__ __forceinline__ void wgmma_k16(float (&sums)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int add_flag) {
    Wgmma<N>::template run<Element, kTransposed>(sums, a, b, add_flag);
}

}  // namespace tilerank
