// The meaning of layer normalisation, in double, on the CPU, row by row: two passes, mean first.
#include <cmath>
#include <vector>

#include "common/elements.h"
#include "common/layernorm.h"

namespace tilerank {

tilerank_status layernorm_reference(const LayernormArgs& args, void*, void*) {
    using reference::load;
    using reference::store;
    std::vector<double> row(static_cast<size_t>(args.width));
    for (int64_t i = 0; i < args.rows; ++i) {
        double mean = 0.0;
        for (int64_t c = 0; c < args.width; ++c) {
            double value = load(args.x, args.dtype, i * args.x_stride + c);
            if (args.bias != nullptr) value += load(args.bias, args.dtype, c);
            if (args.residual != nullptr) value += load(args.residual, args.dtype, i * args.residual_stride + c);
            row[static_cast<size_t>(c)] = value;
            mean += value;
        }
        mean /= static_cast<double>(args.width);
        double variance = 0.0;
        for (const double value : row) variance += (value - mean) * (value - mean);
        variance /= static_cast<double>(args.width);
        const double factor = 1.0 / std::sqrt(variance + args.epsilon);
        for (int64_t c = 0; c < args.width; ++c) {
            const double value = row[static_cast<size_t>(c)];
            if (args.sum != nullptr) store(args.sum, args.dtype, i * args.sum_stride + c, value);
            const double gamma = args.gamma == nullptr ? 1.0 : load(args.gamma, args.dtype, c);
            const double beta = args.beta == nullptr ? 0.0 : load(args.beta, args.dtype, c);
            store(args.out, args.dtype, i * args.out_stride + c, (value - mean) * factor * gamma + beta);
        }
    }
    return TILERANK_OK;
}

}  // namespace tilerank
