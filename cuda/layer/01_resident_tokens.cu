// One block keeps its tokens from one attention to the next: four products and two normalisations without a launch, a wave
// or a start of a pipeline between them. Tokens are the products' columns, so that a block may have any number of eights:
// one wave of blocks fills the device whatever the batch. A block's rows x, later x1 and out, lie in shared memory, where
// they are the factors of the products behind them; weights stream past in one ring through all four products, each part
// fetched once for the two blocks of a cluster. Only what GELU gives is too wide: it goes through global memory, and comes
// back from L2.
// Prediction: 75 us for 16,830 tokens of width 384 in fp16, from 122 as four kernels: 110,600 cycles of the matrix unit
//   are 62 us, two normalisations and a start 10. 50 us for 8,960 from 88: there L2 delivers 3.5 MB of weights to each.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/activation.cuh"
#include "common/columns.cuh"
#include "common/layer.h"
#include "common/mma16.cuh"
#include "common/tma.cuh"
#include "common/wgmma_columns.cuh"

namespace tilerank {
namespace resident_tokens {

constexpr int kWidth = 384;
constexpr int kPart = 64;  // factors of a part, 128 bytes a row
constexpr int kRows = 64;  // of the weights, of a product
constexpr int kSlotBytes = kRows * kPartRowBytes;
constexpr int kParts = kWidth / kPart;
constexpr int kGroups = 2;
constexpr int kPlaces = 2;  // of parts that pass, one for each group's results on their way out
constexpr int kWarps = 4;                          // of a group
constexpr int kUsers = kGroups * kWarps;           // warps that multiply
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kGroupBlocks = kWidth / kRows / kGroups;  // of 64 rows of the weights, of a group where a whole row is wanted
constexpr int kMostTokens = 136;                   // of a block: what registers have room for
constexpr int kSharedMost = 232448;

struct Problem {
    CUtensorMap found;
    CUtensorMap x;
    CUtensorMap wide;  // what GELU gives
    CUtensorMap out;
    CUtensorMap next;
    CUtensorMap weights[4];  // out, up, down, next
    const void* biases[4];
    const void* gammas[2];
    const void* betas[2];
    int wide_parts;
    int next_blocks;  // of 64 columns; 0: not wanted
    float epsilon;
    bool overlap;
};

template <int N>
struct Shape {
    static constexpr int kPartBytes = N * kPartRowBytes;
    static constexpr int kTileBytes = kParts * kPartBytes;
    static constexpr int kSumBytes = (kUsers + 2) * N * 4;
    static constexpr int kBarrierBytes = 512;
    static constexpr int kFixed = kTileBytes + kPlaces * kPartBytes + kSumBytes + kBarrierBytes;
    // Of each group: its own, so that it uses every slot in turn and never looks a turn ahead.
    static constexpr int kRoom = (kSharedMost - kFixed) / kSlotBytes / kGroups;
    static constexpr int kSlots = kRoom < 8 ? kRoom : 8;
    static constexpr int kSharedBytes = kFixed + kGroups * kSlots * kSlotBytes;
    static_assert(kSlots >= 4 && kPlaces >= kGroups);
};

template <int N>
struct Shared {
    using S = Shape<N>;
    unsigned char* tile;    // the block's rows, part by part
    unsigned char* passing; // kPlaces parts: found or what GELU gives on its way in, or of each group on its way out
    unsigned char* ring;    // of the weights: kSlots of each group
    float* partial;         // [warp][token]
    float* means;
    float* scales;
    uint64_t* full;         // of each slot of the ring
    uint64_t* empty;
    uint64_t* passing_full;
    uint64_t* passing_empty;
    uint64_t* passed;       // a group's last block of the wide rows lies in global memory, and its place is free
    uint64_t* tile_full;

