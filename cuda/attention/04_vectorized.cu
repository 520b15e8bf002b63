// Vectorized: tiled, but every move is four floats: rows from global to shared memory, q, and the result.
// Prediction: 1,000 us unmasked, from 1,100. The reads that count were 16 bytes wide already, so 900 us of shared
//   memory remain; what goes is three of four instructions of the copies.
// Answer: metrics/<machine>/bench_attention_vectorized.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace vectorized {

constexpr int kThreads = 128;
constexpr int kTileKeys = 32;

template <int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args, bool aligned) {
    SHARED(float, k_tile, [kTileKeys][D]);
    SHARED(float, v_tile, [kTileKeys][D]);
    const QueryBlock block = query_block(args, kThreads, blockIdx.x);
    const int row = threadIdx.x;
    const bool has_row = row < block.rows;

    float q[D];
    load_row(q, block.q + (has_row ? row : 0) * args.q_token_stride, 1.0f, aligned);

    float row_max = -INFINITY;
    for (int first = 0; first < block.k_len; first += kTileKeys) {
        const int keys = keys_below(block.k_len, first, kTileKeys);
        __syncthreads();  // the tile before is no longer read
        load_tile<D, kThreads>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys, threadIdx.x,
                               aligned);
        __syncthreads();
#pragma unroll 1  // more would not fit in registers
        for (int key = 0; key < keys; ++key) row_max = fmaxf(row_max, args.scale * dot(q, k_tile[key]));
    }

    float accumulator[D] = {};
    float row_sum = 0.0f;
    for (int first = 0; first < block.k_len; first += kTileKeys) {
        const int keys = keys_below(block.k_len, first, kTileKeys);
        __syncthreads();
        load_tile<D, kThreads>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys, threadIdx.x,
                               aligned);
        load_tile<D, kThreads>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, keys, threadIdx.x,
                               aligned);
        __syncthreads();
#pragma unroll 1
        for (int key = 0; key < keys; ++key) {
            const float weight = expf(args.scale * dot(q, k_tile[key]) - row_max);
            row_sum += weight;
            add_scaled(accumulator, weight, v_tile[key]);
        }
    }

    if (has_row) store_row(block.out + row * args.out_token_stride, accumulator, normalizer(row_sum), aligned);
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("vectorized", kernel<D>, query_blocks(args, kThreads), kThreads, 0, stream, args,
                         rows_aligned_16(args));
}

}  // namespace vectorized

tilerank_status attention_vectorized(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return vectorized::launch_for<32>(args, stream);
        default:
            return vectorized::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
