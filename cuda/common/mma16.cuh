// Shared policy of the 16-bit kernels on tensor cores: which rows a block works on, how rows move between global
// memory, matrix fragments and shared memory, and the two products of a warp. Positions of fragments: common/device.h.
#pragma once

#include "common/attention.cuh"

namespace tilerank {

// ---- A block's rows ----

// Positions within a sequence are 32 bits wide here, to spare registers; the registry rows of these kernels say so.
constexpr int kMostKeys16 = 1 << 30;

// What a block works on: some queries of one (sequence, head), and its keys.
template <typename Element>
struct QueryRows {
    const Element* q;  // the first query of the block; token strides lead to the next
    Element* out;
    const Element* k;  // the first key of the sequence
    const Element* v;
    int rows;         // queries of the block that exist; 0: the sequence is shorter than the longest (packed)
    int k_len;        // keys of the sequence that count
    int causal_keys;  // what the first query may see if causality alone counted
    // The keys as trip counts: 0..every_row_sees-1 need no mask, from any_row_sees on there is nothing to compute.
    int every_row_sees;
    int any_row_sees;

    // How many keys row `row` of the block sees.
    __device__ __forceinline__ int row_sees(int row) const { return min(k_len, causal_keys + row); }
};

// Blocks needed when each takes `rows` queries of one (sequence, head).
inline int64_t row_blocks(const AttentionArgs& args, int rows) {
    return args.batch * args.heads * ((args.q_len + rows - 1) / rows);
}

// The queries first_query .. first_query+rows-1 of one (sequence, head), as far as they exist.
template <typename Element>
__device__ __forceinline__ QueryRows<Element> query_rows(const AttentionArgs& args, const HeadView<Element>& view,
                                                         int64_t first_query, int rows) {
    QueryRows<Element> block;
    block.q = view.q + first_query * args.q_token_stride;
    block.out = view.out + first_query * args.out_token_stride;
    block.k = view.k;
    block.v = view.v;
    block.rows = static_cast<int>(clamp(view.q_len - first_query, 0, rows));
    block.k_len = static_cast<int>(view.k_len);
    block.causal_keys = static_cast<int>(args.causal ? clamp(first_query + 1, 1, kMostKeys16) : kMostKeys16);
    block.every_row_sees = block.row_sees(0);
    block.any_row_sees = block.row_sees(block.rows - 1);
    return block;
}

// Block number `index` of row_blocks(args, rows), in the order sequence, head, rows.
template <typename Element>
__device__ __forceinline__ QueryRows<Element> query_rows_at(const AttentionArgs& args, int rows, unsigned index) {
    const unsigned blocks = static_cast<unsigned>((args.q_len + rows - 1) / rows);
    const unsigned heads = static_cast<unsigned>(args.heads);
    const HeadView<Element> view = head_view<Element>(args, index / blocks / heads, index / blocks % heads);
    return query_rows<Element>(args, view, static_cast<int64_t>(index % blocks) * rows, rows);
}

// Does every row of q, k, v and out begin at a multiple of 16 bytes?
inline bool rows16_aligned(const AttentionArgs& args) {
    const uintptr_t pointers = reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k) |
                               reinterpret_cast<uintptr_t>(args.v) | reinterpret_cast<uintptr_t>(args.out);
    const int64_t strides = args.q_batch_stride | args.q_head_stride | args.q_token_stride | args.k_batch_stride |
                            args.k_head_stride | args.k_token_stride | args.v_batch_stride | args.v_head_stride |
                            args.v_token_stride | args.out_batch_stride | args.out_head_stride | args.out_token_stride;
    return pointers % 16 == 0 && strides % 8 == 0;
}

// ---- Pairs of elements ----

template <typename Element>
__device__ __forceinline__ uint32_t bits16(Element value);
template <>
__device__ __forceinline__ uint32_t bits16<__half>(__half value) {
    return __half_as_ushort(value);
}
template <>
__device__ __forceinline__ uint32_t bits16<__nv_bfloat16>(__nv_bfloat16 value) {
    return __bfloat16_as_ushort(value);
}

