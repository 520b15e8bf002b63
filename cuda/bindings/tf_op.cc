// TensorFlow operations over tilerank.h. Compiled against the headers of one installed TensorFlow (its C++ interface is
// no other's), linked with nothing of tilerank: the package hands over the path of the library whose build id it has
// checked, and a rebuilt library needs no rebuilt operation. No CUDA header is needed and no CUDA function is called:
// memory comes from TensorFlow's allocators, the stream is the one that TensorFlow runs on.
#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tilerank.h"
#include "xla/stream_executor/stream.h"

namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpInputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// ---- The library ----

struct Library {
    decltype(&tilerank_last_error) last_error;
    decltype(&tilerank_attention_workspace_size) attention_workspace_size;
    decltype(&tilerank_attention) attention;
    decltype(&tilerank_fused_attention_workspace_size) fused_attention_workspace_size;
    decltype(&tilerank_fused_attention) fused_attention;
};

std::atomic<const Library*> library{nullptr};

template <typename Function>
bool find(void* handle, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    return *function != nullptr;
}

absl::Status failure(tilerank_status status, const char* message) {
    switch (status) {
        case TILERANK_INVALID_ARGUMENT: return absl::InvalidArgumentError(message);
        case TILERANK_UNKNOWN_VARIANT: return absl::NotFoundError(message);
        case TILERANK_UNSUPPORTED: return absl::UnimplementedError(message);
        default: return absl::InternalError(message);
    }
}

template <typename... Parts>
absl::Status invalid(Parts... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// ---- What both operations share ----

int32_t dtype_code(DataType type) {
    if (type == tensorflow::DT_HALF) return TILERANK_FP16;
    return type == tensorflow::DT_BFLOAT16 ? TILERANK_BF16 : TILERANK_FP32;
}

class TilerankOp : public OpKernel {
  public:
    explicit TilerankOp(OpKernelConstruction* context)
        : OpKernel(context), is_on_gpu_(context->device_type() == tensorflow::DEVICE_GPU) {
        OP_REQUIRES_OK(context, context->GetAttr("T", &type_));
        OP_REQUIRES_OK(context, context->GetAttr("causal", &causal_));
        OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
        OP_REQUIRES_OK(context, context->GetAttr("row", &row_));
        const bool is_reference = row_ == "reference";
        OP_REQUIRES(context, is_on_gpu_ || is_reference,
                    absl::UnimplementedError(absl::StrCat(
                        type_string(), " was asked for variant '", row_,
                        "' on a CPU, where tilerank has no kernels; put its inputs on a GPU, or ask for variant "
                        "'reference', which is exact, slow and meant for tests")));
        OP_REQUIRES(context, !is_on_gpu_ || !is_reference,
                    absl::UnimplementedError(absl::StrCat(type_string(),
                                                          " was asked for variant 'reference' on a GPU; it runs on the "
                                                          "CPU only: call it under tf.device('CPU:0')")));
        OP_REQUIRES(context, library.load() != nullptr,
                    absl::FailedPreconditionError(
                        absl::StrCat(type_string(), " has no library to call: call tilerank.tf.load_operations()")));
    }

  protected:
    double scale(int64_t head_dim) const {
        return scale_.empty() ? 1 / std::sqrt(static_cast<double>(head_dim)) : scale_[0];
    }

    // Put the lengths, where there are any, into a call's parameters.
    template <typename Params>
    absl::Status take_key_lengths(OpKernelContext* context, int64_t batch, Params* params) const {
        OpInputList lengths;
        TF_RETURN_IF_ERROR(context->input_list("key_lengths", &lengths));
        if (lengths.size() == 0) return absl::OkStatus();
        if (lengths[0].dims() != 1 || lengths[0].dim_size(0) != batch) {
            return invalid("key_lengths has shape ", lengths[0].shape().DebugString(), "; expected [", batch,
                           "], one a sequence");
        }
        params->key_lengths = lengths[0].data();
        params->key_lengths_type =
            lengths[0].dtype() == tensorflow::DT_INT64 ? TILERANK_LENGTHS_INT64 : TILERANK_LENGTHS_INT32;
        return absl::OkStatus();
    }

    // Run one of the library's functions with the workspace that it asks for.
    template <typename Params>
    void call(OpKernelContext* context, const Params& params,
              tilerank_status (*workspace_size)(const char*, const Params*, size_t*),
              tilerank_status (*run)(const char*, const Params*, void*, size_t, void*)) const {
        size_t bytes = 0;
        tilerank_status status = workspace_size(row_.c_str(), &params, &bytes);
        OP_REQUIRES(context, status == TILERANK_OK, failure(status, library.load()->last_error()));
        Tensor memory;
        void* workspace = nullptr;
        if (bytes > 0) {
            constexpr uintptr_t kAlignment = 256;  // more than TensorFlow's allocators promise on a CPU
            const auto size = static_cast<int64_t>(bytes + kAlignment);
            OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_UINT8, TensorShape({size}), &memory));
            const auto address = reinterpret_cast<uintptr_t>(memory.data());
            workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
        }
        status = run(row_.c_str(), &params, workspace, bytes, stream(context));
        OP_REQUIRES(context, status == TILERANK_OK, failure(status, library.load()->last_error()));
    }

    DataType type_;
    bool causal_;

  private:
    // The cudaStream_t that TensorFlow runs this operation on; null on a CPU.
    void* stream(OpKernelContext* context) const {
        return is_on_gpu_ ? context->op_device_context()->stream()->platform_specific_handle().stream : nullptr;
    }

    const bool is_on_gpu_;
    std::vector<float> scale_;
    std::string row_;
};

