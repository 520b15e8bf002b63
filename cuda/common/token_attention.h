// What the dispatcher hands to a variant of attention from one token a sequence, and what a variant defines. Plain C++:
// no CUDA in here.
//
// For a row called `name` of registry.yaml's `token_attention` its file defines
//     tilerank_status tilerank::token_attention_name(const TokenAttentionArgs& args, void* workspace, void* stream);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes and head_dims, and calls nothing when there is
// no sequence.
#pragma once

#include "common/variant.h"

namespace tilerank {

using TokenAttentionArgs = tilerank_token_attention_params;  // passed to kernels by value

struct TokenAttentionVariant {
    tilerank_variant info;
    tilerank_status (*run)(const TokenAttentionArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const TokenAttentionArgs& args);  // null: none is needed
};
extern const TokenAttentionVariant kTokenAttentionVariants[];
extern const int32_t kTokenAttentionVariantCount;

}  // namespace tilerank
