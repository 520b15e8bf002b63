// Shared policy of the attention block's kernels for Hopper with wide tiles: rows that are normalised once, into memory,
// and both launches' products with weights.
#pragma once

#include <atomic>
#include <chrono>

#include "common/block_hopper.cuh"

namespace tilerank {
namespace block_wide {

using namespace block_hopper;

constexpr int kBlockRows = 128;  // of a tile, 64 a group
constexpr int kMultiplyGroups = 2;
constexpr int kMultiplyWarps = kMultiplyGroups * kGroupWarps;
constexpr int kWarpRows = 16;
constexpr int kPartColumns = 64;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

// The L2 begins to read so many bytes, a multiple of 16, of ordinary memory.
__device__ __forceinline__ void prefetch_bytes(const void* from, int bytes) {
    TILERANK_HOPPER("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, as fragments have them; each lane gives the address of one of their rows.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&fragments)[4]) {
    TILERANK_HOPPER("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                    "r"(fragments[0]), "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                    : "memory");
}

__device__ __forceinline__ void prefetch_line(const void* from) {
    TILERANK_HOPPER("prefetch.global.L1 [%0];" ::"l"(from) : "memory");
}

// The next number of a counter, which orders nothing.
__device__ __forceinline__ int take_ticket(uint32_t* counter) {
    uint32_t number = 0;
    TILERANK_HOPPER("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(number) : "l"(counter) : "memory");
    return static_cast<int>(number);
}
// Counts one; by lane 0 of a warp behind a __syncwarp(): who finds the new value sees what the warp wrote before.
__device__ __forceinline__ void count_done(uint32_t* counter) {
    TILERANK_HOPPER("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

#undef TILERANK_HOPPER

// The compiler may not keep what it has made of these registers before: unpacked, they would be twice as many.
__device__ __forceinline__ void forget(uint32_t& bits) { asm volatile("" : "+r"(bits)); }
__device__ __forceinline__ void forget(uint4& raw) {
    forget(raw.x);
    forget(raw.y);
    forget(raw.z);
    forget(raw.w);
}

// ---- Normalised rows ----

// Each unit of kHeldRows rows is normalised once, by whichever warp, and marked as done. The mark is of this call alone,
// and the second launch clears it: memory that holds anything else means that the unit is not done yet, so that nobody
// has to prepare it.
template <typename Element>
struct NormalRows {
    Element* rows;  // plan.rows x width
    uint64_t* done;
    uint64_t mark;
};

template <typename Element>
constexpr int kNormalUnit = kHeldRows<Element>;

inline int64_t normal_units(const BlockArgs& args) {
    const int unit = args.dtype == TILERANK_FP32 ? kNormalUnit<float> : kNormalUnit<__half>;
    return args.pre_ln ? ceil_divide(args.batch * args.tokens, unit) : 0;
}

inline uint64_t next_mark() {
    // An odd multiplier spreads the counter over all bits; where it starts, nobody else's memory is likely to hold.
    static std::atomic<uint64_t> count{
        static_cast<uint64_t>(std::chrono::high_resolution_clock::now().time_since_epoch().count())};
    return count.fetch_add(1) * 0x9e3779b97f4a7c15u | 1u;
}

// gamma and beta are on their way to the L1.
template <typename Element>
__device__ __forceinline__ void prefetch_factors(const BlockArgs& args, int lane) {
    constexpr int kLine = 128 / sizeof(Element);
    for (int column = lane * kLine; column < static_cast<int>(args.width); column += kWarpSize * kLine) {
        if (args.gamma != nullptr) prefetch_line(static_cast<const Element*>(args.gamma) + column);
        if (args.beta != nullptr) prefetch_line(static_cast<const Element*>(args.beta) + column);
    }
}

template <typename Element>
__device__ __forceinline__ void normalize_unit(const BlockPlan& plan, const NormalRows<Element>& normal, int unit,
                                               int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kRows = kNormalUnit<Element>;
    constexpr int kParts = kHeldParts<Element>;
    const BlockArgs& args = plan.args;
    const int width = static_cast<int>(args.width);
    const float epsilon = static_cast<float>(args.epsilon);
    const int last_row = static_cast<int>(plan.rows) - 1;
    const auto row_of = [&](int i) { return min(unit * kRows + i, last_row); };  // beyond the last: the last once more
    const auto row_at = [&](int row) { return static_cast<const Element*>(args.x) + row * args.x_strides[1]; };
    const auto target_at = [&](int row) { return normal.rows + static_cast<int64_t>(row) * width; };
    float values[kPart];
    float gamma[kPart];
    float beta[kPart];
    const auto unpack = [&](float (&to)[kPart], const uint4& raw) {
        Element elements[kPart];
        memcpy(elements, &raw, 16);
#pragma unroll
        for (int e = 0; e < kPart; ++e) to[e] = to_float(elements[e]);
    };
    if (is_held<Element>(width, true)) {
        // All rows are loaded at once, and their sums go from lane to lane beside each other.
        uint4 raw[kRows][kParts];
#pragma unroll
        for (int i = 0; i < kRows; ++i) hold_row<Element>(raw[i], row_at(row_of(i)), width, lane);
        float means[kRows];
        float factors[kRows];
        const auto add_lanes = [&](float (&sums)[kRows]) {
#pragma unroll
            for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) sums[i] += __shfl_xor_sync(kFullMask, sums[i], distance);
            }
        };
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            means[i] = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                unpack(values, raw[i][part]);
#pragma unroll
                for (int e = 0; e < kPart; ++e) means[i] += values[e];
            }
        }
        add_lanes(means);
        const auto forget_rows = [&] {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int part = 0; part < kParts; ++part) forget(raw[i][part]);
            }
        };
        forget_rows();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            means[i] /= static_cast<float>(width);
            factors[i] = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                if ((part * kWarpSize + lane) * kPart >= width) continue;
                unpack(values, raw[i][part]);
#pragma unroll
                for (int e = 0; e < kPart; ++e) {
                    const float away = values[e] - means[i];
                    factors[i] += away * away;
                }
            }
        }
        add_lanes(factors);
        forget_rows();
