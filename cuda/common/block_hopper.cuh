// Shared policy of the attention block's kernels for Hopper: the first launch, and the projection of the second.
#pragma once

#include <algorithm>

#include "common/balanced.cuh"
#include "common/block.cuh"
#include "common/hopper.cuh"

namespace tilerank {
namespace block_hopper {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kDepth = 64;  // of a step of a product: 128 bytes a row
constexpr int kRowBytes = 2 * kDepth;
constexpr int kMostShared = 227 * 1024;

// The weights, and the attended rows, as the copy engine knows them.
struct Maps {
    TensorMap x;
    TensorMap weights[3];  // of q, k, v
    TensorMap attended;
    TensorMap wo;
};

// A place in a ring of stages, which goes on from tile to tile.
template <int kStages>
struct RingPlace {
    int stage = 0;
    int parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The box of weights for outputs column .. column + kColumns - 1 and inputs depth .. depth + 63: rows of outputs, or
// parts of 64 outputs as rows of inputs.
template <int kColumns, bool kInOut>
__device__ __forceinline__ void copy_weights(unsigned char* target, const TensorMap& map, int64_t column, int64_t depth,
                                             uint64_t* barrier) {
    if constexpr (kInOut) {
#pragma unroll
        for (int part = 0; part < kColumns / 64; ++part) {
            copy_box(target + part * 64 * kRowBytes, map, depth, column + part * 64, barrier);
        }
    } else {
        copy_box(target, map, column, depth, barrier);
    }
}

// sums += left right^T over a step: 64 rows, kColumns outputs, both in shared memory. clear: from zero.
template <typename Element, int kColumns, bool kInOut>
__device__ __forceinline__ void multiply_step(Fragment (&sums)[kColumns / 8], const unsigned char* left,
                                              const unsigned char* right, bool clear) {
    const uint32_t a = shared_address(left) / 16;
    const uint32_t b = shared_address(right) / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
        // 16 inputs further: 32 bytes along a row of them, or 16 rows.
        const uint32_t at = kInOut ? b + step * kRowBytes : b + step * 2;
        constexpr uint32_t kStride = kInOut ? 64 * kRowBytes / 16 : 1;
        wgmma_shared_k16<Element, kColumns, kInOut>(sums, tile_descriptor<kRowBytes>(a + step * 2, 1),
                                                    tile_descriptor<kRowBytes>(at, kStride), step > 0 || !clear);
    }
    wgmma_commit();
}

// ---- Launch 1: q, k, v = normalised x times the weights ----

// A tile is kProjectRows rows by kColumns columns of one of the three.
constexpr int kProjectRows = 128;
constexpr int kProjectThreads = 3 * kGroupThreads;  // one group copies and normalises, two multiply
constexpr int kNormalizeWarps = kGroupWarps - 1;    // the first one copies
constexpr int kNormalizeRegisters = 136;
constexpr int kMultiplyRegisters = 184;
// A block is launched with equal shares of 65,536 registers, in eights a thread. A group that asked for more than the
// others have given back would wait for ever.
constexpr int launch_registers(int threads) { return 65536 / threads / 8 * 8; }
static_assert(kNormalizeRegisters + 2 * kMultiplyRegisters <= 3 * launch_registers(kProjectThreads));

template <int kColumns>
struct ProjectShape {
    static constexpr int kLeftBytes = kProjectRows * kRowBytes;
    static constexpr int kRightBytes = kColumns * kRowBytes;
    static constexpr int kStages = kColumns > 128 ? 4 : 6;
    static constexpr int kRingBytes = kStages * (kLeftBytes + kRightBytes);
    static constexpr size_t bytes() {
        return DynamicShared::bytes<unsigned char>(kRingBytes + 1024) + 3 * DynamicShared::bytes<uint64_t>(kStages) +
               DynamicShared::bytes<uint64_t>(1) + DynamicShared::bytes<RowScale>(kProjectRows);
    }
};

// The tiles that a block works on, row block by row block.
struct ProjectTiles {
    int first;
    int last;
    int columns;         // tiles of a row block
    int matrix_columns;  // of one of the three matrices

