// What a matrix product of whole tiles takes beside wgmma.cuh (sm_90a): tiles copied by the tensor memory accelerator
// (TMA), shared by the blocks of a cluster, and warpgroup products with both factors in shared memory. No host version:
// rows whose files include this say host_exempt.
#pragma once

#include <cuda.h>  // the tensor map's types; the driver's function is looked up at run time

#include "common/barriers.cuh"
#include "common/wgmma.cuh"
#include "tilerank.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

namespace tilerank {

// ---- Tensor maps ----

// Describes a matrix [rows, columns] of a dtype (TILERANK_FP32, ...), stride elements a row, to the copies below: boxes
// of box_rows rows of row_bytes (64 or 128), in the swizzle of that width. Rows beyond the matrix are read as zeros. Base
// and rows must be multiples of 16 bytes. False where the driver refuses.
inline bool encode_tiles(CUtensorMap* map, const void* base, int32_t dtype, int64_t rows, int64_t columns,
                         int64_t stride, int box_rows, int row_bytes = 128) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return false;
    }
    constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                              CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    const int bytes = dtype == TILERANK_FP32 ? 4 : 2;
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * bytes};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(row_bytes / bytes), static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[] = {1, 1};
    using Encode = decltype(&cuTensorMapEncodeTiled);
    return reinterpret_cast<Encode>(address)(map, kTypes[dtype], 2, const_cast<void*>(base), sizes, strides, box, steps,
                                             CU_TENSOR_MAP_INTERLEAVE_NONE,
                                             row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// ---- Shared memory ----

// A block's dynamic shared memory, from a multiple of 1,024 on, as the swizzles need it.
__device__ __forceinline__ unsigned char* aligned_shared() {
    extern __shared__ __align__(1024) unsigned char tilerank_aligned_shared[];
    return tilerank_aligned_shared;
}

// ---- Copies by one thread; the barrier counts their bytes ----

// Announces bytes that copies will bring in this phase, and arrives.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
    TILERANK_HOPPER("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                    : "memory");
}

__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int column, int row) {
    TILERANK_HOPPER(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
        : "memory");
}

// The same to this place, and this barrier, in every block of the cluster that mask names.
__device__ __forceinline__ void copy_box_to_cluster(void* shared, const CUtensorMap* map, uint64_t* barrier, int column,
                                                    int row, uint16_t mask) {
    TILERANK_HOPPER(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "h"(mask), "r"(column), "r"(row)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    TILERANK_HOPPER("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Clusters ----

__device__ __forceinline__ int cluster_rank() {
    int rank = 0;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// Barriers that barrier_init made become visible to the cluster and to copies.
__device__ __forceinline__ void fence_barrier_init() {
    TILERANK_HOPPER("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// All threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    TILERANK_HOPPER("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same behind fence_barrier_init, where nothing else has been written: it waits for no memory.
__device__ __forceinline__ void cluster_sync_barriers() {
    TILERANK_HOPPER("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at this barrier of another block of the cluster, or of the own one: the caller has no more use for what a copy
// may overwrite. It publishes nothing that the caller wrote; releasing that to the cluster would wait for every store to
// global memory under way, at each arrival.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
    TILERANK_HOPPER(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// ---- Products of a warpgroup with both factors in shared memory ----

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
struct SharedWgmma;

template <>
struct SharedWgmma<128> {
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
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]));
    }
};

template <>
struct SharedWgmma<192> {
    template <typename Element>
    static __device__ __forceinline__ void run(float (&sums)[24][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n192k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
                       "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                       "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
                       "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
                       "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "
                       "%87, %88, %89, %90, %91, %92, %93, %94, %95",
                       "%96, %97", "%98",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]),
                       TILERANK_SUMS(sums[16]), TILERANK_SUMS(sums[17]), TILERANK_SUMS(sums[18]), TILERANK_SUMS(sums[19]),
                       TILERANK_SUMS(sums[20]), TILERANK_SUMS(sums[21]), TILERANK_SUMS(sums[22]), TILERANK_SUMS(sums[23]));
    }
};

#undef TILERANK_WGMMA
#undef TILERANK_WGMMA_TYPED
#undef TILERANK_SUMS
#undef TILERANK_HOPPER

// sums (64 x N, fp32) = a b^T, or += where add_flag is not 0: a is 64 rows, b N rows of 16 columns, both where their
// descriptors (tile_descriptor<128>) say. A warp's sums are N / 8 fragments of m16n8k16, its 16 rows of the 64.
template <typename Element, int N>
__device__ __forceinline__ void wgmma_shared_k16(float (&sums)[N / 8][4], uint64_t a, uint64_t b, int add_flag) {
    SharedWgmma<N>::template run<Element>(sums, a, b, add_flag);
}

}  // namespace tilerank
