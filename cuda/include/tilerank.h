/* tilerank: attention and the other parts of an encoder, as a plain C interface.
 *
 * The library knows pointers, sizes, strides, a workspace and a stream; it knows no framework.
 *
 * What every function keeps to:
 *   - It allocates nothing, waits for nothing, reads no environment variable, and never runs another
 *     variant than the one named.
 *   - It returns a status. On anything but TILERANK_OK nothing was launched or written, and
 *     tilerank_last_error() names the field, its value and the values allowed.
 *   - It may be called from several threads at once.
 *
 * What attention means (cuda/attention/reference.cc is the executable definition):
 *   out[b,h,i,:] = sum over visible j of softmax_j(scale * <q[b,h,i,:], k[b,g,j,:]> + mask[b,h,i,j]) * v[b,g,j,:]
 *   with g = h / (heads / kv_heads). Key j is visible to query i when all of these hold:
 *     - j < the key length of the sequence;
 *     - without `causal`, or j <= i (both counted from the start of their own sequence);
 *     - the mask there is true (boolean) or above minus infinity (additive).
 *   Invisible keys and values never reach the result, whatever their memory holds. A query that sees
 *   no key gives a row of zeros.
 */
#ifndef TILERANK_H
#define TILERANK_H

#include <stddef.h>
#include <stdint.h>

#define TILERANK_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a function below changes in a way that old callers would notice. */
#define TILERANK_ABI_VERSION 1

/* The largest head dimension that any variant serves. */
#define TILERANK_MAX_HEAD_DIM 256

/* What a call returns. */
typedef int32_t tilerank_status;
enum {
    TILERANK_OK = 0,
    TILERANK_INVALID_ARGUMENT = 1, /* a size, stride, pointer or enumerator no variant could accept */
    TILERANK_UNKNOWN_VARIANT = 2,  /* no variant of that name is in this library */
    TILERANK_UNSUPPORTED = 3,      /* valid, but the named variant does not serve it; another one may */
    TILERANK_WORKSPACE = 4,        /* the workspace is missing or smaller than asked for */
    TILERANK_LAUNCH_FAILED = 5     /* the device refused the launch; the message has its reason */
};

/* Element type of q, k, v and out. Sums are kept in fp32 (double in the reference). */
enum { TILERANK_FP32 = 0, TILERANK_FP16 = 1, TILERANK_BF16 = 2 };

/* Element type of key_lengths. */
enum { TILERANK_LENGTHS_NONE = 0, TILERANK_LENGTHS_INT32 = 1, TILERANK_LENGTHS_INT64 = 2 };

/* Element type of the mask. BOOL: one byte each, non-zero = may be seen. The others are added to the
 * scaled scores; minus infinity hides a key. */
enum {
    TILERANK_MASK_NONE = 0,
    TILERANK_MASK_BOOL = 1,
    TILERANK_MASK_FP32 = 2,
    TILERANK_MASK_FP16 = 3,
    TILERANK_MASK_BF16 = 4
};

/* How the weights of the attention block lie in memory. OUT_IN: row n holds the factors of output n, as PyTorch's
 * nn.Linear keeps them. IN_OUT: row k holds the factors of input k, as Keras's Dense keeps them. */
enum { TILERANK_WEIGHTS_OUT_IN = 0, TILERANK_WEIGHTS_IN_OUT = 1 };

/* Where a variant reads and writes: every pointer of a call lies there. */
enum { TILERANK_DEVICE_CPU = 0, TILERANK_DEVICE_CUDA = 1 };

/* Bits of tilerank_variant.layouts. */
enum { TILERANK_LAYOUT_PADDED = 1, TILERANK_LAYOUT_PACKED = 2 };

/* Bits of tilerank_variant.masks: the restrictions that a variant can apply. */
enum {
    TILERANK_SERVES_KEY_LENGTHS = 1,
    TILERANK_SERVES_CAUSAL = 2,
    TILERANK_SERVES_BOOLEAN = 4,
    TILERANK_SERVES_ADDITIVE = 8
};

