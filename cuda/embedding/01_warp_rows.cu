// One warp, or half of one, a row: the rows of the three tables are read by 16-byte vectors, added and normalised in
// registers; rows too wide for that are read twice. Rows of whole vectors, as encoders have them, take a kernel without
// a word about the rest: what bounds it is how soon its loads are under way.
// Prediction: 8 us for 16,830 rows of 384 in fp16, from 60 as four kernels of a library: 13 MB are written, and the
//   words' rows, 13 MB, come from a table of 23 MB.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include <algorithm>

#include "common/embedding.h"
#include "common/moments.cuh"

namespace tilerank {
namespace warp_rows {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWholeBlocks = 4;  // of a multiprocessor: as many as have registers for a row's vectors at once

// The row of the table that an index names; one beyond it means the nearest.
template <typename Element>
__device__ __forceinline__ const Element* row_of(const void* table, const int32_t* indices, int64_t at, int64_t count,
                                                 int64_t width) {
    if (table == nullptr) return nullptr;
    return static_cast<const Element*>(table) + clamp(static_cast<int64_t>(indices[at]), 0, count - 1) * width;
}

// kParts: vectors of a row that a lane keeps; 0: none, the row is read twice.
template <typename Element, int kParts>
__global__ void __launch_bounds__(kThreads) kernel(EmbeddingArgs args, bool aligned) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kStep = kWarpSize * kPart;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (row >= args.rows) return;
    const Element* word = row_of<Element>(args.words, args.ids, row, args.word_count, args.width);
    const Element* position = row_of<Element>(args.positions, args.places, row, args.position_count, args.width);
    const Element* type = row_of<Element>(args.types, args.type_ids, row, args.type_count, args.width);
    const Element* gamma = static_cast<const Element*>(args.gamma);
    const Element* beta = static_cast<const Element*>(args.beta);
    Element* out = static_cast<Element*>(args.out) + row * args.out_stride;

    const auto count_at = [&](int64_t column) {
        return static_cast<int>(clamp(args.width - column, 0, static_cast<int64_t>(kPart)));
    };
    const auto load = [&](float (&values)[kPart], int64_t column) {
        float more[kPart];
        load_floats(values, word + column, count_at(column), aligned);
        load_floats(more, position + column, count_at(column), aligned);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[i] += more[i];
        if (type == nullptr) return;
        load_floats(more, type + column, count_at(column), aligned);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[i] += more[i];
    };
    const auto store = [&](int64_t column, float (&values)[kPart], const RowScale& scale) {
        float factors[kPart], terms[kPart];
        load_floats(factors, gamma + column, count_at(column), aligned);
        load_floats(terms, beta + column, count_at(column), aligned);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[i] = (values[i] - scale.mean) * scale.factor * factors[i] + terms[i];
        store_floats(out + column, values, count_at(column), aligned);
    };

    const float epsilon = static_cast<float>(args.epsilon);
    if constexpr (kParts > 0) {
        // The row is at hand: its mean first, then its variance, take fewer steps than moments that are merged.
        float values[kParts][kPart] = {};
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int64_t column = part * kStep + lane * kPart;
            if (count_at(column) > 0) load(values[part], column);
#pragma unroll
            for (int i = 0; i < kPart; ++i) sum += values[part][i];
        }
        const float share = 1.0f / static_cast<float>(args.width);
        const float mean = warp_sum(sum) * share;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int count = count_at(part * kStep + lane * kPart);
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                const float distance = i < count ? values[part][i] - mean : 0.0f;
                squares += distance * distance;
            }
        }
        const RowScale scale = {mean, 1.0f / sqrtf(warp_sum(squares) * share + epsilon)};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int64_t column = part * kStep + lane * kPart;
            if (count_at(column) > 0) store(column, values[part], scale);
        }
    } else {
        Moments moments;
        float values[kPart];
        for (int64_t column = lane * kPart; column < args.width; column += kStep) {
            load(values, column);
            moments.add(values, count_at(column));
        }
        moments.merge_warp();
        const RowScale scale = row_scale(moments, epsilon);
        for (int64_t column = lane * kPart; column < args.width; column += kStep) {
            load(values, column);
            store(column, values, scale);
        }
    }
}

