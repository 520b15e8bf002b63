// The meaning of attention from one token a sequence, in double, on the CPU, key by key.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/elements.h"
#include "common/token_attention.h"

namespace tilerank {

tilerank_status token_attention_reference(const TokenAttentionArgs& args, void*, void*) {
    using reference::load;
    using reference::store;
    int64_t begin = std::clamp<int64_t>(args.cu_seqlens_k[0], 0, args.total_k);
    for (int64_t s = 0; s < args.batch; ++s) {
        const int64_t end = std::clamp<int64_t>(args.cu_seqlens_k[s + 1], begin, args.total_k);
        for (int64_t h = 0; h < args.heads; ++h) {
            std::vector<double> scores(static_cast<size_t>(end - begin));
            double largest = -std::numeric_limits<double>::infinity();
            for (int64_t j = begin; j < end; ++j) {
                double score = 0.0;
                for (int64_t d = 0; d < args.head_dim; ++d) {
                    score += load(args.q, args.dtype, s * args.q_strides[1] + h * args.q_strides[0] + d) *
                             load(args.k, args.dtype, j * args.k_strides[1] + h * args.k_strides[0] + d);
                }
                scores[static_cast<size_t>(j - begin)] = score * args.scale;
                largest = std::max(largest, score * args.scale);
            }
            double sum = 0.0;
            for (double& score : scores) sum += score = std::exp(score - largest);
            for (int64_t d = 0; d < args.head_dim; ++d) {
                double value = 0.0;
                for (int64_t j = begin; j < end; ++j) {
                    value += scores[static_cast<size_t>(j - begin)] / sum *
                             load(args.v, args.dtype, j * args.v_strides[1] + h * args.v_strides[0] + d);
                }
                store(args.out, args.dtype, s * args.out_strides[1] + h * args.out_strides[0] + d, value);
            }
        }
        begin = end;
    }
    return TILERANK_OK;
}

}  // namespace tilerank
