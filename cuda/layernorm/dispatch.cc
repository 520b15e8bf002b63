// The layer-normalisation entry points: check what the caller passed, then run the variant that was named.
#include <cmath>

#include "common/dispatch.h"
#include "common/layernorm.h"

namespace tilerank {
namespace {

using namespace dispatch;

tilerank_status check_written(const char* field, int64_t stride, const LayernormArgs& args) {
    REQUIRE(args.rows <= 1 || stride >= args.width || stride <= -args.width,
            "%s is %lld; its rows must not overlap: at least width, %lld", field, static_cast<long long>(stride),
            static_cast<long long>(args.width));
    return TILERANK_OK;
}

tilerank_status check(const tilerank_variant& row, const LayernormArgs& args, bool with_pointers) {
    PASS_ON(check_size("rows", args.rows, 0));
    PASS_ON(check_size("width", args.width, 1));
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(std::isfinite(args.epsilon) && args.epsilon >= 0, "epsilon is %g; it must be finite and 0 or more",
            args.epsilon);
    PASS_ON(check_served_dtype(row, args.dtype));
    PASS_ON(check_written("out_stride", args.out_stride, args));
    if (args.sum != nullptr) PASS_ON(check_written("sum_stride", args.sum_stride, args));
    if (!with_pointers || args.rows == 0) return TILERANK_OK;
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("x", args.x, element));
    PASS_ON(check_pointer("out", args.out, element));
    if (args.residual != nullptr) PASS_ON(check_pointer("residual", args.residual, element));
    if (args.bias != nullptr) PASS_ON(check_pointer("bias", args.bias, element));
    if (args.gamma != nullptr) PASS_ON(check_pointer("gamma", args.gamma, element));
    if (args.beta != nullptr) PASS_ON(check_pointer("beta", args.beta, element));
    if (args.sum != nullptr) PASS_ON(check_pointer("sum", args.sum, element));
    REQUIRE(args.sum != args.out, "sum is %p, as is out; they must differ", args.sum);
    return TILERANK_OK;
}

size_t bytes_needed(const LayernormVariant& variant, const LayernormArgs& args) {
    return variant.workspace_bytes == nullptr || args.rows == 0 ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_layernorm_variant_count(void) { return tilerank::kLayernormVariantCount; }

const tilerank_variant* tilerank_layernorm_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kLayernormVariantCount) return nullptr;
    return &tilerank::kLayernormVariants[index].info;
}

tilerank_status tilerank_layernorm_workspace_size(const char* name, const tilerank_layernorm_params* params,
                                                  size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const LayernormVariant* variant = find_variant(name, kLayernormVariants, kLayernormVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_layernorm(const char* name, const tilerank_layernorm_params* params, void* workspace,
                                   size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const LayernormVariant* variant = find_variant(name, kLayernormVariants, kLayernormVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (params->rows == 0) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
