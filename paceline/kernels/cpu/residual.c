/* Operations on the residual stream: embed tokens, norm, convolve, add normed branches, keep hidden states. */
#include "program.h"
#include "vmath.h"

/* residual ← embedding of the token * operation.scale; zeros for a token whose embedding another rank has */
void run_embed(member *self, program *p, const operation *o) {
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *out = row_of(p, RESIDUAL, row);
        const int token = p->batch->tokens[row] - o->column;
        if (token < 0 || token >= o->part[0].outputs) {
            memset(out, 0, sizeof(float) * (size_t)p->shape.hidden);
            continue;
        }
        unpack_row(&o->part[0], token, out);
        for (int j = 0; j < p->shape.hidden; j++) out[j] *= o->scale;
    }
}

/* out ← norm of x; without weights x itself */
static void norm_or_copy(float *out, const float *x, const float *weight, int k, float epsilon) {
    if (weight) rms_norm(out, x, weight, k, epsilon);
    else if (out != x) memcpy(out, x, sizeof(float) * (size_t)k);
}

/* paired ← norm of the token's embedding │ norm of the residual; without weights of a norm what it would norm. With
   output RESIDUAL the residual stream continues as its own norm. */
void run_pair(member *self, program *p, const operation *o) {
    const int hidden = p->shape.hidden;
    float *embedding = p->scratch[self->index].row;
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *out = row_of(p, PAIRED, row), *x = row_of(p, RESIDUAL, row);
        unpack_row(&o->part[0], p->batch->tokens[row], embedding);
        norm_or_copy(out, embedding, o->norm, hidden, o->epsilon);
        norm_or_copy(out + hidden, x, o->key_norm, hidden, o->epsilon);
        if (o->output == RESIDUAL) memcpy(x, out + hidden, sizeof(float) * (size_t)hidden);
    }
}

/* output ← norm of each `column` columns of the input, or the input itself; both may be the same buffer */
void run_norm(member *self, program *p, const operation *o) {
    const int width = p->stride[o->input];
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        const float *x = row_of(p, o->input, row);
        float *out = row_of(p, o->output, row);
        for (int at = 0; at < width; at += o->column)
            norm_or_copy(out + at, x + at, o->norm ? o->norm + at : NULL, o->column, o->epsilon);
    }
}

/* Convolve LANES columns from `first` on of a row: out ← Σ over taps of (kernel + delta) * the row `tap` rows before it,
   as far as its sequence, which begins at row `begin`, has such a row. */
static void convolve_row(const program *p, const operation *o, int row, int begin, int first, float *out) {
    const int hidden = p->shape.hidden, groups = hidden / o->group;
    const float *deltas = row_of(p, DELTAS, row) + o->column;
    for (int i = 0; i < LANES; i++) out[i] = 0.0f;
    for (int tap = 0; tap < o->taps && row - tap >= begin; tap++) {
        const float *x = row_of(p, o->input, row - tap) + first, *kernel = o->norm + tap * hidden + first;
        for (int i = 0; i < LANES; i++) out[i] += (kernel[i] + deltas[tap * groups + (first + i) / o->group]) * x[i];
    }
}

/* input ← its convolution over the rows of each sequence; with output RESIDUAL: residual ← residual + the convolution.
   The last rows come first, because a row reads those before it. */
void run_convolve(member *self, program *p, const operation *o) {
    const batch *b = p->batch;
    work_begin(self, b->sequences * (p->shape.hidden / LANES));
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int s = unit % b->sequences, first = unit / b->sequences * LANES;
        for (int row = b->row_starts[s + 1] - 1; row >= b->row_starts[s]; row--) {
            float sum[LANES];
            convolve_row(p, o, row, b->row_starts[s], first, sum);
            float *out = row_of(p, o->output, row) + first;
            vf_store(out, o->output == RESIDUAL ? vf_add(vf_load(out), vf_load(sum)) : vf_load(sum));
        }
    }
}

/* residual ← residual + norm of the branch: for models that also norm the output of attention and MLP */
void run_add_norm(member *self, program *p, const operation *o) {
    const int hidden = p->shape.hidden;
    float *normal = p->scratch[self->index].row;
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *x = row_of(p, RESIDUAL, row);
        rms_norm(normal, row_of(p, BRANCH, row), o->norm, hidden, o->epsilon);
        for (int j = 0; j < hidden; j += LANES) vf_store(x + j, vf_add(vf_load(x + j), vf_load(normal + j)));
    }
}

/* output[column …] ← residual, or its norm; the output is FEATURES or STATES */
void run_keep(member *self, program *p, const operation *o) {
    const int hidden = p->shape.hidden;
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        const float *x = row_of(p, RESIDUAL, row);
        float *out = row_of(p, o->output, row) + o->column;
        norm_or_copy(out, x, o->norm, hidden, o->epsilon);
    }
}
