// Tokens are the product's columns: a warpgroup multiplies 64 rows of the weights by as many tokens as its block has, which
// may be any multiple of 8 that a template is made for, so that one wave of blocks fills the device whatever the batch. The
// factors of all tokens of a block stay in shared memory while the weights stream past, each part fetched once for the
// two blocks of a cluster; three warpgroups take 64 rows in turn, so that the ends of two hide behind the product of one.
// Where the whole row is wanted (gamma), all 384 rows of the weights are summed at once instead, and both factors stream.
// Prediction: 36 us for 16,830 tokens, 384 -> 1536 with GELU, from 49 by resident_rows; 18 us for 8,960, from 29. With
//   LayerNorm, depth 1536: 36 us for 18,176, from 61; 18 us for 8,960, from 29: one wave of blocks, not two or a half.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/columns.cuh"
#include "common/linear.h"
#include "common/wgmma_columns.cuh"

namespace tilerank {
namespace token_columns {

constexpr int kPart = 64;  // factors of a part, 128 bytes a row
constexpr int kRows = 64;  // of the weights, of a product
constexpr int kSharedMost = 232448;
constexpr int kWarps = 4;  // of a group
constexpr int kMostPlainTokens = 144, kMostNormTokens = 136;  // of a block: what shared memory, and registers, have room for

bool aligned16(const void* pointer, int64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

// ---- Bias and GELU ----

struct Plain {
    CUtensorMap x;
    CUtensorMap weight;
    CUtensorMap out;
    const void* bias;
    int blocks;  // of 64 columns
    int parts;   // of depth
    bool gelu;
    bool overlap;
};

constexpr int kMostParts = 6;
constexpr int kPlainGroups = 3;
constexpr int kSlotBytes = kRows * kPartRowBytes;

template <int N>
struct PlainShape {
    static constexpr int kXPartBytes = N * kPartRowBytes;
    static constexpr int kXBytes = kMostParts * kXPartBytes;
    static constexpr int kStagedBytes = N * kPartRowBytes;  // of a group
    static constexpr int kFree = kSharedMost - 512 - kXBytes - kPlainGroups * kStagedBytes;
    static constexpr int kSlots = kFree / kSlotBytes < 14 ? kFree / kSlotBytes : 14;
    static constexpr int kSharedBytes = kXBytes + kPlainGroups * kStagedBytes + kSlots * kSlotBytes + 512;
};

template <typename Element, int N>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((kPlainGroups + 1) * 128, 1)
    plain(const __grid_constant__ Plain problem) {
    using S = PlainShape<N>;
    unsigned char* x = aligned_shared();
    unsigned char* ring = x + S::kXBytes;
    unsigned char* staged = ring + S::kSlots * kSlotBytes;
    uint64_t* full = reinterpret_cast<uint64_t*>(staged + kPlainGroups * S::kStagedBytes);
    uint64_t* empty = full + S::kSlots;
    uint64_t* x_full = empty + S::kSlots;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    const int first_token = static_cast<int>(blockIdx.x) * N;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < S::kSlots; ++slot) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], 2 * kWarps);
        }
        for (int part = 0; part < kMostParts; ++part) barrier_init(&x_full[part], 1);
        fence_barrier_init();
    }
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<40>();
        if (threadIdx.x == 0) {
            int slot = 0, turn = 0;
            bool has_x = false;
            const auto copy_x = [&] {
                has_x = true;
                if (problem.overlap) wait_for_previous();
                for (int part = 0; part < problem.parts; ++part) {
                    barrier_expect(&x_full[part], S::kXPartBytes);
                    copy_box(x + part * S::kXPartBytes, &problem.x, &x_full[part], part * kPart, first_token);
                }
            };
            for (int block = 0; block < problem.blocks; ++block) {
                for (int part = 0; part < problem.parts; ++part) {
                    if (turn > 0 && !has_x) copy_x();  // the first weights need not wait for what x is made by
                    if (turn > 0) barrier_wait(&empty[slot], (turn - 1) & 1);
                    barrier_expect(&full[slot], kSlotBytes);
                    copy_box_to_cluster(ring + slot * kSlotBytes + rank * (kSlotBytes / 2), &problem.weight, &full[slot],
                                        part * kPart, block * kRows + rank * (kRows / 2), 3);
                    if (++slot == S::kSlots) slot = 0, ++turn;
                }
            }
            if (!has_x) copy_x();
        }
        __syncwarp();
    } else {
        take_registers<152>();
        const int group = static_cast<int>(warp_register(warp / kWarps - 1)), own = warp % kWarps;
        unsigned char* mine = staged + group * S::kStagedBytes;
        const bool stores = threadIdx.x % 128 == 0;
        if (problem.overlap) wait_for_previous();  // out may be what the kernel before reads
        const uint32_t ring_begin = shared_address(ring) / 16, x_begin = shared_address(x) / 16;
        int slot = group * problem.parts, turn = 0;  // of the block's first part
        while (slot >= S::kSlots) slot -= S::kSlots, ++turn;
        for (int block = group; block < problem.blocks; block += kPlainGroups) {
            // Before the product: behind it, each load would wait for the stores in front of it.
            const int column = block * kRows + own * 16 + lane / 4;
            float bias[2] = {};
            if (problem.bias != nullptr) {
                bias[0] = to_float(static_cast<const Element*>(problem.bias)[column]);
                bias[1] = to_float(static_cast<const Element*>(problem.bias)[column + 8]);
            }
            // Zeros, not nothing: what is read before it is written lives through all that stands before it.
            Fragment sums[N / 8] = {};
            int last = 0;
#pragma unroll 1
            for (int part = 0; part < problem.parts; ++part) {
                if (block == group) barrier_wait(&x_full[part], 0);
                barrier_wait(&full[slot], turn & 1);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < kPart / 16; ++step) {
                    wgmma_columns_k16<Element, N>(
                        sums, tile_descriptor<128>(ring_begin + slot * (kSlotBytes / 16) + step * 2, 1),
                        tile_descriptor<128>(x_begin + part * (S::kXPartBytes / 16) + step * 2, 1), 1);
                }
                wgmma_commit();
                if (part > 0) {
                    wgmma_wait<1>();
                    if (lane < 2) barrier_arrive_at(&empty[last], lane);
                }
                last = slot;
                if (++slot == S::kSlots) slot = 0, ++turn;
            }
            wgmma_wait<0>();
            if (lane < 2) barrier_arrive_at(&empty[last], lane);
            slot += (kPlainGroups - 1) * problem.parts;  // those of the other groups
            while (slot >= S::kSlots) slot -= S::kSlots, ++turn;

            if (stores) store_wait_read();  // what was staged before has been read
            barrier_named<128>(1 + group);
            if (problem.gelu) {
                stage_tokens<Element, N, true>(sums, bias, mine, own, lane);
            } else {
                stage_tokens<Element, N, false>(sums, bias, mine, own, lane);
            }
            fence_async_proxy();
            barrier_named<128>(1 + group);
            if (stores) {
                store_box(&problem.out, mine, block * kRows, first_token);
                store_commit();
            }
        }
        if (stores) store_wait();
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

