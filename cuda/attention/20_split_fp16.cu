// Split fp16: fp32 in and out, products on the fp16 tensor cores (m16n8k16) from two terms a number, high high +
// high low + low high, summed in fp32. A block splits each tile of k and v once for all its rows; a warp has 32 rows.
// Prediction: 100 us packed, from 354. A tile of 16 rows x 64 keys takes a warp 96 products of 6.06 cycles and 410
//   other instructions at 0.65 beside them: 850 cycles, 78 us with a fifth of padding; ends and idle SMs add 20 us.
// Answer: metrics/<machine>/bench_attention_split_fp16.json and docs/ladder.md.
#include "common/split_fp16.cuh"

namespace tilerank {
namespace split_fp16 {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;

// Chosen so that q and the sums fit in registers, and two blocks in the 99 KB of shared memory of an sm_86.
template <int D>
struct Shape {
    static constexpr int kRowTiles = D <= 32 ? 2 : 1;  // of 16 rows a warp: two use what is read of k and v twice
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kTileKeys = D <= 32 ? 64 : (D <= 64 ? 32 : 16);
    static constexpr int kStepKeys = D <= 64 ? 32 : 16;
    static constexpr int kBlocksPerSm = D <= 32 ? 3 : 2;
    using Splitter = TileSplitter<D, kThreads, kTileKeys>;
    static constexpr int kPanels = Splitter::kPanels;
};

// 16 rows so far: row lane / 4 (+8 for elements 2 and 3), columns 8 i + 2 (lane % 4) + 0..1. One struct for both, because
// of an array of arrays nvcc 13.0 sets the first one alone to the values that members start with.
template <int D>
struct State {
    SplitSoftmax<> softmax[2];
    float sums[Shape<D>::kPanels * 4][4] = {};

    __device__ __forceinline__ void scale(int half, float factor) {
#pragma unroll
        for (int i = 0; i < Shape<D>::kPanels * 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) sums[i][half * 2 + j] *= factor;
        }
    }
};

__device__ __forceinline__ void multiply(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    mma_m16n8k16<__half>(accumulator, a, b);
}

// Keys step .. step+kStepKeys-1 of a split tile, for the warp's rows. kWhole: every row sees all of them; else row r of
// the lane's rows sees those below keys[r].
template <int D, bool kWhole>
__device__ __forceinline__ void attend(const SplitQueries<D> (&q)[Shape<D>::kRowTiles],
                                       const typename Shape<D>::Splitter::Halves& k_halves,
                                       const typename Shape<D>::Splitter::Halves& v_halves, int step,
                                       const int (&keys)[Shape<D>::kRowTiles][2], float k_inverse,
                                       State<D> (&states)[Shape<D>::kRowTiles]) {
    constexpr int kRowTiles = Shape<D>::kRowTiles;
    constexpr int kStepKeys = Shape<D>::kStepKeys;
    constexpr int kSteps = SplitQueries<D>::kSteps;
    const int lane = threadIdx.x % kWarpSize;
    float score[kRowTiles][kStepKeys / 8][4] = {};

    // Small products first: the sum is rounded off in its last place only when the large ones join.
#pragma unroll
    for (int n = 0; n < kStepKeys / 8; n += 2) {
        const int key = step + n * 8 + lane / 16 * 8 + lane % 8;
        uint32_t high[kSteps][4];
#pragma unroll
        for (int c = 0; c < kSteps; ++c) {
            const __half* panel = k_halves[c / 2];
            const int part = c % 2 * 2 + lane / 8 % 2;
            uint32_t low[4];
            ldmatrix_x4(high[c], panel + panel_offset(key, part));
            ldmatrix_x4(low, panel + panel_offset(key, part + 4));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                multiply(score[m][n], q[m].high[c], low[0], low[1]);
                multiply(score[m][n + 1], q[m].high[c], low[2], low[3]);
                multiply(score[m][n], q[m].low[c], high[c][0], high[c][1]);
                multiply(score[m][n + 1], q[m].low[c], high[c][2], high[c][3]);
            }
        }
#pragma unroll
        for (int c = 0; c < kSteps; ++c) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                multiply(score[m][n], q[m].high[c], high[c][0], high[c][1]);
                multiply(score[m][n + 1], q[m].high[c], high[c][2], high[c][3]);
            }
        }
    }

    float unit[kRowTiles][2];
    float max[kRowTiles][2];
    bool lags = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unit[m][half] = fmaxf(q[m].inverse[half] * k_inverse, 0x1p-126f);
            float largest = -INFINITY;