// Two numbers rounded to Element in one register, low half first.
template <typename Element>
__device__ __forceinline__ uint32_t pack16(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack16<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack16<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// The two numbers of a register.
template <typename Element>
__device__ __forceinline__ float2 unpack16(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack16<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack16<__nv_bfloat16>(uint32_t pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// The larger of two pairs, half by half.
template <typename Element>
__device__ __forceinline__ uint32_t max16(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t max16<__half>(uint32_t a, uint32_t b) {
    const __half2 pair = __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t max16<__nv_bfloat16>(uint32_t a, uint32_t b) {
    const __nv_bfloat162 pair =
        __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Is one of a pair above the limit, or NaN?
template <typename Element>
__device__ __forceinline__ bool exceeds16(uint32_t pair, float limit);
template <>
__device__ __forceinline__ bool exceeds16<__half>(uint32_t pair, float limit) {
    return !__hble2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(limit));
}
template <>
__device__ __forceinline__ bool exceeds16<__nv_bfloat16>(uint32_t pair, float limit) {
    return !__hble2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(limit));
}

// Two neighbouring elements of global memory in one register.
template <typename Element>
__device__ __forceinline__ uint32_t load_pair(const Element* source, bool aligned) {
    if (aligned) return load_vector<uint32_t>(source);
    return bits16(source[0]) | bits16(source[1]) << 16;
}

// Two sums into global memory, rounded to Element.
template <typename Element>
__device__ __forceinline__ void store_pair(Element* target, float low, float high, bool aligned) {
    if (aligned) {
        store_vector(target, pack16<Element>(low, high));
    } else {
        target[0] = from_float<Element>(low);
        target[1] = from_float<Element>(high);
    }
}

// Eight neighbouring elements of global memory.
template <typename Element>
__device__ __forceinline__ uint4 load_eight(const Element* source, bool aligned) {
    if (aligned) return load_vector<uint4>(source);
    return {load_pair(source, false), load_pair(source + 2, false), load_pair(source + 4, false),
            load_pair(source + 6, false)};
}

// The same the other way round.
template <typename Element>
__device__ __forceinline__ void store_eight(Element* target, uint4 eight, bool aligned) {
    if (aligned) {
        store_vector(target, eight);
    } else {
        const Element* source = reinterpret_cast<const Element*>(&eight);
#pragma unroll
        for (int i = 0; i < 8; ++i) target[i] = source[i];
    }
}

// ---- Tiles in shared memory, one row a key ----

// Rows lie so far apart that the eight rows of a matrix that ldmatrix reads fall into different banks.
template <int D>
constexpr int kPitch16 = D + 8;

template <typename Element, int kKeys, int D>
using KeyTile = Element[kKeys][kPitch16<D>];

// Rows 0..count-1 of source into tile, the rest of it zeros, by kThreads threads of which this is number `thread`.
// Zeros matter: a weight of 0 times whatever lies beyond the last key would be NaN if that were NaN or infinite.
template <int D, int kThreads, int kKeys, typename Element>
__device__ __forceinline__ void load_keys(KeyTile<Element, kKeys, D>& tile, const Element* source, int64_t token_stride,
                                          int count, int thread, bool aligned) {
    constexpr int kParts = D / 8;
    for (int part = thread; part < kKeys * kParts; part += kThreads) {
        const int row = part / kParts;
        const int column = part % kParts * 8;
        uint4 eight = {0, 0, 0, 0};
        if (row < count) eight = load_eight(source + row * token_stride + column, aligned);
        store_vector(&tile[row][column], eight);
    }
}

// load_keys, except that where rows are aligned the data lands at copy_async_wait.
template <int D, int kThreads, int kKeys, typename Element>
__device__ __forceinline__ void copy_keys_async(KeyTile<Element, kKeys, D>& tile, const Element* source,
                                                int64_t token_stride, int count, int thread, bool aligned) {
    if (!aligned) {
        load_keys<D, kThreads>(tile, source, token_stride, count, thread, false);
        return;
    }
    constexpr int kParts = D / 8;
#pragma unroll
    for (int first = 0; first < kKeys * kParts; first += kThreads) {
        const int part = first + thread;
        if (kKeys * kParts % kThreads != 0 && part >= kKeys * kParts) break;
        const int row = part / kParts;
        const int column = part % kParts * 8;
        copy_async<16>(&tile[row][column], source + row * token_stride + column, row < count);
    }
}

// ---- A warp's fragments ----

// The queries of kRowTiles x 16 rows as the left factor of m16n8k16. Rows that do not exist are the last one again:
// what they compute is not written.
template <int D, int kRowTiles>
using QueryFragments = uint32_t[kRowTiles][D / 16][4];

template <int D, int kRowTiles, typename Element>
__device__ __forceinline__ void load_queries(QueryFragments<D, kRowTiles>& q, const Element* first,
                                             int64_t token_stride, int rows, int lane, bool aligned) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(tile * 16 + half * 8 + lane / 4, rows - 1);
            const Element* source = first + row * token_stride + lane % 4 * 2;
#pragma unroll
            for (int depth = 0; depth < D / 16; ++depth) {
                q[tile][depth][half] = load_pair(source + depth * 16, aligned);
                q[tile][depth][half + 2] = load_pair(source + depth * 16 + 8, aligned);
            }
        }
    }
}

// Scores or sums of 16 rows x 8 columns: row lane / 4 (first two numbers) and 8 further down, columns 2 (lane % 4) + 0,
// 1.
using Fragment = float[4];

// scores += q k for the 16 keys that begin at tile row `key`.
template <typename Element, int D, int kRowTiles, int kKeys>
__device__ __forceinline__ void score_keys(Fragment (&scores)[kRowTiles][2], const QueryFragments<D, kRowTiles>& q,
                                           const KeyTile<Element, kKeys, D>& k_tile, int key, int lane) {
    const Element* row = &k_tile[key + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
#pragma unroll
    for (int depth = 0; depth < D / 16; ++depth) {
        uint32_t k[4];
        ldmatrix_x4(k, row + depth * 16);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
            mma_m16n8k16<Element>(scores[tile][0], q[tile][depth], {k[0], k[1]});
            mma_m16n8k16<Element>(scores[tile][1], q[tile][depth], {k[2], k[3]});
        }
    }
}

// accumulator += weights v for the 16 keys that begin at tile row `key`.
template <typename Element, int D, int kRowTiles, int kKeys>
__device__ __forceinline__ void add_values(Fragment (&accumulator)[kRowTiles][D / 8],
                                           const uint32_t (&weights)[kRowTiles][4],
                                           const KeyTile<Element, kKeys, D>& v_tile, int key, int lane) {
    const Element* row = &v_tile[key + lane % 16][lane / 16 * 8];
#pragma unroll
    for (int column = 0; column < D / 16; ++column) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, row + column * 16);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
            mma_m16n8k16<Element>(accumulator[tile][column * 2], weights[tile], {v[0], v[1]});
            mma_m16n8k16<Element>(accumulator[tile][column * 2 + 1], weights[tile], {v[2], v[3]});
        }
    }
}

