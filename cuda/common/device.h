// The one header through which kernels reach the machine. Kernel sources include this and nothing of CUDA itself,
// so the same .cu file compiles with nvcc for GPUs and, with TILERANK_HOST_BUILD, with g++ for the emulator in
// ../host, which runs every thread of a block and checks what a GPU leaves unchecked.
//
// In kernels, use CUDA's own names (threadIdx, __syncthreads(), __syncwarp(mask), __shfl_*_sync, __ballot_sync,
// __any_sync, __all_sync, atomicAdd, __ldg, __half, __nv_bfloat16, float4, __launch_bounds__, ...) except here:
//   SHARED(float, tile, [ROWS][D]);       instead of __shared__ float tile[ROWS][D];       (16-byte aligned)
//   DynamicShared memory;                 instead of extern __shared__ char memory[];
//   launch(kernel<D>, grid, block, shared_bytes, stream, arguments...)   instead of kernel<<<...>>>(...)
//   load_vector<float4>(p), store_vector(p, value)                       instead of *reinterpret_cast<float4*>(p)
//   copy_async, ldmatrix_*, mma_*, exp2_approx, to_tf32                  instead of inline PTX
// The host build refuses __shared__ at compile time; ../host/README.md says what it checks.
// A write to shared memory that another lane reads needs __syncwarp() or __syncthreads() between: a shuffle, ldmatrix
// or mma orders nothing. All lanes that a mask names must reach the operation from the same source line.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(TILERANK_HOST_BUILD)
#include "../host/cuda_names.h"
#include "../host/runtime.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#if defined(TILERANK_HOST_BUILD)
// One exact-size heap slot a declaration (and template instantiation), refilled with NaN for every block.
#define SHARED(type, name, ...)                             \
    using name##_type = type __VA_ARGS__;                   \
    static ::tilerank::host::SharedSlot name##_slot{#name}; \
    name##_type& name = *static_cast<name##_type*>(::tilerank::host::shared_slot(name##_slot, sizeof(name##_type)))
#else
#define SHARED(type, name, ...) __shared__ __align__(16) type name __VA_ARGS__
#endif

// On the host, checked operations also take the place they are called from; kernels never pass it.
#if defined(TILERANK_HOST_BUILD)
#define TILERANK_CALLER , ::tilerank::host::Site site = ::tilerank::host::Site::here()
#else
#define TILERANK_CALLER
#endif

namespace tilerank {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// Dynamic shared memory above this needs an opt-in that launch() makes.
inline constexpr size_t kDefaultSharedLimit = 48 * 1024;

// ---- Launch ---------------------------------------------------------------------------------------------------------

// The text of an error code that launch() returned (valid until the next launch of this thread).
inline const char* launch_error_text(int error);

template <typename Type>
struct Exactly {
    using type = Type;
};

// Launches kernel on stream (a cudaStream_t as void*, null is the default stream) and returns 0, or the cudaError_t of
// a refused launch. Arguments convert to the kernel's parameter types. Never synchronises: faults inside the kernel
// show at the caller's next synchronisation. The host build runs the grid to its end and returns 1 for a fault.
template <typename... Parameters>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           typename Exactly<Parameters>::type... arguments);

// ---- Beginning while the kernel before ends (compute capability 9.0; elsewhere nothing of this has an effect) ----------

// As launch(); where overlap, the kernel may begin when every block of the one before it on the stream has called
// let_next_begin() or ended. What that one writes, or reads and this one overwrites, is touched behind
// wait_for_previous() alone, which returns when the one before has ended. Some thread must call it in any case: so the
// one before has in turn ended behind all that stood before it.
template <typename... Parameters>
int launch_overlapped(bool overlap, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                      void* stream, typename Exactly<Parameters>::type... arguments);

// By each thread that touches such memory, or in front of a barrier that it waits at. Returns at once where the launch
// overlaps nothing.
__device__ __forceinline__ void wait_for_previous();
__device__ __forceinline__ void let_next_begin();

// ---- Dynamic shared memory ------------------------------------------------------------------------------------------

// Hands out the dynamic shared memory of a block in order. Every thread constructs one and makes the same calls:
//     DynamicShared memory;
//     float* keys = memory.take<float>(kTileKeys * D);
// and the launch passes the sum of DynamicShared::bytes<float>(kTileKeys * D), one term a call.
class DynamicShared {
  public:
    static constexpr size_t kAlignment = 128;  // enough for bulk copies and 128-byte swizzles

