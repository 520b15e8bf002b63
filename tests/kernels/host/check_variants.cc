// Runs the attention variants of a libtilerank.so against variant `reference`, through the C interface alone.
//     check_variants [--variant NAME] [--schedule forward|reverse|last_in|random] [--seed N] [--lengths 0,1,31,...]
//                    [--head-dims N]   only the first N of those to try
// One JSON line a failed case and one a variant on stdout:
//     {"variant": "naive", "cases": 120, "refused": 0, "failed": 0, "worst": 0.31, "digest": "0123456789abcdef"}
// (refused: unaligned or odd-strided calls that the variant declines by name; worst: largest error over its limit;
// digest: of the bits of all results.) The case under way goes to stderr first, so that a sanitizer's report has a
// name. Exit status: 0, or 1 if a case failed.
//
// A packed case also runs each of its sequences alone, which must give the same bits.
//
// Every buffer stands between wide gaps, since AddressSanitizer does not see a far read that lands in another buffer.
// Whatever is not a row of the tensor (gaps, space between rows, padding beyond a key length) is NaN or infinity, and
// poisoned where AddressSanitizer runs and the call may not touch it; out must be untouched there.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tilerank.h"

#include "buffers.h"
extern "C" int tilerank_host_set_schedule(const char* name, uint64_t seed);

namespace {

[[noreturn]] void stop(const std::string& message) {
    std::fprintf(stderr, "check_variants: %s\n", message.c_str());
    std::exit(2);
}

enum class Layout {
    kHeadsFirst,   // [batch, head, token, d], with a gap after each head
    kTokensFirst,  // [batch, token, head, d]
    kShifted,      // kHeadsFirst, its first element one element beyond an aligned address
    kOddStride,    // kHeadsFirst with d + 1 elements between tokens
};

// A [batch, heads, tokens, head_dim] tensor in a buffer of its own. Packed tensors have batch 1.
class Tensor {
  public:
    Tensor(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim, int32_t dtype, Layout layout)
        : batch(batch), heads(heads), tokens(tokens), head_dim(head_dim), dtype(dtype) {
        shift_ = layout == Layout::kShifted ? 1 : 0;
        const int64_t pitch = layout == Layout::kOddStride ? head_dim + 1 : head_dim;
        if (layout == Layout::kTokensFirst) {
            strides[2] = heads * head_dim;
            strides[1] = head_dim;
            strides[0] = tokens * heads * head_dim;
        } else {
            strides[2] = pitch;
            strides[1] = tokens * pitch + 16;  // elements; still 16-byte aligned when head_dim allows
            strides[0] = heads * strides[1];
        }
        buffer = std::make_unique<Buffer>((shift_ + std::max(batch * strides[0], int64_t{1})) * element_bytes(dtype));
    }

    int64_t row(int64_t b, int64_t h, int64_t t) const {
        return (shift_ + b * strides[0] + h * strides[1] + t * strides[2]) * element_bytes(dtype);
    }

    float get(int64_t b, int64_t h, int64_t t, int64_t d) const {
        return decode(buffer->data(row(b, h, t) + d * element_bytes(dtype)), dtype);
    }

    void set_row(int64_t b, int64_t h, int64_t t, const std::vector<float>& values) {
        for (int64_t d = 0; d < head_dim; ++d) {
            encode(buffer->data(row(b, h, t) + d * element_bytes(dtype)), dtype, values[static_cast<size_t>(d)]);
        }
    }

    // Only rows may be touched from here on.
    void guard() {
        buffer->close();
        for_each_row(
            [&](int64_t b, int64_t h, int64_t t) { buffer->open(row(b, h, t), head_dim * element_bytes(dtype)); });
    }