#pragma unroll
            for (int n = 0; n < kStepKeys / 8; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& s = score[m][n][half * 2 + j];
                    if (!kWhole) s = hide_unless(step + n * 8 + lane % 4 * 2 + j < keys[m][half], s);
                    largest = fmaxf(largest, s);
                }
            }
            max[m][half] = largest * unit[m][half];
            lags = lags || states[m].softmax[half].lags(max[m][half]);
        }
    }
    if (__any_sync(kFullMask, lags)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float of_row = fmaxf(max[m][half], __shfl_xor_sync(kFullMask, max[m][half], 1));
                of_row = fmaxf(of_row, __shfl_xor_sync(kFullMask, of_row, 2));
                states[m].scale(half, states[m].softmax[half].rebase_if_lagging(of_row));
            }
        }
    }

    constexpr int kFragments = kStepKeys / 16;
    uint32_t high[kFragments][kRowTiles][4];
    uint32_t low[kFragments][kRowTiles][4];
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2;
                const float(&s)[4] = score[m][j * 2 + i / 2];
                auto& softmax = states[m].softmax[half];
                const float first = exp2_approx(s[half * 2] * unit[m][half] - softmax.reference);
                const float second = exp2_approx(s[half * 2 + 1] * unit[m][half] - softmax.reference);
                softmax.sum += first + second;
                const SplitPair terms = split(first, second);
                high[j][m][i] = terms.high;
                low[j][m][i] = terms.low;
            }
        }
    }

    // Sums of these keys, small products first again. Tensor cores cut off what does not fit a sum, always towards zero,
    // which adds up over many keys: these join the sums of all by an addition that rounds to the nearest.
#pragma unroll
    for (int i = 0; i < Shape<D>::kPanels * 4; i += 2) {
        const __half* panel = v_halves[i / 4];
        const int part = i % 4 + lane / 16;
        float sums[kRowTiles][2][4] = {};
        uint32_t v_high[kFragments][4];
#pragma unroll
        for (int j = 0; j < kFragments; ++j) {
            const int key = step + j * 16 + lane % 16;
            uint32_t v_low[4];
            ldmatrix_x4_trans(v_high[j], panel + panel_offset(key, part));
            ldmatrix_x4_trans(v_low, panel + panel_offset(key, part + 4));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                multiply(sums[m][0], high[j][m], v_low[0], v_low[1]);
                multiply(sums[m][1], high[j][m], v_low[2], v_low[3]);
                multiply(sums[m][0], low[j][m], v_high[j][0], v_high[j][1]);
                multiply(sums[m][1], low[j][m], v_high[j][2], v_high[j][3]);
            }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kFragments; ++j) {
                multiply(sums[m][0], high[j][m], v_high[j][0], v_high[j][1]);
                multiply(sums[m][1], high[j][m], v_high[j][2], v_high[j][3]);
            }
#pragma unroll
            for (int column = 0; column < 2; ++column) {
#pragma unroll
                for (int k = 0; k < 4; ++k) states[m].sums[i + column][k] += sums[m][column][k];
            }
        }
    }
}

