// What the dispatcher hands to a variant of the layer behind attention, and what a variant defines. Plain C++: no CUDA in
// here.
//
// For a row called `name` of registry.yaml's `layer` its file defines
//     tilerank_status tilerank::layer_name(const LayerArgs& args, void* workspace, void* stream);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes, and calls nothing when there is no row.
// `next` may lie in the workspace, with rows as far apart as wide rows are: a block's are used up where it makes them.
#pragma once

#include "common/variant.h"

namespace tilerank {

using LayerArgs = tilerank_layer_params;  // passed by value

struct LayerVariant {
    tilerank_variant info;
    tilerank_status (*run)(const LayerArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const LayerArgs& args);  // null: none is needed
};
extern const LayerVariant kLayerVariants[];
extern const int32_t kLayerVariantCount;

}  // namespace tilerank