#pragma unroll
        for (int i = 0; i < kRows; ++i) factors[i] = 1.0f / sqrtf(factors[i] / static_cast<float>(width) + epsilon);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int column = (part * kWarpSize + lane) * kPart;
            if (column >= width) continue;
            load_factors<Element>(gamma, beta, args, column, kPart, true);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                unpack(values, raw[i][part]);
                normalize_part(values, RowScale{means[i], factors[i]}, gamma, beta, kPart);
                store_floats(target_at(row_of(i)) + column, values, kPart, true);
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
            const Element* row = row_at(row_of(i));
            const RowScale scale = scale_of_row<Element>(row, width, epsilon, true, lane);
            for (int column = lane * kPart; column < width; column += kWarpSize * kPart) {
                unpack(values, load_vector<uint4>(row + column));
                load_factors<Element>(gamma, beta, args, column, kPart, true);
                normalize_part(values, scale, gamma, beta, kPart);
                store_floats(target_at(row_of(i)) + column, values, kPart, true);
            }
        }
    }
    fence_async_proxy_global();
    __syncwarp();
    if (lane == 0) {
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(normal.done + unit), "l"(normal.mark) : "memory");
    }
}

// By one warp: until the kBlockRows rows from first_row on are normalised. Whose work they are may not be running yet,
// where others have the GPU too: a warp that has waited for long does it itself, and writes the same bits.
template <typename Element>
__device__ __forceinline__ void wait_for_rows(const BlockPlan& plan, const NormalRows<Element>& normal, int first_row,
                                              int lane) {
    constexpr int kPatience = 100;  // some 50 us
    constexpr int kUnits = kBlockRows / kNormalUnit<Element>;
    static_assert(kUnits % kWarpSize == 0);
    const int first_unit = first_row / kNormalUnit<Element>;
#pragma unroll
    for (int first = first_unit; first < first_unit + kUnits; first += kWarpSize) {
        const int unit = first + lane;
        bool is_missing = unit * kNormalUnit<Element> < static_cast<int>(plan.rows);
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            if (is_missing) {
                uint64_t mark;
                asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(mark) : "l"(normal.done + unit) : "memory");
                is_missing = mark != normal.mark;
            }
            const unsigned missing = __ballot_sync(kFullMask, is_missing);
            if (missing == 0) break;
            if (turn >= kPatience) {
                normalize_unit<Element>(plan, normal, first + __ffs(static_cast<int>(missing)) - 1, lane);
            } else {
                __nanosleep(32);
            }
        }
    }
    fence_async_proxy_global();
}

// ---- Products ----

// kColumnsAtOnce: of one instruction.
template <int kTileColumns, int kColumnsAtOnce = kTileColumns>
struct WideShape {
    static constexpr int kColumns = kTileColumns;
    static constexpr int kAtOnce = kColumnsAtOnce;
    static constexpr int kParts = kColumns / kPartColumns;
    static constexpr int kLeftBytes = kBlockRows * kRowBytes;
    static constexpr int kRightBytes = kColumns * kRowBytes;
    static constexpr int kStageBytes = kLeftBytes + kRightBytes;
    static constexpr int kStages = 204800 / kStageBytes < 6 ? 204800 / kStageBytes : 6;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kStagingBytes = 16 * kRowBytes;  // of a warp
    static constexpr int kBytes = kRingBytes + kMultiplyWarps * kStagingBytes;
};

template <typename S>
struct WideRing {
    unsigned char* memory;  // the stages, and after them what warps stage their results in
    uint64_t* full;
    uint64_t* empty;
    int* tiles;  // of a stage, whose tile it begins

