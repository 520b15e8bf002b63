// Warpgroup block: the block in two launches on Hopper. The first normalises rows on their way into shared memory and
// multiplies them by the weights that the copy engine brings; the second is attention as rung 19 of the attention has
// it, and the output projection in the same blocks, as soon as the heads of its rows are there.
// Prediction: at 4 x 128 tokens of width 1024 22 us beside 43 us unfused; at 4 x 1024 118 us beside 125; at 4 x 4096
//   800 us beside 830: the products at 600 TFLOP/s, one launch's worth of memory traffic and five launches saved.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include <algorithm>

#include "common/balanced.cuh"
#include "common/block.cuh"
#include "common/hopper.cuh"
#include "common/softmax.cuh"

namespace tilerank {
namespace warpgroup_block {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kUnitRows = kGroupWarps * 16;
constexpr int kSteps = kChunkKeys / 16;
constexpr int kDepth = 64;  // of a step of a product: 128 bytes a row
constexpr int kRowBytes = 2 * kDepth;
constexpr int kMostShared = 227 * 1024;

// The weights, and the attended rows, as the copy engine knows them.
struct Maps {
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

// token_offset by a 32-bit division.
__device__ __forceinline__ int64_t row_position(const int64_t (&strides)[2], int64_t row, int64_t tokens) {
    const uint32_t index = static_cast<uint32_t>(row);
    const uint32_t length = static_cast<uint32_t>(tokens);
    return index / length * strides[0] + index % length * strides[1];
}

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
constexpr int kProjectThreads = 3 * kGroupThreads;  // one group normalises, two multiply
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
        return DynamicShared::bytes<unsigned char>(kRingBytes + 1024) + 2 * DynamicShared::bytes<uint64_t>(kStages) +
               DynamicShared::bytes<RowScale>(kProjectRows);
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

// Scales of kProjectRows rows, by the four warps of a group: a row's numbers stay in registers between its mean and its
// variance, several rows at a time so that their loads overlap. Rows too wide for that are read part by part.
template <typename Element>
__device__ __forceinline__ void find_scales(const BlockPlan& plan, RowScale* scales, int first_row, int warp,
                                            int lane) {
    constexpr int kAtOnce = 4;
    constexpr int kParts = 4;  // of 8 columns a lane
    const BlockArgs& args = plan.args;
    const Element* x = static_cast<const Element*>(args.x);
    const float epsilon = static_cast<float>(args.epsilon);
    const int width = static_cast<int>(args.width);
#pragma unroll 1
    for (int turn = 0; turn < kProjectRows / kGroupWarps; turn += kAtOnce) {
        const int row = warp * (kProjectRows / kGroupWarps) + turn;
        const Element* rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            rows[i] = x + row_position(args.x_strides, min(first_row + row + i, static_cast<int>(plan.rows) - 1), args.tokens);
        }
        if (width <= kParts * 8 * kWarpSize) {
            uint4 raw[kAtOnce][kParts];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int column = (part * kWarpSize + lane) * 8;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    raw[i][part] = column < width ? load_vector<uint4>(rows[i] + column) : uint4{0, 0, 0, 0};
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    Element elements[8];
                    memcpy(elements, &raw[i][part], 16);
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum += to_float(elements[e]);
                }
#pragma unroll
                for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
                    sum += __shfl_xor_sync(kFullMask, sum, distance);
                }
                const float mean = sum / static_cast<float>(width);
                float squares = 0.0f;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    if ((part * kWarpSize + lane) * 8 >= width) continue;
                    Element elements[8];
                    memcpy(elements, &raw[i][part], 16);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float away = to_float(elements[e]) - mean;
                        squares += away * away;
                    }
                }
#pragma unroll
                for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
                    squares += __shfl_xor_sync(kFullMask, squares, distance);
                }
                if (lane == 0) scales[row + i] = {mean, rsqrtf(squares / static_cast<float>(width) + epsilon)};
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kAtOnce; ++i) {
                const RowScale scale = scale_of_row(rows[i], args.width, epsilon, true, lane);
                if (lane == 0) scales[row + i] = scale;
            }
        }
    }
}

