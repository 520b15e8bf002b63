// Split groups: split_tf32 whose products with weights are wgmma's. The copy engine brings raw fp32; one group splits it in
// shared memory into two TF32 terms, two groups multiply, and what 32 inputs sum to is added outside of the matrix unit.
// Rows are normalised once, into memory, by warps that have nothing else to do. Attention is split_tf32's, by three teams.
// Prediction: at 4 x 1024 tokens of width 1024 900 us beside 1,260 unfused and 1,540 of split_tf32; at 4 x 128 130 us
//   beside 215 and 340: 35 GFLOP of products at 100 TFLOP/s instead of 35.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include "common/block_wide.cuh"
#include "common/block_split.cuh"

namespace tilerank {
namespace split_groups {

using namespace block_wide;

constexpr const char* kName = "split_groups";
constexpr int kTeams = 3;  // in the attention; in products two multiply and the third splits
constexpr int kThreads = (kTeams + 1) * kGroupThreads;
static_assert(block_split::kTeamThreads == kGroupThreads && block_split::kTeamRows == kUnitRows);

// Registers, in products of the first launch and in all of the second.
constexpr int kSumRegisters = 168;
constexpr int kSplitRegisters = 72;
constexpr int kNormalizeRegisters = 104;
constexpr int kTeamRegisters = 160;
constexpr int kCopyRegisters = 32;
static_assert(2 * kSumRegisters + kSplitRegisters + kNormalizeRegisters <= 4 * launch_registers(kThreads));
static_assert(kTeams * kTeamRegisters + kCopyRegisters <= 4 * launch_registers(kThreads));

// A tile is kBlockRows rows by kColumns columns. A stage has 32 inputs of both factors, high terms and low ones.
constexpr int kColumns = 128;
constexpr int kInputs = kRowBytes / 4;
constexpr int kFactorBytes = kBlockRows * kRowBytes;  // rows and columns are as many
static_assert(kColumns == kBlockRows);
constexpr int kStageBytes = 4 * kFactorBytes;
constexpr int kStages = 3;
constexpr int kRingBytes = kStages * kStageBytes;

struct Ring {
    unsigned char* memory;
    uint64_t* arrived;  // raw factors
    uint64_t* split;
    uint64_t* empty;

    __device__ __forceinline__ void init(int thread) const {
        if (thread < kStages) {
            barrier_init(&arrived[thread], 1);
            barrier_init(&split[thread], kGroupWarps);
            barrier_init(&empty[thread], 2 * kGroupWarps);
        }
    }
    // Both first raw, then high terms.
    __device__ __forceinline__ unsigned char* left(int stage) const { return memory + stage * kStageBytes; }
    __device__ __forceinline__ unsigned char* right(int stage) const { return left(stage) + kFactorBytes; }
};
// From a factor's high terms to its low ones.
constexpr int kLowAt = 2 * kFactorBytes;

__device__ __forceinline__ int steps_of(int64_t inputs) { return static_cast<int>((inputs + kInputs - 1) / kInputs); }

// By one warp: brings a tile's factors; the left one from first_row on, the right one from first_column on.
template <bool kInOut>
__device__ __forceinline__ void fill_tile(const Ring& ring, RingPlace<kStages>& at, const TensorMap& rows,
                                          const TensorMap& weights, int first_row, int first_column, int steps,
                                          int lane) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(&ring.empty[at.stage], at.parity ^ 1);
        if (lane == 0) {
            barrier_expect(&ring.arrived[at.stage], 2 * kFactorBytes);
            copy_box(ring.left(at.stage), rows, first_row, step * kInputs, &ring.arrived[at.stage]);
            if constexpr (kInOut) {  // parts of 32 outputs, in rows of inputs
#pragma unroll
                for (int part = 0; part < kColumns / kInputs; ++part) {
                    copy_box(ring.right(at.stage) + part * kInputs * kRowBytes, weights, step * kInputs,
                             first_column + part * kInputs, &ring.arrived[at.stage]);
                }
            } else {
                copy_box(ring.right(at.stage), weights, first_column, step * kInputs, &ring.arrived[at.stage]);
            }
        }
        at.advance();
    }
    __syncwarp();
}

// Four numbers as terms: the high ones to where they are for, the low ones behind.
__device__ __forceinline__ void store_terms(unsigned char* high_at, const float (&values)[4]) {
    uint32_t high[4];
    uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Terms terms = split_terms(values[i]);
        high[i] = terms.high, low[i] = terms.low;
    }
    store_vector(high_at, uint4{high[0], high[1], high[2], high[3]});
    store_vector(high_at + kLowAt, uint4{low[0], low[1], low[2], low[3]});
}