// Shape inference: the lengths, wherever they stand, are [batch].
absl::Status check_key_lengths(InferenceContext* context, DimensionHandle* batch) {
    std::vector<ShapeHandle> lengths;
    TF_RETURN_IF_ERROR(context->input("key_lengths", &lengths));
    for (ShapeHandle each : lengths) {
        TF_RETURN_IF_ERROR(context->WithRank(each, 1, &each));
        TF_RETURN_IF_ERROR(context->Merge(*batch, context->Dim(each, 0), batch));
    }
    return absl::OkStatus();
}

// ---- TilerankAttention: softmax attention over a padded batch ----

absl::Status attention_shape(InferenceContext* context) {
    ShapeHandle q, k, v;
    TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 4, &q));
    TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 4, &k));
    TF_RETURN_IF_ERROR(context->WithRank(context->input(2), 4, &v));
    TF_RETURN_IF_ERROR(context->Merge(k, v, &k));
    DimensionHandle batch, head_dim;
    TF_RETURN_IF_ERROR(context->Merge(context->Dim(q, 0), context->Dim(k, 0), &batch));
    TF_RETURN_IF_ERROR(context->Merge(context->Dim(q, 3), context->Dim(k, 3), &head_dim));
    TF_RETURN_IF_ERROR(check_key_lengths(context, &batch));
    context->set_output(0, context->MakeShape({batch, context->Dim(q, 1), context->Dim(q, 2), head_dim}));
    return absl::OkStatus();
}

class AttentionOp : public TilerankOp {
  public:
    using TilerankOp::TilerankOp;

    void Compute(OpKernelContext* context) override {
        const Tensor &q = context->input(0), &k = context->input(1), &v = context->input(2);
        const bool fits = q.dims() == 4 && k.dims() == 4 && k.shape() == v.shape() &&
                          k.dim_size(0) == q.dim_size(0) && k.dim_size(3) == q.dim_size(3);
        OP_REQUIRES(context, fits,
                    invalid("q, k and v have shapes ", q.shape().DebugString(), ", ", k.shape().DebugString(), " and ",
                            v.shape().DebugString(),
                            "; expected [batch, heads, tokens, head_dim], k and v alike, with q's batch and head_dim"));
        tilerank_attention_params params = {};
        OP_REQUIRES_OK(context, take_key_lengths(context, q.dim_size(0), &params));
        Tensor* out = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, q.shape(), &out));
        params.q = q.data(), params.k = k.data(), params.v = v.data(), params.out = out->data();
        params.dtype = dtype_code(type_), params.causal = causal_, params.scale = scale(q.dim_size(3));
        params.batch = q.dim_size(0), params.heads = q.dim_size(1), params.kv_heads = k.dim_size(1);
        params.q_len = q.dim_size(2), params.k_len = k.dim_size(2), params.head_dim = q.dim_size(3);
        fill_strides(q, params.q_strides), fill_strides(k, params.k_strides);
        fill_strides(v, params.v_strides), fill_strides(*out, params.out_strides);
        call(context, params, library.load()->attention_workspace_size, library.load()->attention);
    }

  private:
    static void fill_strides(const Tensor& tensor, int64_t (&strides)[3]) {
        strides[2] = tensor.dim_size(3);
        strides[1] = strides[2] * tensor.dim_size(2);
        strides[0] = strides[1] * tensor.dim_size(1);
    }
};

