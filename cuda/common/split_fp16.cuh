// Shared policy of the kernels that compute in fp32 on fp16 tensor cores: a number is the sum of two fp16 terms, high
// and low, of 22 bits together, and a product of two numbers is high high + high low + low high.
//
// fp16 reaches from 2^-24 to 2^16 only. So whatever is split is first multiplied by a power of two, which is exact: a
// row of q by one that brings its largest element to 2^14, a tile of k likewise; v by one for the tiles so far, which
// falls when a tile needs it. Then an element's error is at most 2^-22 of itself, or 2^-38 of the largest beside it.
// That is as good as fp32 unless elements differ by more than 2^14 and the small ones matter. A warp that cannot rule
// this out (or that meets numbers beyond 2^100, infinity or NaN) does its rows again in double, slowly: attend_exactly.
#pragma once

#include <cmath>
#include <cstring>

#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {

// ---- Two terms ----

__device__ __forceinline__ uint32_t bits_of(__half2 pair) {
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// Two numbers split: their high terms in one register, their low terms in another, the first number in the low half.
struct SplitPair {
    uint32_t high;
    uint32_t low;
};

__device__ __forceinline__ SplitPair split(float first, float second) {
    const __half2 high = __floats2half2_rn(first, second);
    const __half2 low = __floats2half2_rn(first - __low2float(high), second - __high2float(high));
    return {bits_of(high), bits_of(low)};
}

// ---- Powers of two, as the exponent field of a float ----

constexpr int kBias = 127;
constexpr int kLargestField = 240;  // what even zeros are multiplied by at most, so that the inverse is normal

__device__ __forceinline__ float power_of_two(int field) { return __uint_as_float(static_cast<unsigned>(field) << 23); }
__device__ __forceinline__ float inverse_power_of_two(int field) { return power_of_two(2 * kBias - field); }

// The field of the power of two that brings a number with these bits to 2^exponent .. 2^(exponent+1).
__device__ __forceinline__ int field_to_reach(unsigned largest, int exponent) {
    return min(2 * kBias + exponent - static_cast<int>(largest >> 23), kLargestField);
}

// ---- What numbers span ----

__device__ __forceinline__ unsigned absolute_bits(float value) { return __float_as_uint(value) & 0x7fffffffu; }

constexpr unsigned kTrustedLimit = static_cast<unsigned>(kBias + 100) << 23;  // bits of 2^100
constexpr unsigned kTrustedRatio = 14u << 23;                                 // as a difference of bits: 2^14

// Groups of neighbouring elements, each known by its largest absolute value, whose bits sort as the values do.
struct Span {
    unsigned largest = 0;
    unsigned smallest_negated = 0;  // two's complement of the smallest group above 0; 0: there is none

    __device__ __forceinline__ void add_group(unsigned group) {
        largest = max(largest, group);
        smallest_negated = max(smallest_negated, 0u - group);
    }
    __device__ __forceinline__ void add(const Span& other) {
        largest = max(largest, other.largest);
        smallest_negated = max(smallest_negated, other.smallest_negated);
    }
    __device__ __forceinline__ bool is_wide() const { return (0u - smallest_negated) + kTrustedRatio < largest; }
    __device__ __forceinline__ bool is_beyond() const { return largest >= kTrustedLimit; }
};

__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kFullMask, value);
#else
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) value = max(value, __shfl_xor_sync(kFullMask, value, lanes));
    return value;
#endif
}

// The larger one, or NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a != a ? a : b != b ? b : fmaxf(a, b);
#endif
}

// What is kept of numbers that were multiplied by a factor chosen earlier: do they fit it?
struct Fit {
    float largest = 0.0f;
    unsigned smallest_less_1 = ~0u;  // bits of the smallest group above 0, less 1: 0 becomes the largest

    __device__ __forceinline__ void add_group(const float4& four) {
        const float group =
            max_or_nan(max_or_nan(fabsf(four.x), fabsf(four.y)), max_or_nan(fabsf(four.z), fabsf(four.w)));
        largest = max_or_nan(largest, group);
        smallest_less_1 = min(smallest_less_1, __float_as_uint(group) - 1u);
    }
    __device__ __forceinline__ bool fails(float least, float most) const {
        return !(largest <= most) || smallest_less_1 < __float_as_uint(least) - 1u;
    }
};

// ---- Tiles of k and v on their way from global memory, through fp32 in shared memory, to their two terms ----

constexpr int kPanelColumns = 32;  // of head_dim: a row of a panel has their high terms, then their low ones: 128 bytes

