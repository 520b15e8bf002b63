// Runs the variants of layer normalisation and of the attention block against variant `reference`, through the C
// interface alone.
//     check_block [--operation layernorm|block] [--variant NAME] [--schedule forward|reverse|last_in|random] [--seed N]
//                 [--tokens 1,33,...]
// Prints and exits as check_variants does. Between the rows of a tensor, behind the keys that count and around every
// buffer is NaN, which AddressSanitizer guards where a call may not touch it.
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
    std::fprintf(stderr, "check_block: %s\n", message.c_str());
    std::exit(2);
}

const char* const kDtypeNames[] = {"fp32", "fp16", "bf16"};

// Rows of `width` elements, `pitch` apart, the first `shift` elements beyond an aligned address.
class Rows {
  public:
    Rows(int64_t rows, int64_t width, int64_t pitch, int32_t dtype, int64_t shift = 0)
        : rows(rows), width(width), pitch(pitch), dtype(dtype), shift_(shift),
          buffer_(std::max<int64_t>((rows - 1) * pitch + width + shift, 1) * element_bytes(dtype)) {}

    void* address() { return buffer_.data(shift_ * element_bytes(dtype)); }
    float get(int64_t row, int64_t column) { return decode(at(row, column), dtype); }
    void set(int64_t row, int64_t column, float value) { encode(at(row, column), dtype, value); }

    void fill(std::mt19937_64& random, float mean, float scale) {
        std::normal_distribution<float> normal(0.0f, 1.0f);
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t column = 0; column < width; ++column) set(row, column, mean + scale * normal(random));
        }
    }

    // Only rows may be touched from here on.
    void guard() {
        buffer_.close();
        for (int64_t row = 0; row < rows; ++row) {
            buffer_.open((shift_ + row * pitch) * element_bytes(dtype), width * element_bytes(dtype));
        }
    }

    int64_t rows, width, pitch;
    int32_t dtype;

  private:
    unsigned char* at(int64_t row, int64_t column) {
        return buffer_.data((shift_ + row * pitch + column) * element_bytes(dtype));
    }
    int64_t shift_;
    Buffer buffer_;
};

struct Tally {
    int cases = 0;
    int refused = 0;
    int failed = 0;
    double worst = 0.0;
    uint64_t digest = 14695981039346656037u;  // FNV-1a of the bits of all results
};

// What a result may be off by where the reference says `expected`: q, k, v and the attended rows are rounded to dtype
// once each, and sums are kept in fp32.
double limit_of(int32_t dtype, double expected) {
    constexpr double kLimits[] = {2e-5, 8e-3, 6e-2};
    return kLimits[dtype] * (1.0 + std::fabs(expected));
}

void compare(const std::string& name, Rows& result, Rows& expected, Tally* tally) {
    for (int64_t row = 0; row < result.rows; ++row) {
        for (int64_t column = 0; column < result.width; ++column) {
            const float value = result.get(row, column);
            const double wanted = expected.get(row, column);
            const double share = std::fabs(value - wanted) / limit_of(result.dtype, wanted);
            if (!(share <= 1.0)) {  // NaN too
                std::printf("{\"case\": \"%s\", \"row\": %lld, \"column\": %lld, \"is\": %g, "
                            "\"the reference says\": %g}\n",
                            name.c_str(), static_cast<long long>(row), static_cast<long long>(column),
                            static_cast<double>(value), wanted);
                ++tally->failed;
                return;
            }
            tally->worst = std::max(tally->worst, share);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            tally->digest = (tally->digest ^ bits) * 1099511628211u;
        }
    }
}

// Runs a call with a workspace of exactly its size.
template <typename Params, typename Size, typename Run>
tilerank_status call(const char* variant, const Params& params, const Size& size, const Run& run) {
    size_t bytes = 0;
    const tilerank_status status = size(variant, &params, &bytes);
    if (status != TILERANK_OK) return status;
    Buffer workspace(static_cast<int64_t>(bytes) + 256);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    const auto shift = static_cast<int64_t>((256 - address % 256) % 256);
    workspace.close();
    workspace.open(shift, static_cast<int64_t>(bytes));
    return run(variant, &params, workspace.data(shift), bytes, nullptr);
}