// TensorFlow has no optional input: a list of none or one stands for it. An attribute may not be called variant,
// which is a type, so the registry's row is `row`.
REGISTER_OP("TilerankAttention")
    .Input("q: T")
    .Input("k: T")
    .Input("v: T")
    .Input("key_lengths: has_key_lengths * Tlengths")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("Tlengths: {int32, int64} = DT_INT32")
    .Attr("has_key_lengths: int >= 0")
    .Attr("causal: bool")
    .Attr("scale: list(float)")  // empty: 1/sqrt(head_dim)
    .Attr("row: string")
    .SetShapeFn(attention_shape);
REGISTER_KERNEL_BUILDER(Name("TilerankAttention").Device(tensorflow::DEVICE_CPU), AttentionOp);
REGISTER_KERNEL_BUILDER(Name("TilerankAttention").Device(tensorflow::DEVICE_GPU), AttentionOp);

// ---- TilerankFusedAttention: the attention block of an encoder layer ----

// The inputs that a call may leave out, in the order of the list `optional`; the attribute `given` names those in it.
enum class Kind { kColumns, kWidth, kTokens };  // [num_heads * head_dim], [width], [batch, tokens, width]
struct Optional {
    const char* name;
    Kind kind;
    const void* tilerank_fused_attention_params::*pointer;
};
constexpr Optional kOptional[] = {{"bq", Kind::kColumns, &tilerank_fused_attention_params::bq},
                                  {"bk", Kind::kColumns, &tilerank_fused_attention_params::bk},
                                  {"bv", Kind::kColumns, &tilerank_fused_attention_params::bv},
                                  {"bo", Kind::kWidth, &tilerank_fused_attention_params::bo},
                                  {"gamma", Kind::kWidth, &tilerank_fused_attention_params::gamma},
                                  {"beta", Kind::kWidth, &tilerank_fused_attention_params::beta},
                                  {"residual", Kind::kTokens, &tilerank_fused_attention_params::residual}};

const Optional* find_optional(const std::string& name) {
    for (const Optional& each : kOptional) {
        if (name == each.name) return &each;
    }
    return nullptr;
}

constexpr const char* kWeights[] = {"wq", "wk", "wv", "wo"};  // inputs 1 to 4

// Has the matrix `index` of kWeights a row for each column of the heads ([columns, width]), or [width, columns]?
bool is_tall(int index, bool is_in_out) { return (index == 3) == is_in_out; }

absl::Status expect(InferenceContext* context, const std::string& name, ShapeHandle shape, ShapeHandle expected) {
    ShapeHandle merged;
    if (context->Merge(shape, expected, &merged).ok()) return absl::OkStatus();
    return invalid(name, " has shape ", context->DebugString(shape), "; expected ", context->DebugString(expected));
}