    __device__ __forceinline__ ProjectTiles(const BlockPlan& plan, int columns_a_tile, int tiles_a_block)
        : matrix_columns((static_cast<int>(plan.columns) + columns_a_tile - 1) / columns_a_tile) {
        columns = 3 * matrix_columns;
        const int all = (static_cast<int>(plan.rows) + kProjectRows - 1) / kProjectRows * columns;
        first = min(static_cast<int>(blockIdx.x) * tiles_a_block, all);
        last = min(first + tiles_a_block, all);
    }
};

// Scales of the kProjectRows rows from first_row on, by kWarps warps.
template <typename Element, int kWarps>
__device__ __forceinline__ void find_scales(const BlockPlan& plan, RowScale* scales, int first_row, int warp,
                                            int lane) {
    const BlockArgs& args = plan.args;
    const Element* x = static_cast<const Element*>(args.x);
    const int last_row = static_cast<int>(plan.rows) - 1;
    scales_of_rows<Element>([&](int row) { return x + min(first_row + row, last_row) * args.x_strides[1]; },
                            kProjectRows, args.width, static_cast<float>(args.epsilon), true, warp, kWarps, lane,
                            [&](int row, const RowScale& scale) { scales[row] = scale; });
}

// By one thread: brings the raw rows and the weights.
template <int kColumns, bool kInOut>
__device__ __forceinline__ void fill_project(const BlockPlan& plan, const Maps& maps, const ProjectTiles& tiles,
                                             unsigned char* ring, uint64_t* arrived, uint64_t* empty) {
    using S = ProjectShape<kColumns>;
    const int steps = (static_cast<int>(plan.args.width) + kDepth - 1) / kDepth;
    RingPlace<S::kStages> at;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int row = tile / tiles.columns * kProjectRows;
        const int column_tile = tile % tiles.columns;
        const int matrix = column_tile / tiles.matrix_columns;
        const int first_column = column_tile % tiles.matrix_columns * kColumns;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            barrier_wait(&empty[at.stage], at.parity ^ 1);
            barrier_expect(&arrived[at.stage], S::kLeftBytes + S::kRightBytes);
            copy_box(left, maps.x, row, step * kDepth, &arrived[at.stage]);
            copy_weights<kColumns, kInOut>(left + S::kLeftBytes, maps.weights[matrix], first_column, step * kDepth,
                                           &arrived[at.stage]);
            at.advance();
        }
    }
}

