// Shared policy of the attention block on mma.sync: its first launch, and the projection of its second.
#pragma once

#include "common/block.cuh"
#include "common/gemm.cuh"

namespace tilerank {

// Rows of the left factor: kGemmRows of a matrix, of which `rows` exist.
template <typename Element>
struct LeftRows {
    const Element* base;
    int64_t stride;
    int rows;
    bool aligned;
};

// ---- Launch 1: q, k, v = normalised x times the weights ----

// A tile of one of the three products: kGemmRows rows, kGemmColumns columns of the matrix.
template <typename Element, bool kInOut>
__device__ __forceinline__ void project_tile(const BlockPlan& plan, GemmStage<Element, kInOut>* stages,
                                             RowScale (&scales)[kGemmRows], int64_t first_row, int matrix,
                                             int64_t first_column) {
    constexpr int kPart = kPartElements<Element>;
    constexpr int kParts = kGemmDepth<Element> / kPart;        // of a row's step
    constexpr int kTurns = kGemmRows * kParts / kGemmThreads;  // parts a thread
    constexpr int kRowsATime = kGemmRows / kTurns;
    const BlockArgs& args = plan.args;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const Element* x = static_cast<const Element*>(args.x);
    const bool pre_ln = args.pre_ln != 0;

    if (pre_ln) {
        const int64_t last_row = plan.rows - 1;
        scales_of_rows<Element>(
            [&](int row) {
                return x + token_offset(args.x_strides, min(first_row + row, last_row), args.tokens);
            },
            kGemmRows, args.width, static_cast<float>(args.epsilon), plan.aligned_x, warp, kGemmWarps, lane,
            [&](int row, const RowScale& scale) { scales[row] = scale; });
    }
    __syncthreads();

    // This thread's parts of a step: the same columns of kTurns rows.
    const int own_row = static_cast<int>(threadIdx.x) / kParts;
    const int own_column = static_cast<int>(threadIdx.x) % kParts * kPart;
    const Element* rows[kTurns];
    RowScale own_scales[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int row = turn * kRowsATime + own_row;
        const bool exists = first_row + row < plan.rows;
        rows[turn] = exists ? x + token_offset(args.x_strides, first_row + row, args.tokens) : nullptr;
        if (pre_ln) own_scales[turn] = scales[row];
    }
    float values[kTurns][kPart];
    float gamma[kPart];
    float beta[kPart];
    int count = 0;
    const auto fetch_left = [&](int64_t depth) {
        const int64_t at = depth + own_column;
        count = static_cast<int>(clamp(args.width - at, 0, kPart));
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const bool exists = rows[turn] != nullptr;
            load_floats(values[turn], exists ? rows[turn] + at : x, exists ? count : 0, plan.aligned_x);
        }
        if (pre_ln) load_factors<Element>(gamma, beta, args, at, count, plan.aligned_x);
    };
    const auto store_left = [&](GemmStage<Element, kInOut>& stage) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            if (pre_ln && rows[turn] != nullptr) normalize_part(values[turn], own_scales[turn], gamma, beta, count);
            store_floats(&stage.left[turn * kRowsATime + own_row][own_column], values[turn], kPart, true);
        }
    };

    const auto of_matrix = [&](auto of_q, auto of_k, auto of_v) {
        return matrix == 0 ? of_q : matrix == 1 ? of_k : of_v;
    };
    const WeightView<Element> weights = {static_cast<const Element*>(of_matrix(args.wq, args.wk, args.wv)),
                                         of_matrix(args.wq_stride, args.wk_stride, args.wv_stride), plan.columns,
                                         args.width, plan.aligned_weights};
    const Element* bias = static_cast<const Element*>(of_matrix(args.bq, args.bk, args.bv));
    Element* target = static_cast<Element*>(
        const_cast<void*>(of_matrix(plan.attention.q, plan.attention.k, plan.attention.v)));
    GemmSums sums;
    gemm_tile<Element, kInOut>(
        sums, stages, weights, first_column, [](GemmStage<Element, kInOut>&, int64_t) {}, fetch_left, store_left, warp,
        lane);
    each_pair(sums, warp, lane, [&](int row, int column, float low, float high) {
        const int64_t to = first_column + column;  // columns are even in number: the pair exists or it does not
        if (first_row + row >= plan.rows || to >= plan.columns) return;
        if (bias != nullptr) low += to_float(bias[to]), high += to_float(bias[to + 1]);
        Element* pair = target + (first_row + row) * plan.columns + to;
        pair[0] = from_float<Element>(low);
        pair[1] = from_float<Element>(high);
    });
}