    template <typename Visit>
    void for_each_row(const Visit& visit) const {
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t t = 0; t < tokens; ++t) visit(b, h, t);
            }
        }
    }

    void* address() { return buffer->data(row(0, 0, 0)); }

    // Whether bytes outside of the rows still hold what the buffer began with.
    bool untouched_between_rows() {
        std::vector<bool> is_row(static_cast<size_t>(buffer->bytes()), false);
        for_each_row([&](int64_t b, int64_t h, int64_t t) {
            const int64_t first = row(b, h, t);
            std::fill_n(is_row.begin() + first, head_dim * element_bytes(dtype), true);
        });
        buffer->open(-kGapBytes, buffer->bytes() + 2 * kGapBytes);
        for (int64_t at = -kGapBytes; at < buffer->bytes() + kGapBytes; ++at) {
            const bool inside = at >= 0 && at < buffer->bytes() && is_row[static_cast<size_t>(at)];
            if (!inside && *buffer->data(at) != 0xff) return false;
        }
        return true;
    }

    int64_t batch, heads, tokens, head_dim;
    int32_t dtype;
    int64_t strides[3];
    std::unique_ptr<Buffer> buffer;

  private:
    int64_t shift_ = 0;
};

template <typename Element>
std::unique_ptr<Buffer> buffer_of(const std::vector<Element>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(Element));
    auto buffer = std::make_unique<Buffer>(bytes);
    if (bytes > 0) std::memcpy(buffer->data(), values.data(), static_cast<size_t>(bytes));
    buffer->close();
    buffer->open(0, bytes);
    return buffer;
}

// ---- Cases ----------------------------------------------------------------------------------------------------------

enum class Lengths { kNone, kShorter, kWild };  // wild: negative and beyond k_len, clamped by the kernel
enum class Mask { kNone, kBoolean, kBooleanBroadcast, kFp32, kFp16, kBf16 };

struct Case {
    std::string name;
    int64_t batch = 2;
    int64_t heads = 2;
    int64_t kv_heads = 2;
    int64_t q_len = 33;
    int64_t k_len = 33;
    int64_t head_dim = 0;  // 0: the variant's usual one
    bool causal = false;
    Lengths lengths = Lengths::kNone;
    int32_t length_type = TILERANK_LENGTHS_INT32;
    Mask mask = Mask::kNone;
    Layout layout = Layout::kHeadsFirst;
    float input_scale = 1.0f;
    double score_scale = 0.0;       // 0: 1/sqrt(head_dim)
    std::vector<int64_t> packed_q;  // lengths of the sequences; empty: padded
    std::vector<int64_t> packed_k;
    bool every_dtype = false;  // else with the variant's first dtype only
};