// row_sums += the weights of each row, by a product with ones: all columns of a row then hold its sum.
template <typename Element, int kRowTiles>
__device__ __forceinline__ void add_row_sums(Fragment (&row_sums)[kRowTiles], const uint32_t (&weights)[kRowTiles][4]) {
    const uint32_t ones = pack16<Element>(1.0f, 1.0f);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) mma_m16n8k16<Element>(row_sums[tile], weights[tile], {ones, ones});
}

// ---- A row's softmax: a row is spread over the four lanes of a quad ----

// Multiplied with a raw score it makes exp2 of the product what exp of the scaled score was. Never 0, so that a hidden
// score stays hidden: -inf times 0 would be NaN. What 2^-100 leaves of a score is as good as nothing.
inline float nonzero_scale_log2(const AttentionArgs& args) {
    constexpr double kLog2E = 1.4426950408889634;
    const float factor = static_cast<float>(args.exact_scale * kLog2E);
    return factor == 0.0f ? 0x1p-100f : factor;
}

// A raw score that times `factor` is minus infinity.
__device__ __forceinline__ float hidden_score(float factor) { return factor < 0.0f ? INFINITY : -INFINITY; }

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, 1));
    return fmaxf(value, __shfl_xor_sync(kFullMask, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    return value + __shfl_xor_sync(kFullMask, value, 2);
}

// Where a row's maximum starts: finite, so that a hidden score relative to it has weight 0, not NaN.
constexpr float kLowestReference = -3.0e+38f;

// Hides, in 16 rows x 8 keys, the keys from `sees` on; `first` is the fragment's first key.
__device__ __forceinline__ void hide_keys(Fragment& scores, int first, const int (&sees)[2], int lane, float hidden) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i % 2 >= sees[i / 2] - lane % 4 * 2) scores[i] = hidden;
    }
}

// ---- Guarded weights: relative to a reference that is raised only when a weight grows too large ----

// What the weights of a lane's rows are relative to.
template <int kRowTiles>
struct References {
    float of[kRowTiles][2];
    bool is_steep = false;  // some weight grew too large: from then on scores are looked at before they become weights