// The group that fills the ring: the left factor by its own hands, normalised on the way, the right one by the copy
// engine.
template <typename Element, int kColumns, bool kInOut>
__device__ __forceinline__ void fill_left(const BlockPlan& plan, const Maps& maps, const ProjectTiles& tiles,
                                          unsigned char* ring, uint64_t* full, uint64_t* empty, RowScale* scales,
                                          int thread) {
    using S = ProjectShape<kColumns>;
    constexpr int kTurns = kProjectRows * (kDepth / 8) / kGroupThreads;  // parts of 8 columns a thread
    constexpr int kRowsATime = kProjectRows / kTurns;
    constexpr int kOwnBarrier = 1;
    const BlockArgs& args = plan.args;
    const Element* x = static_cast<const Element*>(args.x);
    const Element* gamma = static_cast<const Element*>(args.gamma);
    const Element* beta = static_cast<const Element*>(args.beta);
    const bool pre_ln = args.pre_ln != 0;
    const int warp = thread / kWarpSize;
    const int lane = thread % kWarpSize;
    const int own_row = thread / (kDepth / 8);
    const int own_column = thread % (kDepth / 8) * 8;
    const int width = static_cast<int>(args.width);
    const int steps = (width + kDepth - 1) / kDepth;
    const int last_row = static_cast<int>(plan.rows) - 1;
    RingPlace<S::kStages> at;
    int known_block = -1;
    const Element* rows[kTurns];
    uint4 raw[kTurns];
    uint4 raw_gamma = {0, 0, 0, 0};
    uint4 raw_beta = {0, 0, 0, 0};
    const auto load_factors = [&](int column) {
        if (!pre_ln || column >= width) return;
        if (gamma != nullptr) raw_gamma = load_vector<uint4>(gamma + column);
        if (beta != nullptr) raw_beta = load_vector<uint4>(beta + column);
    };
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
        const int block = tile / tiles.columns;
        const int column_tile = tile % tiles.columns;
        const int matrix = column_tile / tiles.matrix_columns;
        const int first_column = column_tile % tiles.matrix_columns * kColumns;
        if (block != known_block) {
            known_block = block;
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const int row = min(block * kProjectRows + turn * kRowsATime + own_row, last_row);
                rows[turn] = x + row_position(args.x_strides, row, args.tokens) + own_column;
            }
            if (pre_ln) {
                group_barrier(kOwnBarrier, kGroupThreads);  // the scales before these have been read
                find_scales<Element>(plan, scales, block * kProjectRows, warp, lane);
                group_barrier(kOwnBarrier, kGroupThreads);
            }
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            raw[turn] = own_column < width ? load_vector<uint4>(rows[turn]) : uint4{0, 0, 0, 0};
        }
        load_factors(own_column);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned char* left = ring + at.stage * (S::kLeftBytes + S::kRightBytes);
            barrier_wait(&empty[at.stage], at.parity ^ 1);
            if (thread == 0) {
                barrier_expect(&full[at.stage], S::kRightBytes);
                copy_weights<kColumns, kInOut>(left + S::kLeftBytes, maps.weights[matrix], first_column, step * kDepth,
                                               &full[at.stage]);
            }
            float factors[8];
            float shifts[8];
            if (pre_ln) {
                Element elements[8];
                memcpy(elements, &raw_gamma, 16);
#pragma unroll
                for (int e = 0; e < 8; ++e) factors[e] = gamma != nullptr ? to_float(elements[e]) : 1.0f;
                memcpy(elements, &raw_beta, 16);
#pragma unroll
                for (int e = 0; e < 8; ++e) shifts[e] = beta != nullptr ? to_float(elements[e]) : 0.0f;
            }
            const int next_column = (step + 1) * kDepth + own_column;
            load_factors(next_column);
            const bool exists = step * kDepth + own_column < width;
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                uint4 part = raw[turn];
                raw[turn] = next_column < width ? load_vector<uint4>(rows[turn] + (step + 1) * kDepth)
                                                : uint4{0, 0, 0, 0};
                if (pre_ln && exists) {
                    const RowScale scale = scales[turn * kRowsATime + own_row];
                    Element elements[8];
                    memcpy(elements, &part, 16);
                    uint32_t pairs[4];
#pragma unroll
                    for (int pair = 0; pair < 4; ++pair) {
                        float values[2];
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int e = pair * 2 + i;
                            values[i] = (to_float(elements[e]) - scale.mean) * scale.factor * factors[e] + shifts[e];
                        }
                        pairs[pair] = pack16<Element>(values[0], values[1]);
                    }
                    part = {pairs[0], pairs[1], pairs[2], pairs[3]};
                }
                store_vector(left + swizzled_offset<kRowBytes>(turn * kRowsATime + own_row, own_column * 2), part);
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(&full[at.stage]);
            at.advance();
        }
    }
}

