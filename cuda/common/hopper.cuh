// What the attention block's kernels for Hopper (sm_90a) need beyond wgmma.cuh: tensor maps and the bulk copies that go
// by them, products whose factors both lie in shared memory, barriers of a warpgroup, rows written in 16-byte parts.
#pragma once

#include "common/barriers.cuh"
#include "common/mma16.cuh"
#include "common/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

namespace tilerank {

// ---- Tensor maps ----

// A matrix in global memory as the copy engine knows it: what CUDA calls CUtensorMap, declared here because its header
// belongs to the driver, which the library is not linked to.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Describes `rows` x `columns` elements, rows `stride` elements apart, copied in boxes of box_rows rows of 128 bytes that
// come to lie swizzled; what is outside of the matrix arrives as zeros. base and stride: multiples of 16 bytes. False
// when the driver refuses.
inline bool describe_matrix(TensorMap* map, int32_t dtype, const void* base, int64_t rows, int64_t columns,
                            int64_t stride, int box_rows) {
    using Encode = int (*)(TensorMap*, int type, uint32_t rank, void* base, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        constexpr unsigned kSince = 12000;  // the CUDA version whose cuTensorMapEncodeTiled this is
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found) !=
                cudaSuccess ||
            found != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            function = nullptr;
        }
        return reinterpret_cast<Encode>(function);
    }();
    if (encode == nullptr) return false;
    constexpr int kFp16 = 6;  // CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    constexpr int kFp32 = 7;
    constexpr int kBf16 = 9;
    constexpr int kNoInterleave = 0;
    constexpr int kSwizzle128 = 3;
    constexpr int kPromote256 = 3;
    constexpr int kFillZeros = 0;
    const uint64_t sizes[2] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)};
    const uint32_t bytes = dtype == TILERANK_FP32 ? 4 : 2;
    const uint64_t strides[1] = {static_cast<uint64_t>(stride) * bytes};
    const uint32_t box[2] = {128 / bytes, static_cast<uint32_t>(box_rows)};
    const uint32_t steps[2] = {1, 1};
    const int type = dtype == TILERANK_FP32 ? kFp32 : dtype == TILERANK_FP16 ? kFp16 : kBf16;
    return encode(map, type, 2, const_cast<void*>(base), sizes, strides, box, steps,
                  kNoInterleave, kSwizzle128, kPromote256, kFillZeros) == 0;
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    TILERANK_HOPPER("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts to copy the box that begins at (row, column). target: 1024-byte aligned. By one thread; the barrier counts its
// bytes.
__device__ __forceinline__ void copy_box(void* target, const TensorMap& map, int64_t row, int64_t column,
                                         uint64_t* barrier) {
    TILERANK_HOPPER(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(target)),
        "l"(&map), "r"(static_cast<int>(column)), "r"(static_cast<int>(row)), "r"(shared_address(barrier))
        : "memory");
}

// Arrives, and makes the barrier wait for that many bytes too.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
    TILERANK_HOPPER("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(
                        shared_address(barrier)),
                    "r"(bytes)
                    : "memory");
}

// Ends a barrier's life, so that its place may become another one.
__device__ __forceinline__ void barrier_end(uint64_t* barrier) {
    TILERANK_HOPPER("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Ordinary writes to global memory and the copy engine's reads of it see each other's order.
__device__ __forceinline__ void fence_async_proxy_global() { TILERANK_HOPPER("fence.proxy.async;" ::: "memory"); }

// Where all that arrive at the barrier wait for each other, each at a place of its own in the code: roles of warps meet
// so. A bar.sync is for one place, and synccheck holds kernels to that.
__device__ __forceinline__ void barrier_meet(uint64_t* barrier, uint32_t parity) {
    barrier_arrive(barrier);
    barrier_wait(barrier, parity);
}

// ---- Dependent launches ----

// Until the launch before this one is over and its writes are seen. Without a dependent launch nothing to wait for.
__device__ __forceinline__ void wait_for_launch_before() { TILERANK_HOPPER("griddepcontrol.wait;" ::: "memory"); }
// The dependent launch may begin, as far as there is room.
__device__ __forceinline__ void let_next_launch_begin() {
    TILERANK_HOPPER("griddepcontrol.launch_dependents;" ::: "memory");
}

// launch() of a kernel that calls wait_for_launch_before: it may begin while the one before it is still running.
template <typename... Parameters>
int launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                     typename Exactly<Parameters>::type... arguments) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error == cudaSuccess) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
        config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &attribute, config.numAttrs = 1;
        void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
        error = cudaLaunchKernelExC(&config, function, pointers);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int>(error);
}

// ---- Warpgroups ----