template <int D>
__global__ void __launch_bounds__(kThreads, Shape<D>::kBlocksPerSm)
    kernel(const __grid_constant__ AttentionArgs args, ScoreFactor factor, bool aligned) {
    constexpr int kRowTiles = Shape<D>::kRowTiles;
    constexpr int kTileKeys = Shape<D>::kTileKeys;
    constexpr int kStepKeys = Shape<D>::kStepKeys;
    DynamicShared memory;
    typename Shape<D>::Splitter splitter(memory, threadIdx.x, aligned);
    SHARED(QueryBlock, shared_block, [1]);  // read where needed: in registers it would take some that the tiles need
    if (threadIdx.x == 0) shared_block[0] = query_block(args, Shape<D>::kRows, blockIdx.x);
    __syncthreads();
    const QueryBlock& block = shared_block[0];
    if (block.rows == 0) return;  // packed, and shorter than the longest sequence
    const int tiles = (block.any_row_sees + kTileKeys - 1) / kTileKeys;
    const int lane = threadIdx.x % kWarpSize;
    // From lane 0, which tells the compiler that it is one for the warp.
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    const int first_row = warp * Shape<D>::kWarpRows;

    splitter.begin(block, args);
    const auto copy = [&](int tile) {
        if (tile < tiles) splitter.copy_next(args, block.any_row_sees - tile * kTileKeys, tile);
    };
    copy(0), copy(1);
    SplitQueries<D> q[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
        q[m].load(block, args.q_token_stride, first_row + m * 16, factor, aligned);
    }
    State<D> states[kRowTiles];
    Trust trust;
    TileFactors factors;  // of the tile whose halves are there
    TileFactors before;   // of the one before
    Span k_span, v_span;  // of the tile whose halves are there
    const auto split_tile = [&](int tile) {
        splitter.read_spans(tile, k_span, v_span);
        before = factors;
        factors = factors.next(k_span, v_span);
        splitter.split_tile(tile, power_of_two(factors.k_field), power_of_two(factors.v_field));
        copy(tile + 2);
    };
    if (tiles > 0) {
        copy_async_wait<0>();
        splitter.measure(0);
        __syncthreads();
        split_tile(0);
        if (tiles > 1) splitter.measure(1);
    }

    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<0>();
        __syncthreads();  // the halves of this tile and the spans of the next are there; the other halves are read
        const TileFactors of_tile = factors;
        const float v_change = tile == 0 ? 1.0f : of_tile.v_change(before);
        const float k_inverse = inverse_power_of_two(of_tile.k_field);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            trust.add_tile(k_span, v_span, q[m], fmaxf(q[m].inverse[0], q[m].inverse[1]) * k_inverse);
        }
        if (tile + 2 < tiles) splitter.measure(tile + 2);
        if (tile + 1 < tiles) split_tile(tile + 1);

        if (v_change != 1.0f) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) states[m].scale(0, v_change), states[m].scale(1, v_change);
        }
        const int first = tile * kTileKeys;
        const auto& k_halves = splitter.k_halves[tile & 1];
        const auto& v_halves = splitter.v_halves[tile & 1];
        if (first_row >= block.rows) continue;
        const int tile_keys = keys_below(block.any_row_sees, first, kTileKeys);
        const int whole_keys = keys_below(block.every_row_sees, first, kTileKeys);
        int keys[kRowTiles][2];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                keys[m][half] = row_sees(block, first_row + m * 16 + half * 8 + lane / 4, first);
            }
        }
        int step = 0;
        for (; step + kStepKeys <= whole_keys; step += kStepKeys) {
            attend<D, true>(q, k_halves, v_halves, step, keys, k_inverse, states);
        }
        for (; step < tile_keys; step += kStepKeys) {
            attend<D, false>(q, k_halves, v_halves, step, keys, k_inverse, states);
        }
    }

    if (first_row >= block.rows) return;
    if (__any_sync(kFullMask, trust.is_broken())) {
        attend_exactly<D>(args, block, first_row, Shape<D>::kWarpRows);
        return;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
        store_split_rows<D>(block, args.out_token_stride, first_row + m * 16, states[m].softmax, factors.v_field,
                            aligned, [&](int i, int half, int j) { return states[m].sums[i][half * 2 + j]; });
    }
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("split_fp16", kernel<D>, query_blocks(args, Shape<D>::kRows), kThreads,
                         Shape<D>::Splitter::shared_bytes(), stream, args, score_factor(args), rows_aligned_16(args));
}

}  // namespace split_fp16

tilerank_status attention_split_fp16(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return split_fp16::launch_for<32>(args, stream);
        case 64:
            return split_fp16::launch_for<64>(args, stream);
        case 80:
            return split_fp16::launch_for<80>(args, stream);
        case 96:
            return split_fp16::launch_for<96>(args, stream);
        default:
            return split_fp16::launch_for<128>(args, stream);
    }
}

}  // namespace tilerank
