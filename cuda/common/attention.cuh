// Shared policies of the attention kernels: element types, where a sequence lives, which keys a query may see.
#pragma once

#include <cmath>

#include "common/attention.h"
#include "common/device.h"

namespace tilerank {

// ---- Elements: fp32, fp16 or bf16 in memory, fp32 in registers ----

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// ---- Where the rows of one (sequence, head) pair are ----

// Row i of q is q + i * args.q_token_stride, and so on for k, v and out.
template <typename Element>
struct HeadView {
    const Element* q;
    const Element* k;
    const Element* v;
    Element* out;
    int64_t q_len;  // queries of this sequence, at most args.q_len
    int64_t k_len;  // keys of this sequence that count, at most args.k_len: nothing beyond may be read
};

__device__ __forceinline__ int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : (value > high ? high : value);
}

// The keys that count in a padded sequence.
__device__ __forceinline__ int64_t key_length(const AttentionArgs& args, int64_t sequence) {
    if (args.key_lengths_type == TILERANK_LENGTHS_NONE) return args.k_len;
    const int64_t length = args.key_lengths_type == TILERANK_LENGTHS_INT32
                               ? static_cast<const int32_t*>(args.key_lengths)[sequence]
                               : static_cast<const int64_t*>(args.key_lengths)[sequence];
    return clamp(length, 0, args.k_len);
}

// Rows begin .. begin+length-1 of a packed tensor, whatever the device's numbers say: never outside 0..total.
struct PackedRange {
    int64_t begin;
    int64_t length;
};
__device__ __forceinline__ PackedRange packed_range(const int32_t* cu_seqlens, int64_t sequence, int64_t total,
                                                    int64_t max_length) {
    const int64_t begin = clamp(cu_seqlens[sequence], 0, total);
    const int64_t end = clamp(cu_seqlens[sequence + 1], begin, total);
    return {begin, clamp(end - begin, 0, max_length)};
}

// The view of (sequence, head) in either layout.
template <typename Element>
__device__ __forceinline__ HeadView<Element> head_view(const AttentionArgs& args, int64_t sequence, int64_t head) {
    const int64_t kv_head = head / (args.heads / args.kv_heads);
    PackedRange queries{0, args.q_len};
    PackedRange keys{0, 0};
    if (args.cu_seqlens_q != nullptr) {
        queries = packed_range(args.cu_seqlens_q, sequence, args.total_q, args.q_len);
        keys = packed_range(args.cu_seqlens_k, sequence, args.total_k, args.k_len);
    } else {
        keys.length = key_length(args, sequence);
    }
    return {static_cast<const Element*>(args.q) + sequence * args.q_batch_stride + head * args.q_head_stride +
                queries.begin * args.q_token_stride,
            static_cast<const Element*>(args.k) + sequence * args.k_batch_stride + kv_head * args.k_head_stride +
                keys.begin * args.k_token_stride,
            static_cast<const Element*>(args.v) + sequence * args.v_batch_stride + kv_head * args.v_head_stride +
                keys.begin * args.v_token_stride,
            static_cast<Element*>(args.out) + sequence * args.out_batch_stride + head * args.out_head_stride +
                queries.begin * args.out_token_stride,
            queries.length,
            keys.length};
}

// ---- Which keys a query may see ----

// Query `query` sees keys 0..visible_keys-1, before any mask.
__device__ __forceinline__ int64_t visible_keys(const AttentionArgs& args, int64_t k_len, int64_t query) {
    return args.causal && query + 1 < k_len ? query + 1 : k_len;
}

// What the mask adds to the scaled score at (sequence, head, query, key): minus infinity hides the key.
__device__ __forceinline__ float mask_bias(const AttentionArgs& args, int64_t sequence, int64_t head, int64_t query,
                                           int64_t key) {
    if (args.mask_type == TILERANK_MASK_NONE) return 0.0f;
    const int64_t at = sequence * args.mask_batch_stride + head * args.mask_head_stride +
                       query * args.mask_query_stride + key * args.mask_key_stride;
    switch (args.mask_type) {
        case TILERANK_MASK_BOOL:
            return static_cast<const uint8_t*>(args.mask)[at] != 0 ? 0.0f : -INFINITY;
        case TILERANK_MASK_FP32:
            return static_cast<const float*>(args.mask)[at];
        case TILERANK_MASK_FP16:
            return to_float(static_cast<const __half*>(args.mask)[at]);
        default:
            return to_float(static_cast<const __nv_bfloat16*>(args.mask)[at]);
    }
}

// ---- Launching ----

// Multiprocessors of the current device; 0 when CUDA cannot say.
inline int multiprocessors() {
#if defined(TILERANK_HOST_BUILD)
    return 3;
#else
    int device = 0;
    int count = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
#endif
}

// Launches a one-dimensional grid for the variant called name, which may ask for more blocks than a grid can have.
// overlap: as launch_overlapped() has it.
template <typename... Parameters>
tilerank_status launch_blocks_overlapped(bool overlap, const char* name, void (*kernel)(Parameters...), int64_t blocks,
                                         int threads, size_t shared_bytes, void* stream,
                                         typename Exactly<Parameters>::type... arguments) {
    constexpr int64_t kMostBlocks = 2147483647;  // of gridDim.x, on every architecture
    if (blocks > kMostBlocks) {
        return refuse(TILERANK_UNSUPPORTED, "variant %s: batch, heads and queries need %lld blocks; at most %lld", name,
                      static_cast<long long>(blocks), static_cast<long long>(kMostBlocks));
    }
    const int error =
        launch_overlapped(overlap, kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                          shared_bytes, stream, arguments...);
    if (error == 0) return TILERANK_OK;
    return refuse(TILERANK_LAUNCH_FAILED, "variant %s: the launch was refused: %s", name, launch_error_text(error));
}

template <typename... Parameters>
tilerank_status launch_blocks(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
                              size_t shared_bytes, void* stream, typename Exactly<Parameters>::type... arguments) {
    return launch_blocks_overlapped(false, name, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace tilerank
