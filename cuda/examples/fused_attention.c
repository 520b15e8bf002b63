/* The attention block of an encoder layer from plain C, on the CPU reference.
 *
 *   cmake -S cuda -B build/lib -G Ninja -DTILERANK_EXAMPLES=ON && ninja -C build/lib
 *   build/lib/fused_attention_example
 *
 * Two sequences of 3 and 1 tokens share a padded batch. The weights of values and output are the identity, so that each
 * row is a mean of the normalised tokens that it sees; in the second sequence that is the first token alone.
 * On a GPU: name a CUDA variant, pass device pointers, and synchronise the stream before reading the result. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilerank.h"

enum { BATCH = 2, TOKENS = 3, HEADS = 2, DIM = 2, WIDTH = HEADS * DIM };

int main(void) {
    if (tilerank_abi_version() != TILERANK_ABI_VERSION) {
        fprintf(stderr, "this program was compiled for version %d of the library's interface, found %d\n",
                TILERANK_ABI_VERSION, (int)tilerank_abi_version());
        return 1;
    }
    float x[BATCH][TOKENS][WIDTH], out[BATCH][TOKENS][WIDTH];
    float projection[WIDTH][WIDTH], identity[WIDTH][WIDTH];
    const int32_t key_lengths[BATCH] = {3, 1};
    for (int b = 0; b < BATCH; ++b) {
        for (int t = 0; t < TOKENS; ++t) {
            for (int c = 0; c < WIDTH; ++c) x[b][t][c] = (float)((c + 1) * (t == 1 ? -1 : 1)) + 100.0f * (float)b;
        }
    }
    for (int row = 0; row < WIDTH; ++row) {
        for (int column = 0; column < WIDTH; ++column) {
            projection[row][column] = 0.25f * (float)(row - column);
            identity[row][column] = row == column ? 1.0f : 0.0f;
        }
    }

    tilerank_fused_attention_params params;
    memset(&params, 0, sizeof(params));
    params.x = x;
    params.wq = params.wk = projection;
    params.wv = params.wo = identity;
    params.out = out;
    params.key_lengths = key_lengths;
    params.key_lengths_type = TILERANK_LENGTHS_INT32;
    params.dtype = TILERANK_FP32;
    params.pre_ln = 1;
    params.weight_layout = TILERANK_WEIGHTS_OUT_IN;
    params.epsilon = 1e-5;
    params.scale = 1.0 / sqrt((double)DIM);
    params.batch = BATCH;
    params.tokens = TOKENS;
    params.width = WIDTH;
    params.num_heads = HEADS;
    params.head_dim = DIM;
    params.x_strides[0] = params.out_strides[0] = TOKENS * WIDTH;
    params.x_strides[1] = params.out_strides[1] = WIDTH;
    params.wq_stride = params.wk_stride = params.wv_stride = params.wo_stride = WIDTH;

    /* The caller brings the workspace, aligned to 256 bytes; the reference asks for none. */
    size_t bytes = 0;
    if (tilerank_fused_attention_workspace_size("reference", &params, &bytes) != TILERANK_OK) {
        fprintf(stderr, "refused: %s\n", tilerank_last_error());
        return 1;
    }
    void* workspace = bytes == 0 ? NULL : aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (tilerank_fused_attention("reference", &params, workspace, bytes, NULL) != TILERANK_OK) {
        fprintf(stderr, "refused: %s\n", tilerank_last_error());
        return 1;
    }
    free(workspace);
    for (int b = 0; b < BATCH; ++b) {
        for (int t = 0; t < TOKENS; ++t) {
            printf("out[%d][%d] =", b, t);
            for (int c = 0; c < WIDTH; ++c) printf(" %.4f", out[b][t][c]);
            printf("\n");
        }
    }

    params.num_heads = 0;
    const tilerank_status status = tilerank_fused_attention("reference", &params, NULL, 0, NULL);
    printf("num_heads 0: status %d, %s\n", (int)status, tilerank_last_error());
    return status == TILERANK_INVALID_ARGUMENT ? 0 : 1;
}
