// The emulator's runtime: runs the threads of a block as fibers on one OS thread and checks how they meet. Kernels do
// not call it; they reach it through the names of ../common/device.h and cuda_names.h. Compiled with g++ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.h"

namespace tilerank::host {

// Where in the kernel's source an operation stands. Threads that meet must have come to the same place. As the default
// argument of a parameter, Site::here() is the place of the call.
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

// ---- What a kernel reads of its position ----------------------------------------------------------------------------

struct Position {
    uint3 thread;
    uint3 block;
    dim3 threads;
    dim3 blocks;
};

extern const Position* position;  // of the running thread

// ---- Launch and schedule --------------------------------------------------------------------------------------------

// Runs call(context) once for every thread of every block, block after block. Returns 0, or 1 when the configuration
// is one that CUDA refuses or a check failed; error_text() then says what, where and which threads.
int run_grid(dim3 grid, dim3 block, size_t dynamic_shared_bytes, void (*call)(void*), void* context);

const char* error_text();

// ---- Shared memory --------------------------------------------------------------------------------------------------

// One SHARED declaration. Its storage is a heap block of exactly its size, new for every thread block and full of NaN.
struct SharedSlot {
    const char* name;
    void* storage = nullptr;
    uint64_t owner = 0;  // number of the thread block that the storage belongs to

    constexpr explicit SharedSlot(const char* slot_name) : name(slot_name) {}
};

void* shared_slot(SharedSlot& slot, size_t bytes);

// The index-th piece of the block's dynamic shared memory, `reserved` bytes of its budget, `bytes` of them usable.
void* dynamic_shared(int index, size_t bytes, size_t reserved);

// ---- Meeting points -------------------------------------------------------------------------------------------------

// Waits for every thread of the block; returns how many passed a true predicate.
int block_barrier(bool predicate, const char* operation, Site site);

// Waits for the lanes of mask and makes writes before it visible to them.
void warp_barrier(unsigned mask, Site site);

// Barriers in shared memory, as common/barriers.cuh describes them.
void barrier_init(uint64_t* barrier, int arrivals, Site site);
void barrier_arrive(uint64_t* barrier, Site site);
bool barrier_test(uint64_t* barrier, uint32_t parity, Site site);
void barrier_wait(uint64_t* barrier, uint32_t parity, Site site);

// ---- Checked memory access ------------------------------------------------------------------------------------------

// Fails the launch when address is not a multiple of alignment; shows the access to the sanitizers.
void check_read(const void* address, size_t bytes, size_t alignment, const char* operation, Site site);
void check_write(void* address, size_t bytes, size_t alignment, const char* operation, Site site);

// The destination holds NaN from here until copy_async_wait lets the data land.
void copy_async(void* shared, const void* source, size_t bytes, bool in_range, Site site);
void copy_async_commit();
void copy_async_wait(int pending);

// ---- Warp operations: the last lane to arrive computes for all; none orders memory ----------------------------------

enum class Shuffle { kIndex, kUp, kDown, kXor };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int operand, int width, const char* operation, Site site);
unsigned ballot(unsigned mask, bool predicate, const char* operation, Site site);

void ldmatrix(uint32_t* fragment, const void* row, int matrices, bool transposed, const char* operation, Site site);

enum class MmaType { kHalf, kBfloat16, kTf32 };
// depth is the k of m16n8k16 or m16n8k8; a and b hold the registers that device.h describes.
void mma(float* accumulator, const uint32_t* a, const uint32_t* b, MmaType type, int depth, const char* operation,
         Site site);

}  // namespace tilerank::host

// The order in which ready threads run, for all later launches. A correct kernel gives the same result under each:
//   forward  first come, first served: warps advance together
//   reverse  the highest thread first: the last warp runs ahead
//   last_in  the thread made ready last first: one warp runs ahead of the others
//   random   drawn from the seed
// Returns 0, or 1 for another name. In the host flavour of libtilerank.so this is the one symbol beside tilerank.h's.
extern "C" __attribute__((visibility("default"))) int tilerank_host_set_schedule(const char* name, uint64_t seed);
