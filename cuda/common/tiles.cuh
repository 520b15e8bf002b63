// Shared policy of the fp32 kernels: which rows a block works on, and how rows move between global memory, registers
// and shared memory: 16 bytes at a time where every row is so aligned, word by word where one is not.
#pragma once

#include "common/attention.cuh"

namespace tilerank {

// ---- A block's rows ----

// Blocks needed when each takes `rows` queries of one (sequence, head).
inline int64_t query_blocks(const AttentionArgs& args, int rows) {
    return args.batch * args.heads * ((args.q_len + rows - 1) / rows);
}

// Positions within a sequence are 32 bits wide here, to spare registers; the registry rows of these kernels say so.
constexpr int kMaxKeys = 1 << 30;

// What a block works on: some queries of one (sequence, head), and its keys.
struct QueryBlock {
    const float* q;  // the first query of the block; token strides lead to the next
    float* out;
    const float* k;  // the first key of the sequence
    const float* v;
    int causal_keys;  // what the first query may see if causality alone counted
    int rows;         // queries of the block that exist; 0: the sequence is shorter than the longest (packed)
    int k_len;        // keys of the sequence that count
    // The keys as trip counts: 0..every_row_sees-1 need no mask, from any_row_sees on there is nothing to compute.
    int every_row_sees;
    int any_row_sees;
};

// How many keys the block's row `row` sees, counted from key `first`. In loops over tiles this form keeps no register a
// row.
__device__ __forceinline__ int row_sees(const QueryBlock& block, int row, int first = 0) {
    return min(block.k_len - first, block.causal_keys - first + row);
}

// The queries tile * rows .. of one (sequence, head).
__device__ __forceinline__ QueryBlock query_block_at(const AttentionArgs& args, int rows, int64_t sequence,
                                                     int64_t head, unsigned tile) {
    const HeadView<float> view = head_view<float>(args, sequence, head);
    const int64_t first_query = static_cast<int64_t>(tile) * rows;
    QueryBlock block;
    block.q = view.q + first_query * args.q_token_stride;
    block.out = view.out + first_query * args.out_token_stride;
    block.k = view.k;
    block.v = view.v;
    block.rows = static_cast<int>(clamp(view.q_len - first_query, 0, rows));
    block.k_len = static_cast<int>(view.k_len);
    block.causal_keys = static_cast<int>(args.causal ? clamp(first_query + 1, 1, kMaxKeys) : kMaxKeys);
    block.every_row_sees = row_sees(block, 0);
    block.any_row_sees = row_sees(block, block.rows - 1);
    return block;
}

// Where block number `index` of query_blocks(args, rows) stands in the order sequence, head, tile: the blocks of one
// head are neighbours, which share its keys in L2.
struct BlockPlace {
    unsigned sequence;
    unsigned head;
    unsigned tile;
};

__device__ __forceinline__ BlockPlace block_place(const AttentionArgs& args, int rows, unsigned index) {
    const unsigned tiles = static_cast<unsigned>((args.q_len + rows - 1) / rows);  // no more than there are blocks
    const unsigned heads = static_cast<unsigned>(args.heads);
    return {index / tiles / heads, index / tiles % heads, index % tiles};
}

__device__ __forceinline__ QueryBlock query_block(const AttentionArgs& args, int rows, unsigned index) {
    const BlockPlace place = block_place(args, rows, index);
    return query_block_at(args, rows, place.sequence, place.head, place.tile);
}

// How many of the keys first .. first+count-1 lie below `end`.
__device__ __forceinline__ int keys_below(int end, int first, int count) {
    return end - first < 0 ? 0 : (end - first < count ? end - first : count);
}

// ---- Rows of D floats ----

// Does every row of q, k, v and out begin at a multiple of 16 bytes?
inline bool rows_aligned_16(const AttentionArgs& args) {
    const uintptr_t pointers = reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k) |
                               reinterpret_cast<uintptr_t>(args.v) | reinterpret_cast<uintptr_t>(args.out);
    const int64_t strides = args.q_batch_stride | args.q_head_stride | args.q_token_stride | args.k_batch_stride |
                            args.k_head_stride | args.k_token_stride | args.v_batch_stride | args.v_head_stride |
                            args.v_token_stride | args.out_batch_stride | args.out_head_stride | args.out_token_stride;
    return pointers % 16 == 0 && strides % 4 == 0;
}

// Four floats from global memory.
__device__ __forceinline__ float4 load4(const float* source, bool aligned) {
    if (aligned) return load_vector<float4>(source);
    return {source[0], source[1], source[2], source[3]};
}

__device__ __forceinline__ void store4(float* target, float4 value, bool aligned) {
    if (aligned) {
        store_vector(target, value);
    } else {
        target[0] = value.x, target[1] = value.y, target[2] = value.z, target[3] = value.w;
    }
}

