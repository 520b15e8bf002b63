// What the dispatcher hands to an attention variant, and what a variant defines. Plain C++: no CUDA in here.
//
// A variant is one file below cuda/attention and one row in registry.yaml. For a row called `name` the file defines
//     tilerank_status tilerank::attention_name(const AttentionArgs& args, void* workspace, void* stream);
// and, only when the row says `workspace: true`,
//     size_t tilerank::attention_name_workspace(const AttentionArgs& args);
// The dispatcher has checked sizes, pointers and strides (see dispatch.cc) and the row's dtypes, head_dims, layouts,
// masks and max_k_len before it calls. It calls nothing when there is no query. k_len may be 0: out is then zeros.
//
// Kernels live in a namespace of the row's name, not in an anonymous one: nvcc names those by a hash of the file's
// path, and the recorded digest of the machine code would change with the folder it was compiled in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/variant.h"

namespace tilerank {

// One call of either entry point. Passed to kernels by value. Strides count elements.
struct AttentionArgs {
    const void* q;  // padded [batch, heads, q_len, head_dim]; packed [total_q, heads, head_dim]
    const void* k;  // padded [batch, kv_heads, k_len, head_dim]; packed [total_k, kv_heads, head_dim]
    const void* v;
    void* out;
    int64_t batch;  // number of sequences
    int64_t heads;  // a multiple of kv_heads
    int64_t kv_heads;
    int64_t q_len;    // padded: queries of every sequence; packed: of the longest (sizes the grid)
    int64_t k_len;    // padded: keys of every sequence; packed: of the longest
    int64_t total_q;  // packed: rows of q and out
    int64_t total_k;  // packed: rows of k and v
    int64_t q_batch_stride, q_head_stride, q_token_stride;  // batch strides are 0 when packed
    int64_t k_batch_stride, k_head_stride, k_token_stride;
    int64_t v_batch_stride, v_head_stride, v_token_stride;
    int64_t out_batch_stride, out_head_stride, out_token_stride;
    int64_t mask_batch_stride, mask_head_stride, mask_query_stride, mask_key_stride;
    const void* key_lengths;      // [batch] of key_lengths_type, or null; padded only; not clamped yet
    const int32_t* cu_seqlens_q;  // [batch + 1], null when padded; not clamped yet
    const int32_t* cu_seqlens_k;
    const void* mask;  // through the mask strides, or null; padded only
    int32_t head_dim;
    int16_t dtype;             // TILERANK_FP32, ...; as overlap for the host, not for kernels
    int16_t overlap;           // packed only; a variant that cannot begin early takes no notice
    int32_t key_lengths_type;  // TILERANK_LENGTHS_...
    int32_t mask_type;         // TILERANK_MASK_...
    int32_t causal;
    float scale;         // for kernels
    double exact_scale;  // for the reference
};

using AttentionFunction = tilerank_status (*)(const AttentionArgs& args, void* workspace, void* stream);
using AttentionWorkspace = size_t (*)(const AttentionArgs& args);

// A row of the registry together with its functions; generated into attention_table.cc by generate_table.py.
struct AttentionVariant {
    tilerank_variant info;
    AttentionFunction run;
    AttentionWorkspace workspace_bytes;  // null: none is needed
};
extern const AttentionVariant kAttentionVariants[];
extern const int32_t kAttentionVariantCount;

}  // namespace tilerank