    __device__ __forceinline__ explicit Shared(unsigned char* memory) {
        tile = memory;
        passing = tile + S::kTileBytes;
        ring = passing + kPlaces * S::kPartBytes;
        partial = reinterpret_cast<float*>(ring + kGroups * S::kSlots * kSlotBytes);
        means = partial + kUsers * N;
        scales = means + N;
        full = reinterpret_cast<uint64_t*>(scales + N);
        empty = full + kGroups * S::kSlots;
        passing_full = empty + kGroups * S::kSlots;
        passing_empty = passing_full + kPlaces;
        passed = passing_empty + kPlaces;
        tile_full = passed + kGroups;
    }

    __device__ __forceinline__ void init() const {
        for (int slot = 0; slot < kGroups * S::kSlots; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], 2 * kWarps);
        }
        for (int i = 0; i < kPlaces; ++i) {
            barrier_init(&passing_full[i], 1);
            barrier_init(&passing_empty[i], kUsers);
        }
        for (int i = 0; i < kGroups; ++i) barrier_init(&passed[i], 1);
        barrier_init(tile_full, 1);
        fence_barrier_init();
    }
};

// ---- The threads that copy ----

// A group's weights of all four products, in the order that it uses them.
template <int N>
__device__ __forceinline__ void load_weights(const Problem& problem, const Shared<N>& shared, int rank, int group) {
    using S = Shape<N>;
    unsigned char* ring = shared.ring + group * S::kSlots * kSlotBytes;
    uint64_t* full = shared.full + group * S::kSlots;
    uint64_t* empty = shared.empty + group * S::kSlots;
    int slot = 0, turn = 0;
    const auto load = [&](int matrix, int block, int part) {
        if (turn > 0) barrier_wait(&empty[slot], (turn - 1) & 1);
        barrier_expect(&full[slot], kSlotBytes);
        copy_box_to_cluster(ring + slot * kSlotBytes + rank * (kSlotBytes / 2), &problem.weights[matrix], &full[slot],
                            part * kPart, block * kRows + rank * (kRows / 2), 3);
        if (++slot == S::kSlots) slot = 0, ++turn;
    };
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        // The group's rows of the weights for a part of the factors, then some of the rows for all factors.
        const int parts = side == 0 ? kParts : problem.wide_parts;
        const int blocks = side == 0 ? problem.wide_parts : problem.next_blocks;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
#pragma unroll 1
            for (int block = 0; block < kGroupBlocks; ++block) load(2 * side, group * kGroupBlocks + block, part);
        }
#pragma unroll 1
        for (int block = group; block < blocks; block += kGroups) {
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) load(2 * side + 1, block, part);
        }
    }
}

