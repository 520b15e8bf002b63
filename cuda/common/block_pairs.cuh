// Shared policy of the attention block's kernels for Hopper whose blocks work in pairs (clusters of two): both launches'
// products with weights. The blocks of a pair have neighbouring rows and the same weights, of which each brings one half
// for both: the copy engine writes it to both shared memories, and the L2 is read once.
#pragma once

#include <atomic>
#include <chrono>

#include "common/block_hopper.cuh"

namespace tilerank {
namespace block_pairs {

using namespace block_hopper;

constexpr int kBlockRows = 128;  // of a block's tile, 64 a group
constexpr int kPairRows = 2 * kBlockRows;
constexpr int kMultiplyGroups = 2;
constexpr int kMultiplyWarps = kMultiplyGroups * kGroupWarps;
constexpr int kBoxRows = 32;  // rows of a weight's memory that are copied at once
constexpr int kPartColumns = 64;
#ifndef SHARES
#define SHARES 1
#endif
constexpr bool kShares = SHARES;

// ---- Clusters ----

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif

// Which block of its pair.
__device__ __forceinline__ int pair_rank() { return static_cast<int>(blockIdx.x % 2); }

// Barrier of all threads of a pair, in two steps.
__device__ __forceinline__ void pair_arrive() { TILERANK_HOPPER("barrier.cluster.arrive;" ::: "memory"); }
__device__ __forceinline__ void pair_wait() { TILERANK_HOPPER("barrier.cluster.wait;" ::: "memory"); }
// What barrier_init wrote is seen by the other block, after pair_arrive and pair_wait.
__device__ __forceinline__ void fence_pair_barriers() {
    TILERANK_HOPPER("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at that barrier of a block of the pair. For what was read, not written: it brings no fence of its own.
__device__ __forceinline__ void pair_barrier_arrive(uint64_t* barrier, int rank) {
    TILERANK_HOPPER(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// copy_box to the same place of both blocks; each block's own barrier counts its bytes.
__device__ __forceinline__ void copy_box_to_pair(void* target, const TensorMap& map, int64_t row, int64_t column,
                                                 uint64_t* barrier) {
    TILERANK_HOPPER(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
        "%3}], [%4], %5;" ::"r"(shared_address(target)),
        "l"(&map), "r"(static_cast<int>(column)), "r"(static_cast<int>(row)), "r"(shared_address(barrier)),
        "h"(static_cast<uint16_t>(3))
        : "memory");
}

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

#undef TILERANK_HOPPER

// launch() of pairs of blocks, by a kernel that says __cluster_dims__(2, 1, 1). kDependent: it calls
// wait_for_launch_before.
template <bool kDependent, typename... Parameters>
int launch_pairs(void (*kernel)(Parameters...), int64_t pairs, int threads, size_t shared_bytes, void* stream,
                 typename Exactly<Parameters>::type... arguments) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error == cudaSuccess) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(2 * pairs)), config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = shared_bytes;
        config.stream = static_cast<cudaStream_t>(stream);
        config.attrs = &attribute, config.numAttrs = kDependent ? 1 : 0;
        void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
        error = cudaLaunchKernelExC(&config, function, pointers);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int>(error);
}

// Pairs that run at once.
inline int64_t most_pairs() { return std::max(multiprocessors() / 2, 1); }

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

template <typename Element>
__device__ __forceinline__ void normalize_unit(const BlockPlan& plan, const NormalRows<Element>& normal, int unit,
                                               int lane) {
    constexpr int kPart = 16 / sizeof(Element);
    const BlockArgs& args = plan.args;
    const int width = static_cast<int>(args.width);
    const float epsilon = static_cast<float>(args.epsilon);
    const int last_row = static_cast<int>(plan.rows) - 1;
    const int first_row = unit * kNormalUnit<Element>;
    const auto row_at = [&](int row) { return static_cast<const Element*>(args.x) + row * args.x_strides[1]; };
    const auto normalize = [&](Element* target, const uint4& raw, const RowScale& scale, int column) {
        Element elements[kPart];
        float values[kPart];
        float gamma[kPart];
        float beta[kPart];
        memcpy(elements, &raw, 16);
#pragma unroll
        for (int e = 0; e < kPart; ++e) values[e] = to_float(elements[e]);
        load_factors<Element>(gamma, beta, args, column, kPart, true);
        normalize_part(values, scale, gamma, beta, kPart);
        store_floats(target + column, values, kPart, true);
    };
    if (is_held<Element>(width, true)) {
        uint4 raw[kNormalUnit<Element>][kHeldParts<Element>];
#pragma unroll
        for (int i = 0; i < kNormalUnit<Element>; ++i) {
            hold_row<Element>(raw[i], row_at(min(first_row + i, last_row)), width, lane);
        }
#pragma unroll
        for (int i = 0; i < kNormalUnit<Element>; ++i) {
            if (first_row + i > last_row) break;
            const RowScale scale = scale_of_parts<Element>(raw[i], width, epsilon, lane);
            Element* target = normal.rows + static_cast<int64_t>(first_row + i) * width;
#pragma unroll
            for (int part = 0; part < kHeldParts<Element>; ++part) {
                const int column = (part * kWarpSize + lane) * kPart;
                if (column < width) normalize(target, raw[i][part], scale, column);
            }
        }
    } else {
#pragma unroll 1
        for (int row = first_row; row <= min(first_row + kNormalUnit<Element> - 1, last_row); ++row) {
            const RowScale scale = scale_of_row<Element>(row_at(row), width, epsilon, true, lane);
            Element* target = normal.rows + static_cast<int64_t>(row) * width;
            for (int column = lane * kPart; column < width; column += kWarpSize * kPart) {
                normalize(target, load_vector<uint4>(row_at(row) + column), scale, column);
            }
        }
    }
    fence_async_proxy_global();
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(normal.done + unit), "l"(normal.mark) : "memory");
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

// ---- Products of a pair ----

// kColumnsAtOnce: of one instruction.
template <int kTileColumns, int kColumnsAtOnce = kTileColumns>
struct PairShape {
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
struct PairRing {
    unsigned char* memory;  // the stages, and after them what warps stage their results in
    uint64_t* full;
    uint64_t* empty;  // of both blocks: each writes to both

    __device__ __forceinline__ void init(int thread) const {
        if (thread < S::kStages) {
            barrier_init(&full[thread], 1);
            barrier_init(&empty[thread], (kShares ? 2 : 1) * kMultiplyWarps);
        }
    }
    __device__ __forceinline__ unsigned char* left(int stage) const { return memory + stage * S::kStageBytes; }
    __device__ __forceinline__ unsigned char* right(int stage) const { return left(stage) + S::kLeftBytes; }
    __device__ __forceinline__ unsigned char* staging(int multiply_warp) const {
        return memory + S::kRingBytes + multiply_warp * S::kStagingBytes;
    }
};

// A pair's tiles: kPairRows rows by S::kColumns columns, row by row of tiles.
template <typename S>
struct PairTiles {
    int all;
    int columns;  // tiles of a row of them

    __host__ __device__ PairTiles(int64_t rows, int64_t parts)
        : all(0), columns(static_cast<int>((parts + S::kParts - 1) / S::kParts)) {
        all = static_cast<int>((rows + kPairRows - 1) / kPairRows) * columns;
    }
    __device__ __forceinline__ int row(int tile, int rank) const {
        return tile / columns * kPairRows + rank * kBlockRows;
    }
    __device__ __forceinline__ int part(int tile) const { return tile % columns * S::kParts; }
    static __device__ __forceinline__ int first() { return static_cast<int>(blockIdx.x / 2); }
    static __device__ __forceinline__ int step() { return static_cast<int>(gridDim.x / 2); }
};

// Parts that columns are.
__host__ __device__ inline int64_t ceil_parts(int64_t columns) { return (columns + kPartColumns - 1) / kPartColumns; }

// A part of 64 columns of the weights.
struct WeightPart {
    const TensorMap* map;
    int column;
};

// By one warp: brings the factors of this block's tiles. wait_for(row) waits until the rows from there on are there;
// part_at(part) says where a part of the columns is.
template <typename S, bool kInOut, typename WaitFor, typename PartAt>
__device__ __forceinline__ void fill_pair(const PairTiles<S>& tiles, const TensorMap& rows, int steps,
                                          const PairRing<S>& ring, int rank, int lane, const WaitFor& wait_for,
                                          const PartAt& part_at) {
    constexpr int kBoxBytes = kBoxRows * kRowBytes;
    RingPlace<S::kStages> at;
    WeightPart parts[S::kParts];
    const auto copy_right = [&](int stage, int step) {
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) {
            if constexpr (!kShares) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    copy_box(ring.right(stage) + (2 * i + half) * kBoxBytes, *parts[i].map,
                             kInOut ? step * kDepth + half * kBoxRows : parts[i].column + half * kBoxRows,
                             kInOut ? parts[i].column : step * kDepth, &ring.full[stage]);
                }
            } else if constexpr (kInOut) {
                copy_box_to_pair(ring.right(stage) + (2 * i + rank) * kBoxBytes, *parts[i].map,
                                 step * kDepth + rank * kBoxRows, parts[i].column, &ring.full[stage]);
            } else {
                copy_box_to_pair(ring.right(stage) + (2 * i + rank) * kBoxBytes, *parts[i].map,
                                 parts[i].column + rank * kBoxRows, step * kDepth, &ring.full[stage]);
            }
        }
    };
    const auto begin_stage = [&](const RingPlace<S::kStages>& place) {
        barrier_wait(&ring.empty[place.stage], place.parity ^ 1);
        if (lane == 0) barrier_expect(&ring.full[place.stage], S::kStageBytes);
    };
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.all; tile += tiles.step()) {
        const int row = tiles.row(tile, rank);
        const bool is_first = tile == tiles.first();
        const int ahead = is_first ? min(steps, S::kStages) : 0;
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) parts[i] = part_at(tiles.part(tile) + i);
        // The first weights are on their way while the first rows are waited for.
        RingPlace<S::kStages> early = at;
#pragma unroll 1
        for (int step = 0; step < ahead; ++step) {
            begin_stage(early);
            if (lane == 0) copy_right(early.stage, step);
            early.advance();
        }
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

// Both blocks may overwrite the stage.
template <typename S>
__device__ __forceinline__ void release_stage(const PairRing<S>& ring, int stage, int lane) {
    if (kShares && lane < 2) pair_barrier_arrive(&ring.empty[stage], lane);
    if (!kShares && lane == 0) barrier_arrive(&ring.empty[stage]);
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

// A group's products of one tile. The last one is still running, and its stage, which is returned, is not released yet.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ int multiply_tile(Fragment (&sums)[S::kColumns / 8], const PairRing<S>& ring,
                                             RingPlace<S::kStages>& at, int steps, int group, int lane) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(&ring.full[at.stage], at.parity);
        multiply_stage<Element, S, kInOut>(sums, ring.left(at.stage) + group * kUnitRows * kRowBytes,
                                           ring.right(at.stage), step == 0);
        wgmma_wait<1>();
        if (step > 0) release_stage(ring, before, lane);
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

struct PairMaps {
    TensorMap x;           // the normalised rows, or x
    TensorMap weights[3];  // of q, k, v
    TensorMap attended;
    TensorMap wo;
};

template <typename Element, int kColumns, bool kInOut>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kProjectThreads, 1)
    project(const __grid_constant__ BlockPlan plan, const __grid_constant__ PairMaps maps,
            const NormalRows<Element> normal, int64_t counters) {
    using S = PairShape<kColumns>;
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(S::kBytes + 1024);
    const PairRing<S> ring = {unaligned + (1024 - shared_address(unaligned) % 1024) % 1024,
                              memory.take<uint64_t>(S::kStages), memory.take<uint64_t>(S::kStages)};
    const BlockArgs& args = plan.args;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = uniform(thread / kWarpSize);
    const int lane = thread % kWarpSize;
    const int rank = pair_rank();
    const bool pre_ln = args.pre_ln != 0;
    const int steps = (static_cast<int>(args.width) + kDepth - 1) / kDepth;
    const int matrix_parts = static_cast<int>(plan.columns) / kPartColumns;
    const PairTiles<S> tiles(plan.rows, 3 * matrix_parts);

    let_next_launch_begin();
    ring.init(thread);
    fence_pair_barriers();
    pair_arrive();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kProjectThreads) + thread; i < counters;
         i += gridDim.x * static_cast<int64_t>(kProjectThreads)) {
        plan.counters[i] = 0;
    }
    // Parts beyond the last one are beyond v's columns: zeros.
    const auto matrix_of = [&](int part) { return min(part / matrix_parts, 2); };
    if (warp < kGroupWarps) give_registers_back<kNormalRegisters>();
    if (warp == 0) {
        pair_wait();
        fill_pair<S, kInOut>(
            tiles, maps.x, steps, ring, rank, lane,
            [&](int row) {
                if (pre_ln) wait_for_rows<Element>(plan, normal, row, lane);
            },
            [&](int part) -> WeightPart {
                const int matrix = matrix_of(part);
                return {&maps.weights[matrix], (part - matrix * matrix_parts) * kPartColumns};
            });
    } else if (warp < kGroupWarps) {
        const int units = (static_cast<int>(plan.rows) + kNormalUnit<Element> - 1) / kNormalUnit<Element>;
        if (pre_ln) {
#pragma unroll 1
            for (int unit = static_cast<int>((warp - 1) * gridDim.x + blockIdx.x); unit < units;
                 unit += static_cast<int>(kNormalWarps * gridDim.x)) {
                normalize_unit<Element>(plan, normal, unit, lane);
            }
        }
        pair_wait();
    } else {
        take_registers<kProjectRegisters>();
        pair_wait();
        const int multiply_warp = warp - kGroupWarps;
        unsigned char* staging = ring.staging(multiply_warp);
        RingPlace<S::kStages> at;
        Fragment sums[kColumns / 8];
#pragma unroll 1
        for (int tile = tiles.first(); tile < tiles.all; tile += tiles.step()) {
            const int last = multiply_tile<Element, S, kInOut>(sums, ring, at, steps, multiply_warp / kGroupWarps, lane);
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
            wgmma_wait<0>();
            release_stage(ring, last, lane);
            const int row = tiles.row(tile, rank) + multiply_warp * 16;
#pragma unroll
            for (int i = 0; i < S::kParts; ++i) {
                stage_part<Element, false>(staging, &sums[i * 8], bias[i], lane);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int own_row = row + j * 4 + lane / 8;
                    const uint4 part = load_vector<uint4>(row_part(staging, j, lane));
                    if (targets[i] != nullptr && own_row < plan.rows) {
                        store_vector(targets[i] + own_row * plan.columns + lane % 8 * 8, part);
                    }
                }
                __syncwarp();
            }
        }
    }
    // Neither block ends while the other may still write to its memory.
    pair_arrive();
    pair_wait();
}

