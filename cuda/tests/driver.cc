// Every variant against the reference, in one small program for compute-sanitizer, AddressSanitizer and the like: no
// Python, no framework, exact-size buffers.
//
//     driver [--variant NAME] [--lengths 0,1,33] [--sample] [--list]
//
// Lengths straddle the tiles that kernels use. Each case runs what the variant's row says that it serves: dtypes, head
// dims, layouts, and restrictions one by one and all together. --sample runs each of these and each length, but not all
// of them at every length: under a sanitizer a case takes a hundred times longer. Exit code 1 when a value is wrong, 2 for
// bad arguments.
#include <algorithm>
#include <map>

#include "driver.h"

namespace {

// ---- Cases ----

Bytes random_values(Random* random, int dtype, size_t count) {
    Bytes bytes(count * element_size(dtype));
    for (size_t i = 0; i < count; ++i) put(&bytes, dtype, i, static_cast<float>(random->next() % 33) / 8.0f - 2.0f);
    return bytes;
}

struct Case {
    int dtype;
    int head_dim;
    int length;
    bool packed;
    uint32_t masks;  // TILERANK_SERVES_... bits
    int heads;
    int queries;  // a padded sequence's; a packed one has as many as keys
};

// Above these a result is wrong, not merely rounded: values are at most 2, sums are kept in fp32, weights and results
// may each be rounded to the dtype once (2^-11 and 2^-8 relative).
constexpr double kTolerances[] = {1e-5, 4e-3, 3e-2};

std::string describe(const Case& c) {
    std::string text = kDtypeNames[c.dtype];
    text += ", head_dim " + std::to_string(c.head_dim) + ", length " + std::to_string(c.length);
    text += c.packed ? ", packed" : ", padded";
    if (c.masks & TILERANK_SERVES_KEY_LENGTHS) text += ", key_lengths";
    if (c.masks & TILERANK_SERVES_CAUSAL) text += ", causal";
    if (c.masks & TILERANK_SERVES_BOOLEAN) text += ", boolean";
    if (c.masks & TILERANK_SERVES_ADDITIVE) text += ", additive";
    return text;
}

// The inputs of a case, and the reference's answer.
struct Problem {
    tilerank_attention_params padded = {};
    tilerank_attention_varlen_params packed = {};
    Bytes q, k, v, out, mask;
    std::vector<int32_t> key_lengths, offsets;
    size_t out_elements = 0;

    explicit Problem(const Case& c) {
        Random random{static_cast<uint64_t>(c.length * 7919 + c.head_dim * 31 + c.dtype)};
        const int64_t heads = c.heads;
        const int64_t kv_heads = heads > 1 ? heads / 2 : 1;
        const int64_t length = c.length;
        const int64_t queries = c.queries;
        const int64_t dim = c.head_dim;
        const int64_t batch = c.packed ? 3 : (heads > 1 ? 2 : 1);
        offsets = {0, c.length, c.length + 1, c.length + 1 + c.length / 2};
        const int64_t rows = c.packed ? offsets.back() : batch * length;
        const int64_t q_rows = c.packed ? rows : batch * queries;
        q = random_values(&random, c.dtype, static_cast<size_t>(q_rows * heads * dim));
        k = random_values(&random, c.dtype, static_cast<size_t>(rows * kv_heads * dim));
        v = random_values(&random, c.dtype, static_cast<size_t>(rows * kv_heads * dim));
        out_elements = static_cast<size_t>(q_rows * heads * dim);
        out = Bytes((out_elements + kGuard) * element_size(c.dtype));
        for (size_t i = 0; i < out_elements + kGuard; ++i) put(&out, c.dtype, i, NAN);
        const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
        const int32_t causal = c.masks & TILERANK_SERVES_CAUSAL ? 1 : 0;

        packed.dtype = c.dtype, packed.causal = causal, packed.scale = scale;
        packed.batch = batch, packed.heads = heads, packed.kv_heads = kv_heads, packed.head_dim = dim;
        packed.total_q = packed.total_k = rows;
        packed.max_seqlen_q = packed.max_seqlen_k = length > 1 ? length : 1;
        packed.overlap = 1;  // copies to the device are over when a call is made
        packed.q_strides[0] = packed.out_strides[0] = packed.k_strides[0] = packed.v_strides[0] = dim;
        packed.q_strides[1] = packed.out_strides[1] = heads * dim;
        packed.k_strides[1] = packed.v_strides[1] = kv_heads * dim;

        // [batch, token, head, dim] in memory, as models hold it.
        padded.dtype = c.dtype, padded.causal = causal, padded.scale = scale;
        padded.batch = batch, padded.heads = heads, padded.kv_heads = kv_heads;
        padded.q_len = queries, padded.k_len = length, padded.head_dim = dim;
        padded.q_strides[0] = padded.out_strides[0] = queries * heads * dim;
        padded.q_strides[1] = padded.out_strides[1] = dim;
        padded.q_strides[2] = padded.out_strides[2] = heads * dim;
        padded.k_strides[0] = padded.v_strides[0] = length * kv_heads * dim;
        padded.k_strides[1] = padded.v_strides[1] = dim;
        padded.k_strides[2] = padded.v_strides[2] = kv_heads * dim;
        if (c.masks & TILERANK_SERVES_KEY_LENGTHS) {
            padded.key_lengths_type = TILERANK_LENGTHS_INT32;
            key_lengths = {c.length - c.length / 3, c.length / 2};
            key_lengths.resize(static_cast<size_t>(batch));
        }
        const bool boolean = c.masks & TILERANK_SERVES_BOOLEAN;
        if (boolean || c.masks & TILERANK_SERVES_ADDITIVE) {
            padded.mask_type = boolean ? TILERANK_MASK_BOOL : TILERANK_MASK_FP32;
            const size_t entries = static_cast<size_t>(batch * queries * length);  // one for all heads
            mask = Bytes(entries * (boolean ? 1 : 4));
            for (size_t i = 0; i < entries; ++i) {
                const uint32_t draw = random.next() % 8;
                if (boolean) {
                    mask[i] = draw < 5;
                } else {
                    put(&mask, TILERANK_FP32, i, draw < 5 ? static_cast<float>(draw) / 4.0f : -INFINITY);
                }
            }
            padded.mask_strides[0] = queries * length;
            padded.mask_strides[2] = length;
            padded.mask_strides[3] = 1;
        }
    }

