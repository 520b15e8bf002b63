// Shared policy of the attention block's kernels: what lies in the workspace, and how its two launches hand over.
//
// The first launch writes q, k and v, one row a token; the second attends and projects. Its blocks take numbers: first
// those of the attention, then those of the projection, which wait until all heads of their rows are there. Where the
// result is normalised, the last of a row block's projections does that.
#pragma once

#include "common/attention.cuh"
#include "common/block.h"
#include "common/counters.cuh"
#include "common/moments.cuh"

namespace tilerank {

// Everything that both launches know, passed to kernels by value.
struct BlockPlan {
    BlockArgs args;
    AttentionArgs attention;  // of the workspace's q, k, v; its `out` has the heads of a token side by side
    uint32_t* counters;       // [counters_of]: numbers taken; heads done of each row block; projections done of each
    int64_t rows;             // batch * tokens
    int64_t columns;          // num_heads * head_dim
    int64_t row_blocks;       // of a sequence, by the attention's units
    int32_t unit_rows;
    bool aligned_x;  // rows of x, residual and out begin at multiples of 16 bytes
    bool aligned_weights;
};

inline int64_t ceil_divide(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int64_t counters_of(const BlockArgs& args, int unit_rows) {
    return 1 + 2 * args.batch * ceil_divide(args.tokens, unit_rows);
}

constexpr size_t kPlanAlignment = 256;
inline size_t plan_aligned(size_t bytes) { return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment; }

inline size_t tensor_bytes(const BlockArgs& args) {
    const size_t element = args.dtype == TILERANK_FP32 ? 4 : 2;
    return plan_aligned(element * static_cast<size_t>(args.batch * args.tokens * args.num_heads * args.head_dim));
}

inline size_t plan_bytes(const BlockArgs& args, int unit_rows) {
    return 4 * tensor_bytes(args) + plan_aligned(4 * static_cast<size_t>(counters_of(args, unit_rows)));
}

inline BlockPlan make_plan(const BlockArgs& args, void* workspace, int unit_rows) {
    BlockPlan plan{};
    plan.args = args;
    plan.rows = args.batch * args.tokens;
    plan.columns = args.num_heads * args.head_dim;
    plan.unit_rows = unit_rows;
    plan.row_blocks = ceil_divide(args.tokens, unit_rows);
    unsigned char* memory = static_cast<unsigned char*>(workspace);
    const size_t step = tensor_bytes(args);
    AttentionArgs& a = plan.attention;
    a.q = memory, a.k = memory + step, a.v = memory + 2 * step, a.out = memory + 3 * step;
    plan.counters = reinterpret_cast<uint32_t*>(memory + 4 * step);
    a.batch = args.batch, a.heads = a.kv_heads = args.num_heads;
    a.q_len = a.k_len = args.tokens;
    a.q_batch_stride = a.k_batch_stride = a.v_batch_stride = a.out_batch_stride = args.tokens * plan.columns;
    a.q_head_stride = a.k_head_stride = a.v_head_stride = a.out_head_stride = args.head_dim;
    a.q_token_stride = a.k_token_stride = a.v_token_stride = a.out_token_stride = plan.columns;
    a.key_lengths = args.key_lengths, a.key_lengths_type = args.key_lengths_type;
    a.head_dim = static_cast<int32_t>(args.head_dim);
    a.dtype = static_cast<int16_t>(args.dtype), a.causal = args.causal;
    a.exact_scale = args.scale, a.scale = static_cast<float>(args.scale);

    const int64_t part = args.dtype == TILERANK_FP32 ? 4 : 8;
    const auto is_aligned = [&](const void* pointer, int64_t strides) {
        return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && strides % part == 0;
    };
    plan.aligned_x =
        is_aligned(args.x, args.x_strides[0] | args.x_strides[1]) &&
        is_aligned(args.out, args.out_strides[0] | args.out_strides[1]) &&
        (args.residual == nullptr || is_aligned(args.residual, args.residual_strides[0] | args.residual_strides[1])) &&
        is_aligned(args.gamma, 0) && is_aligned(args.beta, 0);
    plan.aligned_weights = is_aligned(args.wq, args.wq_stride) && is_aligned(args.wk, args.wk_stride) &&
                           is_aligned(args.wv, args.wv_stride) && is_aligned(args.wo, args.wo_stride);
    return plan;
}

// Element offset of a row, counted over all sequences.
__device__ __forceinline__ int64_t token_offset(const int64_t (&strides)[2], int64_t row, int64_t tokens) {
    return row / tokens * strides[0] + row % tokens * strides[1];
}

// What normalising the row takes, by one warp.
template <typename Element>
__device__ __forceinline__ RowScale scale_of_row(const Element* row, int64_t width, float epsilon, bool aligned,
                                                 int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    Moments moments;
    for (int64_t first = lane * kPart; first < width; first += kWarpSize * kPart) {
        float values[kPart];
        const int count = static_cast<int>(min(width - first, static_cast<int64_t>(kPart)));
        load_floats(values, row + first, count, aligned);
        moments.add(values, count);
    }
    moments.merge_warp();
    return row_scale(moments, epsilon);
}

// gamma and beta of columns first .., ones and zeros where there is none.
template <typename Element, int kPart>
__device__ __forceinline__ void load_factors(float (&gamma)[kPart], float (&beta)[kPart], const BlockArgs& args,
                                             int64_t first, int count, bool aligned) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) gamma[i] = 1.0f, beta[i] = 0.0f;
    if (args.gamma != nullptr) load_floats(gamma, static_cast<const Element*>(args.gamma) + first, count, aligned);
    if (args.beta != nullptr) load_floats(beta, static_cast<const Element*>(args.beta) + first, count, aligned);
}