namespace block_mma {

template <typename Element, bool kInOut>
__global__ void __launch_bounds__(kGemmThreads) project(BlockPlan plan, int64_t counters) {
    DynamicShared memory;
    auto* stages = memory.take<GemmStage<Element, kInOut>>(kGemmStages);
    SHARED(RowScale, scales, [kGemmRows]);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kGemmThreads) + threadIdx.x; i < counters;
         i += gridDim.x * static_cast<int64_t>(kGemmThreads)) {
        plan.counters[i] = 0;
    }
    const unsigned matrix_tiles = static_cast<unsigned>((plan.columns + kGemmColumns - 1) / kGemmColumns);
    const unsigned column = blockIdx.x % (3 * matrix_tiles);
    project_tile<Element, kInOut>(plan, stages, scales,
                                  static_cast<int64_t>(blockIdx.x / (3 * matrix_tiles)) * kGemmRows,
                                  static_cast<int>(column / matrix_tiles),
                                  static_cast<int64_t>(column % matrix_tiles) * kGemmColumns);
}

template <typename Element>
tilerank_status launch_project(const char* name, const BlockPlan& plan, void* stream) {
    const int64_t blocks =
        ceil_divide(plan.rows, kGemmRows) * 3 * ceil_divide(plan.columns, kGemmColumns);
    const int64_t counters = counters_of(plan.args, plan.unit_rows);
    if (plan.args.weight_layout == TILERANK_WEIGHTS_IN_OUT) {
        return launch_blocks(name, project<Element, true>, blocks, kGemmThreads,
                             DynamicShared::bytes<GemmStage<Element, true>>(kGemmStages), stream, plan, counters);
    }
    return launch_blocks(name, project<Element, false>, blocks, kGemmThreads,
                         DynamicShared::bytes<GemmStage<Element, false>>(kGemmStages), stream, plan, counters);
}

}  // namespace block_mma

// ---- Launch 2: numbers of work ----

// The attention's numbers come first: (sequence, unit, head), the head fastest; then the projection's: (sequence, unit,
// kGemmRows rows, column), the column fastest.
struct BlockWork {
    int64_t attention;  // numbers
    int64_t parts;      // of a unit, kGemmRows rows each
    int64_t columns;    // tiles of the projection

    __host__ __device__ explicit BlockWork(const BlockPlan& plan)
        : attention(plan.args.batch * plan.row_blocks * plan.args.num_heads),
          parts(plan.unit_rows / kGemmRows),
          columns((plan.args.width + kGemmColumns - 1) / kGemmColumns) {}

    __host__ __device__ int64_t all(const BlockPlan& plan) const {
        return attention + plan.args.batch * plan.row_blocks * parts * columns;
    }
};

// The next number, for all threads of the block. Ends with a barrier.
__device__ __forceinline__ int64_t take_number(const BlockPlan& plan, uint32_t& shared_number) {
    __syncthreads();  // what the last number used may be used again
    if (threadIdx.x == 0) shared_number = counter_add(plan.counters, 1);
    __syncthreads();
    return shared_number;
}

