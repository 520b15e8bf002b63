// Register-cached: naive, but q and the accumulator of a thread's row stay in registers, their bounds known at compile
// time, and the row of the result is accumulated in one sweep. Every key counts: key lengths come with fused_masked.
// Prediction: 2,500 us unmasked. A score takes 96 loads of one word (q k twice, v once), and L1 hands an SM one word a
//   lane and cycle: 157 M scores / 32 lanes x 96 cycles / 132 SMs / 1.98 GHz = 1,800 us; the rest is latency.
// Answer: metrics/<machine>/bench_attention_register_cached.json and docs/ladder.md.
#include "common/softmax.cuh"

namespace tilerank {
namespace register_cached {

constexpr int kThreads = 128;  // as naive: what changes is where the operands live

template <int D>
__device__ __forceinline__ float dot(const float (&q)[D], const float* k_row) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < D; ++d) sum += q[d] * k_row[d];
    return sum;
}

template <int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, int64_t rows) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    const int64_t query = row % args.q_len;
    const int64_t head = row / args.q_len % args.heads;
    const int64_t sequence = row / args.q_len / args.heads;
    const HeadView<float> view = head_view<float>(args, sequence, head);

    const float* q_row = view.q + query * args.q_token_stride;
    float q[D];
#pragma unroll
    for (int d = 0; d < D; ++d) q[d] = q_row[d];

    float row_max = -INFINITY;
    for (int64_t key = 0; key < view.k_len; ++key) {
        row_max = fmaxf(row_max, args.scale * dot<D>(q, view.k + key * args.k_token_stride));
    }

    float accumulator[D] = {};
    float row_sum = 0.0f;
    for (int64_t key = 0; key < view.k_len; ++key) {
        const float weight = expf(args.scale * dot<D>(q, view.k + key * args.k_token_stride) - row_max);
        row_sum += weight;
        const float* v_row = view.v + key * args.v_token_stride;
#pragma unroll
        for (int d = 0; d < D; ++d) accumulator[d] += weight * v_row[d];
    }

    const float factor = normalizer(row_sum);
    float* out_row = view.out + query * args.out_token_stride;
#pragma unroll
    for (int d = 0; d < D; ++d) out_row[d] = accumulator[d] * factor;
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    const int64_t rows = args.batch * args.heads * args.q_len;
    return launch_blocks("register_cached", kernel<D>, (rows + kThreads - 1) / kThreads, kThreads, 0, stream, args,
                         rows);
}

}  // namespace register_cached

tilerank_status attention_register_cached(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return register_cached::launch_for<32>(args, stream);
        default:
            return register_cached::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
