// The entry points of attention from one token a sequence: check what the caller passed, then run the variant that was
// named.
#include <cmath>

#include "common/dispatch.h"
#include "common/token_attention.h"

namespace tilerank {
namespace {

using namespace dispatch;

tilerank_status check_pointers(const TokenAttentionArgs& args) {
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("q", args.q, element));
    if (args.total_k > 0) {
        PASS_ON(check_pointer("k", args.k, element));
        PASS_ON(check_pointer("v", args.v, element));
    }
    PASS_ON(check_pointer("out", args.out, element));
    return check_pointer("cu_seqlens_k", args.cu_seqlens_k, 4);
}

tilerank_status check(const tilerank_variant& row, const TokenAttentionArgs& args, bool with_pointers) {
    PASS_ON(check_size("batch", args.batch, 0));
    PASS_ON(check_size("heads", args.heads, 1));
    PASS_ON(check_size("total_k", args.total_k, 0));
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(args.head_dim >= 1 && args.head_dim <= TILERANK_MAX_HEAD_DIM, "head_dim is %lld; allowed: 1 to %d",
            static_cast<long long>(args.head_dim), TILERANK_MAX_HEAD_DIM);
    REQUIRE(args.overlap == 0 || args.overlap == 1, "overlap is %d; allowed: 0, 1", args.overlap);
    REQUIRE(std::isfinite(args.scale), "scale is %g; it must be finite", args.scale);
    PASS_ON(check_served_dtype(row, args.dtype));
    PASS_ON(check_served_head_dim(row, args.head_dim));
    return with_pointers && args.batch > 0 ? check_pointers(args) : TILERANK_OK;
}

size_t bytes_needed(const TokenAttentionVariant& variant, const TokenAttentionArgs& args) {
    return variant.workspace_bytes == nullptr || args.batch == 0 ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_token_attention_variant_count(void) { return tilerank::kTokenAttentionVariantCount; }

const tilerank_variant* tilerank_token_attention_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kTokenAttentionVariantCount) return nullptr;
    return &tilerank::kTokenAttentionVariants[index].info;
}

tilerank_status tilerank_token_attention_workspace_size(const char* name, const tilerank_token_attention_params* params,
                                                        size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const TokenAttentionVariant* variant = find_variant(name, kTokenAttentionVariants, kTokenAttentionVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_token_attention(const char* name, const tilerank_token_attention_params* params,
                                         void* workspace, size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const TokenAttentionVariant* variant = find_variant(name, kTokenAttentionVariants, kTokenAttentionVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (params->batch == 0) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
