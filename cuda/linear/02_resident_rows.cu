// Rows of x stay in registers, 64 a warpgroup, while the weights stream past them through a ring, each part fetched once
// for the two blocks of a cluster. Of the factors only the weights are read from shared memory: with both there, products
// and copies want more than it gives. Groups multiply in turn: one ends its tile (bias, GELU, stores) meanwhile.
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
constexpr int kPartBytes = kTile * kPartColumns * 2;
constexpr int kRing = 14;  // parts of the weights
constexpr int kSharedBytes = kRing * kPartBytes + 2 * kRing * 8 + 2 * 8;
constexpr int kThreads = 3 * 128;
constexpr int kWarps = 4;  // of a group

struct Problem {
    CUtensorMap weight;
    const void* x;
    const void* bias;
    void* out;
    int64_t x_stride;
    int64_t out_stride;
    int rows;
    int row_pairs;     // pairs of tiles, one a cluster's block each
    int column_tiles;
    bool overlap;
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

template <int kParts>
__device__ __forceinline__ void load(const Problem& problem, unsigned char* ring, uint64_t* full, uint64_t* empty,
                                     int rank) {
    const Range range = units_of(problem);
    int slot = 0, turn = 0;
    for (int unit = range.begin; unit < range.end; ++unit) {
        const int row = unit % problem.column_tiles * kTile + rank * (kTile / 2);
        for (int part = 0; part < kParts; ++part) {
            if (turn > 0) barrier_wait(&empty[slot], (turn - 1) & 1);
            barrier_expect(&full[slot], kPartBytes);
            copy_box_to_cluster(ring + slot * kPartBytes + rank * (kPartBytes / 2), &problem.weight, &full[slot],
                                part * kPartColumns, row, 3);
            if (++slot == kRing) slot = 0, ++turn;
        }
    }
}

template <typename Element, int kParts, bool kGelu>
__device__ __forceinline__ void compute(const Problem& problem, const unsigned char* ring, uint64_t* full,
                                        uint64_t* empty, uint64_t* turns, int rank, int group, int warp, int lane) {
    const Range range = units_of(problem);
    if (problem.overlap) wait_for_previous();
    const uint32_t ring_begin = shared_address(ring) / 16;
    int pair = -1, slot = 0, turn = 0, first_row = 0;
    uint32_t x[kParts * 4][4];  // the fragments of each step: see TILERANK_FORMAT_INTERLEAVED
    for (int unit = range.begin; unit < range.end; ++unit) {
        if (unit / problem.column_tiles != pair) {
            pair = unit / problem.column_tiles;
            first_row = (pair * 2 + rank) * kTile + group * 64 + warp * 16 + lane / 4;
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                const int row = first_row + low * 8;
                const Element* source =
                    static_cast<const Element*>(problem.x) + min(row, problem.rows - 1) * problem.x_stride + lane % 4 * 8;
#pragma unroll
                for (int step = 0; step < kParts * 4; step += 2) {
                    const uint4 eight = load_vector<uint4>(source + step * 16);
                    x[step][low] = eight.x, x[step][low + 2] = eight.y;
                    x[step + 1][low] = eight.z, x[step + 1][low + 2] = eight.w;
                }
            }
        }
        const int column = unit % problem.column_tiles * kTile + lane % 4 * 8;
        // Before the product: behind it, each load would wait for the stores in front of it.
        uint4 bias[kTile / 32] = {};
        if (problem.bias != nullptr) {
#pragma unroll
            for (int block = 0; block < kTile / 32; ++block) {
                bias[block] = load_vector<uint4>(static_cast<const Element*>(problem.bias) + column + block * 32);
            }
        }
        Fragment sums[kTile / 8];
        int last_slot = 0;
        barrier_wait(&turns[group], (unit - range.begin + group + 1) & 1);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            barrier_wait(&full[slot], turn & 1);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kPartColumns / 16; ++step) {
                wgmma_k16<Element, kTile, false>(
                    sums, x[part * 4 + step], tile_descriptor<128>(ring_begin + slot * (kPartBytes / 16) + step * 2, 1),
                    part > 0 || step > 0);
            }
            wgmma_commit();
            if (part > 0) {
                wgmma_wait<1>();
                if (lane < 2) barrier_arrive_at(&empty[last_slot], lane);
            }
            last_slot = slot;
            if (++slot == kRing) slot = 0, ++turn;
        }
        if (lane == 0) barrier_arrive(&turns[1 - group]);
        wgmma_wait<0>();
        if (lane < 2) barrier_arrive_at(&empty[last_slot], lane);

        // A quad's four threads have eight neighbouring columns of every 32 each: see TILERANK_FORMAT_INTERLEAVED.