// The rows: x to stay; found, and later what GELU gave, to pass.
template <int N>
__device__ __forceinline__ void load_rows(const Problem& problem, const Shared<N>& shared, int first_token) {
    using S = Shape<N>;
    prefetch_map(&problem.found), prefetch_map(&problem.x);
    if (problem.overlap) wait_for_previous();
    int place = 0, turn = 0;
    const auto load = [&](const CUtensorMap* map, int part) {
        if (turn > 0) barrier_wait(&shared.passing_empty[place], (turn - 1) & 1);
        barrier_expect(&shared.passing_full[place], S::kPartBytes);
        copy_box(shared.passing + place * S::kPartBytes, map, &shared.passing_full[place], part * kPart, first_token);
        if (++place == kPlaces) place = 0, ++turn;
    };
    for (int part = 0; part < kPlaces; ++part) load(&problem.found, part);
    barrier_expect(shared.tile_full, S::kTileBytes);
    for (int part = 0; part < kParts; ++part) {
        copy_box(shared.tile + part * S::kPartBytes, &problem.x, shared.tile_full, part * kPart, first_token);
    }
    for (int part = kPlaces; part < kParts; ++part) load(&problem.found, part);
#pragma unroll 1
    for (int part = 0; part < problem.wide_parts; ++part) {
        // A group's blocks arrive in turn: when its last one has, so have all before it, and its place is free.
        if (part < kGroups) barrier_wait(&shared.passed[part], 0);
        if (part == 0) {
            // Written by copies of other threads, which have seen them complete.
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        load(&problem.wide, part);
    }
}

// ---- The groups that multiply ----

template <typename Element, int N>
struct Group {
    using S = Shape<N>;
    const Problem& problem;
    const Shared<N>& shared;
    int first_token;
    int group;
    int warp;  // of the group
    int lane;
    int position = 0;  // of the group's weights, where the product under way begins
    int place = 0;     // of what passes
    int turn = 0;

    __device__ __forceinline__ uint32_t slot_of(int at) const {
        return static_cast<uint32_t>(group * S::kSlots) + static_cast<uint32_t>(at) % S::kSlots;
    }
    __device__ __forceinline__ void await(int at) const {
        barrier_wait(&shared.full[slot_of(at)], static_cast<uint32_t>(at) / S::kSlots & 1);
    }
    __device__ __forceinline__ void give_back(int at) const {
        if (lane < 2) barrier_arrive_at(&shared.empty[slot_of(at)], lane);
    }
    __device__ __forceinline__ void multiply(Fragment (&sums)[N / 8], int at, uint32_t factors) const {
        const uint32_t weight = shared_address(shared.ring) / 16 + slot_of(at) * (kSlotBytes / 16);
#pragma unroll
        for (int step = 0; step < kPart / 16; ++step) {
            wgmma_columns_k16<Element, N>(sums, tile_descriptor<128>(weight + step * 2, 1),
                                          tile_descriptor<128>(factors + step * 2, 1), 1);
        }
        wgmma_commit();
    }

    // tile = LN(weights times what passes + bias + tile): every group has some of each row's columns.
    __device__ __forceinline__ void normalised(int side, int parts) {
        // Zeros, not nothing: what is read before it is written lives through all that stands before it.
        Fragment sums[kGroupBlocks][N / 8] = {};
        int last = -1;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            barrier_wait(&shared.passing_full[place], turn & 1);
            const uint32_t factors = shared_address(shared.passing) / 16 + place * (S::kPartBytes / 16);
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                const int at = position + part * kGroupBlocks + block;
                await(at);
                wgmma_fence();
                multiply(sums[block], at, factors);
                if (last >= 0) {
                    wgmma_wait<1>();
                    give_back(last);
                    // The part before has been used up with its last block.
                    if (block == 0 && lane == 0) {
                        barrier_arrive(&shared.passing_empty[place == 0 ? kPlaces - 1 : place - 1]);
                    }
                }
                last = at;
            }
            if (++place == kPlaces) place = 0, ++turn;
        }
        wgmma_wait<0>();
        give_back(last);
        if (lane == 0) barrier_arrive(&shared.passing_empty[place == 0 ? kPlaces - 1 : place - 1]);
        position += parts * kGroupBlocks;

        const int first_column = group * (kGroupBlocks * kRows) + warp * 16 + lane / 4;
        const auto vector_at = [&](const void* vector, int block, int half) {
            return to_float(static_cast<const Element*>(vector)[first_column + block * kRows + half * 8]);
        };
        unsigned char* tile = shared.tile + group * kGroupBlocks * S::kPartBytes;
        float* own_partial = shared.partial + (group * kWarps + warp) * N;
        const int offset = eights_offset(warp, lane);
        const int two = lane % 4 * 2;                             // the first token of a thread in each eight
        const int kept = lane / 16 * 8 + two + (lane / 8 & 1);    // what sum_over_columns leaves to it in 16
        const int thread = (group * kWarps + warp) * kWarpSize + lane;
        if (side == 0) barrier_wait(shared.tile_full, 0);
        {
            float bias[kGroupBlocks][2];
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                bias[block][0] = vector_at(problem.biases[2 * side], block, 0);
                bias[block][1] = vector_at(problem.biases[2 * side], block, 1);
            }
#pragma unroll
            for (int pair = 0; pair < (N + 15) / 16; ++pair) {
                float total[4] = {};
#pragma unroll
                for (int block = 0; block < kGroupBlocks; ++block) {
                    uint32_t words[4];
                    ldmatrix_x4_trans(words, tile + block * S::kPartBytes + pair_offset<N>(offset, pair, lane));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = pair * 2 + i / 2, half = i % 2;
                        if (j >= N / 8) continue;
                        const float2 residual = unpack16<Element>(words[i]);
                        float* two_sums = &sums[block][j][half * 2];
                        two_sums[0] += bias[block][half] + residual.x;
                        two_sums[1] += bias[block][half] + residual.y;
                        total[i / 2 * 2] += two_sums[0];
                        total[i / 2 * 2 + 1] += two_sums[1];
                    }
                }
                const float sum = sum_over_columns(total, lane);
                if (lane % 8 < 4 && pair * 16 + kept < N) own_partial[pair * 16 + kept] = sum;
            }
        }
        const auto sum_of_warps = [&] {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kUsers; ++other) sum += shared.partial[other * N + thread];
            return sum * (1.0f / kWidth);
        };
        barrier_named<kGroups * 128>(1);
        if (thread < N) shared.means[thread] = sum_of_warps();
        barrier_named<kGroups * 128>(1);
