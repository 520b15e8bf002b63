// The entry points of the embeddings: check what the caller passed, then run the variant that was named.
#include <cmath>

#include "common/dispatch.h"
#include "common/embedding.h"

namespace tilerank {
namespace {

using namespace dispatch;

tilerank_status check_pointers(const EmbeddingArgs& args) {
    const uintptr_t element = element_bytes(args.dtype);
    PASS_ON(check_pointer("ids", args.ids, 4));
    PASS_ON(check_pointer("places", args.places, 4));
    PASS_ON(check_pointer("words", args.words, element));
    PASS_ON(check_pointer("positions", args.positions, element));
    if (args.types != nullptr) {
        PASS_ON(check_pointer("types", args.types, element));
        PASS_ON(check_pointer("type_ids", args.type_ids, 4));
    }
    REQUIRE(args.types != nullptr || args.type_ids == nullptr, "type_ids is given without types; both or neither");
    PASS_ON(check_pointer("gamma", args.gamma, element));
    PASS_ON(check_pointer("beta", args.beta, element));
    return check_pointer("out", args.out, element);
}

tilerank_status check(const tilerank_variant& row, const EmbeddingArgs& args, bool with_pointers) {
    PASS_ON(check_size("rows", args.rows, 0));
    PASS_ON(check_size("width", args.width, 1));
    PASS_ON(check_size("word_count", args.word_count, 1));
    PASS_ON(check_size("position_count", args.position_count, 1));
    PASS_ON(check_size("type_count", args.type_count, args.types == nullptr ? 0 : 1));
    PASS_ON(check_dtype(args.dtype));
    REQUIRE(std::isfinite(args.epsilon) && args.epsilon >= 0, "epsilon is %g; it must be finite and 0 or more",
            args.epsilon);
    REQUIRE(args.rows <= 1 || args.out_stride >= args.width,
            "out_stride is %lld; rows of out must not overlap: at least width, %lld",
            static_cast<long long>(args.out_stride), static_cast<long long>(args.width));
    PASS_ON(check_served_dtype(row, args.dtype));
    return with_pointers && args.rows > 0 ? check_pointers(args) : TILERANK_OK;
}

size_t bytes_needed(const EmbeddingVariant& variant, const EmbeddingArgs& args) {
    return variant.workspace_bytes == nullptr || args.rows == 0 ? 0 : variant.workspace_bytes(args);
}

}  // namespace
}  // namespace tilerank

int32_t tilerank_embedding_variant_count(void) { return tilerank::kEmbeddingVariantCount; }

const tilerank_variant* tilerank_embedding_variant(int32_t index) {
    if (index < 0 || index >= tilerank::kEmbeddingVariantCount) return nullptr;
    return &tilerank::kEmbeddingVariants[index].info;
}

tilerank_status tilerank_embedding_workspace_size(const char* name, const tilerank_embedding_params* params,
                                                  size_t* bytes) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    REQUIRE(bytes != nullptr, "bytes is NULL; it must point to where the answer goes");
    const EmbeddingVariant* variant = find_variant(name, kEmbeddingVariants, kEmbeddingVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, false));
    *bytes = bytes_needed(*variant, *params);
    return TILERANK_OK;
}

tilerank_status tilerank_embedding(const char* name, const tilerank_embedding_params* params, void* workspace,
                                   size_t workspace_bytes, void* stream) {
    using namespace tilerank;
    REQUIRE(params != nullptr, "params is NULL; it must point to the parameters");
    const EmbeddingVariant* variant = find_variant(name, kEmbeddingVariants, kEmbeddingVariantCount);
    if (variant == nullptr) return TILERANK_UNKNOWN_VARIANT;
    PASS_ON(check(variant->info, *params, true));
    if (params->rows == 0) return TILERANK_OK;
    PASS_ON(check_workspace(name, workspace, workspace_bytes, bytes_needed(*variant, *params)));
    return variant->run(*params, workspace, stream);
}
