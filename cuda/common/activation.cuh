// GELU as BERT has it: x times the share of a normal distribution below x, by the error function, not its tanh stand-in.
#pragma once

#include "common/device.h"

namespace tilerank {

// For 16-bit results: the share beyond |x| as a power of two whose exponent is a polynomial of |x|. One operation on the
// MUFU pipe, absolute error at most 7e-7, and 1e-4 of the result above -3; below zero nothing cancels.
__device__ __forceinline__ float gelu_approx(float x) {
    const float size = fabsf(x);
    float exponent = fmaf(size, -0.00047329342f, 0.0070844535f);
    exponent = fmaf(size, exponent, -0.05182714f);
    exponent = fmaf(size, exponent, -0.45999268f);
    exponent = fmaf(size, exponent, -1.1507877f);
    exponent = fmaf(size, exponent, -1.0000377f);
    return fmaf(-size, exp2_approx(exponent), fmaxf(x, 0.0f));
}

}  // namespace tilerank