// By kNormalizeWarps warps: normalises the rows that have arrived, where they lie.
template <typename Element, int kColumns>
__device__ __forceinline__ void normalize_left(const BlockPlan& plan, const ProjectTiles& tiles, unsigned char* ring,
                                               uint64_t* arrived, uint64_t* full, RowScale* scales, int warp,
                                               int lane) {
    using S = ProjectShape<kColumns>;
    constexpr int kWarpRows = kWarpSize / (kDepth / 8);  // that a warp normalises at once, a part of 8 columns a lane
    constexpr int kOwnBarrier = 1;
    const BlockArgs& args = plan.args;
    const Element* gamma = static_cast<const Element*>(args.gamma);
    const Element* beta = static_cast<const Element*>(args.beta);
    const int own_row = warp * kWarpRows + lane / (kDepth / 8);
    const int own_column = lane % (kDepth / 8) * 8;
    const int width = static_cast<int>(args.width);
    const int steps = (width + kDepth - 1) / kDepth;
    RingPlace<S::kStages> at;
    int known_block = tiles.first / tiles.columns;
    uint4 raw_gamma = {0, 0, 0, 0};
    uint4 raw_beta = {0, 0, 0, 0};
    const auto load_factors = [&](int column) {
        if (gamma != nullptr && column < width) raw_gamma = load_vector<uint4>(gamma + column);
        if (beta != nullptr && column < width) raw_beta = load_vector<uint4>(beta + column);
    };
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int block = tile / tiles.columns;
        if (block != known_block) {
            known_block = block;
            group_barrier(kOwnBarrier, kNormalizeWarps * kWarpSize);  // the scales before these have been read
            find_scales<Element, kNormalizeWarps>(plan, scales, block * kProjectRows, warp, lane);
            group_barrier(kOwnBarrier, kNormalizeWarps * kWarpSize);
        }
        load_factors(own_column);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            float factors[8];
            float shifts[8];
            Element elements[8];
            memcpy(elements, &raw_gamma, 16);
#pragma unroll
            for (int e = 0; e < 8; ++e) factors[e] = gamma != nullptr ? to_float(elements[e]) : 1.0f;
            memcpy(elements, &raw_beta, 16);
#pragma unroll
            for (int e = 0; e < 8; ++e) shifts[e] = beta != nullptr ? to_float(elements[e]) : 0.0f;
            load_factors((step + 1) * kDepth + own_column);
            barrier_wait(&arrived[at.stage], at.parity);
            if (step * kDepth + own_column < width) {  // beyond are zeros, which stay
                constexpr int kAtOnce = 4;
                constexpr int kStride = kNormalizeWarps * kWarpRows;
#pragma unroll
                for (int first = 0; first < kProjectRows; first += kAtOnce * kStride) {
                    uint4 parts[kAtOnce];
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int row = first + i * kStride + own_row;
                        if (row >= kProjectRows) continue;
                        parts[i] = load_vector<uint4>(left + swizzled_offset<kRowBytes>(row, own_column * 2));
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        const int row = first + i * kStride + own_row;
                        if (row >= kProjectRows) continue;
                        const RowScale scale = scales[row];
                        const float shift = -scale.mean * scale.factor;
                        memcpy(elements, &parts[i], 16);
                        uint32_t pairs[4];
#pragma unroll
                        for (int pair = 0; pair < 4; ++pair) {
                            float values[2];
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                const int e = pair * 2 + j;
                                values[j] = __fmaf_rn(__fmaf_rn(to_float(elements[e]), scale.factor, shift), factors[e],
                                                      shifts[e]);
                            }
                            pairs[pair] = pack16<Element>(values[0], values[1]);
                        }
                        store_vector(left + swizzled_offset<kRowBytes>(row, own_column * 2),
                                     uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
                    }
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(&full[at.stage]);
            at.advance();
        }
    }
}

// Two neighbouring elements as floats; zeros where there is no vector.
template <typename Element>
__device__ __forceinline__ float2 floats_of(uint32_t pair) {
    Element elements[2];
    memcpy(elements, &pair, 4);
    return {to_float(elements[0]), to_float(elements[1])};
}

