// What the dispatcher hands to a variant of the attention block, and what a variant defines. Plain C++: no CUDA in
// here.
//
// For a row called `name` of registry.yaml's `block` its file defines
//     tilerank_status tilerank::block_name(const BlockArgs& args, void* workspace, void* stream);
// and, only when the row says `workspace: true`,
//     size_t tilerank::block_name_workspace(const BlockArgs& args);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes, head_dims, masks and max_k_len, and calls
// nothing when there is no token.
#pragma once

#include "common/variant.h"

namespace tilerank {

using BlockArgs = tilerank_fused_attention_params;  // passed to kernels by value

struct BlockVariant {
    tilerank_variant info;
    tilerank_status (*run)(const BlockArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const BlockArgs& args);  // null: none is needed
};
extern const BlockVariant kBlockVariants[];
extern const int32_t kBlockVariantCount;

}  // namespace tilerank