std::vector<Case> all_cases(const std::vector<int64_t>& lengths) {
    std::vector<Case> cases;
    const auto add = [&cases](const std::string& name, const auto& change) {
        Case added;
        added.name = name;
        change(added);
        cases.push_back(added);
    };
    for (const int64_t length : lengths) {
        const std::string suffix = " " + std::to_string(length);
        add("key lengths" + suffix, [&](Case& c) {
            c.q_len = c.k_len = length;
            c.lengths = Lengths::kShorter;
            c.every_dtype = length == 33 || length == 65;
        });
        add("dense" + suffix, [&](Case& c) { c.q_len = c.k_len = length, c.batch = 1; });
        add("causal" + suffix, [&](Case& c) { c.q_len = c.k_len = length, c.batch = 1, c.causal = true; });
        add("packed" + suffix, [&](Case& c) {
            c.packed_q = c.packed_k = {length, 5, length};
            c.every_dtype = length == 33 || length == 65;
        });
    }
    add("few queries", [](Case& c) { c.q_len = 3, c.k_len = 65, c.lengths = Lengths::kShorter; });
    add("one query", [](Case& c) { c.q_len = 1, c.k_len = 64; });
    add("one key", [](Case& c) { c.q_len = 65, c.k_len = 1; });
    add("no keys", [](Case& c) { c.q_len = 33, c.k_len = 0; });
    add("more queries than keys, causal", [](Case& c) { c.q_len = 65, c.k_len = 33, c.causal = true; });
    add("more keys than queries, causal", [](Case& c) { c.q_len = 33, c.k_len = 65, c.causal = true; });
    add("causal, key lengths", [](Case& c) { c.q_len = c.k_len = 48, c.causal = true, c.lengths = Lengths::kShorter; });
    add("wild key lengths", [](Case& c) { c.lengths = Lengths::kWild; });
    add("64-bit key lengths", [](Case& c) {
        c.lengths = Lengths::kShorter;
        c.length_type = TILERANK_LENGTHS_INT64;
    });
    add("wild 64-bit key lengths", [](Case& c) {
        c.lengths = Lengths::kWild;
        c.length_type = TILERANK_LENGTHS_INT64;
    });
    add("grouped queries", [](Case& c) { c.heads = 4, c.kv_heads = 2, c.lengths = Lengths::kShorter; });
    add("one key head", [](Case& c) { c.heads = 3, c.kv_heads = 1, c.batch = 1; });
    add("tokens first",
        [](Case& c) { c.layout = Layout::kTokensFirst, c.lengths = Lengths::kShorter, c.every_dtype = true; });
    add("shifted by one element", [](Case& c) { c.layout = Layout::kShifted, c.lengths = Lengths::kShorter; });
    add("odd token stride", [](Case& c) { c.layout = Layout::kOddStride, c.lengths = Lengths::kShorter; });
    add("large inputs", [](Case& c) { c.input_scale = 8.0f, c.k_len = c.q_len = 65, c.every_dtype = true; });
    add("given scale", [](Case& c) { c.score_scale = 0.37; });
    add("negative scale", [](Case& c) { c.score_scale = -0.5, c.lengths = Lengths::kShorter; });
    add("boolean mask", [](Case& c) { c.mask = Mask::kBoolean; });
    add("boolean mask, broadcast", [](Case& c) { c.mask = Mask::kBooleanBroadcast, c.q_len = 48; });
    add("boolean mask, key lengths, causal", [](Case& c) {
        c.mask = Mask::kBoolean, c.lengths = Lengths::kShorter, c.causal = true, c.q_len = c.k_len = 65;
    });
    add("fp32 mask", [](Case& c) { c.mask = Mask::kFp32, c.k_len = 65; });
    add("fp16 mask", [](Case& c) { c.mask = Mask::kFp16, c.k_len = 48; });
    add("bf16 mask", [](Case& c) { c.mask = Mask::kBf16, c.k_len = 31; });
    add("packed, lengths mixed", [](Case& c) { c.packed_q = c.packed_k = {0, 1, 31, 64, 0, 65, 48}; });
    add("packed, more sequences than lanes", [](Case& c) {
        for (int sequence = 0; sequence < 70; ++sequence) c.packed_q.push_back(sequence * 5 % 7);
        c.packed_k = c.packed_q;
    });
    add("packed, cross", [](Case& c) { c.packed_q = {3, 33, 0, 10}, c.packed_k = {65, 0, 31, 1}; });
    add("packed, causal", [](Case& c) { c.packed_q = c.packed_k = {33, 1, 64}, c.causal = true; });
    add("packed, grouped queries", [](Case& c) { c.packed_q = c.packed_k = {33, 48}, c.heads = 4, c.kv_heads = 1; });
    add("packed, tokens first",
        [](Case& c) { c.packed_q = c.packed_k = {63, 32}, c.layout = Layout::kTokensFirst, c.every_dtype = true; });
    add("packed, shifted by one element",
        [](Case& c) { c.packed_q = c.packed_k = {33, 48}, c.layout = Layout::kShifted; });
    add("packed, odd token stride", [](Case& c) { c.packed_q = c.packed_k = {33, 48}, c.layout = Layout::kOddStride; });
    return cases;
}

bool serves(const tilerank_variant& variant, const Case& c) {
    uint32_t needed = 0;
    if (c.lengths != Lengths::kNone) needed |= TILERANK_SERVES_KEY_LENGTHS;
    if (c.causal) needed |= TILERANK_SERVES_CAUSAL;
    if (c.mask == Mask::kBoolean || c.mask == Mask::kBooleanBroadcast) needed |= TILERANK_SERVES_BOOLEAN;
    if (c.mask >= Mask::kFp32) needed |= TILERANK_SERVES_ADDITIVE;
    const uint32_t layout = c.packed_q.empty() ? TILERANK_LAYOUT_PADDED : TILERANK_LAYOUT_PACKED;
    const bool fits = variant.max_k_len == 0 || c.k_len <= variant.max_k_len;
    return (variant.masks & needed) == needed && (variant.layouts & layout) != 0 && fits;
}

