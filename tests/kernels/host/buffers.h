// Memory for the host checks: elements of each dtype, and buffers between wide gaps that AddressSanitizer guards.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tilerank.h"

#include "host/cuda_types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

constexpr int64_t kGapBytes = 4096;

// ---- Elements -------------------------------------------------------------------------------------------------------

[[maybe_unused]] int64_t element_bytes(int32_t dtype) { return dtype == TILERANK_FP32 ? 4 : 2; }

[[maybe_unused]] uint16_t fp16_bits(float value) { return tilerank::host::half_bits(value); }
[[maybe_unused]] uint16_t bf16_bits(float value) { return tilerank::host::bfloat16_bits(value); }
[[maybe_unused]] float float_of_fp16(uint16_t bits) { return tilerank::host::float_of_half(bits); }
[[maybe_unused]] float float_of_bf16(uint16_t bits) { return tilerank::host::float_of_bfloat16(bits); }

[[maybe_unused]] void encode(unsigned char* at, int32_t dtype, float value) {
    if (dtype == TILERANK_FP32) {
        std::memcpy(at, &value, 4);
        return;
    }
    const uint16_t bits = dtype == TILERANK_FP16 ? fp16_bits(value) : bf16_bits(value);
    std::memcpy(at, &bits, 2);
}

[[maybe_unused]] float decode(const unsigned char* at, int32_t dtype) {
    if (dtype == TILERANK_FP32) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return dtype == TILERANK_FP16 ? float_of_fp16(bits) : float_of_bf16(bits);
}

// ---- Buffers --------------------------------------------------------------------------------------------------------

// Bytes between two gaps, all 0xff (NaN in every format) to begin with.
class Buffer {
  public:
    explicit Buffer(int64_t bytes) : bytes_(bytes), memory_(static_cast<size_t>(bytes + 2 * kGapBytes), 0xff) {}
    ~Buffer() { open(-kGapBytes, bytes_ + 2 * kGapBytes); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    int64_t bytes() const { return bytes_; }
    unsigned char* data(int64_t at = 0) { return memory_.data() + kGapBytes + at; }  // aligned to 16 bytes for at = 0

    // Forbids every access, then allows [at, at + bytes) again.
    void close() {
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(memory_.data(), memory_.size());
#endif
    }
    void open([[maybe_unused]] int64_t at, [[maybe_unused]] int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
        if (bytes > 0) __asan_unpoison_memory_region(at == -kGapBytes ? memory_.data() : data(at), bytes);
#endif
    }

  private:
    int64_t bytes_;
    std::vector<unsigned char> memory_;
};

}  // namespace