template <typename Element, int kColumns, bool kInOut>
__global__ void __launch_bounds__(kProjectThreads, 1)
    project(const __grid_constant__ BlockPlan plan, const __grid_constant__ Maps maps, int64_t counters,
            int tiles_a_block) {
    using S = ProjectShape<kColumns>;
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(S::kRingBytes + 1024);
    unsigned char* ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    uint64_t* full = memory.take<uint64_t>(S::kStages);
    uint64_t* empty = memory.take<uint64_t>(S::kStages);
    RowScale* scales = memory.take<RowScale>(kProjectRows);
    const int thread = static_cast<int>(threadIdx.x);
    const int group = uniform(thread / kGroupThreads);
    const int lane = thread % kWarpSize;
    const ProjectTiles tiles(plan, kColumns, tiles_a_block);

    let_next_launch_begin();
    if (thread < S::kStages) {
        barrier_init(&full[thread], kGroupWarps + 1);
        barrier_init(&empty[thread], 2 * kGroupWarps);
    }
    fence_async_proxy();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kProjectThreads) + thread; i < counters;
         i += gridDim.x * static_cast<int64_t>(kProjectThreads)) {
        plan.counters[i] = 0;
    }
    __syncthreads();
    if (group == 0) {
        give_registers_back<kNormalizeRegisters>();
        if (thread < 3) prefetch_map(maps.weights[thread]);
        fill_left<Element, kColumns, kInOut>(plan, maps, tiles, ring, full, empty, scales, thread);
        return;
    }
    take_registers<kMultiplyRegisters>();
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
            barrier_wait(&full[at.stage], at.parity);
            multiply_step<Element, kColumns, kInOut>(sums, left + group_row * kRowBytes, left + S::kLeftBytes,
                                                     step == 0);
            wgmma_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(&empty[before]);
            before = at.stage;
            at.advance();
        }
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&empty[before]);

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
#pragma unroll
        for (int first = 0; first < kColumns / 8; first += 4) {
            uint32_t packed[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = first_column + (first + i) * 8 + lane % 4 * 2;
                float more[2] = {0.0f, 0.0f};
                if (bias != nullptr && column < plan.columns) {
                    more[0] = to_float(bias[column]);
                    more[1] = to_float(bias[column + 1]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    packed[half][i] = pack16<Element>(sums[first + i][half * 2] + more[0],
                                                      sums[first + i][half * 2 + 1] + more[1]);
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

// ---- Launch 2: attention, then the output projection ----

// Tuning, by head_dim.
template <int D>
struct Shape {
    // Warpgroups that compute, beside the one that copies. Scores, weights, sums and the queries of two units take
    // 48 + D registers of theirs; a block has 65,536, in eights a thread.
    static constexpr int kGroups = D <= 32 ? 4 : D <= 64 ? 3 : 2;
    static constexpr int kRegisters = D <= 32 ? 104 : D <= 64 ? 152 : 224;
    static constexpr int kCopyRegisters = 56;
    static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
    static constexpr int kCopyWarps = 3;  // the fourth deals out the units
    // A chunk is a tile of keys and one of values, each in parts of kRowBytes a row: the widest swizzle that divides D.
    static constexpr int kColumns = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPartBytes = kChunkKeys * kRowBytes;
    static constexpr int kTileBytes = kChunkKeys * D * 2;
    // Row sums come out of the product with the values, as one more block of columns that is all ones, where the values
    // are one part and the block can lie anywhere beyond it.
    static constexpr bool kSumsByProduct = D == kColumns;
    static constexpr int kSumColumns = D + (kSumsByProduct ? 8 : 0);
    static constexpr int kOnesBytes = kSumsByProduct ? 16 * kRowBytes : 0;
    static constexpr int kChunks = 196608 / (2 * kTileBytes);  // of the ring: 192 of 227 KB
    static constexpr int kResident = kChunks * 2 / 3;
    static constexpr int kRingBytes = kChunks * 2 * kTileBytes;
};

template <int D>
constexpr bool shares_registers =
    Shape<D>::kGroups * Shape<D>::kRegisters + Shape<D>::kCopyRegisters <=
    (Shape<D>::kGroups + 1) * launch_registers(Shape<D>::kThreads);
static_assert(shares_registers<32> && shares_registers<64> && shares_registers<80> && shares_registers<96> &&
              shares_registers<128>);

template <int D>
using PassesFor = Passes<kUnitRows, Shape<D>::kGroups, Shape<D>::kResident>;

// What the warps of a block share in the attention.
struct Shared {
    unsigned char* ring;
    uint64_t* full;  // of each chunk
    uint64_t* empty;
};

// The counter of finished heads, kGroupWarps a head, of the unit whose attended rows begin at `out`.
__device__ __forceinline__ uint32_t* unit_counter(const BlockPlan& plan, const void* out) {
    const int64_t elements = (static_cast<const char*>(out) - static_cast<const char*>(plan.attention.out)) / 2;
    const uint32_t row = static_cast<uint32_t>(elements / plan.columns);
    const uint32_t tokens = static_cast<uint32_t>(plan.args.tokens);
    return plan.counters + 1 + row / tokens * static_cast<uint32_t>(plan.row_blocks) + row % tokens / kUnitRows;
}

// The weights of a tile, relative to each row's reference; is one of them, on any lane, too large? kWhole: every row of
// the warp sees all keys; else none sees those from any_sees on. kFused: by one multiply-add a score; else (then the
// answer means nothing) as rounded as references are, so that a weight never exceeds 1 by a large score's last place.
// kSum: their sums over the lane's keys go to row_sum.
template <typename Element, bool kWhole, bool kFused, bool kSum>
__device__ __forceinline__ bool weigh(const Fragment (&scores)[kSteps * 2], uint32_t (&weights)[kSteps][4],
                                      float (&row_sum)[2], const float (&reference)[2], float factor, int any_sees) {
    constexpr float kLargestWeight = 16384.0f;  // fp16 ends at 65,504
    float tile_sum[2] = {0.0f, 0.0f};
    uint32_t largest[kSteps] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (!kWhole && step * 16 >= any_sees) {
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[step][i] = 0;
            continue;
        }
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            const float* score = &scores[step * 2 + at / 2][at % 2 * 2];
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                weight[i] = exp2_approx(kFused ? score[i] * factor - reference[at % 2]
                                               : __fmul_rn(score[i], factor) - reference[at % 2]);
            }
            if (kSum) tile_sum[at % 2] += weight[0] + weight[1];
            weights[step][at] = pack16<Element>(weight[0], weight[1]);
        }
        if (!kSum) {
            largest[step] = max16<Element>(max16<Element>(weights[step][0], weights[step][1]),
                                           max16<Element>(weights[step][2], weights[step][3]));
        }
    }
    bool is_off;
    if constexpr (kSum) {  // no weight is larger than the sum
        is_off = tile_sum[0] > 2 * kLargestWeight || tile_sum[1] > 2 * kLargestWeight;
        if (kFused) is_off = __any_sync(kFullMask, is_off);
        if (!kFused || !is_off) row_sum[0] += tile_sum[0], row_sum[1] += tile_sum[1];
        return is_off;
    } else {
        static_assert(kSteps == 4);
        is_off = exceeds16<Element>(
            max16<Element>(max16<Element>(largest[0], largest[1]), max16<Element>(largest[2], largest[3])),
            kLargestWeight);
        return kFused && __any_sync(kFullMask, is_off);
    }
}

// The largest score of each of the lane's rows, among the first kBlocks x 8 keys of the tile.
template <int kBlocks>
__device__ __forceinline__ void find_largest(float (&largest)[2], const Fragment (&scores)[kSteps * 2], float factor) {
    largest[0] = largest[1] = kLowestReference;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], scores[block][i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = __fmul_rn(quad_max(largest[half]), factor);
}

template <typename Element, int D>
__device__ __forceinline__ void attend(const BlockPlan& plan, const Shared& shared,
                                       const TaskQueues<Shape<D>::kGroups>& queues, int group, int group_warp, int lane,
                                       float factor) {
    constexpr bool aligned = true;
    const AttentionArgs& args = plan.attention;
    using S = Shape<D>;
    constexpr bool kSum = !S::kSumsByProduct;
    constexpr float kMostAbove = 10.0f;  // powers of two that a weight may reach without a new reference
    // Keys of the first tile that give the first reference, in eights.
    constexpr int kFirstBlocks = 4;
    const uint32_t ring = shared_address(shared.ring) / 16;
    constexpr int kTileSize = S::kTileBytes / 16;

    Fragment scores[kSteps * 2];
    Fragment sums[S::kSumColumns / 8];
    uint32_t q[1][D / 16][4] = {};
    uint32_t next_q[1][D / 16][4] = {};
    uint32_t weights[kSteps][4] = {};

    const auto issue_scores = [&](int slot) {
        const uint32_t tile = ring + slot * (2 * kTileSize);
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
            const int column = depth * 16;
            const int offset = (column / S::kColumns * S::kPartBytes + column % S::kColumns * 2) / 16;
            wgmma_k16<Element, kChunkKeys, false>(scores, q[0][depth], tile_descriptor<S::kRowBytes>(tile + offset, 1),
                                                  depth > 0);
        }
        wgmma_commit();
    };
    const auto issue_sums = [&](int slot, bool is_first) {
        const uint32_t tile = ring + slot * (2 * kTileSize) + kTileSize;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t begin = tile + step * S::kRowBytes;
            // Beyond the values: their next part, or the ones.
            const uint32_t stride = S::kSumsByProduct ? ring + S::kRingBytes / 16 - begin : S::kPartBytes / 16;
            wgmma_k16<Element, S::kSumColumns, true>(sums, weights[step],
                                                     tile_descriptor<S::kRowBytes>(begin, stride),
                                                     step > 0 || !is_first);
        }
        wgmma_commit();
    };
    // A chunk's place and turn in the ring.
    struct At {
        int slot;
        int parity;
        __device__ __forceinline__ void advance() {
            if (++slot == S::kChunks) {
                slot = 0;
                parity ^= 1;
            }
        }
    };
    const auto wait_for = [&](At at) { barrier_wait(&shared.full[at.slot], at.parity); };
    const auto give_back = [&](At at) {
        if (lane == 0) barrier_arrive(&shared.empty[at.slot]);
    };
    // Gives back chunks that this group has no use for; each must have come before.
    const auto skip = [&](At at, int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            wait_for(at);
            give_back(at);
            at.advance();
        }
    };

    // The unit under way, as this warp sees it, and the next one.
    int turn = 0;
    Task next;
    int next_row = 0;  // of the unit, the first of this warp's 16
    const auto take = [&] {
        next = queues.take(group, turn++, lane);
        next.tiles = uniform(next.tiles);
        next.whole_tiles = uniform(next.whole_tiles);
        next.slot = uniform(next.slot);
        next.parity = uniform(next.parity);
        next.chunk = uniform(next.chunk);
        next.is_last = uniform(next.is_last);
        // Rows go to warps in turn, so that the last rows of units do not all fall to the same quarter.
        next_row = uniform((group_warp + next.rotation) % kGroupWarps * 16);
        next.rows = uniform(next.rows) - next_row;
        if (next.rows > 0) {
            load_queries<D, 1>(next_q, static_cast<const Element*>(next.q) + next_row * args.q_token_stride,
                               args.q_token_stride, next.rows, lane, aligned);
        }
    };
    // Scores become positive multiples of what is asked for: the largest is the same before and after.
    const uint32_t signs = factor < 0.0f ? 0x80008000u : 0u;
    const float size = fabsf(factor);
    const auto use_next_queries = [&] {
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[0][depth][i] = next_q[0][depth][i] ^ signs;
        }
    };

    take();
    skip({0, 0}, next.chunk);
    if (next.tiles == 0) return;
    use_next_queries();
    wait_for({next.slot, next.parity});
    wgmma_fence();
    issue_scores(next.slot);