// By one group: splits a tile's factors as they arrive. Weights that lie in rows of inputs are turned on the way.
template <bool kInOut>
__device__ __forceinline__ void split_tile(const Ring& ring, RingPlace<kStages>& at, int steps, int thread) {
    const int lane = thread % kWarpSize;
    const int warp = thread / kWarpSize;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(&ring.arrived[at.stage], at.parity);
        constexpr int kBytes = kInOut ? kFactorBytes : 2 * kFactorBytes;  // that stay where they lie
        unsigned char* left = ring.left(at.stage);
#pragma unroll 4
        for (int byte = thread * 16; byte < kBytes; byte += kGroupThreads * 16) {
            const float4 raw = load_vector<float4>(left + byte);
            store_terms(left + byte, {raw.x, raw.y, raw.z, raw.w});
        }
        if constexpr (kInOut) {
            // A lane has an input; a warp a part of the outputs, four at a time.
            constexpr int kFours = kInputs / 4;
            static_assert(kColumns / kInputs == kGroupWarps);
            unsigned char* right = ring.right(at.stage);
            unsigned char* part = right + warp * kInputs * kRowBytes;
            float4 raw[kFours];
#pragma unroll
            for (int four = 0; four < kFours; ++four) {
                raw[four] = load_vector<float4>(part + swizzled_offset<kRowBytes>(lane, four * 16));
            }
            __syncwarp();  // a part of outputs takes the place of itself
#pragma unroll
            for (int four = 0; four < kFours; ++four) {
                const float values[4] = {raw[four].x, raw[four].y, raw[four].z, raw[four].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Terms terms = split_terms(values[i]);
                    unsigned char* to = part + swizzled_offset<kRowBytes>(four * 4 + i, lane * 4);
                    store_vector(to, terms.high);
                    store_vector(to + kLowAt, terms.low);
                }
            }
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring.split[at.stage]);
        at.advance();
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILERANK_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define TILERANK_HOPPER(...) __trap()
#endif
#define TILERANK_SUMS(block) "+f"(block[0]), "+f"(block[1]), "+f"(block[2]), "+f"(block[3])

// sums (64 x 128) = a b, or += a b where add_flag is not 0, of TF32: 8 inputs of both, rows of inputs in shared memory.
__device__ __forceinline__ void wgmma_tf32_k8(Fragment (&sums)[kColumns / 8], uint64_t a, uint64_t b, int add_flag) {
    TILERANK_HOPPER(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, 1, 1;\n}\n"
        : TILERANK_SUMS(sums[0]), TILERANK_SUMS(sums[1]), TILERANK_SUMS(sums[2]), TILERANK_SUMS(sums[3]),
          TILERANK_SUMS(sums[4]), TILERANK_SUMS(sums[5]), TILERANK_SUMS(sums[6]), TILERANK_SUMS(sums[7]),
          TILERANK_SUMS(sums[8]), TILERANK_SUMS(sums[9]), TILERANK_SUMS(sums[10]), TILERANK_SUMS(sums[11]),
          TILERANK_SUMS(sums[12]), TILERANK_SUMS(sums[13]), TILERANK_SUMS(sums[14]), TILERANK_SUMS(sums[15])
        : "l"(a), "l"(b), "r"(add_flag));
}

#undef TILERANK_HOPPER
#undef TILERANK_SUMS

// A group's 64 rows of a tile. Small products come first. What a step sums to is added outside of the matrix unit, which
// rounds towards zero.
__device__ __forceinline__ void multiply_tile(Fragment (&sums)[kColumns / 8], const Ring& ring, RingPlace<kStages>& at,
                                              int steps, int group, int lane) {
#pragma unroll
    for (int block = 0; block < kColumns / 8; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[block][i] = 0.0f;
    }
    Fragment of_step[kColumns / 8];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(&ring.split[at.stage], at.parity);
        const uint32_t left = shared_address(ring.left(at.stage) + group * kUnitRows * kRowBytes) / 16;
        const uint32_t right = shared_address(ring.right(at.stage)) / 16;
        constexpr uint32_t kLow = kLowAt / 16;
        wgmma_fence();
#pragma unroll
        for (int product = 0; product < 3; ++product) {
            const uint32_t a = left + (product == 0 ? kLow : 0);
            const uint32_t b = right + (product == 1 ? kLow : 0);
#pragma unroll
            for (int depth = 0; depth < kInputs / 8; ++depth) {
                wgmma_tf32_k8(of_step, tile_descriptor<kRowBytes>(a + depth * 2, 1),
                              tile_descriptor<kRowBytes>(b + depth * 2, 1), product + depth > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&ring.empty[at.stage]);
#pragma unroll
        for (int block = 0; block < kColumns / 8; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[block][i] += of_step[block][i];
        }
        at.advance();
    }
}

// Calls use(row, column, pair) for each two neighbouring sums, positions within the tile.
template <typename Use>
__device__ __forceinline__ void each_pair(const Fragment (&sums)[kColumns / 8], int warp, int lane, const Use& use) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kColumns / 8; ++block) {
            use(warp * 16 + half * 8 + lane / 4, block * 8 + lane % 4 * 2,
                float2{sums[block][half * 2], sums[block][half * 2 + 1]});
        }
    }
}