// What came of the call under check: right, refused by name or not.
bool counts(const std::string& name, tilerank_status status, bool may_refuse, Tally* tally) {
    ++tally->cases;
    if (status == TILERANK_OK) return true;
    if (status == TILERANK_UNSUPPORTED && may_refuse) {
        ++tally->refused;
    } else {
        std::printf("{\"case\": \"%s\", \"status\": %d, \"message\": \"%s\"}\n", name.c_str(), status,
                    tilerank_last_error());
        ++tally->failed;
    }
    return false;
}

// ---- Layer normalisation --------------------------------------------------------------------------------------------

void check_layernorm(const tilerank_variant& row, Tally* tally) {
    std::mt19937_64 random(7);
    for (const int32_t dtype : {TILERANK_FP32, TILERANK_FP16, TILERANK_BF16}) {
        if (!(row.dtypes & (1u << dtype))) continue;
        for (const int64_t width : {1, 7, 64, 96, 1000, 2056, 4100}) {
            for (const int inputs : {0, 1, 2}) {  // nothing optional; all; all in place and unaligned
                const int64_t rows = width > 1000 ? 3 : 9;
                const int64_t pitch = inputs == 2 ? width + 1 : width;
                const int64_t shift = inputs == 2 ? 1 : 0;
                const std::string name = std::string(kDtypeNames[dtype]) + " width " + std::to_string(width) +
                                         (inputs == 0 ? "" : inputs == 1 ? " all inputs" : " in place, unaligned");
                std::fprintf(stderr, "case %s\n", name.c_str());
                Rows x(rows, width, pitch, dtype, shift), residual(rows, width, pitch, dtype, shift);
                Rows bias(1, width, width, dtype), gamma(1, width, width, dtype), beta(1, width, width, dtype);
                Rows out(rows, width, pitch, dtype, shift), sum(rows, width, pitch, dtype, shift);
                Rows expected(rows, width, width, dtype), expected_sum(rows, width, width, dtype);
                x.fill(random, 3.0f, 1.0f);
                residual.fill(random, 0.0f, 1.0f);
                bias.fill(random, 0.0f, 1.0f);
                gamma.fill(random, 1.0f, 0.1f);
                beta.fill(random, 0.0f, 0.1f);
                for (Rows* each : {&x, &residual, &bias, &gamma, &beta, &out, &sum}) each->guard();

                tilerank_layernorm_params params = {};
                params.x = x.address();
                params.dtype = dtype, params.epsilon = 1e-5, params.rows = rows, params.width = width;
                params.x_stride = params.residual_stride = pitch;
                if (inputs > 0) {
                    params.residual = residual.address(), params.bias = bias.address();
                    params.gamma = gamma.address(), params.beta = beta.address();
                }
                params.out = expected.address(), params.out_stride = params.sum_stride = width;
                if (inputs > 0) params.sum = expected_sum.address();
                if (tilerank_layernorm("reference", &params, nullptr, 0, nullptr) != TILERANK_OK) {
                    stop(tilerank_last_error());
                }
                Rows& target = inputs == 2 ? residual : out;
                Rows& sum_target = inputs == 2 ? x : sum;
                params.out = target.address(), params.out_stride = params.sum_stride = pitch;
                if (inputs > 0) params.sum = sum_target.address();
                const tilerank_status status =
                    call(row.name, params, tilerank_layernorm_workspace_size, tilerank_layernorm);
                if (!counts(name, status, false, tally)) continue;
                compare(name, target, expected, tally);
                if (inputs > 0) compare(name + " sum", sum_target, expected_sum, tally);
            }
        }
    }
}

// ---- The attention block --------------------------------------------------------------------------------------------

struct BlockCase {
    int64_t batch, tokens, width, heads, head_dim;
    bool causal, pre_ln, in_out, everything;  // everything: biases, gamma, beta, residual, key lengths
    bool unaligned;
};

