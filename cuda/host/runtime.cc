// The emulator's runtime. One fiber a CUDA thread, one block at a time, one launch at a time.
//
// ThreadSanitizer knows each fiber as a thread of its own and is told of no ordering except that of barriers, so that
// it reports a race between CUDA threads although all run on one OS thread. The runtime's own bookkeeping is shared by
// all fibers without such ordering, on purpose: Unobserved hides it.
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(void* address, long bytes);
void __tsan_write_range(void* address, long bytes);
}
#endif

#if !defined(__x86_64__) && !defined(TILERANK_HOST_UCONTEXT)
#define TILERANK_HOST_UCONTEXT
#endif
#if defined(TILERANK_HOST_UCONTEXT)
#include <ucontext.h>
#endif

namespace tilerank::host {

const Position* position = nullptr;

namespace {

constexpr size_t kStackBytes = 256 * 1024;  // sanitizers make frames large
constexpr size_t kGuardBytes = 4096;
constexpr size_t kStaticSharedLimit = 48 * 1024;
constexpr size_t kDynamicSharedLimit = 227 * 1024;  // of sm_90, the largest
constexpr size_t kStaticSharedAlignment = 16;       // what SHARED promises on the device
constexpr size_t kDynamicSharedAlignment = 128;     // what DynamicShared promises
constexpr int kLanes = 32;

// ---- Sanitizers -----------------------------------------------------------------------------------------------------

struct Unobserved {
#if defined(__SANITIZE_THREAD__)
    Unobserved() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unobserved() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
    Unobserved(const Unobserved&) = delete;
    Unobserved& operator=(const Unobserved&) = delete;
#else
    Unobserved() {}
#endif
};

void publish([[maybe_unused]] void* what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(what);
#endif
}

void observe([[maybe_unused]] void* what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(what);
#endif
}

// gcc instruments no 16-byte copy for ThreadSanitizer, and the copies of this file are Unobserved: hence by hand.
void show_read([[maybe_unused]] const void* address, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_THREAD__)
    __tsan_read_range(const_cast<void*>(address), static_cast<long>(bytes));
#elif defined(__SANITIZE_ADDRESS__)
    const volatile char* bytes_read = static_cast<const volatile char*>(address);
    (void)bytes_read[0];
    (void)bytes_read[bytes - 1];
#endif
}

void show_write([[maybe_unused]] void* address, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_THREAD__)
    __tsan_write_range(address, static_cast<long>(bytes));
#else
    show_read(address, bytes);
#endif
}

// ---- Fibers ---------------------------------------------------------------------------------------------------------

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Copy {
    void* shared;
    size_t bytes;
    int group;
    unsigned char data[16];
};

struct Fiber {
    // The CUDA thread that it runs.
    Position position{};
    int thread = 0;
    State state = State::kDone;
    const char* operation = "";
    Site site{"", 0};
    unsigned mask = 0;
    int barrier_count = 0;  // what the last block barrier returns
    std::vector<Copy> copies;
    int copy_group = 0;

    // How it is kept while another runs.
    unsigned char* stack = nullptr;
    size_t stack_bytes = 0;
#if defined(TILERANK_HOST_UCONTEXT)
    ucontext_t context{};
#else
    void* stack_pointer = nullptr;
#endif
    void* fake_stack = nullptr;  // AddressSanitizer's
    void* tsan_fiber = nullptr;
};

Fiber main_fiber;  // the OS thread that launches
Fiber* running = &main_fiber;
Fiber* previous = nullptr;

extern "C" void tilerank_host_fiber_main();

#if !defined(TILERANK_HOST_UCONTEXT)
// void tilerank_host_switch(void** save, void* resume): the registers that a call must preserve go on the stack.
asm(R"(
.text
.globl tilerank_host_switch
.hidden tilerank_host_switch
.type tilerank_host_switch, @function
tilerank_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size tilerank_host_switch, .-tilerank_host_switch
)");
extern "C" void tilerank_host_switch(void** save, void* resume);
#endif

