// Shared policy of grids that take the sequences with the most keys first, so that the blocks that end last are short.
#pragma once

#include "common/attention.cuh"

namespace tilerank {

// The sequence that stands at `place` when each run of kThreads sequences is sorted by falling key count, equal ones by
// number. Called by all threads of a block of kThreads; all get the answer. shared: kThreads + 1 of them.
template <int kThreads>
__device__ __forceinline__ int64_t longest_first(const AttentionArgs& args, int64_t place, int* shared) {
    const int thread = threadIdx.x;
    const int64_t first = place / kThreads * kThreads;
    const int count = static_cast<int>(min(args.batch - first, static_cast<int64_t>(kThreads)));
    if (thread < count) {
        const int64_t keys = min(head_view<float>(args, first + thread, 0).k_len, static_cast<int64_t>(1) << 20);
        shared[thread] = static_cast<int>(keys) * kThreads + kThreads - 1 - thread;  // no two are equal
    }
    __syncthreads();
    if (thread < count) {
        int rank = 0;
#pragma unroll 8
        for (int other = 0; other < count; ++other) rank += shared[other] > shared[thread];
        if (rank == static_cast<int>(place - first)) shared[kThreads] = thread;
    }
    __syncthreads();
    return first + shared[kThreads];
}

}  // namespace tilerank
