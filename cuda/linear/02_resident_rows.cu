// A block's 128 rows of x stay in shared memory while the weights stream past them through a ring, each part fetched
// once for the two blocks of a cluster. Two warpgroups take turns: one multiplies 128 x 128 while the other ends its own
// (bias, GELU, stores).
// Prediction: 26 us for 16,830 rows, 384 -> 1536 with GELU, from 79 as two kernels: 3,072 cycles a tile on the tensor
//   cores, 12 tiles a block, 21 us; start and end 5. 384 -> 1152: 20 us from 33.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/activation.cuh"
#include "common/linear.h"
#include "common/mma16.cuh"
#include "common/tma.cuh"

namespace tilerank {
namespace resident_rows {

constexpr int kTile = 128;        // rows and columns of a tile
constexpr int kPartColumns = 64;  // of depth
constexpr int kPartBytes = kTile * kPartColumns * 2;  // 64 columns of 128 rows, of x or of the weights
constexpr int kSharedBytes = 227 * 1024;
constexpr int kMostParts = 8;  // of x: depth up to 512
constexpr int kThreads = 3 * 128;
constexpr int kWarps = 4;  // of a group

// Parts of the ring beside x's.
__host__ __device__ constexpr int ring_parts(int parts) { return (kSharedBytes - 2048) / kPartBytes - parts; }

struct Problem {
    CUtensorMap x;
    CUtensorMap weight;
    const void* bias;
    void* out;
    int64_t out_stride;
    int rows;
    int row_pairs;     // pairs of tiles, one a cluster's block each
    int column_tiles;
    int parts;  // of depth
};

// Units are (row pair, column tile), column tiles first; a cluster takes a range of them.
struct Range {
    int begin;
    int end;
};
__device__ __forceinline__ Range units_of(const Problem& problem) {
    const int64_t units = static_cast<int64_t>(problem.row_pairs) * problem.column_tiles;
    const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
    return {static_cast<int>(units * cluster / clusters), static_cast<int>(units * (cluster + 1) / clusters)};
}

struct Barriers {
    uint64_t* full;
    uint64_t* empty;
    uint64_t* x_full;
    uint64_t* x_empty;
    uint64_t* turns;  // of each group to multiply
};

__device__ __forceinline__ void load(const Problem& problem, unsigned char* x, unsigned char* ring,
                                     const Barriers& barriers, int ring_size, int rank) {
    const Range range = units_of(problem);
    int pair = -1, loads = 0, slot = 0, turn = 0;
    for (int unit = range.begin; unit < range.end; ++unit) {
        const int tile = unit % problem.column_tiles;
        if (unit / problem.column_tiles != pair) {
            pair = unit / problem.column_tiles;
            if (loads > 0) barrier_wait(barriers.x_empty, (loads - 1) & 1);
            ++loads;
            barrier_expect(barriers.x_full, problem.parts * kPartBytes);
            for (int part = 0; part < problem.parts; ++part) {
                copy_box(x + part * kPartBytes, &problem.x, barriers.x_full, part * kPartColumns,
                         (pair * 2 + rank) * kTile);
            }
        }
        for (int part = 0; part < problem.parts; ++part) {
            if (turn > 0) barrier_wait(&barriers.empty[slot], (turn - 1) & 1);
            barrier_expect(&barriers.full[slot], kPartBytes);
            copy_box_to_cluster(ring + slot * kPartBytes + rank * (kPartBytes / 2), &problem.weight,
                                &barriers.full[slot], part * kPartColumns, tile * kTile + rank * (kTile / 2), 3);
            if (++slot == ring_size) slot = 0, ++turn;
        }
    }
}

template <typename Element, bool kGelu>
__device__ __forceinline__ void compute(const Problem& problem, unsigned char* x, unsigned char* ring,
                                        const Barriers& barriers, int ring_size, int rank, int group, int warp,
                                        int lane) {
    const Range range = units_of(problem);
    const uint32_t x_begin = shared_address(x) / 16, ring_begin = shared_address(ring) / 16;
    constexpr int kPart = kPartBytes / 16;
    int pair = -1, loads = 0, slot = 0, turn = 0;
    for (int unit = range.begin; unit < range.end; ++unit) {
        if (unit / problem.column_tiles != pair) {
            if (pair >= 0 && lane == 0) barrier_arrive(barriers.x_empty);
            pair = unit / problem.column_tiles;
            // Also by the group that has no unit here: a barrier tells a phase only from its neighbours.
            barrier_wait(barriers.x_full, loads++ & 1);
        }
        if (((unit - range.begin) & 1) != group) {
            slot += problem.parts;
            if (slot >= ring_size) slot -= ring_size, ++turn;
            continue;
        }
        const int first_row = (pair * 2 + rank) * kTile, first_column = unit % problem.column_tiles * kTile;
        Fragment sums[2][kTile / 8];
        barrier_wait(&barriers.turns[group], (unit - range.begin) / 2 + group + 1 & 1);
        int last_slot = 0;
        for (int part = 0; part < problem.parts; ++part) {
            barrier_wait(&barriers.full[slot], turn & 1);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int step = 0; step < kPartColumns / 16; ++step) {
                    wgmma_shared_k16<Element, kTile>(
                        sums[half], tile_descriptor<128>(x_begin + part * kPart + half * (kPart / 2) + step * 2, 1),
                        tile_descriptor<128>(ring_begin + slot * kPart + step * 2, 1), part > 0 || step > 0);
                }
            }
            wgmma_commit();
            if (part > 0) {
                wgmma_wait<1>();
                if (lane < 2) barrier_arrive_at(&barriers.empty[last_slot], lane);
            }
            last_slot = slot;
            if (++slot == ring_size) slot = 0, ++turn;
        }
        if (lane == 0) barrier_arrive(&barriers.turns[1 - group]);
        wgmma_wait<0>();
        if (lane < 2) barrier_arrive_at(&barriers.empty[last_slot], lane);