    __device__ __forceinline__ void init(int thread) const {
        if (thread < S::kStages) {
            barrier_init(&full[thread], 1);
            barrier_init(&empty[thread], kMultiplyWarps);
        }
    }
    __device__ __forceinline__ unsigned char* left(int stage) const { return memory + stage * S::kStageBytes; }
    __device__ __forceinline__ unsigned char* right(int stage) const { return left(stage) + S::kLeftBytes; }
    __device__ __forceinline__ unsigned char* staging(int multiply_warp) const {
        return memory + S::kRingBytes + multiply_warp * S::kStagingBytes;
    }
};

// Parts that columns are.
__host__ __device__ inline int64_t ceil_parts(int64_t columns) { return (columns + kPartColumns - 1) / kPartColumns; }

// Tiles of kBlockRows rows by S::kColumns columns, row by row of tiles.
template <typename S>
struct WideTiles {
    int all;
    int columns;  // tiles of a row of them

    __host__ __device__ WideTiles(int64_t rows, int64_t parts)
        : all(0), columns(static_cast<int>((parts + S::kParts - 1) / S::kParts)) {
        all = static_cast<int>((rows + kBlockRows - 1) / kBlockRows) * columns;
    }
    __device__ __forceinline__ int row(int tile) const { return tile / columns * kBlockRows; }
    __device__ __forceinline__ int part(int tile) const { return tile % columns * S::kParts; }
};

// A part of 64 columns of the weights.
struct WeightPart {
    const TensorMap* map;
    int column;
};

// By one warp: brings the factors of tiles that next() gives the numbers of, and says which they are. wait_for(row)
// waits until the rows from there on are there; part_at(part) says where a part of the columns is. Numbers beyond those
// of tiles are handed on as well, once wait_beyond(number) returns, until that says false.
template <typename S, bool kInOut, typename Next, typename WaitFor, typename PartAt, typename WaitBeyond>
__device__ __forceinline__ void fill_wide(const WideTiles<S>& tiles, const TensorMap& rows, int steps,
                                          const WideRing<S>& ring, int lane, const Next& next, const WaitFor& wait_for,
                                          const PartAt& part_at, const WaitBeyond& wait_beyond) {
    RingPlace<S::kStages> at;
    WeightPart parts[S::kParts];
    const auto copy_right = [&](int stage, int step) {
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) {
            unsigned char* target = ring.right(stage) + i * kPartColumns * kRowBytes;
            if constexpr (kInOut) {
                copy_box(target, *parts[i].map, step * kDepth, parts[i].column, &ring.full[stage]);
            } else {
                copy_box(target, *parts[i].map, parts[i].column, step * kDepth, &ring.full[stage]);
            }
        }
    };
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
        const int tile = next();
        barrier_wait(&ring.empty[at.stage], at.parity ^ 1);
        if (lane == 0) ring.tiles[at.stage] = tile;
        if (tile >= tiles.all) {
            const bool goes_on = wait_beyond(tile - tiles.all);
            if (lane == 0) barrier_arrive(&ring.full[at.stage]);
            if (!goes_on) return;
            at.advance();
            continue;
        }
        const auto begin_stage = [&](const RingPlace<S::kStages>& place) {
            barrier_wait(&ring.empty[place.stage], place.parity ^ 1);
            if (lane == 0) barrier_expect(&ring.full[place.stage], S::kStageBytes);
        };
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) parts[i] = part_at(tiles.part(tile) + i);
        // The first weights are on their way while the first rows are waited for.
        const int ahead = is_first ? min(steps, S::kStages) : 0;
        RingPlace<S::kStages> early = at;
#pragma unroll 1
        for (int step = 0; step < ahead; ++step) {
            begin_stage(early);
            if (lane == 0) copy_right(early.stage, step);
            early.advance();
        }
        const int row = tiles.row(tile);
        wait_for(row);
        __syncwarp();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            if (step >= ahead) begin_stage(at);
            if (lane == 0) {
                copy_box(ring.left(at.stage), rows, row, step * kDepth, &ring.full[at.stage]);
                if (step >= ahead) copy_right(at.stage, step);
            }
            at.advance();
        }
        __syncwarp();
    }
}

// sums += left right^T over a step, of a group's 64 rows.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ void multiply_stage(Fragment (&sums)[S::kColumns / 8], const unsigned char* left,
                                               const unsigned char* right, bool clear) {
    constexpr int kFragments = S::kAtOnce / 8;
    // From 16 inputs to the next: 32 bytes along a row of them, or 16 rows. From one part to the next where it matters.
    constexpr uint32_t kNext = kInOut ? kRowBytes : 2;
    constexpr uint32_t kStride = kInOut ? kPartColumns * kRowBytes / 16 : 1;
    const uint32_t a = shared_address(left) / 16;
    const uint32_t b = shared_address(right) / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
        for (int i = 0; i < S::kColumns / S::kAtOnce; ++i) {
            wgmma_shared_k16<Element, S::kAtOnce, kInOut>(
                reinterpret_cast<Fragment(&)[kFragments]>(sums[i * kFragments]),
                tile_descriptor<kRowBytes>(a + step * 2, 1),
                tile_descriptor<kRowBytes>(b + i * S::kAtOnce * kRowBytes / 16 + step * kNext, kStride),
                step > 0 || !clear);
        }
    }
    wgmma_commit();
}