template <typename Element, int kColumns, bool kInOut>
__global__ void __launch_bounds__(kProjectThreads, 1)
    project(const __grid_constant__ BlockPlan plan, const __grid_constant__ Maps maps, int64_t counters,
            int tiles_a_block) {
    using S = ProjectShape<kColumns>;
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(S::kRingBytes + 1024);
    unsigned char* ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    uint64_t* arrived = memory.take<uint64_t>(S::kStages);  // raw rows and weights
    uint64_t* full = memory.take<uint64_t>(S::kStages);     // the rows are normalised
    uint64_t* empty = memory.take<uint64_t>(S::kStages);
    uint64_t* scaled = memory.take<uint64_t>(1);  // the first rows' scales are found
    RowScale* scales = memory.take<RowScale>(kProjectRows);
    const int thread = static_cast<int>(threadIdx.x);
    const int group = uniform(thread / kGroupThreads);
    const int lane = thread % kWarpSize;
    const bool pre_ln = plan.args.pre_ln != 0;
    const ProjectTiles tiles(plan, kColumns, tiles_a_block);
    constexpr int kScaleWarps = 3 * kGroupWarps - 1;  // all but the one that copies

    let_next_launch_begin();
    if (thread < S::kStages) {
        barrier_init(&arrived[thread], 1);
        barrier_init(&full[thread], kNormalizeWarps);
        barrier_init(&empty[thread], 2 * kGroupWarps);
    }
    if (thread == 0) barrier_init(scaled, kScaleWarps * kWarpSize);
    fence_async_proxy();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kProjectThreads) + thread; i < counters;
         i += gridDim.x * static_cast<int64_t>(kProjectThreads)) {
        plan.counters[i] = 0;
    }
    __syncthreads();
    const auto find_first_scales = [&] {
        find_scales<Element, kScaleWarps>(plan, scales, tiles.first / tiles.columns * kProjectRows,
                                          thread / kWarpSize - 1, lane);
        barrier_meet(scaled, 0);
    };
    if (group == 0) {
        give_registers_back<kNormalizeRegisters>();
        if (thread == 0) fill_project<kColumns, kInOut>(plan, maps, tiles, ring, arrived, empty);
        if (pre_ln && thread >= kWarpSize) {
            find_first_scales();
            normalize_left<Element, kColumns>(plan, tiles, ring, arrived, full, scales, thread / kWarpSize - 1, lane);
        }
        return;
    }
    take_registers<kMultiplyRegisters>();
    if (pre_ln) find_first_scales();
    const int group_row = (group - 1) * 64;
    const int steps = (static_cast<int>(plan.args.width) + kDepth - 1) / kDepth;
    RingPlace<S::kStages> at;
    Fragment sums[kColumns / 8];
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            if (pre_ln) barrier_wait(&full[at.stage], at.parity);
            barrier_wait(&arrived[at.stage], at.parity);
            multiply_step<Element, kColumns, kInOut>(sums, left + group_row * kRowBytes, left + S::kLeftBytes,
                                                     step == 0);
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(&empty[before]);
            before = at.stage;
            at.advance();
        }
        const int column_tile = tile % tiles.columns;
        const int matrix = column_tile / tiles.matrix_columns;
        const int first_column = column_tile % tiles.matrix_columns * kColumns;
        const int64_t row = tile / tiles.columns * kProjectRows + group_row + thread / kWarpSize % kGroupWarps * 16 +
                            lane / 4;
        const BlockArgs& args = plan.args;
        const Element* bias = static_cast<const Element*>(matrix == 0 ? args.bq : matrix == 1 ? args.bk : args.bv);
        Element* target = static_cast<Element*>(const_cast<void*>(matrix == 0   ? plan.attention.q
                                                                  : matrix == 1 ? plan.attention.k
                                                                                : plan.attention.v));
        // All of the bias at once, while the last products run.
        uint32_t bias_pairs[kColumns / 8];
#pragma unroll
        for (int block = 0; block < kColumns / 8; ++block) {
            const int column = first_column + block * 8 + lane % 4 * 2;
            bias_pairs[block] = bias != nullptr && column < plan.columns ? load_vector<uint32_t>(bias + column) : 0u;
        }
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&empty[before]);
#pragma unroll
        for (int first = 0; first < kColumns / 8; first += 4) {
            uint32_t packed[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 more = floats_of<Element>(bias_pairs[first + i]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    packed[half][i] = pack16<Element>(sums[first + i][half * 2] + more.x,
                                                      sums[first + i][half * 2 + 1] + more.y);
                }
            }
            const int column = first_column + (first + lane % 4) * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 part = quad_transpose(packed[half], lane);
                if (row + half * 8 < plan.rows && column < plan.columns) {
                    store_vector(target + (row + half * 8) * plan.columns + column, part);
                }
            }
        }
    }
}

// ---- Launch 2: the output projection ----

// The projection's tiles. kMany: each group has a unit of its own and the same kColumns columns; else all groups have
// the same unit and kColumns columns each: more tiles, for calls that have few units.
template <int kGroups, bool kMany>
struct OutShape {
    static constexpr int kUnits = kMany ? kGroups : 1;
    static constexpr int kColumns = kMany ? 128 : 64;  // of a group
    static constexpr int kTileColumns = kMany ? kColumns : kGroups * kColumns;
    static constexpr int kLeftBytes = kUnits * kUnitRows * kRowBytes;
    static constexpr int kRightBytes = kTileColumns * kRowBytes;
    static constexpr int kStages = 196608 / (kLeftBytes + kRightBytes) < 6 ? 196608 / (kLeftBytes + kRightBytes) : 6;
    static constexpr int kRingBytes = kStages * (kLeftBytes + kRightBytes);
};

// Tiles of the projection in a call.
template <typename S>
__host__ __device__ inline int64_t out_tiles(const BlockPlan& plan) {
    const int64_t units = plan.args.batch * plan.row_blocks;
    return (units + S::kUnits - 1) / S::kUnits * ((plan.args.width + S::kTileColumns - 1) / S::kTileColumns);
}

