// TensorFlow operations over tilerank.h. Compiled against the headers of one installed TensorFlow (its C++ interface is
// no other's), linked with nothing of tilerank: the package hands over the path of the library whose build id it has
// checked, and a rebuilt library needs no rebuilt operation. No CUDA header is needed and no CUDA function is called:
// memory comes from TensorFlow's allocators, the stream is the one that TensorFlow runs on.
#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
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
        OP_REQUIRES_OK(context, context->GetAttr("row", &row_));
        const bool is_reference = row_ == "reference";
        OP_REQUIRES(context, is_on_gpu_ || is_reference,
                    absl::UnimplementedError(absl::StrCat(type_string(), " was asked for variant '", row_,
                                          "' on a CPU, where tilerank has no kernels; put its inputs on a GPU, or ask "
                                          "for variant 'reference', which is exact, slow and meant for tests")));
        OP_REQUIRES(context, !is_on_gpu_ || !is_reference,
                    absl::UnimplementedError(absl::StrCat(type_string(), " was asked for variant 'reference' on a GPU; it runs on the "
                                          "CPU only: call it under tf.device('CPU:0')")));
        OP_REQUIRES(context, library.load() != nullptr,
                    absl::FailedPreconditionError(absl::StrCat(type_string(), " has no library; import tilerank.tf, which loads it")));
    }

  protected:
    // Run one of the library's functions with the workspace that it asks for.
    template <typename Params, typename Size, typename Run>
    void call(OpKernelContext* context, const Params& params, Size workspace_size, Run run) const {
        const Library& loaded = *library.load();
        size_t bytes = 0;
        tilerank_status status = workspace_size(row_.c_str(), &params, &bytes);
        OP_REQUIRES(context, status == TILERANK_OK, failure(status, loaded.last_error()));
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
        OP_REQUIRES(context, status == TILERANK_OK, failure(status, loaded.last_error()));
    }

    DataType type_;
    bool causal_;
    std::string row_;

  private:
    // The cudaStream_t that TensorFlow runs this operation on; null on a CPU.
    void* stream(OpKernelContext* context) const {
        return is_on_gpu_ ? context->op_device_context()->stream()->platform_specific_handle().stream : nullptr;
    }

    const bool is_on_gpu_;
};

// ---- TilerankAttention: softmax attention over a padded batch ----

absl::Status attention_shape(InferenceContext* context) {
    ShapeHandle q, k, v;
    for (auto [index, shape] : {std::pair{0, &q}, {1, &k}, {2, &v}}) {
        TF_RETURN_IF_ERROR(context->WithRank(context->input(index), 4, shape));
    }
    TF_RETURN_IF_ERROR(context->Merge(k, v, &k));
    DimensionHandle batch, head_dim;
    TF_RETURN_IF_ERROR(context->Merge(context->Dim(q, 0), context->Dim(k, 0), &batch));
    TF_RETURN_IF_ERROR(context->Merge(context->Dim(q, 3), context->Dim(k, 3), &head_dim));
    if (context->num_inputs() > 3) {
        ShapeHandle lengths;
        TF_RETURN_IF_ERROR(context->WithRank(context->input(3), 1, &lengths));
        TF_RETURN_IF_ERROR(context->Merge(batch, context->Dim(lengths, 0), &batch));
    }
    context->set_output(0, context->MakeShape({batch, context->Dim(q, 1), context->Dim(q, 2), head_dim}));
    return absl::OkStatus();
}

class AttentionOp : public TilerankOp {
  public:
    explicit AttentionOp(OpKernelConstruction* context) : TilerankOp(context) {
        OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    }

