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
    a.dtype = args.dtype, a.causal = args.causal;
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

// values of columns first .. of a row become gamma (value - mean) factor + beta, those from `count` on zeros.
template <int kPart, typename Element>
__device__ __forceinline__ void normalize_part(float (&values)[kPart], const RowScale& scale, const BlockArgs& args,
                                               int64_t first, int count, bool aligned, const Element*) {
    float gamma[kPart];
    float beta[kPart];
    if (args.gamma != nullptr) load_floats(gamma, static_cast<const Element*>(args.gamma) + first, count, aligned);
    if (args.beta != nullptr) load_floats(beta, static_cast<const Element*>(args.beta) + first, count, aligned);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
        float value = (values[i] - scale.mean) * scale.factor;
        if (args.gamma != nullptr) value *= gamma[i];
        if (args.beta != nullptr) value += beta[i];
        values[i] = i < count ? value : 0.0f;
    }
}

// Normalises a row of out in place, by one warp.
template <typename Element>
__device__ __forceinline__ void normalize_out_row(const BlockPlan& plan, int64_t row, int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    const BlockArgs& args = plan.args;
    Element* out = static_cast<Element*>(args.out) + token_offset(args.out_strides, row, args.tokens);
    const RowScale scale =
        scale_of_row(out, args.width, static_cast<float>(args.epsilon), plan.aligned_x, lane);
    for (int64_t first = lane * kPart; first < args.width; first += kWarpSize * kPart) {
        float values[kPart];
        const int count = static_cast<int>(min(args.width - first, static_cast<int64_t>(kPart)));
        load_floats(values, out + first, count, plan.aligned_x);
        normalize_part(values, scale, args, first, count, plan.aligned_x, out);
        store_floats(out + first, values, count, plan.aligned_x);
    }
}

// Normalises `rows` rows of out in place, by `warps` warps of which this is number `warp`: several rows at a time, kept in
// registers between mean, variance and result, so that their loads overlap.
template <typename Element>
__device__ __forceinline__ void normalize_out_rows(const BlockPlan& plan, int64_t first_row, int rows, int warp,
                                                   int warps, int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kAtOnce = sizeof(Element) == 2 ? 4 : 2;
    constexpr int kParts = 1024 / (kWarpSize * kPart);
    const BlockArgs& args = plan.args;
    if (!plan.aligned_x || args.width % kPart != 0 || args.width > kParts * kWarpSize * kPart) {
        for (int row = warp; row < rows; row += warps) normalize_out_row<Element>(plan, first_row + row, lane);
        return;
    }
    const int width = static_cast<int>(args.width);
    const auto row_at = [&](int row) {
        return static_cast<Element*>(args.out) +
               token_offset(args.out_strides, first_row + min(row, rows - 1), args.tokens);
    };
#pragma unroll 1
    for (int row = warp * kAtOnce; row < rows; row += warps * kAtOnce) {
        uint4 raw[kAtOnce][kParts];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const Element* source = row_at(row + i);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = (part * kWarpSize + lane) * kPart;
                raw[i][part] = column < width ? load_vector<uint4>(source + column) : uint4{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (row + i >= rows) continue;
            float sum = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                Element elements[kPart];
                memcpy(elements, &raw[i][part], 16);
#pragma unroll
                for (int e = 0; e < kPart; ++e) sum += to_float(elements[e]);
            }
#pragma unroll
            for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(kFullMask, sum, distance);
            }
            RowScale scale;
            scale.mean = sum / static_cast<float>(width);
            float squares = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                if ((part * kWarpSize + lane) * kPart >= width) continue;
                Element elements[kPart];
                memcpy(elements, &raw[i][part], 16);
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
            scale.factor = 1.0f / sqrtf(squares / static_cast<float>(width) + static_cast<float>(args.epsilon));
            Element* target = row_at(row + i);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = (part * kWarpSize + lane) * kPart;
                if (column >= width) continue;
                Element elements[kPart];
                memcpy(elements, &raw[i][part], 16);
                float values[kPart];
#pragma unroll
                for (int e = 0; e < kPart; ++e) values[e] = to_float(elements[e]);
                normalize_part(values, scale, args, column, kPart, true, target);
                store_floats(target + column, values, kPart, true);
            }
        }
    }
}

}  // namespace tilerank
