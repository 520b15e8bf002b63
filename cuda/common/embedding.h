// What the dispatcher hands to a variant of the embeddings, and what a variant defines. Plain C++: no CUDA in here.
//
// For a row called `name` of registry.yaml's `embedding` its file defines
//     tilerank_status tilerank::embedding_name(const EmbeddingArgs& args, void* workspace, void* stream);
// The dispatcher has checked sizes, pointers, strides and the row's dtypes, and calls nothing when there is no row.
#pragma once

#include "common/variant.h"

namespace tilerank {

using EmbeddingArgs = tilerank_embedding_params;  // passed to kernels by value

struct EmbeddingVariant {
    tilerank_variant info;
    tilerank_status (*run)(const EmbeddingArgs& args, void* workspace, void* stream);
    size_t (*workspace_bytes)(const EmbeddingArgs& args);  // null: none is needed
};
extern const EmbeddingVariant kEmbeddingVariants[];
extern const int32_t kEmbeddingVariantCount;

}  // namespace tilerank
