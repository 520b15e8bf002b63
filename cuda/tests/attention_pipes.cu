// What 16-bit attention at head_dim 32 can reach on Hopper's pipes: clocks of one SM for the instructions of a tile of
// 64 rows x 64 keys, alone and beside each other, for two orders of the whole tile, where nothing is copied and no warp
// waits for another, and for what a kernel does beside its tiles. docs/attention.md has the figures.
//
//     nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Icuda/include \
//         cuda/tests/attention_pipes.cu -o attention_pipes && ./attention_pipes
#include <cstdio>

#include "common/barriers.cuh"
#include "common/mma16.cuh"
#include "common/wgmma.cuh"

namespace {

using namespace tilerank;

constexpr int kGroupThreads = 128;
constexpr int kRowBytes = 64;
constexpr int kTileKeys = 64;
constexpr int kSteps = kTileKeys / 16;
constexpr int kTileSize = kTileKeys * kRowBytes / 16;  // in units of 16 bytes, as descriptors count
constexpr int kSharedBytes = 128 * 1024;
constexpr int kRepeats = 240;

#define CHECK(call)                                                    \
    do {                                                               \
        const cudaError_t error = (call);                              \
        if (error != cudaSuccess) {                                    \
            std::printf("%s: %s\n", #call, cudaGetErrorString(error)); \
            return 1;                                                  \
        }                                                              \
    } while (false)

// ---- Instructions of a tile ----

enum Mix : int {
    kExp = 1,       // 32 exponentials a lane
    kConvert = 2,   // 16 conversions of two weights to fp16
    kFma = 4,       // 32 multiply-adds
    kMaximum = 8,   // 16 maxima of two weights
    kProducts = 16  // scores and sums by wgmma
};

template <int kMix>
__global__ void __launch_bounds__(4 * kGroupThreads, 1) mix(long long* clocks, float* sink, float seed) {
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int at = threadIdx.x; at < kSharedBytes / 4; at += blockDim.x) reinterpret_cast<uint32_t*>(memory)[at] = 0;
    fence_async_proxy();
    __syncthreads();
    const uint32_t base = shared_address(memory) / 16;
    Fragment scores[kTileKeys / 8] = {};
    Fragment sums[5] = {};
    const uint32_t zeros[4] = {};
    float weights[8];
    float others[8];
    uint32_t pairs[4] = {};
    uint32_t largest = 0;
    for (int i = 0; i < 8; ++i) weights[i] = others[i] = seed + static_cast<float>(i);
    __syncthreads();
    const long long begin = clock64();
#pragma unroll 1
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        if (kMix & kProducts) {
            wgmma_fence();
            for (int depth = 0; depth < 2; ++depth) {
                wgmma_k16<__half, kTileKeys, false>(scores, zeros, tile_descriptor<kRowBytes>(base, 1), depth);
            }
            for (int step = 0; step < kSteps; ++step) {
                wgmma_k16<__half, 40, true>(sums, zeros, tile_descriptor<kRowBytes>(base, kTileSize), 1);
            }
            wgmma_commit();
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (kMix & kFma) {
                    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(others[i]) : "f"(seed), "f"(weights[0]));
                }
                if (kMix & kExp) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(weights[i]));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (kMix & kConvert) {
                    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;"
                                 : "=r"(pairs[i])
                                 : "f"(weights[2 * i]), "f"(weights[2 * i + 1]));
                }
                if (kMix & kMaximum) asm volatile("max.f16x2 %0, %0, %1;" : "+r"(largest) : "r"(pairs[i]));
            }
        }
        if (kMix & kProducts) wgmma_wait<0>();
    }
    __syncthreads();
    if (threadIdx.x == 0) *clocks = clock64() - begin;
    float sum = static_cast<float>(largest);
    for (int i = 0; i < 8; ++i) sum += weights[i] + others[i] + scores[i][0];
    for (int i = 0; i < 5; ++i) sum += sums[i][0];
    if (sum == 1.2345f) *sink = sum;  // nothing above is left out
}

// ---- Whole tiles ----

// Units of kUnitTiles tiles. kBehind: sums of the tile before and scores of the next one run behind a tile's weights;
// else both run behind each other, as in the variant warpgroups. kExps: weights are exponentials, else the scores.
constexpr int kUnitTiles = 6;