// The tile that begins at this place, once its first factors are there.
template <typename S>
__device__ __forceinline__ int tile_of(const WideRing<S>& ring, const RingPlace<S::kStages>& at, int lane) {
    barrier_wait(&ring.full[at.stage], at.parity);
    return uniform(lane == 0 ? ring.tiles[at.stage] : 0);
}

// A group's products of one tile. The last one is still running, and its stage, which is returned, is not released yet.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ int multiply_tile(Fragment (&sums)[S::kColumns / 8], const WideRing<S>& ring,
                                             RingPlace<S::kStages>& at, int steps, int group, int lane) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(&ring.full[at.stage], at.parity);
        multiply_stage<Element, S, kInOut>(sums, ring.left(at.stage) + group * kUnitRows * kRowBytes,
                                           ring.right(at.stage), step == 0);
        wgmma_wait<1>();
        if (step > 0 && lane == 0) barrier_arrive(&ring.empty[before]);
        before = at.stage;
        at.advance();
    }
    return before;
}

// Where lanes find a warp's 16 rows x 64 columns in its staging memory: lane's row of the i-th four matrices, which are
// 16 columns; and its 16 bytes of the i-th four rows.
__device__ __forceinline__ unsigned char* matrix_row(unsigned char* staging, int i, int lane) {
    return staging + swizzled_offset<kRowBytes>(lane % 16, (i * 2 + lane / 16) * 16);
}
__device__ __forceinline__ unsigned char* row_part(unsigned char* staging, int i, int lane) {
    return staging + swizzled_offset<kRowBytes>(i * 4 + lane / 8, lane % 8 * 16);
}

// Pairs of a bias, of the columns that the lane's sums are of; zeros where there is none.
template <typename Element, int kBlocks>
__device__ __forceinline__ void load_bias(uint32_t (&pairs)[kBlocks], const Element* bias, int count, int lane) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        const int column = block * 8 + lane % 4 * 2;
        pairs[block] = bias != nullptr && column < count ? load_vector<uint32_t>(bias + column) : 0u;
    }
}

template <int kParts>
__device__ __forceinline__ void forget_pairs(uint32_t (&pairs)[kParts][8]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int block = 0; block < 8; ++block) forget(pairs[i][block]);
    }
}

// A warp's 16 rows of a part, sums and bias and more, rounded, as rows of staging memory. more: what is added of the
// i-th four matrices.
template <typename Element, bool kMore>
__device__ __forceinline__ void stage_part(unsigned char* staging, const Fragment* sums, const uint32_t* bias,
                                           int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t more[4] = {};
        if (kMore) ldmatrix_x4(more, matrix_row(staging, i, lane));
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 8 columns, of rows 0 to 7 and 8 to 15; the next 8
            const float* pair = &sums[i * 2 + j / 2][j % 2 * 2];
            const float2 of_bias = unpack16<Element>(bias[i * 2 + j / 2]);
            float2 sum = {pair[0] + of_bias.x, pair[1] + of_bias.y};
            if (kMore) {
                const float2 of_more = unpack16<Element>(more[j]);
                sum.x += of_more.x, sum.y += of_more.y;
            }
            packed[j] = pack16<Element>(sum.x, sum.y);
        }
        store_matrices(matrix_row(staging, i, lane), packed);
    }
    __syncwarp();
}

// ---- Launch 1: q, k, v = normalised x times the weights ----

constexpr int kProjectThreads = (kMultiplyGroups + 1) * kGroupThreads;
constexpr int kNormalWarps = kGroupWarps - 1;  // the first one copies
constexpr int kNormalRegisters = 120;
constexpr int kProjectRegisters = 192;
static_assert(kNormalRegisters + kMultiplyGroups * kProjectRegisters <= 3 * launch_registers(kProjectThreads));

struct WideMaps {
    TensorMap x;           // the normalised rows, or x
    TensorMap weights[3];  // of q, k, v
    TensorMap attended;
    TensorMap wo;
};