#pragma unroll 1
    while (next.tiles > 0) {
        const int tiles = next.tiles;
        const int whole_tiles = next.whole_tiles;
        const int rows = next.rows;
        const bool is_last = next.is_last != 0;
        const int end_chunk = next.chunk + tiles;
        const int k_len = next.k_len;
        const int causal_keys = next.causal_keys + next_row;
        uint32_t* heads_done = unit_counter(plan, next.out);
        Element* out = static_cast<Element*>(next.out) + next_row * args.out_token_stride;
        At at = {next.slot, next.parity};
        take();
        float reference[2] = {kLowestReference, kLowestReference};
        float row_sum[2] = {0.0f, 0.0f};
        bool holds_tile = is_last;
        bool is_steep = false;

#pragma unroll 1
        for (int tile = 0;; ++tile) {
            const bool is_last_tile = tile + 1 == tiles;
            At following = at;
            following.advance();
            if (!is_last_tile) wait_for(following);
            wgmma_wait<0>();
            if (is_last && tile > 0) give_back({(at.slot == 0 ? S::kChunks : at.slot) - 1, 0});
            if (rows > 0) {
                const int any_sees = min(k_len, causal_keys + 15) - tile * kChunkKeys;
                const bool is_whole = tile < whole_tiles;
                if (!is_whole) {
                    int sees[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sees[half] = min(k_len, causal_keys + half * 8 + lane / 4) - tile * kChunkKeys;
                    }
                    const int every_sees = min(k_len, causal_keys) - tile * kChunkKeys;
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        if (step * 16 + 16 <= every_sees) continue;
                        hide_keys(scores[step * 2], step * 16, sees, lane, -INFINITY);
                        hide_keys(scores[step * 2 + 1], step * 16 + 8, sees, lane, -INFINITY);
                    }
                }
                if (tile == 0) {
                    // A little below the largest, by which a fused product can differ: that weight is then at least 1.
                    constexpr float kRounding = 0x1p-22f;
                    find_largest<kFirstBlocks>(reference, scores, size);
                    reference[0] -= fabsf(reference[0]) * kRounding;
                    reference[1] -= fabsf(reference[1]) * kRounding;
                }
                if (!is_steep) {
                    is_steep = is_whole ? weigh<Element, true, true, kSum>(scores, weights, row_sum, reference, size, 0)
                                        : weigh<Element, false, true, kSum>(scores, weights, row_sum, reference, size,
                                                                            any_sees);
                }
                if (is_steep) {  // from here on, references are raised before weights can grow too large
                    float largest[2];
                    find_largest<kSteps * 2>(largest, scores, size);
                    if (__any_sync(kFullMask,
                                   largest[0] > reference[0] + kMostAbove || largest[1] > reference[1] + kMostAbove)) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            largest[half] = fmaxf(largest[half], reference[half]);
                            const float rescale = exp2_approx(reference[half] - largest[half]);
                            reference[half] = largest[half];
                            row_sum[half] *= rescale;
#pragma unroll
                            for (int column = 0; column < S::kSumColumns / 8; ++column) {
                                sums[column][half * 2] *= rescale;
                                sums[column][half * 2 + 1] *= rescale;
                            }
                        }
                    }
                    weigh<Element, false, false, kSum>(scores, weights, row_sum, reference, size, any_sees);
                }
            }
            wgmma_fence();
            issue_sums(at.slot, tile == 0);
            if (is_last_tile) break;
            at = following;
            issue_scores(at.slot);
        }
        if (next.tiles > 0) {
            if (is_last && end_chunk < next.chunk) {
                // Nothing may be kept while waiting for chunks so far on that they could need its place.
                wgmma_wait<0>();
                give_back(at);
                at.advance();
                skip(at, next.chunk - end_chunk);
                holds_tile = false;
            }
            use_next_queries();
            wait_for({next.slot, next.parity});
            wgmma_fence();
            issue_scores(next.slot);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        if (holds_tile) {
            give_back(at);
            at.advance();
            if (next.tiles == 0) skip(at, next.chunk - end_chunk);
        }
        if (kSum) row_sum[0] = quad_sum(row_sum[0]), row_sum[1] = quad_sum(row_sum[1]);
        if (!kSum) row_sum[0] = sums[S::kSumColumns / 8 - 1][0], row_sum[1] = sums[S::kSumColumns / 8 - 1][2];
        const float factors[2] = {normalizer(row_sum[0]), normalizer(row_sum[1])};
        store_rows<D>(out, args.out_token_stride, reinterpret_cast<const Fragment(&)[D / 8]>(sums), factors, rows, lane,
                      aligned);
        fence_async_proxy_global();
        __syncwarp();
        if (lane == 0) counter_add(heads_done, 1);
    }
}

