// Self-tests of common/device.h: each operation against a plain computation, under every schedule of the emulator.
// Built with nvcc it checks the same on a GPU, where it shows that the emulator's fragment layouts are the machine's.
//     emulator_checks        runs all; prints one line a check and returns the number of failures
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "common/device.h"

namespace {

using namespace tilerank;

int failures = 0;
const char* current_check = "";

#define EXPECT(condition, ...)                                         \
    do {                                                               \
        if (!(condition)) {                                            \
            ++failures;                                                \
            std::printf("FAILED %s: %s: ", current_check, #condition); \
            std::printf(__VA_ARGS__);                                  \
            std::printf("\n");                                         \
        }                                                              \
    } while (false)

// Memory that kernels and the host both reach, zeroed, freed at the end of the scope.
template <typename Element>
class Shared {
  public:
    explicit Shared(size_t count) : count_(count) {
#if defined(TILERANK_HOST_BUILD)
        data_ = new Element[count]();
#else
        if (cudaMallocManaged(&data_, count * sizeof(Element)) != cudaSuccess) std::exit(99);
        std::memset(static_cast<void*>(data_), 0, count * sizeof(Element));
#endif
    }
    ~Shared() {
#if defined(TILERANK_HOST_BUILD)
        delete[] data_;
#else
        cudaFree(data_);
#endif
    }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    Element* data() { return data_; }
    Element& operator[](size_t at) { return data_[at]; }
    size_t size() const { return count_; }

  private:
    Element* data_ = nullptr;
    size_t count_;
};

template <typename... Parameters>
void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
         typename Exactly<Parameters>::type... arguments) {
    const int error = launch(kernel, grid, block, shared_bytes, nullptr, arguments...);
    EXPECT(error == 0, "%s", launch_error_text(error));
#if !defined(TILERANK_HOST_BUILD)
    const cudaError_t fault = cudaDeviceSynchronize();
    EXPECT(fault == cudaSuccess, "%s", cudaGetErrorString(fault));
#endif
}

float bits_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// ---- Where a thread is ----------------------------------------------------------------------------------------------

__global__ void write_position(int* out) {
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[block * static_cast<int>(blockDim.x * blockDim.y * blockDim.z) + thread] += 1 + thread + 1000 * block;
}

void check_positions() {
    const dim3 grid(3, 2, 2);
    const dim3 block(5, 3, 2);
    Shared<int> out(12 * 30);
    run(write_position, grid, block, 0, out.data());
    for (int at = 0; at < 360; ++at) EXPECT(out[at] == 1 + at % 30 + 1000 * (at / 30), "entry %d is %d", at, out[at]);
}

// ---- Barriers -------------------------------------------------------------------------------------------------------

template <int Threads>
__global__ void reverse_and_count(int* out, int* counts, int rounds) {
    SHARED(int, row, [Threads]);
    const int thread = static_cast<int>(threadIdx.x);
    int value = thread + Threads * static_cast<int>(blockIdx.x);
    for (int round = 0; round < rounds; ++round) {
        row[thread] = value;
        __syncthreads();
        value = row[Threads - 1 - thread] + 1;
        __syncthreads();
    }
    out[static_cast<int>(blockIdx.x) * Threads + thread] = value;
    const int third = __syncthreads_count(thread % 3 == 0);
    const int any = __syncthreads_or(thread == 5);
    const int none = __syncthreads_or(thread == Threads);
    const int all = __syncthreads_and(thread < Threads);
    const int most = __syncthreads_and(thread > 0);
    if (thread == Threads - 1) counts[blockIdx.x] = third + 1000 * any + 2000 * none + 4000 * all + 8000 * most;
}

void check_barriers() {
    constexpr int kThreads = 96;
    Shared<int> out(2 * kThreads);
    Shared<int> counts(2);
    run(reverse_and_count<kThreads>, 2, kThreads, 0, out.data(), counts.data(), 3);
    for (int at = 0; at < 2 * kThreads; ++at) {
        const int expected = kThreads * (at / kThreads) + (kThreads - 1 - at % kThreads) + 3;
        EXPECT(out[at] == expected, "entry %d is %d, not %d", at, out[at], expected);
    }
    for (int block = 0; block < 2; ++block) EXPECT(counts[block] == 32 + 1000 + 4000, "it is %d", counts[block]);
}

// ---- Warp operations ------------------------------------------------------------------------------------------------

__global__ void shuffles(int* out) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int* mine = out + threadIdx.x * 8;
    mine[0] = __shfl_sync(kFullMask, lane, (lane + 5) % 32);
    mine[1] = __shfl_up_sync(kFullMask, lane, 3u);
    mine[2] = __shfl_down_sync(kFullMask, lane, 3u, 8);
    mine[3] = __shfl_xor_sync(kFullMask, lane, 9);
    mine[4] = __shfl_sync(kFullMask, lane, 2, 8);
    // Two groups of lanes at different places at the same time.
    if (lane < 20) {
        mine[5] = __shfl_xor_sync(0x000fffffu, lane, 1);
    } else {
        mine[5] = __shfl_xor_sync(0xfff00000u, lane, 2);
    }
    double sum = lane;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    mine[6] = static_cast<int>(sum);
    const float2 pair = __half22float2(__shfl_down_sync(kFullMask, __floats2half2_rn(lane, 2 * lane), 1u));
    mine[7] = static_cast<int>(pair.x + 100 * pair.y);
}