// The head dims to try: all that are compiled, or some of those from 1 to 256, among them odd ones.
std::vector<int64_t> head_dims(const tilerank_variant& variant) {
    if (variant.head_dim_count == 0) return {32, 1, 5, 40, 64, 80, 256};
    std::vector<int64_t> dims(variant.head_dims, variant.head_dims + variant.head_dim_count);
    const auto usual = std::find(dims.begin(), dims.end(), 32);
    if (usual != dims.end()) std::rotate(dims.begin(), usual, usual + 1);
    return dims;
}

// ---- One call -------------------------------------------------------------------------------------------------------

const char* dtype_name(int32_t dtype) {
    return dtype == TILERANK_FP32 ? "fp32" : dtype == TILERANK_FP16 ? "fp16" : "bf16";
}

// Error allowed for every unit of the largest value, while scores stay small: some roundings of the sums in fp32, of
// the weights and of the result in the narrower types.
double limit_per_value(int32_t dtype) { return dtype == TILERANK_FP32 ? 1e-6 : dtype == TILERANK_FP16 ? 5e-4 : 4e-3; }

struct Outcome {
    bool refused = false;
    bool failed = false;
    double worst = 0.0;
    std::string reason;
};

Outcome failure(const std::string& reason) { return {false, true, 0.0, reason}; }

// Rows of a padded batch, or of sequences one after another; values drawn from about N(0, scale^2).
class Inputs {
  public:
    Inputs(const Case& c, int64_t head_dim, int32_t dtype)
        : packed_(!c.packed_q.empty()),
          q(packed_ ? 1 : c.batch, c.heads, packed_ ? total(c.packed_q) : c.q_len, head_dim, dtype, c.layout),
          k(packed_ ? 1 : c.batch, c.kv_heads, packed_ ? total(c.packed_k) : c.k_len, head_dim, dtype, c.layout),
          v(packed_ ? 1 : c.batch, c.kv_heads, packed_ ? total(c.packed_k) : c.k_len, head_dim, dtype, c.layout),
          random_(static_cast<uint32_t>(head_dim * 1009 + c.q_len * 31 + c.k_len)) {
        if (c.lengths != Lengths::kNone) {
            for (int64_t b = 0; b < c.batch; ++b) key_lengths_.push_back(length_for(c, b));
        }
        fill(q, c.input_scale, false);
        fill(k, c.input_scale, true);
        fill(v, c.input_scale, true);
        if (c.mask != Mask::kNone) make_mask(c);
        for (Tensor* tensor : {&q, &k, &v}) tensor->guard();
        if (!key_lengths_.empty()) {
            key_lengths = c.length_type == TILERANK_LENGTHS_INT64
                              ? buffer_of(key_lengths_)
                              : buffer_of(std::vector<int32_t>(key_lengths_.begin(), key_lengths_.end()));
        }
        if (packed_) {
            cu_seqlens_q = buffer_of(offsets(c.packed_q));
            cu_seqlens_k = buffer_of(offsets(c.packed_k));
        }
    }

    // The largest |score| that can occur, up to the mask: |scale| times the longest q and k.
    double score_bound(double scale) const { return std::abs(scale) * longest_row(q) * longest_row(k); }
    double largest_value() const {
        double largest = 0.0;
        v.for_each_row([&](int64_t b, int64_t h, int64_t t) {
            for (int64_t d = 0; d < v.head_dim; ++d) {
                const double value = std::abs(v.get(b, h, t, d));
                if (std::isfinite(value)) largest = std::max(largest, value);
            }
        });
        return largest;
    }

  private:
    static int64_t total(const std::vector<int64_t>& lengths) {
        int64_t sum = 0;
        for (const int64_t length : lengths) sum += length;
        return sum;
    }