// The projection's tiles. kMany: each group has a unit of its own and the same kColumns columns; else all groups have the
// same unit and kColumns columns each: more tiles, for calls that have few units.
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

// The rings of the attention and of the projection have the same place.
template <typename S, typename Out>
constexpr int ring_bytes =
    S::kRingBytes + S::kOnesBytes > Out::kRingBytes ? S::kRingBytes + S::kOnesBytes : Out::kRingBytes;

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
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&empty[before]);

        const int unit = tile / columns * S::kUnits + (S::kUnits > 1 ? group : 0);
        const int first_column = tile % columns * S::kTileColumns + (S::kUnits > 1 ? 0 : group * S::kColumns);
        if (unit >= units || first_column >= width) continue;
        const int64_t sequence = unit / row_blocks;
        const int first_token = unit % row_blocks * kUnitRows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first_token + group_warp * 16 + half * 8 + lane / 4;
            const bool exists = token < tokens;
            Element* out = static_cast<Element*>(args.out) + sequence * args.out_strides[0] +
                           token * args.out_strides[1];
            const Element* more = residual + sequence * args.residual_strides[0] + token * args.residual_strides[1];
#pragma unroll
            for (int first = 0; first < S::kColumns / 8; first += 4) {
                uint32_t packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = first_column + (first + i) * 8 + lane % 4 * 2;
                    float values[2] = {sums[first + i][half * 2], sums[first + i][half * 2 + 1]};
                    if (column < width) {
                        if (bias != nullptr) {
                            values[0] += to_float(bias[column]);
                            values[1] += to_float(bias[column + 1]);
                        }
                        if (residual != nullptr && exists) {
                            values[0] += to_float(more[column]);
                            values[1] += to_float(more[column + 1]);
                        }
                    }
                    packed[i] = pack16<Element>(values[0], values[1]);
                }
                const uint4 part = quad_transpose(packed, lane);
                const int column = first_column + (first + lane % 4) * 8;
                if (exists && column < width) store_vector(out + column, part);
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