void check_shuffles() {
    Shared<int> out(64 * 8);
    run(shuffles, 1, 64, 0, out.data());
    for (int thread = 0; thread < 64; ++thread) {
        const int lane = thread % 32;
        const int next = lane == 31 ? 31 : lane + 1;
        const int expected[8] = {(lane + 5) % 32,
                                 lane < 3 ? lane : lane - 3,
                                 lane % 8 > 4 ? lane : lane + 3,
                                 lane ^ 9,
                                 lane / 8 * 8 + 2,
                                 lane < 20 ? lane ^ 1 : lane ^ 2,
                                 496,
                                 next + 200 * next};
        for (int which = 0; which < 8; ++which) {
            EXPECT(out[thread * 8 + which] == expected[which], "thread %d, result %d: %d, not %d", thread, which,
                   out[thread * 8 + which], expected[which]);
        }
    }
}

__global__ void votes(unsigned* out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[lane] = __ballot_sync(kFullMask, lane % 3 == 0) ^ (__any_sync(kFullMask, lane == 7) ? 0u : 1u) ^
                (__any_sync(kFullMask, lane == 32) ? 2u : 0u) ^ (__all_sync(kFullMask, lane < 32) ? 0u : 4u) ^
                (__all_sync(kFullMask, lane != 4) ? 8u : 0u);
}

void check_votes() {
    Shared<unsigned> out(32);
    run(votes, 1, 32, 0, out.data());
    for (int lane = 0; lane < 32; ++lane) EXPECT(out[lane] == 0x49249249u, "lane %d has 0x%08x", lane, out[lane]);
}

// Each warp transposes its own tile: __syncwarp alone orders it.
__global__ void transpose_in_warps(const int* in, int* out) {
    SHARED(int, tile, [2][32][33]);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int round = 0; round < 2; ++round) {
        for (int row = 0; row < 32; ++row) tile[warp][row][lane] = in[(warp * 32 + row) * 32 + lane] + round;
        __syncwarp();
        for (int row = 0; row < 32; ++row) out[(warp * 32 + row) * 32 + lane] = tile[warp][lane][row];
        __syncwarp();
    }
}

void check_warp_barriers() {
    Shared<int> in(2048);
    Shared<int> out(2048);
    for (int at = 0; at < 2048; ++at) in[at] = at;
    run(transpose_in_warps, 1, 64, 0, in.data(), out.data());
    for (int at = 0; at < 2048; ++at) {
        const int expected = at / 1024 * 1024 + at % 32 * 32 + at / 32 % 32 + 1;
        EXPECT(out[at] == expected, "entry %d is %d, not %d", at, out[at], expected);
    }
}

// ---- Vector access and asynchronous copies --------------------------------------------------------------------------

constexpr int kCopyThreads = 64;

__global__ void copy_in_two_groups(const float* in, float* out, int valid_vectors) {
    DynamicShared memory;
    float* first = memory.take<float>(4 * kCopyThreads);
    float* second = memory.take<float>(4 * kCopyThreads);
    const int thread = static_cast<int>(threadIdx.x);
    copy_async<16>(first + 4 * thread, in + 4 * thread, thread < valid_vectors);
    copy_async_commit();
    copy_async<8>(second + 4 * thread, in + 4 * thread);
    copy_async<4>(second + 4 * thread + 2, in + 4 * thread + 2);
    copy_async<4>(second + 4 * thread + 3, in + 4 * thread + 3, thread % 2 == 0);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    const int other = kCopyThreads - 1 - thread;
    const float4 early = load_vector<float4>(first + 4 * other);
    copy_async_wait<0>();
    __syncthreads();
    const float4 late = load_vector<float4>(second + 4 * other);
    store_vector(out + 4 * thread, make_float4(early.x, early.w, late.y, late.w));
}

