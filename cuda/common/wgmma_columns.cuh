// Products of a warpgroup whose factors both lie in shared memory, for numbers of columns in small steps (sm_90a).
#pragma once

#include "common/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

namespace tilerank {

#define TILERANK_SUMS(block) "+f"(block[0]), "+f"(block[1]), "+f"(block[2]), "+f"(block[3])
#define TILERANK_WGMMA_TYPED(shape, type, sums, factors, add, ...)                                          \
    TILERANK_HOPPER("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape \
                    ".f32." type "." type " {" sums "}, " factors ", add, 1, 1, 0, 0;\n}\n"                 \
                    : __VA_ARGS__                                                                           \
                    : "l"(a), "l"(b), "r"(add_flag))
#define TILERANK_WGMMA(shape, sums, factors, add, ...)                       \
    if constexpr (std::is_same_v<Element, __half>) {                         \
        TILERANK_WGMMA_TYPED(shape, "f16", sums, factors, add, __VA_ARGS__); \
    } else {                                                                 \
        TILERANK_WGMMA_TYPED(shape, "bf16", sums, factors, add, __VA_ARGS__); \
    }

template <int N>
struct ColumnsWgmma;

template <>
struct ColumnsWgmma<48> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[6][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n48k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23",
                       "%24, %25", "%26",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]));
    }
};

template <>
struct ColumnsWgmma<72> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[9][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n72k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35",
                       "%36, %37", "%38",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]));
    }
};

template <>
struct ColumnsWgmma<80> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[10][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n80k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39",
                       "%40, %41", "%42",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]));
    }
};

template <>
struct ColumnsWgmma<96> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[12][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n96k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
                       "%48, %49", "%50",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]),
                       TILERANK_SUMS(sums[11]));
    }
};

template <>
struct ColumnsWgmma<128> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[16][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n128k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
                       "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                       "%64, %65", "%66",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]),
                       TILERANK_SUMS(sums[11]), TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]),
                       TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]));
    }
};

template <>
struct ColumnsWgmma<136> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[17][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n136k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
                       "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67",
                       "%68, %69", "%70",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]),
                       TILERANK_SUMS(sums[11]), TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]),
                       TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]), TILERANK_SUMS(sums[16]));
    }
};

template <>
struct ColumnsWgmma<144> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[18][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n144k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
                       "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
                       "%70, %71",
                       "%72, %73", "%74",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]),
                       TILERANK_SUMS(sums[11]), TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]),
                       TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]), TILERANK_SUMS(sums[16]),
                       TILERANK_SUMS(sums[17]));
    }
};

#undef TILERANK_WGMMA
#undef TILERANK_WGMMA_TYPED
#undef TILERANK_SUMS
#undef TILERANK_HOPPER

// sums (64 x N, fp32) = a b^T, or += where add_flag is not 0: a is 64 rows, b N rows of 16 columns, both where their
// descriptors (tile_descriptor<128>) say. A warp's sums are N / 8 fragments of m16n8k16, its 16 rows of the 64.
template <typename Element, int N>
__device__ __forceinline__ void wgmma_columns_k16(float (&sums)[N / 8][4], uint64_t a, uint64_t b, int add_flag) {
    ColumnsWgmma<N>::template run<Element>(sums, a, b, add_flag);
}

}  // namespace tilerank