std::string describe(const BlockCase& c, int32_t dtype) {
    return std::string(kDtypeNames[dtype]) + " batch " + std::to_string(c.batch) + " tokens " +
           std::to_string(c.tokens) + " width " + std::to_string(c.width) + " heads " + std::to_string(c.heads) + "x" +
           std::to_string(c.head_dim) + (c.causal ? " causal" : "") + (c.pre_ln ? " pre_ln" : " post_ln") +
           (c.in_out ? " in_out" : "") + (c.everything ? " everything" : "") + (c.unaligned ? " unaligned" : "");
}

void check_case(const tilerank_variant& row, int32_t dtype, const BlockCase& c, Tally* tally) {
    const std::string name = describe(c, dtype);
    std::fprintf(stderr, "case %s\n", name.c_str());
    std::mt19937_64 random(static_cast<uint64_t>(c.tokens * 31 + c.width));
    const int64_t columns = c.heads * c.head_dim;
    const int64_t gap = c.unaligned ? 1 : 8;  // elements between rows
    const int64_t shift = c.unaligned ? 1 : 0;
    const int64_t all = c.batch * c.tokens;
    Rows x(all, c.width, c.width + gap, dtype, shift), residual(all, c.width, c.width + gap, dtype, shift);
    Rows out(all, c.width, c.width + gap, dtype, shift), expected(all, c.width, c.width, dtype);
    const auto weights = [&](int64_t outputs, int64_t inputs) {
        auto matrix = std::make_unique<Rows>(c.in_out ? inputs : outputs, c.in_out ? outputs : inputs,
                                             (c.in_out ? outputs : inputs) + gap, dtype, shift);
        matrix->fill(random, 0.0f, 1.0f / std::sqrt(static_cast<float>(inputs)));
        matrix->guard();
        return matrix;
    };
    const auto vector = [&](int64_t size, float mean) {
        auto values = std::make_unique<Rows>(1, size, size, dtype);
        values->fill(random, mean, 0.2f);
        values->guard();
        return values;
    };
    const auto wq = weights(columns, c.width), wk = weights(columns, c.width), wv = weights(columns, c.width);
    const auto wo = weights(c.width, columns);
    const auto bq = vector(columns, 0.0f), bk = vector(columns, 0.0f), bv = vector(columns, 0.0f);
    const auto bo = vector(c.width, 0.0f), gamma = vector(c.width, 1.0f), beta = vector(c.width, 0.0f);
    x.fill(random, 0.5f, 1.0f);
    residual.fill(random, 0.0f, 1.0f);
    std::vector<int32_t> lengths;
    for (int64_t b = 0; b < c.batch; ++b) {
        lengths.push_back(static_cast<int32_t>(b % 3 == 2 ? 0 : c.tokens - c.tokens * b / 3));
    }
    for (Rows* each : {&x, &residual, &out}) each->guard();

    tilerank_fused_attention_params params = {};
    params.x = x.address(), params.wq = wq->address(), params.wk = wk->address();
    params.wv = wv->address(), params.wo = wo->address();
    params.wq_stride = wq->pitch, params.wk_stride = wk->pitch, params.wv_stride = wv->pitch;
    params.wo_stride = wo->pitch;
    params.dtype = dtype, params.causal = c.causal, params.pre_ln = c.pre_ln;
    params.weight_layout = c.in_out ? TILERANK_WEIGHTS_IN_OUT : TILERANK_WEIGHTS_OUT_IN;
    params.epsilon = 1e-5, params.scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    params.batch = c.batch, params.tokens = c.tokens, params.width = c.width;
    params.num_heads = c.heads, params.head_dim = c.head_dim;
    params.x_strides[0] = params.residual_strides[0] = c.tokens * x.pitch;
    params.x_strides[1] = params.residual_strides[1] = x.pitch;
    if (c.everything) {
        params.bq = bq->address(), params.bk = bk->address(), params.bv = bv->address(), params.bo = bo->address();
        params.gamma = gamma->address(), params.beta = beta->address(), params.residual = residual.address();
        params.key_lengths = lengths.data(), params.key_lengths_type = TILERANK_LENGTHS_INT32;
    }
    params.out = expected.address();
    params.out_strides[0] = c.tokens * c.width, params.out_strides[1] = c.width;
    if (tilerank_fused_attention("reference", &params, nullptr, 0, nullptr) != TILERANK_OK) stop(tilerank_last_error());
    params.out = out.address();
    params.out_strides[0] = c.tokens * out.pitch, params.out_strides[1] = out.pitch;
    const tilerank_status status =
        call(row.name, params, tilerank_fused_attention_workspace_size, tilerank_fused_attention);
    if (counts(name, status, c.unaligned || c.width % 8 != 0, tally)) compare(name, out, expected, tally);
}