    static std::vector<int32_t> offsets(const std::vector<int64_t>& lengths) {
        std::vector<int32_t> at = {0};
        for (const int64_t length : lengths) at.push_back(at.back() + static_cast<int32_t>(length));
        return at;
    }

    static int64_t length_for(const Case& c, int64_t b) {
        if (c.lengths == Lengths::kWild) return b % 2 == 0 ? c.k_len + 1000 : -7;
        const int64_t shorter[] = {c.k_len, std::max<int64_t>(c.k_len - 17, 0)};
        return shorter[b % 2];
    }

    static double longest_row(const Tensor& tensor) {
        double longest = 0.0;
        tensor.for_each_row([&](int64_t b, int64_t h, int64_t t) {
            double square = 0.0;
            for (int64_t d = 0; d < tensor.head_dim; ++d) {
                square += static_cast<double>(tensor.get(b, h, t, d)) * tensor.get(b, h, t, d);
            }
            if (std::isfinite(square)) longest = std::max(longest, square);
        });
        return std::sqrt(longest);
    }

    float draw() {  // variance 1, at most 3.5 in size
        double sum = -6.0;
        for (int i = 0; i < 12; ++i) sum += static_cast<double>(random_()) / 4294967296.0;
        return static_cast<float>(std::clamp(sum, -3.5, 3.5));
    }

    // Keys beyond the key length become NaN and infinity in turn.
    void fill(Tensor& tensor, float scale, bool are_keys) {
        std::vector<float> values(static_cast<size_t>(tensor.head_dim));
        tensor.for_each_row([&](int64_t b, int64_t h, int64_t t) {
            const bool counts = !are_keys || key_lengths_.empty() || t < key_lengths_[static_cast<size_t>(b)];
            for (float& value : values) value = counts ? scale * draw() : (t % 2 == 0 ? NAN : INFINITY);
            tensor.set_row(b, h, t, values);
        });
    }

    // One key in three is hidden; so is every key of query 2.
    void make_mask(const Case& c) {
        const bool broadcast = c.mask == Mask::kBooleanBroadcast;  // one row of keys a sequence
        const int64_t rows = c.batch * (broadcast ? 1 : c.heads * c.q_len);
        mask_strides[3] = 1;
        mask_strides[2] = broadcast ? 0 : c.k_len;
        mask_strides[1] = broadcast ? 0 : c.q_len * c.k_len;
        mask_strides[0] = broadcast ? c.k_len : c.heads * c.q_len * c.k_len;
        const bool boolean = c.mask == Mask::kBoolean || broadcast;
        const int32_t dtype = c.mask == Mask::kFp32   ? TILERANK_FP32
                              : c.mask == Mask::kFp16 ? TILERANK_FP16
                                                      : TILERANK_BF16;
        const int64_t bytes = boolean ? 1 : element_bytes(dtype);
        std::vector<unsigned char> values(static_cast<size_t>(rows * c.k_len * bytes));
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t key = 0; key < c.k_len; ++key) {
                const bool hidden = random_() % 3 == 0 || (!broadcast && row % c.q_len == 2);
                unsigned char* at = values.data() + (row * c.k_len + key) * bytes;
                if (boolean) {
                    *at = hidden ? 0 : 1;
                } else {
                    encode(at, dtype, hidden ? -INFINITY : draw());
                }
            }
        }
        mask = buffer_of(values);
        mask_type = boolean                 ? TILERANK_MASK_BOOL
                    : c.mask == Mask::kFp32 ? TILERANK_MASK_FP32
                    : c.mask == Mask::kFp16 ? TILERANK_MASK_FP16
                                            : TILERANK_MASK_BF16;
    }

    bool packed_;
    std::vector<int64_t> key_lengths_;

  public:
    Tensor q, k, v;
    std::unique_ptr<Buffer> key_lengths, mask, cu_seqlens_q, cu_seqlens_k;
    int32_t mask_type = TILERANK_MASK_NONE;
    int64_t mask_strides[4] = {};

  private:
    std::mt19937 random_;
};

void copy_strides(const Tensor& tensor, int64_t* strides, int count) {
    for (int at = 0; at < count; ++at) strides[at] = tensor.strides[3 - count + at];
}