void check_copies() {
    constexpr int kValid = 50;
    Shared<float> in(4 * kCopyThreads);
    Shared<float> out(4 * kCopyThreads);
    for (int at = 0; at < 4 * kCopyThreads; ++at) in[at] = static_cast<float>(at + 1);
    run(copy_in_two_groups, 1, kCopyThreads, 2 * DynamicShared::bytes<float>(4 * kCopyThreads), in.data(), out.data(),
        kValid);
    for (int thread = 0; thread < kCopyThreads; ++thread) {
        const int other = kCopyThreads - 1 - thread;
        const float base = static_cast<float>(4 * other + 1);
        const float expected[4] = {other < kValid ? base : 0.0f, other < kValid ? base + 3 : 0.0f, base + 1,
                                   other % 2 == 0 ? base + 3 : 0.0f};
        for (int at = 0; at < 4; ++at) {
            EXPECT(out[4 * thread + at] == expected[at], "thread %d, %d: %g, not %g", thread, at, out[4 * thread + at],
                   expected[at]);
        }
    }
}

// ---- Matrix fragments -----------------------------------------------------------------------------------------------

// Element e of the four matrices is 64 * matrix + 8 * row + column, as an integer.
__global__ void load_fragments(const unsigned short* in, uint32_t* out) {
    SHARED(unsigned short, rows, [32][8]);
    const int lane = static_cast<int>(threadIdx.x);
    store_vector(rows[lane], load_vector<uint4>(in + 8 * lane));
    __syncwarp();
    uint32_t fragment[4];
    uint32_t pair[2];
    uint32_t* mine = out + 12 * lane;
    ldmatrix_x4(fragment, rows[lane]);
    for (int at = 0; at < 4; ++at) mine[at] = fragment[at];
    ldmatrix_x4_trans(fragment, rows[lane]);
    for (int at = 0; at < 4; ++at) mine[4 + at] = fragment[at];
    ldmatrix_x2(pair, rows[lane % 16]);
    for (int at = 0; at < 2; ++at) mine[8 + at] = pair[at];
    ldmatrix_x2_trans(pair, rows[lane % 16]);
    for (int at = 0; at < 2; ++at) mine[10 + at] = pair[at];
}

void check_fragments() {
    Shared<unsigned short> in(256);
    Shared<uint32_t> out(32 * 12);
    for (int at = 0; at < 256; ++at) in[at] = static_cast<unsigned short>(at);
    run(load_fragments, 1, 32, 0, in.data(), out.data());
    for (int lane = 0; lane < 32; ++lane) {
        for (int at = 0; at < 12; ++at) {
            const bool transposed = (at >= 4 && at < 8) || at >= 10;
            const int matrix = at < 8 ? at % 4 : at % 2;
            const int major = lane / 4;
            const int minor = 2 * (lane % 4);
            const int low = 64 * matrix + (transposed ? 8 * minor + major : 8 * major + minor);
            const int high = 64 * matrix + (transposed ? 8 * (minor + 1) + major : 8 * major + minor + 1);
            const uint32_t expected = static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(low);
            EXPECT(out[12 * lane + at] == expected, "lane %d, register %d: 0x%08x, not 0x%08x", lane, at,
                   out[12 * lane + at], expected);
        }
    }
}

__device__ void store_accumulator(const float (&accumulator)[4], float* out) {
    const int group = static_cast<int>(threadIdx.x) / 4;
    const int column = 2 * (static_cast<int>(threadIdx.x) % 4);
    out[8 * group + column] = accumulator[0];
    out[8 * group + column + 1] = accumulator[1];
    out[8 * (group + 8) + column] = accumulator[2];
    out[8 * (group + 8) + column + 1] = accumulator[3];
}