// Panels are laid out as ldmatrix and wgmma like them: the 16-byte parts of a row are permuted by the row's number.
constexpr int kPanelPitch = 2 * kPanelColumns;
__device__ __forceinline__ int panel_offset(int row, int part) { return row * kPanelPitch + (part ^ (row & 7)) * 8; }

// Splits tiles of kTileKeys keys, by kThreads threads. A thread reads back only what it copied, so copies need no
// barrier. Everything has two buffers: in the round that computes with tile t, t + 2 is measured, then t + 1 is split,
// since all threads know by then what it spans, and the copy of t + 3 starts where t + 1 was.
template <int D, int kThreads, int kTileKeys>
class TileSplitter {
  public:
    static constexpr int kPanels = (D + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kWarps = kThreads / kWarpSize;
    using Raw = float[kTileKeys][D];
    using Halves = __half[kPanels][kTileKeys * kPanelPitch];
    using Spans = unsigned[kWarps][4];

    Halves* k_halves;  // [2]
    Halves* v_halves;  // [2]

    static constexpr size_t shared_bytes() {
        return 2 * DynamicShared::bytes<Halves>(2) + 2 * DynamicShared::bytes<Raw>(2) + DynamicShared::bytes<Spans>(2);
    }

    __device__ __forceinline__ TileSplitter(DynamicShared& memory, int thread, bool aligned)
        : thread_(thread), aligned_(aligned) {
        k_halves = memory.take<Halves>(2);
        v_halves = memory.take<Halves>(2);
        k_raw_ = memory.take<Raw>(2);
        v_raw_ = memory.take<Raw>(2);
        spans_ = memory.take<Spans>(2);
        if (D % kPanelColumns != 0) clear_padding();
    }

    // Where the block's first tile lies for this thread.
    __device__ __forceinline__ void begin(const QueryBlock& block, const AttentionArgs& args) {
        k_from_ = block.k + row(0) * args.k_token_stride + column();
        v_from_ = block.v + row(0) * args.v_token_stride + column();
    }

    // Starts the copy of the next tile, of which `keys` keys exist and the rest becomes zeros, as the `at`-th of all.
    // The other calls know it by that number.
    __device__ __forceinline__ void copy_next(const AttentionArgs& args, int keys, int at) {
        copy_rows(k_raw_[at & 1], k_from_, args.k_token_stride, keys);
        copy_rows(v_raw_[at & 1], v_from_, args.v_token_stride, keys);
        k_from_ += kTileKeys * args.k_token_stride;
        v_from_ += kTileKeys * args.v_token_stride;
        copy_async_commit();
    }

    // Shares what this thread copied of tile `at` spans.
    __device__ __forceinline__ void measure(int at) {
        const Span k = span(k_raw_[at & 1]);
        const Span v = span(v_raw_[at & 1]);
        const unsigned of_warp[4] = {warp_max(k.largest), warp_max(k.smallest_negated), warp_max(v.largest),
                                     warp_max(v.smallest_negated)};
        if (thread_ % kWarpSize == 0) {
            store_vector(&spans_[at & 1][thread_ / kWarpSize][0],
                         uint4{of_warp[0], of_warp[1], of_warp[2], of_warp[3]});
        }
    }

    // What tile `at` spans, once all have measured.
    __device__ __forceinline__ void read_spans(int at, Span& k, Span& v) const {
        k = v = Span{};
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const uint4 of_warp = load_vector<uint4>(&spans_[at & 1][warp][0]);
            k.add({of_warp.x, of_warp.y});
            v.add({of_warp.z, of_warp.w});
        }
    }

    // Splits what this thread copied of tile `at`, multiplied by these powers of two.
    __device__ __forceinline__ void split_tile(int at, float k_factor, float v_factor) {
        split_rows(k_halves[at & 1], k_raw_[at & 1], k_factor);
        split_rows(v_halves[at & 1], v_raw_[at & 1], v_factor);
    }

    // The same with factors that were chosen from an earlier tile. Are they wrong for what this thread copied?
    __device__ __forceinline__ bool split_tile_as_before(int at, float k_factor, float v_factor) {
        Fit k, v;
        split_rows(k_halves[at & 1], k_raw_[at & 1], k_factor, &k);
        split_rows(v_halves[at & 1], v_raw_[at & 1], v_factor, &v);
        return k.fails(0x1p-4f, 0x1p15f) || v.fails(0x1p-1f, 0x1p15f);
    }

