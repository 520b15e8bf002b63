// What the dispatcher hands to a layer-normalisation variant, and what a variant defines. Plain C++: no CUDA in here.
//
// For a row called `name` of registry.yaml's `layernorm` its file defines
//     tilerank_status tilerank::layernorm_name(const LayernormArgs& args, void* workspace, void* stream);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes, and calls nothing when there is no row.
#pragma once

#include "common/variant.h"

namespace tilerank {

using LayernormArgs = tilerank_layernorm_params;  // passed to kernels by value

struct LayernormVariant {
    tilerank_variant info;
    tilerank_status (*run)(const LayernormArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const LayernormArgs& args);  // null: none is needed
};
extern const LayernormVariant kLayernormVariants[];
extern const int32_t kLayernormVariantCount;

}  // namespace tilerank