    template <typename Element>
    __host__ __device__ static constexpr size_t bytes(size_t count) {
        return (count * sizeof(Element) + kAlignment - 1) / kAlignment * kAlignment;
    }

    template <typename Element>
    __device__ __forceinline__ Element* take(size_t count);

  private:
    size_t used_ = 0;
#if defined(TILERANK_HOST_BUILD)
    int taken_ = 0;
#endif
};

// ---- Vector access --------------------------------------------------------------------------------------------------

// One 4, 8 or 16 byte access (float2, float4, uint4, ...). The address must be a multiple of sizeof(Vector).
template <typename Vector, typename Element>
__device__ __forceinline__ Vector load_vector(const Element* address TILERANK_CALLER);

template <typename Vector, typename Element>
__device__ __forceinline__ void store_vector(Element* address, Vector value TILERANK_CALLER);

// ---- Asynchronous copies, global to shared --------------------------------------------------------------------------

// Starts a copy of Bytes (4, 8 or 16; both addresses multiples of it) that lands at copy_async_wait. Out of range,
// zeros are written and source is not read (it must still be a valid pointer to compute with). cp.async from sm_80 on;
// below, a plain copy.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* source, bool in_range = true TILERANK_CALLER);

// Closes the group of copies that this thread has started since the last commit.
__device__ __forceinline__ void copy_async_commit();

// Waits until at most Pending of this thread's latest groups are unfinished. Other threads see the data only after a
// __syncwarp() or __syncthreads() that follows.
template <int Pending>
__device__ __forceinline__ void copy_async_wait();

// ---- Matrix fragments (whole warp, 32 lanes) ------------------------------------------------------------------------

// Loads 8x8 matrices of 16-bit elements. Lane i passes the address (shared memory, 16-byte aligned) of row i % 8 of
// matrix i / 8; x2 reads the addresses of lanes 0-15. In matrix m, lane l receives elements 2*(l%4) and 2*(l%4)+1 of
// row l/4 in fragment[m] (low half first); with _trans, those two elements of column l/4: rows 2*(l%4) and 2*(l%4)+1.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&fragment)[2], const void* row TILERANK_CALLER);
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], const void* row TILERANK_CALLER);
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&fragment)[2], const void* row TILERANK_CALLER);
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row TILERANK_CALLER);

// accumulator += a b for one warp, fp32 accumulators. With g = lane / 4 and t = lane % 4, register by register:
//   accumulator (16x8): row g columns 2t, 2t+1; row g+8 columns 2t, 2t+1
//   m16n8k16, two 16-bit elements a register, low half first:
//     a (16x16): row g columns 2t, 2t+1; row g+8 the same columns; row g columns 2t+8, 2t+9; row g+8 columns 2t+8, 2t+9
//     b (16x8):  column g rows 2t, 2t+1; column g rows 2t+8, 2t+9
//   m16n8k8 fp16: the first two registers of a and the first of b above
//   m16n8k8 tf32, one element a register:
//     a (16x8): (g, t); (g+8, t); (g, t+4); (g+8, t+4)      b (8x8): (t, g); (t+4, g)
// Element is __half (below sm_80 two m16n8k8) or __nv_bfloat16 (sm_80). Below sm_80 the bfloat16 and tf32 forms trap:
// rows that use them say min_sm 80.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2] TILERANK_CALLER);
__device__ __forceinline__ void mma_m16n8k8(float (&accumulator)[4], const uint32_t (&a)[2],
                                            uint32_t b TILERANK_CALLER);
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&accumulator)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2] TILERANK_CALLER);

// The bits of value rounded to TF32 (nearest, ties away from zero), as mma_m16n8k8_tf32 takes them. sm_80.
__device__ __forceinline__ uint32_t to_tf32(float value);

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

// 2 to the power of value, one instruction (ex2.approx.ftz): relative error 2^-22; 0 for -inf and where the result would
// be subnormal.
__device__ __forceinline__ float exp2_approx(float value);

// 1 / value, one instruction (rcp.approx.ftz): relative error 2^-23.
__device__ __forceinline__ float reciprocal_approx(float value);

// ---- Implementation -------------------------------------------------------------------------------------------------
}  // namespace tilerank

#if defined(TILERANK_HOST_BUILD)
#include "../host/device_host.inl"
#else
#include "device_cuda.inl"
#endif
