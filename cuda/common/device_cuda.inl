// The nvcc side of device.h: thin shells around CUDA calls and inline PTX. Included by device.h only.
#pragma once

namespace tilerank {

inline const char* launch_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           typename Exactly<Parameters>::type... arguments) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaSuccess;
    if (shared_bytes > kDefaultSharedLimit) {
        error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    }
    if (error == cudaSuccess) {
        void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
        error = cudaLaunchKernel(function, grid, block, pointers, shared_bytes, static_cast<cudaStream_t>(stream));
    }
    // The caller learns of a refused launch from this status; left in place it would also fail their next CUDA call.
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int>(error);
}

template <typename... Parameters>
int launch_overlapped(bool overlap, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                      void* stream, typename Exactly<Parameters>::type... arguments) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes compiled{};
    if (overlap) cudaFuncGetAttributes(&compiled, function);
    // Code for an older architecture waits for nothing, whichever GPU runs it.
    if (compiled.ptxVersion < 90) return launch(kernel, grid, block, shared_bytes, stream, arguments...);
    cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error == cudaSuccess) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = grid, config.blockDim = block;
        config.dynamicSmemBytes = shared_bytes, config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &attribute, config.numAttrs = 1;
        void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
        error = cudaLaunchKernelExC(&config, function, pointers);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int>(error);
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename Element>
__device__ __forceinline__ Element* DynamicShared::take(size_t count) {
    extern __shared__ __align__(128) unsigned char tilerank_dynamic_shared[];
    Element* start = reinterpret_cast<Element*>(tilerank_dynamic_shared + used_);
    used_ += bytes<Element>(count);
    return start;
}

template <typename Vector, typename Element>
__device__ __forceinline__ Vector load_vector(const Element* address) {
    static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
    return *reinterpret_cast<const Vector*>(address);
}

template <typename Vector, typename Element>
__device__ __forceinline__ void store_vector(Element* address, Vector value) {
    static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
    *reinterpret_cast<Vector*>(address) = value;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* source, bool in_range) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    const int source_bytes = in_range ? Bytes : 0;
    if constexpr (Bytes == 16) {  // .cg passes L1 by, which a tile used once does not need
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(source),
                     "r"(source_bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(source),
                     "n"(Bytes), "r"(source_bytes)
                     : "memory");
    }
#else
    if constexpr (Bytes == 16) {
        *static_cast<uint4*>(shared) = in_range ? *static_cast<const uint4*>(source) : uint4{0, 0, 0, 0};
    } else if constexpr (Bytes == 8) {
        *static_cast<uint2*>(shared) = in_range ? *static_cast<const uint2*>(source) : uint2{0, 0};
    } else {
        *static_cast<uint32_t*>(shared) = in_range ? *static_cast<const uint32_t*>(source) : 0u;
    }
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&fragment)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&fragment)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row)));
}

__device__ __forceinline__ void mma_m16n8k8(float (&accumulator)[4], const uint32_t (&a)[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&accumulator)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_m16n8k8(accumulator, {a[0], a[1]}, b[0]);
    mma_m16n8k8(accumulator, {a[2], a[3]}, b[1]);
#endif
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&accumulator)[4], const uint32_t (&a)[4],
                                                            const uint32_t (&b)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&accumulator)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap();
#endif
}

__device__ __forceinline__ uint32_t to_tf32(float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
#else
    __trap();
    return 0;
#endif
}

__device__ __forceinline__ float exp2_approx(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float reciprocal_approx(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

}  // namespace tilerank
