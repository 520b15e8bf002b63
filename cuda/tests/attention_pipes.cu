// What 16-bit attention at head_dim 32 can reach on Hopper's pipes: clocks of one SM for the instructions of a tile of
// 64 rows x 64 keys, alone and beside each other, and for two orders of the whole tile. Nothing is copied and no warp
// waits for another. docs/attention.md has the figures.
//
//     nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Icuda/include \
//         cuda/tests/attention_pipes.cu -o attention_pipes && ./attention_pipes
#include <cstdio>

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

template <typename Kernel>
int run(const char* what, Kernel kernel, int groups) {
    static long long* clocks = nullptr;
    static float* sink = nullptr;
    if (clocks == nullptr) {
        CHECK(cudaMalloc(&clocks, sizeof *clocks));
        CHECK(cudaMalloc(&sink, sizeof *sink));
    }
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    for (int turn = 0; turn < 2; ++turn) kernel<<<1, groups * kGroupThreads, kSharedBytes>>>(clocks, sink, 0.25f);
    CHECK(cudaGetLastError());
    long long counted = 0;
    CHECK(cudaMemcpy(&counted, clocks, sizeof counted, cudaMemcpyDeviceToHost));
    std::printf("%-72s %6.1f\n", what, static_cast<double>(counted) / kRepeats / groups);
    return 0;
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
    return failures == 0 ? 0 : 1;
}