__device__ uint32_t raw_bits(__half value) { return __half_as_ushort(value); }
__device__ uint32_t raw_bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// out [16,8] = 1 + a [16,16] b [16,8], both row-major: a by ldmatrix, b by its transposed form, as attention does.
template <typename Element>
__global__ void multiply_by_ldmatrix(const Element* a, const Element* b, float* out) {
    SHARED(Element, left, [16][24]);  // rows 48 bytes apart: 16-byte aligned
    SHARED(Element, right, [16][8]);
    const int lane = static_cast<int>(threadIdx.x);
    for (int at = lane; at < 256; at += 32) left[at / 16][at % 16] = a[at];
    for (int at = lane; at < 128; at += 32) right[at / 8][at % 8] = b[at];
    __syncwarp();
    uint32_t a_fragment[4];
    uint32_t b_fragment[2];
    ldmatrix_x4(a_fragment, &left[lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(b_fragment, &right[lane % 16][0]);
    float accumulator[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    mma_m16n8k16<Element>(accumulator, a_fragment, b_fragment);
    store_accumulator(accumulator, out);
}

// The same with fragments filled by the layout that device.h documents.
template <typename Element>
__global__ void multiply_by_layout(const Element* a, const Element* b, float* out) {
    const int g = static_cast<int>(threadIdx.x) / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    const auto pair = [](Element low, Element high) { return raw_bits(high) << 16 | raw_bits(low); };
    const auto a_pair = [&](int row, int column) { return pair(a[16 * row + column], a[16 * row + column + 1]); };
    const auto b_pair = [&](int row, int column) { return pair(b[8 * row + column], b[8 * (row + 1) + column]); };
    float accumulator[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    const uint32_t a_fragment[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                                    a_pair(g + 8, 2 * t + 8)};
    const uint32_t b_fragment[2] = {b_pair(2 * t, g), b_pair(2 * t + 8, g)};
    mma_m16n8k16<Element>(accumulator, a_fragment, b_fragment);
    store_accumulator(accumulator, out);
}

// Two steps of k = 8 make the same product.
__global__ void multiply_by_halves(const __half* a, const __half* b, float* out) {
    const int g = static_cast<int>(threadIdx.x) / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    float accumulator[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int k = 0; k < 16; k += 8) {
        uint32_t a_fragment[2];
        for (int at = 0; at < 2; ++at) {
            const __half* row = a + 16 * (g + 8 * at) + k + 2 * t;
            a_fragment[at] = raw_bits(row[1]) << 16 | raw_bits(row[0]);
        }
        const __half* column = b + 8 * (k + 2 * t) + g;
        mma_m16n8k8(accumulator, a_fragment, raw_bits(column[8]) << 16 | raw_bits(column[0]));
    }
    store_accumulator(accumulator, out);
}

__global__ void multiply_tf32(const float* a, const float* b, float* out) {
    const int g = static_cast<int>(threadIdx.x) / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    float accumulator[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int k = 0; k < 16; k += 8) {
        const auto left = [&](int row, int column) { return to_tf32(a[16 * row + k + column]); };
        const auto right = [&](int row, int column) { return to_tf32(b[8 * (k + row) + column]); };
        const uint32_t a_fragment[4] = {left(g, t), left(g + 8, t), left(g, t + 4), left(g + 8, t + 4)};
        const uint32_t b_fragment[2] = {right(t, g), right(t + 4, g)};
        mma_m16n8k8_tf32(accumulator, a_fragment, b_fragment);
    }
    store_accumulator(accumulator, out);
}

// Small multiples of 1/8 are exact in fp16, bf16 and TF32, and so are their sums in fp32: the product is exact.
template <typename Element>
void check_product(void (*kernel)(const Element*, const Element*, float*), const char* name) {
    Shared<Element> a(256);
    Shared<Element> b(128);
    Shared<float> out(128);
    std::mt19937 random(7);
    std::vector<float> left(256);
    std::vector<float> right(128);
    for (int at = 0; at < 256; ++at) left[at] = static_cast<float>(static_cast<int>(random() % 33) - 16) / 8.0f;
    for (int at = 0; at < 128; ++at) right[at] = static_cast<float>(static_cast<int>(random() % 33) - 16) / 8.0f;
    for (int at = 0; at < 256; ++at) a[at] = Element(left[at]);
    for (int at = 0; at < 128; ++at) b[at] = Element(right[at]);
    run(kernel, 1, 32, 0, a.data(), b.data(), out.data());
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            float expected = 1.0f;
            for (int k = 0; k < 16; ++k) expected += left[16 * row + k] * right[8 * k + column];
            EXPECT(out[8 * row + column] == expected, "%s (%d,%d): %g, not %g", name, row, column,
                   out[8 * row + column], expected);
        }
    }
}

// Whether the code that runs here was compiled for an architecture with bf16 and TF32.
__global__ void has_sm80(int* answer) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    *answer = 1;
#else
    *answer = 0;
#endif
}

void check_products() {
    check_product<__half>(multiply_by_ldmatrix<__half>, "fp16 by ldmatrix");
    check_product<__half>(multiply_by_layout<__half>, "fp16 by layout");
    check_product<__half>(multiply_by_halves, "fp16, k = 8");
    Shared<int> newer(1);
    run(has_sm80, 1, 1, 0, newer.data());
    if (newer[0] == 0) return;
    check_product<__nv_bfloat16>(multiply_by_ldmatrix<__nv_bfloat16>, "bf16 by ldmatrix");
    check_product<__nv_bfloat16>(multiply_by_layout<__nv_bfloat16>, "bf16 by layout");
    check_product<float>(multiply_tf32, "tf32");
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

__global__ void raise_two(const float* in, float* powers) { powers[threadIdx.x] = exp2_approx(in[threadIdx.x]); }

__global__ void round_to_tf32(const float* in, uint32_t* rounded) { rounded[threadIdx.x] = to_tf32(in[threadIdx.x]); }

void check_arithmetic() {
    const std::vector<float> values = {0.0f,
                                       1.0f,
                                       -1.0f,
                                       0.5f,
                                       10.25f,
                                       -125.0f,
                                       -140.0f,
                                       -INFINITY,
                                       1.0f + 0x1p-11f,
                                       1.0f + 0x1p-10f,
                                       -(1.0f + 0x1p-11f),
                                       1.0f + 0x1p-12f};
    const unsigned count = static_cast<unsigned>(values.size());
    Shared<float> in(count);
    Shared<float> powers(count);
    for (size_t at = 0; at < values.size(); ++at) in[at] = values[at];
    run(raise_two, 1, count, 0, in.data(), powers.data());
    for (size_t at = 0; at < values.size(); ++at) {
        double expected = std::exp2(static_cast<double>(values[at]));
        if (expected < 0x1p-126) expected = 0.0;
        EXPECT(std::abs(powers[at] - expected) <= 0x1p-21 * expected, "2^%g is %g", values[at], powers[at]);
    }
    Shared<int> newer(1);
    run(has_sm80, 1, 1, 0, newer.data());
    if (newer[0] == 0) return;
    Shared<uint32_t> rounded(count);
    run(round_to_tf32, 1, count, 0, in.data(), rounded.data());
    EXPECT(bits_as_float(rounded[8]) == 1.0f + 0x1p-10f, "a tie goes away from zero: %g", bits_as_float(rounded[8]));
    EXPECT(bits_as_float(rounded[9]) == 1.0f + 0x1p-10f, "%g", bits_as_float(rounded[9]));
    EXPECT(bits_as_float(rounded[10]) == -1.0f - 0x1p-10f, "%g", bits_as_float(rounded[10]));
    EXPECT(bits_as_float(rounded[11]) == 1.0f, "%g", bits_as_float(rounded[11]));
}

__global__ void add_atomically(int* count, float* sum) {
    atomicAdd(count, static_cast<int>(threadIdx.x));
    atomicAdd(sum, 0.5f);
}

void check_atomics() {
    Shared<int> count(1);
    Shared<float> sum(1);
    run(add_atomically, 3, 64, 0, count.data(), sum.data());
    EXPECT(count[0] == 3 * 2016, "%d", count[0]);
    EXPECT(sum[0] == 96.0f, "%g", sum[0]);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

__global__ void nothing() {}

void check_refusals() {
    const auto refused = [](dim3 grid, dim3 block, size_t shared_bytes) {
        const int error = launch(nothing, grid, block, shared_bytes, nullptr);
        return error != 0 && launch_error_text(error)[0] != '\0';
    };
    EXPECT(refused(0, 32, 0), "an empty grid");
    EXPECT(refused(1, 0, 0), "an empty block");
    EXPECT(refused(1, 1025, 0), "1025 threads");
    EXPECT(refused(1, dim3(64, 32), 0), "2048 threads");
    EXPECT(refused(dim3(1, 65536), 32, 0), "gridDim.y of 65536");
    EXPECT(refused(1, 32, 300 * 1024), "300 KiB of shared memory");
    run(nothing, 1, 32, 0);  // a refusal leaves no trace
    run(nothing, 1, 32, 96 * 1024);
}

#if defined(TILERANK_HOST_BUILD)
__global__ void return_early(int* out) {
    SHARED(int, row, [64]);
    row[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (threadIdx.x == 5) return;
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];
}

// A failed launch is a status with a text that names thread and place; the next one runs as if nothing had been.
void check_recovery() {
    Shared<int> out(64);
    for (int round = 0; round < 3; ++round) {
        const int error = launch(return_early, 2, 64, 0, nullptr, out.data());
        EXPECT(error != 0, "a thread returned before a barrier");
        const char* text = launch_error_text(error);
        EXPECT(std::strstr(text, "emulator_checks.cu:") != nullptr && std::strstr(text, "block (0,0,0)") != nullptr,
               "%s", text);
        check_barriers();
    }
}

// The emulator's own 16-bit types: every fp16 number survives, and rounding agrees with the compiler's where it has
// one.
void check_conversions() {
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
        const float value = host::float_of_half(static_cast<uint16_t>(bits));
        if (!std::isnan(value)) EXPECT(host::half_bits(value) == bits, "0x%04x gives %g", bits, value);
        const float wide = host::float_of_bfloat16(static_cast<uint16_t>(bits));
        if (!std::isnan(wide)) EXPECT(host::bfloat16_bits(wide) == bits, "0x%04x gives %g", bits, wide);
    }
    // Halfway between neighbours goes to the even one; just above goes up.
    EXPECT(host::half_bits(1.0f + 0x1p-11f) == 0x3c00, "tie to even");
    EXPECT(host::half_bits(1.0f + 0x3p-11f) == 0x3c02, "tie to even");
    EXPECT(host::half_bits(1.0f + 0x1p-11f + 0x1p-20f) == 0x3c01, "above the tie");
    EXPECT(host::half_bits(65519.0f) == 0x7bff, "largest");
    EXPECT(host::half_bits(65520.0f) == 0x7c00, "rounds to infinity");
    EXPECT(host::half_bits(0x1p-25f) == 0, "half of the smallest goes to zero");
    EXPECT(host::half_bits(0x1.8p-25f) == 1, "more than half goes up");
    EXPECT(host::bfloat16_bits(1.0f + 0x1p-8f) == 0x3f80, "tie to even");
    EXPECT(host::bfloat16_bits(1.0f + 0x3p-8f) == 0x3f82, "tie to even");
    EXPECT(std::isnan(host::float_of_half(host::half_bits(NAN))), "NaN");
    EXPECT(std::isnan(host::float_of_bfloat16(host::bfloat16_bits(NAN))), "NaN");
#if defined(__FLT16_MANT_DIG__)
    std::mt19937 random(11);
    for (int draw = 0; draw < 200000; ++draw) {
        const float value = bits_as_float(static_cast<uint32_t>(random()));
        if (std::isnan(value)) continue;
        const _Float16 narrow = static_cast<_Float16>(value);
        uint16_t expected;
        std::memcpy(&expected, &narrow, sizeof expected);
        EXPECT(host::half_bits(value) == expected, "%a gives 0x%04x, not 0x%04x", value, host::half_bits(value),
               expected);
    }
#endif
}
#endif

struct Check {
    const char* name;
    void (*run)();
};

constexpr Check kChecks[] = {
    {"positions", check_positions}, {"barriers", check_barriers},           {"shuffles", check_shuffles},
    {"votes", check_votes},         {"warp_barriers", check_warp_barriers}, {"copies", check_copies},
    {"fragments", check_fragments}, {"products", check_products},           {"arithmetic", check_arithmetic},
    {"atomics", check_atomics},     {"refusals", check_refusals},
#if defined(TILERANK_HOST_BUILD)
    {"recovery", check_recovery},   {"conversions", check_conversions},
#endif
};

void run_all(const char* schedule) {
    for (const Check& check : kChecks) {
        current_check = check.name;
        const int before = failures;
        check.run();
        std::printf("%s %s (%s)\n", failures == before ? "passed" : "FAILED", check.name, schedule);
    }
}

}  // namespace

int main() {
#if defined(TILERANK_HOST_BUILD)
    for (const char* schedule : {"forward", "reverse", "last_in", "random"}) {
        if (tilerank_host_set_schedule(schedule, 1) != 0) return 98;
        run_all(schedule);
    }
#else
    run_all("device");
#endif
    return failures;
}
