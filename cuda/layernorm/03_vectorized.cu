// Vectorised: rows by 16-byte vectors, a warp or half a warp each. A row stays in registers, all its loads under way at
// once, so that its mean and then its variance take two short passes without memory. Rows that are too wide or do not
// begin at multiples of 16 bytes are welford's, by vectors.
// Prediction: 17 us for 16,384 rows of 1,024 in fp16, and 5 us for 512: 67 MB at 4.2 TB/s, nothing else in the way.
// Answer: metrics/<machine>/bench_layernorm.json and docs/block.md.
#include "common/layernorm.cuh"

namespace tilerank {
namespace vectorized {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMostParts = 8;  // vectors of a row that a lane keeps

// Sum over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance);
    }
    return value;
}

// Rows of `vectors` vectors, each by kLanes lanes that keep kParts of them.
template <typename Element, int kLanes, int kParts>
__global__ void __launch_bounds__(kThreads) kernel(LayernormArgs args, int vectors) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kRows = kThreads / kLanes;  // of a block
    const int lane = threadIdx.x % kLanes;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const NormRow<Element> row(args, min(index, args.rows - 1));  // lanes without a row have the last one, unwritten
    const float width = static_cast<float>(args.width);
    const auto column_of = [&](int part) { return (part * kLanes + lane) * kPart; };
    const auto exists = [&](int part) { return (part + 1) * kLanes <= vectors || part * kLanes + lane < vectors; };
    float values[kParts][kPart] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (exists(part)) row.load(values[part], column_of(part), kPart, true);
    }
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) sum += values[part][i];  // zeros where there is no vector
    }
    RowScale scale;
    scale.mean = lanes_sum<kLanes>(sum) / width;
    float squares = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (!exists(part)) continue;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            const float distance = values[part][i] - scale.mean;
            squares += distance * distance;
        }
    }
    scale.factor = 1.0f / sqrtf(lanes_sum<kLanes>(squares) / width + static_cast<float>(args.epsilon));
    if (index >= args.rows) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        if (exists(part)) row.store(column_of(part), values[part], kPart, true, scale);
    }
}

// Rows that are read twice, each by a warp.
template <typename Element>
__global__ void __launch_bounds__(kThreads) read_twice(LayernormArgs args, bool aligned) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kStep = kWarpSize * kPart;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (index >= args.rows) return;
    const NormRow<Element> row(args, index);
    const auto count_at = [&](int64_t column) {
        return static_cast<int>(clamp(args.width - column, 0, static_cast<int64_t>(kPart)));
    };
    Moments moments;
    float values[kPart];
    for (int64_t column = lane * kPart; column < args.width; column += kStep) {
        row.load(values, column, count_at(column), aligned);
        moments.add(values, count_at(column));
    }
    moments.merge_warp();
    const RowScale scale = row_scale(moments, static_cast<float>(args.epsilon));
    for (int64_t column = lane * kPart; column < args.width; column += kStep) {
        row.load(values, column, count_at(column), aligned);
        row.store(column, values, count_at(column), aligned, scale);
    }
}

template <typename Element, int kLanes, int kParts>
tilerank_status launch_rows(const LayernormArgs& args, void* stream) {
    constexpr int64_t kRows = kThreads / kLanes;
    return launch_blocks("vectorized", kernel<Element, kLanes, kParts>, (args.rows + kRows - 1) / kRows, kThreads, 0,
                         stream, args, static_cast<int>(args.width * sizeof(Element) / 16));
}

template <typename Element>
tilerank_status launch_typed(const LayernormArgs& args, void* stream) {
    constexpr int64_t kPart = 16 / sizeof(Element);
    const int64_t vectors = args.width / kPart;
    const bool aligned = rows_aligned(args);
    if (!aligned || args.width % kPart != 0 || vectors > kMostParts * kWarpSize) {
        return launch_blocks("vectorized", read_twice<Element>, (args.rows + kWarps - 1) / kWarps, kThreads, 0, stream,
                             args, aligned);
    }
    const auto run = vectors <= 16         ? launch_rows<Element, 16, 1>
                     : vectors <= 2 * 16   ? launch_rows<Element, 16, 2>
                     : vectors <= 3 * 16   ? launch_rows<Element, 16, 3>
                     : vectors <= 2 * 32   ? launch_rows<Element, 32, 2>
                     : vectors <= 3 * 32   ? launch_rows<Element, 32, 3>
                     : vectors <= 4 * 32   ? launch_rows<Element, 32, 4>
                     : vectors <= 6 * 32   ? launch_rows<Element, 32, 6>
                                           : launch_rows<Element, 32, kMostParts>;
    return run(args, stream);
}

}  // namespace vectorized

tilerank_status layernorm_vectorized(const LayernormArgs& args, void*, void* stream) {
    switch (args.dtype) {
        case TILERANK_FP32:
            return vectorized::launch_typed<float>(args, stream);
        case TILERANK_FP16:
            return vectorized::launch_typed<__half>(args, stream);
        default:
            return vectorized::launch_typed<__nv_bfloat16>(args, stream);
    }
}

}  // namespace tilerank
