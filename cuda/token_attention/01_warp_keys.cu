// A block a sequence and head: groups of lanes take keys in turn, eight dimensions a lane, each group with a softmax of its
// own; groups and warps are merged at the end.
// Prediction: 7 us for 50 queries over 16,830 keys of 12 heads in fp16, from 20 by a kernel for many queries a sequence:
//   26 MB of keys and values in 6 us.
// Answer: metrics/<machine>/bench_rerank.json and docs/encoder.md.
#include "common/moments.cuh"
#include "common/token_attention.h"

namespace tilerank {
namespace warp_keys {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kLaneDims = 8;
constexpr int kAtOnce = 4;  // keys of a group whose loads are under way together

template <typename Element>
__device__ __forceinline__ void load_dims(float (&values)[kLaneDims], const Element* source, bool aligned) {
    constexpr int kPart = 16 / sizeof(Element);
#pragma unroll
    for (int first = 0; first < kLaneDims; first += kPart) {
        float part[kPart];
        load_floats(part, source + first, kPart, aligned);
#pragma unroll
        for (int i = 0; i < kPart; ++i) values[first + i] = part[i];
    }
}

// What some keys give: sum of exp2(score - largest), and the values weighted by that.
struct Partial {
    float largest = -INFINITY;
    float sum = 0.0f;
    float values[kLaneDims] = {};

    __device__ __forceinline__ void merge(float other_largest, float other_sum, const float (&others)[kLaneDims]) {
        const float most = fmaxf(largest, other_largest);
        if (most == -INFINITY) return;
        const float own = exp2_approx(largest - most), other = exp2_approx(other_largest - most);
        largest = most;
        sum = sum * own + other_sum * other;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) values[i] = values[i] * own + others[i] * other;
    }
};

// kGroup: lanes that share a key, head_dim / 8 of which have dimensions.
template <typename Element, int kGroup>
__global__ void __launch_bounds__(kThreads) kernel(TokenAttentionArgs args, bool aligned) {
    constexpr int kGroups = kWarpSize / kGroup;
    SHARED(float, merged, [kWarps][kGroup][kLaneDims + 2]);
    let_next_begin();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, place = lane % kGroup;
    const int64_t sequence = blockIdx.x / args.heads, head = blockIdx.x % args.heads;
    // Bounds are clamped as in tilerank_attention_varlen_params.
    const int64_t begin = clamp(static_cast<int64_t>(args.cu_seqlens_k[sequence]), 0, args.total_k);
    const int64_t end = clamp(static_cast<int64_t>(args.cu_seqlens_k[sequence + 1]), begin, args.total_k);
    const bool has_dims = place * kLaneDims < args.head_dim;
    const int64_t dim = has_dims ? place * kLaneDims : 0;
    const Element* k = static_cast<const Element*>(args.k) + head * args.k_strides[0] + dim;
    const Element* v = static_cast<const Element*>(args.v) + head * args.v_strides[0] + dim;

    wait_for_previous();
    constexpr float kLog2e = 1.44269504f;
    float q[kLaneDims];
    load_dims(q, static_cast<const Element*>(args.q) + sequence * args.q_strides[1] + head * args.q_strides[0] + dim,
              aligned);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) q[i] = has_dims ? q[i] * static_cast<float>(args.scale * kLog2e) : 0.0f;

    Partial partial;
    for (int64_t first = begin + (warp * kGroups + lane / kGroup) * kAtOnce; first - lane / kGroup * kAtOnce < end;
         first += kWarps * kGroups * kAtOnce) {
        float keys[kAtOnce][kLaneDims], values[kAtOnce][kLaneDims];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t key = first + i < end ? first + i : end - 1;  // one that exists; it gets no weight
            load_dims(keys[i], k + key * args.k_strides[1], aligned);
            load_dims(values[i], v + key * args.v_strides[1], aligned);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float score = 0.0f;
#pragma unroll
            for (int j = 0; j < kLaneDims; ++j) score = fmaf(q[j], keys[i][j], score);
#pragma unroll
            for (int distance = kGroup / 2; distance > 0; distance /= 2) {
                score += __shfl_xor_sync(kFullMask, score, distance);
            }
            if (first + i < end) partial.merge(score, 1.0f, values[i]);
        }
    }
#pragma unroll
    for (int distance = kGroup; distance < kWarpSize; distance *= 2) {
        float others[kLaneDims];
        const float largest = __shfl_xor_sync(kFullMask, partial.largest, distance);
        const float sum = __shfl_xor_sync(kFullMask, partial.sum, distance);
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) others[i] = __shfl_xor_sync(kFullMask, partial.values[i], distance);
        partial.merge(largest, sum, others);
    }
    if (lane < kGroup) {
        merged[warp][place][0] = partial.largest;
        merged[warp][place][1] = partial.sum;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) merged[warp][place][2 + i] = partial.values[i];
    }
    __syncthreads();
    if (warp > 0 || lane >= kGroup || !has_dims) return;
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
        float others[kLaneDims];
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) others[i] = merged[other][place][2 + i];
        partial.merge(merged[other][place][0], merged[other][place][1], others);
    }
    const float share = partial.sum > 0.0f ? 1.0f / partial.sum : 0.0f;  // without a key the result is zeros
    Element* out = static_cast<Element*>(args.out) + sequence * args.out_strides[1] + head * args.out_strides[0] + dim;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) out[i] = from_float<Element>(partial.values[i] * share);
}

bool is_aligned(const TokenAttentionArgs& args) {
    const uintptr_t pointers = reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k) |
                               reinterpret_cast<uintptr_t>(args.v);
    const int64_t strides = args.q_strides[0] | args.q_strides[1] | args.k_strides[0] | args.k_strides[1] |
                            args.v_strides[0] | args.v_strides[1];
    return pointers % 16 == 0 && strides % (args.dtype == TILERANK_FP32 ? 4 : 8) == 0;
}

template <typename Element>
tilerank_status launch_typed(const TokenAttentionArgs& args, void* stream) {
    const auto run = args.head_dim <= 32   ? kernel<Element, 4>
                     : args.head_dim <= 64 ? kernel<Element, 8>
                                           : kernel<Element, 16>;
    return launch_blocks_overlapped(args.overlap != 0, "warp_keys", run, args.batch * args.heads, kThreads, 0, stream,
                                    args, is_aligned(args));
}

}  // namespace warp_keys

tilerank_status token_attention_warp_keys(const TokenAttentionArgs& args, void*, void* stream) {
    switch (args.dtype) {
        case TILERANK_FP32:
            return warp_keys::launch_typed<float>(args, stream);
        case TILERANK_FP16:
            return warp_keys::launch_typed<__half>(args, stream);
        default:
            return warp_keys::launch_typed<__nv_bfloat16>(args, stream);
    }
}

}  // namespace tilerank
