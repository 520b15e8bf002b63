// Tiled: register_cached, but the block copies K and V tile by tile into shared memory, each word once for its 128
// rows.
// Prediction: 1,100 us unmasked, from 2,500. The compiler sees that a tile's rows are aligned and reads four words at
//   once, at 2 cycles a read that all lanes share: 24 reads a score are 900 us of shared memory; copying word by word
//   is the rest.
// Answer: metrics/<machine>/bench_attention_tiled.json and docs/ladder.md.
#include "common/softmax.cuh"
#include "common/tiles.cuh"

namespace tilerank {
namespace tiled {

constexpr int kThreads = 128;  // one row each
constexpr int kTileKeys = 32;  // 8 KB of K and V at head_dim 32, 16 KB at 64: several blocks fit on an SM

template <int D>
using Tile = float[kTileKeys][D];

template <int D>
__device__ __forceinline__ void load(Tile<D>& tile, const float* source, int64_t token_stride, int keys) {
#pragma unroll 4  // enough loads in flight; more would take registers from q and the accumulator
    for (int word = threadIdx.x; word < keys * D; word += kThreads) {
        tile[word / D][word % D] = source[word / D * token_stride + word % D];
    }
}

template <int D>
__device__ __forceinline__ float dot(const float (&q)[D], const float (&k_row)[D]) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < D; ++d) sum += q[d] * k_row[d];
    return sum;
}

template <int D>
__global__ void __launch_bounds__(kThreads) kernel(AttentionArgs args) {
    SHARED(float, k_tile, [kTileKeys][D]);
    SHARED(float, v_tile, [kTileKeys][D]);
    const QueryBlock block = query_block(args, kThreads, blockIdx.x);
    const int row = threadIdx.x;
    const bool has_row = row < block.rows;  // threads without one still copy and meet at barriers

    const float* q_row = block.q + (has_row ? row : 0) * args.q_token_stride;
    float q[D];
#pragma unroll
    for (int d = 0; d < D; ++d) q[d] = q_row[d];

    float row_max = -INFINITY;
    for (int first = 0; first < block.k_len; first += kTileKeys) {
        const int keys = keys_below(block.k_len, first, kTileKeys);
        __syncthreads();  // the tile before is no longer read
        load<D>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys);
        __syncthreads();
#pragma unroll 1  // more would not fit in registers
        for (int key = 0; key < keys; ++key) row_max = fmaxf(row_max, args.scale * dot<D>(q, k_tile[key]));
    }

    float accumulator[D] = {};
    float row_sum = 0.0f;
    for (int first = 0; first < block.k_len; first += kTileKeys) {
        const int keys = keys_below(block.k_len, first, kTileKeys);
        __syncthreads();
        load<D>(k_tile, block.k + first * args.k_token_stride, args.k_token_stride, keys);
        load<D>(v_tile, block.v + first * args.v_token_stride, args.v_token_stride, keys);
        __syncthreads();
#pragma unroll 1
        for (int key = 0; key < keys; ++key) {
            const float weight = expf(args.scale * dot<D>(q, k_tile[key]) - row_max);
            row_sum += weight;
#pragma unroll
            for (int d = 0; d < D; ++d) accumulator[d] += weight * v_tile[key][d];
        }
    }

    if (!has_row) return;
    const float factor = normalizer(row_sum);
    float* out_row = block.out + row * args.out_token_stride;
#pragma unroll
    for (int d = 0; d < D; ++d) out_row[d] = accumulator[d] * factor;
}

template <int D>
tilerank_status launch_for(const AttentionArgs& args, void* stream) {
    return launch_blocks("tiled", kernel<D>, query_blocks(args, kThreads), kThreads, 0, stream, args);
}

}  // namespace tiled

tilerank_status attention_tiled(const AttentionArgs& args, void*, void* stream) {
    switch (args.head_dim) {
        case 32:
            return tiled::launch_for<32>(args, stream);
        default:
            return tiled::launch_for<64>(args, stream);
    }
}

}  // namespace tilerank