template <typename Element, int D, bool kInOut, bool kMany>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    attend_and_project(const __grid_constant__ BlockPlan plan, const __grid_constant__ Maps maps, float factor) {
    using S = Shape<D>;
    using Out = OutShape<S::kGroups, kMany>;
    constexpr int kRingBytes = ring_bytes<S, Out>;
    DynamicShared memory;
    unsigned char* unaligned_ring = memory.take<unsigned char>(kRingBytes + 1024);
    Shared shared;
    shared.ring = unaligned_ring + (1024 - shared_address(unaligned_ring) % 1024) % 1024;
    shared.full = memory.take<uint64_t>(S::kChunks);
    shared.empty = memory.take<uint64_t>(S::kChunks);
    uint64_t* out_full = memory.take<uint64_t>(Out::kStages);
    uint64_t* out_empty = memory.take<uint64_t>(Out::kStages);
    uint32_t* words = memory.take<uint32_t>(1 + S::kGroups);  // the part taken; of each group: is it the last?
    const TaskQueues<S::kGroups> queues(memory);

    const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
    const int lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < Out::kStages) {
        barrier_init(&out_full[threadIdx.x], 1);
        barrier_init(&out_empty[threadIdx.x], S::kGroups * kGroupWarps);
    }
    wait_for_launch_before();

    // Each block takes one part of the attention, as a rule. Where blocks begin late, because others have the GPU too,
    // those that run take theirs: whatever the projection waits for is under way.
    const int parts = static_cast<int>(gridDim.x);
    if (warp >= S::kGroups * kGroupWarps) {
        give_registers_back<S::kCopyRegisters>();
        const int copy_warp = warp - S::kGroups * kGroupWarps;
#pragma unroll 1
        for (;;) {
            __syncthreads();  // the part is taken
            const int part = uniform(static_cast<int>(words[0]));
            if (part >= parts) break;
            UnitPlace places[2];
            find_places<kUnitRows>(plan.attention, places, lane, part, parts);  // meanwhile the others get the barriers ready
            const PassesFor<D> passes(plan.attention, places);
            __syncthreads();
            if (copy_warp == S::kCopyWarps) {
                deal<Element, S::kChunks>(passes, queues, lane);
            } else {
                const auto copy_tile = [&](int slot, int values, const Element* source, int64_t stride, int count) {
                    copy_chunk_tile<Element, D, S::kColumns, S::kPartBytes>(
                        shared.ring + (slot * 2 + values) * S::kTileBytes, source, stride, count, lane, true,
                        [](int row, int column) { return swizzled_offset<S::kRowBytes>(row, column * 2); });
                };
                fill_ring<Element, S::kChunks, S::kCopyWarps>(passes, shared.full, shared.empty, copy_warp, copy_tile,
                                                              [] { fence_async_proxy(); });
            }
            __syncthreads();
        }
        if (threadIdx.x == S::kGroups * kGroupThreads) {
            fence_async_proxy();  // the ring was the attention's
            fill_out<Out, kInOut>(plan, maps, shared.ring, out_full, out_empty);
        }
    } else {
        take_registers<S::kRegisters>();
        const auto each_barrier = [&](const auto& of_ring, const auto& of_queues) {
            if (threadIdx.x < S::kChunks) of_ring(threadIdx.x);
            if (threadIdx.x < S::kGroups * TaskQueues<S::kGroups>::kDepth) of_queues(threadIdx.x);
        };
#pragma unroll 1
        for (bool is_first = true;; is_first = false) {
            if (threadIdx.x == 0) words[0] = counter_add(plan.counters, 1);
            if (!is_first) {
                each_barrier([&](int at) { barrier_end(&shared.full[at]), barrier_end(&shared.empty[at]); },
                             [&](int at) { barrier_end(&queues.dealt[at]), barrier_end(&queues.taken[at]); });
            }
            __syncthreads();  // the part is taken
            if (static_cast<int>(words[0]) >= parts) break;
            each_barrier(
                [&](int at) {
                    barrier_init(&shared.full[at], kWarpSize);
                    barrier_init(&shared.empty[at], S::kGroups * kGroupWarps);
                },
                [&](int at) {
                    barrier_init(&queues.dealt[at], 1);
                    barrier_init(&queues.taken[at], kGroupWarps);
                });
            for (int at = threadIdx.x * 16; at < S::kOnesBytes; at += S::kGroups * kGroupThreads * 16) {
                const uint32_t ones = pack16<Element>(1.0f, 1.0f);
                store_vector(shared.ring + S::kRingBytes + at, uint4{ones, ones, ones, ones});
            }
            fence_async_proxy();
            __syncthreads();
            attend<Element, D>(plan, shared, queues, warp / kGroupWarps, warp % kGroupWarps, lane, factor);
            __syncthreads();
        }
        project_out<Element, Out, kInOut>(plan, shared.ring, out_full, out_empty, words + 1, warp / kGroupWarps,
                                          warp % kGroupWarps, lane);
    }
}