/* What one row of cuda/registry.yaml says, for the rows this library holds. */
typedef struct tilerank_variant {
    const char* name;       /* the row's key, and the name that calls use */
    const char* file;       /* its source below cuda/ */
    int32_t device;         /* TILERANK_DEVICE_... ; CUDA also in the host build, whose pointers are CPU memory */
    int32_t min_sm;         /* lowest compute capability times ten, e.g. 75; 0 on the CPU */
    uint32_t dtypes;        /* bit (1 << TILERANK_FP32), ... */
    uint32_t layouts;       /* TILERANK_LAYOUT_... bits */
    uint32_t masks;         /* TILERANK_SERVES_... bits */
    int32_t head_dim_count; /* entries of head_dims; 0: every head_dim from 1 to TILERANK_MAX_HEAD_DIM */
    const int32_t* head_dims;
    int64_t max_k_len; /* longest key sequence served; 0: no limit */
} tilerank_variant;

/* Attention over a padded batch.
 * Shapes: q and out [batch, heads, q_len, head_dim]; k and v [batch, kv_heads, k_len, head_dim].
 * The last dimension is contiguous; the others are reached by strides counted in elements, in the order
 * batch, head, token. Memory laid out [batch, token, head, head_dim] is therefore served in place.
 * Fill the struct with zeros first, then set what is needed. */
typedef struct tilerank_attention_params {
    const void* q; /* may be unaligned to more than its element size, like k, v and out */
    const void* k;
    const void* v;
    void* out;            /* must not overlap an input; every row is written */
    int32_t dtype;        /* TILERANK_FP32, FP16 or BF16: of q, k, v and out */
    int32_t causal;       /* 0, or 1: query i sees keys 0..i only */
    double scale;         /* factor on the scores, usually 1/sqrt(head_dim); finite in fp32 */
    int64_t batch;        /* >= 0; 0: success, nothing is done */
    int64_t heads;        /* >= 1, a multiple of kv_heads */
    int64_t kv_heads;     /* >= 1 */
    int64_t q_len;        /* >= 0; 0: success, nothing is done */
    int64_t k_len;        /* >= 0; 0: out is zeros */
    int64_t head_dim;     /* 1 to TILERANK_MAX_HEAD_DIM */
    int64_t q_strides[3]; /* elements between batches, heads, tokens; 0 repeats (broadcast) */
    int64_t k_strides[3];
    int64_t v_strides[3];
    int64_t out_strides[3];   /* at least head_dim, in either direction, wherever there is more than one row */
    const void* key_lengths;  /* [batch], contiguous: key j of batch b counts if j < key_lengths[b]; values are
                                 clamped to 0..k_len. NULL: every key counts */
    const void* mask;         /* [batch, heads, q_len, k_len] through mask_strides; NULL: none */
    int32_t key_lengths_type; /* TILERANK_LENGTHS_INT32 or INT64; NONE exactly when key_lengths is NULL */
    int32_t mask_type;        /* TILERANK_MASK_...; NONE exactly when mask is NULL */
    int64_t mask_strides[4];  /* elements between batches, heads, queries, keys; 0 repeats (broadcast) */
} tilerank_attention_params;

/* Attention over sequences packed one after another, without padding.
 * Shapes: q and out [total_q, heads, head_dim]; k and v [total_k, kv_heads, head_dim]. Sequence s has the
 * queries cu_seqlens_q[s] .. cu_seqlens_q[s+1]-1 and the keys cu_seqlens_k[s] .. cu_seqlens_k[s+1]-1.
 * Values in cu_seqlens are clamped to what was announced (0..total, not falling, at most max_seqlen a
 * sequence), so that wrong ones never cause an access out of bounds; rows of out that no sequence covers
 * are left as they were. */
