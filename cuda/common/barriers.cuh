// Barriers between warps that do different things.
#pragma once

#include "common/device.h"

namespace tilerank {

// ---- In shared memory (mbarrier, sm_80) ----
//
// A barrier counts arrivals; when all of a phase have come, the next phase begins. Waiting for a parity returns once
// the phase of that parity is complete: 0 for the first phase, then 1, 0, 1, ...; parity 1 is complete from the start.
// What a thread wrote before it arrived is seen by those that have waited.

// By one thread, before a __syncthreads() and any other use.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals TILERANK_CALLER) {
#if defined(TILERANK_HOST_BUILD)
    host::barrier_init(barrier, arrivals, site);
#else
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier TILERANK_CALLER) {
#if defined(TILERANK_HOST_BUILD)
    host::barrier_arrive(barrier, site);
#elif __CUDA_ARCH__ >= 800
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(barrier))
                 : "memory");
#else
    __trap();
#endif
}

// Is the phase of that parity complete?
__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity TILERANK_CALLER) {
#if defined(TILERANK_HOST_BUILD)
    return host::barrier_test(barrier, parity, site);
#elif __CUDA_ARCH__ >= 800
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"  // may sleep a little
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
#else
    __trap();
    return false;
#endif
}

// The same at once: barrier_test may sleep until the phase ends or some time has passed.
__device__ __forceinline__ bool barrier_peek(uint64_t* barrier, uint32_t parity TILERANK_CALLER) {
#if defined(TILERANK_HOST_BUILD)
    return host::barrier_test(barrier, parity, site);
#elif __CUDA_ARCH__ >= 800
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
#else
    __trap();
    return false;
#endif
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity TILERANK_CALLER) {
#if defined(TILERANK_HOST_BUILD)
    host::barrier_wait(barrier, parity, site);
#else
    while (!barrier_test(barrier, parity)) {
    }
#endif
}

// init(at) for each of `count` barriers, by the first `warps` warps of the block, which all call it. A warp's barriers
// are initialised one after the other, whichever of its lanes ask for it: many of them take microseconds.
template <typename Init>
__device__ __forceinline__ void each_barrier(int count, int warps, const Init& init) {
    for (int at = static_cast<int>(threadIdx.x); at < count * kWarpSize; at += warps * kWarpSize) {
        if (at % kWarpSize == 0) init(at / kWarpSize);
    }
}

// ---- By name ----

#if !defined(TILERANK_HOST_BUILD)
// A barrier of its own for kThreads threads, whole warps, of a block whose other warps do something else. All reach it
// at one place in the code. A block has one such set of threads.
template <int kThreads>
__device__ __forceinline__ void barrier_among() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}
#endif

}  // namespace tilerank