// ---- Launch 2: the output projection ----

// In the plan's counters: two from which blocks take numbers; heads done of each unit of rows; projections done of each
// kBlockRows rows.
constexpr int kTickets = 2;
__device__ __forceinline__ uint32_t* heads_done(const BlockPlan& plan, int unit) {
    return plan.counters + kTickets + unit;
}
inline int64_t pair_counters(const BlockArgs& args) {
    return kTickets + args.batch * ceil_divide(args.tokens, kUnitRows) +
           ceil_divide(args.batch * args.tokens, kBlockRows);
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

template <typename S, bool kInOut>
__device__ __forceinline__ void fill_out(const BlockPlan& plan, const PairMaps& maps, const PairTiles<S>& tiles,
                                         const PairRing<S>& ring, int rank, int lane) {
    fill_pair<S, kInOut>(
        tiles, maps.attended, (static_cast<int>(plan.columns) + kDepth - 1) / kDepth, ring, rank, lane,
        [&](int row) { wait_for_heads(plan, row, lane); },
        [&](int part) -> WeightPart { return {&maps.wo, part * kPartColumns}; });
}

// By the warps that multiply: out = attended wo^T + bo + residual; where the result is normalised, by the block that
// ends its rows last.
template <typename Element, typename S, bool kInOut>
__device__ __forceinline__ void project_out(const BlockPlan& plan, const PairTiles<S>& tiles, const PairRing<S>& ring,
                                            uint32_t* is_last, int rank, int warp, int lane) {
    constexpr int kBarrier = 1;
    const BlockArgs& args = plan.args;
    const int width = static_cast<int>(args.width);
    const int rows = static_cast<int>(plan.rows);
    const int steps = (static_cast<int>(plan.columns) + kDepth - 1) / kDepth;
    const Element* bias = static_cast<const Element*>(args.bo);
    const Element* residual = static_cast<const Element*>(args.residual);
    unsigned char* staging = ring.staging(warp);
    RingPlace<S::kStages> at;
    Fragment sums[S::kColumns / 8];
#pragma unroll 1
    for (int tile = tiles.first(); tile < tiles.all; tile += tiles.step()) {
        const int last = multiply_tile<Element, S, kInOut>(sums, ring, at, steps, warp / kGroupWarps, lane);
        const int first_column = tiles.part(tile) * kPartColumns;
        const int first_row = tiles.row(tile, rank);
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
            out_offsets[j] = token_offset(args.out_strides, exists[j] ? row : 0, args.tokens);
            residual_offsets[j] = token_offset(args.residual_strides, exists[j] ? row : 0, args.tokens);
        }
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
        release_stage(ring, last, lane);
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
        if (args.pre_ln) continue;
        group_barrier(kBarrier, kMultiplyWarps * kWarpSize);
        if (warp == 0 && lane == 0) {
            uint32_t* done = heads_done(plan, static_cast<int>(args.batch * plan.row_blocks)) + first_row / kBlockRows;
            *is_last = first_row < rows && counter_add(done, 1) + 1 == static_cast<uint32_t>(tiles.columns);
        }
        group_barrier(kBarrier, kMultiplyWarps * kWarpSize);
        if (*is_last == 0) continue;
        normalize_out_rows<Element>(plan, first_row, min(kBlockRows, rows - first_row), warp, kMultiplyWarps, lane);
    }
}