    // Runs a variant on the given memory and returns the call's status.
    tilerank_status run(const char* variant, const Case& c, const void* q_at, const void* k_at, const void* v_at,
                        void* out_at, const void* lengths_at, const void* mask_at, const void* offsets_at) {
        size_t bytes = 0;
        tilerank_status status;
        padded.q = packed.q = q_at, padded.k = packed.k = k_at, padded.v = packed.v = v_at;
        padded.out = packed.out = out_at;
        padded.key_lengths = key_lengths.empty() ? nullptr : lengths_at;
        padded.mask = padded.mask_type == TILERANK_MASK_NONE ? nullptr : mask_at;
        packed.cu_seqlens_q = packed.cu_seqlens_k = static_cast<const int32_t*>(offsets_at);
        status = c.packed ? tilerank_attention_varlen_workspace_size(variant, &packed, &bytes)
                          : tilerank_attention_workspace_size(variant, &padded, &bytes);
        if (status != TILERANK_OK) return status;
        const DeviceBuffer workspace{Bytes(bytes)};
        return c.packed ? tilerank_attention_varlen(variant, &packed, workspace.get(), bytes, nullptr)
                        : tilerank_attention(variant, &padded, workspace.get(), bytes, nullptr);
    }
};

// The worst difference from the reference, or infinity with the reason on stderr.
double run_case(const char* variant, const Case& c, Problem* problem, const Bytes& expected) {
    const DeviceBuffer q(problem->q), k(problem->k), v(problem->v), out(problem->out), mask(problem->mask);
    const DeviceBuffer lengths(problem->key_lengths), offsets(problem->offsets);
    const tilerank_status status =
        problem->run(variant, c, q.get(), k.get(), v.get(), out.get(), lengths.get(), mask.get(), offsets.get());
    if (status != TILERANK_OK) {
        std::fprintf(stderr, "%s: %s: status %d: %s\n", variant, describe(c).c_str(), static_cast<int>(status),
                     tilerank_last_error());
        return INFINITY;
    }
    Bytes result(problem->out.size());
    out.read(&result);  // on a GPU this waits for the kernel
    double worst = 0.0;
    for (size_t i = 0; i < problem->out_elements + kGuard; ++i) {
        const double value = get(result, c.dtype, i);
        if (i >= problem->out_elements) {
            if (std::isnan(value)) continue;
            std::fprintf(stderr, "%s: %s: wrote %g behind the end of out\n", variant, describe(c).c_str(), value);
            return INFINITY;
        }
        const double difference = std::fabs(value - get(expected, c.dtype, i));
        if (!(difference <= kTolerances[c.dtype])) {
            std::fprintf(stderr, "%s: %s: element %zu is %g, expected %g\n", variant, describe(c).c_str(), i, value,
                         static_cast<double>(get(expected, c.dtype, i)));
            return INFINITY;
        }
        worst = difference > worst ? difference : worst;
    }
    return worst;
}

// Head dims to run at a length: those of the row's list; for a row that serves any, the usual one, and at short lengths
// an odd one and the largest.
std::vector<int> dims_of(const tilerank_variant& row, int length) {
    if (row.head_dim_count > 0) return {row.head_dims, row.head_dims + row.head_dim_count};
    if (length < 33) return {32, 7, TILERANK_MAX_HEAD_DIM};
    return {32};
}

// Each restriction that the row serves alone, and those that can go together: one mask at a time.
std::vector<uint32_t> masks_of(const tilerank_variant& row, bool packed) {
    const uint32_t served = packed ? row.masks & TILERANK_SERVES_CAUSAL : row.masks;
    std::vector<uint32_t> masks = {0};
    for (const uint32_t bit :
         {TILERANK_SERVES_KEY_LENGTHS, TILERANK_SERVES_CAUSAL, TILERANK_SERVES_BOOLEAN, TILERANK_SERVES_ADDITIVE}) {
        if (served & bit) masks.push_back(bit);
    }
    const uint32_t together = served & ~static_cast<uint32_t>(TILERANK_SERVES_ADDITIVE);
    if ((together & (together - 1)) != 0) masks.push_back(together);
    return masks;
}

// Everything that the row serves at a length.
std::vector<Case> cases_of(const tilerank_variant& row, int length) {
    std::vector<Case> cases;
    if (row.max_k_len > 0 && length > row.max_k_len) return cases;
    const int heads = length < 128 ? 4 : 1;  // long sequences get one head: the reference takes its time
    for (int dtype = TILERANK_FP32; dtype <= TILERANK_BF16; ++dtype) {
        if (!(row.dtypes & (1u << dtype))) continue;
        for (const int layout : {TILERANK_LAYOUT_PADDED, TILERANK_LAYOUT_PACKED}) {
            if (!(row.layouts & static_cast<uint32_t>(layout))) continue;
            const bool packed = layout == TILERANK_LAYOUT_PACKED;
            for (const int head_dim : dims_of(row, length)) {
                for (const uint32_t masks : masks_of(row, packed)) {
                    cases.push_back({dtype, head_dim, length, packed, masks, heads, length});
                }
            }
        }
    }
    return cases;
}

constexpr int kSampledQueries = 65;  // two blocks of most kernels; packed sequences stay whole

// Of the cases at the length with this number, its share: over all lengths each kind of case comes once, and each length
// has one.
std::vector<Case> sample_of(const std::vector<Case>& cases, size_t number, size_t lengths) {
    std::vector<Case> sample;
    for (size_t kind = 0; kind < cases.size(); ++kind) {
        if (kind % lengths != number && kind != number % cases.size()) continue;
        sample.push_back(cases[kind]);
        sample.back().heads = std::min(cases[kind].heads, 2);
        sample.back().queries = std::min(cases[kind].length, kSampledQueries);
    }
    return sample;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<int> lengths = {0, 1, 31, 32, 33, 48, 63, 64, 65, 511, 512};
    const char* only = nullptr;
    bool sample = false;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--variant") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (std::strcmp(argv[i], "--lengths") == 0 && i + 1 < argc) {
            lengths = parse_lengths(argv[++i]);
        } else if (std::strcmp(argv[i], "--sample") == 0) {
            sample = true;
        } else if (std::strcmp(argv[i], "--list") == 0) {
            for (int32_t row = 0; row < tilerank_attention_variant_count(); ++row) {
                std::printf("%s\n", tilerank_attention_variant(row)->name);
            }
            return 0;
        } else {
            stop(argv[i], "not understood; allowed: --variant NAME, --lengths LIST, --sample, --list");
        }
    }

    std::vector<const tilerank_variant*> rows;
    for (int32_t i = 0; i < tilerank_attention_variant_count(); ++i) {
        const tilerank_variant* row = tilerank_attention_variant(i);
        if (row->device != TILERANK_DEVICE_CUDA || (only != nullptr && std::strcmp(row->name, only) != 0)) continue;
        if (row->min_sm > device_sm()) {
            std::printf("%s: not run, it needs compute capability %d.%d\n", row->name, row->min_sm / 10,
                        row->min_sm % 10);
            continue;
        }
        rows.push_back(row);
    }
    if (rows.empty()) stop(only == nullptr ? "variants" : only, "this library has nothing of that name to run here");

    std::map<std::string, Tally> tallies;
    for (size_t number = 0; number < lengths.size(); ++number) {
        std::map<std::string, Bytes> expected;  // by case: the reference computes each once for all variants
        for (const tilerank_variant* row : rows) {
            std::vector<Case> cases = cases_of(*row, lengths[number]);
            if (sample) cases = sample_of(cases, number, lengths.size());
            for (const Case& c : cases) {
                Problem problem(c);
                Bytes& answer = expected[describe(c)];
                if (answer.empty()) {
                    answer = problem.out;
                    const Problem& p = problem;
                    if (problem.run("reference", c, p.q.data(), p.k.data(), p.v.data(), answer.data(),
                                    p.key_lengths.data(), p.mask.data(), p.offsets.data()) != TILERANK_OK) {
                        stop("reference", tilerank_last_error());
                    }
                }
                tallies[row->name].add(c.dtype, run_case(row->name, c, &problem, answer));
            }
        }
    }

    int wrong = 0;
    for (const tilerank_variant* row : rows) {
        const Tally& tally = tallies[row->name];
        tally.print(row->name);
        wrong += tally.wrong;
    }
    return wrong == 0 ? 0 : 1;
}