// By one thread: brings both factors of this block's tiles, once the heads of their rows are there.
template <typename S, bool kInOut>
__device__ __forceinline__ void fill_out(const BlockPlan& plan, const Maps& maps, unsigned char* ring, uint64_t* full,
                                         uint64_t* empty) {
    const int columns = (static_cast<int>(plan.args.width) + S::kTileColumns - 1) / S::kTileColumns;
    const int units = static_cast<int>(plan.args.batch * plan.row_blocks);
    const int steps = (static_cast<int>(plan.columns) + kDepth - 1) / kDepth;
    const int row_blocks = static_cast<int>(plan.row_blocks);
    const int tokens = static_cast<int>(plan.args.tokens);
    const int tiles = static_cast<int>(out_tiles<S>(plan));
    const uint32_t target = static_cast<uint32_t>(plan.args.num_heads * kGroupWarps);
    RingPlace<S::kStages> at;
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
        const int first_unit = tile / columns * S::kUnits;
        int rows[S::kUnits];
#pragma unroll
        for (int i = 0; i < S::kUnits; ++i) {
            const int unit = first_unit + i;
            rows[i] = static_cast<int>(plan.rows);  // outside: zeros
            if (unit < units) {
                counter_wait(plan.counters + 1 + unit, target);
                rows[i] = unit / row_blocks * tokens + unit % row_blocks * kUnitRows;
            }
        }
        fence_async_proxy_global();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            barrier_wait(&empty[at.stage], at.parity ^ 1);
            barrier_expect(&full[at.stage], S::kLeftBytes + S::kRightBytes);
#pragma unroll
            for (int i = 0; i < S::kUnits; ++i) {
                copy_box(left + i * kUnitRows * kRowBytes, maps.attended, rows[i], step * kDepth, &full[at.stage]);
            }
            copy_weights<S::kTileColumns, kInOut>(left + S::kLeftBytes, maps.wo, tile % columns * S::kTileColumns,
                                                  step * kDepth, &full[at.stage]);
            at.advance();
        }
    }
}

// A group's share of this block's tiles: out = attended wo^T + bo + residual; where the result is normalised, by the
// group that ends a unit last.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ void project_out(const BlockPlan& plan, const unsigned char* ring, uint64_t* full,
                                            uint64_t* empty, uint32_t* is_last, int group, int group_warp, int lane) {
    const BlockArgs& args = plan.args;
    const int width = static_cast<int>(args.width);
    const int columns = (width + S::kTileColumns - 1) / S::kTileColumns;
    const int units = static_cast<int>(args.batch * plan.row_blocks);
    const int row_blocks = static_cast<int>(plan.row_blocks);
    const int tokens = static_cast<int>(args.tokens);
    const int tiles = static_cast<int>(out_tiles<S>(plan));
    const int steps = static_cast<int>((plan.columns + kDepth - 1) / kDepth);
    const int group_barrier_id = 1 + group;
    // Where this group's columns lie in the right factor: rows of outputs, or parts of 64 outputs. Both 64 rows a part.
    const int right_offset = S::kUnits > 1 ? 0 : group * S::kColumns * kRowBytes;
    const int left_offset = S::kUnits > 1 ? group * kUnitRows * kRowBytes : 0;
    const Element* bias = static_cast<const Element*>(args.bo);
    const Element* residual = static_cast<const Element*>(args.residual);
    RingPlace<S::kStages> at;
    Fragment sums[S::kColumns / 8];
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            barrier_wait(&full[at.stage], at.parity);
            multiply_step<Element, S::kColumns, kInOut>(sums, left + left_offset, left + S::kLeftBytes + right_offset,
                                                        step == 0);
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(&empty[before]);
            before = at.stage;
            at.advance();
        }
        const int unit = tile / columns * S::kUnits + (S::kUnits > 1 ? group : 0);
        const int first_column = tile % columns * S::kTileColumns + (S::kUnits > 1 ? 0 : group * S::kColumns);
        const bool is_there = unit < units && first_column < width;
        const int64_t sequence = is_there ? unit / row_blocks : 0;
        const int first_token = unit % row_blocks * kUnitRows;
        const int token = first_token + group_warp * 16 + lane / 4;
        // All of the bias and the residual at once, while the last products run.
        uint32_t bias_pairs[S::kColumns / 8];
        uint32_t residual_pairs[2][S::kColumns / 8];