template <int kGroups, bool kBehind, bool kExps>
__global__ void __launch_bounds__(kGroups * kGroupThreads, 1) tiles(long long* clocks, float* sink, float factor) {
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int at = threadIdx.x; at < kSharedBytes / 4; at += blockDim.x) {
        reinterpret_cast<uint32_t*>(memory)[at] = 0x20002000u + at * 37 % 64 * 0x00010003u;  // about 0.01
    }
    fence_async_proxy();
    __syncthreads();
    const uint32_t base = shared_address(memory) / 16;
    const uint32_t ones = base + kUnitTiles * 2 * kTileSize;
    Fragment scores[2][kTileKeys / 8];
    Fragment sums[5] = {};
    uint32_t weights[2][kSteps][4] = {};
    uint32_t q[2][4];
    for (int i = 0; i < 8; ++i) q[i / 4][i % 4] = 0x20102010u + threadIdx.x % kWarpSize;
    float reference[2] = {0.0f, 0.0f};
    float finished = 0.0f;
    int steep = 0;
    const auto issue_scores = [&](Fragment (&target)[kTileKeys / 8], int tile) {
        const uint32_t k = base + tile * 2 * kTileSize;
        wgmma_k16<__half, kTileKeys, false>(target, q[0], tile_descriptor<kRowBytes>(k, 1), 0);
        wgmma_k16<__half, kTileKeys, false>(target, q[1], tile_descriptor<kRowBytes>(k + 2, 1), 1);
    };
    const auto issue_sums = [&](const uint32_t (&source)[kSteps][4], int tile) {
        const uint32_t v = base + tile * 2 * kTileSize + kTileSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = v + step * 16 * kRowBytes / 16;
            wgmma_k16<__half, 40, true>(sums, source[step], tile_descriptor<kRowBytes>(begin, ones - begin),
                                        step > 0 || tile > 0);
        }
    };
    const auto weigh = [&](uint32_t (&target)[kSteps][4], const Fragment (&source)[kTileKeys / 8], int tile) {
        if (tile == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = kLowestReference;
#pragma unroll
                for (int block = 0; block < 4; ++block) {
                    largest = fmaxf(largest, fmaxf(source[block][half * 2], source[block][half * 2 + 1]));
                }
                reference[half] = quad_max(largest) * factor;
            }
        }
        uint32_t largest = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const float* score = &source[step * 2 + at / 2][at % 2 * 2];
                float pair[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    pair[i] = kExps ? exp2_approx(score[i] * factor - reference[at % 2]) : score[i];
                }
                target[step][at] = pack16<__half>(pair[0], pair[1]);
                largest = max16<__half>(largest, target[step][at]);
            }
        }
        steep += __any_sync(kFullMask, exceeds16<__half>(largest, 16384.0f));
    };
    __syncthreads();
    const long long begin = clock64();
    wgmma_fence();
    issue_scores(scores[0], 0);
    wgmma_commit();
    wgmma_wait<0>();
    int tile = 0;
    const auto step = [&](int now) {
        const int next = tile + 1 < kUnitTiles ? tile + 1 : 0;
        if constexpr (kBehind) {
            wgmma_fence();
            issue_sums(weights[now ^ 1], tile > 0 ? tile - 1 : kUnitTiles - 1);
            issue_scores(scores[now ^ 1], next);
            wgmma_commit();
            weigh(weights[now], scores[now], tile);
        } else {
            weigh(weights[0], scores[0], tile);
            wgmma_fence();
            issue_sums(weights[0], tile);
            issue_scores(scores[0], next);
            wgmma_commit();
        }
        wgmma_wait<0>();
        if (tile == 0) finished += sums[0][0] + sums[4][0];
        tile = next;
    };
#pragma unroll 1
    for (int repeat = 0; repeat < kRepeats; repeat += 2) {
        step(0);
        step(1);
    }
    __syncthreads();
    if (threadIdx.x == 0) *clocks = clock64() - begin;
    if (finished == 1.2345f || steep == 12345) *sink = finished;
}

// ---- What a kernel does beside its tiles ----

enum Beside : int {
    kWait = 1,      // for a chunk's barrier, which is complete, before each tile
    kGiveBack = 2,  // an arrival a warp and tile
    kCopies = 4,    // of chunks from L2 by the lanes of three more warps
    kStores = 8,    // of a unit's rows, four bytes a lane
    kLoads = 16,    // of a unit's queries, four bytes a lane
    kHandOver = 32  // of a unit: a barrier, a description in shared memory, shuffles
};

