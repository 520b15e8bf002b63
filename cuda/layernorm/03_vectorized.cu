// Vectorised: a warp a row by 16-byte vectors. A row stays in registers, all its loads under way at once, so that its
// mean and then its variance take two short passes without memory; rows too wide for that are welford's, by vectors.
// Prediction: 17 us for 16,384 rows of 1,024 in fp16, and 5 us for 512: 67 MB at 4.2 TB/s, nothing else in the way.
// Answer: metrics/<machine>/bench_layernorm.json and docs/block.md.
#include "common/layernorm.cuh"

namespace tilerank {
namespace vectorized {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

// kParts: vectors of a row that a lane keeps; 0: none, the row is read twice.
template <typename Element, int kParts>
__global__ void __launch_bounds__(kThreads) kernel(LayernormArgs args, bool aligned) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kStep = kWarpSize * kPart;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (index >= args.rows) return;
    const NormRow<Element> row(args, index);
    const float epsilon = static_cast<float>(args.epsilon);
    const auto count_at = [&](int64_t column) {
        return static_cast<int>(clamp(args.width - column, 0, static_cast<int64_t>(kPart)));
    };
    const float width = static_cast<float>(args.width);
    const auto warp_sum = [](float value) {
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(kFullMask, value, distance);
        }
        return value;
    };
    if constexpr (kParts > 0) {
        float values[kParts][kPart] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int64_t column = part * kStep + lane * kPart;
            if (count_at(column) > 0) row.load(values[part], column, count_at(column), aligned);
        }
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int count = count_at(part * kStep + lane * kPart);
#pragma unroll
            for (int i = 0; i < kPart; ++i) sum += i < count ? values[part][i] : 0.0f;
        }
        RowScale scale;
        scale.mean = warp_sum(sum) / width;
        float squares = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int count = count_at(part * kStep + lane * kPart);
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                const float distance = i < count ? values[part][i] - scale.mean : 0.0f;
                squares += distance * distance;
            }
        }
        scale.factor = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int64_t column = part * kStep + lane * kPart;
            if (count_at(column) > 0) row.store(column, values[part], count_at(column), aligned, scale);
        }
    } else {
        Moments moments;
        float values[kPart];
        for (int64_t column = lane * kPart; column < args.width; column += kStep) {
            row.load(values, column, count_at(column), aligned);
            moments.add(values, count_at(column));
        }
        moments.merge_warp();
        const RowScale scale = row_scale(moments, epsilon);
        for (int64_t column = lane * kPart; column < args.width; column += kStep) {
            row.load(values, column, count_at(column), aligned);
            row.store(column, values, count_at(column), aligned, scale);
        }
    }
}

template <typename Element>
tilerank_status launch_typed(const LayernormArgs& args, void* stream) {
    const int64_t parts = (args.width + 512 / sizeof(Element) - 1) / (512 / static_cast<int64_t>(sizeof(Element)));
    const auto run = parts <= 2   ? kernel<Element, 2>
                     : parts <= 4 ? kernel<Element, 4>
                     : parts <= 8 ? kernel<Element, 8>
                                  : kernel<Element, 0>;
    return launch_blocks("vectorized", run, (args.rows + kWarps - 1) / kWarps, kThreads, 0, stream, args,
                         rows_aligned(args));
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
