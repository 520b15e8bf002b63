// The meaning of the layer behind attention, in double, on the CPU, row by row. What kernels round between products is
// rounded here too.
#include <cmath>
#include <vector>

#include "common/elements.h"
#include "common/layer.h"

namespace tilerank {
namespace {

using Row = std::vector<double>;

struct Maker {
    const LayerArgs& args;

    Row product(const Row& x, const void* weight, const void* bias, int64_t columns) const {
        Row result(static_cast<size_t>(columns));
        const int64_t depth = static_cast<int64_t>(x.size());
        for (int64_t c = 0; c < columns; ++c) {
            double sum = reference::load(bias, args.dtype, c);
            for (int64_t k = 0; k < depth; ++k) {
                sum += x[static_cast<size_t>(k)] * reference::load(weight, args.dtype, c * depth + k);
            }
            result[static_cast<size_t>(c)] = sum;
        }
        return result;
    }

    void round(Row& row) const {
        for (double& value : row) {
            double kept = 0.0;  // room for an element of any dtype
            reference::store(&kept, args.dtype, 0, value);
            value = reference::load(&kept, args.dtype, 0);
        }
    }

    void normalise(Row& row, const Row& residual, int side) const {
        double mean = 0.0, variance = 0.0;
        for (size_t c = 0; c < row.size(); ++c) mean += row[c] += residual[c];
        mean /= static_cast<double>(row.size());
        for (const double value : row) variance += (value - mean) * (value - mean);
        const double factor = 1.0 / std::sqrt(variance / static_cast<double>(row.size()) + args.epsilon);
        for (size_t c = 0; c < row.size(); ++c) {
            const int64_t column = static_cast<int64_t>(c);
            row[c] = (row[c] - mean) * factor * reference::load(args.gammas[side], args.dtype, column) +
                     reference::load(args.betas[side], args.dtype, column);
        }
        round(row);
    }

    Row load(const void* from, int64_t row, int64_t stride) const {
        Row values(static_cast<size_t>(args.width));
        for (int64_t c = 0; c < args.width; ++c) {
            values[static_cast<size_t>(c)] = reference::load(from, args.dtype, row * stride + c);
        }
        return values;
    }

    void store(void* to, int64_t row, int64_t stride, const Row& values) const {
        for (size_t c = 0; c < values.size(); ++c) {
            reference::store(to, args.dtype, row * stride + static_cast<int64_t>(c), values[c]);
        }
    }
};

}  // namespace

tilerank_status layer_reference(const LayerArgs& args, void*, void*) {
    const Maker make{args};
    for (int64_t i = 0; i < args.rows; ++i) {
        Row first = make.product(make.load(args.found, i, args.found_stride), args.out_weight, args.out_bias, args.width);
        make.normalise(first, make.load(args.x, i, args.x_stride), 0);
        Row wide = make.product(first, args.up_weight, args.up_bias, args.wide);
        for (double& value : wide) value *= 0.5 * std::erfc(-value / std::sqrt(2.0));
        make.round(wide);
        Row second = make.product(wide, args.down_weight, args.down_bias, args.width);
        make.normalise(second, first, 1);
        make.store(args.out, i, args.out_stride, second);
        if (args.next_columns == 0) continue;
        make.store(args.next, i, args.next_stride,
                   make.product(second, args.next_weight, args.next_bias, args.next_columns));
    }
    return TILERANK_OK;
}

}  // namespace tilerank