    void Compute(OpKernelContext* context) override {
        const Tensor &q = context->input(0), &k = context->input(1), &v = context->input(2);
        for (int index : {0, 1, 2}) {
            const TensorShape& shape = context->input(index).shape();
            OP_REQUIRES(context, shape.dims() == 4,
                        absl::InvalidArgumentError(absl::StrCat(std::string(1, "qkv"[index]), " has shape ", shape.DebugString(),
                                                "; expected [batch, heads, tokens, head_dim]")));
        }
        OP_REQUIRES(context,
                    k.shape() == v.shape() && k.dim_size(0) == q.dim_size(0) && k.dim_size(3) == q.dim_size(3),
                    absl::InvalidArgumentError(absl::StrCat("q, k and v have shapes ", q.shape().DebugString(), ", ",
                                            k.shape().DebugString(), " and ", v.shape().DebugString(),
                                            "; k and v must have the same, with q's batch and head_dim")));
        OpInputList lengths;
        OP_REQUIRES_OK(context, context->input_list("key_lengths", &lengths));
        for (const Tensor& each : lengths) {
            OP_REQUIRES(context, each.dims() == 1 && each.dim_size(0) == q.dim_size(0),
                        absl::InvalidArgumentError(absl::StrCat("key_lengths has shape ", each.shape().DebugString(), "; expected [",
                                                q.dim_size(0), "], one a sequence")));
        }
        Tensor* out = nullptr;
        OP_REQUIRES_OK(context, context->allocate_output(0, q.shape(), &out));

        tilerank_attention_params params = {};
        params.q = q.data(), params.k = k.data(), params.v = v.data(), params.out = out->data();
        params.dtype = dtype_code(type_);
        params.causal = causal_;
        params.scale = scale_.empty() ? 1 / std::sqrt(static_cast<double>(q.dim_size(3))) : scale_[0];
        params.batch = q.dim_size(0), params.heads = q.dim_size(1), params.kv_heads = k.dim_size(1);
        params.q_len = q.dim_size(2), params.k_len = k.dim_size(2), params.head_dim = q.dim_size(3);
        fill_strides(q, params.q_strides), fill_strides(k, params.k_strides);
        fill_strides(v, params.v_strides), fill_strides(*out, params.out_strides);
        if (lengths.size() > 0) {
            params.key_lengths = lengths[0].data();
            params.key_lengths_type = TILERANK_LENGTHS_INT32;
        }
        call(context, params, library.load()->attention_workspace_size, library.load()->attention);
    }

  private:
    static void fill_strides(const Tensor& tensor, int64_t (&strides)[3]) {
        strides[2] = tensor.dim_size(3);
        strides[1] = strides[2] * tensor.dim_size(2);
        strides[0] = strides[1] * tensor.dim_size(1);
    }

    std::vector<float> scale_;
};

REGISTER_OP("TilerankAttention")
    .Input("q: T")
    .Input("k: T")
    .Input("v: T")
    .Input("key_lengths: has_key_lengths * int32")
    .Output("out: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("has_key_lengths: int >= 0")  // 0 or 1: TensorFlow has no optional input
    .Attr("causal: bool")
    .Attr("scale: list(float)")  // empty: 1/sqrt(head_dim)
    .Attr("row: string")  // of the registry; an attribute may not be called variant, which is a type
    .SetShapeFn(attention_shape);
REGISTER_KERNEL_BUILDER(Name("TilerankAttention").Device(tensorflow::DEVICE_CPU), AttentionOp);
REGISTER_KERNEL_BUILDER(Name("TilerankAttention").Device(tensorflow::DEVICE_GPU), AttentionOp);

}  // namespace

// The library that every operation of this process calls. Returns why it cannot be used, or NULL.
extern "C" TILERANK_API const char* tilerank_tf_use_library(const char* path) {
    static thread_local std::string reason;
    const auto refuse = [](std::string why) {
        reason = std::move(why);
        return reason.c_str();
    };
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return refuse(dlerror());
    decltype(&tilerank_abi_version) abi_version;
    if (!find(handle, "tilerank_abi_version", &abi_version)) return refuse(std::string(path) + " is not tilerank's");
    if (abi_version() != TILERANK_ABI_VERSION) {
        return refuse("interface version " + std::to_string(abi_version()) + "; this operation was compiled for " +
                      std::to_string(TILERANK_ABI_VERSION));
    }
    Library* found = new Library;  // for the life of the process, like the operations that use it
    if (!find(handle, "tilerank_last_error", &found->last_error) ||
        !find(handle, "tilerank_attention_workspace_size", &found->attention_workspace_size) ||
        !find(handle, "tilerank_attention", &found->attention)) {
        delete found;
        return refuse(dlerror());
    }
    library.store(found);
    return nullptr;
}