#pragma unroll
        for (int block = 0; block < S::kColumns / 8; ++block) {
            const int column = first_column + block * 8 + lane % 4 * 2;
            const bool exists = is_there && column < width;
            bias_pairs[block] = bias != nullptr && exists ? load_vector<uint32_t>(bias + column) : 0u;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Element* more = residual + sequence * args.residual_strides[0] +
                                      (token + half * 8) * args.residual_strides[1];
                residual_pairs[half][block] = residual != nullptr && exists && token + half * 8 < tokens
                                                  ? load_vector<uint32_t>(more + column)
                                                  : 0u;
            }
        }
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&empty[before]);
        if (!is_there) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Element* out = static_cast<Element*>(args.out) + sequence * args.out_strides[0] +
                           (token + half * 8) * args.out_strides[1];
#pragma unroll
            for (int first = 0; first < S::kColumns / 8; first += 4) {
                uint32_t packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 of_bias = floats_of<Element>(bias_pairs[first + i]);
                    const float2 of_residual = floats_of<Element>(residual_pairs[half][first + i]);
                    packed[i] = pack16<Element>(sums[first + i][half * 2] + of_bias.x + of_residual.x,
                                                sums[first + i][half * 2 + 1] + of_bias.y + of_residual.y);
                }
                const uint4 part = quad_transpose(packed, lane);
                const int column = first_column + (first + lane % 4) * 8;
                if (token + half * 8 < tokens && column < width) store_vector(out + column, part);
            }
        }
        if (args.pre_ln) continue;
        group_barrier(group_barrier_id, kGroupThreads);
        if (group_warp == 0 && lane == 0) {
            uint32_t* done = plan.counters + 1 + units + unit;
            const int parts = (width + S::kColumns - 1) / S::kColumns;
            is_last[group] = counter_add(done, 1) + 1 == static_cast<uint32_t>(parts);
        }
        group_barrier(group_barrier_id, kGroupThreads);
        if (is_last[group] == 0) continue;
        normalize_out_rows<Element>(plan, sequence * tokens + first_token, min(kUnitRows, tokens - first_token),
                                    group_warp, kGroupWarps, lane);
    }
}

// ---- Launching ----

inline tilerank_status launched(const char* name, int error) {
    if (error == 0) return TILERANK_OK;
    return refuse(TILERANK_LAUNCH_FAILED, "variant %s: the launch was refused: %s", name, launch_error_text(error));
}

// Which tiles a call's products have: wide ones cost less memory traffic, narrow ones leave fewer multiprocessors
// without; whichever ends first, by what a round of tiles takes.
struct Choice {
    bool wide_project;
    bool many;

    template <int kGroups>
    static Choice of(const BlockPlan& plan) {
        constexpr int kWideRound = 20;
        constexpr int kNarrowRound = 11;
        constexpr int kManyRound = 14;
        constexpr int kFewRound = 10;
        const int64_t multis = std::max(multiprocessors(), 1);
        const auto rounds = [&](int64_t tiles) { return ceil_divide(tiles, multis); };
        const int64_t row_blocks = ceil_divide(plan.rows, kProjectRows);
        return {kWideRound * rounds(row_blocks * 3 * ceil_divide(plan.columns, 256)) <=
                    kNarrowRound * rounds(row_blocks * 3 * ceil_divide(plan.columns, 128)),
                kManyRound * rounds(out_tiles<OutShape<kGroups, true>>(plan)) <=
                    kFewRound * rounds(out_tiles<OutShape<kGroups, false>>(plan))};
    }
};