// A head of a unit is done.
__device__ __forceinline__ void head_done(const BlockPlan& plan, int64_t sequence, int64_t unit) {
    __syncthreads();
    if (threadIdx.x == 0) counter_add(plan.counters + 1 + sequence * plan.row_blocks + unit, 1);
}

// Tile number `number` of the projection: out = attended rows wo^T + bo + residual, and the normalisation of the unit's
// rows once all its tiles are there.
template <typename Element, bool kInOut>
__device__ __forceinline__ void project_out_tile(const BlockPlan& plan, GemmStage<Element, kInOut>* stages,
                                                 const BlockWork& work, int64_t number, uint32_t& shared_number) {
    constexpr int kPart = kPartElements<Element>;
    const BlockArgs& args = plan.args;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t first_column = number % work.columns * kGemmColumns;
    const int64_t part = number / work.columns % work.parts;
    const int64_t block = number / work.columns / work.parts;  // sequence * row_blocks + unit
    const int64_t sequence = block / plan.row_blocks;
    const int64_t unit_row = block % plan.row_blocks * plan.unit_rows;
    const int64_t first_token = unit_row + part * kGemmRows;
    const int64_t unit_rows = min(args.tokens - unit_row, static_cast<int64_t>(plan.unit_rows));
    const int rows = static_cast<int>(clamp(args.tokens - first_token, 0, kGemmRows));
    if (rows == 0) return;
    if (threadIdx.x == 0) counter_wait(plan.counters + 1 + block, static_cast<uint32_t>(args.num_heads));
    __syncthreads();

    const int64_t first_row = sequence * args.tokens + first_token;
    const Element* attended = static_cast<const Element*>(plan.attention.out) + first_row * plan.columns;
    const auto copy_left = [&](GemmStage<Element, kInOut>& stage, int64_t depth) {
        constexpr int kParts = kGemmDepth<Element> / kPart;
#pragma unroll
        for (int at = static_cast<int>(threadIdx.x); at < kGemmRows * kParts; at += kGemmThreads) {
            const int row = at / kParts;
            const int column = at % kParts * kPart;
            copy_part(&stage.left[row][column], attended + (row < rows ? row * plan.columns + depth + column : 0),
                      row < rows ? plan.columns - depth - column : 0, plan.columns % kPart == 0);
        }
    };
    const WeightView<Element> weights = {static_cast<const Element*>(args.wo), args.wo_stride, args.width, plan.columns,
                                         plan.aligned_weights};
    GemmSums sums;
    gemm_tile<Element, kInOut>(
        sums, stages, weights, first_column, copy_left, [](int64_t) {}, [](GemmStage<Element, kInOut>&) {}, warp, lane);
    const Element* bias = static_cast<const Element*>(args.bo);
    const Element* residual = static_cast<const Element*>(args.residual);
    each_pair(sums, warp, lane, [&](int row, int column, float low, float high) {
        if (row >= rows) return;
        const float pair[2] = {low, high};
        Element* out = static_cast<Element*>(args.out) + token_offset(args.out_strides, first_row + row, args.tokens);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t to = first_column + column + i;
            if (to >= args.width) continue;
            float value = pair[i];
            if (bias != nullptr) value += to_float(bias[to]);
            if (residual != nullptr) {
                value += to_float(residual[token_offset(args.residual_strides, first_row + row, args.tokens) + to]);
            }
            out[to] = from_float<Element>(value);
        }
    });
    if (args.pre_ln) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t* done = plan.counters + 1 + args.batch * plan.row_blocks + block;
        const int64_t tiles = (unit_rows + kGemmRows - 1) / kGemmRows * work.columns;
        shared_number = counter_add(done, 1) + 1 == static_cast<uint32_t>(tiles);
    }
    __syncthreads();
    if (shared_number == 0) return;
    normalize_out_rows<Element>(plan, sequence * args.tokens + unit_row, static_cast<int>(unit_rows), warp, kGemmWarps,
                                lane);
}

}  // namespace tilerank
