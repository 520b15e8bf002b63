// The meaning of the attention block, in double, on the CPU: what every other variant must agree with. q, k, v and the
// attended rows are kept in double too; variants round them to dtype.
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/block.h"
#include "common/elements.h"

namespace tilerank {
namespace reference {
namespace block {

using Matrix = std::vector<double>;  // rows one after another

// A weight matrix in either layout: the factor of input `in` for output `out`.
struct Weights {
    const void* base;
    int64_t stride;
    const BlockArgs& args;

    double at(int64_t out, int64_t in) const {
        const bool out_in = args.weight_layout == TILERANK_WEIGHTS_OUT_IN;
        return load(base, args.dtype, out_in ? out * stride + in : in * stride + out);
    }
};

// inputs [rows, depth] times the weights, plus bias: [rows, columns].
Matrix project(const Matrix& inputs, int64_t depth, const Weights& weights, const void* bias, int64_t columns) {
    const int64_t rows = static_cast<int64_t>(inputs.size()) / depth;
    Matrix flat(static_cast<size_t>(columns * depth));
    for (int64_t n = 0; n < columns; ++n) {
        for (int64_t k = 0; k < depth; ++k) flat[static_cast<size_t>(n * depth + k)] = weights.at(n, k);
    }
    Matrix outputs(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < columns; ++n) {
            double sum = bias == nullptr ? 0.0 : load(bias, weights.args.dtype, n);
            const double* row = &inputs[static_cast<size_t>(i * depth)];
            const double* factors = &flat[static_cast<size_t>(n * depth)];
            for (int64_t k = 0; k < depth; ++k) sum += row[k] * factors[k];
            outputs[static_cast<size_t>(i * columns + n)] = sum;
        }
    }
    return outputs;
}

void normalize(const BlockArgs& args, Matrix* rows) {
    const int64_t width = args.width;
    for (size_t first = 0; first < rows->size(); first += static_cast<size_t>(width)) {
        double* row = rows->data() + first;
        double mean = 0.0;
        for (int64_t c = 0; c < width; ++c) mean += row[c];
        mean /= static_cast<double>(width);
        double variance = 0.0;
        for (int64_t c = 0; c < width; ++c) variance += (row[c] - mean) * (row[c] - mean);
        variance /= static_cast<double>(width);
        for (int64_t c = 0; c < width; ++c) {
            const double gamma = args.gamma == nullptr ? 1.0 : load(args.gamma, args.dtype, c);
            const double beta = args.beta == nullptr ? 0.0 : load(args.beta, args.dtype, c);
            row[c] = (row[c] - mean) / std::sqrt(variance + args.epsilon) * gamma + beta;
        }
    }
}

int64_t counted_keys(const BlockArgs& args, int64_t sequence) {
    int64_t length = args.tokens;
    if (args.key_lengths_type == TILERANK_LENGTHS_INT32) {
        length = static_cast<const int32_t*>(args.key_lengths)[sequence];
    } else if (args.key_lengths_type == TILERANK_LENGTHS_INT64) {
        length = static_cast<const int64_t*>(args.key_lengths)[sequence];
    }
    return length < 0 ? 0 : length > args.tokens ? args.tokens : length;
}

// One sequence's attention, all heads: [tokens, num_heads * head_dim]. A token that sees no key gets zeros.
Matrix attend(const BlockArgs& args, const Matrix& q, const Matrix& k, const Matrix& v, int64_t keys) {
    const int64_t columns = args.num_heads * args.head_dim;
    Matrix out(q.size(), 0.0);
    std::vector<double> scores(static_cast<size_t>(args.tokens));
    for (int64_t first = 0; first < columns; first += args.head_dim) {
        for (int64_t i = 0; i < args.tokens; ++i) {
            const int64_t seen = args.causal && i + 1 < keys ? i + 1 : keys;
            double largest = -INFINITY;
            for (int64_t j = 0; j < seen; ++j) {
                double product = 0.0;
                for (int64_t d = first; d < first + args.head_dim; ++d) {
                    product += q[static_cast<size_t>(i * columns + d)] * k[static_cast<size_t>(j * columns + d)];
                }
                scores[static_cast<size_t>(j)] = args.scale * product;
                largest = std::fmax(largest, args.scale * product);
            }
            double total = 0.0;
            for (int64_t j = 0; j < seen; ++j) {
                const double weight = std::exp(scores[static_cast<size_t>(j)] - largest);
                total += weight;
                for (int64_t d = first; d < first + args.head_dim; ++d) {
                    out[static_cast<size_t>(i * columns + d)] += weight * v[static_cast<size_t>(j * columns + d)];
                }
            }
            for (int64_t d = first; d < first + args.head_dim && seen > 0; ++d) {
                out[static_cast<size_t>(i * columns + d)] /= total;
            }
        }
    }
    return out;
}

}  // namespace block
}  // namespace reference

tilerank_status block_reference(const BlockArgs& args, void*, void*) {
    using namespace reference;
    using namespace reference::block;
    const int64_t columns = args.num_heads * args.head_dim;
    for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
        Matrix rows;
        for (int64_t i = 0; i < args.tokens; ++i) {
            for (int64_t c = 0; c < args.width; ++c) {
                rows.push_back(
                    load(args.x, args.dtype, sequence * args.x_strides[0] + i * args.x_strides[1] + c));
            }
        }
        if (args.pre_ln) normalize(args, &rows);
        const Matrix q = project(rows, args.width, {args.wq, args.wq_stride, args}, args.bq, columns);
        const Matrix k = project(rows, args.width, {args.wk, args.wk_stride, args}, args.bk, columns);
        const Matrix v = project(rows, args.width, {args.wv, args.wv_stride, args}, args.bv, columns);
        const Matrix attended = attend(args, q, k, v, counted_keys(args, sequence));
        Matrix out = project(attended, columns, {args.wo, args.wo_stride, args}, args.bo, args.width);
        for (int64_t i = 0; i < args.tokens && args.residual != nullptr; ++i) {
            for (int64_t c = 0; c < args.width; ++c) {
                out[static_cast<size_t>(i * args.width + c)] +=
                    load(args.residual, args.dtype,
                         sequence * args.residual_strides[0] + i * args.residual_strides[1] + c);
            }
        }
        if (!args.pre_ln) normalize(args, &out);
        for (int64_t i = 0; i < args.tokens; ++i) {
            for (int64_t c = 0; c < args.width; ++c) {
                store(args.out, args.dtype, sequence * args.out_strides[0] + i * args.out_strides[1] + c,
                      out[static_cast<size_t>(i * args.width + c)]);
            }
        }
    }
    return TILERANK_OK;
}

}  // namespace tilerank