  private:
    static constexpr int kParts = D / 4;
    static constexpr int kRowStep = kThreads / kParts;  // threads left over do nothing
    static_assert(D % 4 == 0 && kRowStep > 0);
    static constexpr int kRounds = (kTileKeys + kRowStep - 1) / kRowStep;

    // A thread has four columns of every kRowStep-th row. At head_dim 32 rows 4 apart share a 16-lane store, which then
    // meets no bank twice.
    __device__ __forceinline__ int row(int round) const {
        const int index = thread_ / kParts;
        const int within = kRowStep % 8 == 0 ? (index & ~7) | (index & 1) << 2 | (index >> 1 & 3) : index;
        return round * kRowStep + within;
    }
    __device__ __forceinline__ int column() const { return thread_ % kParts * 4; }
    __device__ __forceinline__ bool takes_part(int round) const {
        if (kThreads % kParts != 0 && thread_ >= kRowStep * kParts) return false;
        return kTileKeys % kRowStep == 0 || row(round) < kTileKeys;
    }

    __device__ __forceinline__ void copy_rows(Raw& raw, const float* source, int64_t token_stride, int keys) {
        const auto copy_all = [&](auto copy_four) {
            const float* from = source;
#pragma unroll
            for (int round = 0; round < kRounds; ++round) {
                if (takes_part(round)) copy_four(&raw[row(round)][column()], from, row(round) < keys);
                from += kRowStep * token_stride;
            }
        };
        if (aligned_) {
            copy_all([](float* to, const float* from, bool in_range) { copy_async<16>(to, from, in_range); });
        } else {
            copy_all([](float* to, const float* from, bool in_range) {
#pragma unroll
                for (int word = 0; word < 4; ++word) copy_async<4>(to + word, from + word, in_range);
            });
        }
    }

    __device__ __forceinline__ Span span(const Raw& raw) const {
        Span span;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (!takes_part(round)) continue;
            const float4 four = load_vector<float4>(&raw[row(round)][column()]);
            span.add_group(max(max(absolute_bits(four.x), absolute_bits(four.y)),
                               max(absolute_bits(four.z), absolute_bits(four.w))));
        }
        return span;
    }

    __device__ __forceinline__ void split_rows(Halves& halves, const Raw& raw, float factor, Fit* fit = nullptr) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (!takes_part(round)) continue;
            const int to_row = row(round);
            float4 four = load_vector<float4>(&raw[to_row][column()]);
            four = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
            if (fit != nullptr) fit->add_group(four);
            const SplitPair first = split(four.x, four.y);
            const SplitPair second = split(four.z, four.w);
            __half* panel = halves[column() / kPanelColumns];
            const int part = column() % kPanelColumns / 8;
            const int within = column() % 8;
            store_vector(panel + panel_offset(to_row, part) + within, uint2{first.high, second.high});
            store_vector(panel + panel_offset(to_row, part + 4) + within, uint2{first.low, second.low});
        }
    }

    // Columns beyond D are zeros, so that they change no sum.
    __device__ __forceinline__ void clear_padding() {
        constexpr int kFirstPart = D % kPanelColumns / 8;
        constexpr int kPadding = 4 - kFirstPart;
        for (int at = thread_; at < 2 * kTileKeys * 2 * kPadding; at += kThreads) {
            const int to_row = at / (2 * kPadding) % kTileKeys;
            const int part = kFirstPart + at % kPadding + (at / kPadding & 1) * 4;
            const int buffer = at / (2 * kPadding) / kTileKeys;
            const int offset = panel_offset(to_row, part);
            store_vector(&k_halves[buffer][kPanels - 1][offset], uint4{0, 0, 0, 0});
            store_vector(&v_halves[buffer][kPanels - 1][offset], uint4{0, 0, 0, 0});
        }
    }

    Raw* k_raw_;  // [2]
    Raw* v_raw_;
    Spans* spans_;  // [2]
    const float* k_from_;
    const float* v_from_;
    int thread_;
    bool aligned_;
};

// ---- Rows of q in registers, as fragments of the matrix a of m16n8k16 (and of wgmma, a warp of 16 rows) ----

// scale log2(e), as a number of at most 1 that is multiplied into q and a power of two that only scores meet: so q
// keeps its range. A power far from 1 becomes infinity, which sends every row to attend_exactly.
struct ScoreFactor {
    float mantissa;
    float power;
};
inline ScoreFactor score_factor(const AttentionArgs& args) {
    constexpr double kLog2E = 1.4426950408889634;
    int exponent = 0;
    const double mantissa = std::frexp(args.exact_scale * kLog2E, &exponent);
    const bool near = exponent >= -60 && exponent <= 60;
    return {static_cast<float>(mantissa), near ? static_cast<float>(std::ldexp(1.0, exponent)) : INFINITY};
}

