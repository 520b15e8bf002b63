// The attention entry points: check what the caller passed, then run the variant that was named.
#include <cmath>

#include "common/attention.h"
#include "common/dispatch.h"

namespace tilerank {
namespace {

using namespace dispatch;

// The checks that both layouts share: all but strides, pointers and masks.
tilerank_status check_common(const AttentionArgs& args, int64_t head_dim, int32_t dtype) {
    PASS_ON(check_size("batch", args.batch, 0));
    PASS_ON(check_size("heads", args.heads, 1));
    PASS_ON(check_size("kv_heads", args.kv_heads, 1));
    REQUIRE(args.heads % args.kv_heads == 0, "heads is %lld; it must be a multiple of kv_heads, %lld",
            static_cast<long long>(args.heads), static_cast<long long>(args.kv_heads));
    REQUIRE(head_dim >= 1 && head_dim <= TILERANK_MAX_HEAD_DIM, "head_dim is %lld; allowed: 1 to %d",
            static_cast<long long>(head_dim), TILERANK_MAX_HEAD_DIM);
    PASS_ON(check_dtype(dtype));
    REQUIRE(args.causal == 0 || args.causal == 1, "causal is %d; allowed: 0, 1", args.causal);
    REQUIRE(std::isfinite(args.exact_scale), "scale is %g; it must be finite", args.exact_scale);
    REQUIRE(std::isfinite(args.scale), "scale is %g; it must be finite in fp32, in which kernels compute",
            args.exact_scale);
    int64_t rows;
    REQUIRE(!__builtin_mul_overflow(args.batch, args.heads, &rows) && !__builtin_mul_overflow(rows, args.q_len, &rows),
            "batch * heads * queries is above what 64 bits hold: %lld * %lld * %lld",
            static_cast<long long>(args.batch), static_cast<long long>(args.heads), static_cast<long long>(args.q_len));
    return TILERANK_OK;
}

// Rows of out nearer than head_dim to each other would be written twice.
tilerank_status check_out_stride(const char* field, int64_t stride, int64_t size, int32_t head_dim) {
    REQUIRE(size <= 1 || stride >= head_dim || stride <= -head_dim,
            "%s is %lld; rows of out must not overlap: at least head_dim, %d", field, static_cast<long long>(stride),
            head_dim);
    return TILERANK_OK;
}

tilerank_status check_pointers(const AttentionArgs& args, bool has_keys) {
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("q", args.q, element));
    PASS_ON(check_pointer("out", args.out, element));
    if (has_keys) {
        PASS_ON(check_pointer("k", args.k, element));
        PASS_ON(check_pointer("v", args.v, element));
    }
    return TILERANK_OK;
}

// Does the named row serve this call? The message says what it does serve.
tilerank_status check_served(const tilerank_variant& row, const AttentionArgs& args, bool packed) {
    PASS_ON(check_served_dtype(row, args.dtype));
    const uint32_t layout = packed ? TILERANK_LAYOUT_PACKED : TILERANK_LAYOUT_PADDED;
    if (!(row.layouts & layout)) {
        return refuse(TILERANK_UNSUPPORTED, "variant %s: the input is %s; it serves: %s", row.name,
                      names(layout, kLayouts).text, names(row.layouts, kLayouts).text);
    }
    PASS_ON(check_served_head_dim(row, args.head_dim));
    uint32_t wanted = args.causal ? TILERANK_SERVES_CAUSAL : 0;
    if (args.key_lengths_type != TILERANK_LENGTHS_NONE) wanted |= TILERANK_SERVES_KEY_LENGTHS;
    if (args.mask_type == TILERANK_MASK_BOOL) wanted |= TILERANK_SERVES_BOOLEAN;
    if (args.mask_type > TILERANK_MASK_BOOL) wanted |= TILERANK_SERVES_ADDITIVE;
    PASS_ON(check_served_masks(row, wanted));
    return check_served_keys(row, packed ? "max_seqlen_k" : "k_len", args.k_len);
}

bool has_queries(const tilerank_attention_params& params) { return params.batch > 0 && params.q_len > 0; }
bool has_queries(const tilerank_attention_varlen_params& params) {
    return params.batch > 0 && params.max_seqlen_q > 0 && params.total_q > 0;
}

// Pointers are looked at only when the call will follow them (with_pointers).
tilerank_status check(const tilerank_attention_params& params, bool with_pointers, AttentionArgs* out) {
    AttentionArgs args{};
    args.q = params.q, args.k = params.k, args.v = params.v, args.out = params.out;
    args.causal = params.causal;
    args.exact_scale = params.scale, args.scale = static_cast<float>(params.scale);
    args.batch = params.batch, args.heads = params.heads, args.kv_heads = params.kv_heads;
    args.q_len = params.q_len, args.k_len = params.k_len;
    PASS_ON(check_size("q_len", params.q_len, 0));
    PASS_ON(check_size("k_len", params.k_len, 0));
    PASS_ON(check_common(args, params.head_dim, params.dtype));
    args.head_dim = static_cast<int32_t>(params.head_dim), args.dtype = static_cast<int16_t>(params.dtype);
    args.q_batch_stride = params.q_strides[0], args.q_head_stride = params.q_strides[1];
    args.q_token_stride = params.q_strides[2];
    args.k_batch_stride = params.k_strides[0], args.k_head_stride = params.k_strides[1];
    args.k_token_stride = params.k_strides[2];
    args.v_batch_stride = params.v_strides[0], args.v_head_stride = params.v_strides[1];
    args.v_token_stride = params.v_strides[2];
    args.out_batch_stride = params.out_strides[0], args.out_head_stride = params.out_strides[1];
    args.out_token_stride = params.out_strides[2];

    args.key_lengths = params.key_lengths, args.key_lengths_type = params.key_lengths_type;
    REQUIRE(params.key_lengths_type >= TILERANK_LENGTHS_NONE && params.key_lengths_type <= TILERANK_LENGTHS_INT64,
            "key_lengths_type is %d; allowed: 0 (none), 1 (int32), 2 (int64)", params.key_lengths_type);
    args.mask = params.mask, args.mask_type = params.mask_type;
    REQUIRE(params.mask_type >= TILERANK_MASK_NONE && params.mask_type <= TILERANK_MASK_BF16,
            "mask_type is %d; allowed: 0 (none), 1 (bool), 2 (fp32), 3 (fp16), 4 (bf16)", params.mask_type);
    args.mask_batch_stride = params.mask_strides[0], args.mask_head_stride = params.mask_strides[1];
    args.mask_query_stride = params.mask_strides[2], args.mask_key_stride = params.mask_strides[3];

    if (has_queries(params)) {
        PASS_ON(check_out_stride("out_strides[0]", args.out_batch_stride, args.batch, args.head_dim));
        PASS_ON(check_out_stride("out_strides[1]", args.out_head_stride, args.heads, args.head_dim));
        PASS_ON(check_out_stride("out_strides[2]", args.out_token_stride, args.q_len, args.head_dim));
    }
    if (with_pointers && has_queries(params)) {
        PASS_ON(check_pointers(args, args.k_len > 0));
        if (args.key_lengths_type != TILERANK_LENGTHS_NONE) {
            PASS_ON(check_pointer("key_lengths", args.key_lengths,
                                  args.key_lengths_type == TILERANK_LENGTHS_INT32 ? 4 : 8));
        }
        REQUIRE(args.key_lengths_type != TILERANK_LENGTHS_NONE || args.key_lengths == nullptr,
                "key_lengths is given but key_lengths_type is 0 (none); allowed: 1 (int32), 2 (int64)");
        if (args.mask_type != TILERANK_MASK_NONE && args.k_len > 0) {
            constexpr uintptr_t kAlignments[] = {1, 1, 4, 2, 2};
            PASS_ON(check_pointer("mask", args.mask, kAlignments[args.mask_type]));
        }
        REQUIRE(args.mask_type != TILERANK_MASK_NONE || args.mask == nullptr,
                "mask is given but mask_type is 0 (none); allowed: 1 (bool), 2 (fp32), 3 (fp16), 4 (bf16)");
    }
    *out = args;
    return TILERANK_OK;
}

tilerank_status check(const tilerank_attention_varlen_params& params, bool with_pointers, AttentionArgs* out) {
    AttentionArgs args{};
    args.q = params.q, args.k = params.k, args.v = params.v, args.out = params.out;
    args.causal = params.causal;
    args.exact_scale = params.scale, args.scale = static_cast<float>(params.scale);
    args.batch = params.batch, args.heads = params.heads, args.kv_heads = params.kv_heads;
    args.q_len = params.max_seqlen_q, args.k_len = params.max_seqlen_k;
    args.total_q = params.total_q, args.total_k = params.total_k;
    PASS_ON(check_size("total_q", params.total_q, 0));
    PASS_ON(check_size("total_k", params.total_k, 0));
    PASS_ON(check_size("max_seqlen_q", params.max_seqlen_q, 0));
    PASS_ON(check_size("max_seqlen_k", params.max_seqlen_k, 0));
    PASS_ON(check_common(args, params.head_dim, params.dtype));
    args.head_dim = static_cast<int32_t>(params.head_dim), args.dtype = static_cast<int16_t>(params.dtype);
    REQUIRE(params.overlap == 0 || params.overlap == 1, "overlap is %d; allowed: 0, 1", params.overlap);
    args.overlap = static_cast<int16_t>(params.overlap);
    args.q_head_stride = params.q_strides[0], args.q_token_stride = params.q_strides[1];
    args.k_head_stride = params.k_strides[0], args.k_token_stride = params.k_strides[1];
    args.v_head_stride = params.v_strides[0], args.v_token_stride = params.v_strides[1];
    args.out_head_stride = params.out_strides[0], args.out_token_stride = params.out_strides[1];
    args.cu_seqlens_q = params.cu_seqlens_q, args.cu_seqlens_k = params.cu_seqlens_k;
    if (has_queries(params)) {
        PASS_ON(check_out_stride("out_strides[0]", args.out_head_stride, args.heads, args.head_dim));
        PASS_ON(check_out_stride("out_strides[1]", args.out_token_stride, args.total_q, args.head_dim));
    }
    if (with_pointers && has_queries(params)) {
        PASS_ON(check_pointers(args, args.total_k > 0 && args.k_len > 0));
        PASS_ON(check_pointer("cu_seqlens_q", args.cu_seqlens_q, 4));
        PASS_ON(check_pointer("cu_seqlens_k", args.cu_seqlens_k, 4));
    }
    *out = args;
    return TILERANK_OK;
}

bool is_packed(const tilerank_attention_params&) { return false; }
bool is_packed(const tilerank_attention_varlen_params&) { return true; }

// Without keys the caller may pass NULL for k and v. Kernels then get an address to compute with, which they never
// read.
void replace_missing_keys(AttentionArgs* args) {
    if (args->k != nullptr && args->v != nullptr) return;
    args->k = args->v = args->q;
    args->k_batch_stride = args->k_head_stride = args->k_token_stride = 0;
    args->v_batch_stride = args->v_head_stride = args->v_token_stride = 0;
}

size_t bytes_needed(const AttentionVariant& variant, const AttentionArgs& args) {
    return variant.workspace_bytes == nullptr ? 0 : variant.workspace_bytes(args);
}

template <typename Params>
tilerank_status workspace_size(const char* name, const Params* params, size_t* bytes) {
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const AttentionVariant* variant = find_variant(name, kAttentionVariants, kAttentionVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    AttentionArgs args;
    PASS_ON(check(*params, false, &args));
    PASS_ON(check_served(variant->info, args, is_packed(*params)));
    *bytes = has_queries(*params) ? bytes_needed(*variant, args) : 0;
    return TILERANK_OK;
}

template <typename Params>
tilerank_status run(const char* name, const Params* params, void* workspace, size_t workspace_bytes, void* stream) {
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const AttentionVariant* variant = find_variant(name, kAttentionVariants, kAttentionVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    AttentionArgs args;
    PASS_ON(check(*params, true, &args));
    PASS_ON(check_served(variant->info, args, is_packed(*params)));
    if (!has_queries(*params)) return TILERANK_OK;
    const size_t needed = bytes_needed(*variant, args);
    PASS_ON(check_workspace(name, workspace, workspace_bytes, needed));
    replace_missing_keys(&args);
    return variant->run(args, workspace, stream);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_attention_variant_count(void) { return tilerank::kAttentionVariantCount; }

const tilerank_variant* tilerank_attention_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kAttentionVariantCount) return nullptr;
    return &tilerank::kAttentionVariants[index].info;
}

tilerank_status tilerank_attention_workspace_size(const char* variant, const tilerank_attention_params* params,
                                                  size_t* bytes) {
    return tilerank::workspace_size(variant, params, bytes);
}

tilerank_status tilerank_attention_varlen_workspace_size(const char* variant,
                                                         const tilerank_attention_varlen_params* params,
                                                         size_t* bytes) {
    return tilerank::workspace_size(variant, params, bytes);
}

tilerank_status tilerank_attention(const char* variant, const tilerank_attention_params* params, void* workspace,
                                   size_t workspace_bytes, void* stream) {
    return tilerank::run(variant, params, workspace, workspace_bytes, stream);
}

tilerank_status tilerank_attention_varlen(const char* variant, const tilerank_attention_varlen_params* params,
                                          void* workspace, size_t workspace_bytes, void* stream) {
    return tilerank::run(variant, params, workspace, workspace_bytes, stream);
}