template <typename Element, int kColumns, bool kInOut>
__global__ void __launch_bounds__(kProjectThreads, 1)
    project(const __grid_constant__ BlockPlan plan, const __grid_constant__ WideMaps maps,
            const NormalRows<Element> normal, int64_t counters) {
    using S = WideShape<kColumns>;
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(S::kBytes + 1024);
    const WideRing<S> ring = {unaligned + (1024 - shared_address(unaligned) % 1024) % 1024,
                              memory.take<uint64_t>(S::kStages), memory.take<uint64_t>(S::kStages),
                              memory.take<int>(S::kStages)};
    const BlockArgs& args = plan.args;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = uniform(thread / kWarpSize);
    const int lane = thread % kWarpSize;
    const bool pre_ln = args.pre_ln != 0;
    const int steps = (static_cast<int>(args.width) + kDepth - 1) / kDepth;
    const int matrix_parts = static_cast<int>(plan.columns) / kPartColumns;
    const WideTiles<S> tiles(plan.rows, 3 * matrix_parts);

    let_next_launch_begin();
    ring.init(thread);
    fence_async_proxy();
    __syncthreads();
    // Parts beyond the last one are beyond v's columns: zeros.
    const auto matrix_of = [&](int part) { return (part >= matrix_parts) + (part >= 2 * matrix_parts); };
    if (warp < kGroupWarps) give_registers_back<kNormalRegisters>();
    if (warp == 0) {
        int tile = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
        fill_wide<S, kInOut>(
            tiles, maps.x, steps, ring, lane, [&] { return tile += static_cast<int>(gridDim.x); },
            [&](int row) {
                if (pre_ln) wait_for_rows<Element>(plan, normal, row, lane);
            },
            [&](int part) -> WeightPart {
                const int matrix = matrix_of(part);
                return {&maps.weights[matrix], (part - matrix * matrix_parts) * kPartColumns};
            },
            [](int) { return false; });
    } else if (warp < kGroupWarps) {
        const int units = (static_cast<int>(plan.rows) + kNormalUnit<Element> - 1) / kNormalUnit<Element>;
        if (pre_ln) {
            prefetch_factors<Element>(args, lane);
#pragma unroll 1
            for (int unit = static_cast<int>((warp - 1) * gridDim.x + blockIdx.x); unit < units;
                 unit += static_cast<int>(kNormalWarps * gridDim.x)) {
                normalize_unit<Element>(plan, normal, unit, lane);
            }
        }
        for (int64_t i = blockIdx.x * static_cast<int64_t>(kNormalWarps * kWarpSize) + thread - kWarpSize; i < counters;
             i += gridDim.x * static_cast<int64_t>(kNormalWarps * kWarpSize)) {
            plan.counters[i] = 0;
        }
    } else {
        take_registers<kProjectRegisters>();
        const int multiply_warp = warp - kGroupWarps;
        unsigned char* staging = ring.staging(multiply_warp);
        RingPlace<S::kStages> at;
        Fragment sums[kColumns / 8];
#pragma unroll 1
        for (int tile = static_cast<int>(blockIdx.x); tile < tiles.all; tile += static_cast<int>(gridDim.x)) {
            uint32_t bias[S::kParts][8];
            Element* targets[S::kParts];
#pragma unroll
            for (int i = 0; i < S::kParts; ++i) {
                const int part = tiles.part(tile) + i;
                const int matrix = matrix_of(part);
                const int column = (part - matrix * matrix_parts) * kPartColumns;
                const bool exists = column < plan.columns;
                const void* of_matrix = matrix == 0 ? args.bq : matrix == 1 ? args.bk : args.bv;
                const void* target = matrix == 0   ? plan.attention.q
                                     : matrix == 1 ? plan.attention.k
                                                   : plan.attention.v;
                load_bias(bias[i], exists && of_matrix != nullptr ? static_cast<const Element*>(of_matrix) + column
                                                                  : nullptr,
                          kPartColumns, lane);
                targets[i] = exists ? static_cast<Element*>(const_cast<void*>(target)) + column : nullptr;
            }
            const int last =
                multiply_tile<Element, S, kInOut>(sums, ring, at, steps, multiply_warp / kGroupWarps, lane);
            wgmma_wait<0>();
            if (lane == 0) barrier_arrive(&ring.empty[last]);
            forget_pairs(bias);
            const int row = tiles.row(tile) + multiply_warp * 16 + lane / 8;
            const int64_t offset = row * plan.columns + lane % 8 * 8;
            const int rows = static_cast<int>(plan.rows) - row;
#pragma unroll
            for (int i = 0; i < S::kParts; ++i) {
                stage_part<Element, false>(staging, &sums[i * 8], bias[i], lane);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 part = load_vector<uint4>(row_part(staging, j, lane));
                    if (targets[i] != nullptr && j * 4 < rows) {
                        store_vector(targets[i] + offset + j * 4 * plan.columns, part);
                    }
                }
                __syncwarp();
            }
        }
    }
}

// ---- Launch 2: the output projection ----