// Calls the variant through the entry point that the case needs; packed, with all sequences or with one of them alone.
constexpr int64_t kAll = -1;
tilerank_status call(const char* variant, const Case& c, Inputs& inputs, Tensor& out, double scale,
                     int64_t sequence = kAll) {
    const auto address = [](const std::unique_ptr<Buffer>& buffer) -> void* {
        return buffer == nullptr ? nullptr : buffer->data();
    };
    const auto common = [&](auto& params) {
        params.q = inputs.q.address();
        params.k = inputs.k.address();
        params.v = inputs.v.address();
        params.out = out.address();
        params.dtype = out.dtype;
        params.causal = c.causal ? 1 : 0;
        params.scale = scale;
        params.heads = c.heads;
        params.kv_heads = c.kv_heads;
        params.head_dim = out.head_dim;
        constexpr int kStrides = sizeof params.q_strides / sizeof params.q_strides[0];
        copy_strides(inputs.q, params.q_strides, kStrides);
        copy_strides(inputs.k, params.k_strides, kStrides);
        copy_strides(inputs.v, params.v_strides, kStrides);
        copy_strides(out, params.out_strides, kStrides);
    };
    const auto with_workspace = [&](const auto& params, auto* size, auto* run) {
        size_t bytes = 0;
        const tilerank_status status = size(variant, &params, &bytes);
        if (status != TILERANK_OK) return status;
        Buffer workspace(static_cast<int64_t>(bytes) + 256);
        unsigned char* memory = workspace.data();
        memory += (256 - reinterpret_cast<uintptr_t>(memory) % 256) % 256;
        return run(variant, &params, bytes == 0 ? nullptr : memory, bytes, nullptr);
    };
    if (c.packed_q.empty()) {
        tilerank_attention_params params{};
        common(params);
        params.batch = c.batch;
        params.q_len = c.q_len;
        params.k_len = c.k_len;
        params.key_lengths = address(inputs.key_lengths);
        params.key_lengths_type = inputs.key_lengths == nullptr ? TILERANK_LENGTHS_NONE : c.length_type;
        params.mask = address(inputs.mask);
        params.mask_type = inputs.mask_type;
        std::copy_n(inputs.mask_strides, 4, params.mask_strides);
        return with_workspace(params, tilerank_attention_workspace_size, tilerank_attention);
    }
    tilerank_attention_varlen_params params{};
    common(params);
    params.batch = static_cast<int64_t>(c.packed_q.size());
    params.total_q = inputs.q.tokens;
    params.total_k = inputs.k.tokens;
    params.max_seqlen_q = *std::max_element(c.packed_q.begin(), c.packed_q.end());
    params.max_seqlen_k = *std::max_element(c.packed_k.begin(), c.packed_k.end());
    params.cu_seqlens_q = static_cast<const int32_t*>(address(inputs.cu_seqlens_q));
    params.cu_seqlens_k = static_cast<const int32_t*>(address(inputs.cu_seqlens_k));
    if (sequence != kAll) {
        params.batch = 1;
        params.max_seqlen_q = c.packed_q[static_cast<size_t>(sequence)];
        params.max_seqlen_k = c.packed_k[static_cast<size_t>(sequence)];
        params.cu_seqlens_q += sequence;
        params.cu_seqlens_k += sequence;
    }
    return with_workspace(params, tilerank_attention_varlen_workspace_size, tilerank_attention_varlen);
}