// ---- Bias, residual and LayerNorm ----

struct Norm {
    CUtensorMap x;
    CUtensorMap weight;
    CUtensorMap residual;
    CUtensorMap out;
    const void* bias;
    const void* gamma;
    const void* beta;
    int parts;  // of depth
    float epsilon;
    bool overlap;
};

constexpr int kColumns = 384;
constexpr int kNormGroups = 2;
constexpr int kGroupBlocks = kColumns / kRows / kNormGroups;
constexpr int kNormWarps = kNormGroups * kWarps;
constexpr int kWeightBytes = kColumns * kPartRowBytes;
constexpr int kColumnParts = kColumns / kPart;

template <int N>
struct NormShape {
    static constexpr int kXBytes = N * kPartRowBytes;
    static constexpr int kStageBytes = kXBytes + kWeightBytes;
    static constexpr int kStages = 3;
    static constexpr int kSumBytes = kNormWarps * N * 4;  // of each warp's columns, for each token
    static constexpr int kSharedBytes = kStages * kStageBytes + kSumBytes + 2 * N * 4 + 2 * kStages * 8 + 8;
    // The residual takes the place of the first stages, when all products have been made, and so does the result.
    static_assert(kColumnParts * kXBytes <= kStages * kStageBytes);
    static_assert(kSharedBytes <= kSharedMost);
};