// In the plan's counters: numbers taken of the attention, and of the projection; heads done of each unit of rows;
// projections done of each kWarpRows rows, tiles of columns.
constexpr int kTickets = 2;
__device__ __forceinline__ uint32_t* heads_done(const BlockPlan& plan, int unit) {
    return plan.counters + kTickets + unit;
}
inline int64_t wide_counters(const BlockArgs& args) {
    return kTickets + args.batch * ceil_divide(args.tokens, kUnitRows) +
           ceil_divide(args.batch * args.tokens, kWarpRows);
}
__device__ __forceinline__ uint32_t* rows_done(const BlockPlan& plan, int row) {
    return heads_done(plan, static_cast<int>(plan.args.batch * plan.row_blocks) + row / kWarpRows);
}

// By one warp: until all heads of the kBlockRows rows from first_row on are there.
__device__ __forceinline__ void wait_for_heads(const BlockPlan& plan, int first_row, int lane) {
    const uint32_t target = static_cast<uint32_t>(plan.args.num_heads * kGroupWarps);
    const int tokens = static_cast<int>(plan.args.tokens);
    const int row_blocks = static_cast<int>(plan.row_blocks);
    const auto unit_of = [&](int row) { return row / tokens * row_blocks + row % tokens / kUnitRows; };
    const int end_row = min(first_row + kBlockRows, static_cast<int>(plan.rows));
    if (first_row < end_row) {
        const int last = unit_of(end_row - 1);
        for (int unit = unit_of(first_row) + lane; unit <= last; unit += kWarpSize) {
            counter_wait(heads_done(plan, unit), target);
        }
    }
    __syncwarp();
    fence_async_proxy_global();
}

// The launch before does not write the weights: the L2 can have them before it ends.
template <typename Element, bool kInOut>
__device__ __forceinline__ void prefetch_weights(const BlockPlan& plan) {
    const int rows = static_cast<int>(kInOut ? plan.columns : plan.args.width);
    const int bytes = static_cast<int>(sizeof(Element) * (kInOut ? plan.args.width : plan.columns));
    const Element* base = static_cast<const Element*>(plan.args.wo);
    for (int row = static_cast<int>(threadIdx.x * gridDim.x + blockIdx.x); row < rows;
         row += static_cast<int>(blockDim.x * gridDim.x)) {
        prefetch_bytes(base + row * plan.args.wo_stride, bytes);
    }
}

// Rows of the result that are normalised.
__device__ __forceinline__ int normal_out_rows(const BlockPlan& plan) {
    return plan.args.pre_ln ? 0 : static_cast<int>(plan.rows);
}
// Those that a warp normalises with one number: one where that is a number a block, or less.
__device__ __forceinline__ int normal_share(const BlockPlan& plan) {
    return plan.rows > static_cast<int>(gridDim.x) * kMultiplyWarps ? kWarpRows / kMultiplyWarps : 1;
}

template <typename S, bool kInOut>
__device__ __forceinline__ void fill_out(const BlockPlan& plan, const WideMaps& maps, const WideRing<S>& ring,
                                         int lane) {
    const WideTiles<S> tiles(plan.rows, ceil_parts(plan.args.width));
    fill_wide<S, kInOut>(
        tiles, maps.attended, (static_cast<int>(plan.columns) + kDepth - 1) / kDepth, ring, lane,
        [&] { return uniform(lane == 0 ? take_ticket(plan.counters + 1) : 0); },
        [&](int row) { wait_for_heads(plan, row, lane); },
        [&](int part) -> WeightPart { return {&maps.wo, part * kPartColumns}; },
        [&](int number) {  // rows to normalise, if any
            const int row = number * kMultiplyWarps * normal_share(plan);
            const bool goes_on = row < normal_out_rows(plan);
            if (goes_on && lane == 0) counter_wait(rows_done(plan, row), static_cast<uint32_t>(tiles.columns));
            return goes_on;
        });
}

// Normalises a row of the result in place, by one warp: as normalize_out_rows does, with all that it takes loaded at
// once, and by little code, which has to be fetched where it runs for the first time.
template <typename Element>
__device__ __forceinline__ void normalize_out_row(const BlockPlan& plan, int row, int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    constexpr int kParts = kHeldParts<Element>;
    const BlockArgs& args = plan.args;
    const int width = static_cast<int>(args.width);
    if (!is_held<Element>(width, true)) return normalize_out_rows<Element>(plan, row, 1, 0, 1, lane);
    Element* out = static_cast<Element*>(args.out) + token_offset(args.out_strides, row, args.tokens);
    uint4 raw[kParts];
    uint4 raw_gamma[kParts];
    uint4 raw_beta[kParts] = {};
    const uint32_t ones = pack16<Element>(1.0f, 1.0f);
#pragma unroll
    for (int part = 0; part < kParts; ++part) raw_gamma[part] = uint4{ones, ones, ones, ones};
    hold_row<Element>(raw, out, width, lane);
    if (args.gamma != nullptr) hold_row<Element>(raw_gamma, static_cast<const Element*>(args.gamma), width, lane);
    if (args.beta != nullptr) hold_row<Element>(raw_beta, static_cast<const Element*>(args.beta), width, lane);
    const RowScale scale = scale_of_parts<Element>(raw, width, static_cast<float>(args.epsilon), lane);
    const auto unpack = [](float (&to)[kPart], const uint4& from) {
        Element elements[kPart];
        memcpy(elements, &from, 16);
#pragma unroll
        for (int e = 0; e < kPart; ++e) to[e] = to_float(elements[e]);
    };
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int column = (part * kWarpSize + lane) * kPart;
        if (column >= width) continue;
        float values[kPart];
        float gamma[kPart];
        float beta[kPart];
        unpack(values, raw[part]);
        unpack(gamma, raw_gamma[part]);
        unpack(beta, raw_beta[part]);
        normalize_part(values, scale, gamma, beta, kPart);
        store_floats(out + column, values, kPart, true);
    }
}

