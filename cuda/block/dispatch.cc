// The entry points of the attention block: check what the caller passed, then run the variant that was named.
#include <cmath>

#include "common/block.h"
#include "common/dispatch.h"

namespace tilerank {
namespace {

using namespace dispatch;

bool has_tokens(const BlockArgs& args) { return args.batch > 0 && args.tokens > 0; }

tilerank_status check_out_stride(const char* field, int64_t stride, int64_t size, const BlockArgs& args) {
    REQUIRE(size <= 1 || stride >= args.width || stride <= -args.width,
            "%s is %lld; rows of out must not overlap: at least width, %lld", field, static_cast<long long>(stride),
            static_cast<long long>(args.width));
    return TILERANK_OK;
}

tilerank_status check_weight_stride(const char* field, int64_t stride, int64_t rows) {
    REQUIRE(rows <= 1 || stride != 0, "%s is 0; it must be the elements between the %lld rows of that matrix", field,
            static_cast<long long>(rows));
    return TILERANK_OK;
}

tilerank_status check_sizes(const BlockArgs& args) {
    PASS_ON(check_size("batch", args.batch, 0));
    PASS_ON(check_size("tokens", args.tokens, 0));
    PASS_ON(check_size("width", args.width, 1));
    PASS_ON(check_size("num_heads", args.num_heads, 1));
    REQUIRE(args.head_dim >= 1 && args.head_dim <= TILERANK_MAX_HEAD_DIM, "head_dim is %lld; allowed: 1 to %d",
            static_cast<long long>(args.head_dim), TILERANK_MAX_HEAD_DIM);
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(args.key_lengths_type >= TILERANK_LENGTHS_NONE && args.key_lengths_type <= TILERANK_LENGTHS_INT64,
            "key_lengths_type is %d; allowed: 0 (none), 1 (int32), 2 (int64)", args.key_lengths_type);
    REQUIRE(args.causal == 0 || args.causal == 1, "causal is %d; allowed: 0, 1", args.causal);
    REQUIRE(args.pre_ln == 0 || args.pre_ln == 1, "pre_ln is %d; allowed: 0, 1", args.pre_ln);
    REQUIRE(args.weight_layout == TILERANK_WEIGHTS_OUT_IN || args.weight_layout == TILERANK_WEIGHTS_IN_OUT,
            "weight_layout is %d; allowed: 0 (rows of outputs), 1 (rows of inputs)", args.weight_layout);
    REQUIRE(std::isfinite(args.epsilon) && args.epsilon >= 0, "epsilon is %g; it must be finite and 0 or more",
            args.epsilon);
    REQUIRE(std::isfinite(args.scale), "scale is %g; it must be finite", args.scale);
    int64_t rows;
    int64_t columns;
    int64_t elements;
    REQUIRE(!__builtin_mul_overflow(args.batch, args.tokens, &rows) &&
                !__builtin_mul_overflow(args.num_heads, args.head_dim, &columns) &&
                !__builtin_mul_overflow(rows, columns, &elements) && elements <= INT64_MAX / 64,
            "batch * tokens * num_heads * head_dim is above what 64 bits hold: %lld * %lld * %lld * %lld",
            static_cast<long long>(args.batch), static_cast<long long>(args.tokens),
            static_cast<long long>(args.num_heads), static_cast<long long>(args.head_dim));
    return TILERANK_OK;
}

tilerank_status check_strides(const BlockArgs& args) {
    PASS_ON(check_out_stride("out_strides[0]", args.out_strides[0], args.batch, args));
    PASS_ON(check_out_stride("out_strides[1]", args.out_strides[1], args.tokens, args));
    const bool out_in = args.weight_layout == TILERANK_WEIGHTS_OUT_IN;
    const int64_t columns = args.num_heads * args.head_dim;
    PASS_ON(check_weight_stride("wq_stride", args.wq_stride, out_in ? columns : args.width));
    PASS_ON(check_weight_stride("wk_stride", args.wk_stride, out_in ? columns : args.width));
    PASS_ON(check_weight_stride("wv_stride", args.wv_stride, out_in ? columns : args.width));
    return check_weight_stride("wo_stride", args.wo_stride, out_in ? args.width : columns);
}

tilerank_status check_pointers(const BlockArgs& args) {
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("x", args.x, element));
    PASS_ON(check_pointer("wq", args.wq, element));
    PASS_ON(check_pointer("wk", args.wk, element));
    PASS_ON(check_pointer("wv", args.wv, element));
    PASS_ON(check_pointer("wo", args.wo, element));
    PASS_ON(check_pointer("out", args.out, element));
    const struct {
        const char* field;
        const void* pointer;
    } optional[] = {{"bq", args.bq},       {"bk", args.bk},     {"bv", args.bv},
                    {"bo", args.bo},       {"gamma", args.gamma}, {"beta", args.beta},
                    {"residual", args.residual}};
    for (const auto& each : optional) {
        if (each.pointer != nullptr) PASS_ON(check_pointer(each.field, each.pointer, element));
    }
    if (args.key_lengths_type != TILERANK_LENGTHS_NONE) {
        PASS_ON(
            check_pointer("key_lengths", args.key_lengths, args.key_lengths_type == TILERANK_LENGTHS_INT32 ? 4 : 8));
    }
    REQUIRE(args.key_lengths_type != TILERANK_LENGTHS_NONE || args.key_lengths == nullptr,
            "key_lengths is given but key_lengths_type is 0 (none); allowed: 1 (int32), 2 (int64)");
    return TILERANK_OK;
}

tilerank_status check(const tilerank_variant& row, const BlockArgs& args, bool with_pointers) {
    PASS_ON(check_sizes(args));
    PASS_ON(check_served_dtype(row, args.dtype));
    PASS_ON(check_served_head_dim(row, args.head_dim));
    uint32_t wanted = args.causal ? TILERANK_SERVES_CAUSAL : 0;
    if (args.key_lengths_type != TILERANK_LENGTHS_NONE) wanted |= TILERANK_SERVES_KEY_LENGTHS;
    PASS_ON(check_served_masks(row, wanted));
    PASS_ON(check_served_keys(row, "tokens", args.tokens));
    if (!has_tokens(args)) return TILERANK_OK;
    PASS_ON(check_strides(args));
    return with_pointers ? check_pointers(args) : TILERANK_OK;
}

size_t bytes_needed(const BlockVariant& variant, const BlockArgs& args) {
    return variant.workspace_bytes == nullptr || !has_tokens(args) ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_block_variant_count(void) { return tilerank::kBlockVariantCount; }

const tilerank_variant* tilerank_block_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kBlockVariantCount) return nullptr;
    return &tilerank::kBlockVariants[index].info;
}

tilerank_status tilerank_fused_attention_workspace_size(const char* name, const tilerank_fused_attention_params* params,
                                                        size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const BlockVariant* variant = find_variant(name, kBlockVariants, kBlockVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_fused_attention(const char* name, const tilerank_fused_attention_params* params,
                                         void* workspace, size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const BlockVariant* variant = find_variant(name, kBlockVariants, kBlockVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (!has_tokens(*params)) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
