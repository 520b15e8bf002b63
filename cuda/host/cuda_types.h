// CUDA's vector and 16-bit types for g++, under CUDA's names, with CUDA's alignment. No CUDA header is needed.
#pragma once

#include <cstdint>
#include <cstring>

// ---- Vectors --------------------------------------------------------------------------------------------------------

#define TILERANK_VECTORS(name, element)                                                              \
    struct alignas(2 * sizeof(element)) name##2 { element x, y; };                                   \
    struct name##3 { element x, y, z; };                                                             \
    struct alignas(sizeof(element) == 8 ? 16 : 4 * sizeof(element)) name##4 { element x, y, z, w; }; \
    inline name##2 make_##name##2(element x, element y) { return {x, y}; }                           \
    inline name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; }             \
    inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }

TILERANK_VECTORS(int, int)
TILERANK_VECTORS(uint, unsigned)
TILERANK_VECTORS(float, float)
TILERANK_VECTORS(double, double)
TILERANK_VECTORS(longlong, long long)
#undef TILERANK_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
};

// ---- 16-bit floating point ------------------------------------------------------------------------------------------

namespace tilerank::host {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// value rounded to the nearest multiple of 2^-dropped of its last place, ties to even: the bits above `dropped`.
inline uint32_t round_bits(uint32_t bits, int dropped) {
    const uint32_t half = 1u << (dropped - 1);
    const uint32_t odd = (bits >> dropped) & 1u;
    return (bits + half - 1 + odd) >> dropped;
}

inline uint16_t half_bits(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;          // CUDA's one NaN
    if (magnitude >= 0x47800000u) return sign | 0x7c00;  // 65536 and above, infinity
    if (magnitude < 0x33000001u) return sign;            // at most half of the smallest subnormal
    if (magnitude < 0x38800000u) {                       // subnormal: a multiple of 2^-24
        const int shift = 126 - static_cast<int>(magnitude >> 23);
        return sign | static_cast<uint16_t>(round_bits(0x00800000u | (magnitude & 0x007fffffu), shift));
    }
    return sign | static_cast<uint16_t>(round_bits(magnitude - 0x38000000u, 13));  // may carry into infinity
}

inline float float_of_half(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = bits >> 10 & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 0x1f) return float_of_bits(sign | 0x7f800000u | fraction << 13);
    return float_of_bits(sign | ((exponent + 112) << 23) | fraction << 13);
}

inline uint16_t bfloat16_bits(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>(round_bits(bits, 16));
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// A 16-bit number that computes in fp32 and rounds once an operation, as the device's 16-bit units do.
template <uint16_t (*Narrow)(float), float (*Widen)(uint16_t)>
struct Number16 {
    uint16_t bits;

    Number16() = default;
    Number16(float value) : bits(Narrow(value)) {}
    operator float() const { return Widen(bits); }

    friend Number16 operator+(Number16 a, Number16 b) { return float(a) + float(b); }
    friend Number16 operator-(Number16 a, Number16 b) { return float(a) - float(b); }
    friend Number16 operator*(Number16 a, Number16 b) { return float(a) * float(b); }
    friend Number16 operator/(Number16 a, Number16 b) { return float(a) / float(b); }
    friend Number16 operator-(Number16 a) { return -float(a); }
    Number16& operator+=(Number16 other) { return *this = *this + other; }
    Number16& operator*=(Number16 other) { return *this = *this * other; }
};

template <typename Number>
struct alignas(4) Pair16 {
    Number x, y;
};

}  // namespace tilerank::host

using __half = tilerank::host::Number16<tilerank::host::half_bits, tilerank::host::float_of_half>;
using __nv_bfloat16 = tilerank::host::Number16<tilerank::host::bfloat16_bits, tilerank::host::float_of_bfloat16>;
using __half2 = tilerank::host::Pair16<__half>;
using __nv_bfloat162 = tilerank::host::Pair16<__nv_bfloat16>;
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
