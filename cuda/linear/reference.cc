// The meaning of a linear layer and what follows it, in double, on the CPU, row by row.
#include <cmath>
#include <vector>

#include "common/elements.h"
#include "common/linear.h"

namespace tilerank {
namespace {

// The factor of an input in an output, wherever weight_format puts it.
double factor_of(const LinearArgs& args, int64_t output, int64_t input) {
    if (args.weight_format == TILERANK_FORMAT_PLAIN) {
        return reference::load(args.weight, args.dtype, output * args.weight_stride + input);
    }
    const int64_t within = output % 32;
    const int64_t row = output - within + 8 * (within % 8 / 2) + 2 * (within / 8) + within % 2;
    if (args.weight_format == TILERANK_FORMAT_INTERLEAVED) {
        const int64_t place = input - input % 32 + 16 * (input % 8 / 4) + 8 * (input % 4 / 2) + 2 * (input % 32 / 8) +
                              input % 2;
        return reference::load(args.weight, args.dtype, row * args.weight_stride + place);
    }
    const int64_t place = input - input % 16 + 8 * (input % 4 / 2) + 2 * (input % 16 / 4) + input % 2;
    const int64_t at = row * args.weight_stride + place;
    return std::ldexp(reference::load(args.weight, TILERANK_FP16, at) +
                          reference::load(args.weight, TILERANK_FP16, at + args.depth),
                      -args.weight_exponent);
}

double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }

}  // namespace

tilerank_status linear_reference(const LinearArgs& args, void*, void*) {
    using reference::load;
    using reference::store;
    std::vector<double> x(static_cast<size_t>(args.depth));
    std::vector<double> row(static_cast<size_t>(args.columns));
    for (int64_t i = 0; i < args.rows; ++i) {
        for (int64_t k = 0; k < args.depth; ++k) x[static_cast<size_t>(k)] = load(args.x, args.dtype, i * args.x_stride + k);
        double mean = 0.0;
        for (int64_t c = 0; c < args.columns; ++c) {
            double sum = args.bias == nullptr ? 0.0 : load(args.bias, args.dtype, c);
            for (int64_t k = 0; k < args.depth; ++k) {
                sum += x[static_cast<size_t>(k)] * factor_of(args, c, k);
            }
            if (args.residual != nullptr) sum += load(args.residual, args.dtype, i * args.residual_stride + c);
            row[static_cast<size_t>(c)] = sum;
            mean += sum;
        }
        mean /= static_cast<double>(args.columns);
        double variance = 0.0;
        for (const double value : row) variance += (value - mean) * (value - mean);
        variance /= static_cast<double>(args.columns);
        const double factor = 1.0 / std::sqrt(variance + args.epsilon);
        for (int64_t c = 0; c < args.columns; ++c) {
            double value = row[static_cast<size_t>(c)];
            if (args.activation == TILERANK_ACTIVATION_GELU) value = gelu(value);
            if (args.activation == TILERANK_ACTIVATION_TANH) value = std::tanh(value);
            if (args.gamma != nullptr) {
                value = (value - mean) * factor * load(args.gamma, args.dtype, c) + load(args.beta, args.dtype, c);
            }
            store(args.out, args.dtype, i * args.out_stride + c, value);
        }
    }
    return TILERANK_OK;
}

}  // namespace tilerank