#pragma unroll
        for (int pair = 0; pair < (N + 15) / 16; ++pair) {
            float total[4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = pair * 2 + i;
                if (j >= N / 8) continue;
                const float2 mean = load_vector<float2>(shared.means + j * 8 + two);
#pragma unroll
                for (int block = 0; block < kGroupBlocks; ++block) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float* two_sums = &sums[block][j][half * 2];
                        two_sums[0] -= mean.x, two_sums[1] -= mean.y;
                        total[i * 2] = fmaf(two_sums[0], two_sums[0], total[i * 2]);
                        total[i * 2 + 1] = fmaf(two_sums[1], two_sums[1], total[i * 2 + 1]);
                    }
                }
            }
            const float sum = sum_over_columns(total, lane);
            if (lane % 8 < 4 && pair * 16 + kept < N) own_partial[pair * 16 + kept] = sum;
        }
        float gamma[kGroupBlocks][2], beta[kGroupBlocks][2];
#pragma unroll
        for (int block = 0; block < kGroupBlocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                gamma[block][half] = vector_at(problem.gammas[side], block, half);
                beta[block][half] = vector_at(problem.betas[side], block, half);
            }
        }
        barrier_named<kGroups * 128>(1);
        if (thread < N) shared.scales[thread] = 1.0f / sqrtf(sum_of_warps() + problem.epsilon);
        barrier_named<kGroups * 128>(1);
#pragma unroll
        for (int pair = 0; pair < (N + 15) / 16; ++pair) {
            float2 scale[2] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (pair * 2 + i < N / 8) scale[i] = load_vector<float2>(shared.scales + (pair * 2 + i) * 8 + two);
            }
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                uint32_t words[4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int j = pair * 2 + i / 2, half = i % 2;
                    if (j >= N / 8) continue;
                    const float* two_sums = &sums[block][j][half * 2];
                    words[i] = pack16<Element>(fmaf(two_sums[0] * scale[i / 2].x, gamma[block][half], beta[block][half]),
                                               fmaf(two_sums[1] * scale[i / 2].y, gamma[block][half], beta[block][half]));
                }
                store_eights<N>(tile + block * S::kPartBytes, offset, pair, lane, words);
            }
        }
        fence_async_proxy();
        barrier_named<kGroups * 128>(1);  // the tile is all groups' factor from here on
    }

    // weights times the tile, through GELU where they are the wide ones, 64 columns at a time to `map`; groups take them in turn.
    __device__ __forceinline__ void plain(int matrix, int blocks, const CUtensorMap* map) {
        unsigned char* staged = shared.passing + group * S::kPartBytes;
        const bool stores = warp == 0 && lane == 0;
        const uint32_t tile = shared_address(shared.tile) / 16;
#pragma unroll 1
        for (int block = group; block < blocks; block += kGroups) {
            const int column = block * kRows + warp * 16 + lane / 4;
            float bias[2];
            bias[0] = to_float(static_cast<const Element*>(problem.biases[matrix])[column]);
            bias[1] = to_float(static_cast<const Element*>(problem.biases[matrix])[column + 8]);
            Fragment sums[N / 8] = {};
            const int begin = position;
            position += kParts;
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) {
                await(begin + part);
                wgmma_fence();
                multiply(sums, begin + part, tile + part * (S::kPartBytes / 16));
                if (part > 0) {
                    wgmma_wait<1>();
                    give_back(begin + part - 1);
                }
            }
            wgmma_wait<0>();
            give_back(begin + kParts - 1);
            if (stores) store_wait();  // what was staged before lies in global memory
            barrier_named<128>(2 + group);
            if (matrix == 1) {
                stage_tokens<Element, N, true>(sums, bias, staged, warp, lane);
            } else {
                stage_tokens<Element, N, false>(sums, bias, staged, warp, lane);
            }
            fence_async_proxy();
            barrier_named<128>(2 + group);
            if (stores) {
                store_box(map, staged, block * kRows, first_token);
                store_commit();
            }
        }
        if (stores) store_wait();
    }
};

