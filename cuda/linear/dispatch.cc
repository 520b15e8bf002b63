// The entry points of the linear layer: check what the caller passed, then run the variant that was named.
#include <cmath>
#include <cstdlib>

#include "common/dispatch.h"
#include "common/linear.h"

namespace tilerank {
namespace {

using namespace dispatch;

tilerank_status check_pointers(const LinearArgs& args) {
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("x", args.x, element));
    PASS_ON(check_pointer("weight", args.weight, args.weight_format == TILERANK_FORMAT_SPLIT ? 2 : element));
    PASS_ON(check_pointer("out", args.out, element));
    if (args.bias != nullptr) PASS_ON(check_pointer("bias", args.bias, element));
    if (args.residual != nullptr) PASS_ON(check_pointer("residual", args.residual, element));
    if (args.gamma != nullptr) PASS_ON(check_pointer("gamma", args.gamma, element));
    if (args.gamma != nullptr) PASS_ON(check_pointer("beta", args.beta, element));
    return TILERANK_OK;
}

tilerank_status check(const tilerank_variant& row, const LinearArgs& args, bool with_pointers) {
    PASS_ON(check_size("rows", args.rows, 0));
    PASS_ON(check_size("columns", args.columns, 1));
    PASS_ON(check_size("depth", args.depth, 1));
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(args.activation >= TILERANK_ACTIVATION_NONE && args.activation <= TILERANK_ACTIVATION_TANH,
            "activation is %d; allowed: 0 (none), 1 (gelu), 2 (tanh)", args.activation);
    REQUIRE(args.weight_format >= TILERANK_FORMAT_PLAIN && args.weight_format <= TILERANK_FORMAT_SPLIT,
            "weight_format is %d; allowed: 0 (plain), 1 (interleaved), 2 (split)", args.weight_format);
    const bool is_split = args.weight_format == TILERANK_FORMAT_SPLIT;
    REQUIRE(args.weight_format == TILERANK_FORMAT_PLAIN || args.columns % 32 == 0,
            "columns is %lld; unless weights are plain it must be a multiple of 32",
            static_cast<long long>(args.columns));
    REQUIRE(!is_split || args.dtype == TILERANK_FP32, "dtype is %d; split weights are of 0 (fp32)", args.dtype);
    const int32_t together = is_split ? 16 : args.weight_format == TILERANK_FORMAT_INTERLEAVED ? 32 : 1;
    REQUIRE(args.depth % together == 0, "depth is %lld; in this weight_format it must be a multiple of %d",
            static_cast<long long>(args.depth), together);
    const int32_t most = is_split ? 126 : 0;
    REQUIRE(std::abs(args.weight_exponent) <= most, "weight_exponent is %d; allowed here: -%d to %d",
            args.weight_exponent, most, most);
    REQUIRE(std::abs(args.x_exponent) <= most, "x_exponent is %d; allowed here: -%d to %d", args.x_exponent, most, most);
    REQUIRE(args.overlap == 0 || args.overlap == 1, "overlap is %d; allowed: 0, 1", args.overlap);
    REQUIRE(args.gamma == nullptr || args.activation == TILERANK_ACTIVATION_NONE,
            "activation is %d where gamma is given; allowed: 0 (none)", args.activation);
    REQUIRE(args.gamma != nullptr || (args.residual == nullptr && args.beta == nullptr),
            "residual or beta is given without gamma; they belong to the normalisation");
    REQUIRE(std::isfinite(args.epsilon) && args.epsilon >= 0, "epsilon is %g; it must be finite and 0 or more",
            args.epsilon);
    REQUIRE(args.rows <= 1 || args.out_stride >= args.columns,
            "out_stride is %lld; rows of out must not overlap: at least columns, %lld",
            static_cast<long long>(args.out_stride), static_cast<long long>(args.columns));
    PASS_ON(check_served_dtype(row, args.dtype));
    return with_pointers && args.rows > 0 ? check_pointers(args) : TILERANK_OK;
}

size_t bytes_needed(const LinearVariant& variant, const LinearArgs& args) {
    return variant.workspace_bytes == nullptr || args.rows == 0 ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_linear_variant_count(void) { return tilerank::kLinearVariantCount; }

const tilerank_variant* tilerank_linear_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kLinearVariantCount) return nullptr;
    return &tilerank::kLinearVariants[index].info;
}

tilerank_status tilerank_linear_workspace_size(const char* name, const tilerank_linear_params* params, size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const LinearVariant* variant = find_variant(name, kLinearVariants, kLinearVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_linear(const char* name, const tilerank_linear_params* params, void* workspace,
                                size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const LinearVariant* variant = find_variant(name, kLinearVariants, kLinearVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (params->rows == 0) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