// Makes fiber start at tilerank_host_fiber_main when next resumed, forgetting what it was doing.
void reset_stack(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
    fiber.fake_stack = nullptr;
#if defined(TILERANK_HOST_UCONTEXT)
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = fiber.stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, tilerank_host_fiber_main, 0);
#else
    void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes);
    *--top = nullptr;  // a return address, which aligns the stack as after a call and ends back traces
    *--top = reinterpret_cast<void*>(&tilerank_host_fiber_main);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
#endif
#if defined(__SANITIZE_THREAD__)
    // The one that a failed launch leaves is not destroyed: it stands inside Unobserved, which ThreadSanitizer would
    // report as an error of its own.
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
}

std::unique_ptr<Fiber> new_fiber() {
    auto fiber = std::make_unique<Fiber>();
    void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
        std::fprintf(stderr, "tilerank host build: no memory for the stack of a thread\n");
        std::abort();
    }
    fiber->stack = static_cast<unsigned char*>(memory) + kGuardBytes;
    fiber->stack_bytes = kStackBytes;
    reset_stack(*fiber);
    return fiber;
}

__attribute__((no_sanitize_thread)) void arrived_on_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(running->fake_stack, &bottom, &bytes);
    if (previous == &main_fiber) {
        main_fiber.stack = static_cast<unsigned char*>(const_cast<void*>(bottom));
        main_fiber.stack_bytes = bytes;
    }
#endif
}

__attribute__((no_sanitize_thread, noinline)) void switch_to(Fiber* to) {
    Fiber* from = running;
    if (from == to) return;
    previous = from;
    running = to;
    position = &to->position;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(TILERANK_HOST_UCONTEXT)
    swapcontext(&from->context, &to->context);
#else
    tilerank_host_switch(&from->stack_pointer, to->stack_pointer);
#endif
    arrived_on_fiber();
}

// ---- The order of threads -------------------------------------------------------------------------------------------

enum class Schedule { kForward, kReverse, kLastIn, kRandom };

Schedule schedule = Schedule::kForward;
std::mt19937_64 schedule_random;

class ReadyThreads {
  public:
    bool empty() const { return threads_.empty(); }

    void push(int thread) { threads_.push_back(thread); }

    int pop() {
        auto chosen = threads_.begin();
        switch (schedule) {
            case Schedule::kForward:
                break;
            case Schedule::kReverse:
                chosen = std::max_element(threads_.begin(), threads_.end());
                break;
            case Schedule::kRandom:
                chosen += static_cast<std::ptrdiff_t>(schedule_random() % threads_.size());
                break;
            case Schedule::kLastIn:
                chosen = threads_.end() - 1;
                break;
        }
        const int thread = *chosen;
        threads_.erase(chosen);
        return thread;
    }

  private:
    std::deque<int> threads_;
};

// ---- The block that runs --------------------------------------------------------------------------------------------

// Lanes of one mask on their way to one operation. Two sync objects in turn: with one, a slow lane would also acquire
// what a fast lane releases at its next meeting, and races would hide.
struct Meeting {
    unsigned mask = 0;
    unsigned arrived = 0;
    const char* operation = "";
    Site site{"", 0};
    void* arguments[kLanes] = {};
    int turn = 0;
    char sync[2] = {};
};

struct Warp {
    unsigned present = 0;
    unsigned returned = 0;
    std::deque<Meeting> meetings;  // one for every mask in use
};

// What a barrier in shared memory stands for; the memory itself holds nothing that kernels may read.
struct MemoryBarrier {
    int expected = 0;
    int arrived = 0;
    uint32_t parity = 0;  // of the phase under way
    std::vector<Fiber*> waiting;
    char sync[2] = {};  // by parity
};

struct SharedPiece {
    unsigned char* start;
    size_t bytes;
};

// On the heap and new for every block: freeing it makes ThreadSanitizer forget its sync objects, so that nothing orders
// the threads of one block with those of another.
struct Block {
    uint64_t number = 0;
    std::vector<Fiber*> fibers;  // by thread
    std::vector<Warp> warps;
    ReadyThreads ready;
    int returned = 0;

    int arrived = 0;  // at the block barrier
    int predicates = 0;
    const char* operation = "";
    Site site{"", 0};
    int turn = 0;
    char sync[2] = {};

    std::map<const uint64_t*, MemoryBarrier> barriers;