// ---- Launching ----

tilerank_status launched(int error) {
    if (error == 0) return TILERANK_OK;
    return refuse(TILERANK_LAUNCH_FAILED, "variant warpgroup_block: the launch was refused: %s",
                  launch_error_text(error));
}

template <typename Element, int kColumns, bool kInOut>
tilerank_status launch_project(const BlockPlan& plan, const Maps& maps, void* stream) {
    const int64_t tiles = ceil_divide(plan.rows, kProjectRows) * 3 * ceil_divide(plan.columns, kColumns);
    const int64_t tiles_a_block = ceil_divide(tiles, std::max(multiprocessors(), 1));
    return launched(launch(project<Element, kColumns, kInOut>,
                           dim3(static_cast<unsigned>(ceil_divide(tiles, tiles_a_block))), dim3(kProjectThreads),
                           ProjectShape<kColumns>::bytes(), stream, plan, maps,
                           counters_of(plan.args, plan.unit_rows), static_cast<int>(tiles_a_block)));
}

template <typename Element, int D, bool kInOut, bool kMany>
tilerank_status launch_second(const BlockPlan& plan, const Maps& maps, void* stream) {
    using S = Shape<D>;
    using Out = OutShape<S::kGroups, kMany>;
    constexpr size_t kSharedBytes =
        DynamicShared::bytes<unsigned char>(ring_bytes<S, Out> + 1024) +
        2 * DynamicShared::bytes<uint64_t>(S::kChunks) + 2 * DynamicShared::bytes<uint64_t>(Out::kStages) +
        DynamicShared::bytes<uint32_t>(1 + S::kGroups) + TaskQueues<S::kGroups>::bytes();
    static_assert(kSharedBytes <= kMostShared);
    const int64_t work = std::max(plan.args.batch * plan.args.num_heads * plan.row_blocks, out_tiles<Out>(plan));
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1), work);
    return launched(launch_dependent(attend_and_project<Element, D, kInOut, kMany>, dim3(static_cast<unsigned>(blocks)),
                                     dim3(S::kThreads), kSharedBytes, stream, plan, maps,
                                     nonzero_scale_log2(plan.attention)));
}