void check_block(const tilerank_variant& row, const std::vector<int64_t>& token_counts, Tally* tally) {
    for (const int32_t dtype : {TILERANK_FP32, TILERANK_FP16, TILERANK_BF16}) {
        if (!(row.dtypes & (1u << dtype))) continue;
        bool flip = dtype == TILERANK_BF16;
        for (int32_t dim = 0; dim < row.head_dim_count; ++dim) {
            const int64_t head_dim = row.head_dims[dim];
            for (const int64_t tokens : token_counts) {
                // Each option is seen with each head dim, and each length with several of them.
                check_case(row, dtype, {tokens < 65 ? 3 : 1, tokens, 40, 2, head_dim, flip, flip, !flip, true, false},
                           tally);
                check_case(row, dtype, {1, tokens, 72, 1, head_dim, !flip, flip, flip, false, false}, tally);
                flip = !flip;
            }
        }
        check_case(row, dtype, {2, 33, 41, 2, row.head_dims[0], false, true, false, true, true}, tally);
        check_case(row, dtype, {2, 33, 41, 2, row.head_dims[0], true, false, true, true, true}, tally);
        check_case(row, dtype, {1, 70, 136, 3, row.head_dims[0], false, true, false, true, false}, tally);
        check_case(row, dtype, {1, 70, 136, 3, row.head_dims[0], false, false, true, true, false}, tally);
    }
}

std::vector<int64_t> parse_counts(const std::string& text) {
    std::vector<int64_t> counts;
    for (const char* at = text.c_str(); *at != '\0';) {
        char* end = nullptr;
        counts.push_back(std::strtoll(at, &end, 10));
        if (end == at) stop("--tokens " + text + ": expected numbers like 1,33");
        at = *end == ',' ? end + 1 : end;
    }
    return counts;
}

}  // namespace

int main(int argc, char** argv) {
    std::string operation, only, schedule = "forward";
    uint64_t seed = 0;
    std::vector<int64_t> tokens = {1, 33, 64, 65, 130};
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--operation") {
            operation = argv[i + 1];
        } else if (option == "--variant") {
            only = argv[i + 1];
        } else if (option == "--schedule") {
            schedule = argv[i + 1];
        } else if (option == "--seed") {
            seed = std::strtoull(argv[i + 1], nullptr, 10);
        } else if (option == "--tokens") {
            tokens = parse_counts(argv[i + 1]);
        } else {
            stop(option + " is not understood");
        }
    }
    if (tilerank_host_set_schedule(schedule.c_str(), seed) != 0) stop("no schedule is called " + schedule);
    int checked = 0;
    int failed = 0;
    const auto check_row = [&](const char* of, const tilerank_variant& row) {
        if (row.device != TILERANK_DEVICE_CUDA || (!operation.empty() && operation != of) ||
            (!only.empty() && only != row.name)) {
            return;
        }
        Tally tally;
        if (std::strcmp(of, "block") == 0) {
            check_block(row, tokens, &tally);
        } else {
            check_layernorm(row, &tally);
        }
        std::printf("{\"variant\": \"%s\", \"cases\": %d, \"refused\": %d, \"failed\": %d, \"worst\": %.3g, "
                    "\"digest\": \"%016llx\"}\n",
                    row.name, tally.cases, tally.refused, tally.failed, tally.worst,
                    static_cast<unsigned long long>(tally.digest));
        ++checked;
        failed += tally.failed;
    };
    for (int32_t i = 0; i < tilerank_layernorm_variant_count(); ++i) {
        check_row("layernorm", *tilerank_layernorm_variant(i));
    }
    for (int32_t i = 0; i < tilerank_block_variant_count(); ++i) check_row("block", *tilerank_block_variant(i));
    if (checked == 0) stop("no variant to check: " + (only.empty() ? operation : only));
    return failed == 0 ? 0 : 1;
}