template <typename Element, int N>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__((kNormGroups + 1) * 128, 1)
    norm(const __grid_constant__ Norm problem) {
    using S = NormShape<N>;
    unsigned char* stages = aligned_shared();
    float* partial = reinterpret_cast<float*>(stages + S::kStages * S::kStageBytes);  // [warp][token]
    float* means = partial + kNormWarps * N;
    float* scales = means + N;
    uint64_t* full = reinterpret_cast<uint64_t*>(scales + N);
    uint64_t* empty = full + S::kStages;
    uint64_t* residual_full = empty + S::kStages;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = cluster_rank();
    const int first_token = static_cast<int>(blockIdx.x) * N;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < S::kStages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], 2 * kNormWarps);
        }
        barrier_init(residual_full, 1);
        fence_barrier_init();
    }
    cluster_sync_barriers();
    let_next_begin();
    if (warp < kWarps) {
        give_registers_back<24>();
        if (threadIdx.x == 0) {
            const auto copy_weight = [&](int stage, int part) {
                copy_box_to_cluster(stages + stage * S::kStageBytes + rank * (kWeightBytes / 2), &problem.weight,
                                    &full[stage], part * kPart, rank * (kColumns / 2), 3);
            };
            const auto copy_x = [&](int stage, int part) {
                copy_box(stages + stage * S::kStageBytes + kWeightBytes, &problem.x, &full[stage], part * kPart,
                         first_token);
            };
            // The first weights need not wait for what x is made by.
            const int early = min(problem.parts, S::kStages);
            for (int part = 0; part < early; ++part) {
                barrier_expect(&full[part], S::kStageBytes);
                copy_weight(part, part);
            }
            if (problem.overlap) wait_for_previous();
            for (int part = 0; part < early; ++part) copy_x(part, part);
            int stage = 0, turn = 1;
            for (int part = early; part < problem.parts; ++part) {
                barrier_wait(&empty[stage], (turn - 1) & 1);
                barrier_expect(&full[stage], S::kStageBytes);
                copy_weight(stage, part);
                copy_x(stage, part);
                if (++stage == S::kStages) stage = 0, ++turn;
            }
            // All stages have been used up, here and by the other block, whose weights come here too.
            for (int i = 0; i < early; ++i) {
                const int at = (problem.parts - early + i) % S::kStages;
                barrier_wait(&empty[at], (problem.parts - early + i) / S::kStages & 1);
            }
            barrier_expect(residual_full, kColumnParts * S::kXBytes);
            for (int part = 0; part < kColumnParts; ++part) {
                copy_box(stages + part * S::kXBytes, &problem.residual, residual_full, part * kPart, first_token);
            }
        }
        __syncwarp();
    } else {
        take_registers<240>();
        const int group = static_cast<int>(warp_register(warp / kWarps - 1)), own = warp % kWarps;
        if (problem.overlap) wait_for_previous();  // out may be what the kernel before reads
        const uint32_t begin = shared_address(stages) / 16 + group * (kWeightBytes / kNormGroups / 16);
        Fragment sums[kGroupBlocks][N / 8] = {};
        int stage = 0, turn = 0, last = 0;
#pragma unroll 1
        for (int part = 0; part < problem.parts; ++part) {
            barrier_wait(&full[stage], turn & 1);
            const uint32_t weight = begin + stage * (S::kStageBytes / 16);
            const uint32_t x = shared_address(stages) / 16 + stage * (S::kStageBytes / 16) + kWeightBytes / 16;
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kPart / 16; ++step) {
#pragma unroll
                for (int block = 0; block < kGroupBlocks; ++block) {
                    wgmma_columns_k16<Element, N>(sums[block],
                                                  tile_descriptor<128>(weight + block * (kSlotBytes / 16) + step * 2, 1),
                                                  tile_descriptor<128>(x + step * 2, 1), 1);
                }
            }
            wgmma_commit();
            if (part > 0) {
                wgmma_wait<1>();
                if (lane < 2) barrier_arrive_at(&empty[last], lane);
            }
            last = stage;
            if (++stage == S::kStages) stage = 0, ++turn;
        }
        wgmma_wait<0>();
        if (lane < 2) barrier_arrive_at(&empty[last], lane);

        // A thread's columns: two of each block's 64.
        const int first_column = group * (kColumns / kNormGroups) + own * 16 + lane / 4;
        const auto vector_at = [&](const void* vector, int block, int half) {
            return to_float(static_cast<const Element*>(vector)[first_column + block * kRows + half * 8]);
        };
        float bias[kGroupBlocks][2];
