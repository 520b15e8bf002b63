// Elements of any dtype as double, for the references: they share no conversion with the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tilerank.h"

namespace tilerank {
namespace reference {

inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline double decode_fp16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = bits >> 10 & 31;
    const uint32_t fraction = bits & 1023;
    if (exponent == 0) return (sign ? -1.0 : 1.0) * 0x1p-24 * fraction;
    // The same number in fp32, whose exponent counts from another base; infinity and NaN keep the largest exponent.
    return float_from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

// To the nearest fp16, ties to even, straight from double: rounding to fp32 first could round twice.
inline uint16_t encode_fp16(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (magnitude >= 65520.0) return sign | 0x7c00;  // halfway from the largest number to the next power of two
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, 0.5 <= f < 1
    // Zero and subnormal numbers share the spacing of the smallest normal ones.
    if (magnitude == 0.0 || exponent < -13) exponent = -13;
    const double steps = std::nearbyint(std::ldexp(magnitude, 11 - exponent));
    // `steps` counts spacings of 2^(exponent - 11); adding it carries into the exponent field where it must.
    return sign | static_cast<uint16_t>((exponent + 13) * 1024 + static_cast<int>(steps));
}

inline double decode_bf16(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

// To the nearest bf16, ties to even. Through fp32 rounded to odd, whose sticky last bit keeps the second rounding
// right.
inline uint16_t encode_bf16(double value) {
    float narrow = static_cast<float>(value);
    if (std::isnan(narrow)) return 0x7fc0;
    uint32_t bits = bits_of(narrow);
    if (!std::isinf(narrow) && static_cast<double>(narrow) != value) {
        if (std::fabs(static_cast<double>(narrow)) > std::fabs(value)) bits -= 1;  // back to truncation
        bits |= 1;
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline double load(const void* base, int32_t dtype, int64_t at) {
    if (dtype == TILERANK_FP32) return static_cast<const float*>(base)[at];
    const uint16_t bits = static_cast<const uint16_t*>(base)[at];
    return dtype == TILERANK_FP16 ? decode_fp16(bits) : decode_bf16(bits);
}

inline void store(void* base, int32_t dtype, int64_t at, double value) {
    if (dtype == TILERANK_FP32) {
        static_cast<float*>(base)[at] = static_cast<float>(value);
    } else {
        static_cast<uint16_t*>(base)[at] = dtype == TILERANK_FP16 ? encode_fp16(value) : encode_bf16(value);
    }
}

}  // namespace reference
}  // namespace tilerank
