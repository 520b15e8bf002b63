// Shared policy of the kernels' softmax: normalisation, and the running softmax of the fused kernels, in base 2.
#pragma once

#include "common/attention.cuh"

namespace tilerank {

// What the accumulated row is multiplied by at its end. A sum of 0 means that the row saw no key (the largest weight of
// any other row is 1 or more): zeros, not 0/0.
__device__ __forceinline__ float normalizer(float row_sum) { return row_sum == 0.0f ? 0.0f : 1.0f / row_sum; }

// Multiplied into q once, it makes exp2(<q, k>) what exp(scale * <q, k>) was: one instruction a weight instead of
// eight.
inline float scale_log2(const AttentionArgs& args) {
    constexpr double kLog2E = 1.4426950408889634;
    return static_cast<float>(args.exact_scale * kLog2E);
}

// The score where the row may see the key, else -inf: by selection, so that NaN behind a hidden key is gone.
__device__ __forceinline__ float hide_unless(bool visible, float score) { return visible ? score : -INFINITY; }

// Where a row's maximum starts. Finite, so that a hidden score relative to it is -inf and its weight 0, not NaN.
constexpr float kLowestMax = -3.402823466e+38f;

// How far, in powers of two, a row's maximum may lag behind its scores where small rises are let pass: weights then
// reach 256 instead of 1, which costs fp32 no accuracy.
constexpr float kMaxLag = 8.0f;

// One row's softmax so far: weights are exp2(score - max).
struct SoftmaxState {
    float max = kLowestMax;
    float sum = 0.0f;

    // Makes weights relative to new_max. Returns what was accumulated so far must be multiplied by.
    __device__ __forceinline__ float rebase(float new_max) {
        const float factor = exp2_approx(max - new_max);
        max = new_max;
        sum *= factor;
        return factor;
    }

    // Do scores up to new_max ask for a new maximum? The answer, and so the row's result, depends on this row alone.
    __device__ __forceinline__ bool lags(float new_max) const { return new_max > max + kMaxLag; }

    // rebase where that is so; elsewhere nothing changes and the factor is 1.
    __device__ __forceinline__ float rebase_if_lagging(float new_max) { return rebase(lags(new_max) ? new_max : max); }

    // The weight of a score, which joins the sum.
    __device__ __forceinline__ float add(float score) {
        const float weight = exp2_approx(score - max);
        sum += weight;
        return weight;
    }
};

}  // namespace tilerank