typedef struct tilerank_attention_varlen_params {
    const void* q;
    const void* k;
    const void* v;
    void* out;            /* must not overlap an input */
    int32_t dtype;        /* as in tilerank_attention_params */
    int32_t causal;       /* as there; i and j count from the start of the sequence */
    double scale;         /* as there */
    int64_t batch;        /* number of sequences, >= 0 */
    int64_t heads;        /* >= 1, a multiple of kv_heads */
    int64_t kv_heads;     /* >= 1 */
    int64_t head_dim;     /* 1 to TILERANK_MAX_HEAD_DIM */
    int64_t total_q;      /* rows of q and out, >= 0 */
    int64_t total_k;      /* rows of k and v, >= 0 */
    int64_t max_seqlen_q; /* at least the longest query sequence: it sizes the launch */
    int64_t max_seqlen_k; /* at least the longest key sequence */
    int64_t q_strides[2]; /* elements between heads, tokens */
    int64_t k_strides[2];
    int64_t v_strides[2];
    int64_t out_strides[2];      /* at least head_dim, in either direction, wherever there is more than one row */
    const int32_t* cu_seqlens_q; /* [batch + 1], contiguous, on the variant's device */
    const int32_t* cu_seqlens_k; /* [batch + 1] */
    int32_t overlap;             /* 0, or 1: cu_seqlens_q and cu_seqlens_k were complete before the work that stands
                                    before this call on the stream, so a variant may begin to read them while that work
                                    ends */
} tilerank_attention_varlen_params;

/* Layer normalisation of rows, with what stands before it in a post-LN encoder (cuda/layernorm/reference.cc):
 *   s = x + bias + residual, each added where it is given;
 *   out = (s - mean(s)) / sqrt(var(s) + epsilon) * gamma + beta, where var divides by width.
 * s is not rounded before it is normalised. Fill the struct with zeros first, then set what is needed. */
typedef struct tilerank_layernorm_params {
    const void* x;        /* [rows, width] */
    const void* residual; /* [rows, width]; NULL: none */
    const void* bias;     /* [width]; NULL: none */
    const void* gamma;    /* [width]; NULL: ones */
    const void* beta;     /* [width]; NULL: zeros */
    void* out;            /* [rows, width]; may be x or residual itself where their strides are equal */
    void* sum;            /* [rows, width]: s, rounded; may be x or residual, not out. NULL: not stored */
    int32_t dtype;        /* TILERANK_FP32, FP16 or BF16: of every tensor here */
    double epsilon;       /* finite, >= 0 */
    int64_t rows;         /* >= 0; 0: success, nothing is done */
    int64_t width;        /* >= 1 */
    int64_t x_stride;     /* elements between rows; the elements of a row are contiguous */
    int64_t residual_stride;
    int64_t out_stride; /* at least width, in either direction, where there is more than one row; so with sum_stride */
    int64_t sum_stride;
} tilerank_layernorm_params;

/* The attention block of an encoder layer: normalisation, projections, attention, output projection
 * (cuda/block/reference.cc). With y = layernorm(x) where pre_ln, else y = x:
 *   q = y wq^T + bq, k = y wk^T + bk, v = y wv^T + bv   cut into num_heads heads of head_dim columns each;
 *   a = attention(q, k, v)                              as above, with key_lengths and causal;
 *   o = a wo^T + bo (+ residual)                        out = o where pre_ln, else layernorm(o).
 * No matrix of tokens x tokens is ever in memory; q, k, v and a are, in the workspace, rounded to dtype.
 * Rows of padding are computed like others: what they may see are the keys that count.
 * Fill the struct with zeros first, then set what is needed. */