// tiles<4, false, true>, and a fifth group that copies.
template <int kBeside>
__global__ void __launch_bounds__(5 * kGroupThreads, 1) beside(long long* clocks, float* sink, float factor,
                                                               __half* data) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t barriers[32];  // waited for, arrived at by no one; and from kArrivals on the other way round
    __shared__ int4 units[4];
    constexpr int kArrivals = 16;
    for (int at = threadIdx.x; at < kSharedBytes / 4; at += blockDim.x) {
        reinterpret_cast<uint32_t*>(memory)[at] = 0x20002000u + at * 37 % 64 * 0x00010003u;  // about 0.01
    }
    if (threadIdx.x < 32) barrier_init(&barriers[threadIdx.x], 1);
    if (threadIdx.x < 4) units[threadIdx.x] = int4{0, static_cast<int>(threadIdx.x) * 64, 64, kUnitTiles};
    fence_async_proxy();
    __syncthreads();
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    if (warp >= 16) {
        give_registers_back<56>();
        if (!(kBeside & kCopies) || warp == 19) return;
        unsigned char* chunk = memory + 96 * 1024 + (warp - 16) * 8192;
        const unsigned char* source = reinterpret_cast<const unsigned char*>(data) + blockIdx.x * 4096 + lane * 16;
#pragma unroll 1
        for (int repeat = 0; repeat < kRepeats / 3; ++repeat) {
#pragma unroll 2
            for (int i = 0; i < 16; ++i) {
                copy_async<16>(chunk + i * 512 + lane * 16, source + (repeat * 16 + i) * 2304 % (1 << 24), true);
            }
            copy_async_commit();
            copy_async_wait<1>();
            fence_async_proxy();
            barrier_arrive(&barriers[kArrivals + 15]);
            __nanosleep(1500);  // as often as a kernel needs one
        }
        return;
    }
    take_registers<104>();
    const uint32_t base = shared_address(memory) / 16;
    const uint32_t ones = base + kUnitTiles * 2 * kTileSize;
    Fragment scores[kTileKeys / 8];
    Fragment sums[5] = {};
    uint32_t weights[kSteps][4] = {};
    uint32_t q[1][2][4];
    uint32_t next_q[1][2][4];
    for (int i = 0; i < 8; ++i) q[0][i / 4][i % 4] = next_q[0][i / 4][i % 4] = 0x20102010u + lane;
    float reference[2] = {0.0f, 0.0f};
    float finished = 0.0f;
    int steep = 0;
    const auto issue_scores = [&](int tile) {
        const uint32_t k = base + tile * 2 * kTileSize;
        wgmma_k16<__half, kTileKeys, false>(scores, q[0][0], tile_descriptor<kRowBytes>(k, 1), 0);
        wgmma_k16<__half, kTileKeys, false>(scores, q[0][1], tile_descriptor<kRowBytes>(k + 2, 1), 1);
        wgmma_commit();
    };
    const long long begin = clock64();
    wgmma_fence();
    issue_scores(0);
    int tile = 0;
    int turn = 0;
    int rows = 64;
    __half* out = data + (blockIdx.x * 4 + warp / 4) * 4096;
#pragma unroll 1
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const int next = tile + 1 < kUnitTiles ? tile + 1 : 0;
        if (kBeside & kWait) barrier_wait(&barriers[next], 1);
        wgmma_wait<0>();
        if ((kBeside & kGiveBack) && lane == 0) barrier_arrive(&barriers[kArrivals + tile]);
        if (tile == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = kLowestReference;
#pragma unroll
                for (int block = 0; block < 4; ++block) {
                    largest = fmaxf(largest, fmaxf(scores[block][half * 2], scores[block][half * 2 + 1]));
                }
                reference[half] = quad_max(largest) * factor;
            }
        }
        uint32_t largest = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const float* score = &scores[step * 2 + at / 2][at % 2 * 2];
                weights[step][at] = pack16<__half>(exp2_approx(score[0] * factor - reference[at % 2]),
                                                   exp2_approx(score[1] * factor - reference[at % 2]));
                largest = max16<__half>(largest, weights[step][at]);
            }
        }
        steep += __any_sync(kFullMask, exceeds16<__half>(largest, 16384.0f));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t v = base + tile * 2 * kTileSize + kTileSize + step * kRowBytes;
            wgmma_k16<__half, 40, true>(sums, weights[step], tile_descriptor<kRowBytes>(v, ones - v),
                                        step > 0 || tile > 0);
        }
        wgmma_commit();
        tile = next;
        if (next > 0) {
            issue_scores(next);
            continue;
        }
        if (kBeside & kLoads) {
#pragma unroll
            for (int i = 0; i < 8; ++i) q[0][i / 4][i % 4] = next_q[0][i / 4][i % 4] & 0x0fffffffu;
        }
        issue_scores(0);
        wgmma_wait<1>();
        finished += sums[0][0] + sums[4][0];
        if (kBeside & kStores) {
            const float factors[2] = {1.0f / sums[4][0], 1.0f / sums[4][2]};
            store_rows<32>(out + warp % 4 * 16 * 384, 384, reinterpret_cast<const Fragment(&)[4]>(sums), factors, rows,
                           lane, true);
        }
        if (kBeside & kHandOver) {
            barrier_wait(&barriers[8 + turn % 4], 1);
            int4 unit = units[turn % 4];
            __syncwarp();
            if (lane == 0) barrier_arrive(&barriers[kArrivals + 8 + turn % 4]);
            ++turn;
            for (int* field : {&unit.x, &unit.y, &unit.z, &unit.w}) *field = __shfl_sync(kFullMask, *field, 0);
            out = data + (blockIdx.x * 4 + warp / 4) * 4096 + unit.y * 32;
            rows = unit.z;
        }
        if (kBeside & kLoads) load_queries<32, 1>(next_q, out + warp % 4 * 16 * 384, 384, rows, lane, true);
    }
    wgmma_wait<0>();
    barrier_among<4 * kGroupThreads>();
    if (threadIdx.x == 0 && blockIdx.x == 0) *clocks = clock64() - begin;
    if (finished == 1.2345f || steep == 12345) *sink = finished;
}

