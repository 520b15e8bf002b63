// One block keeps its tokens from one attention to the next: four products and two normalisations without a launch, a wave
// or a start of a pipeline between them. Tokens are the products' columns, so that a block may have any number of eights:
// one wave of blocks fills the device whatever the batch. A block's rows x, later x1 and out, lie in shared memory, where
// they are the factors of the products behind them; weights stream past in rings through all four products, each part
// fetched once for the two blocks of a cluster. Only what GELU gives is too wide: it goes through global memory, and comes
// back from L2 to where the rows lay, which meanwhile are in the sums.
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
constexpr int kStages = 2;                         // parts of found on their way in, and of results on their way out
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
    static constexpr int kStageBytes = kStages * kPartBytes;
    static constexpr int kBarrierBytes = 512;
    static constexpr int kFixed = kTileBytes + kStageBytes + kBarrierBytes;
    // Groups take turns and slots of one ring where a block's product takes longer than its end, else each has a ring.
    static constexpr bool kTurns = N >= 128;
    static constexpr int kRings = kTurns ? 1 : kGroups;
    // An even number in all: where groups take slots in turn, each has its own.
    static constexpr int kRoom = (kSharedMost - kFixed) / kSlotBytes;
    static constexpr int kAllSlots = (kRoom < 16 ? kRoom : 16) / kGroups * kGroups;
    static constexpr int kSlots = kAllSlots / kRings;
    static constexpr int kSharedBytes = kFixed + kAllSlots * kSlotBytes;
    static_assert(kSlots >= 4 && (kUsers + 2) * N * 4 <= kStageBytes);
};

// A part of a product's factors that are not the tile itself.
struct Factors {
    unsigned char* rows;
    uint64_t* full;
    uint64_t* empty;
    uint32_t parity;  // of the phase of `full`
};

// What GELU gave is used from its last parts on, which are still where they were made.
__device__ __forceinline__ int wide_part(int i, int parts) { return i < kStages ? parts - kStages + i : i - kStages; }

template <int N>
struct Shared {
    using S = Shape<N>;
    unsigned char* tile;     // the block's rows, part by part
    unsigned char* staging;  // kStages parts: found on its way in, of each group on its way out; and the next three
    float* partial;          // [warp][token]
    float* means;
    float* scales;
    unsigned char* ring;     // of the weights
    uint64_t* full;          // of each slot of the ring
    uint64_t* empty;
    uint64_t* found_full;    // of each stage
    uint64_t* found_empty;
    uint64_t* staged;        // the last of what GELU gave
    uint64_t* wide_full;     // of each part of the tile: the rest of it
    uint64_t* wide_empty;
    uint64_t* passed;        // what GELU gave lies in global memory, or is staged, and the tile is free
    uint64_t* tile_full;

    __device__ __forceinline__ explicit Shared(unsigned char* memory) {
        tile = memory;
        staging = tile + S::kTileBytes;
        partial = reinterpret_cast<float*>(staging);
        means = partial + kUsers * N;
        scales = means + N;
        ring = staging + S::kStageBytes;
        full = reinterpret_cast<uint64_t*>(ring + S::kAllSlots * kSlotBytes);
        empty = full + S::kAllSlots;
        found_full = empty + S::kAllSlots;
        found_empty = found_full + kStages;
        staged = found_empty + kStages;
        wide_full = staged + kStages;
        wide_empty = wide_full + kParts;
        passed = wide_empty + kParts;
        tile_full = passed + 1;
    }