// A barrier of `threads` threads; ids 1 to 15 are free beside __syncthreads().
__device__ __forceinline__ void group_barrier(int id, int threads) {
    TILERANK_HOPPER("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives there without waiting for the others.
__device__ __forceinline__ void group_arrive(int id, int threads) {
    TILERANK_HOPPER("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#define TILERANK_SUMS(block) "+f"(block[0]), "+f"(block[1]), "+f"(block[2]), "+f"(block[3])
#define TILERANK_WGMMA_TYPED(shape, type, sums, factors, add, transposed, ...)                                      \
    TILERANK_HOPPER("{\n.reg .pred add;\nsetp.ne.b32 add, " add                                                     \
                    ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" sums "}, " factors        \
                    ", add, 1, 1, 0, " transposed ";\n}\n"                                                          \
                    : __VA_ARGS__                                                                                    \
                    : "l"(a), "l"(b), "r"(add_flag), "n"(kTransposed ? 1 : 0))
#define TILERANK_WGMMA(shape, sums, factors, add, transposed, ...)                        \
    if constexpr (std::is_same_v<Element, __half>) {                                      \
        TILERANK_WGMMA_TYPED(shape, "f16", sums, factors, add, transposed, __VA_ARGS__);  \
    } else {                                                                              \
        TILERANK_WGMMA_TYPED(shape, "bf16", sums, factors, add, transposed, __VA_ARGS__); \
    }

template <int N>
struct SharedWgmma;

template <>
struct SharedWgmma<64> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[8][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n64k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
                       "%32, %33", "%34", "%35",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]),
                       TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]));
    }
};

template <>
struct SharedWgmma<128> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[16][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n128k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                       "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                       "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
                       "%64, %65", "%66", "%67",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]),
                       TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]),
                       TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]));
    }
};

template <>
struct SharedWgmma<192> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[24][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n192k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                       "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                       "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                       "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                       "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
                       "%96, %97", "%98", "%99",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]),
                       TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]),
                       TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]),
                       TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]),
                       TILERANK_SUMS(sums[16]), TILERANK_SUMS(sums[17]),
                       TILERANK_SUMS(sums[18]), TILERANK_SUMS(sums[19]),
                       TILERANK_SUMS(sums[20]), TILERANK_SUMS(sums[21]), TILERANK_SUMS(sums[22]), TILERANK_SUMS(sums[23]));
    }
};

template <>
struct SharedWgmma<256> {
    template <typename Element, bool kTransposed>
    static __device__ __forceinline__ void run(float (&sums)[32][4], uint64_t a, uint64_t b, int add_flag) {
        TILERANK_WGMMA("m64n256k16",
                       "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                       "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                       "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                       "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                       "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                       "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                       "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                       "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127",
                       "%128, %129", "%130", "%131",
                       TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]),
                       TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
                       TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]),
                       TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
                       TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]),
                       TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
                       TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]),
                       TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15]),
                       TILERANK_SUMS(sums[16]), TILERANK_SUMS(sums[17]),
                       TILERANK_SUMS(sums[18]), TILERANK_SUMS(sums[19]),
                       TILERANK_SUMS(sums[20]), TILERANK_SUMS(sums[21]),
                       TILERANK_SUMS(sums[22]), TILERANK_SUMS(sums[23]),
                       TILERANK_SUMS(sums[24]), TILERANK_SUMS(sums[25]),
                       TILERANK_SUMS(sums[26]), TILERANK_SUMS(sums[27]),
                       TILERANK_SUMS(sums[28]), TILERANK_SUMS(sums[29]), TILERANK_SUMS(sums[30]), TILERANK_SUMS(sums[31]));
    }
};

#undef TILERANK_WGMMA
#undef TILERANK_WGMMA_TYPED
#undef TILERANK_SUMS

// sums (64 x N, fp32) = a b, or += a b where add_flag is not 0. a: 64 x 16, its rows in shared memory; b as in
// wgmma_k16.
template <typename Element, int N, bool kTransposed>
__device__ __forceinline__ void wgmma_shared_k16(float (&sums)[N / 8][4], uint64_t a, uint64_t b, int add_flag) {
    SharedWgmma<N>::template run<Element, kTransposed>(sums, a, b, add_flag);
}

#undef TILERANK_HOPPER

// ---- Rows of sums in 16-byte parts ----

// Lane t of a quad holds columns 2t and 2t + 1 of four neighbouring blocks of 8 columns, packed; it gets all 8 columns
// of block t instead.
__device__ __forceinline__ uint4 quad_transpose(const uint32_t (&of_block)[4], int lane) {
    const int t = lane % 4;
    uint32_t part[4];
#pragma unroll
    for (int distance = 0; distance < 4; ++distance) {
        const int to = t ^ distance;  // the lane that wants this block, and that has what this lane wants
        const uint32_t sent = to == 0 ? of_block[0] : to == 1 ? of_block[1] : to == 2 ? of_block[2] : of_block[3];
        const uint32_t got = distance == 0 ? sent : __shfl_xor_sync(kFullMask, sent, distance);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (to == i) part[i] = got;
        }
    }
    return {part[0], part[1], part[2], part[3]};
}

}  // namespace tilerank
