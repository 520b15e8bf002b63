// Naive: one thread a query row and a serial loop over its keys. Nothing is kept on chip: q, k and v come from global
// memory at every use, and every score is computed again when its weight is needed (once a 32 columns of the result).
// Prediction: tens of times slower than SDPA, bound by L1 traffic: the 32 threads of a warp read 32 rows of q at once,
//   a cache line each, and each multiply-add of q k waits for two loads.
// Answer: metrics/<machine>/bench_attention_naive.json and docs/ladder.md.
#include "common/attention.cuh"

namespace tilerank {
namespace naive {

constexpr int kThreads = 128;  // four warps: enough of them fit on an SM whatever the registers
constexpr int kRun = 32;       // terms of a score summed in a row, so that rounding does not grow with the head dim
constexpr int kColumns = 32;   // of the result, accumulated at a time: a compile-time bound keeps them in registers

template <typename Element>
__device__ float dot(const Element* q_row, const Element* k_row, int head_dim) {
    float sum = 0.0f;
    for (int first = 0; first < head_dim; first += kRun) {
        float run = 0.0f;
        for (int d = first; d < head_dim && d < first + kRun; ++d) run += to_float(q_row[d]) * to_float(k_row[d]);
        sum += run;
    }
    return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, int64_t rows) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    const int64_t query = row % args.q_len;
    const int64_t head = row / args.q_len % args.heads;
    const int64_t sequence = row / args.q_len / args.heads;
    const HeadView<Element> view = head_view<Element>(args, sequence, head);
    if (query >= view.q_len) return;  // packed, and shorter than the longest sequence

    const Element* q_row = view.q + query * args.q_token_stride;
    Element* out_row = view.out + query * args.out_token_stride;
    const int64_t keys = visible_keys(args, view.k_len, query);

    float row_max = -INFINITY;
    for (int64_t key = 0; key < keys; ++key) {
        const float bias = mask_bias(args, sequence, head, query, key);
        if (bias == -INFINITY) continue;
        row_max = fmaxf(row_max, args.scale * dot(q_row, view.k + key * args.k_token_stride, args.head_dim) + bias);
    }
    // With no finite score there is nothing to be relative to; -inf - -inf would be NaN.
    const float shift = row_max == -INFINITY ? 0.0f : row_max;

    for (int first = 0; first < args.head_dim; first += kColumns) {
        float accumulator[kColumns] = {};
        float row_sum = 0.0f;
        for (int64_t key = 0; key < keys; ++key) {
            const float bias = mask_bias(args, sequence, head, query, key);
            if (bias == -INFINITY) continue;
            const float score = args.scale * dot(q_row, view.k + key * args.k_token_stride, args.head_dim) + bias;
            const float weight = expf(score - shift);
            row_sum += weight;
            const Element* v_row = view.v + key * args.v_token_stride;
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                if (first + column < args.head_dim) accumulator[column] += weight * to_float(v_row[first + column]);
            }
        }
        // A sum of 0 means that no key was visible (the largest weight of any other row is 1): zeros, not 0/0.
        const float normalizer = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            if (first + column < args.head_dim) {
                out_row[first + column] = from_float<Element>(accumulator[column] * normalizer);
            }
        }
    }
}

template <typename Element>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    const int64_t rows = args.batch * args.heads * args.q_len;
    return launch_blocks("naive", kernel<Element>, (rows + kThreads - 1) / kThreads, kThreads, 0, stream, args, rows);
}

}  // namespace naive

tilerank_status attention_naive(const AttentionArgs& args, void*, void* stream) {
    switch (args.dtype) {
        case TILERANK_FP32:
            return naive::launch_for<float>(args, stream);
        case TILERANK_FP16:
            return naive::launch_for<__half>(args, stream);
        default:
            return naive::launch_for<__nv_bfloat16>(args, stream);
    }
}

}  // namespace tilerank
