// One warp a row: the rows of the three tables are read by 16-byte vectors, added and normalised in registers; rows too
// wide for that are read twice. Rows of whole vectors, as encoders have them, take a kernel without a word about the rest:
// what bounds it is how soon its loads are under way.
// Prediction: 8 us for 16,830 rows of 384 in fp16, from 60 as four kernels of a library: 13 MB are written, and the
//   words' rows, 13 MB, come from a table of 23 MB.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/embedding.h"
#include "common/moments.cuh"

namespace tilerank {
namespace warp_rows {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

// The row of the table that an index names; one beyond it means the nearest.
template <typename Element>
__device__ __forceinline__ const Element* row_of(const void* table, const int32_t* indices, int64_t at, int64_t count,
                                                 int64_t width) {
    if (table == nullptr) return nullptr;
    return static_cast<const Element*>(table) + clamp(static_cast<int64_t>(indices[at]), 0, count - 1) * width;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance);
    }
    return value;
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

// The same for rows of whole, aligned vectors, at most kParts a lane.
template <typename Element, int kParts>
__global__ void __launch_bounds__(kThreads, kParts <= 2 ? 6 : 3) whole(EmbeddingArgs args) {
    constexpr int kPart = 16 / sizeof(Element);
    let_next_begin();  // a product gets its pipeline ready while the last rows are made
    const int lane = threadIdx.x % kWarpSize;
    const int row = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (row >= args.rows) return;
    const int width = static_cast<int>(args.width);
    const auto row_at = [&](const void* table, const int32_t* indices, int64_t count) {
        const int index = min(max(indices[row], 0), static_cast<int>(count) - 1);
        return static_cast<const Element*>(table) + static_cast<int64_t>(index) * width;
    };
    const Element* word = row_at(args.words, args.ids, args.word_count);
    const Element* position = row_at(args.positions, args.places, args.position_count);
    const bool has_type = args.types != nullptr;
    const Element* type = has_type ? row_at(args.types, args.type_ids, args.type_count) : word;
    uint4 raw[kParts][3] = {}, ends[kParts][2] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int column = (part * kWarpSize + lane) * kPart;
        if (column >= width) continue;
        raw[part][0] = load_vector<uint4>(word + column);
        raw[part][1] = load_vector<uint4>(position + column);
        if (has_type) raw[part][2] = load_vector<uint4>(type + column);
        ends[part][0] = load_vector<uint4>(static_cast<const Element*>(args.gamma) + column);
        ends[part][1] = load_vector<uint4>(static_cast<const Element*>(args.beta) + column);
    }
    const auto element = [](const uint4& vector, int i) {
        Element elements[kPart];
        memcpy(elements, &vector, sizeof(vector));
        return to_float(elements[i]);
    };
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
    const float mean = warp_sum(sum) * share;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const bool exists = (part * kWarpSize + lane) * kPart < width;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            values[part][i] = exists ? values[part][i] - mean : 0.0f;
            squares += values[part][i] * values[part][i];
        }
    }
    const float factor = 1.0f / sqrtf(warp_sum(squares) * share + static_cast<float>(args.epsilon));
    Element* out = static_cast<Element*>(args.out) + row * args.out_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int column = (part * kWarpSize + lane) * kPart;
        if (column >= width) continue;
        Element elements[kPart];
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            elements[i] = from_float<Element>(values[part][i] * factor * element(ends[part][0], i) +
                                              element(ends[part][1], i));
        }
        uint4 vector;
        memcpy(&vector, elements, sizeof(vector));
        store_vector(out + column, vector);
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
    const int64_t parts = (args.width + 512 / sizeof(Element) - 1) / (512 / static_cast<int64_t>(sizeof(Element)));
    if (is_aligned(args) && parts <= 4 && args.rows <= INT32_MAX / 2 && args.word_count <= INT32_MAX) {
        const auto run = parts <= 2 ? whole<Element, 2> : parts == 3 ? whole<Element, 3> : whole<Element, 4>;
        return launch_blocks("warp_rows", run, (args.rows + kWarps - 1) / kWarps, kThreads, 0, stream, args);
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
