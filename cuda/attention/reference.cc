// The meaning of attention: what every other variant must agree with, in double, on the CPU, row by row.
// Written to be read, and apart from the kernels: it shares none of their key-range, mask or softmax code.
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/attention.h"
#include "common/elements.h"

namespace tilerank {
namespace reference {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

int64_t within(int64_t value, int64_t low, int64_t high) {
    if (value < low) return low;
    return value > high ? high : value;
}

// The token rows of one sequence.
struct Rows {
    int64_t first;
    int64_t count;
};

Rows packed_rows(const int32_t* cu_seqlens, int64_t sequence, int64_t total, int64_t longest) {
    const int64_t first = within(cu_seqlens[sequence], 0, total);
    const int64_t last = within(cu_seqlens[sequence + 1], first, total);
    return {first, within(last - first, 0, longest)};
}

int64_t counted_keys(const AttentionArgs& args, int64_t sequence) {
    switch (args.key_lengths_type) {
        case TILERANK_LENGTHS_INT32:
            return within(static_cast<const int32_t*>(args.key_lengths)[sequence], 0, args.k_len);
        case TILERANK_LENGTHS_INT64:
            return within(static_cast<const int64_t*>(args.key_lengths)[sequence], 0, args.k_len);
        default:
            return args.k_len;
    }
}

double mask_at(const AttentionArgs& args, int64_t sequence, int64_t head, int64_t i, int64_t j) {
    const int64_t at = sequence * args.mask_batch_stride + head * args.mask_head_stride + i * args.mask_query_stride +
                       j * args.mask_key_stride;
    switch (args.mask_type) {
        case TILERANK_MASK_BOOL:
            return static_cast<const uint8_t*>(args.mask)[at] ? 0.0 : kHidden;
        case TILERANK_MASK_FP32:
            return load(args.mask, TILERANK_FP32, at);
        case TILERANK_MASK_FP16:
            return load(args.mask, TILERANK_FP16, at);
        case TILERANK_MASK_BF16:
            return load(args.mask, TILERANK_BF16, at);
        default:
            return 0.0;
    }
}

// One (sequence, head): offsets of its first rows, and its number of keys.
struct Head {
    int64_t sequence, head;
    int64_t q, k, v, out;  // element offsets
    int64_t keys;
};

// The masked, scaled score of query i and key j; kHidden when i may not see j.
double score_of(const AttentionArgs& args, const Head& at, const double* q_row, int64_t i, int64_t j) {
    if (args.causal && j > i) return kHidden;
    const double bias = mask_at(args, at.sequence, at.head, i, j);
    if (bias == kHidden) return kHidden;  // before the product: a hidden key may hold anything
    double product = 0.0;
    for (int32_t d = 0; d < args.head_dim; ++d) {
        product += q_row[d] * load(args.k, args.dtype, at.k + j * args.k_token_stride + d);
    }
    return args.exact_scale * product + bias;
}

void attend_row(const AttentionArgs& args, const Head& at, int64_t i) {
    double q_row[TILERANK_MAX_HEAD_DIM];
    double result[TILERANK_MAX_HEAD_DIM] = {};
    for (int32_t d = 0; d < args.head_dim; ++d) q_row[d] = load(args.q, args.dtype, at.q + i * args.q_token_stride + d);

    double largest = kHidden;
    for (int64_t j = 0; j < at.keys; ++j) largest = std::fmax(largest, score_of(args, at, q_row, i, j));

    double total = 0.0;
    for (int64_t j = 0; j < at.keys; ++j) {
        const double score = score_of(args, at, q_row, i, j);
        if (score == kHidden) continue;
        const double weight = std::exp(score - largest);
        total += weight;
        for (int32_t d = 0; d < args.head_dim; ++d) {
            result[d] += weight * load(args.v, args.dtype, at.v + j * args.v_token_stride + d);
        }
    }
    for (int32_t d = 0; d < args.head_dim; ++d) {
        const double value = total == 0.0 ? 0.0 : result[d] / total;
        store(args.out, args.dtype, at.out + i * args.out_token_stride + d, value);
    }
}

}  // namespace reference

tilerank_status attention_reference(const AttentionArgs& args, void*, void*) {
    const bool packed = args.cu_seqlens_q != nullptr;
    const int64_t heads_per_kv_head = args.heads / args.kv_heads;
    for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
        reference::Rows queries{0, args.q_len};
        reference::Rows keys{0, 0};
        if (packed) {
            queries = reference::packed_rows(args.cu_seqlens_q, sequence, args.total_q, args.q_len);
            keys = reference::packed_rows(args.cu_seqlens_k, sequence, args.total_k, args.k_len);
        } else {
            keys.count = reference::counted_keys(args, sequence);
        }
        for (int64_t head = 0; head < args.heads; ++head) {
            const int64_t kv_head = head / heads_per_kv_head;
            const reference::Head at{
                sequence,
                head,
                sequence * args.q_batch_stride + head * args.q_head_stride + queries.first * args.q_token_stride,
                sequence * args.k_batch_stride + kv_head * args.k_head_stride + keys.first * args.k_token_stride,
                sequence * args.v_batch_stride + kv_head * args.v_head_stride + keys.first * args.v_token_stride,
                sequence * args.out_batch_stride + head * args.out_head_stride + queries.first * args.out_token_stride,
                keys.count};
            for (int64_t i = 0; i < queries.count; ++i) reference::attend_row(args, at, i);
        }
    }
    return TILERANK_OK;
}

}  // namespace tilerank