// ---- The workspace ----

// The normalised rows lie where the attended ones will be, or behind the counters where those are narrower.
inline bool normal_rows_are_apart(const BlockArgs& args) {
    return args.pre_ln != 0 && args.width > args.num_heads * args.head_dim;
}
inline size_t marks_at(const BlockArgs& args) {
    return 4 * tensor_bytes(args) + plan_aligned(4 * static_cast<size_t>(pair_counters(args)));
}
inline size_t rows_at(const BlockArgs& args) { return marks_at(args) + plan_aligned(8 * static_cast<size_t>(normal_units(args))); }
inline size_t workspace_bytes(const BlockArgs& args) {
    const size_t rows = (args.dtype == TILERANK_FP32 ? 4 : 2) * static_cast<size_t>(args.batch * args.tokens * args.width);
    return rows_at(args) + (normal_rows_are_apart(args) ? plan_aligned(rows) : 0);
}

template <typename Element>
NormalRows<Element> normal_rows(const BlockPlan& plan, void* workspace) {
    unsigned char* memory = static_cast<unsigned char*>(workspace);
    void* rows = normal_rows_are_apart(plan.args) ? memory + rows_at(plan.args) : plan.attention.out;
    return {static_cast<Element*>(rows), reinterpret_cast<uint64_t*>(memory + marks_at(plan.args)), next_mark()};
}

