/* Between the projections and attention: norms of queries and keys, rotary positions, and the KV store. */
#include "program.h"
#include "vmath.h"

#define BF16_MAX 0x1.fep127f /* largest finite bf16 number */
#define ROWS_PER_UNIT 16     /* rows of one head that a thread takes at once */

/* Rotate the pairs (d, d + half) by the angles of the position, and multiply by `scale`. */
static void rotate(float *x, const float *cosine, const float *sine, int half, float scale) {
    const vf factor = vf_set1(scale);
    int d = 0;
    for (; d + LANES <= half; d += LANES) {
        const vf a = vf_load(x + d), b = vf_load(x + d + half), c = vf_load(cosine + d), s = vf_load(sine + d);
        vf_store(x + d, vf_mul(vf_sub(vf_mul(a, c), vf_mul(b, s)), factor));
        vf_store(x + d + half, vf_mul(vf_add(vf_mul(b, c), vf_mul(a, s)), factor));
    }
    for (; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = (a * cosine[d] - b * sine[d]) * scale;
        x[d + half] = (b * cosine[d] + a * sine[d]) * scale;
    }
}

/* Round to bf16. The result is always finite, so that a masked value times zero is zero. */
static void to_bf16(uint16_t *out, const float *x, int n) {
    const vf top = vf_set1(BF16_MAX), bottom = vf_set1(-BF16_MAX);
    for (int d = 0; d < n; d += LANES)
        vi_store_words(out + d, vi_shr(vf_bits(vf_to_bf16(vf_min(vf_max(vf_load(x + d), bottom), top))), 16));
}

static void store_key_value(const shape *s, int layer, int slot, int head, const float *key, const float *value) {
    uint16_t numbers[HEAD_DIM_MAX];
    uint16_t *keys = key_at(s, layer, slot, head), *values = value_at(s, layer, slot, head);
    to_bf16(numbers, key, s->head_dim);
    for (int d = 0; d < s->head_dim; d += 2) memcpy(keys + d * PAGE, numbers + d, 2 * sizeof *numbers);
    to_bf16(numbers, value, s->head_dim);
    for (int d = 0; d < s->head_dim; d++) values[2 * d] = numbers[d];
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

/* Map a unit to its head. A unit is one head of ROWS_PER_UNIT rows: the keys and values that it stores are adjacent
   from row to row. Key heads come before the last query heads, so that the thread that has projected the keys begins
   with them, and other threads can take over queries. */
static int head_of(const shape *s, int unit) {
    const int before = s->heads - s->kv_heads; /* queries that come before the keys */
    return unit < before ? unit : unit < s->heads ? unit + s->kv_heads : unit - s->kv_heads;
}

static int count_units(const program *p) {
    return (p->shape.heads + p->shape.kv_heads) * ((p->batch->rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT);
}

/* projected ← normed and rotated queries and keys; the KV slots of the rows ← their keys and values */
void run_rotate(member *self, program *p, const operation *o) {
    const int heads = p->shape.heads + p->shape.kv_heads, rows = p->batch->rows; /* a row: queries │ keys │ values */
    work_begin(self, count_units(p));
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int first = unit / heads * ROWS_PER_UNIT;
        const int last = first + ROWS_PER_UNIT < rows ? first + ROWS_PER_UNIT : rows;
        for (int row = first; row < last; row++) rotate_head(p, o, row, head_of(&p->shape, unit % heads));
    }
}

/* Prefetch the slot of a row. Its key is interleaved with the other keys of its page, which is prefetched once. */
static void fetch_slot(const program *p, const operation *o, int row, int head) {
    const int dim = p->shape.head_dim, slot = p->batch->slots[row];
    const uint16_t *keys = keys_of(&p->shape, o->layer, slot / PAGE, head);
    const uint16_t *value = value_at(&p->shape, o->layer, slot, head);
    const int known = row && slot / PAGE == p->batch->slots[row - 1] / PAGE;
    for (int i = 0; i < dim * PAGE && !known; i += CACHE_LINE / 2) prefetch_l2(keys + i);
    for (int i = 0; i < 2 * dim; i += CACHE_LINE / 2) prefetch_l2(value + i);
}

void fetch_slots(const member *self, const program *p, const operation *o) {
    const int heads = p->shape.heads + p->shape.kv_heads, units = count_units(p);
    const int begin = (int)((int64_t)units * self->index / self->count);
    const int end = (int)((int64_t)units * (self->index + 1) / self->count);
    for (int unit = begin; unit < end; unit++) {
        const int head = head_of(&p->shape, unit % heads) - p->shape.heads, first = unit / heads * ROWS_PER_UNIT;
        for (int row = first; head >= 0 && row < first + ROWS_PER_UNIT && row < p->batch->rows; row++)
            fetch_slot(p, o, row, head);
    }
}
