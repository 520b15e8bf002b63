// The meaning of the embeddings of tokens, in double, on the CPU, row by row.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/elements.h"
#include "common/embedding.h"

namespace tilerank {

tilerank_status embedding_reference(const EmbeddingArgs& args, void*, void*) {
    using reference::load;
    using reference::store;
    const auto row_of = [&](const int32_t* indices, int64_t i, int64_t count) {
        return std::clamp<int64_t>(indices[i], 0, count - 1) * args.width;
    };
    std::vector<double> row(static_cast<size_t>(args.width));
    for (int64_t i = 0; i < args.rows; ++i) {
        const int64_t word = row_of(args.ids, i, args.word_count);
        const int64_t position = row_of(args.places, i, args.position_count);
        const int64_t type = args.types == nullptr ? 0 : row_of(args.type_ids, i, args.type_count);
        double mean = 0.0;
        for (int64_t c = 0; c < args.width; ++c) {
            double value = load(args.words, args.dtype, word + c) + load(args.positions, args.dtype, position + c);
            if (args.types != nullptr) value += load(args.types, args.dtype, type + c);
            row[static_cast<size_t>(c)] = value;
            mean += value;
        }
        mean /= static_cast<double>(args.width);
        double variance = 0.0;
        for (const double value : row) variance += (value - mean) * (value - mean);
        variance /= static_cast<double>(args.width);
        const double factor = 1.0 / std::sqrt(variance + args.epsilon);
        for (int64_t c = 0; c < args.width; ++c) {
            store(args.out, args.dtype, i * args.out_stride + c,
                  (row[static_cast<size_t>(c)] - mean) * factor * load(args.gamma, args.dtype, c) +
                      load(args.beta, args.dtype, c));
        }
    }
    return TILERANK_OK;
}

}  // namespace tilerank
