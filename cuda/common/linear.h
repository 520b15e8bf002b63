// What the dispatcher hands to a variant of the linear layer, and what a variant defines. Plain C++: no CUDA in here.
//
// For a row called `name` of registry.yaml's `linear` its file defines
//     tilerank_status tilerank::linear_name(const LinearArgs& args, void* workspace, void* stream);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes, and calls nothing when there is no row.
#pragma once

#include "common/variant.h"

namespace tilerank {

using LinearArgs = tilerank_linear_params;  // passed to kernels by value

struct LinearVariant {
    tilerank_variant info;
    tilerank_status (*run)(const LinearArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const LinearArgs& args);  // null: none is needed
};
extern const LinearVariant kLinearVariants[];
extern const int32_t kLinearVariantCount;

// For variants that end products of many rows in nothing but GELU: what few_rows alone serves beside that.
inline tilerank_status check_usual_ends(const char* name, const LinearArgs& args) {
    if (args.activation == TILERANK_ACTIVATION_TANH) {
        return refuse(TILERANK_UNSUPPORTED, "variant %s: activation is 2 (tanh); it serves: 0 (none), 1 (gelu)", name);
    }
    return TILERANK_OK;
}

}  // namespace tilerank