typedef struct tilerank_fused_attention_params {
    const void* x;  /* [batch, tokens, width] through x_strides */
    const void* wq; /* [num_heads * head_dim, width], or transposed: weight_layout; so with wk and wv */
    const void* wk;
    const void* wv;
    const void* wo; /* [width, num_heads * head_dim], or transposed */
    const void* bq; /* [num_heads * head_dim]; NULL: none; so with bk and bv */
    const void* bk;
    const void* bv;
    const void* bo;          /* [width]; NULL: none */
    const void* gamma;       /* [width]; NULL: ones */
    const void* beta;        /* [width]; NULL: zeros */
    const void* residual;    /* [batch, tokens, width], added to the output projection; NULL: none; may be x */
    const void* key_lengths; /* [batch], as in tilerank_attention_params; NULL: every key counts */
    void* out;               /* [batch, tokens, width]; must not overlap an input */
    int32_t dtype;           /* TILERANK_FP32, FP16 or BF16: of every tensor here but key_lengths */
    int32_t key_lengths_type; /* TILERANK_LENGTHS_INT32 or INT64; NONE exactly when key_lengths is NULL */
    int32_t causal;           /* 0, or 1: token i sees tokens 0..i only */
    int32_t pre_ln;           /* 1: x is normalised; 0: the result is */
    int32_t weight_layout;    /* TILERANK_WEIGHTS_OUT_IN or IN_OUT, of all four */
    double epsilon;           /* of the normalisation; finite, >= 0 */
    double scale;             /* factor on the scores, usually 1/sqrt(head_dim); finite */
    int64_t batch;            /* >= 0; 0: success, nothing is done; so with tokens */
    int64_t tokens;
    int64_t width;              /* >= 1 */
    int64_t num_heads;          /* >= 1 */
    int64_t head_dim;           /* 1 to TILERANK_MAX_HEAD_DIM; num_heads * head_dim need not be width */
    int64_t x_strides[2];       /* elements between sequences, tokens; the elements of a row are contiguous */
    int64_t residual_strides[2];
    int64_t out_strides[2]; /* at least width, in either direction, wherever there is more than one */
    int64_t wq_stride;      /* elements between rows as they lie in memory; 0 where there is more than one is refused */
    int64_t wk_stride;
    int64_t wv_stride;
    int64_t wo_stride;
} tilerank_fused_attention_params;

/* What a linear layer applies to its sums. GELU: x times the share of a normal distribution below x, by the error
 * function. TANH: the hyperbolic tangent. */
enum { TILERANK_ACTIVATION_NONE = 0, TILERANK_ACTIVATION_GELU = 1, TILERANK_ACTIVATION_TANH = 2 };

/* How the weights of a linear layer lie.
 * PLAIN: row n has the factors of output n.
 * INTERLEAVED: within each 32 rows, row 8 j + 2 t + e (j and t 0..3, e 0..1) has the factors of output 8 t + 2 j + e, so
 *   that a thread of a matrix product ends with eight neighbouring outputs. Within each 32 factors of a row, place
 *   16 s + 8 h + 2 t + e (s and h 0..1) has factor 8 t + 4 s + 2 h + e, so that it reads eight neighbouring inputs.
 * SPLIT: of an fp32 layer, in fp16. The order of rows is the same; each has the high terms of its factors times
 *   2^weight_exponent, then the low terms (what rounding to fp16 took away): 2 depth in all. Within each 16, place
 *   8 h + 2 t + e has factor 4 t + 2 h + e. */
enum { TILERANK_FORMAT_PLAIN = 0, TILERANK_FORMAT_INTERLEAVED = 1, TILERANK_FORMAT_SPLIT = 2 };

/* A linear layer of an encoder and what follows it (cuda/linear/reference.cc):
 *   s = x weight^T + bias                                    where gamma is NULL: out = activation(s);
 *   s = x weight^T + bias + residual                         else out = layernorm(s), as tilerank_layernorm_params has it.
 * Sums are not rounded before the last step. Fill the struct with zeros first, then set what is needed. */