#pragma unroll
        for (int block = 0; block < kGroupBlocks; ++block) {
            bias[block][0] = vector_at(problem.bias, block, 0);
            bias[block][1] = vector_at(problem.bias, block, 1);
        }
        float* own_partial = partial + (warp - kWarps) * N;
        const int offset = eights_offset(own, lane);
        const int two = lane % 4 * 2;                           // the first token of a thread in each eight
        const int kept = lane / 16 * 8 + two + (lane / 8 & 1);  // what sum_over_columns leaves to it in 16
        barrier_wait(residual_full, 0);
        unsigned char* tile = stages + group * kGroupBlocks * S::kXBytes;
        const auto for_all = [&](auto&& each) {
#pragma unroll
            for (int pair = 0; pair < (N + 15) / 16; ++pair) each(pair);
        };
        for_all([&](int pair) {
            float total[4] = {};
#pragma unroll
            for (int block = 0; block < kGroupBlocks; ++block) {
                uint32_t words[4];
                ldmatrix_x4_trans(words, tile + block * S::kXBytes + pair_offset<N>(offset, pair, lane));
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
        });
        const int thread = threadIdx.x - 128;
        const auto sum_of_warps = [&] {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kNormWarps; ++other) sum += partial[other * N + thread];
            return sum * (1.0f / kColumns);
        };
        barrier_named<kNormGroups * 128>(1);
        if (thread < N) means[thread] = sum_of_warps();
        barrier_named<kNormGroups * 128>(1);
        for_all([&](int pair) {
            float total[4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = pair * 2 + i;
                if (j >= N / 8) continue;
                const float2 mean = load_vector<float2>(means + j * 8 + two);
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
        });
        float gamma[kGroupBlocks][2], beta[kGroupBlocks][2];
#pragma unroll
        for (int block = 0; block < kGroupBlocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                gamma[block][half] = vector_at(problem.gamma, block, half);
                beta[block][half] = vector_at(problem.beta, block, half);
            }
        }
        barrier_named<kNormGroups * 128>(1);
        if (thread < N) scales[thread] = 1.0f / sqrtf(sum_of_warps() + problem.epsilon);
        barrier_named<kNormGroups * 128>(1);
        for_all([&](int pair) {
            float2 scale[2] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (pair * 2 + i < N / 8) scale[i] = load_vector<float2>(scales + (pair * 2 + i) * 8 + two);
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
                store_eights<N>(tile + block * S::kXBytes, offset, pair, lane, words);
            }
        });
        fence_async_proxy();
        barrier_named<128>(2 + group);
        if (threadIdx.x % 128 == 0) {
            for (int block = 0; block < kGroupBlocks; ++block) {
                store_box(&problem.out, tile + block * S::kXBytes, (group * kGroupBlocks + block) * kPart, first_token);
            }
            store_commit();
            store_wait();
        }
    }
    cluster_sync();  // neither block leaves while the other's copies or arrivals may still reach it
}

// ---- Launching ----

tilerank_status check_served(const LinearArgs& args) {
    if (args.weight_format != TILERANK_FORMAT_PLAIN) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: weight_format is %d; it serves: 0 (plain)",
                      args.weight_format);
    }
    const bool is_norm = args.gamma != nullptr;
    if (is_norm && (args.residual == nullptr || args.bias == nullptr)) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: bias or residual is NULL where gamma is given");
    }
    if (is_norm ? args.columns != kColumns : args.columns % kRows != 0) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: columns is %lld; it serves: %s",
                      static_cast<long long>(args.columns), is_norm ? "384" : "multiples of 64");
    }
    if (args.depth % kPart != 0 || args.depth > (is_norm ? INT32_MAX / 2 : kMostParts * kPart)) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: depth is %lld; it serves: multiples of 64%s",
                      static_cast<long long>(args.depth), is_norm ? "" : " up to 384");
    }
    if (args.rows > INT32_MAX / 2) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: rows is %lld; it serves: up to %d",
                      static_cast<long long>(args.rows), INT32_MAX / 2);
    }
    if (!aligned16(args.x, args.x_stride) || !aligned16(args.weight, args.weight_stride) ||
        !aligned16(args.out, args.out_stride) || !aligned16(args.residual, args.residual_stride)) {
        return refuse(TILERANK_UNSUPPORTED, "variant token_columns: a row does not begin at a multiple of 16 bytes");
    }
    return TILERANK_OK;
}