        // A quad's four threads have eight neighbouring columns of every 32 each: see TILERANK_FORMAT_INTERLEAVED.
        const int column = first_column + lane % 4 * 8;
        const Element* bias = static_cast<const Element*>(problem.bias);
#pragma unroll
        for (int block = 0; block < kTile / 32; ++block) {
            float bias8[8] = {};
            if (bias != nullptr) {
                const uint4 packed = load_vector<uint4>(bias + column + block * 32);
                const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 both = unpack16<Element>(words[i]);
                    bias8[2 * i] = both.x, bias8[2 * i + 1] = both.y;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float first = sums[half][block * 4 + i][low * 2] + bias8[2 * i];
                        float second = sums[half][block * 4 + i][low * 2 + 1] + bias8[2 * i + 1];
                        if (kGelu) first = gelu_approx(first), second = gelu_approx(second);
                        words[i] = pack16<Element>(first, second);
                    }
                    const int row = first_row + half * 64 + warp * 16 + low * 8 + lane / 4;
                    if (row < problem.rows) {
                        store_vector(static_cast<Element*>(problem.out) + row * problem.out_stride + column + block * 32,
                                     uint4{words[0], words[1], words[2], words[3]});
                    }
                }
            }
        }
    }
}

template <typename Element, bool kGelu>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    DynamicShared memory;
    unsigned char* unaligned = memory.take<unsigned char>(kSharedBytes - 1024);
    uint64_t* barriers_begin = memory.take<uint64_t>(32);
    unsigned char* x = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const int ring_size = ring_parts(problem.parts);
    unsigned char* ring = x + problem.parts * kPartBytes;
    const Barriers barriers = {barriers_begin, barriers_begin + 14, barriers_begin + 28, barriers_begin + 29,
                              barriers_begin + 30};
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < ring_size; ++slot) {
            barrier_init(&barriers.full[slot], 1);
            barrier_init(&barriers.empty[slot], 2 * kWarps);
        }
        barrier_init(barriers.x_full, 1);
        barrier_init(barriers.x_empty, 2 * kWarps);
        barrier_init(&barriers.turns[0], kWarps);
        barrier_init(&barriers.turns[1], kWarps);
        fence_barrier_init();
    }
    cluster_sync();
    if (warp < kWarps) {
        give_registers_back<40>();
        if (threadIdx.x == 0) load(problem, x, ring, barriers, ring_size, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        compute<Element, kGelu>(problem, x, ring, barriers, ring_size, rank, warp / kWarps - 1, warp % kWarps, lane);
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

tilerank_status check_served(const LinearArgs& args) {
    if (args.gamma != nullptr) return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: gamma is given; it serves: NULL");
    if (args.weight_format != TILERANK_FORMAT_INTERLEAVED) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: weight_format is %d; it serves: 1 (interleaved)",
                      args.weight_format);
    }
    if (args.columns % kTile != 0) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: columns is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.columns), kTile);
    }
    if (args.depth % kPartColumns != 0 || args.depth > kMostParts * kPartColumns) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: depth is %lld; it serves: multiples of %d up to %d",
                      static_cast<long long>(args.depth), kPartColumns, kMostParts * kPartColumns);
    }
    // Units and rows are counted in 32 bits.
    if (args.rows / (2 * kTile) * (args.columns / kTile) > INT32_MAX / 2 || args.rows > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: rows is %lld, too many for %lld columns",
                      static_cast<long long>(args.rows), static_cast<long long>(args.columns));
    }
    if (!aligned16(args.x, args.x_stride) || !aligned16(args.weight, args.weight_stride) ||
        !aligned16(args.out, args.out_stride) || !aligned16(args.bias, 0)) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: a row does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

template <typename Element>
tilerank_status launch_typed(const LinearArgs& args, void* stream) {
    const tilerank_status served = check_served(args);
    if (served != TILERANK_OK) return served;
    Problem problem{};
    if (!encode_tiles(&problem.x, args.x, args.dtype, args.rows, args.depth, args.x_stride, kTile) ||
        !encode_tiles(&problem.weight, args.weight, args.dtype, args.columns, args.depth, args.weight_stride, kTile / 2)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant resident_rows: the driver refused a tensor map");
    }
    problem.bias = args.bias, problem.out = args.out, problem.out_stride = args.out_stride;
    problem.rows = static_cast<int>(args.rows);
    problem.row_pairs = static_cast<int>((args.rows + 2 * kTile - 1) / (2 * kTile));
    problem.column_tiles = static_cast<int>(args.columns / kTile);
    problem.parts = static_cast<int>(args.depth / kPartColumns);
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int64_t units = static_cast<int64_t>(problem.row_pairs) * problem.column_tiles;
    const int64_t clusters = units < processors / 2 ? units : processors / 2;
    const auto function = args.activation == TILERANK_ACTIVATION_GELU ? kernel<Element, true> : kernel<Element, false>;
    const int error = launch(function, dim3(static_cast<unsigned>(2 * clusters)), dim3(kThreads),
                             DynamicShared::bytes<unsigned char>(kSharedBytes - 1024) + DynamicShared::bytes<uint64_t>(32),
                             stream, problem);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant resident_rows: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace resident_rows

tilerank_status linear_resident_rows(const LinearArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? resident_rows::launch_typed<__half>(args, stream)
                                       : resident_rows::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