typedef struct tilerank_linear_params {
    const void* x;        /* [rows, depth] */
    const void* weight;   /* [columns, depth], as weight_format says */
    const void* bias;     /* [columns] in the order of out; NULL: none */
    const void* residual; /* [rows, columns]; NULL: none; only where gamma is given */
    const void* gamma;    /* [columns]; NULL: no normalisation */
    const void* beta;     /* [columns]; given where gamma is */
    void* out;            /* [rows, columns]; may be residual itself where their strides are equal, must not overlap
                             another input */
    int32_t dtype;        /* TILERANK_FP32, FP16 or BF16: of every tensor here */
    int32_t activation;   /* TILERANK_ACTIVATION_...; NONE where gamma is given */
    int32_t weight_format;   /* TILERANK_FORMAT_... */
    int32_t weight_exponent; /* -126 to 126; of split weights, else 0 */
    int32_t x_exponent;      /* -126 to 126; with split weights x is multiplied by 2^x_exponent before it is split into
                                fp16 terms: nothing in it may then exceed 65,504, else sums are not finite; else 0 */
    int32_t overlap;         /* 0, or 1: weight, bias, gamma and beta were complete before the work that stands before
                                this call on the stream, so a variant may begin to read them while that work ends */
    double epsilon;       /* of the normalisation; finite, >= 0 */
    int64_t rows;         /* >= 0; 0: success, nothing is done */
    int64_t columns;      /* >= 1; a multiple of 32 unless weights are plain */
    int64_t depth;        /* >= 1; a multiple of 32 where weights are interleaved, of 16 where split */
    int64_t x_stride;     /* elements between rows; the elements of a row are contiguous */
    int64_t weight_stride;
    int64_t residual_stride;
    int64_t out_stride; /* at least columns where there is more than one row */
} tilerank_linear_params;

/* The embeddings of tokens, normalised (cuda/embedding/reference.cc):
 *   out[i] = layernorm(words[ids[i]] + positions[places[i]] + types[type_ids[i]]), as tilerank_layernorm_params has it.
 * Indices are clamped to their table, so that wrong ones never cause an access out of bounds. Fill the struct with zeros
 * first, then set what is needed. */
typedef struct tilerank_embedding_params {
    const int32_t* ids;      /* [rows] */
    const int32_t* places;   /* [rows] */
    const int32_t* type_ids; /* [rows]; NULL exactly when types is */
    const void* words;       /* [word_count, width], contiguous, like the tables below */
    const void* positions;   /* [position_count, width] */
    const void* types;       /* [type_count, width]; NULL: none */
    const void* gamma;       /* [width] */
    const void* beta;        /* [width] */
    void* out;               /* [rows, width]; must not overlap an input */
    int32_t dtype;           /* TILERANK_FP32, FP16 or BF16: of every tensor here but the indices */
    double epsilon;          /* finite, >= 0 */
    int64_t rows;            /* >= 0; 0: success, nothing is done */
    int64_t width;           /* >= 1 */
    int64_t word_count;      /* >= 1 */
    int64_t position_count;  /* >= 1 */
    int64_t type_count;      /* >= 1 where types is given */
    int64_t out_stride;      /* at least width where there is more than one row */
} tilerank_embedding_params;

/* What stands between two attentions of an encoder, rows by rows: with LN(y) = layer_norm(y) gamma + beta,
 *     x1 = LN1(found out_weight^T + out_bias + x)
 *     out = LN2(gelu(x1 up_weight^T + up_bias) down_weight^T + down_bias + x1)
 *     next = out next_weight^T + next_bias
 * in weights as torch.nn.Linear keeps them, [outputs, inputs]. x1 is rounded to the dtype, and so is what gelu gives. */
