// Barriers of a block by name, for warps that do different things. No host version: rows whose files include this say
// host_exempt.
#pragma once

#include "common/device.h"

namespace tilerank {

// The barrier called `name`, of 2 to 15, completes when kThreads threads, whole warps, have waited for it or arrived;
// only those that wait stay until then.
template <int kThreads>
__device__ __forceinline__ void named_barrier_wait(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int name) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

}  // namespace tilerank