// values become gamma (value - mean) factor + beta, those from `count` on zeros.
template <int kPart>
__device__ __forceinline__ void normalize_part(float (&values)[kPart], const RowScale& scale,
                                               const float (&gamma)[kPart], const float (&beta)[kPart], int count) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
        const float value = (values[i] - scale.mean) * scale.factor * gamma[i] + beta[i];
        values[i] = i < count ? value : 0.0f;
    }
}

// Vectors of a row that a lane can hold while its scale is found.
template <typename Element>
constexpr int kHeldParts = 1024 * sizeof(Element) / (kWarpSize * 16);

// The scale of a row whose vectors the lanes of a warp hold: two passes over registers, mean first.
template <typename Element>
__device__ __forceinline__ RowScale scale_of_parts(const uint4 (&raw)[kHeldParts<Element>], int width, float epsilon,
                                                   int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kHeldParts<Element>; ++part) {
        Element elements[kPart];
        memcpy(elements, &raw[part], 16);
#pragma unroll
        for (int e = 0; e < kPart; ++e) sum += to_float(elements[e]);
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kFullMask, sum, distance);
    RowScale scale;
    scale.mean = sum / static_cast<float>(width);
    float squares = 0.0f;
#pragma unroll
    for (int part = 0; part < kHeldParts<Element>; ++part) {
        if ((part * kWarpSize + lane) * kPart >= width) continue;
        Element elements[kPart];
        memcpy(elements, &raw[part], 16);
#pragma unroll
        for (int e = 0; e < kPart; ++e) {
            const float away = to_float(elements[e]) - scale.mean;
            squares += away * away;
        }
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        squares += __shfl_xor_sync(kFullMask, squares, distance);
    }
    scale.factor = 1.0f / sqrtf(squares / static_cast<float>(width) + epsilon);
    return scale;
}

// Is a row one that a warp can hold?
template <typename Element>
__device__ __forceinline__ bool is_held(int64_t width, bool aligned) {
    constexpr int kPart = 16 / sizeof(Element);
    return aligned && width % kPart == 0 && width <= kHeldParts<Element> * kWarpSize * kPart;
}

template <typename Element>
__device__ __forceinline__ void hold_row(uint4 (&raw)[kHeldParts<Element>], const Element* row, int width, int lane) {
    constexpr int kPart = 16 / sizeof(Element);
#pragma unroll
    for (int part = 0; part < kHeldParts<Element>; ++part) {
        const int column = (part * kWarpSize + lane) * kPart;
        raw[part] = column < width ? load_vector<uint4>(row + column) : uint4{0, 0, 0, 0};
    }
}