__device__ __forceinline__ float2 sum_of(const float2& a, const float2& b) { return {a.x + b.x, a.y + b.y}; }

// ---- Launch 1: q, k, v = normalised x times the weights ----

__host__ __device__ inline int64_t column_tiles(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
__host__ __device__ inline int64_t row_tiles(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

template <bool kInOut>
__global__ void __launch_bounds__(kThreads, 1)
    project(const __grid_constant__ BlockPlan plan, const __grid_constant__ WideMaps maps,
            const NormalRows<float> normal, int64_t counters) {
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(kRingBytes + 1024);
    const Ring ring = {unaligned + (1024 - shared_address(unaligned) % 1024) % 1024, memory.take<uint64_t>(kStages),
                       memory.take<uint64_t>(kStages), memory.take<uint64_t>(kStages)};
    const BlockArgs& args = plan.args;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = uniform(thread / kWarpSize);
    const int group = warp / kGroupWarps;
    const int lane = thread % kWarpSize;
    const bool pre_ln = args.pre_ln != 0;
    const int steps = steps_of(args.width);
    const int matrix_tiles = static_cast<int>(column_tiles(plan.columns));
    const int all = static_cast<int>(row_tiles(plan.rows)) * 3 * matrix_tiles;

    let_next_launch_begin();
    ring.init(thread);
    fence_async_proxy();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + thread; i < counters;
         i += gridDim.x * static_cast<int64_t>(kThreads)) {
        plan.counters[i] = 0;
    }
    __syncthreads();
    const auto each_tile = [&](const auto& use) {  // use(first row, matrix, first column)
#pragma unroll 1
        for (int tile = static_cast<int>(blockIdx.x); tile < all; tile += static_cast<int>(gridDim.x)) {
            const int column = tile % (3 * matrix_tiles);
            use(tile / (3 * matrix_tiles) * kBlockRows, column / matrix_tiles, column % matrix_tiles * kColumns);
        }
    };
    RingPlace<kStages> at;
    if (group < 2) {
        take_registers<kSumRegisters>();
        Fragment sums[kColumns / 8];
        each_tile([&](int first_row, int matrix, int first_column) {
            multiply_tile(sums, ring, at, steps, group, lane);
            const float* bias = static_cast<const float*>(matrix == 0 ? args.bq : matrix == 1 ? args.bk : args.bv);
            float* target = static_cast<float*>(const_cast<void*>(matrix == 0   ? plan.attention.q
                                                                  : matrix == 1 ? plan.attention.k
                                                                                : plan.attention.v));
            each_pair(sums, warp, lane, [&](int row, int column, float2 pair) {
                row += first_row, column += first_column;
                if (row >= plan.rows || column >= plan.columns) return;
                if (bias != nullptr) pair = sum_of(pair, load_vector<float2>(bias + column));
                store_vector(target + row * plan.columns + column, pair);
            });
        });
    } else if (group == 2) {
        give_registers_back<kSplitRegisters>();
        each_tile([&](int, int, int) { split_tile<kInOut>(ring, at, steps, thread % kGroupThreads); });
    } else {
        give_registers_back<kNormalizeRegisters>();
        if (warp % kGroupWarps == 0) {
            each_tile([&](int first_row, int matrix, int first_column) {
                if (pre_ln) wait_for_rows<float>(plan, normal, first_row, lane);
                __syncwarp();
                fill_tile<kInOut>(ring, at, maps.x, maps.weights[matrix], first_row, first_column, steps, lane);
            });
        } else if (pre_ln) {
            prefetch_factors<float>(args, lane);
            const int units = static_cast<int>((plan.rows + kNormalUnit<float> - 1) / kNormalUnit<float>);
#pragma unroll 1
            for (int unit = static_cast<int>((warp % kGroupWarps - 1) * gridDim.x + blockIdx.x); unit < units;
                 unit += static_cast<int>(kNormalWarps * gridDim.x)) {
                normalize_unit<float>(plan, normal, unit, lane);
            }
        }
    }
}

// ---- Launch 2: attention and the output projection ----

template <int D>
constexpr int kTeamBytes = (static_cast<int>(sizeof(block_split::KeyStages<D>)) + 127) / 128 * 128;
template <int D>
constexpr int kMemoryBytes = kTeams * kTeamBytes<D> > kRingBytes ? kTeams * kTeamBytes<D> : kRingBytes;

// By one team: takes numbers of the attention until there are none. Numbers are in the order sequence, unit, head, the
// head fastest; causal units differ in length: the longest come first.
template <int D>
__device__ __forceinline__ void attend_units(const BlockPlan& plan, block_split::KeyStages<D>& tiles, uint32_t* slot,
                                             float factor, int team, int thread) {
    const int64_t heads = plan.args.num_heads;
    const int64_t all = plan.args.batch * plan.row_blocks * heads;
    const auto sync = [&] { group_barrier(1 + team, kGroupThreads); };
#pragma unroll 1
    for (;;) {
        sync();  // the number before has been read
        if (thread == 0) *slot = static_cast<uint32_t>(take_ticket(plan.counters));
        sync();
        const int64_t number = *slot;
        if (number >= all) return;
        const int64_t sequence = number / heads / plan.row_blocks;
        const int64_t place = number / heads % plan.row_blocks;
        const int64_t unit = plan.args.causal ? plan.row_blocks - 1 - place : place;
        block_split::attend<D>(plan, tiles, sequence, unit, number % heads, factor, thread, sync);
        fence_async_proxy_global();
        __syncwarp();
        if (thread % kWarpSize == 0) {
            count_done(heads_done(plan, static_cast<int>(sequence * plan.row_blocks + unit)));
        }
    }
}

template <int D, bool kInOut>
__global__ void __launch_bounds__(kThreads, 1)
    attend_and_project(const __grid_constant__ BlockPlan plan, const __grid_constant__ WideMaps maps,
                       const NormalRows<float> normal, int units, float factor) {
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(kMemoryBytes<D> + 1024);
    unsigned char* aligned = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const Ring ring = {aligned, memory.take<uint64_t>(kStages), memory.take<uint64_t>(kStages),
                       memory.take<uint64_t>(kStages)};
    uint32_t* numbers = memory.take<uint32_t>(kTeams);  // that the teams took
    uint64_t* left = memory.take<uint64_t>(1);  // the attention, by the teams
    const BlockArgs& args = plan.args;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = uniform(thread / kWarpSize);
    const int group = warp / kGroupWarps;
    const int lane = thread % kWarpSize;
    const int width = static_cast<int>(args.width);
    const int rows = static_cast<int>(plan.rows);
    const int steps = steps_of(plan.columns);
    const int columns = static_cast<int>(column_tiles(width));
    const int all = static_cast<int>(row_tiles(rows)) * columns;

    ring.init(thread);
    if (thread == 0) barrier_init(left, kTeams * kGroupThreads);
    prefetch_weights<float, kInOut>(plan);
    fence_async_proxy();
    __syncthreads();
    wait_for_launch_before();
    for (int unit = static_cast<int>(blockIdx.x) * kThreads + thread; unit < units;
         unit += static_cast<int>(gridDim.x) * kThreads) {
        normal.done[unit] = 0;
    }
    const auto each_tile = [&](const auto& use) {
#pragma unroll 1
        for (int tile = static_cast<int>(blockIdx.x); tile < all; tile += static_cast<int>(gridDim.x)) {
            use(tile / columns * kBlockRows, tile % columns * kColumns);
        }
    };
    RingPlace<kStages> at;
    if (group == kTeams) {
        give_registers_back<kCopyRegisters>();
        if (warp > kTeams * kGroupWarps) return;
        barrier_wait(left, 0);  // the attention's memory is free for the projection
        each_tile([&](int first_row, int first_column) {
            wait_for_heads(plan, first_row, lane);
            __syncwarp();
            fill_tile<kInOut>(ring, at, maps.attended, maps.wo, first_row, first_column, steps, lane);
        });
        return;
    }
    take_registers<kTeamRegisters>();
    attend_units<D>(plan, *reinterpret_cast<block_split::KeyStages<D>*>(aligned + group * kTeamBytes<D>),
                    numbers + group, factor, group, thread % kGroupThreads);
    fence_async_proxy();
    barrier_meet(left, 0);
    if (group == 2) {
        each_tile([&](int, int) { split_tile<kInOut>(ring, at, steps, thread % kGroupThreads); });
    } else {
        Fragment sums[kColumns / 8];
        each_tile([&](int first_row, int first_column) {
            multiply_tile(sums, ring, at, steps, group, lane);
            const float* bias = static_cast<const float*>(args.bo);
            const float* residual = static_cast<const float*>(args.residual);
            each_pair(sums, warp, lane, [&](int row, int column, float2 pair) {
                row += first_row, column += first_column;
                if (row >= rows || column >= width) return;
                if (bias != nullptr) pair = sum_of(pair, load_vector<float2>(bias + column));
                if (residual != nullptr) {
                    const int64_t offset = token_offset(args.residual_strides, row, args.tokens);
                    pair = sum_of(pair, load_vector<float2>(residual + offset + column));
                }
                store_vector(static_cast<float*>(args.out) + token_offset(args.out_strides, row, args.tokens) + column,
                             pair);
            });
            // Where the result is normalised, by the warp that ends its rows last.
            const int own_row = first_row + warp * kWarpRows;
            if (args.pre_ln || own_row >= rows) return;
            __syncwarp();
            const int before = lane == 0 ? static_cast<int>(counter_add(rows_done(plan, own_row), 1)) : 0;
            if (uniform(before) + 1 < columns) return;
            __syncwarp();
            normalize_out_rows<float>(plan, own_row, min(kWarpRows, rows - own_row), 0, 1, lane);
        });
    }
}

// ---- Launching ----

template <int D, bool kInOut>
tilerank_status launch_typed(const BlockPlan& plan, void* workspace, void* stream) {
    const BlockArgs& args = plan.args;
    const NormalRows<float> normal = normal_rows<float>(plan, workspace);
    const void* x = args.pre_ln ? normal.rows : args.x;
    WideMaps maps;
    tilerank_status status = describe_wide<kInOut>(kName, plan, x, args.pre_ln ? args.width : args.x_strides[1], &maps,
                                                    kInOut ? kInputs : kColumns);
    if (status != TILERANK_OK) return status;
    const int64_t multis = std::max(multiprocessors(), 1);
    constexpr size_t kBarriers = 3 * DynamicShared::bytes<uint64_t>(kStages) +
                                 DynamicShared::bytes<uint32_t>(kTeams) + DynamicShared::bytes<uint64_t>(1);
    constexpr size_t kFirstBytes = DynamicShared::bytes<unsigned char>(kRingBytes + 1024) + kBarriers;
    constexpr size_t kSecondBytes = DynamicShared::bytes<unsigned char>(kMemoryBytes<D> + 1024) + kBarriers;
    static_assert(kSecondBytes <= kMostShared);
    const int64_t first = std::min(multis, row_tiles(plan.rows) * 3 * column_tiles(plan.columns));
    status = launched(kName, launch(project<kInOut>, dim3(static_cast<unsigned>(first)), dim3(kThreads), kFirstBytes,
                                    stream, plan, maps, normal, wide_counters(args)));
    if (status != TILERANK_OK) return status;
    const int64_t attention = ceil_divide(args.batch * plan.row_blocks * args.num_heads, kTeams);
    const int64_t second = std::min(multis, std::max(attention, row_tiles(plan.rows) * column_tiles(args.width)));
    return launched(kName, launch_dependent(attend_and_project<D, kInOut>, dim3(static_cast<unsigned>(second)),
                                            dim3(kThreads), kSecondBytes, stream, plan, maps, normal,
                                            static_cast<int>(normal_units(args)), scale_log2(plan.attention)));
}

}  // namespace split_groups

size_t block_split_groups_workspace(const BlockArgs& args) { return block_wide::workspace_bytes(args); }

tilerank_status block_split_groups(const BlockArgs& args, void* workspace, void* stream) {
    using namespace split_groups;
    const BlockPlan plan = make_plan(args, workspace, kUnitRows);
    const tilerank_status status = check_call(kName, plan);
    if (status != TILERANK_OK) return status;
    const bool in_out = args.weight_layout == TILERANK_WEIGHTS_IN_OUT;
    if (args.head_dim == 32) {
        return in_out ? launch_typed<32, true>(plan, workspace, stream)
                      : launch_typed<32, false>(plan, workspace, stream);
    }
    return in_out ? launch_typed<64, true>(plan, workspace, stream)
                  : launch_typed<64, false>(plan, workspace, stream);
}

}  // namespace tilerank