    __device__ __forceinline__ void init() const {
        for (int slot = 0; slot < S::kAllSlots; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], 2 * kWarps);
        }
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&found_full[i], 1);
            barrier_init(&found_empty[i], kUsers);
            barrier_init(&staged[i], 1);
        }
        for (int i = 0; i < kParts; ++i) {
            barrier_init(&wide_full[i], 1);
            barrier_init(&wide_empty[i], kUsers);
        }
        barrier_init(passed, kUsers);
        barrier_init(tile_full, 1);
        fence_barrier_init();
    }

    // Part i of what a side's normalisation multiplies, in the order of its use.
    __device__ __forceinline__ Factors factors(int side, int i, int parts) const {
        const bool is_copy = side == 1 && i >= kStages;
        const int count = is_copy ? kParts : kStages, at = is_copy ? i - kStages : side == 1 ? parts + i : i;
        const int place = at % count;
        unsigned char* rows = (is_copy ? tile : staging) + place * S::kPartBytes;
        uint64_t* is_full = is_copy ? wide_full : side == 1 ? staged : found_full;
        const uint32_t parity = side == 1 && !is_copy ? 0 : at / count & 1;
        return {rows, is_full + place, (is_copy ? wide_empty : found_empty) + place, parity};
    }
};

// ---- The threads that copy ----

// A ring's weights of all four products, in the order of their use.
template <int N>
__device__ __forceinline__ void load_weights(const Problem& problem, const Shared<N>& shared, int rank, int ring) {
    using S = Shape<N>;
    constexpr int kEach = kGroups / S::kRings;  // groups of a ring
    const int first = ring * S::kSlots;
    int slot = 0, turn = 0;
    const auto load = [&](int matrix, int block, int part) {
        uint64_t* full = &shared.full[first + slot];
        if (turn > 0) barrier_wait(&shared.empty[first + slot], (turn - 1) & 1);
        barrier_expect(full, kSlotBytes);
        copy_box_to_cluster(shared.ring + (first + slot) * kSlotBytes + rank * (kSlotBytes / 2), &problem.weights[matrix],
                            full, part * kPart, block * kRows + rank * (kRows / 2), 3);
        if (++slot == S::kSlots) slot = 0, ++turn;
    };
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        // All rows of the weights for a part of the factors, groups in turn, then some of the rows for all factors.
        const int parts = side == 0 ? kParts : problem.wide_parts;
        const int blocks = side == 0 ? problem.wide_parts : problem.next_blocks;
#pragma unroll 1
        for (int i = 0; i < parts; ++i) {
#pragma unroll 1
            for (int block = 0; block < kEach * kGroupBlocks; ++block) {
                const int group = ring + block % kEach;
                load(2 * side, group * kGroupBlocks + block / kEach, side == 0 ? i : wide_part(i, parts));
            }
        }
#pragma unroll 1
        for (int block = ring; block < blocks; block += S::kRings) {
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) load(2 * side + 1, block, part);
        }
    }
}

// The rows: x to stay; found, and later what GELU gave.
template <int N>
__device__ __forceinline__ void load_rows(const Problem& problem, const Shared<N>& shared, int first_token) {
    using S = Shape<N>;
    prefetch_map(&problem.found), prefetch_map(&problem.x);
    if (problem.overlap) wait_for_previous();
    const auto load = [&](const CUtensorMap* map, const Factors& to, int part) {
        barrier_expect(to.full, S::kPartBytes);
        copy_box(to.rows, map, to.full, part * kPart, first_token);
    };
    for (int part = 0; part < kStages; ++part) load(&problem.found, shared.factors(0, part, kParts), part);
    barrier_expect(shared.tile_full, S::kTileBytes);
    for (int part = 0; part < kParts; ++part) {
        copy_box(shared.tile + part * S::kPartBytes, &problem.x, shared.tile_full, part * kPart, first_token);
    }
#pragma unroll 1
    for (int part = kStages; part < kParts; ++part) {
        const Factors to = shared.factors(0, part, kParts);
        barrier_wait(to.empty, to.parity ^ 1);
        load(&problem.found, to, part);
    }
    barrier_wait(shared.passed, 0);
    asm volatile("fence.proxy.async;" ::: "memory");  // written by copies of other threads, which have seen them complete
#pragma unroll 1
    for (int i = kStages; i < problem.wide_parts; ++i) {
        const Factors to = shared.factors(1, i, problem.wide_parts);
        if (i >= kStages + kParts) barrier_wait(to.empty, to.parity ^ 1);
        load(&problem.wide, to, wide_part(i, problem.wide_parts));
    }
}

