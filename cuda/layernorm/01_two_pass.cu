// Two passes: one block a row, whose threads read the row for its mean, again for its variance, and again to write.
// Prediction: 25 us for 16,384 rows of 1,024 in fp16, beside 20 us of PyTorch's: the second and third reads come
//   from L1, but elements are read two bytes a lane and two block-wide sums wait a row.
// Answer: metrics/<machine>/bench_layernorm.json and docs/block.md.
#include "common/layernorm.cuh"

namespace tilerank {
namespace two_pass {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

// The block's sum of a value a thread.
__device__ __forceinline__ float block_sum(float value, float (&partial)[kWarps]) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance);
    }
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
    return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) kernel(LayernormArgs args) {
    SHARED(float, partial, [kWarps]);
    const NormRow<Element> row(args, blockIdx.x);
    const float width = static_cast<float>(args.width);
    float sum = 0.0f;
    for (int64_t column = threadIdx.x; column < args.width; column += kThreads) sum += row.load(column);
    RowScale scale;
    scale.mean = block_sum(sum, partial) / width;
    float squares = 0.0f;
    for (int64_t column = threadIdx.x; column < args.width; column += kThreads) {
        const float distance = row.load(column) - scale.mean;
        squares += distance * distance;
    }
    scale.factor = 1.0f / sqrtf(block_sum(squares, partial) / width + static_cast<float>(args.epsilon));
    for (int64_t column = threadIdx.x; column < args.width; column += kThreads) {
        row.store(column, row.load(column), scale);
    }
}

}  // namespace two_pass

tilerank_status layernorm_two_pass(const LayernormArgs& args, void*, void* stream) {
    const auto kernel = args.dtype == TILERANK_FP32   ? two_pass::kernel<float>
                        : args.dtype == TILERANK_FP16 ? two_pass::kernel<__half>
                                                      : two_pass::kernel<__nv_bfloat16>;
    return launch_blocks("two_pass", kernel, args.rows, two_pass::kThreads, 0, stream, args);
}

}  // namespace tilerank