typedef struct tilerank_layer_params {
    const void* found;       /* [rows, width]: what attention gave */
    const void* x;           /* [rows, width]: what the layer began with */
    void* out;               /* [rows, width]; may be x itself where their strides are equal */
    void* next;              /* [rows, next_columns]; NULL: not wanted */
    const void* out_weight;  /* [width, width] */
    const void* up_weight;   /* [wide, width] */
    const void* down_weight; /* [width, wide] */
    const void* next_weight; /* [next_columns, width] */
    const void* out_bias;    /* vectors of as many elements as outputs */
    const void* up_bias;
    const void* down_bias;
    const void* next_bias;
    const void* gammas[2];   /* [width] each: of x1, of out */
    const void* betas[2];
    int32_t dtype;           /* TILERANK_FP32, ... */
    int32_t overlap;         /* as in tilerank_linear_params */
    double epsilon;
    int64_t rows;
    int64_t width;
    int64_t wide;
    int64_t next_columns;    /* 0 where next is NULL */
    int64_t found_stride;    /* elements from a row to the next; weights have none between their rows */
    int64_t x_stride;
    int64_t out_stride;
    int64_t next_stride;
} tilerank_layer_params;

/* Attention from one token of each packed sequence, as a classifier's needs it (cuda/token_attention/reference.cc):
 *   out[s,h,:] = sum over keys j of sequence s of softmax_j(scale * <q[s,h,:], k[j,h,:]>) * v[j,h,:]
 * Sequence s has the keys cu_seqlens_k[s] .. cu_seqlens_k[s+1]-1, clamped as in tilerank_attention_varlen_params; without
 * any its row is zeros. The last dimension is contiguous. Fill the struct with zeros first, then set what is needed. */
typedef struct tilerank_token_attention_params {
    const void* q; /* [batch, heads, head_dim] */
    const void* k; /* [total_k, heads, head_dim] */
    const void* v;
    void* out;                   /* [batch, heads, head_dim]; must not overlap an input */
    const int32_t* cu_seqlens_k; /* [batch + 1], contiguous, on the variant's device */
    int32_t dtype;               /* TILERANK_FP32, FP16 or BF16: of q, k, v and out */
    int32_t overlap;             /* 0, or 1: cu_seqlens_k was complete before the work that stands before this call on the
                                    stream, so a variant may begin while that work ends */
    double scale;                /* factor on the scores, usually 1/sqrt(head_dim); finite */
    int64_t batch;               /* number of sequences, >= 0 */
    int64_t heads;               /* >= 1 */
    int64_t head_dim;            /* 1 to TILERANK_MAX_HEAD_DIM */
    int64_t total_k;             /* rows of k and v, >= 0 */
    int64_t q_strides[2];        /* elements between heads, rows */
    int64_t k_strides[2];
    int64_t v_strides[2];
    int64_t out_strides[2];
} tilerank_token_attention_params;

/* TILERANK_ABI_VERSION of the library. A caller whose header says otherwise must not call on. */
TILERANK_API int32_t tilerank_abi_version(void);

/* Digest of the sources, compilers and flags the library was built from. */
TILERANK_API const char* tilerank_build_id(void);

/* "cuda"; "host" (the CUDA sources run on the CPU, for tests); or "cpu" (the reference only). */
TILERANK_API const char* tilerank_backend(void);

/* The architectures that device code was compiled for, e.g. "75-real 90a-real 90-virtual"; "" without any. */
TILERANK_API const char* tilerank_archs(void);

/* Why the last refused call of this thread was refused; "" before any. Valid until the thread's next call. */
TILERANK_API const char* tilerank_last_error(void);

/* The attention variants in this library, in the order of the registry. */
TILERANK_API int32_t tilerank_attention_variant_count(void);

/* One of them; NULL when index is not in 0..count-1. The memory is the library's own and lasts as long. */
TILERANK_API const tilerank_variant* tilerank_attention_variant(int32_t index);

/* The same for the variants of layer normalisation and of the attention block. */
TILERANK_API int32_t tilerank_layernorm_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_layernorm_variant(int32_t index);
TILERANK_API int32_t tilerank_block_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_block_variant(int32_t index);

/* And for those of the linear layer, of the embeddings, of attention from one token a sequence, and of the layer behind
 * attention. */
TILERANK_API int32_t tilerank_linear_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_linear_variant(int32_t index);
TILERANK_API int32_t tilerank_embedding_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_embedding_variant(int32_t index);
TILERANK_API int32_t tilerank_token_attention_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_token_attention_variant(int32_t index);
TILERANK_API int32_t tilerank_layer_variant_count(void);
TILERANK_API const tilerank_variant* tilerank_layer_variant(int32_t index);