template <typename Element, int N>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    using S = Shape<N>;
    const Shared<N> shared(aligned_shared());
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int first_token = static_cast<int>(blockIdx.x) * N;
    if (threadIdx.x == 0) shared.init();
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (lane == 0) {
            if (warp < kGroups) load_weights<N>(problem, shared, cluster_rank(), warp);
            if (warp == kGroups) load_rows<N>(problem, shared, first_token);
        }
        __syncwarp();
    } else {
        take_registers<240>();
        if (problem.overlap) wait_for_previous();  // what is written may be what the kernel before reads
        const int number = static_cast<int>(warp_register(warp / kWarps - 1));
        Group<Element, N> group{problem, shared, first_token, number, warp % kWarps, lane};
        const bool stores = warp % kWarps == 0 && lane == 0;
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
            group.normalised(side, side == 0 ? kParts : problem.wide_parts);
            if (side == 1 && stores) {
                for (int block = 0; block < kGroupBlocks; ++block) {
                    const int part = number * kGroupBlocks + block;
                    store_box(&problem.out, shared.tile + part * S::kPartBytes, part * kPart, first_token);
                }
                store_commit();
            }
            group.plain(2 * side + 1, side == 0 ? problem.wide_parts : problem.next_blocks,
                        side == 0 ? &problem.wide : &problem.next);
            if (side == 0 && stores) {
                asm volatile("fence.proxy.async;" ::: "memory");
                barrier_arrive(&shared.passed[number]);
            }
        }
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

// ---- Launching ----

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