    std::vector<SharedPiece> shared;
    std::vector<SharedPiece> dynamic;
    size_t static_bytes = 0;
    size_t dynamic_bytes = 0;
    size_t dynamic_limit = 0;

    Block() = default;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() {
        for (const SharedPiece& piece : shared) std::free(piece.start);
    }
};

struct Launch {
    void (*call)(void*) = nullptr;
    void* context = nullptr;
    bool failed = false;
    char begin = 0;  // sync objects
    char end = 0;
};

std::mutex launch_mutex;
std::unique_ptr<Launch> launch_state;
std::unique_ptr<Block> block;
uint64_t blocks_run = 0;
thread_local std::string last_error;

// Two sets in turn: the threads of neighbouring blocks stay unordered although fibers are reused.
std::vector<std::unique_ptr<Fiber>> fiber_sets[2];

std::string thread_name(int thread) {
    const Position& at = block->fibers[static_cast<size_t>(thread)]->position;
    char text[96];
    std::snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", at.thread.x, at.thread.y, at.thread.z,
                  at.block.x, at.block.y, at.block.z);
    return text;
}

std::string place(const char* operation, Site site) {
    return std::string(operation) + " at " + site.file + ":" + std::to_string(site.line);
}

std::string describe(const Fiber& fiber) {
    char mask[32];
    std::snprintf(mask, sizeof mask, " with mask 0x%08x", fiber.mask);
    switch (fiber.state) {
        case State::kAtBarrier:
            return "waiting in " + place(fiber.operation, fiber.site);
        case State::kInWarp:
            return "waiting in " + place(fiber.operation, fiber.site) + mask;
        case State::kDone:
            return "returned";
        case State::kReady:
            break;
    }
    return "ready to run";
}

// One line for every run of threads in the same state.
std::string describe_threads() {
    std::string text;
    const int count = static_cast<int>(block->fibers.size());
    for (int first = 0; first < count;) {
        const std::string state = describe(*block->fibers[static_cast<size_t>(first)]);
        int last = first;
        while (last + 1 < count && describe(*block->fibers[static_cast<size_t>(last) + 1]) == state) ++last;
        text += "\n  threads " + std::to_string(first) + "-" + std::to_string(last) + ": " + state;
        first = last + 1;
    }
    return text;
}

void record_fault(const std::string& what) {
    last_error = thread_name(running->thread) + ": " + what + describe_threads();
    launch_state->failed = true;
}

// Ends the launch: the threads of the block are left where they stand. Strings must be gone before the switch.
[[noreturn]] void leave_launch() {
    switch_to(&main_fiber);
    std::abort();  // nobody resumes a thread of a failed launch
}

#define FAULT(...)                 \
    do {                           \
        record_fault(__VA_ARGS__); \
        leave_launch();            \
    } while (false)

void run_next_thread() {
    if (!block->ready.empty()) {
        switch_to(block->fibers[static_cast<size_t>(block->ready.pop())]);
    } else if (block->returned == static_cast<int>(block->fibers.size())) {
        switch_to(&main_fiber);
    } else {
        FAULT("deadlock: no thread of the block can go on");
    }
}

void make_ready(Fiber& fiber) {
    fiber.state = State::kReady;
    block->ready.push(fiber.thread);
}

void wait_in(State state, const char* operation, Site site, unsigned mask) {
    running->state = state;
    running->operation = operation;
    running->site = site;
    running->mask = mask;
}

bool same_place(const char* operation, Site site, const char* other_operation, Site other_site) {
    return std::strcmp(operation, other_operation) == 0 && site.line == other_site.line &&
           std::strcmp(site.file, other_site.file) == 0;
}

void thread_returns() {
    Warp& warp = block->warps[static_cast<size_t>(running->thread / kLanes)];
    const unsigned lane = 1u << (running->thread % kLanes);
    running->state = State::kDone;
    running->copies.clear();
    if (block->arrived > 0) FAULT("returned while others wait in " + place(block->operation, block->site));
    for (const Meeting& meeting : warp.meetings) {
        if (meeting.arrived != 0 && (meeting.mask & lane) != 0) {
            FAULT("returned while lanes of its warp wait for it in " + place(meeting.operation, meeting.site));
        }
    }
    warp.returned |= lane;
    block->returned += 1;
}