// ---- Launching ----

// How many columns a call's tiles have: wide ones cost less memory traffic, narrow ones leave fewer pairs without
// work; whichever ends first, by what a round of tiles takes (in tenths of a microsecond at 1,024 inputs).
struct PairColumns {
    int project;
    int out;

    static PairColumns of(const BlockPlan& plan) {
        const auto cost = [&](int64_t parts, int columns, int round) {
            const int64_t tiles = ceil_divide(plan.rows, kPairRows) * ceil_divide(parts, columns / kPartColumns);
            return ceil_divide(tiles, most_pairs()) * round;
        };
        const auto cheapest = [&](int64_t parts, std::initializer_list<std::pair<int, int>> choices) {
            int best = 0;
            int64_t least = INT64_MAX;
            for (const auto& [columns, round] : choices) {
                if (cost(parts, columns, round) < least) least = cost(parts, columns, round), best = columns;
            }
            return best;
        };
        return {cheapest(3 * plan.columns / kPartColumns, {{256, 102}, {192, 78}, {128, 60}}),
                cheapest(ceil_parts(plan.args.width), {{256, 102}, {128, 60}, {64, 36}})};
    }
};

// weight_rows: rows of a weight's memory in a box.
template <bool kInOut>
tilerank_status describe_pairs(const char* name, const BlockPlan& plan, const void* rows, int64_t rows_stride,
                               PairMaps* maps, int weight_rows = kBoxRows) {
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
tilerank_status launch_project(const char* name, const BlockPlan& plan, const PairMaps& maps,
                               const NormalRows<Element>& normal, int64_t counters, void* stream) {
    using S = PairShape<kColumns>;
    const size_t shared_bytes = DynamicShared::bytes<unsigned char>(S::kBytes + 1024) +
                                2 * DynamicShared::bytes<uint64_t>(S::kStages);
    static_assert(S::kBytes + 1024 + 256 <= kMostShared);
    const int64_t pairs =
        std::min<int64_t>(most_pairs(), PairTiles<S>(plan.rows, 3 * plan.columns / kPartColumns).all);
    return launched(name, launch_pairs<false>(project<Element, kColumns, kInOut>, pairs, kProjectThreads, shared_bytes,
                                              stream, plan, maps, normal, counters));
}

}  // namespace block_pairs
}  // namespace tilerank