constexpr int kNoMap = -1;

template <typename Element, int N>
int launch_for(const LinearArgs& args, void* stream) {
    const auto tiles = [&](CUtensorMap* map, const void* base, int64_t rows, int64_t columns, int64_t stride, int box) {
        return encode_tiles(map, base, args.dtype, rows, columns, stride, box);
    };
    const dim3 grid(static_cast<unsigned>((args.rows + 2 * N - 1) / (2 * N) * 2));
    const bool overlap = args.overlap != 0;
    if (args.gamma != nullptr) {
        if constexpr (N <= kMostNormTokens) {
            Norm problem{};
            if (!tiles(&problem.x, args.x, args.rows, args.depth, args.x_stride, N) ||
                !tiles(&problem.weight, args.weight, args.columns, args.depth, args.weight_stride, kColumns / 2) ||
                !tiles(&problem.residual, args.residual, args.rows, args.columns, args.residual_stride, N) ||
                !tiles(&problem.out, args.out, args.rows, args.columns, args.out_stride, N)) {
                return kNoMap;
            }
            problem.bias = args.bias, problem.gamma = args.gamma, problem.beta = args.beta;
            problem.parts = static_cast<int>(args.depth / kPart), problem.epsilon = static_cast<float>(args.epsilon);
            problem.overlap = overlap;
            return launch_overlapped(overlap, norm<Element, N>, grid, dim3((kNormGroups + 1) * 128),
                                     NormShape<N>::kSharedBytes, stream, problem);
        }
    }
    Plain problem{};
    if (!tiles(&problem.x, args.x, args.rows, args.depth, args.x_stride, N) ||
        !tiles(&problem.weight, args.weight, args.columns, args.depth, args.weight_stride, kRows / 2) ||
        !tiles(&problem.out, args.out, args.rows, args.columns, args.out_stride, N)) {
        return kNoMap;
    }
    problem.bias = args.bias, problem.blocks = static_cast<int>(args.columns / kRows);
    problem.parts = static_cast<int>(args.depth / kPart);
    problem.gelu = args.activation == TILERANK_ACTIVATION_GELU, problem.overlap = overlap;
    return launch_overlapped(overlap, plain<Element, N>, grid, dim3((kPlainGroups + 1) * 128),
                             PlainShape<N>::kSharedBytes, stream, problem);
}

template <typename Element>
int launch_typed(const LinearArgs& args, void* stream) {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    // As few waves of blocks as the widest tile allows, and the narrowest tile that they need.
    const int64_t blocks = processors / 2 * 2, most = args.gamma != nullptr ? kMostNormTokens : kMostPlainTokens;
    const int64_t waves = (args.rows + blocks * most - 1) / (blocks * most);
    const int64_t tokens = (args.rows + blocks * waves - 1) / (blocks * waves);
    if (tokens <= 48) return launch_for<Element, 48>(args, stream);
    if (tokens <= 72) return launch_for<Element, 72>(args, stream);
    if (tokens <= 80) return launch_for<Element, 80>(args, stream);
    if (tokens <= 96) return launch_for<Element, 96>(args, stream);
    if (tokens <= 128) return launch_for<Element, 128>(args, stream);
    if (tokens <= 136) return launch_for<Element, 136>(args, stream);
    return launch_for<Element, 144>(args, stream);
}

}  // namespace token_columns

tilerank_status linear_token_columns(const LinearArgs& args, void*, void* stream) {
    using namespace token_columns;
    const tilerank_status served = check_served(args);
    if (served != TILERANK_OK) return served;
    const int error =
        args.dtype == TILERANK_FP16 ? launch_typed<__half>(args, stream) : launch_typed<__nv_bfloat16>(args, stream);
    if (error == -1) return refuse(TILERANK_LAUNCH_FAILED, "variant token_columns: the driver refused a tensor map");
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant token_columns: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace tilerank