extern "C" __attribute__((no_sanitize_thread)) void tilerank_host_fiber_main() {
    arrived_on_fiber();
    for (;;) {
        Launch* launch = nullptr;
        void (*call)(void*) = nullptr;
        void* context = nullptr;
        {
            const Unobserved scope;
            launch = launch_state.get();
            call = launch->call;
            context = launch->context;
        }
        observe(&launch->begin);
        call(context);
        publish(&launch->end);
        const Unobserved scope;
        thread_returns();
        run_next_thread();
    }
}

unsigned char* new_shared(size_t bytes, size_t alignment) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, std::max<size_t>(bytes, 1)) != 0) std::abort();
    std::memset(memory, 0xff, bytes);  // NaN as fp32, fp16 and bf16; -1 as an integer
    block->shared.push_back({static_cast<unsigned char*>(memory), bytes});
    return static_cast<unsigned char*>(memory);
}

bool in_shared(const void* address, size_t bytes) {
    const auto* first = static_cast<const unsigned char*>(address);
    return std::any_of(block->shared.begin(), block->shared.end(), [&](const SharedPiece& piece) {
        return first >= piece.start && first + bytes <= piece.start + piece.bytes;
    });
}

// The lanes of mask meet; the last to arrive runs combine(arguments of the lanes, null for those not in mask).
template <typename Combine>
void meet(unsigned mask, void* argument, const Combine& combine, bool orders_memory, const char* operation, Site site) {
    Warp& warp = block->warps[static_cast<size_t>(running->thread / kLanes)];
    const int first_thread = running->thread / kLanes * kLanes;
    const int lane = running->thread % kLanes;
    const auto fail = [&](const std::string& what) {
        char mask_text[32];
        std::snprintf(mask_text, sizeof mask_text, ": mask 0x%08x ", mask);
        record_fault(place(operation, site) + mask_text + what);
    };
    if ((mask >> lane & 1u) == 0) {
        fail("does not name the calling lane");
        leave_launch();
    }
    if ((mask & ~warp.present) != 0) {
        fail("names lanes that the block does not have");
        leave_launch();
    }
    if ((mask & warp.returned) != 0) {
        fail("names lanes that have returned");
        leave_launch();
    }
    Meeting* meeting = nullptr;
    for (Meeting& other : warp.meetings) {
        if (other.mask == mask) meeting = &other;
    }
    if (meeting == nullptr) {
        meeting = &warp.meetings.emplace_back();
        meeting->mask = mask;
    }
    if (meeting->arrived == 0) {
        meeting->operation = operation;
        meeting->site = site;
    } else if (!same_place(operation, site, meeting->operation, meeting->site)) {
        fail("is that of lanes waiting in " + place(meeting->operation, meeting->site));
        leave_launch();
    }
    char* sync = &meeting->sync[meeting->turn];
    if (orders_memory) publish(sync);
    meeting->arguments[lane] = argument;
    meeting->arrived |= 1u << lane;
    if (meeting->arrived == mask) {
        combine(meeting->arguments);
        meeting->arrived = 0;
        meeting->turn ^= 1;
        for (int other = 0; other < kLanes; ++other) {
            meeting->arguments[other] = nullptr;
            if ((mask >> other & 1u) != 0) make_ready(*block->fibers[static_cast<size_t>(first_thread + other)]);
        }
    } else {
        wait_in(State::kInWarp, operation, site, mask);
    }
    run_next_thread();
    if (orders_memory) observe(sync);
}

void check_alignment(const void* address, size_t alignment, const char* operation, Site site) {
    if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
    char text[96];
    std::snprintf(text, sizeof text, ": address %p is not a multiple of %zu", address, alignment);
    FAULT(place(operation, site) + text);
}

