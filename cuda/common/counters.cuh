// Counters in global memory, by which the blocks of one launch tell each other what is done.
//
// A block takes numbers from a counter and does the work of that number; what a number needs has lower numbers. A block
// that waits therefore waits for blocks that are running already, however many the GPU runs at once: there is no
// deadlock to be had. The host build runs blocks one after another, where every wait is over before it begins.
#pragma once

#include "common/device.h"

namespace tilerank {

// Adds to the counter and returns what it was. By one thread, with a __syncthreads() before it: whatever the block wrote
// until then is seen by the blocks that find the new value.
__device__ __forceinline__ uint32_t counter_add(uint32_t* counter, uint32_t count) {
#if defined(TILERANK_HOST_BUILD)
    return __atomic_fetch_add(counter, count, __ATOMIC_ACQ_REL);
#else
    __threadfence();
    const uint32_t before = atomicAdd(counter, count);
    __threadfence();
    return before;
#endif
}

// Waits until the counter is at least `target`. By one thread, with a __syncthreads() after it.
__device__ __forceinline__ void counter_wait(const uint32_t* counter, uint32_t target) {
#if defined(TILERANK_HOST_BUILD)
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
    }
#else
    uint32_t value;
    for (;;) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if (value >= target) return;
        __nanosleep(64);
    }
#endif
}

}  // namespace tilerank