template <typename Kernel, typename... Rest>
int run(const char* what, Kernel kernel, int groups, int threads, int blocks, Rest... rest) {
    static long long* clocks = nullptr;
    static float* sink = nullptr;
    if (clocks == nullptr) {
        CHECK(cudaMalloc(&clocks, sizeof *clocks));
        CHECK(cudaMalloc(&sink, sizeof *sink));
    }
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    for (int turn = 0; turn < 2; ++turn) {
        kernel<<<blocks, threads, kSharedBytes>>>(clocks, sink, 0.25f, rest...);
    }
    CHECK(cudaGetLastError());
    long long counted = 0;
    CHECK(cudaMemcpy(&counted, clocks, sizeof counted, cudaMemcpyDeviceToHost));
    std::printf("%-72s %6.1f\n", what, static_cast<double>(counted) / kRepeats / groups);
    return 0;
}

template <typename Kernel>
int run(const char* what, Kernel kernel, int groups) {
    return run(what, kernel, groups, groups * kGroupThreads, 1);
}

// On every multiprocessor, which all use L2.
template <typename Kernel>
int run_beside(const char* what, Kernel kernel) {
    static __half* data = nullptr;
    if (data == nullptr) {
        CHECK(cudaMalloc(&data, 64 << 20));
        CHECK(cudaMemset(data, 0, 64 << 20));
    }
    int blocks = 0;
    CHECK(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
    return run(what, kernel, 4, 5 * kGroupThreads, blocks, data);
}

}  // namespace

int main() {
    std::printf("clocks of an SM for 64 rows x 64 keys, head_dim 32, fp16\n");
    int failures = 0;
    failures += run("exponentials", mix<kExp>, 4);
    failures += run("products", mix<kProducts>, 4);
    failures += run("exponentials, products", mix<kExp | kProducts>, 4);
    failures += run("exponentials, multiply-adds, conversions, maxima",
                    mix<kExp | kFma | kConvert | kMaximum>, 4);
    failures += run("exponentials, multiply-adds, conversions, maxima, products",
                    mix<kExp | kFma | kConvert | kMaximum | kProducts>, 4);
    failures += run("tiles, 1 group", tiles<1, false, true>, 1);
    failures += run("tiles, 2 groups", tiles<2, false, true>, 2);
    failures += run("tiles, 4 groups", tiles<4, false, true>, 4);
    failures += run("tiles, 4 groups, without exponentials", tiles<4, false, false>, 4);
    failures += run("tiles, products behind weights, 2 groups", tiles<2, true, true>, 2);
    failures += run("tiles, products behind weights, 3 groups", tiles<3, true, true>, 3);
    failures += run_beside("tiles, 4 groups, units of 6", beside<0>);
    failures += run_beside("and a wait for a chunk, and giving it back", beside<kWait | kGiveBack>);
    failures += run_beside("and copies of chunks by lanes", beside<kCopies>);
    failures += run_beside("and a unit's rows written", beside<kStores>);
    failures += run_beside("and a unit's queries read", beside<kLoads>);
    failures += run_beside("and a unit handed over", beside<kHandOver>);
    failures += run_beside("and what a unit begins and ends with", beside<kStores | kLoads | kHandOver>);
    failures += run_beside("and all of these", beside<kWait | kGiveBack | kCopies | kStores | kLoads | kHandOver>);
    return failures == 0 ? 0 : 1;
}
