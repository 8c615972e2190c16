/* Between the projections and attention: q/k norm, rotary positions, and storing keys and values in their slots. */
#include "program.h"
#include "vmath.h"

#define HALF_MAX 65504.0f

/* Pairs (d, d + half) turned by the angle of the position, then times `scale`. */
static void rotate(float *x, const float *cosine, const float *sine, int half, float scale) {
    for (int d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = (a * cosine[d] - b * sine[d]) * scale;
        x[d + half] = (b * cosine[d] + a * sine[d]) * scale;
    }
}

/* In fp16 and always finite, so that a masked value times zero is zero. */
static void to_half(uint16_t *out, const float *x, int n) {
    const vf top = vf_set1(HALF_MAX), bottom = vf_set1(-HALF_MAX);
    for (int d = 0; d < n; d += LANES) vf_store_half(out + d, vf_min(vf_max(vf_load(x + d), bottom), top));
}

static void store_key_value(const shape *s, int layer, int slot, int head, const float *key, const float *value) {
    uint16_t halves[512];
    uint16_t *keys = keys_of(s, layer, slot / PAGE, head) + slot % PAGE;
    to_half(halves, key, s->head_dim);
    for (int d = 0; d < s->head_dim; d++) keys[d * PAGE] = halves[d];
    to_half(values_of(s, layer, slot / PAGE, head) + slot % PAGE * s->head_dim, value, s->head_dim);
}

static void rotate_head(program *p, const operation *o, int row, int head) {
    const shape *s = &p->shape;
    const int dim = s->head_dim, is_key = head >= s->heads;
    const int64_t at = (int64_t)p->batch->positions[row] * (dim / 2);
    float *x = row_of(p, PROJECTED, row) + head * dim;
    const float *norm = is_key ? o->key_norm : o->norm;
    if (norm) rms_norm(x, x, norm, dim, o->epsilon);
    rotate(x, o->cosine + at, o->sine + at, dim / 2, is_key ? 1.0f : o->scale);
    if (is_key)
        store_key_value(s, o->layer, p->batch->slots[row], head - s->heads, x, x + s->kv_heads * dim);
}

void run_rotate(member *self, program *p, const operation *o) {
    const int heads = p->shape.heads + p->shape.kv_heads; /* of a row: queries | keys | values */
    work_begin(self, p->batch->rows * heads);
    for (int unit; (unit = work_next(self)) >= 0;) rotate_head(p, o, unit / heads, unit % heads);
}
