// Shared policy of the layer-normalisation kernels: what a row is made of, and how its result is written.
#pragma once

#include "common/layernorm.h"
#include "common/moments.cuh"

namespace tilerank {

// Do all rows, and bias, gamma and beta, begin at multiples of 16 bytes?
inline bool rows_aligned(const LayernormArgs& args) {
    const uintptr_t pointers =
        reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.residual) |
        reinterpret_cast<uintptr_t>(args.bias) | reinterpret_cast<uintptr_t>(args.gamma) |
        reinterpret_cast<uintptr_t>(args.beta) | reinterpret_cast<uintptr_t>(args.out) |
        reinterpret_cast<uintptr_t>(args.sum);
    const int64_t strides = args.x_stride | args.out_stride | (args.residual == nullptr ? 0 : args.residual_stride) |
                            (args.sum == nullptr ? 0 : args.sum_stride);
    return pointers % 16 == 0 && strides % (args.dtype == TILERANK_FP32 ? 4 : 8) == 0;
}

// One row of a call.
template <typename Element>
struct NormRow {
    const Element* x;
    const Element* residual;  // null: none; so with bias, gamma, beta and sum
    const Element* bias;
    const Element* gamma;
    const Element* beta;
    Element* out;
    Element* sum;

    __device__ __forceinline__ NormRow(const LayernormArgs& args, int64_t row)
        : x(static_cast<const Element*>(args.x) + row * args.x_stride),
          residual(args.residual == nullptr
                       ? nullptr
                       : static_cast<const Element*>(args.residual) + row * args.residual_stride),
          bias(static_cast<const Element*>(args.bias)),
          gamma(static_cast<const Element*>(args.gamma)),
          beta(static_cast<const Element*>(args.beta)),
          out(static_cast<Element*>(args.out) + row * args.out_stride),
          sum(args.sum == nullptr ? nullptr : static_cast<Element*>(args.sum) + row * args.sum_stride) {}

    // What is normalised.
    __device__ __forceinline__ float load(int64_t column) const {
        float value = to_float(x[column]);
        if (bias != nullptr) value += to_float(bias[column]);
        if (residual != nullptr) value += to_float(residual[column]);
        return value;
    }

    // kPart columns at once, of which `count` exist; the others are zeros.
    template <int kPart>
    __device__ __forceinline__ void load(float (&values)[kPart], int64_t column, int count, bool aligned) const {
        load_floats(values, x + column, count, aligned);
        float more[kPart];
        if (bias != nullptr) {
            load_floats(more, bias + column, count, aligned);
#pragma unroll
            for (int i = 0; i < kPart; ++i) values[i] += more[i];
        }
        if (residual != nullptr) {
            load_floats(more, residual + column, count, aligned);
#pragma unroll
            for (int i = 0; i < kPart; ++i) values[i] += more[i];
        }
    }

    __device__ __forceinline__ void store(int64_t column, float value, const RowScale& scale) const {
        if (sum != nullptr) sum[column] = from_float<Element>(value);
        value = (value - scale.mean) * scale.factor;
        if (gamma != nullptr) value *= to_float(gamma[column]);
        if (beta != nullptr) value += to_float(beta[column]);
        out[column] = from_float<Element>(value);
    }

    template <int kPart>
    __device__ __forceinline__ void store(int64_t column, float (&values)[kPart], int count, bool aligned,
                                          const RowScale& scale) const {
        if (sum != nullptr) store_floats(sum + column, values, count, aligned);
        float factors[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[i] = (values[i] - scale.mean) * scale.factor;
        if (gamma != nullptr) {
            load_floats(factors, gamma + column, count, aligned);
#pragma unroll
            for (int i = 0; i < kPart; ++i) values[i] *= factors[i];
        }
        if (beta != nullptr) {
            load_floats(factors, beta + column, count, aligned);
#pragma unroll
            for (int i = 0; i < kPart; ++i) values[i] += factors[i];
        }
        store_floats(out + column, values, count, aligned);
    }
};

}  // namespace tilerank