// By the warps that multiply: out = attended wo^T + bo + residual. Where the result is normalised, numbers behind those
// of the tiles do it, a few rows each, so that all blocks share in it.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ void project_out(const BlockPlan& plan, const WideRing<S>& ring, int warp, int lane) {
    const BlockArgs& args = plan.args;
    const WideTiles<S> tiles(plan.rows, ceil_parts(args.width));
    const int width = static_cast<int>(args.width);
    const int rows = static_cast<int>(plan.rows);
    const int tokens = static_cast<int>(args.tokens);
    const int steps = (static_cast<int>(plan.columns) + kDepth - 1) / kDepth;
    const Element* bias = static_cast<const Element*>(args.bo);
    const Element* residual = static_cast<const Element*>(args.residual);
    unsigned char* staging = ring.staging(warp);
    RingPlace<S::kStages> at;
    Fragment sums[S::kColumns / 8];
#pragma unroll 1
    for (;;) {
        const int tile = tile_of(ring, at, lane);
        if (tile >= tiles.all) {
            const int share = normal_share(plan);
            const int first = (tile - tiles.all) * kMultiplyWarps * share;
            if (first >= normal_out_rows(plan)) return;
            const int row = first + warp * share;
#pragma unroll 1
            for (int i = 0; i < share && row + i < rows; ++i) normalize_out_row<Element>(plan, row + i, lane);
            if (lane == 0) barrier_arrive(&ring.empty[at.stage]);
            at.advance();
            continue;
        }
        const int first_column = tiles.part(tile) * kPartColumns;
        const int first_row = tiles.row(tile);
        uint32_t bias_pairs[S::kParts][8];
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) {
            const int column = first_column + i * kPartColumns;
            load_bias(bias_pairs[i], bias == nullptr ? nullptr : bias + column, width - column, lane);
        }
        // Of the lane's rows, four apart.
        int64_t out_offsets[4];
        int64_t residual_offsets[4];
        bool exists[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = first_row + warp * 16 + j * 4 + lane / 8;
            exists[j] = row < rows;
            const int sequence = row / tokens;
            const int token = row - sequence * tokens;
            out_offsets[j] = sequence * args.out_strides[0] + token * args.out_strides[1];
            residual_offsets[j] = sequence * args.residual_strides[0] + token * args.residual_strides[1];
        }
        const int last = multiply_tile<Element, S, kInOut>(sums, ring, at, steps, warp / kGroupWarps, lane);
        uint4 more[4] = {};
        const auto load_residual = [&](int column) {
            if (residual == nullptr || column >= width) return;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (exists[j]) more[j] = load_vector<uint4>(residual + residual_offsets[j] + column);
            }
        };
        const int own_column = first_column + lane % 8 * 8;
        load_residual(own_column);
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&ring.empty[last]);
        forget_pairs(bias_pairs);
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) {
            const int column = own_column + i * kPartColumns;
            if (residual != nullptr) {
#pragma unroll
                for (int j = 0; j < 4; ++j) store_vector(row_part(staging, j, lane), more[j]);
                __syncwarp();
                if (i + 1 < S::kParts) load_residual(column + kPartColumns);
                stage_part<Element, true>(staging, &sums[i * 8], bias_pairs[i], lane);
            } else {
                stage_part<Element, false>(staging, &sums[i * 8], bias_pairs[i], lane);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4 part = load_vector<uint4>(row_part(staging, j, lane));
                if (exists[j] && column < width) {
                    store_vector(static_cast<Element*>(args.out) + out_offsets[j] + column, part);
                }
            }
            __syncwarp();
        }
        const int own_row = first_row + warp * kWarpRows;
        if (lane == 0 && own_row < normal_out_rows(plan)) count_done(rows_done(plan, own_row));
    }
}

// ---- The workspace ----