    // The largest score of each row among 16 keys, times factor.
    static __device__ __forceinline__ float largest(const Fragment (&scores)[2], int half, float factor) {
        const float raw = fmaxf(fmaxf(scores[0][half * 2], scores[0][half * 2 + 1]),
                                fmaxf(scores[1][half * 2], scores[1][half * 2 + 1]));
        return __fmul_rn(quad_max(fmaxf(raw, kLowestReference)), factor);
    }

    // Begins with each row's largest score among its first 16 keys, or a little less, by which a fused product can
    // differ: that weight is then at least 1.
    __device__ __forceinline__ void begin(const Fragment (&scores)[kRowTiles][2], float factor) {
        constexpr float kRounding = 0x1p-22f;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float first = largest(scores[tile], half, factor);
                of[tile][half] = first - fabsf(first) * kRounding;
            }
        }
    }
};

// Factors that scores and queries take so that larger scores always weigh more: the sign moves to the queries.
template <int D, int kRowTiles>
__device__ __forceinline__ void make_factor_positive(QueryFragments<D, kRowTiles>& q, float factor) {
    const uint32_t signs = factor < 0.0f ? 0x80008000u : 0u;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int depth = 0; depth < D / 16; ++depth) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[tile][depth][i] ^= signs;
        }
    }
}

// The weights of 16 keys and the largest of them. kFused: by one multiply-add a score; else as rounded as references
// are, so that a weight never exceeds 1 by a large score's last place.
template <typename Element, bool kFused, int kRowTiles>
__device__ __forceinline__ uint32_t weigh(uint32_t (&weights)[kRowTiles][4], const Fragment (&scores)[kRowTiles][2],
                                          const References<kRowTiles>& references, float factor) {
    uint32_t largest = 0;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float weight[2];
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const float score = scores[tile][i / 2][i % 2 * 2 + column];
                const float reference = references.of[tile][i % 2];
                weight[column] =
                    exp2_approx(kFused ? score * factor - reference : __fmul_rn(score, factor) - reference);
            }
            weights[tile][i] = pack16<Element>(weight[0], weight[1]);
            largest = max16<Element>(largest, weights[tile][i]);
        }
    }
    return largest;
}

// The weights of 16 keys (factor is not negative). Where references must be raised, the sums so far follow.
template <typename Element, int D, int kRowTiles>
__device__ __forceinline__ void guarded_weights(uint32_t (&weights)[kRowTiles][4],
                                                const Fragment (&scores)[kRowTiles][2],
                                                References<kRowTiles>& references, Fragment (&row_sums)[kRowTiles],
                                                Fragment (&sums)[kRowTiles][D / 8], float factor) {
    constexpr float kMostAbove = 14.0f;  // powers of two; fp16 ends at 16
    if (!references.is_steep) {
        const uint32_t largest = weigh<Element, true>(weights, scores, references, factor);
        references.is_steep = __any_sync(kFullMask, exceeds16<Element>(largest, 16384.0f));
        if (!references.is_steep) return;
    }
    float largest[kRowTiles][2];
    bool is_above = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[tile][half] = References<kRowTiles>::largest(scores[tile], half, factor);
            is_above = is_above || largest[tile][half] > references.of[tile][half] + kMostAbove;
        }
    }
    if (__any_sync(kFullMask, is_above)) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float raised = fmaxf(largest[tile][half], references.of[tile][half]);
                const float rescale = exp2_approx(references.of[tile][half] - raised);
                references.of[tile][half] = raised;
                row_sums[tile][half * 2] *= rescale;
#pragma unroll
                for (int column = 0; column < D / 8; ++column) {
                    sums[tile][column][half * 2] *= rescale;
                    sums[tile][column][half * 2 + 1] *= rescale;
                }
            }
        }
    }
    weigh<Element, false>(weights, scores, references, factor);
}

// Writes 16 rows x D sums, each times its row's factor. rows: those that exist.
template <int D, typename Element>
__device__ __forceinline__ void store_rows(Element* first, int64_t token_stride, const Fragment (&sums)[D / 8],
                                           const float (&factors)[2], int rows, int lane, bool aligned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + lane / 4;
        if (row >= rows) continue;
        Element* target = first + row * token_stride + lane % 4 * 2;
#pragma unroll
        for (int column = 0; column < D / 8; ++column) {
            store_pair(target + column * 8, sums[column][half * 2] * factors[half],
                       sums[column][half * 2 + 1] * factors[half], aligned);
        }
    }
}

}  // namespace tilerank