void check_shared(const void* address, size_t bytes, const char* operation, Site site) {
    if (in_shared(address, bytes)) return;
    char text[96];
    std::snprintf(text, sizeof text, ": %zu bytes at %p are not in one shared array of this block", bytes, address);
    FAULT(place(operation, site) + text);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// After a fault: the threads are left where they stand, and what they did comes before what the caller does next.
void abandon_threads() {
    for (Fiber* fiber : block->fibers) {
#if defined(__SANITIZE_THREAD__)
        __tsan_switch_to_fiber(fiber->tsan_fiber, __tsan_switch_to_fiber_no_sync);
        publish(&launch_state->end);
        __tsan_switch_to_fiber(main_fiber.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
        reset_stack(*fiber);
    }
}

void start_block(uint3 index, dim3 blocks, dim3 threads, size_t dynamic_shared_bytes) {
    block = std::make_unique<Block>();
    block->number = ++blocks_run;
    block->dynamic_limit = dynamic_shared_bytes;
    const int count = static_cast<int>(threads.x * threads.y * threads.z);
    block->warps.resize(static_cast<size_t>((count + kLanes - 1) / kLanes));
    auto& fibers = fiber_sets[blocks_run % 2];
    while (static_cast<int>(fibers.size()) < count) fibers.push_back(new_fiber());
    for (int thread = 0; thread < count; ++thread) {
        Fiber& fiber = *fibers[static_cast<size_t>(thread)];
        const unsigned linear = static_cast<unsigned>(thread);
        fiber.thread = thread;
        fiber.position = {{linear % threads.x, linear / threads.x % threads.y, linear / (threads.x * threads.y)},
                          index,
                          threads,
                          blocks};
        fiber.copies.clear();
        fiber.copy_group = 0;
        block->fibers.push_back(&fiber);
        block->warps[static_cast<size_t>(thread / kLanes)].present |= 1u << (thread % kLanes);
        make_ready(fiber);
    }
}

// Why CUDA would refuse this launch on every device; null when it would not.
const char* refusal(dim3 grid, dim3 threads, size_t dynamic_shared_bytes) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return "a grid dimension is 0";
    if (grid.x > 2147483647u) return "gridDim.x is above 2147483647";
    if (grid.y > 65535u || grid.z > 65535u) return "gridDim.y or gridDim.z is above 65535";
    if (threads.x == 0 || threads.y == 0 || threads.z == 0) return "a block dimension is 0";
    if (threads.x > 1024u || threads.y > 1024u || threads.z > 64u) return "a block dimension is above 1024, 1024, 64";
    if (uint64_t{threads.x} * threads.y * threads.z > 1024) return "a block has more than 1024 threads";
    if (dynamic_shared_bytes > kDynamicSharedLimit) return "more than 232448 bytes of dynamic shared memory";
    return nullptr;
}

}  // namespace

const char* error_text() { return last_error.c_str(); }