/* Bytes of workspace that the call below needs for these parameters (often 0).
 * variant: a name from the list above.
 * bytes:   where the answer goes; must not be NULL. Pointers in params are not followed. */
TILERANK_API tilerank_status tilerank_attention_workspace_size(const char* variant,
                                                               const tilerank_attention_params* params, size_t* bytes);
TILERANK_API tilerank_status tilerank_attention_varlen_workspace_size(const char* variant,
                                                                      const tilerank_attention_varlen_params* params,
                                                                      size_t* bytes);

/* Queue the operation on a stream (a CPU variant has finished it on return and ignores the stream).
 * variant:         a name from the list above.
 * params:          read before the call returns; its pointers must stay valid until the work is done.
 * workspace:       memory on the variant's device, 256-byte aligned, not used by any other call at the same
 *                  time; may be NULL when no bytes are needed.
 * workspace_bytes: its size; at least what the function above says.
 * stream:          a cudaStream_t of the current device; NULL is the default stream. */
TILERANK_API tilerank_status tilerank_attention(const char* variant, const tilerank_attention_params* params,
                                                void* workspace, size_t workspace_bytes, void* stream);
TILERANK_API tilerank_status tilerank_attention_varlen(const char* variant,
                                                       const tilerank_attention_varlen_params* params, void* workspace,
                                                       size_t workspace_bytes, void* stream);

/* The same for layer normalisation: variant is one of tilerank_layernorm_variant's names. */
TILERANK_API tilerank_status tilerank_layernorm_workspace_size(const char* variant,
                                                               const tilerank_layernorm_params* params, size_t* bytes);
TILERANK_API tilerank_status tilerank_layernorm(const char* variant, const tilerank_layernorm_params* params,
                                                void* workspace, size_t workspace_bytes, void* stream);

/* The same for the attention block: variant is one of tilerank_block_variant's names. The workspace grows with
 * batch * tokens, never with tokens * tokens. */
TILERANK_API tilerank_status tilerank_fused_attention_workspace_size(const char* variant,
                                                                     const tilerank_fused_attention_params* params,
                                                                     size_t* bytes);
TILERANK_API tilerank_status tilerank_fused_attention(const char* variant,
                                                      const tilerank_fused_attention_params* params, void* workspace,
                                                      size_t workspace_bytes, void* stream);

/* The same for a linear layer. */
TILERANK_API tilerank_status tilerank_linear_workspace_size(const char* variant, const tilerank_linear_params* params,
                                                            size_t* bytes);
TILERANK_API tilerank_status tilerank_linear(const char* variant, const tilerank_linear_params* params, void* workspace,
                                             size_t workspace_bytes, void* stream);

/* The same for attention from one token a sequence. */
TILERANK_API tilerank_status tilerank_token_attention_workspace_size(const char* variant,
                                                                     const tilerank_token_attention_params* params,
                                                                     size_t* bytes);
TILERANK_API tilerank_status tilerank_token_attention(const char* variant,
                                                      const tilerank_token_attention_params* params, void* workspace,
                                                      size_t workspace_bytes, void* stream);

/* The same for the layer behind attention. */
TILERANK_API tilerank_status tilerank_layer_workspace_size(const char* variant, const tilerank_layer_params* params,
                                                           size_t* bytes);
TILERANK_API tilerank_status tilerank_layer(const char* variant, const tilerank_layer_params* params, void* workspace,
                                            size_t workspace_bytes, void* stream);

/* The same for embeddings. */
TILERANK_API tilerank_status tilerank_embedding_workspace_size(const char* variant,
                                                               const tilerank_embedding_params* params, size_t* bytes);
TILERANK_API tilerank_status tilerank_embedding(const char* variant, const tilerank_embedding_params* params,
                                                void* workspace, size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TILERANK_H */
