// The part of CUDA C++ that kernels use, under CUDA's names, for g++. A missing intrinsic belongs here: one to three
// lines, with the meaning that the CUDA documentation gives.
#pragma once

#include <math.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda_types.h"
#include "runtime.h"

// ---- Keywords -------------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static_assert(false, "declare shared memory with SHARED(type, name, dims) of common/device.h");

#define threadIdx (::tilerank::host::position->thread)
#define blockIdx (::tilerank::host::position->block)
#define blockDim (::tilerank::host::position->threads)
#define gridDim (::tilerank::host::position->blocks)
inline constexpr int warpSize = 32;

using TilerankSite = tilerank::host::Site;  // global, like the names below

// ---- Barriers and warp operations -----------------------------------------------------------------------------------

inline void __syncthreads(TilerankSite site = TilerankSite::here()) {
    tilerank::host::block_barrier(false, "__syncthreads", site);
}
inline int __syncthreads_count(int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::block_barrier(predicate != 0, "__syncthreads_count", site);
}
inline int __syncthreads_or(int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::block_barrier(predicate != 0, "__syncthreads_or", site) > 0;
}
inline int __syncthreads_and(int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::block_barrier(predicate == 0, "__syncthreads_and", site) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, TilerankSite site = TilerankSite::here()) {
    tilerank::host::warp_barrier(mask, site);
}

namespace tilerank::host {
template <typename Value>
Value shuffle_value(Shuffle kind, unsigned mask, Value value, int operand, int width, const char* name, Site site) {
    static_assert(std::is_trivially_copyable_v<Value> && sizeof(Value) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = shuffle(kind, mask, bits, operand, width, name, site);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace tilerank::host

template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int lane, int width = 32, TilerankSite site = TilerankSite::here()) {
    return shuffle_value(tilerank::host::Shuffle::kIndex, mask, value, lane, width, "__shfl_sync", site);
}
template <typename Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32,
                     TilerankSite site = TilerankSite::here()) {
    return shuffle_value(tilerank::host::Shuffle::kUp, mask, value, static_cast<int>(delta), width, "__shfl_up_sync",
                         site);
}
template <typename Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32,
                       TilerankSite site = TilerankSite::here()) {
    return shuffle_value(tilerank::host::Shuffle::kDown, mask, value, static_cast<int>(delta), width,
                         "__shfl_down_sync", site);
}
template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes, int width = 32, TilerankSite site = TilerankSite::here()) {
    return shuffle_value(tilerank::host::Shuffle::kXor, mask, value, lanes, width, "__shfl_xor_sync", site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::ballot(mask, predicate != 0, "__ballot_sync", site);
}
inline int __any_sync(unsigned mask, int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::ballot(mask, predicate != 0, "__any_sync", site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, TilerankSite site = TilerankSite::here()) {
    return tilerank::host::ballot(mask, predicate == 0, "__all_sync", site) == 0;
}

// ---- Atomics (relaxed, as CUDA's are) -------------------------------------------------------------------------------

template <typename Integer>
std::enable_if_t<std::is_integral_v<Integer>, Integer> atomicAdd(Integer* address, Integer value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline float atomicAdd(float* address, float value) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(address);
    uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &seen,
                                        tilerank::host::bits_of_float(tilerank::host::float_of_bits(seen) + value),
                                        false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return tilerank::host::float_of_bits(seen);
}

// ---- Arithmetic and bits --------------------------------------------------------------------------------------------

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __expf(float value) { return expf(value); }
inline float __logf(float value) { return logf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

inline int __float_as_int(float value) { return static_cast<int>(tilerank::host::bits_of_float(value)); }
inline unsigned __float_as_uint(float value) { return tilerank::host::bits_of_float(value); }
inline float __int_as_float(int bits) { return tilerank::host::float_of_bits(static_cast<unsigned>(bits)); }
inline float __uint_as_float(unsigned bits) { return tilerank::host::float_of_bits(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }

template <typename Value>
Value __ldg(const Value* address, TilerankSite site = TilerankSite::here()) {
    tilerank::host::check_read(address, sizeof(Value), alignof(Value), "__ldg", site);
    return *address;
}

// ---- 16-bit floating point ------------------------------------------------------------------------------------------

inline float __half2float(__half value) { return value; }
inline __half __float2half(float value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline __half __ushort_as_half(unsigned short bits) {
    __half value;
    value.bits = bits;
    return value;
}
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half2 __floats2half2_rn(float low, float high) { return {low, high}; }
inline __half2 __float22half2_rn(float2 pair) { return {pair.x, pair.y}; }
inline __half2 __float2half2_rn(float value) { return {value, value}; }
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }

inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.bits = bits;
    return value;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {low, high}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }

// Both 16-bit types have these under one name, as in CUDA.
template <typename Number>
float __low2float(tilerank::host::Pair16<Number> pair) {
    return pair.x;
}
template <typename Number>
float __high2float(tilerank::host::Pair16<Number> pair) {
    return pair.y;
}
template <typename Number>
tilerank::host::Pair16<Number> __hadd2(tilerank::host::Pair16<Number> a, tilerank::host::Pair16<Number> b) {
    return {a.x + b.x, a.y + b.y};
}
template <typename Number>
tilerank::host::Pair16<Number> __hmul2(tilerank::host::Pair16<Number> a, tilerank::host::Pair16<Number> b) {
    return {a.x * b.x, a.y * b.y};
}
template <typename Number>
tilerank::host::Pair16<Number> __hfma2(tilerank::host::Pair16<Number> a, tilerank::host::Pair16<Number> b,
                                       tilerank::host::Pair16<Number> c) {
    return {Number(fmaf(a.x, b.x, c.x)), Number(fmaf(a.y, b.y, c.y))};
}
template <typename Number>
tilerank::host::Pair16<Number> __hmax2(tilerank::host::Pair16<Number> a, tilerank::host::Pair16<Number> b) {
    return {Number(fmaxf(a.x, b.x)), Number(fmaxf(a.y, b.y))};
}
template <typename Number>
bool __hble2(tilerank::host::Pair16<Number> a, tilerank::host::Pair16<Number> b) {
    return float(a.x) <= float(b.x) && float(a.y) <= float(b.y);
}
