// The entry points of the layer behind attention: check what the caller passed, then run the variant that was named.
#include <cmath>

#include "common/dispatch.h"
#include "common/layer.h"

namespace tilerank {
namespace {

using namespace dispatch;

tilerank_status check_pointers(const LayerArgs& args) {
    const struct {
        const char* field;
        const void* pointer;
    } needed[] = {{"found", args.found},       {"x", args.x},
                  {"out", args.out},           {"out_weight", args.out_weight},
                  {"up_weight", args.up_weight}, {"down_weight", args.down_weight},
                  {"out_bias", args.out_bias}, {"up_bias", args.up_bias},
                  {"down_bias", args.down_bias}, {"gammas[0]", args.gammas[0]},
                  {"gammas[1]", args.gammas[1]}, {"betas[0]", args.betas[0]},
                  {"betas[1]", args.betas[1]}};
    const uintptr_t element = element_bytes(args.dtype);
    for (const auto& one : needed) PASS_ON(check_pointer(one.field, one.pointer, element));
    if (args.next_columns == 0) return TILERANK_OK;
    PASS_ON(check_pointer("next", args.next, element));
    PASS_ON(check_pointer("next_weight", args.next_weight, element));
    return check_pointer("next_bias", args.next_bias, element);
}

tilerank_status check_stride(const char* field, int64_t stride, int64_t rows, int64_t columns) {
    REQUIRE(rows <= 1 || stride >= columns, "%s is %lld; rows must not overlap: at least %lld", field,
            static_cast<long long>(stride), static_cast<long long>(columns));
    return TILERANK_OK;
}

tilerank_status check(const tilerank_variant& row, const LayerArgs& args, bool with_pointers) {
    PASS_ON(check_size("rows", args.rows, 0));
    PASS_ON(check_size("width", args.width, 1));
    PASS_ON(check_size("wide", args.wide, 1));
    PASS_ON(check_size("next_columns", args.next_columns, 0));
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(args.overlap == 0 || args.overlap == 1, "overlap is %d; allowed: 0, 1", args.overlap);
    REQUIRE(std::isfinite(args.epsilon) && args.epsilon >= 0, "epsilon is %g; it must be finite and 0 or more",
            args.epsilon);
    PASS_ON(check_stride("out_stride", args.out_stride, args.rows, args.width));
    if (args.next_columns > 0) PASS_ON(check_stride("next_stride", args.next_stride, args.rows, args.next_columns));
    PASS_ON(check_served_dtype(row, args.dtype));
    return with_pointers && args.rows > 0 ? check_pointers(args) : TILERANK_OK;
}

size_t bytes_needed(const LayerVariant& variant, const LayerArgs& args) {
    return variant.workspace_bytes == nullptr || args.rows == 0 ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_layer_variant_count(void) { return tilerank::kLayerVariantCount; }

const tilerank_variant* tilerank_layer_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kLayerVariantCount) return nullptr;
    return &tilerank::kLayerVariants[index].info;
}

tilerank_status tilerank_layer_workspace_size(const char* name, const tilerank_layer_params* params, size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const LayerVariant* variant = find_variant(name, kLayerVariants, kLayerVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_layer(const char* name, const tilerank_layer_params* params, void* workspace,
                               size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const LayerVariant* variant = find_variant(name, kLayerVariants, kLayerVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (params->rows == 0) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
