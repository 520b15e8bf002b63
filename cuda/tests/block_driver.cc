// Every variant of the attention block, or of layer normalisation, against the reference, as driver.cc does it for
// attention.
//
//     block_driver --operation block|layernorm [--variant NAME] [--lengths 1,33] [--sample]
//
// A length is of a sequence, or a width. --sample runs a part of the cases at each length. Exit code 1 when a value is
// wrong, 2 for bad arguments.
#include <map>

#include "driver.h"

namespace {

// Above these, times one more than the result, a result is wrong and not merely rounded.
constexpr double kTolerances[] = {1e-5, 8e-3, 6e-2};

// Random numbers that every dtype holds exactly.
Bytes small_values(Random* random, int dtype, size_t count, float unit) {
    Bytes bytes(count * element_size(dtype));
    for (size_t i = 0; i < count; ++i) put(&bytes, dtype, i, static_cast<float>(random->next() % 17) * unit - 8 * unit);
    return bytes;
}

Bytes poisoned(int dtype, size_t count) {
    Bytes bytes((count + kGuard) * element_size(dtype));
    for (size_t i = 0; i < count + kGuard; ++i) put(&bytes, dtype, i, NAN);
    return bytes;
}

// The worst difference, or infinity with the reason on stderr.
double compare(const std::string& what, int dtype, const Bytes& result, const Bytes& expected, size_t count) {
    double worst = 0.0;
    for (size_t i = 0; i < count + kGuard; ++i) {
        const double value = get(result, dtype, i);
        if (i >= count) {
            if (std::isnan(value)) continue;
            std::fprintf(stderr, "%s: wrote %g behind the end of out\n", what.c_str(), value);
            return INFINITY;
        }
        const double right = get(expected, dtype, i);
        const double difference = std::fabs(value - right);
        if (!(difference <= kTolerances[dtype] * (1.0 + std::fabs(right)))) {
            std::fprintf(stderr, "%s: element %zu is %g, expected %g\n", what.c_str(), i, value, right);
            return INFINITY;
        }
        worst = difference > worst ? difference : worst;
    }
    return worst;
}

double refused(const std::string& what, tilerank_status status) {
    std::fprintf(stderr, "%s: status %d: %s\n", what.c_str(), static_cast<int>(status), tilerank_last_error());
    return INFINITY;
}

// ---- The attention block ----

struct BlockCase {
    int dtype;
    int head_dim;
    int tokens;
    uint32_t masks;  // TILERANK_SERVES_... bits
    bool pre_ln;
    bool in_out;  // so lie the weights
};

constexpr int64_t kBatch = 2;
constexpr int64_t kHeads = 2;
constexpr int64_t kWidth = 72;

double run_block(const char* variant, const BlockCase& c) {
    std::string what = std::string(variant) + ": " + kDtypeNames[c.dtype];
    what += ", head_dim " + std::to_string(c.head_dim) + ", tokens " + std::to_string(c.tokens);
    what += c.pre_ln ? ", pre_ln" : ", post_ln";
    if (c.in_out) what += ", in_out";
    if (c.masks & TILERANK_SERVES_KEY_LENGTHS) what += ", key_lengths";
    if (c.masks & TILERANK_SERVES_CAUSAL) what += ", causal";

    Random random{static_cast<uint64_t>(c.tokens * 7919 + c.head_dim * 31 + c.dtype)};
    const int64_t columns = kHeads * c.head_dim;
    const size_t rows = static_cast<size_t>(kBatch * c.tokens);
    const size_t elements = rows * kWidth;
    const auto draw = [&](int64_t count, float unit) {
        return small_values(&random, c.dtype, static_cast<size_t>(count), unit);
    };
    const Bytes x = draw(static_cast<int64_t>(elements), 0.125f);
    const Bytes residual = draw(static_cast<int64_t>(elements), 0.125f);
    const Bytes weights[] = {draw(columns * kWidth, 0.015625f), draw(columns * kWidth, 0.015625f),
                             draw(columns * kWidth, 0.015625f), draw(columns * kWidth, 0.015625f)};
    const Bytes biases[] = {draw(columns, 0.0625f), draw(columns, 0.0625f), draw(columns, 0.0625f),
                            draw(kWidth, 0.0625f)};
    const Bytes gamma = draw(kWidth, 0.125f), beta = draw(kWidth, 0.0625f);
    const std::vector<int32_t> lengths = {c.tokens - c.tokens / 3, c.tokens / 2};
    const Bytes out = poisoned(c.dtype, elements);

    // Runs a variant on memory that at(bytes) gives for each of these.
    const auto call = [&](const char* name, const auto& at, const void* lengths_at, void* out_at) {
        tilerank_fused_attention_params p = {};
        p.x = at(x), p.gamma = at(gamma), p.beta = at(beta), p.out = out_at;
        p.residual = c.pre_ln ? nullptr : at(residual);
        p.wq = at(weights[0]), p.wk = at(weights[1]), p.wv = at(weights[2]), p.wo = at(weights[3]);
        p.bq = at(biases[0]), p.bk = at(biases[1]), p.bv = at(biases[2]), p.bo = at(biases[3]);
        if (c.masks & TILERANK_SERVES_KEY_LENGTHS) {
            p.key_lengths = lengths_at, p.key_lengths_type = TILERANK_LENGTHS_INT32;
        }
        p.causal = c.masks & TILERANK_SERVES_CAUSAL ? 1 : 0;
        p.dtype = c.dtype, p.pre_ln = c.pre_ln, p.epsilon = 1e-5;
        p.scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
        p.batch = kBatch, p.tokens = c.tokens, p.width = kWidth, p.num_heads = kHeads, p.head_dim = c.head_dim;
        p.x_strides[0] = p.residual_strides[0] = p.out_strides[0] = c.tokens * kWidth;
        p.x_strides[1] = p.residual_strides[1] = p.out_strides[1] = kWidth;
        p.weight_layout = c.in_out ? TILERANK_WEIGHTS_IN_OUT : TILERANK_WEIGHTS_OUT_IN;
        p.wq_stride = p.wk_stride = p.wv_stride = c.in_out ? columns : kWidth;
        p.wo_stride = c.in_out ? kWidth : columns;
        size_t bytes = 0;
        const tilerank_status status = tilerank_fused_attention_workspace_size(name, &p, &bytes);
        if (status != TILERANK_OK) return status;
        const DeviceBuffer workspace{Bytes(bytes)};
        return tilerank_fused_attention(name, &p, workspace.get(), bytes, nullptr);
    };

    Bytes expected = out;
    const auto on_host = [](const Bytes& bytes) -> const void* { return bytes.data(); };
    if (call("reference", on_host, lengths.data(), expected.data()) != TILERANK_OK) {
        stop("reference", tilerank_last_error());
    }
    std::map<const Bytes*, DeviceBuffer> buffers;
    for (const Bytes* each : {&x, &residual, &gamma, &beta}) buffers.emplace(each, *each);
    for (const Bytes& each : weights) buffers.emplace(&each, each);
    for (const Bytes& each : biases) buffers.emplace(&each, each);
    const DeviceBuffer lengths_there(lengths), out_there(out);
    const auto there = [&](const Bytes& bytes) -> const void* { return buffers.at(&bytes).get(); };
    const tilerank_status status = call(variant, there, lengths_there.get(), out_there.get());
    if (status != TILERANK_OK) return refused(what, status);
    Bytes result(out.size());
    out_there.read(&result);
    return compare(what, c.dtype, result, expected, elements);
}

// What the row serves at a length: every dtype, head_dim and restriction, with either order of normalisation; weights lie
// one way and the other in turn.
std::vector<BlockCase> block_cases(const tilerank_variant& row, int tokens) {
    std::vector<BlockCase> cases;
    const std::vector<int> dims = row.head_dim_count > 0
                                      ? std::vector<int>(row.head_dims, row.head_dims + row.head_dim_count)
                                      : std::vector<int>{32, 7};
    for (int dtype = TILERANK_FP32; dtype <= TILERANK_BF16; ++dtype) {
        if (!(row.dtypes & (1u << dtype))) continue;
        for (const int head_dim : dims) {
            for (const uint32_t masks : {0u, static_cast<uint32_t>(TILERANK_SERVES_KEY_LENGTHS),
                                         static_cast<uint32_t>(TILERANK_SERVES_CAUSAL),
                                         TILERANK_SERVES_KEY_LENGTHS | static_cast<uint32_t>(TILERANK_SERVES_CAUSAL)}) {
                if ((masks & row.masks) != masks) continue;
                for (const bool pre_ln : {true, false}) {
                    cases.push_back({dtype, head_dim, tokens, masks, pre_ln, cases.size() % 3 == 1});
                }
            }
        }
    }
    return cases;
}

// ---- Layer normalisation ----

struct NormCase {
    int dtype;
    int width;
    int64_t rows;
    bool all;  // with a bias, a residual and the sum
};

double run_norm(const char* variant, const NormCase& c) {
    std::string what = std::string(variant) + ": " + kDtypeNames[c.dtype];
    what += ", width " + std::to_string(c.width) + ", rows " + std::to_string(c.rows) + (c.all ? ", all" : "");
    Random random{static_cast<uint64_t>(c.width * 7919 + c.rows * 31 + c.dtype)};
    const size_t width = static_cast<size_t>(c.width);
    const size_t elements = width * static_cast<size_t>(c.rows);
    const Bytes x = small_values(&random, c.dtype, elements, 0.125f);
    const Bytes residual = small_values(&random, c.dtype, elements, 0.125f);
    const Bytes bias = small_values(&random, c.dtype, width, 0.125f);
    const Bytes gamma = small_values(&random, c.dtype, width, 0.125f);
    const Bytes beta = small_values(&random, c.dtype, width, 0.125f);
    const Bytes out = poisoned(c.dtype, elements);

    const auto call = [&](const char* name, const void* x_at, const void* residual_at, const void* bias_at,
                          const void* gamma_at, const void* beta_at, void* sum_at, void* out_at) {
        tilerank_layernorm_params p = {};
        p.x = x_at, p.gamma = gamma_at, p.beta = beta_at, p.out = out_at;
        if (c.all) p.residual = residual_at, p.bias = bias_at, p.sum = sum_at;
        p.dtype = c.dtype, p.epsilon = 1e-5, p.rows = c.rows, p.width = c.width;
        p.x_stride = p.residual_stride = p.out_stride = p.sum_stride = c.width;
        return tilerank_layernorm(name, &p, nullptr, 0, nullptr);
    };
    Bytes expected = out;
    Bytes expected_sum = out;
    if (call("reference", x.data(), residual.data(), bias.data(), gamma.data(), beta.data(), expected_sum.data(),
             expected.data()) != TILERANK_OK) {
        stop("reference", tilerank_last_error());
    }
    const DeviceBuffer x_there(x), residual_there(residual), bias_there(bias), gamma_there(gamma), beta_there(beta);
    const DeviceBuffer sum_there(out), out_there(out);
    const tilerank_status status = call(variant, x_there.get(), residual_there.get(), bias_there.get(),
                                        gamma_there.get(), beta_there.get(), sum_there.get(), out_there.get());
    if (status != TILERANK_OK) return refused(what, status);
    Bytes result(out.size());
    if (c.all) {
        sum_there.read(&result);
        const double error = compare(what + ", sum", c.dtype, result, expected_sum, elements);
        if (std::isinf(error)) return error;
    }
    out_there.read(&result);
    return compare(what, c.dtype, result, expected, elements);
}

std::vector<NormCase> norm_cases(const tilerank_variant& row, int width) {
    std::vector<NormCase> cases;
    for (int dtype = TILERANK_FP32; dtype <= TILERANK_BF16; ++dtype) {
        if (!(row.dtypes & (1u << dtype))) continue;
        for (const int64_t rows : {1, 67}) {
            for (const bool all : {false, true}) cases.push_back({dtype, width, rows, all});
        }
    }
    return cases;
}

// Of the cases at the length with this number, its share.
template <typename Case>
std::vector<Case> sample_of(const std::vector<Case>& cases, size_t number, size_t lengths) {
    std::vector<Case> sample;
    for (size_t kind = 0; kind < cases.size(); ++kind) {
        if (kind % lengths == number) sample.push_back(cases[kind]);
    }
    return sample;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<int> lengths;
    std::string operation;
    const char* only = nullptr;
    bool sample = false;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--operation") == 0 && i + 1 < argc) {
            operation = argv[++i];
        } else if (std::strcmp(argv[i], "--variant") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (std::strcmp(argv[i], "--lengths") == 0 && i + 1 < argc) {
            lengths = parse_lengths(argv[++i]);
        } else if (std::strcmp(argv[i], "--sample") == 0) {
            sample = true;
        } else {
            stop(argv[i], "not understood; allowed: --operation NAME, --variant NAME, --lengths LIST, --sample");
        }
    }
    if (operation != "block" && operation != "layernorm") stop("--operation", "allowed: block, layernorm");
    const bool is_block = operation == "block";
    if (lengths.empty()) {
        lengths = is_block ? std::vector<int>{1, 33, 64, 65, 130, 200}
                           : std::vector<int>{1, 7, 64, 384, 1000, 1024, 2056};
    }
    int run = 0;
    int wrong = 0;
    const int count = is_block ? tilerank_block_variant_count() : tilerank_layernorm_variant_count();
    for (int i = 0; i < count; ++i) {
        const tilerank_variant& row = *(is_block ? tilerank_block_variant(i) : tilerank_layernorm_variant(i));
        if (row.device != TILERANK_DEVICE_CUDA || (only != nullptr && std::strcmp(row.name, only) != 0)) continue;
        if (row.min_sm > device_sm()) {
            std::printf("%s: not run, it needs compute capability %d.%d\n", row.name, row.min_sm / 10, row.min_sm % 10);
            continue;
        }
        Tally tally;
        for (size_t number = 0; number < lengths.size(); ++number) {
            const auto run_all = [&](auto cases, const auto& run_case) {
                if (sample) cases = sample_of(cases, number, lengths.size());
                for (const auto& c : cases) tally.add(c.dtype, run_case(row.name, c));
            };
            if (is_block) {
                run_all(block_cases(row, lengths[number]), run_block);
            } else {
                run_all(norm_cases(row, lengths[number]), run_norm);
            }
        }
        tally.print(row.name);
        ++run;
        wrong += tally.wrong;
    }
    if (run == 0) stop(only == nullptr ? "variants" : only, "this library has nothing of that name to run here");
    return wrong == 0 ? 0 : 1;
}