// Why some row of `out` has other bits when its sequence is computed alone, or nothing.
std::string differs_alone(const tilerank_variant& variant, const Case& c, Inputs& inputs, const Tensor& out,
                          double scale) {
    int64_t first = 0;
    for (size_t sequence = 0; sequence < c.packed_q.size(); ++sequence) {
        Tensor alone(1, c.heads, inputs.q.tokens, out.head_dim, out.dtype, c.layout);
        if (call(variant.name, c, inputs, alone, scale, static_cast<int64_t>(sequence)) != TILERANK_OK) {
            return std::string("refuses a sequence alone: ") + tilerank_last_error();
        }
        for (int64_t t = first; t < first + c.packed_q[sequence]; ++t) {
            for (int64_t h = 0; h < c.heads; ++h) {
                const unsigned char* together = out.buffer->data(out.row(0, h, t));
                if (std::memcmp(together, alone.buffer->data(alone.row(0, h, t)),
                                static_cast<size_t>(out.head_dim * element_bytes(out.dtype))) != 0) {
                    return "out[" + std::to_string(h) + "," + std::to_string(t) + "] has other bits when sequence " +
                           std::to_string(sequence) + " is alone";
                }
            }
        }
        first += c.packed_q[sequence];
    }
    return "";
}

// FNV-1a.
void digest_rows(const Tensor& tensor, uint64_t* digest) {
    tensor.for_each_row([&](int64_t b, int64_t h, int64_t t) {
        const unsigned char* row = tensor.buffer->data(tensor.row(b, h, t));
        for (int64_t at = 0; at < tensor.head_dim * element_bytes(tensor.dtype); ++at) {
            *digest = (*digest ^ row[at]) * 0x100000001b3u;
        }
    });
}

Outcome run_case(const tilerank_variant& variant, const Case& c, int64_t head_dim, int32_t dtype, uint64_t* digest) {
    Inputs inputs(c, head_dim, dtype);
    const double scale = c.score_scale != 0.0 ? c.score_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
    Tensor expected(inputs.q.batch, c.heads, inputs.q.tokens, head_dim, dtype, Layout::kHeadsFirst);
    if (call("reference", c, inputs, expected, scale) != TILERANK_OK) {
        return failure(std::string("the reference refuses: ") + tilerank_last_error());
    }
    Tensor out(inputs.q.batch, c.heads, inputs.q.tokens, head_dim, dtype, c.layout);
    out.guard();
    const tilerank_status status = call(variant.name, c, inputs, out, scale);
    if (status == TILERANK_UNSUPPORTED && (c.layout == Layout::kShifted || c.layout == Layout::kOddStride)) {
        const bool named = tilerank_last_error()[0] != '\0';
        return named ? Outcome{true, false, 0.0, ""} : failure("refused without a reason");
    }
    if (status != TILERANK_OK) return failure(tilerank_last_error());

    const double limit =
        limit_per_value(dtype) * std::max(inputs.largest_value(), 1e-3) * (1.0 + inputs.score_bound(scale) / 16.0);
    Outcome outcome;
    out.for_each_row([&](int64_t b, int64_t h, int64_t t) {
        for (int64_t d = 0; d < head_dim && !outcome.failed; ++d) {
            const double error = std::abs(static_cast<double>(out.get(b, h, t, d)) - expected.get(b, h, t, d));
            if (!(error <= limit)) {
                char text[160];
                std::snprintf(text, sizeof text, "out[%d,%d,%d,%d] is %g, the reference says %g (limit %.2g)",
                              static_cast<int>(b), static_cast<int>(h), static_cast<int>(t), static_cast<int>(d),
                              out.get(b, h, t, d), expected.get(b, h, t, d), limit);
                outcome = failure(text);
            }
            outcome.worst = std::max(outcome.worst, error / limit);
        }
    });
    if (outcome.failed) return outcome;
    if (!c.packed_q.empty()) {
        const std::string reason = differs_alone(variant, c, inputs, out, scale);
        if (!reason.empty()) return failure(reason);
    }
    digest_rows(out, digest);
    if (!out.untouched_between_rows()) return failure("memory outside of the rows of out was written");
    return outcome;
}

// ---- The program ----------------------------------------------------------------------------------------------------

std::string escaped(const std::string& text) {
    std::string result;
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') result += '\\';
        result += letter == '\n' ? ' ' : letter;
    }
    return result;
}

