// Welford: one warp a row. Mean and variance come from one pass (Welford's, in its parallel form), merged by shuffles;
// a second pass writes. No barrier.
// Prediction: 25 us for 16,384 rows of 1,024 in fp16: one read less than two_pass and no barrier, but a division an
//   element, and 32 loads a row in turn.
// Answer: metrics/<machine>/bench_layernorm.json and docs/block.md.
#include "common/layernorm.cuh"

namespace tilerank {
namespace welford {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

template <typename Element>
__global__ void __launch_bounds__(kThreads) kernel(LayernormArgs args) {
    const int lane = threadIdx.x % kWarpSize;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (index >= args.rows) return;
    const NormRow<Element> row(args, index);
    Moments moments;
    for (int64_t column = lane; column < args.width; column += kWarpSize) {
        const float distance = row.load(column) - moments.mean;
        moments.count += 1.0f;
        moments.mean += distance / moments.count;
        moments.squares += distance * (row.load(column) - moments.mean);
    }
    moments.merge_warp();
    const RowScale scale = row_scale(moments, static_cast<float>(args.epsilon));
    for (int64_t column = lane; column < args.width; column += kWarpSize) {
        row.store(column, row.load(column), scale);
    }
}

}  // namespace welford

tilerank_status layernorm_welford(const LayernormArgs& args, void*, void* stream) {
    const auto kernel = args.dtype == TILERANK_FP32   ? welford::kernel<float>
                        : args.dtype == TILERANK_FP16 ? welford::kernel<__half>
                                                      : welford::kernel<__nv_bfloat16>;
    return launch_blocks("welford", kernel, (args.rows + welford::kWarps - 1) / welford::kWarps, welford::kThreads, 0,
                         stream, args);
}

}  // namespace tilerank
