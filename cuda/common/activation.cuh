// GELU as BERT has it: x times the share of a normal distribution below x, by the error function, not its tanh stand-in.
#pragma once

#include "common/device.h"

namespace tilerank {

// For 16-bit results: absolute error at most 3e-7 |x|. The share beyond |x| by Abramowitz and Stegun 7.1.26, two
// operations on the MUFU pipe; below zero nothing cancels.
__device__ __forceinline__ float gelu_approx(float x) {
    constexpr float kLog2e = 1.44269504f;
    const float size = fabsf(x);
    // p / sqrt(2) of the formula, whose argument is |x| / sqrt(2).
    const float t = reciprocal_approx(fmaf(0.3275911f * 0.70710678f, size, 1.0f));
    float share = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    share = fmaf(t, share, 0.5f * 1.421413741f);
    share = fmaf(t, share, 0.5f * -0.284496736f);
    share = fmaf(t, share, 0.5f * 0.254829592f);
    share *= t * exp2_approx(x * x * (-0.5f * kLog2e));
    return fmaf(-size, share, fmaxf(x, 0.0f));
}

// The same with one operation on the MUFU pipe: the share beyond |x| is a power of two whose exponent is a polynomial of
// |x|. Absolute error at most 7e-7, and 1e-4 of the result above -3.
__device__ __forceinline__ float gelu_by_power(float x) {
    const float size = fabsf(x);
    float exponent = fmaf(size, -0.00047329342f, 0.0070844535f);
    exponent = fmaf(size, exponent, -0.05182714f);
    exponent = fmaf(size, exponent, -0.45999268f);
    exponent = fmaf(size, exponent, -1.1507877f);
    exponent = fmaf(size, exponent, -1.0000377f);
    return fmaf(-size, exp2_approx(exponent), fmaxf(x, 0.0f));
}

}  // namespace tilerank