// The same for rows of whole, aligned vectors, at most kParts for each of the kLanes that share a row. A warp goes on with
// further rows, for which gamma and beta, and where their vectors are to be found, are at hand.
template <typename Element, int kParts, int kLanes>
__global__ void __launch_bounds__(kThreads, kWholeBlocks) whole(EmbeddingArgs args) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kRows = kWarpSize / kLanes;  // of a warp at a time
    let_next_begin();  // a product gets its pipeline ready while the last rows are made
    const int lane = threadIdx.x % kLanes;
    const int rows = static_cast<int>(args.rows), width = static_cast<int>(args.width);
    const int first = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) / kLanes;
    const int step = static_cast<int>(gridDim.x) * kWarps * kRows;
    const bool has_type = args.types != nullptr;
    const auto vector_at = [&](const void* table, int64_t row, int part) {
        const int column = (part * kLanes + lane) * kPart;
        if (column >= width) return uint4{0, 0, 0, 0};
        return load_vector<uint4>(static_cast<const Element*>(table) + row * width + column);
    };
    const auto index_at = [&](const int32_t* indices, int64_t count, int row) {
        return min(max(indices[row], 0), static_cast<int>(count) - 1);
    };
    const auto element = [](const uint4& vector, int i) {
        Element elements[kPart];
        memcpy(elements, &vector, sizeof(vector));
        return to_float(elements[i]);
    };
    const auto sum_of_row = [](float value) {
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(kFullMask, value, distance);
        }
        return value;
    };
    int word = 0, position = 0, type = 0;
    const auto find = [&](int row) {
        const int at = min(row, rows - 1);  // lanes beyond the last row go with the others
        word = index_at(args.ids, args.word_count, at);
        position = index_at(args.places, args.position_count, at);
        if (has_type) type = index_at(args.type_ids, args.type_count, at);
    };
    find(first);
    uint4 gamma[kParts], beta[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        gamma[part] = vector_at(args.gamma, 0, part), beta[part] = vector_at(args.beta, 0, part);
    }
#pragma unroll 1
    for (int row = first; row - first % kRows < rows; row += step) {
        uint4 raw[kParts][3] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            raw[part][0] = vector_at(args.words, word, part);
            raw[part][1] = vector_at(args.positions, position, part);
            if (has_type) raw[part][2] = vector_at(args.types, type, part);
        }
        find(row + step);
        float values[kParts][kPart];
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                values[part][i] = element(raw[part][0], i) + element(raw[part][1], i) + element(raw[part][2], i);
                sum += values[part][i];
            }
        }
        const float share = 1.0f / static_cast<float>(width);
        const float mean = sum_of_row(sum) * share;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const bool exists = (part * kLanes + lane) * kPart < width;
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                values[part][i] = exists ? values[part][i] - mean : 0.0f;
                squares += values[part][i] * values[part][i];
            }
        }
        const float factor = 1.0f / sqrtf(sum_of_row(squares) * share + static_cast<float>(args.epsilon));
        Element* out = static_cast<Element*>(args.out) + row * args.out_stride;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int column = (part * kLanes + lane) * kPart;
            if (column >= width || row >= rows) continue;
            Element elements[kPart];
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                elements[i] =
                    from_float<Element>(values[part][i] * factor * element(gamma[part], i) + element(beta[part], i));
            }
            uint4 vector;
            memcpy(&vector, elements, sizeof(vector));
            store_vector(out + column, vector);
        }
    }
}

bool is_aligned(const EmbeddingArgs& args) {
    const uintptr_t pointers = reinterpret_cast<uintptr_t>(args.words) | reinterpret_cast<uintptr_t>(args.positions) |
                               reinterpret_cast<uintptr_t>(args.types) | reinterpret_cast<uintptr_t>(args.gamma) |
                               reinterpret_cast<uintptr_t>(args.beta) | reinterpret_cast<uintptr_t>(args.out);
    return pointers % 16 == 0 && (args.width | args.out_stride) % (args.dtype == TILERANK_FP32 ? 4 : 8) == 0;
}

template <typename Element>
tilerank_status launch_typed(const EmbeddingArgs& args, void* stream) {
    constexpr int64_t kPart = 16 / sizeof(Element);
    const int64_t vectors = (args.width + kPart - 1) / kPart, parts = (vectors + kWarpSize - 1) / kWarpSize;
    if (is_aligned(args) && parts <= 4 && args.rows <= INT32_MAX / 2 && args.word_count <= INT32_MAX) {
        // Half a warp has no lanes to spare where a row has 48 vectors.
        const int lanes = vectors <= 48 ? 16 : 32;
        const auto run =
            lanes == 16 ? whole<Element, 3, 16> : parts <= 3 ? whole<Element, 3, 32> : whole<Element, 4, 32>;
        const int64_t blocks = (args.rows * lanes + kThreads - 1) / kThreads;
        const int64_t most = static_cast<int64_t>(std::max(multiprocessors(), 1)) * kWholeBlocks;
        return launch_blocks("warp_rows", run, std::min(blocks, most), kThreads, 0, stream, args);
    }
    const auto run = parts <= 2 ? kernel<Element, 2> : parts <= 4 ? kernel<Element, 4> : kernel<Element, 0>;
    return launch_blocks("warp_rows", run, (args.rows + kWarps - 1) / kWarps, kThreads, 0, stream, args,
                         is_aligned(args));
}

}  // namespace warp_rows

tilerank_status embedding_warp_rows(const EmbeddingArgs& args, void*, void* stream) {
    switch (args.dtype) {
        case TILERANK_FP16:
            return warp_rows::launch_typed<__half>(args, stream);
        case TILERANK_BF16:
            return warp_rows::launch_typed<__nv_bfloat16>(args, stream);
        default:
            return warp_rows::launch_typed<float>(args, stream);
    }
}

}  // namespace tilerank
