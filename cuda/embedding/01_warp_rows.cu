// One warp a row: the rows of the three tables are read by vectors of four, added and normalised in registers.
// Prediction: 8 us for 16,830 rows of 384 in fp16, from 60 as four kernels of a library: 13 MB are written, and the
//   words' rows, 13 MB, come from a table of 23 MB.
// Answer: metrics/<machine>/bench_encoder.json and docs/encoder.md.
#include "common/embedding.h"
#include "common/device.h"

namespace tilerank {
namespace warp_rows {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / kWarpSize;  // of a block

template <typename Element>
__device__ __forceinline__ void load4(float (&values)[4], const Element* source) {
    if constexpr (sizeof(Element) == 4) {
        const float4 all = load_vector<float4>(source);
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
    } else {
        struct alignas(8) Four {
            Element at[4];
        };
        const Four all = load_vector<Four>(source);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(all.at[i]);
    }
}

template <typename Element>
__device__ __forceinline__ void store4(Element* target, const float (&values)[4]) {
    struct alignas(4 * sizeof(Element)) Four {
        Element at[4];
    };
    Four all;
#pragma unroll
    for (int i = 0; i < 4; ++i) all.at[i] = static_cast<Element>(values[i]);
    store_vector(target, all);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance);
    }
    return value;
}

__device__ __forceinline__ int64_t clamped(const int32_t* indices, int64_t row, int64_t count) {
    const int64_t index = indices[row];
    return index < 0 ? 0 : index < count ? index : count - 1;
}

// width is kParts x 128.
template <typename Element, int kParts>
__global__ void __launch_bounds__(kThreads) kernel(EmbeddingArgs args) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarpSize;
    if (row >= args.rows) return;
    const int first = threadIdx.x % kWarpSize * 4;
    const Element* tables[3] = {
        static_cast<const Element*>(args.words) + clamped(args.ids, row, args.word_count) * args.width,
        static_cast<const Element*>(args.positions) + clamped(args.places, row, args.position_count) * args.width,
        args.types == nullptr ? nullptr
                              : static_cast<const Element*>(args.types) +
                                    clamped(args.type_ids, row, args.type_count) * args.width};
    float sums[kParts][4];
    float mean = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        float other[4];
        load4(sums[part], tables[0] + part * 128 + first);
        load4(other, tables[1] + part * 128 + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[part][i] += other[i];
        if (tables[2] != nullptr) {
            load4(other, tables[2] + part * 128 + first);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[part][i] += other[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) mean += sums[part][i];
    }
    mean = warp_sum(mean) * (1.0f / (kParts * 128));
    float variance = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[part][i] -= mean;
            variance = fmaf(sums[part][i], sums[part][i], variance);
        }
    }
    const float factor = 1.0f / sqrtf(warp_sum(variance) * (1.0f / (kParts * 128)) + static_cast<float>(args.epsilon));
    Element* out = static_cast<Element*>(args.out) + row * args.out_stride;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        float gamma[4], beta[4];
        load4(gamma, static_cast<const Element*>(args.gamma) + part * 128 + first);
        load4(beta, static_cast<const Element*>(args.beta) + part * 128 + first);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[part][i] = fmaf(sums[part][i] * factor, gamma[i], beta[i]);
        store4(out + part * 128 + first, sums[part]);
    }
}

template <typename Element>
tilerank_status launch_typed(const EmbeddingArgs& args, void* stream) {
    using Kernel = void (*)(EmbeddingArgs);
    constexpr Kernel kKernels[] = {kernel<Element, 1>, kernel<Element, 2>, kernel<Element, 3>, kernel<Element, 4>,
                                   nullptr,            kernel<Element, 6>, nullptr,            kernel<Element, 8>};
    const int64_t parts = args.width / 128;
    if (args.width % 128 != 0 || parts > 8 || kKernels[parts - 1] == nullptr) {
        return refuse(TILERANK_UNSUPPORTED, "variant warp_rows: width is %lld; it serves: 128, 256, 384, 512, 768, 1024",
                      static_cast<long long>(args.width));
    }
    const uintptr_t pointers = reinterpret_cast<uintptr_t>(args.words) | reinterpret_cast<uintptr_t>(args.positions) |
                               reinterpret_cast<uintptr_t>(args.types) | reinterpret_cast<uintptr_t>(args.gamma) |
                               reinterpret_cast<uintptr_t>(args.beta) | reinterpret_cast<uintptr_t>(args.out);
    if (pointers % 16 != 0 || args.out_stride % 4 != 0) {
        return refuse(TILERANK_UNSUPPORTED,
                      "variant warp_rows: a table or out does not begin its rows at a multiple of 16 bytes");
    }
    const int64_t blocks = (args.rows + kRows - 1) / kRows;
    if (blocks > INT32_MAX) {
        return refuse(TILERANK_UNSUPPORTED, "variant warp_rows: rows is %lld; it serves: up to %lld",
                      static_cast<long long>(args.rows), static_cast<long long>(INT32_MAX) * kRows);
    }
    const int error =
        launch(kKernels[parts - 1], dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, args);
    if (error != 0) return refuse(TILERANK_LAUNCH_FAILED, "variant warp_rows: %s", launch_error_text(error));
    return TILERANK_OK;
}

}  // namespace warp_rows

tilerank_status embedding_warp_rows(const EmbeddingArgs& args, void*, void* stream) {
    switch (args.dtype) {
        case TILERANK_FP16:
            return warp_rows::launch_typed<__half>(args, stream);
        case TILERANK_BF16:
            return warp_rows::launch_typed<__nv_bfloat16>(args, stream);
        default:
            return warp_rows::launch_typed<float>(args, stream);
    }
}

}  // namespace tilerank