tilerank_status check_served(const LayerArgs& args) {
    if (args.width != kWidth) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_tokens: width is %lld; it serves: %d",
                      static_cast<long long>(args.width), kWidth);
    }
    if (args.wide % kPart != 0 || args.wide < kGroups * kPart || args.wide > 1 << 20) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_tokens: wide is %lld; it serves: multiples of %d from %d on",
                      static_cast<long long>(args.wide), kPart, kGroups * kPart);
    }
    if (args.next_columns % kRows != 0 || args.next_columns > 1 << 20) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_tokens: next_columns is %lld; it serves: multiples of %d",
                      static_cast<long long>(args.next_columns), kRows);
    }
    if (args.rows > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_tokens: rows is %lld; it serves: up to %d",
                      static_cast<long long>(args.rows), INT32_MAX / 2);
    }
    if (!aligned16(args.found, args.found_stride) || !aligned16(args.x, args.x_stride) ||
        !aligned16(args.out, args.out_stride) || !aligned16(args.next, args.next_stride) ||
        !aligned16(args.out_weight, 0) || !aligned16(args.up_weight, 0) || !aligned16(args.down_weight, 0) ||
        !aligned16(args.next_weight, 0)) {
        return refuse(TILERANK_UNSUPPORTED, "variant resident_tokens: a row does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

constexpr int kNoMap = -1;

template <typename Element, int N>
int launch_for(const LayerArgs& args, void* workspace, void* stream) {
    Problem problem{};
    const auto rows = [&](CUtensorMap* map, const void* base, int64_t columns, int64_t stride) {
        return encode_tiles(map, base, args.dtype, args.rows, columns, stride, N);
    };
    const auto weights = [&](int matrix, const void* base, int64_t outputs, int64_t inputs) {
        return encode_tiles(&problem.weights[matrix], base, args.dtype, outputs, inputs, inputs, kRows / 2);
    };
    const bool has_next = args.next != nullptr && args.next_columns > 0;
    if (!rows(&problem.found, args.found, kWidth, args.found_stride) || !rows(&problem.x, args.x, kWidth, args.x_stride) ||
        !rows(&problem.out, args.out, kWidth, args.out_stride) || !rows(&problem.wide, workspace, args.wide, args.wide) ||
        !weights(0, args.out_weight, kWidth, kWidth) || !weights(1, args.up_weight, args.wide, kWidth) ||
        !weights(2, args.down_weight, kWidth, args.wide) ||
        (has_next && (!rows(&problem.next, args.next, args.next_columns, args.next_stride) ||
                      !weights(3, args.next_weight, args.next_columns, kWidth)))) {
        return kNoMap;
    }
    problem.biases[0] = args.out_bias, problem.biases[1] = args.up_bias, problem.biases[2] = args.down_bias;
    problem.biases[3] = args.next_bias;
    for (int side = 0; side < 2; ++side) problem.gammas[side] = args.gammas[side], problem.betas[side] = args.betas[side];
    problem.wide_parts = static_cast<int>(args.wide / kPart);
    problem.next_blocks = has_next ? static_cast<int>(args.next_columns / kRows) : 0;
    problem.epsilon = static_cast<float>(args.epsilon), problem.overlap = args.overlap != 0;
    const dim3 grid(static_cast<unsigned>((args.rows + 2 * N - 1) / (2 * N) * 2));
    return launch_overlapped(problem.overlap, kernel<Element, N>, grid, dim3(kThreads), Shape<N>::kSharedBytes, stream,
                             problem);
}

template <typename Element>
int launch_typed(const LayerArgs& args, void* workspace, void* stream) {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    // As few waves of blocks as the widest tile allows, and the narrowest tile that they need.
    const int64_t blocks = processors / 2 * 2;
    const int64_t waves = (args.rows + blocks * kMostTokens - 1) / (blocks * kMostTokens);
    const int64_t tokens = (args.rows + blocks * waves - 1) / (blocks * waves);
    if (tokens <= 48) return launch_for<Element, 48>(args, workspace, stream);
    if (tokens <= 72) return launch_for<Element, 72>(args, workspace, stream);
    if (tokens <= 80) return launch_for<Element, 80>(args, workspace, stream);
    if (tokens <= 96) return launch_for<Element, 96>(args, workspace, stream);
    if (tokens <= 128) return launch_for<Element, 128>(args, workspace, stream);
    return launch_for<Element, 136>(args, workspace, stream);
}

}  // namespace resident_tokens

size_t layer_resident_tokens_workspace(const LayerArgs& args) {
    return static_cast<size_t>(args.rows) * static_cast<size_t>(args.wide) * 2;
}

tilerank_status layer_resident_tokens(const LayerArgs& args, void* workspace, void* stream) {
    using namespace resident_tokens;
    const tilerank_status served = check_served(args);
    if (served != TILERANK_OK) return served;
    const int error = args.dtype == TILERANK_FP16 ? launch_typed<__half>(args, workspace, stream)
                                                  : launch_typed<__nv_bfloat16>(args, workspace, stream);
    if (error == kNoMap) return refuse(TILERANK_LAUNCH_FAILED, "variant resident_tokens: the driver refused a tensor map");
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant resident_tokens: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace tilerank