#pragma unroll
        for (int block = 0; block < kTile / 32; ++block) {
            const uint32_t terms[4] = {bias[block].x, bias[block].y, bias[block].z, bias[block].w};
#pragma unroll
            for (int low = 0; low < 2; ++low) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 term = unpack16<Element>(terms[i]);
                    float first = sums[block * 4 + i][low * 2] + term.x;
                    float second = sums[block * 4 + i][low * 2 + 1] + term.y;
                    if (kGelu) first = gelu_approx(first), second = gelu_approx(second);
                    words[i] = pack16<Element>(first, second);
                }
                const int row = first_row + low * 8;
                if (row < problem.rows) {
                    store_vector(static_cast<Element*>(problem.out) + row * problem.out_stride + column + block * 32,
                                 uint4{words[0], words[1], words[2], words[3]});
                }
            }
        }
    }
}

template <typename Element, int kParts, bool kGelu>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    unsigned char* ring = aligned_shared();
    uint64_t* full = reinterpret_cast<uint64_t*>(ring + kRing * kPartBytes);
    uint64_t* empty = full + kRing;
    uint64_t* turns = empty + kRing;  // of each group to multiply
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kRing; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], 2 * 2 * kWarps);
        }
        barrier_init(&turns[0], kWarps);
        barrier_init(&turns[1], kWarps);
        fence_barrier_init();
    }
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<40>();
        if (threadIdx.x == 0) load<kParts>(problem, ring, full, empty, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        compute<Element, kParts, kGelu>(problem, ring, full, empty, turns, rank, warp / kWarps - 1, warp % kWarps, lane);
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

tilerank_status check_served(const LinearArgs& args) {
    const tilerank_status usual = check_usual_ends("resident_rows", args);
    if (usual != TILERANK_OK) return usual;
    if (args.gamma != nullptr) return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: gamma is given; it serves: NULL");
    if (args.weight_format != TILERANK_FORMAT_INTERLEAVED) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: weight_format is %d; it serves: 1 (interleaved)",
                      args.weight_format);
    }
    if (args.columns % kTile != 0) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: columns is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.columns), kTile);
    }
    if (args.depth != 128 && args.depth != 256 && args.depth != 384) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_rows: depth is %lld; it serves: 128, 256, 384",
                      static_cast<long long>(args.depth));
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
    if (!encode_tiles(&problem.weight, args.weight, args.dtype, args.columns, args.depth, args.weight_stride, kTile / 2)) {
        return refuse(TILERANK_LAUNCH_FAILED, "variant resident_rows: the driver refused a tensor map");
    }
    problem.x = args.x, problem.x_stride = args.x_stride, problem.bias = args.bias;
    problem.out = args.out, problem.out_stride = args.out_stride, problem.overlap = args.overlap != 0;
    problem.rows = static_cast<int>(args.rows);
    problem.row_pairs = static_cast<int>((args.rows + 2 * kTile - 1) / (2 * kTile));
    problem.column_tiles = static_cast<int>(args.columns / kTile);
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    const int64_t units = static_cast<int64_t>(problem.row_pairs) * problem.column_tiles;
    const int64_t clusters = units < processors / 2 ? units : processors / 2;
    using Kernel = void (*)(const Problem);
    constexpr Kernel kKernels[3][2] = {{kernel<Element, 2, false>, kernel<Element, 2, true>},
                                       {kernel<Element, 4, false>, kernel<Element, 4, true>},
                                       {kernel<Element, 6, false>, kernel<Element, 6, true>}};
    const int error = launch_overlapped(
        problem.overlap, kKernels[args.depth / 128 - 1][args.activation == TILERANK_ACTIVATION_GELU],
        dim3(static_cast<unsigned>(2 * clusters)), dim3(kThreads), kSharedBytes, stream, problem);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant resident_rows: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace resident_rows

tilerank_status linear_resident_rows(const LinearArgs& args, void*, void* stream) {
    return args.dtype == TILERANK_FP16 ? resident_rows::launch_typed<__half>(args, stream)
                                       : resident_rows::launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace tilerank