// Returns the number of failed cases.
int check(const tilerank_variant& variant, const std::vector<Case>& cases, size_t most_head_dims) {
    int done = 0;
    int refused = 0;
    int failed = 0;
    double worst = 0.0;
    uint64_t digest = 0xcbf29ce484222325u;
    const auto one = [&](const Case& c, int64_t head_dim, int32_t dtype) {
        char name[256];
        std::snprintf(name, sizeof name, "%s %s head_dim %d: %s", variant.name, dtype_name(dtype),
                      static_cast<int>(head_dim), c.name.c_str());
        std::fprintf(stderr, "case %s\n", name);
        const Outcome outcome = run_case(variant, c, head_dim, dtype, &digest);
        ++done;
        refused += outcome.refused ? 1 : 0;
        worst = std::max(worst, outcome.worst);
        if (!outcome.failed) return;
        ++failed;
        std::printf("{\"variant\": \"%s\", \"case\": \"%s\", \"reason\": \"%s\"}\n", variant.name,
                    escaped(name).c_str(), escaped(outcome.reason).c_str());
    };
    std::vector<int64_t> dims = head_dims(variant);
    dims.resize(std::min(dims.size(), most_head_dims));
    bool is_first_dtype = true;
    for (const int32_t dtype : {TILERANK_FP32, TILERANK_FP16, TILERANK_BF16}) {
        if ((variant.dtypes & (1u << dtype)) == 0) continue;
        for (const Case& c : cases) {
            if (serves(variant, c) && (is_first_dtype || c.every_dtype)) one(c, dims[0], dtype);
        }
        for (size_t at = 1; at < dims.size(); ++at) {
            for (const Case& c : cases) {
                const bool is_sample = c.name == "key lengths 33" || c.name == "packed 33" || c.name == "dense 65";
                if (is_sample && serves(variant, c)) one(c, dims[at], dtype);
            }
        }
        is_first_dtype = false;
    }
    std::printf("{\"variant\": \"%s\", \"cases\": %d, \"refused\": %d, \"failed\": %d, \"worst\": %.3g, ",
                variant.name, done, refused, failed, worst);
    std::printf("\"digest\": \"%016llx\"}\n", static_cast<unsigned long long>(digest));
    return failed;
}

std::vector<int64_t> parse_numbers(const std::string& option, const char* text) {
    std::vector<int64_t> numbers;
    do {
        char* end = nullptr;
        numbers.push_back(std::strtoll(text, &end, 10));
        if (end == text || numbers.back() < 0) stop(option + ": cannot read " + text);
        text = *end == ',' ? end + 1 : end;
    } while (*text != '\0');
    return numbers;
}

}  // namespace

int main(int argc, char** argv) {
    std::string only;
    std::string schedule = "forward";
    uint64_t seed = 0;
    size_t most_head_dims = SIZE_MAX;
    std::vector<int64_t> lengths = {0, 1, 31, 32, 33, 48, 63, 64, 65};
    for (int at = 1; at < argc; at += 2) {
        const std::string option = argv[at];
        if (at + 1 == argc) stop(option + " needs a value");
        const char* value = argv[at + 1];
        if (option == "--variant") {
            only = value;
        } else if (option == "--schedule") {
            schedule = value;
        } else if (option == "--seed") {
            seed = std::strtoull(value, nullptr, 10);
        } else if (option == "--lengths") {
            lengths = parse_numbers(option, value);
        } else if (option == "--head-dims") {
            most_head_dims = static_cast<size_t>(std::max<int64_t>(parse_numbers(option, value).at(0), 1));
        } else {
            stop(option + " is not one of --variant, --schedule, --seed, --lengths, --head-dims");
        }
    }
    if (tilerank_host_set_schedule(schedule.c_str(), seed) != 0) stop("no schedule is called " + schedule);
    const std::vector<Case> cases = all_cases(lengths);
    int checked = 0;
    int failed = 0;
    for (int32_t index = 0; index < tilerank_attention_variant_count(); ++index) {
        const tilerank_variant& variant = *tilerank_attention_variant(index);
        if (variant.device != TILERANK_DEVICE_CUDA || (!only.empty() && only != variant.name)) continue;
        ++checked;
        failed += check(variant, cases, most_head_dims);
    }
    if (checked == 0) stop("no variant to check" + (only.empty() ? std::string() : ": " + only));
    return failed > 0 ? 1 : 0;
}