template <typename Element, int D, bool kInOut>
tilerank_status launch_for(const BlockPlan& plan, void* stream) {
    using S = Shape<D>;
    const BlockArgs& args = plan.args;
    // Wide tiles cost less memory traffic, narrow ones leave fewer multiprocessors without: whichever ends first, by
    // what a round of tiles takes.
    const int64_t multis = std::max(multiprocessors(), 1);
    const int64_t row_blocks = ceil_divide(plan.rows, kProjectRows);
    const auto rounds = [&](int64_t tiles) { return ceil_divide(tiles, multis); };
    constexpr int kWideRound = 20;
    constexpr int kNarrowRound = 11;
    const bool wide_project = kWideRound * rounds(row_blocks * 3 * ceil_divide(plan.columns, 256)) <=
                              kNarrowRound * rounds(row_blocks * 3 * ceil_divide(plan.columns, 128));
    using Many = OutShape<S::kGroups, true>;
    using Few = OutShape<S::kGroups, false>;
    constexpr int kManyRound = 14;
    constexpr int kFewRound = 10;
    const bool many = kManyRound * rounds(out_tiles<Many>(plan)) <= kFewRound * rounds(out_tiles<Few>(plan));

    Maps maps;
    const auto describe_weights = [&](TensorMap* map, const void* base, int64_t outputs, int64_t inputs, int64_t stride,
                                      int columns) {
        return kInOut ? describe_matrix(map, args.dtype, base, inputs, outputs, stride, 64)
                      : describe_matrix(map, args.dtype, base, outputs, inputs, stride, columns);
    };
    const int project_columns = wide_project ? 256 : 128;
    const int out_columns = many ? Many::kTileColumns : Few::kTileColumns;
    const bool described =
        describe_weights(&maps.weights[0], args.wq, plan.columns, args.width, args.wq_stride, project_columns) &&
        describe_weights(&maps.weights[1], args.wk, plan.columns, args.width, args.wk_stride, project_columns) &&
        describe_weights(&maps.weights[2], args.wv, plan.columns, args.width, args.wv_stride, project_columns) &&
        describe_weights(&maps.wo, args.wo, args.width, plan.columns, args.wo_stride, out_columns) &&
        describe_matrix(&maps.attended, args.dtype, plan.attention.out, plan.rows, plan.columns, plan.columns,
                        kUnitRows);
    if (!described) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant warpgroup_block: the driver describes no matrix to the copy "
                                              "engine; it needs CUDA 12 or later and a Hopper GPU");
    }
    const tilerank_status status = wide_project ? launch_project<Element, 256, kInOut>(plan, maps, stream)
                                                : launch_project<Element, 128, kInOut>(plan, maps, stream);
    if (status != TILERANK_OK) return status;
    return many ? launch_second<Element, D, kInOut, true>(plan, maps, stream)
                : launch_second<Element, D, kInOut, false>(plan, maps, stream);
}

template <typename Element, bool kInOut>
tilerank_status launch_typed(const BlockPlan& plan, void* stream) {
    switch (plan.args.head_dim) {
        case 32:
            return launch_for<Element, 32, kInOut>(plan, stream);
        case 64:
            return launch_for<Element, 64, kInOut>(plan, stream);
        case 80:
            return launch_for<Element, 80, kInOut>(plan, stream);
        case 96:
            return launch_for<Element, 96, kInOut>(plan, stream);
        default:
            return launch_for<Element, 128, kInOut>(plan, stream);
    }
}

}  // namespace warpgroup_block

size_t block_warpgroup_block_workspace(const BlockArgs& args) { return plan_bytes(args, warpgroup_block::kUnitRows); }

tilerank_status block_warpgroup_block(const BlockArgs& args, void* workspace, void* stream) {
    const BlockPlan plan = make_plan(args, workspace, warpgroup_block::kUnitRows);
    if (!plan.aligned_x || !plan.aligned_weights || args.width % 8 != 0 || plan.columns % 8 != 0) {
        return refuse(TILERANK_UNSUPPORTED, "variant warpgroup_block: a row of x, residual, out, gamma, beta or a "
                                            "weight does not begin at a multiple of 16 bytes; it serves: those that do");
    }
    constexpr int64_t kMostRows = 1 << 30;  // of a 32-bit position
    if (plan.rows > kMostRows || args.width > kMostRows || plan.columns > kMostRows) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant warpgroup_block: batch * tokens, width and columns are %lld, %lld, %lld; at most %lld "
                      "each",
                      static_cast<long long>(plan.rows), static_cast<long long>(args.width),
                      static_cast<long long>(plan.columns), static_cast<long long>(kMostRows));
    }
    if (args.dtype == TILERANK_FP16) {
        return args.weight_layout == TILERANK_WEIGHTS_IN_OUT
                   ? warpgroup_block::launch_typed<__half, true>(plan, stream)
                   : warpgroup_block::launch_typed<__half, false>(plan, stream);
    }
    return args.weight_layout == TILERANK_WEIGHTS_IN_OUT
               ? warpgroup_block::launch_typed<__nv_bfloat16, true>(plan, stream)
               : warpgroup_block::launch_typed<__nv_bfloat16, false>(plan, stream);
}

}  // namespace tilerank