absl::Status fused_attention_shape(InferenceContext* context) {
    int64_t num_heads, head_dim;
    std::string weight_layout;
    std::vector<std::string> given;
    TF_RETURN_IF_ERROR(context->GetAttr("num_heads", &num_heads));
    TF_RETURN_IF_ERROR(context->GetAttr("head_dim", &head_dim));
    TF_RETURN_IF_ERROR(context->GetAttr("weight_layout", &weight_layout));
    TF_RETURN_IF_ERROR(context->GetAttr("given", &given));
    ShapeHandle x;
    TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 3, &x));
    const DimensionHandle width = context->Dim(x, 2), columns = context->MakeDim(num_heads * head_dim);
    for (int index = 0; index < 4; ++index) {
        const bool tall = is_tall(index, weight_layout == "in_out");
        const ShapeHandle expected = tall ? context->Matrix(columns, width) : context->Matrix(width, columns);
        TF_RETURN_IF_ERROR(expect(context, kWeights[index], context->input(1 + index), expected));
    }
    std::vector<ShapeHandle> optional;
    TF_RETURN_IF_ERROR(context->input("optional", &optional));
    for (size_t index = 0; index < optional.size() && index < given.size(); ++index) {
        const Optional* known = find_optional(given[index]);
        if (known == nullptr) continue;  // the kernel refuses it
        const ShapeHandle expected = known->kind == Kind::kTokens ? x
                                     : known->kind == Kind::kWidth ? context->Vector(width)
                                                                   : context->Vector(columns);
        TF_RETURN_IF_ERROR(expect(context, given[index], optional[index], expected));
    }
    DimensionHandle batch = context->Dim(x, 0);
    TF_RETURN_IF_ERROR(check_key_lengths(context, &batch));
    context->set_output(0, context->MakeShape({batch, context->Dim(x, 1), width}));
    return absl::OkStatus();
}

class FusedAttentionOp : public TilerankOp {
  public:
    explicit FusedAttentionOp(OpKernelConstruction* context) : TilerankOp(context) {
        std::string weight_layout;
        OP_REQUIRES_OK(context, context->GetAttr("num_heads", &num_heads_));
        OP_REQUIRES_OK(context, context->GetAttr("head_dim", &head_dim_));
        OP_REQUIRES_OK(context, context->GetAttr("pre_ln", &pre_ln_));
        OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
        OP_REQUIRES_OK(context, context->GetAttr("weight_layout", &weight_layout));
        OP_REQUIRES_OK(context, context->GetAttr("given", &given_));
        is_in_out_ = weight_layout == "in_out";
        for (const std::string& name : given_) {
            OP_REQUIRES(context, find_optional(name) != nullptr,
                        invalid("given names ", name, "; allowed: bq, bk, bv, bo, gamma, beta, residual"));
        }
    }

    void Compute(OpKernelContext* context) override {
        const Tensor& x = context->input(0);
        OP_REQUIRES(context, x.dims() == 3,
                    invalid("x has shape ", x.shape().DebugString(), "; expected [batch, tokens, width]"));
        const int64_t batch = x.dim_size(0), tokens = x.dim_size(1), width = x.dim_size(2);
        const int64_t columns = num_heads_ * head_dim_;
        for (int index = 0; index < 4; ++index) {
            const bool tall = is_tall(index, is_in_out_);
            const TensorShape expected({tall ? columns : width, tall ? width : columns});
            OP_REQUIRES_OK(context, expect(kWeights[index], context->input(1 + index), expected));
        }
        tilerank_fused_attention_params params = {};
        OpInputList optional;
        OP_REQUIRES_OK(context, context->input_list("optional", &optional));
        OP_REQUIRES(context, optional.size() == static_cast<int>(given_.size()),
                    invalid("optional holds ", optional.size(), " tensors; given names ", given_.size()));
        for (int index = 0; index < optional.size(); ++index) {
            const Optional& known = *find_optional(given_[index]);
            const TensorShape expected = known.kind == Kind::kTokens ? x.shape()
                                         : known.kind == Kind::kWidth ? TensorShape({width})
                                                                      : TensorShape({columns});
            OP_REQUIRES_OK(context, expect(known.name, optional[index], expected));
            params.*known.pointer = optional[index].data();
        }
        OP_REQUIRES_OK(context, take_key_lengths(context, batch, &params));
        Tensor* out = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &out));
        params.x = x.data(), params.out = out->data();
        params.wq = context->input(1).data(), params.wk = context->input(2).data();
        params.wv = context->input(3).data(), params.wo = context->input(4).data();
        params.dtype = dtype_code(type_), params.causal = causal_, params.pre_ln = pre_ln_;
        params.weight_layout = is_in_out_ ? TILERANK_WEIGHTS_IN_OUT : TILERANK_WEIGHTS_OUT_IN;
        params.epsilon = epsilon_, params.scale = scale(head_dim_);
        params.batch = batch, params.tokens = tokens, params.width = width;
        params.num_heads = num_heads_, params.head_dim = head_dim_;
        for (int64_t(*strides)[2] : {&params.x_strides, &params.residual_strides, &params.out_strides}) {
            (*strides)[0] = tokens * width, (*strides)[1] = width;
        }
        params.wq_stride = context->input(1).dim_size(1), params.wk_stride = context->input(2).dim_size(1);
        params.wv_stride = context->input(3).dim_size(1), params.wo_stride = context->input(4).dim_size(1);
        call(context, params, library.load()->fused_attention_workspace_size, library.load()->fused_attention);
    }

  private:
    static absl::Status expect(const char* name, const Tensor& tensor, const TensorShape& expected) {
        if (tensor.shape() == expected) return absl::OkStatus();
        return invalid(name, " has shape ", tensor.shape().DebugString(), "; expected ", expected.DebugString());
    }

    int64_t num_heads_, head_dim_;
    float epsilon_;
    bool pre_ln_, is_in_out_;
    std::vector<std::string> given_;
};