// ---- The groups that multiply ----

// Among kThreads threads, some of whom only arrive.
template <int kThreads>
__device__ __forceinline__ void barrier_named_arrive(int name) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
constexpr int kBothGroups = 1, kOwnGroup = 2, kTurn = 4;  // named barriers: the last two of each group

template <typename Element, int N>
struct Group {
    using S = Shape<N>;
    const Problem& problem;
    const Shared<N>& shared;
    int first_token;
    int group;
    int warp;  // of the group
    int lane;
    int position = 0;  // of the ring's weights, where the product under way begins

    __device__ __forceinline__ uint32_t slot_of(int at) const {
        return static_cast<uint32_t>(S::kTurns ? 0 : group * S::kSlots) + static_cast<uint32_t>(at) % S::kSlots;
    }
    __device__ __forceinline__ void await(int at) const {
        barrier_wait(&shared.full[slot_of(at)], static_cast<uint32_t>(at) / S::kSlots & 1);
    }
    __device__ __forceinline__ void give_back(int at) const {
        if (lane < 2) barrier_arrive_at(&shared.empty[slot_of(at)], lane);
    }

    __device__ __forceinline__ void multiply(Fragment (&sums)[N / 8], int at, const unsigned char* factors) const {
        const uint32_t weights = shared_address(shared.ring) / 16 + slot_of(at) * (kSlotBytes / 16);
        const uint32_t tokens = shared_address(factors) / 16;
#pragma unroll
        for (int step = 0; step < kPart / 16; ++step) {
            wgmma_columns_k16<Element, N>(sums, tile_descriptor<128>(weights + step * 2, 1),
                                          tile_descriptor<128>(tokens + step * 2, 1), 1);
        }
        wgmma_commit();
    }

    // tile = LN(weights times what passes + bias + tile): every group has some of each row's columns.
    __device__ __forceinline__ void normalised(int side, int parts) {
        // Zeros, not nothing: what is read before it is written lives through all that stands before it.
        Fragment sums[kGroupBlocks][N / 8] = {};
        const int first_column = group * (kGroupBlocks * kRows) + warp * 16 + lane / 4;
        const auto load_vector_of = [&](Element (&values)[kGroupBlocks][2], const void* vector) {
#pragma unroll
            for (int i = 0; i < kGroupBlocks * 2; ++i) {
                values[i / 2][i % 2] = static_cast<const Element*>(vector)[first_column + i / 2 * kRows + i % 2 * 8];
            }
        };
        Element bias[kGroupBlocks][2], gamma[kGroupBlocks][2], beta[kGroupBlocks][2];
        load_vector_of(bias, problem.biases[2 * side]);
        unsigned char* tile = shared.tile + group * kGroupBlocks * S::kPartBytes;
        const int offset = eights_offset(warp, lane);
        const auto add_tile = [&](uint32_t mask) {
#pragma unroll
            for (int pair = 0; pair < (N + 15) / 16; ++pair) {
#pragma unroll
                for (int block = 0; block < kGroupBlocks; ++block) {
                    uint32_t words[4];
                    ldmatrix_x4_trans(words, tile + block * S::kPartBytes + pair_offset<N>(offset, pair, lane));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = pair * 2 + i / 2;
                        if (j >= N / 8) continue;
                        const float2 residual = unpack16<Element>(words[i] & mask);
                        sums[block][j][i % 2 * 2] += residual.x, sums[block][j][i % 2 * 2 + 1] += residual.y;
                    }
                }
            }
        };
        // Masked, not skipped: products do not follow each other at once where their sums come from a branch.
        add_tile(side == 1 ? ~0u : 0u);
        if (side == 1) {
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.passed);
            // The other group has seen all its weights: a barrier's parity tells one turn of the ring from the next only.
            if (S::kTurns && group == 0) barrier_named<kGroups * 128>(kTurn);
        }
        int last = -1;
        uint64_t* before = nullptr;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const Factors factors = shared.factors(side, part, parts);
            barrier_wait(factors.full, factors.parity);
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                const int of_group = part * kGroupBlocks + block;
                const int at = position + (S::kTurns ? of_group * kGroups + group : of_group);
                await(at);
                wgmma_fence();
                multiply(sums[block], at, factors.rows);
                if (last >= 0) {
                    wgmma_wait<1>();
                    give_back(last);
                    if (block == 0 && lane == 0) barrier_arrive(before);  // used up with its last block
                }
                last = at;
            }
            before = factors.empty;
        }
        wgmma_wait<0>();
        give_back(last);
        position += parts * (kParts / S::kRings);

        if (side == 0) {
            barrier_wait(shared.tile_full, 0);
            add_tile(~0u);
        }
        barrier_named<kGroups * 128>(kBothGroups);  // factors lay where partial sums do now
        float* own_partial = shared.partial + (group * kWarps + warp) * N;
        const int two = lane % 4 * 2;                           // the first token of a thread in each eight
        const int kept = lane / 16 * 8 + two + (lane / 8 & 1);  // what sum_over_columns leaves to it in 16
        const int thread = (group * kWarps + warp) * kWarpSize + lane;
        const auto share = [&](const float (&total)[4], int pair) {
            const float sum = sum_over_columns(total, lane);
            if (lane % 8 < 4 && pair * 16 + kept < N) own_partial[pair * 16 + kept] = sum;
        };
        const auto mean_of_warps = [&] {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kUsers; ++other) sum += shared.partial[other * N + thread];
            return sum * (1.0f / kWidth);
        };
