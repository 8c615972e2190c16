/* Operations on the residual stream: embed tokens, add normed branches, keep hidden states. */
#include "program.h"
#include "vmath.h"

/* residual ← embedding of the token * operation.scale */
void run_embed(member *self, program *p, const operation *o) {
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *out = row_of(p, RESIDUAL, row);
        unpack_row(&o->part[0], p->batch->tokens[row], out);
        for (int j = 0; j < p->shape.hidden; j++) out[j] *= o->scale;
    }
}

/* paired ← norm of the token's embedding │ norm of the residual. With output RESIDUAL the residual stream continues as
   its own norm. */
void run_pair(member *self, program *p, const operation *o) {
    const int hidden = p->shape.hidden;
    float *embedding = p->scratch[self->index].row;
    work_begin(self, p->batch->rows);
    for (int row; (row = work_next(self)) >= 0;) {
        float *out = row_of(p, PAIRED, row), *x = row_of(p, RESIDUAL, row);
        unpack_row(&o->part[0], p->batch->tokens[row], embedding);
        rms_norm(out, embedding, o->norm, hidden, o->epsilon);
        rms_norm(out + hidden, x, o->key_norm, hidden, o->epsilon);
        if (o->output == RESIDUAL) memcpy(x, out + hidden, sizeof(float) * (size_t)hidden);
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
        if (o->norm) rms_norm(out, x, o->norm, hidden, o->epsilon);
        else memcpy(out, x, sizeof(float) * (size_t)hidden);
    }
}