// 16 rows: a lane has parts of rows lane / 4 and lane / 4 + 8.
template <int D>
struct SplitQueries {
    static constexpr int kSteps = (D + kPanelColumns - 1) / kPanelColumns * 2;  // of 16 columns
    uint32_t high[kSteps][4];
    uint32_t low[kSteps][4];
    float inverse[2];  // a score is what the tensor cores find times this, times what k was divided by
    bool untrusted;    // for attend_exactly, whatever k and v hold
    bool wide;

    // Rows first_row .. first_row+15 of the block; those that do not exist are zeros. Called by whole warps.
    __device__ __forceinline__ void load(const QueryBlock& block, int64_t token_stride, int first_row,
                                         const ScoreFactor& factor, bool aligned) {
        load(block.rows - first_row, factor, [&](int row, int column) {
            const float* source = block.q + (first_row + row) * token_stride + column;
            return aligned ? load_vector<float2>(source) : float2{source[0], source[1]};
        });
    }

    // pair_at(row, column): two neighbours of one of the 16 rows, of which `rows` exist.
    template <typename PairAt>
    __device__ __forceinline__ void load(int rows, const ScoreFactor& factor, const PairAt& pair_at) {
        const int lane = threadIdx.x % kWarpSize;
        untrusted = wide = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + half * 8;
            float2 pairs[kSteps][2];
            unsigned group = 0;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    const int column = step * 16 + eight * 8;
                    float2 pair{0.0f, 0.0f};
                    if (row < rows && column < D) pair = pair_at(row, column + lane % 4 * 2);
                    pair.x *= factor.mantissa;
                    pair.y *= factor.mantissa;
                    group = max(group, max(absolute_bits(pair.x), absolute_bits(pair.y)));
                    pairs[step][eight] = pair;
                }
            }
            Span span;
            span.add_group(group);
#pragma unroll
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                span.add({__shfl_xor_sync(kFullMask, span.largest, lanes),
                          __shfl_xor_sync(kFullMask, span.smallest_negated, lanes)});
            }
            untrusted = untrusted || span.is_beyond();
            wide = wide || span.is_wide();
            const int field = field_to_reach(span.largest, 14);
            inverse[half] = inverse_power_of_two(field) * factor.power;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    const SplitPair terms = split(pairs[step][eight].x * power_of_two(field),
                                                  pairs[step][eight].y * power_of_two(field));
                    high[step][eight * 2 + half] = terms.high;
                    low[step][eight * 2 + half] = terms.low;
                }
            }
        }
    }
};

// ---- Factors of the tiles ----

// What tiles are multiplied by before they are split, as fields: k tile by tile, v for all tiles so far, since their
// products are summed.
struct TileFactors {
    int k_field = 0;
    int v_field = 0;  // 0: no tile yet

    // The factors of the tile after, which spans k and v.
    __device__ __forceinline__ TileFactors next(const Span& k, const Span& v) const {
        const int v_exponent = static_cast<int>(v.largest >> 23) + v_field - 2 * kBias;
        const bool fits = v_field != 0 && v_exponent < 15;
        return {field_to_reach(k.largest, 14), fits ? v_field : field_to_reach(v.largest, 13)};
    }
    // What sums of products with v must be multiplied by after `before`.
    __device__ __forceinline__ float v_change(const TileFactors& before) const {
        return power_of_two(max(kBias + v_field - before.v_field, 0));
    }
};

// ---- Softmax ----

// Weights are 2^kShift exp2(score - max) when the maximum is new, and may grow to 2^kMost before it is renewed: their
// two terms are exact to 2^-22 of themselves, or 2^-25.
template <int kShift = 13, int kMost = 15>
struct SplitSoftmax {
    float reference = kLowestMax;  // weights are exp2(score - reference)
    float sum = 0.0f;

    __device__ __forceinline__ bool lags(float max) const { return max - reference > kMost; }

    // Makes weights of scores up to `max` fit. Returns what was accumulated so far must be multiplied by.
    __device__ __forceinline__ float rebase_if_lagging(float max) {
        if (!lags(max)) return 1.0f;
        const float old = reference;
        reference = max - kShift;
        if (lags(max)) reference = max;  // so large that kShift is less than its last place
        const float factor = exp2_approx(old - reference);
        sum *= factor;
        return factor;
    }
};