#pragma unroll
        for (int pair = 0; pair < (N + 15) / 16; ++pair) {
            float total[4] = {};
#pragma unroll
            for (int i = 0; i < kGroupBlocks * 4; ++i) {
                const int j = pair * 2 + i / 2 % 2, block = i / 4, half = i % 2;
                if (j >= N / 8) continue;
                float* two_sums = &sums[block][j][half * 2];
                two_sums[0] += to_float(bias[block][half]), two_sums[1] += to_float(bias[block][half]);
                total[i / 2 % 2 * 2] += two_sums[0], total[i / 2 % 2 * 2 + 1] += two_sums[1];
            }
            share(total, pair);
        }
        load_vector_of(gamma, problem.gammas[side]);
        load_vector_of(beta, problem.betas[side]);
        barrier_named<kGroups * 128>(kBothGroups);
        if (thread < N) shared.means[thread] = mean_of_warps();
        barrier_named<kGroups * 128>(kBothGroups);
#pragma unroll
        for (int pair = 0; pair < (N + 15) / 16; ++pair) {
            float total[4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = pair * 2 + i;
                if (j >= N / 8) continue;
                const float2 mean = load_vector<float2>(shared.means + j * 8 + two);
#pragma unroll
                for (int k = 0; k < kGroupBlocks * 2; ++k) {
                    float* two_sums = &sums[k / 2][j][k % 2 * 2];
                    two_sums[0] -= mean.x, two_sums[1] -= mean.y;
                    total[i * 2] = fmaf(two_sums[0], two_sums[0], total[i * 2]);
                    total[i * 2 + 1] = fmaf(two_sums[1], two_sums[1], total[i * 2 + 1]);
                }
            }
            share(total, pair);
        }
        barrier_named<kGroups * 128>(kBothGroups);
        if (thread < N) shared.scales[thread] = 1.0f / sqrtf(mean_of_warps() + problem.epsilon);
        barrier_named<kGroups * 128>(kBothGroups);
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
                    const float factor = to_float(gamma[block][half]), term = to_float(beta[block][half]);
                    words[i] = pack16<Element>(fmaf(two_sums[0] * scale[i / 2].x, factor, term),
                                               fmaf(two_sums[1] * scale[i / 2].y, factor, term));
                }
                store_eights<N>(tile + block * S::kPartBytes, offset, pair, lane, words);
            }
        }
        fence_async_proxy();
        barrier_named<kGroups * 128>(kBothGroups);  // the tile is all groups' factor from here on
    }

    __device__ __forceinline__ void store_out() const {
        if (warp != 0 || lane != 0) return;
        for (int part = group * kGroupBlocks; part < (group + 1) * kGroupBlocks; ++part) {
            store_box(&problem.out, shared.tile + part * S::kPartBytes, part * kPart, first_token);
        }
        store_commit();
    }

    // weights times the tile, through GELU where they are the wide ones, 64 columns at a time; groups take them in turn.
    __device__ __forceinline__ void plain(int side, int blocks) {
        unsigned char* stage = shared.staging + group * S::kPartBytes;
        const bool stores = warp == 0 && lane == 0;
        Element next_bias[2] = {};
        const auto load_bias = [&](int block) {
            if (block >= blocks) return;
            const Element* bias = static_cast<const Element*>(problem.biases[2 * side + 1]) + block * kRows + warp * 16;
            next_bias[0] = bias[lane / 4], next_bias[1] = bias[lane / 4 + 8];
        };
        load_bias(group);
        if (S::kTurns && group == 1) barrier_named_arrive<kGroups * 128>(kTurn);  // the first group begins
#pragma unroll 1
        for (int first = 0; first < blocks; first += kGroups) {
            const int block = first + group;
            // One group multiplies while the other ends its block: the weights of one ring come in that order.
            if (S::kTurns) barrier_named<kGroups * 128>(kTurn + group);
            if (block >= blocks) {
                if (S::kTurns) barrier_named_arrive<kGroups * 128>(kTurn + 1 - group);
                break;
            }
            Fragment sums[N / 8] = {};
            const int begin = position + block / S::kRings * kParts;
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) {
                await(begin + part);
                wgmma_fence();
                multiply(sums, begin + part, shared.tile + part * S::kPartBytes);
                if (S::kTurns && part == kParts - 1) barrier_named_arrive<kGroups * 128>(kTurn + 1 - group);
                if (part > 0) {
                    wgmma_wait<1>();
                    give_back(begin + part - 1);
                }
            }
            wgmma_wait<0>();
            give_back(begin + kParts - 1);
            const float bias[2] = {to_float(next_bias[0]), to_float(next_bias[1])};
            const bool stays = side == 0 && block + kGroups >= blocks;
            if (stores && stays) store_wait();  // what was staged before lies in global memory
            if (stores && !stays) store_wait_read();
            barrier_named<128>(kOwnGroup + group);
            if (side == 0) {
                stage_tokens<Element, N, true>(sums, bias, stage, warp, lane);
            } else {
                stage_tokens<Element, N, false>(sums, bias, stage, warp, lane);
            }
            fence_async_proxy();
            load_bias(block + kGroups);  // behind the fence, which would wait for it
            barrier_named<128>(kOwnGroup + group);
            if (stores && stays) barrier_arrive(&shared.staged[group]);
            if (stores && !stays) {
                store_box(side == 0 ? &problem.wide : &problem.next, stage, block * kRows, first_token);
                store_commit();
            }
        }
        position += (S::kTurns ? blocks : (blocks + 1 - group) / kGroups) * kParts;
        if (stores && side == 1) store_wait();
    }
};

template <typename Element, int N>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Problem problem) {
    const Shared<N> shared(aligned_shared());
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int first_token = static_cast<int>(blockIdx.x) * N;
    if (threadIdx.x == 0) shared.init();
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (lane == 0) {
            if (warp < Shape<N>::kRings) load_weights<N>(problem, shared, cluster_rank(), warp);
            if (warp == kGroups) load_rows<N>(problem, shared, first_token);
        }
        __syncwarp();
    } else {
        take_registers<240>();
        if (problem.overlap) wait_for_previous();  // what is written may be what the kernel before reads
        const int number = static_cast<int>(warp_register(warp / kWarps - 1));
        Group<Element, N> group{problem, shared, first_token, number, warp % kWarps, lane};
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
            group.normalised(side, side == 0 ? kParts : problem.wide_parts);
            if (side == 1) group.store_out();
            group.plain(side, side == 0 ? problem.wide_parts : problem.next_blocks);
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
