// Mean and variance of a row, by Welford's way in its parallel form: partial means and sums of squared distances from
// them are merged, so that no large squares are subtracted from each other however far the mean is from zero.
// (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979.)
#pragma once

#include "common/attention.cuh"

namespace tilerank {

// kCount consecutive elements of a row as floats, those from `count` on as zeros. aligned: 16-byte vectors may be read.
template <int kCount, typename Element>
__device__ __forceinline__ void load_floats(float (&values)[kCount], const Element* source, int count, bool aligned) {
    static_assert(kCount * sizeof(Element) == 16);
    if (aligned && count >= kCount) {
        const uint4 raw = load_vector<uint4>(source);
        Element elements[kCount];
        memcpy(elements, &raw, sizeof(raw));
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = i < count ? to_float(source[i]) : 0.0f;
}

// The same the other way: values rounded to Element, those below `count` only.
template <int kCount, typename Element>
__device__ __forceinline__ void store_floats(Element* target, const float (&values)[kCount], int count, bool aligned) {
    static_assert(kCount * sizeof(Element) == 16);
    Element elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = from_float<Element>(values[i]);
    if (aligned && count >= kCount) {
        uint4 raw;
        memcpy(&raw, elements, sizeof(raw));
        store_vector(target, raw);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) target[i] = elements[i];
    }
}

// The sum of all lanes' values, the same bits in each.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance);
    }
    return value;
}

// Of some numbers: how many, their mean, and the sum of their squared distances from it.
struct Moments {
    float count = 0.0f;
    float mean = 0.0f;
    float squares = 0.0f;

    __device__ __forceinline__ void merge(const Moments& other) {
        const float total = count + other.count;
        if (total == 0.0f) return;
        const float share = other.count / total;
        const float distance = other.mean - mean;
        mean += distance * share;
        squares += other.squares + distance * distance * count * share;
        count = total;
    }

    // The first `given` of kCount numbers.
    template <int kCount>
    __device__ __forceinline__ void add(const float (&values)[kCount], int given) {
        if (given <= 0) return;
        Moments part;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum += i < given ? values[i] : 0.0f;
        part.count = static_cast<float>(min(given, kCount));
        part.mean = sum / part.count;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float distance = i < given ? values[i] - part.mean : 0.0f;
            part.squares += distance * distance;
        }
        merge(part);
    }

    // Of all lanes' numbers; every lane gets lane 0's answer, since the order of merging shows in the last place.
    __device__ __forceinline__ void merge_warp() {
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            Moments other;
            other.count = __shfl_down_sync(kFullMask, count, distance);
            other.mean = __shfl_down_sync(kFullMask, mean, distance);
            other.squares = __shfl_down_sync(kFullMask, squares, distance);
            merge(other);
        }
        count = __shfl_sync(kFullMask, count, 0);
        mean = __shfl_sync(kFullMask, mean, 0);
        squares = __shfl_sync(kFullMask, squares, 0);
    }
};

// What normalising a row takes: (value - mean) * factor.
struct RowScale {
    float mean;
    float factor;
};

__device__ __forceinline__ RowScale row_scale(const Moments& moments, float epsilon) {
    return {moments.mean, 1.0f / sqrtf(moments.squares / moments.count + epsilon)};
}

}  // namespace tilerank
