/* Attention from plain C, on the CPU reference.
 *
 *   cmake -S cuda -B build/lib -G Ninja -DTILERANK_EXAMPLES=ON && ninja -C build/lib && build/lib/attention_example
 *
 * Two sequences of 3 and 1 keys share a padded batch. The padding holds NaN, which must not reach the result.
 * On a GPU: name a CUDA variant, pass device pointers, and synchronise the stream before reading the result. */
#include <math.h>
#include <stdio.h>

#include "tilerank.h"

enum { BATCH = 2, HEADS = 2, TOKENS = 3, DIM = 4 };

int main(void) {
    if (tilerank_abi_version() != TILERANK_ABI_VERSION) {
        fprintf(stderr, "this program was compiled for version %d of the library's interface, found %d\n",
                TILERANK_ABI_VERSION, (int)tilerank_abi_version());
        return 1;
    }
    printf("build %s, backend %s, variants:", tilerank_build_id(), tilerank_backend());
    for (int32_t i = 0; i < tilerank_attention_variant_count(); ++i) printf(" %s", tilerank_attention_variant(i)->name);
    printf("\n");

    /* [batch, token, head, dim] in memory, handed over as [batch, head, token, dim] by its strides. */
    float q[BATCH][TOKENS][HEADS][DIM], k[BATCH][TOKENS][HEADS][DIM], v[BATCH][TOKENS][HEADS][DIM];
    float out[BATCH][TOKENS][HEADS][DIM];
    const int32_t key_lengths[BATCH] = {3, 1};
    for (int b = 0; b < BATCH; ++b) {
        for (int t = 0; t < TOKENS; ++t) {
            for (int h = 0; h < HEADS; ++h) {
                for (int d = 0; d < DIM; ++d) {
                    q[b][t][h][d] = 0.1f * (float)(t + d);
                    k[b][t][h][d] = t < key_lengths[b] ? 0.2f * (float)(t - d) : NAN;
                    v[b][t][h][d] = t < key_lengths[b] ? (float)(t + 10 * h) : NAN;
                }
            }
        }
    }

    tilerank_attention_params params = {0};
    params.q = q;
    params.k = k;
    params.v = v;
    params.out = out;
    params.dtype = TILERANK_FP32;
    params.scale = 1.0 / sqrt((double)DIM);
    params.batch = BATCH;
    params.heads = params.kv_heads = HEADS;
    params.q_len = params.k_len = TOKENS;
    params.head_dim = DIM;
    const int64_t strides[3] = {TOKENS * HEADS * DIM, DIM, HEADS * DIM};
    for (int i = 0; i < 3; ++i) {
        params.q_strides[i] = params.k_strides[i] = params.v_strides[i] = params.out_strides[i] = strides[i];
    }
    params.key_lengths = key_lengths;
    params.key_lengths_type = TILERANK_LENGTHS_INT32;

    size_t bytes = 0;
    if (tilerank_attention_workspace_size("reference", &params, &bytes) != TILERANK_OK || bytes != 0 ||
        tilerank_attention("reference", &params, NULL, 0, NULL) != TILERANK_OK) {
        fprintf(stderr, "refused: %s\n", tilerank_last_error());
        return 1;
    }
    for (int b = 0; b < BATCH; ++b) {
        for (int t = 0; t < TOKENS; ++t) printf("out[%d][%d] = %.4f %.4f\n", b, t, out[b][t][0][0], out[b][t][1][0]);
    }

    /* What no variant can do is refused by name, before anything is read. */
    params.head_dim = 512;
    const tilerank_status status = tilerank_attention("reference", &params, NULL, 0, NULL);
    printf("head_dim 512: status %d, %s\n", (int)status, tilerank_last_error());
    return status == TILERANK_INVALID_ARGUMENT ? 0 : 1;
}
