// What the drivers share: memory where variants run, elements of every dtype, tallies.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tilerank.h"

#if defined(TILERANK_DRIVER_CUDA)
#include <cuda_runtime.h>
#endif

namespace {

[[noreturn]] void stop(const char* what, const char* why) {
    std::fprintf(stderr, "driver: %s: %s\n", what, why);
    std::exit(2);
}

// ---- Memory where the variants run: the GPU's, or the CPU's when the CUDA sources were built for it ----

#if defined(TILERANK_DRIVER_CUDA)
void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) stop(what, cudaGetErrorString(error));
}
void* allocate(size_t bytes) {
    void* pointer = nullptr;
    check_cuda(cudaMalloc(&pointer, bytes), "cudaMalloc");
    return pointer;
}
void release(void* pointer) { check_cuda(cudaFree(pointer), "cudaFree"); }
void copy_in(void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}
void copy_out(void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}
int device_sm() {
    int major = 0;
    int minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "cudaDeviceGetAttribute");
    return 10 * major + minor;
}
#else
void* allocate(size_t bytes) {
    void* pointer = nullptr;
    if (posix_memalign(&pointer, 256, bytes) != 0) stop("memory", "there is none left");  // as aligned as a GPU's
    return pointer;
}
void release(void* pointer) { std::free(pointer); }
void copy_in(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void copy_out(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
int device_sm() { return 1000; }
#endif

// A copy of `bytes` in the variants' memory, exactly as large, freed at the end of its scope. Null when empty.
class DeviceBuffer {
  public:
    template <typename Element>
    explicit DeviceBuffer(const std::vector<Element>& content) : bytes_(content.size() * sizeof(Element)) {
        if (bytes_ == 0) return;
        pointer_ = allocate(bytes_);
        copy_in(pointer_, content.data(), bytes_);
    }
    ~DeviceBuffer() {
        if (pointer_ != nullptr) release(pointer_);
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    void* get() const { return pointer_; }
    template <typename Element>
    void read(std::vector<Element>* into) const {
        if (bytes_ > 0) copy_out(into->data(), pointer_, bytes_);
    }

  private:
    void* pointer_ = nullptr;
    size_t bytes_;
};

// ---- Elements ----

using Bytes = std::vector<uint8_t>;

size_t element_size(int dtype) { return dtype == TILERANK_FP32 ? 4 : 2; }

// Writes a number that every dtype holds exactly (eighths of small magnitude, infinities, NaN).
void put(Bytes* bytes, int dtype, size_t at, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == TILERANK_FP32) {
        std::memcpy(bytes->data() + 4 * at, &bits, 4);
        return;
    }
    uint16_t narrow = static_cast<uint16_t>(bits >> 16);  // bf16
    if (dtype == TILERANK_FP16) {
        const uint32_t exponent = bits >> 23 & 255;
        const uint32_t fraction = bits >> 13 & 1023;
        narrow = static_cast<uint16_t>((bits >> 16 & 0x8000) | (exponent == 255 ? 0x7c00 | fraction
                                                                : exponent == 0 ? 0
                                                                                : (exponent - 112) << 10 | fraction));
    }
    std::memcpy(bytes->data() + 2 * at, &narrow, 2);
}

float get(const Bytes& bytes, int dtype, size_t at) {
    uint32_t bits = 0;
    if (dtype == TILERANK_FP32) {
        std::memcpy(&bits, bytes.data() + 4 * at, 4);
    } else {
        uint16_t narrow;
        std::memcpy(&narrow, bytes.data() + 2 * at, 2);
        if (dtype == TILERANK_FP16) {
            const int exponent = narrow >> 10 & 31;
            const float fraction = static_cast<float>(narrow & 1023);
            const float sign = narrow & 0x8000 ? -1.0f : 1.0f;
            if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
            return sign * std::ldexp(exponent == 0 ? fraction : 1024 + fraction, (exponent == 0 ? 1 : exponent) - 25);
        }
        bits = static_cast<uint32_t>(narrow) << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
};

constexpr const char* kDtypeNames[] = {"fp32", "fp16", "bf16"};
constexpr size_t kGuard = 64;  // elements behind out that no kernel may touch

struct Tally {
    int cases = 0;
    int wrong = 0;
    double worst[3] = {0, 0, 0};  // of each dtype, where right

    void add(int dtype, double error) {
        ++cases;
        wrong += std::isinf(error);
        if (!std::isinf(error) && error > worst[dtype]) worst[dtype] = error;
    }
    void print(const char* variant) const {
        std::printf("%s: %d cases, %d wrong, largest difference from the reference: fp32 %.3g, fp16 %.3g, bf16 %.3g\n",
                    variant, cases, wrong, worst[0], worst[1], worst[2]);
    }
};

std::vector<int> parse_lengths(const char* text) {
    std::vector<int> lengths;
    for (const char* at = text; *at != '\0';) {
        char* end = nullptr;
        const long value = std::strtol(at, &end, 10);
        if (end == at || value < 0 || value > 65536) stop("--lengths", "expected numbers from 0 to 65536, like 0,1,33");
        lengths.push_back(static_cast<int>(value));
        at = *end == ',' ? end + 1 : end;
    }
    return lengths;
}

}  // namespace