// Ends 16 rows, first_row .. of the block: sum_at(i, half, j) is what was summed for row lane / 4 + 8 half, column
// 8 i + 2 (lane % 4) + j.
template <int D, typename Softmax, typename SumAt>
__device__ __forceinline__ void store_split_rows(const QueryBlock& block, int64_t token_stride, int first_row,
                                                 const Softmax (&softmax)[2], int v_field, bool aligned,
                                                 const SumAt& sum_at) {
    const int lane = threadIdx.x % kWarpSize;
    const float v_inverse = inverse_power_of_two(v_field);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = softmax[half].sum;
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        const float factor = normalizer(sum);
        const int row = first_row + half * 8 + lane / 4;
        if (row >= block.rows) continue;
        float* out = block.out + row * token_stride + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            const float2 pair = {sum_at(i, half, 0) * factor * v_inverse, sum_at(i, half, 1) * factor * v_inverse};
            if (aligned) {
                store_vector(out + i * 8, pair);
            } else {
                out[i * 8] = pair.x, out[i * 8 + 1] = pair.y;
            }
        }
    }
}

// What the warp of a block of split rows must know of the tiles so far: are the two terms good enough?
struct Trust {
    bool broken = false;
    Span v;

    // score_unit: what one of the tensor cores' scores is worth, the largest that a lane's rows have; those reach about
    // 2^30.
    template <int D>
    __device__ __forceinline__ void add_tile(const Span& k, const Span& v_tile, const SplitQueries<D>& q,
                                             float score_unit) {
        v.add(v_tile);
        // Scores below 2^11 have an error below 2^-24 whatever the terms miss.
        broken = broken || q.untrusted || k.is_beyond() || !(score_unit <= 0x1p60f) ||
                 ((q.wide || k.is_wide()) && score_unit > 0x1p-18f);
    }
    __device__ __forceinline__ bool is_broken() const { return broken || v.is_beyond() || v.is_wide(); }
};

// ---- The path that is always right ----

// Rows first_row .. of the block, up to `rows` of them, by one warp, in double: scores by the key, then columns by the
// lane.
template <int D>
__device__ __noinline__ void attend_exactly(const AttentionArgs& args, const QueryBlock& block, int first_row,
                                            int rows) {
    constexpr int kColumns = (D + kWarpSize - 1) / kWarpSize;
    constexpr double kLog2E = 1.4426950408889634;
    const int lane = threadIdx.x % kWarpSize;
    const int end_row = min(first_row + rows, block.rows);
    for (int row = first_row; row < end_row; ++row) {
        const float* q = block.q + row * args.q_token_stride;
        const int sees = row_sees(block, row);
        double max = -INFINITY;
        double sum = 0.0;
        double accumulator[kColumns] = {};
        for (int first = 0; first < sees; first += kWarpSize) {
            const int key = first + lane;
            double score = -INFINITY;
            if (key < sees) {
                const float* k = block.k + key * args.k_token_stride;
                double dots[4] = {};  // sums that do not wait for one another
#pragma unroll 4
                for (int d = 0; d < D; d += 4) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) dots[i] += static_cast<double>(q[d + i]) * k[d + i];
                }
                score = (dots[0] + dots[1] + dots[2] + dots[3]) * (args.exact_scale * kLog2E);
            }
            double new_max = score > max ? score : max;
#pragma unroll
            for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
                const double other = __shfl_xor_sync(kFullMask, new_max, lanes);
                new_max = other > new_max ? other : new_max;
            }
            const double factor = max == new_max ? 1.0 : exp2(max - new_max);
            const double weight = key >= sees ? 0.0 : (score == new_max ? 1.0 : exp2(score - new_max));
            max = new_max;
            sum = sum * factor + weight;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) accumulator[i] *= factor;
            const int keys = min(sees - first, kWarpSize);
#pragma unroll 4
            for (int other = 0; other < keys; ++other) {
                const double of_key = __shfl_sync(kFullMask, weight, other);
                const float* v = block.v + (first + other) * args.v_token_stride;
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    const int column = lane + i * kWarpSize;
                    if (column < D) accumulator[i] += of_key * v[column];
                }
            }
        }
#pragma unroll
        for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kFullMask, sum, lanes);
        float* out = block.out + row * args.out_token_stride;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int column = lane + i * kWarpSize;
            if (column < D) out[column] = static_cast<float>(sum == 0.0 ? 0.0 : accumulator[i] / sum);
        }
    }
}

}  // namespace tilerank