REGISTER_OP("TilerankFusedAttention")
    .Input("x: T")
    .Input("wq: T")
    .Input("wk: T")
    .Input("wv: T")
    .Input("wo: T")
    .Input("optional: optional_count * T")
    .Input("key_lengths: has_key_lengths * Tlengths")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("Tlengths: {int32, int64} = DT_INT32")
    .Attr("optional_count: int >= 0")
    .Attr("has_key_lengths: int >= 0")
    .Attr("given: list(string)")  // of kOptional, one for each tensor of `optional`
    .Attr("num_heads: int >= 1")
    .Attr("head_dim: int >= 1")
    .Attr("causal: bool")
    .Attr("pre_ln: bool")
    .Attr("epsilon: float")
    .Attr("scale: list(float)")  // empty: 1/sqrt(head_dim)
    .Attr("weight_layout: {'in_out', 'out_in'}")
    .Attr("row: string")
    .SetShapeFn(fused_attention_shape);
REGISTER_KERNEL_BUILDER(Name("TilerankFusedAttention").Device(tensorflow::DEVICE_CPU), FusedAttentionOp);
REGISTER_KERNEL_BUILDER(Name("TilerankFusedAttention").Device(tensorflow::DEVICE_GPU), FusedAttentionOp);

}  // namespace

// Have every operation of this process call the library at `path`. Returns why it cannot be, or NULL.
extern "C" TILERANK_API const char* tilerank_tf_use_library(const char* path) {
    static thread_local std::string reason;
    const auto refuse = [](std::string why) {
        reason = std::move(why);
        return reason.c_str();
    };
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return refuse(dlerror());
    decltype(&tilerank_abi_version) abi_version;
    if (!find(handle, "tilerank_abi_version", &abi_version)) return refuse("it is no kernel library");
    if (abi_version() != TILERANK_ABI_VERSION) {
        return refuse(absl::StrCat("it has interface version ", abi_version(), "; these operations speak ",
                                   TILERANK_ABI_VERSION));
    }
    Library* found = new Library;  // for the life of the process, like the operations that use it
    if (!find(handle, "tilerank_last_error", &found->last_error) ||
        !find(handle, "tilerank_attention_workspace_size", &found->attention_workspace_size) ||
        !find(handle, "tilerank_attention", &found->attention) ||
        !find(handle, "tilerank_fused_attention_workspace_size", &found->fused_attention_workspace_size) ||
        !find(handle, "tilerank_fused_attention", &found->fused_attention)) {
        delete found;
        return refuse(dlerror());
    }
    library.store(found);
    return nullptr;
}
