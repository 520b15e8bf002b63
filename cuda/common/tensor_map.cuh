// The tensor copy engine of sm_90: boxes of a tensor's rows into shared memory, by one thread's one instruction each.
// No host version: rows whose files include this say host_exempt.
#pragma once

#include <cuda.h>

#include "common/barriers.cuh"

namespace tilerank {

// Describes the rows of one (sequence, head, token) tensor of 16-bit elements to the copy engine. A kernel takes it as
// a `const __grid_constant__` parameter.
using TensorMap = CUtensorMap;

// Boxes of `rows` tokens x `columns` columns, which take 32, 64 or 128 bytes a row, swizzled by that width. Rows that
// the tensor lacks are zeros. False where the driver or the strides do not allow a map: addresses and strides are
// multiples of 16 bytes.
inline bool make_tensor_map(TensorMap* map, const void* begin, int32_t dtype, int64_t head_dim, int64_t tokens,
                            int64_t heads, int64_t batch, int64_t token_stride, int64_t head_stride,
                            int64_t batch_stride, int rows, int columns) {
    using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
            cudaSuccess) {
            cudaGetLastError();
            return Encode{nullptr};
        }
        return reinterpret_cast<Encode>(function);
    }();
    if (encode == nullptr || tokens < 1) return false;
    constexpr uint64_t kElementBytes = 2;
    const auto stride = [](int64_t elements, int64_t extent) {  // of one sequence or head it does not matter
        return extent > 1 ? static_cast<cuuint64_t>(elements) * kElementBytes : cuuint64_t{16};
    };
    if (token_stride < 0 || head_stride < 0 || batch_stride < 0) return false;
    const cuuint64_t extents[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(tokens),
                                   static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
    const cuuint64_t strides[3] = {stride(token_stride, tokens), stride(head_stride, heads),
                                   stride(batch_stride, batch)};
    const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUtensorMapDataType type =
        dtype == TILERANK_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode(map, type, 4, const_cast<void*>(begin), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The copy engine reads a map before it can copy by it: this starts that.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Arrives, and makes the phase last until that many bytes have come by copies that name the barrier.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
}

// Starts the copy of one box, whose first element is at (sequence, head, token, column), to a multiple of 128 bytes in
// shared memory; by one thread.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int column, int token, int head,
                                         int sequence, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(column), "r"(token), "r"(head), "r"(sequence), "r"(shared_address(barrier))
        : "memory");
#else
    __trap();
#endif
}

// Makes the phase last until that many bytes have come, without arriving.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
}

// Starts the copy of one box from shared memory, the other way round; by one thread. What others wrote there they have
// fenced (fence_async_proxy). Rows beyond the tensor are left out.
__device__ __forceinline__ void store_box(const void* shared, const TensorMap& map, int column, int token, int head,
                                          int sequence) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(&map),
        "r"(shared_address(shared)), "r"(column), "r"(token), "r"(head), "r"(sequence)
        : "memory");
#else
    __trap();
#endif
}

// Until the copy engine has read all that this thread had it store.
__device__ __forceinline__ void wait_for_stores_to_read() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#else
    __trap();
#endif
}

// Four 8x8 matrices of a warp's fragments to rows in shared memory: ldmatrix_x4 the other way round.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&words)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#else
    __trap();
#endif
}

}  // namespace tilerank