// The normalised rows lie where the attended ones will be, or behind the counters where those are narrower.
inline bool normal_rows_are_apart(const BlockArgs& args) {
    return args.pre_ln != 0 && args.width > args.num_heads * args.head_dim;
}
inline size_t marks_at(const BlockArgs& args) {
    return 4 * tensor_bytes(args) + plan_aligned(4 * static_cast<size_t>(wide_counters(args)));
}
inline size_t rows_at(const BlockArgs& args) {
    return marks_at(args) + plan_aligned(8 * static_cast<size_t>(normal_units(args)));
}
inline size_t workspace_bytes(const BlockArgs& args) {
    const size_t element = args.dtype == TILERANK_FP32 ? 4 : 2;
    const size_t rows = static_cast<size_t>(args.batch * args.tokens * args.width);
    return rows_at(args) + (normal_rows_are_apart(args) ? plan_aligned(element * rows) : 0);
}

template <typename Element>
NormalRows<Element> normal_rows(const BlockPlan& plan, void* workspace) {
    unsigned char* memory = static_cast<unsigned char*>(workspace);
    void* rows = normal_rows_are_apart(plan.args) ? memory + rows_at(plan.args) : plan.attention.out;
    return {static_cast<Element*>(rows), reinterpret_cast<uint64_t*>(memory + marks_at(plan.args)), next_mark()};
}

// ---- Launching ----

// How many columns a call's tiles have: wide ones cost less memory traffic, narrow ones leave fewer multiprocessors
// without work; whichever ends first, by what a round of tiles takes (in tenths of a microsecond at 1,024 inputs).
struct WideColumns {
    int project;
    int out;

    static WideColumns of(const BlockPlan& plan) {
        const int64_t multis = std::max(multiprocessors(), 1);
        const auto cheapest = [&](int64_t parts, std::initializer_list<std::pair<int, int>> choices) {
            int best = 0;
            int64_t least = INT64_MAX;
            for (const auto& [columns, round] : choices) {
                const int64_t tiles = ceil_divide(plan.rows, kBlockRows) * ceil_divide(parts, columns / kPartColumns);
                const int64_t cost = ceil_divide(tiles, multis) * round;
                if (cost < least) least = cost, best = columns;
            }
            return best;
        };
        return {cheapest(3 * plan.columns / kPartColumns, {{256, 136}, {192, 104}, {128, 68}}),
                cheapest(ceil_parts(plan.args.width), {{256, 160}, {128, 92}, {64, 71}})};
    }
};

// weight_rows: rows of a weight's memory in a box.
template <bool kInOut>
tilerank_status describe_wide(const char* name, const BlockPlan& plan, const void* rows, int64_t rows_stride,
                               WideMaps* maps, int weight_rows = kPartColumns) {
    const BlockArgs& args = plan.args;
    const auto weights = [&](TensorMap* map, const void* base, int64_t outputs, int64_t inputs, int64_t stride) {
        return kInOut ? describe_matrix(map, args.dtype, base, inputs, outputs, stride, weight_rows)
                      : describe_matrix(map, args.dtype, base, outputs, inputs, stride, weight_rows);
    };
    // Rows of all sequences are equally far from each other: check_call has seen to it.
    if (describe_matrix(&maps->x, args.dtype, rows, plan.rows, args.width, rows_stride, kBlockRows) &&
        weights(&maps->weights[0], args.wq, plan.columns, args.width, args.wq_stride) &&
        weights(&maps->weights[1], args.wk, plan.columns, args.width, args.wk_stride) &&
        weights(&maps->weights[2], args.wv, plan.columns, args.width, args.wv_stride) &&
        weights(&maps->wo, args.wo, args.width, plan.columns, args.wo_stride) &&
        describe_matrix(&maps->attended, args.dtype, plan.attention.out, plan.rows, plan.columns, plan.columns,
                        kBlockRows)) {
        return TILERANK_OK;
    }
    return refuse(TILERANK_LAUNCH_FAILED,
                  "variant %s: the driver describes no matrix to the copy engine; it needs CUDA 12 or later and a "
                  "Hopper GPU",
                  name);
}

template <typename Element, int kColumns, bool kInOut>
tilerank_status launch_project(const char* name, const BlockPlan& plan, const WideMaps& maps,
                               const NormalRows<Element>& normal, int64_t counters, void* stream) {
    using S = WideShape<kColumns>;
    constexpr size_t kSharedBytes = DynamicShared::bytes<unsigned char>(S::kBytes + 1024) +
                                    2 * DynamicShared::bytes<uint64_t>(S::kStages) +
                                    DynamicShared::bytes<int>(S::kStages);
    static_assert(kSharedBytes <= kMostShared);
    const int64_t blocks = std::min<int64_t>(std::max(multiprocessors(), 1),
                                             WideTiles<S>(plan.rows, 3 * plan.columns / kPartColumns).all);
    return launched(name, launch(project<Element, kColumns, kInOut>, dim3(static_cast<unsigned>(blocks)),
                                 dim3(kProjectThreads), kSharedBytes, stream, plan, maps, normal, counters));
}

}  // namespace block_wide
}  // namespace tilerank