template <int kGroups, bool kInOut>
tilerank_status describe(const char* name, const BlockPlan& plan, const Choice& choice, Maps* maps) {
    const BlockArgs& args = plan.args;
    const auto describe_weights = [&](TensorMap* map, const void* base, int64_t outputs, int64_t inputs, int64_t stride,
                                      int columns) {
        return kInOut ? describe_matrix(map, args.dtype, base, inputs, outputs, stride, 64)
                      : describe_matrix(map, args.dtype, base, outputs, inputs, stride, columns);
    };
    const int columns = choice.wide_project ? 256 : 128;
    const int out_columns =
        choice.many ? OutShape<kGroups, true>::kTileColumns : OutShape<kGroups, false>::kTileColumns;
    // Rows of all sequences are equally far from each other: check_call has seen to it.
    if (describe_matrix(&maps->x, args.dtype, args.x, plan.rows, args.width, args.x_strides[1], kProjectRows) &&
        describe_weights(&maps->weights[0], args.wq, plan.columns, args.width, args.wq_stride, columns) &&
        describe_weights(&maps->weights[1], args.wk, plan.columns, args.width, args.wk_stride, columns) &&
        describe_weights(&maps->weights[2], args.wv, plan.columns, args.width, args.wv_stride, columns) &&
        describe_weights(&maps->wo, args.wo, args.width, plan.columns, args.wo_stride, out_columns) &&
        describe_matrix(&maps->attended, args.dtype, plan.attention.out, plan.rows, plan.columns, plan.columns,
                        kUnitRows)) {
        return TILERANK_OK;
    }
    return refuse(TILERANK_LAUNCH_FAILED,
                  "variant %s: the driver describes no matrix to the copy engine; it needs CUDA 12 or later and a "
                  "Hopper GPU",
                  name);
}

template <typename Element, int kColumns, bool kInOut>
tilerank_status launch_columns(const char* name, const BlockPlan& plan, const Maps& maps, void* stream) {
    const int64_t tiles = ceil_divide(plan.rows, kProjectRows) * 3 * ceil_divide(plan.columns, kColumns);
    const int64_t tiles_a_block = ceil_divide(tiles, std::max(multiprocessors(), 1));
    const dim3 blocks(static_cast<unsigned>(ceil_divide(tiles, tiles_a_block)));
    return launched(name, launch(project<Element, kColumns, kInOut>, blocks, dim3(kProjectThreads),
                                 ProjectShape<kColumns>::bytes(), stream, plan, maps,
                                 counters_of(plan.args, plan.unit_rows), static_cast<int>(tiles_a_block)));
}

template <typename Element, bool kInOut>
tilerank_status launch_project(const char* name, const BlockPlan& plan, const Choice& choice, const Maps& maps,
                               void* stream) {
    return choice.wide_project ? launch_columns<Element, 256, kInOut>(name, plan, maps, stream)
                               : launch_columns<Element, 128, kInOut>(name, plan, maps, stream);
}

// What the kernels ask of a call beyond what its row says.
inline tilerank_status check_call(const char* name, const BlockPlan& plan) {
    if (!plan.aligned_x || !plan.aligned_weights || plan.args.width % 8 != 0 || plan.columns % 8 != 0) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant %s: a row of x, residual, out, gamma, beta or a weight does not begin at a multiple of "
                      "16 bytes; it serves: those that do",
                      name);
    }
    if (plan.args.batch > 1 && plan.args.x_strides[0] != plan.args.tokens * plan.args.x_strides[1]) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant %s: x_strides is {%lld, %lld} with %lld tokens; it serves: rows equally far from each "
                      "other",
                      name, static_cast<long long>(plan.args.x_strides[0]),
                      static_cast<long long>(plan.args.x_strides[1]), static_cast<long long>(plan.args.tokens));
    }
    if (plan.args.x_strides[1] < plan.args.width && plan.rows > 1) {
        return refuse(TILERANK_UNSUPPORTED, "variant %s: x_strides[1] is %lld; it serves: the width, %lld, or more",
                      name, static_cast<long long>(plan.args.x_strides[1]), static_cast<long long>(plan.args.width));
    }
    constexpr int64_t kMostRows = 1 << 30;  // of a 32-bit position
    if (plan.rows > kMostRows || plan.args.width > kMostRows || plan.columns > kMostRows) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant %s: batch * tokens, width and columns are %lld, %lld, %lld; at most %lld each", name,
                      static_cast<long long>(plan.rows), static_cast<long long>(plan.args.width),
                      static_cast<long long>(plan.columns), static_cast<long long>(kMostRows));
    }
    return TILERANK_OK;
}

}  // namespace block_hopper
}  // namespace tilerank