// A row into registers, times factor.
template <int D>
__device__ __forceinline__ void load_row(float (&row)[D], const float* source, float factor, bool aligned) {
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        const float4 part = load4(source + d, aligned);
        row[d] = part.x * factor, row[d + 1] = part.y * factor, row[d + 2] = part.z * factor,
        row[d + 3] = part.w * factor;
    }
}

// A row out of registers, times factor.
template <int D>
__device__ __forceinline__ void store_row(float* target, const float (&row)[D], float factor, bool aligned) {
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        store4(target + d, {row[d] * factor, row[d + 1] * factor, row[d + 2] * factor, row[d + 3] * factor}, aligned);
    }
}

// ---- A row in registers with a row in shared memory, which is read 16 bytes at a time ----

template <int D>
__device__ __forceinline__ float dot(const float (&q)[D], const float* k_row) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        const float4 k = load_vector<float4>(k_row + d);
        sum += q[d] * k.x;
        sum += q[d + 1] * k.y;
        sum += q[d + 2] * k.z;
        sum += q[d + 3] * k.w;
    }
    return sum;
}

template <int D>
__device__ __forceinline__ void add_scaled(float (&accumulator)[D], float weight, const float* v_row) {
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        const float4 v = load_vector<float4>(v_row + d);
        accumulator[d] += weight * v.x;
        accumulator[d + 1] += weight * v.y;
        accumulator[d + 2] += weight * v.z;
        accumulator[d + 3] += weight * v.w;
    }
}

template <int D>
__device__ __forceinline__ void scale_row(float (&row)[D], float factor) {
#pragma unroll
    for (int d = 0; d < D; ++d) row[d] *= factor;
}

// ---- Tiles in shared memory ----

// How threads share the copy of a tile: each moves four columns (`column` and up) of every kStep-th row from `row` on.
template <int D, int kThreads, int kRows>
struct TileShare {
    static constexpr int kParts = D / 4;
    static constexpr int kStep = kThreads / kParts;
    static_assert(D % 4 == 0 && kStep > 0 && kRows % kStep == 0);

    int row;
    int column;
    bool takes_part;  // threads left over when kParts does not divide kThreads do not

    __device__ __forceinline__ explicit TileShare(int thread)
        : row(thread / kParts), column(thread % kParts * 4), takes_part(thread < kStep * kParts) {}
};

// Rows 0..count-1 of source into tile, the rest of it zeros, by kThreads threads of which this is number `thread`.
// Zeros matter: a weight of 0 times whatever lies beyond the last key would be NaN if that were NaN or infinite.
template <int D, int kThreads, int kRows, int kPitch>
__device__ __forceinline__ void load_tile(float (&tile)[kRows][kPitch], const float* source, int64_t token_stride,
                                          int count, int thread, bool aligned, float factor = 1.0f) {
    using Share = TileShare<D, kThreads, kRows>;
    const Share share(thread);
    if (!share.takes_part) return;
    const auto load_rows = [&](auto load_four) {
        const float* from = source + share.row * token_stride + share.column;
#pragma unroll 4
        for (int i = 0; i < kRows; i += Share::kStep) {
            const int row = share.row + i;
            const float4 four = row < count ? load_four(from) : float4{0, 0, 0, 0};
            store_vector(&tile[row][share.column],
                         float4{four.x * factor, four.y * factor, four.z * factor, four.w * factor});
            from += Share::kStep * token_stride;
        }
    };
    if (aligned) {
        load_rows([](const float* from) { return load_vector<float4>(from); });
    } else {
        load_rows([](const float* from) { return float4{from[0], from[1], from[2], from[3]}; });
    }
}

// load_tile, except that the data lands at copy_async_wait.
template <int D, int kThreads, int kRows, int kPitch>
__device__ __forceinline__ void copy_tile_async(float (&tile)[kRows][kPitch], const float* source, int64_t token_stride,
                                                int count, int thread, bool aligned) {
    using Share = TileShare<D, kThreads, kRows>;
    const Share share(thread);
    if (!share.takes_part) return;
    const auto copy_rows = [&](auto copy_four) {
        const float* from = source + share.row * token_stride + share.column;
#pragma unroll 4
        for (int i = 0; i < kRows; i += Share::kStep) {
            const int row = share.row + i;
            copy_four(&tile[row][share.column], from, row < count);
            from += Share::kStep * token_stride;
        }
    };
    if (aligned) {
        copy_rows([](float* to, const float* from, bool in_range) { copy_async<16>(to, from, in_range); });
    } else {
        copy_rows([](float* to, const float* from, bool in_range) {
#pragma unroll
            for (int word = 0; word < 4; ++word) copy_async<4>(to + word, from + word, in_range);
        });
    }
}

}  // namespace tilerank