int run_grid(dim3 grid, dim3 threads, size_t dynamic_shared_bytes, void (*call)(void*), void* context) {
    const std::lock_guard<std::mutex> lock(launch_mutex);
    if (const char* reason = refusal(grid, threads, dynamic_shared_bytes)) {
        last_error = std::string("invalid launch configuration: ") + reason;
        return 1;
    }
    launch_state = std::make_unique<Launch>();
    launch_state->call = call;
    launch_state->context = context;
#if defined(__SANITIZE_THREAD__)
    main_fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
    publish(&launch_state->begin);
    {
        const Unobserved scope;
        for (unsigned z = 0; z < grid.z && !launch_state->failed; ++z) {
            for (unsigned y = 0; y < grid.y && !launch_state->failed; ++y) {
                for (unsigned x = 0; x < grid.x && !launch_state->failed; ++x) {
                    start_block({x, y, z}, grid, threads, dynamic_shared_bytes);
                    run_next_thread();
                    if (launch_state->failed) abandon_threads();
                    block.reset();
                }
            }
        }
    }
    observe(&launch_state->end);
    const bool failed = launch_state->failed;
    launch_state.reset();
    return failed ? 1 : 0;
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

void* shared_slot(SharedSlot& slot, size_t bytes) {
    const Unobserved scope;
    if (slot.owner != block->number) {
        block->static_bytes += bytes;
        if (block->static_bytes > kStaticSharedLimit) {
            FAULT(std::string("SHARED ") + slot.name + ": the block declares " + std::to_string(block->static_bytes) +
                  " bytes; at most " + std::to_string(kStaticSharedLimit));
        }
        slot.storage = new_shared(bytes, kStaticSharedAlignment);
        slot.owner = block->number;
    }
    return slot.storage;
}

void* dynamic_shared(int index, size_t bytes, size_t reserved) {
    const Unobserved scope;
    auto& pieces = block->dynamic;
    if (index == static_cast<int>(pieces.size())) {
        block->dynamic_bytes += reserved;
        if (block->dynamic_bytes > block->dynamic_limit) {
            FAULT("DynamicShared::take: " + std::to_string(block->dynamic_bytes) +
                  " bytes taken, but the launch gave " + std::to_string(block->dynamic_limit));
        }
        pieces.push_back({new_shared(bytes, kDynamicSharedAlignment), bytes});
    }
    const SharedPiece& piece = pieces[static_cast<size_t>(index)];
    if (piece.bytes != bytes) {
        FAULT("DynamicShared::take: " + std::to_string(bytes) + " bytes, where another thread took " +
              std::to_string(piece.bytes));
    }
    return piece.start;
}

// ---- Meeting points -------------------------------------------------------------------------------------------------

int block_barrier(bool predicate, const char* operation, Site site) {
    const Unobserved scope;
    if (block->returned > 0) FAULT(place(operation, site) + ": a thread of the block has already returned");
    if (block->arrived == 0) {
        block->operation = operation;
        block->site = site;
    } else if (!same_place(operation, site, block->operation, block->site)) {
        FAULT("divergent barrier: " + place(operation, site) + ", where others wait in " +
              place(block->operation, block->site));
    }
    char* sync = &block->sync[block->turn];
    publish(sync);
    block->arrived += 1;
    block->predicates += predicate ? 1 : 0;
    if (block->arrived == static_cast<int>(block->fibers.size())) {
        for (Fiber* fiber : block->fibers) {
            fiber->barrier_count = block->predicates;
            make_ready(*fiber);
        }
        block->arrived = 0;
        block->predicates = 0;
        block->turn ^= 1;
    } else {
        wait_in(State::kAtBarrier, operation, site, 0);
    }
    run_next_thread();
    observe(sync);
    return running->barrier_count;
}

namespace {

MemoryBarrier& initialised_barrier(const uint64_t* barrier, const char* operation, Site site) {
    const auto found = block->barriers.find(barrier);
    if (found == block->barriers.end()) FAULT(place(operation, site) + ": the barrier was not initialised");
    return found->second;
}

}  // namespace

void barrier_init(uint64_t* barrier, int arrivals, Site site) {
    const Unobserved scope;
    check_alignment(barrier, sizeof *barrier, "barrier_init", site);
    check_shared(barrier, sizeof *barrier, "barrier_init", site);
    if (arrivals < 1) FAULT(place("barrier_init", site) + ": a barrier needs at least one arrival");
    MemoryBarrier& made = block->barriers[barrier];
    made.expected = arrivals;
}

void barrier_arrive(uint64_t* barrier, Site site) {
    const Unobserved scope;
    MemoryBarrier& at = initialised_barrier(barrier, "barrier_arrive", site);
    publish(&at.sync[at.parity]);
    if (++at.arrived < at.expected) return;
    at.arrived = 0;
    at.parity ^= 1;
    for (Fiber* fiber : at.waiting) make_ready(*fiber);
    at.waiting.clear();
}

bool barrier_test(uint64_t* barrier, uint32_t parity, Site site) {
    const Unobserved scope;
    MemoryBarrier& at = initialised_barrier(barrier, "barrier_test", site);
    if (at.parity == parity) return false;
    observe(&at.sync[parity]);
    return true;
}

void barrier_wait(uint64_t* barrier, uint32_t parity, Site site) {
    const Unobserved scope;
    MemoryBarrier& at = initialised_barrier(barrier, "barrier_wait", site);
    if (at.parity == parity) {
        at.waiting.push_back(running);
        wait_in(State::kAtBarrier, "barrier_wait", site, 0);
        run_next_thread();
    }
    observe(&at.sync[parity]);
}

void warp_barrier(unsigned mask, Site site) {
    const Unobserved scope;
    meet(mask, nullptr, [](void* const*) {}, true, "__syncwarp", site);
}

// ---- Checked memory access ------------------------------------------------------------------------------------------

void check_read(const void* address, size_t bytes, size_t alignment, const char* operation, Site site) {
    {
        const Unobserved scope;
        check_alignment(address, alignment, operation, site);
    }
    show_read(address, bytes);
}

void check_write(void* address, size_t bytes, size_t alignment, const char* operation, Site site) {
    {
        const Unobserved scope;
        check_alignment(address, alignment, operation, site);
    }
    show_write(address, bytes);
}

void copy_async(void* shared, const void* source, size_t bytes, bool in_range, Site site) {
    {
        const Unobserved scope;
        check_alignment(shared, bytes, "copy_async", site);
        check_shared(shared, bytes, "copy_async", site);
        // The device wants the source aligned even where it reads nothing.
        check_alignment(source, bytes, "copy_async", site);
    }
    if (in_range) show_read(source, bytes);
    show_write(shared, bytes);
    const Unobserved scope;
    Copy copy{shared, bytes, running->copy_group, {}};
    if (in_range) std::memcpy(copy.data, source, bytes);
    std::memset(shared, 0xff, bytes);
    running->copies.push_back(copy);
}

void copy_async_commit() {
    const Unobserved scope;
    running->copy_group += 1;
}

void copy_async_wait(int pending) {
    auto& copies = running->copies;
    size_t landed = 0;
    for (; landed < copies.size() && copies[landed].group < running->copy_group - pending; ++landed) {
        show_write(copies[landed].shared, copies[landed].bytes);
        const Unobserved scope;
        std::memcpy(copies[landed].shared, copies[landed].data, copies[landed].bytes);
    }
    const Unobserved scope;
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

// ---- Warp operations ------------------------------------------------------------------------------------------------

namespace {

struct ShuffleLane {
    uint64_t value;
    uint64_t result;
    int operand;
};

int shuffle_source(Shuffle kind, int lane, int operand, int width) {
    const int segment = lane / width * width;
    const int last = segment + width - 1;
    int source = lane;
    switch (kind) {
        case Shuffle::kIndex:
            return segment + (operand & (width - 1));
        case Shuffle::kUp:
            source = lane - operand;
            return source < segment ? lane : source;
        case Shuffle::kDown:
            source = lane + operand;
            break;
        case Shuffle::kXor:
            source = lane ^ operand;
            break;
    }
    return source > last ? lane : source;
}

}  // namespace

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int operand, int width, const char* operation,
                 Site site) {
    const Unobserved scope;
    if (width < 1 || width > kLanes || (width & (width - 1)) != 0) {
        FAULT(place(operation, site) + ": width " + std::to_string(width) + " is not a power of two up to 32");
    }
    ShuffleLane lane{value, 0, operand};
    const auto exchange = [&](void* const* lanes) {
        for (int to = 0; to < kLanes; ++to) {
            auto* receiver = static_cast<ShuffleLane*>(lanes[to]);
            if (receiver == nullptr) continue;
            const int from = shuffle_source(kind, to, receiver->operand, width);
            if (from < 0 || from >= kLanes || lanes[from] == nullptr) {
                FAULT(place(operation, site) + ": lane " + std::to_string(to) + " reads lane " + std::to_string(from) +
                      ", which the mask does not name");
            }
            receiver->result = static_cast<ShuffleLane*>(lanes[from])->value;
        }
    };
    meet(mask, &lane, exchange, false, operation, site);
    return lane.result;
}

unsigned ballot(unsigned mask, bool predicate, const char* operation, Site site) {
    const Unobserved scope;
    struct Lane {
        bool predicate;
        unsigned votes;
    } lane{predicate, 0};
    const auto count = [](void* const* lanes) {
        unsigned votes = 0;
        for (int from = 0; from < kLanes; ++from) {
            if (lanes[from] != nullptr && static_cast<Lane*>(lanes[from])->predicate) votes |= 1u << from;
        }
        for (int to = 0; to < kLanes; ++to) {
            if (lanes[to] != nullptr) static_cast<Lane*>(lanes[to])->votes = votes;
        }
    };
    meet(mask, &lane, count, false, operation, site);
    return lane.votes;
}

void ldmatrix(uint32_t* fragment, const void* row, int matrices, bool transposed, const char* operation, Site site) {
    struct Lane {
        const void* row;
        uint32_t* fragment;
    } lane{row, fragment};
    if (running->thread % kLanes < 8 * matrices) {
        {
            const Unobserved scope;
            check_alignment(row, 16, operation, site);
            check_shared(row, 16, operation, site);
        }
        show_read(row, 16);
    }
    const Unobserved scope;
    const auto load = [&](void* const* lanes) {
        for (int matrix = 0; matrix < matrices; ++matrix) {
            uint16_t element[8][8];
            for (int at = 0; at < 8; ++at) {
                std::memcpy(element[at], static_cast<Lane*>(lanes[8 * matrix + at])->row, sizeof element[at]);
            }
            for (int to = 0; to < kLanes; ++to) {
                const int major = to / 4;
                const int minor = 2 * (to % 4);
                const uint32_t low = transposed ? element[minor][major] : element[major][minor];
                const uint32_t high = transposed ? element[minor + 1][major] : element[major][minor + 1];
                static_cast<Lane*>(lanes[to])->fragment[matrix] = high << 16 | low;
            }
        }
    };
    meet(0xffffffffu, &lane, load, false, operation, site);
}

void mma(float* accumulator, const uint32_t* a, const uint32_t* b, MmaType type, int depth, const char* operation,
         Site site) {
    const Unobserved scope;
    struct Lane {
        float* accumulator;
        const uint32_t* a;
        const uint32_t* b;
    } lane{accumulator, a, b};
    // How many elements a register holds, and the columns of a (rows of b) that registers 8 or 4 apart skip.
    const int packed = type == MmaType::kTf32 ? 1 : 2;
    const int step = 4 * packed;
    const auto unpack = [type](uint32_t bits, int part) {
        switch (type) {
            case MmaType::kHalf:
                return float_of_half(static_cast<uint16_t>(bits >> (16 * part)));
            case MmaType::kBfloat16:
                return float_of_bfloat16(static_cast<uint16_t>(bits >> (16 * part)));
            case MmaType::kTf32:
                break;
        }
        return float_of_bits(bits & 0xffffe000u);  // the unit reads 10 bits of fraction
    };
    const auto multiply = [&](void* const* lanes) {
        float left[16][16];
        float right[16][8];
        for (int from = 0; from < kLanes; ++from) {
            const auto& source = *static_cast<Lane*>(lanes[from]);
            const int group = from / 4;
            const int column = packed * (from % 4);
            for (int part = 0; part < packed; ++part) {
                for (int k = 0; k < depth; k += step) {
                    const int at = k / step;
                    left[group][k + column + part] = unpack(source.a[2 * at], part);
                    left[group + 8][k + column + part] = unpack(source.a[2 * at + 1], part);
                    right[k + column + part][group] = unpack(source.b[at], part);
                }
            }
        }
        for (int to = 0; to < kLanes; ++to) {
            for (int at = 0; at < 4; ++at) {
                const int row = to / 4 + at / 2 * 8;
                const int column = 2 * (to % 4) + at % 2;
                float& sum = static_cast<Lane*>(lanes[to])->accumulator[at];
                double exact = sum;
                for (int k = 0; k < depth; ++k) exact += static_cast<double>(left[row][k]) * right[k][column];
                sum = static_cast<float>(exact);
            }
        }
    };
    meet(0xffffffffu, &lane, multiply, false, operation, site);
}

}  // namespace tilerank::host

extern "C" int tilerank_host_set_schedule(const char* name, uint64_t seed) {
    using namespace tilerank::host;
    constexpr const char* kNames[] = {"forward", "reverse", "last_in", "random"};
    const std::lock_guard<std::mutex> lock(launch_mutex);
    for (int at = 0; at < 4; ++at) {
        if (std::strcmp(name, kNames[at]) != 0) continue;
        schedule = static_cast<Schedule>(at);
        schedule_random.seed(seed);
        return 0;
    }
    return 1;
}