// Rows that a warp holds at once, so that their loads overlap.
template <typename Element>
constexpr int kHeldRows = sizeof(Element) == 2 ? 4 : 2;

// Scales of `rows` rows, of which row_at(i) is the i-th, by `warps` warps of which this is number `warp`; lane 0 calls
// use(i, scale).
template <typename Element, typename RowAt, typename Use>
__device__ __forceinline__ void scales_of_rows(const RowAt& row_at, int rows, int64_t width, float epsilon,
                                               bool aligned, int warp, int warps, int lane, const Use& use) {
    if (!is_held<Element>(width, aligned)) {
        for (int row = warp; row < rows; row += warps) {
            const RowScale scale = scale_of_row<Element>(row_at(row), width, epsilon, aligned, lane);
            if (lane == 0) use(row, scale);
        }
        return;
    }
#pragma unroll 1
    for (int row = warp * kHeldRows<Element>; row < rows; row += warps * kHeldRows<Element>) {
        uint4 raw[kHeldRows<Element>][kHeldParts<Element>];
#pragma unroll
        for (int i = 0; i < kHeldRows<Element>; ++i) {
            hold_row<Element>(raw[i], row_at(min(row + i, rows - 1)), static_cast<int>(width), lane);
        }
#pragma unroll
        for (int i = 0; i < kHeldRows<Element>; ++i) {
            const RowScale scale = scale_of_parts<Element>(raw[i], static_cast<int>(width), epsilon, lane);
            if (lane == 0 && row + i < rows) use(row + i, scale);
        }
    }
}

// Normalises `rows` rows of out in place, by `warps` warps of which this is number `warp`.
template <typename Element>
__device__ __forceinline__ void normalize_out_rows(const BlockPlan& plan, int64_t first_row, int rows, int warp,
                                                   int warps, int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    const BlockArgs& args = plan.args;
    const float epsilon = static_cast<float>(args.epsilon);
    const auto row_at = [&](int row) {
        return static_cast<Element*>(args.out) + token_offset(args.out_strides, first_row + row, args.tokens);
    };
    float values[kPart];
    float gamma[kPart];
    float beta[kPart];
    if (!is_held<Element>(args.width, plan.aligned_x)) {
        for (int row = warp; row < rows; row += warps) {
            Element* out = row_at(row);
            const RowScale scale = scale_of_row(out, args.width, epsilon, plan.aligned_x, lane);
            for (int64_t first = lane * kPart; first < args.width; first += kWarpSize * kPart) {
                const int count = static_cast<int>(min(args.width - first, static_cast<int64_t>(kPart)));
                load_floats(values, out + first, count, plan.aligned_x);
                load_factors<Element>(gamma, beta, args, first, count, plan.aligned_x);
                normalize_part(values, scale, gamma, beta, count);
                store_floats(out + first, values, count, plan.aligned_x);
            }
        }
        return;
    }
    const int width = static_cast<int>(args.width);
#pragma unroll 1
    for (int row = warp * kHeldRows<Element>; row < rows; row += warps * kHeldRows<Element>) {
        uint4 raw[kHeldRows<Element>][kHeldParts<Element>];
#pragma unroll
        for (int i = 0; i < kHeldRows<Element>; ++i) {
            hold_row<Element>(raw[i], row_at(min(row + i, rows - 1)), width, lane);
        }
#pragma unroll
        for (int i = 0; i < kHeldRows<Element>; ++i) {
            if (row + i >= rows) continue;
            const RowScale scale = scale_of_parts<Element>(raw[i], width, epsilon, lane);
            Element* out = row_at(row + i);
#pragma unroll
            for (int part = 0; part < kHeldParts<Element>; ++part) {
                const int column = (part * kWarpSize + lane) * kPart;
                if (column >= width) continue;
                Element elements[kPart];
                memcpy(elements, &raw[i][part], 16);
#pragma unroll
                for (int e = 0; e < kPart; ++e) values[e] = to_float(elements[e]);
                load_factors<Element>(gamma, beta, args, column, kPart, true);
                normalize_part(values, scale, gamma, beta, kPart);
                store_floats(out + column, values, kPart, true);
            }
        }
    }
}

}  // namespace tilerank
