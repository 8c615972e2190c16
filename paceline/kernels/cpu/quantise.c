/* Pack rows of weights as a file stores them into tiles, on all threads: read, quantise where the format asks for it,
   pack. Each row passes through the first-level cache once, and no matrix exists in memory but the packed one.

   The integers, scales and minimums are those of kernels/quant.py and models/gguf_blocks.py, bit by bit. */
#include <math.h>
#include <stdlib.h>

#include "pack.h"
#include "program.h"
#include "stored.h"

#define ROWS_PER_UNIT TILE
static const float SHRINKS[] = {1.0f, 0.95f, 0.9f, 0.85f}; /* kernels/quant.py has the reason */
#define TRIES (int)(sizeof SHRINKS / sizeof *SHRINKS)

/* Memory of one row on its way into a tile. */
typedef struct {
    float *x;                  /* [inputs] */
    float *scale, *minimum;    /* [groups] */
    uint8_t *q;                /* [inputs] */
    uint16_t *halves;          /* [groups] scales, [groups] minimums */
} row_memory;

typedef struct {
    const stored_rows *rows;
    uint8_t *tiles;
    int64_t stride;
    int format;
    int inputs; /* of the packed matrix */
    atomic_int status;
} packing;

/* Round to the nearest integer, ties to even. Exact below 2^22; larger numbers stay large, and are clamped anyway. */
INLINE float nearest(float x) { return x + 12582912.0f - 12582912.0f; }

INLINE float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* Return the largest magnitude. Magnitudes are compared as integers, whose order is the same, NaN above all. */
static float top_of(const float *x, int count) {
    uint32_t top = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float value;
    memcpy(&value, &top, 4);
    return value;
}

/* Quantise `count` numbers to 8 bits around 128. */
static void in_8_bits(const float *x, int count, float scale, uint8_t *q) {
    const float step = scale > 0.0f ? scale : 1.0f;
    for (int i = 0; i < count; i++) q[i] = (uint8_t)(int)(clamped(nearest(x[i] / step), -127.0f, 127.0f) + 128.0f);
}

/* Sum up 32 squares, as torch does: in eight columns, then from left to right. */
INLINE float sum_squares(const float *error) {
    float column[8], sum = 0.0f;
    for (int i = 0; i < 8; i++) {
        column[i] = error[i] * error[i] + error[8 + i] * error[8 + i];
        column[i] += error[16 + i] * error[16 + i];
        column[i] += error[24 + i] * error[24 + i];
    }
    for (int i = 0; i < 8; i++) sum += column[i];
    return sum;
}

/* Quantise a group to 4 bits in a range around `middle`: q as floats; returns the squared error. */
INLINE float in_16_steps(const float *x, float middle, float reach, float *q, float *scale, float *minimum) {
    float error[GROUP];
    *minimum = half_bits_value(half_bits(middle - reach));
    *scale = half_bits_value(half_bits(reach * 2.0f / 15.0f));
    const float step = *scale > 0.0f ? *scale : 1.0f;
    for (int i = 0; i < GROUP; i++) {
        q[i] = clamped(nearest((x[i] - *minimum) / step), 0.0f, 15.0f);
        error[i] = q[i] * *scale + *minimum - x[i];
    }
    return sum_squares(error);
}

/* Quantise a group to 4 bits, with the shrunken range of the smallest squared error. */
static void in_4_bits(const float *x, uint8_t *q, float *scale, float *minimum) {
    float low = x[0], high = x[0], least = INFINITY, best[GROUP] = {0}, tried[GROUP];
    int finite = 1;
    for (int i = 0; i < GROUP; i++) {
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
        finite &= isfinite(x[i]);
    }
    const float middle = (low + high) / 2.0f, reach = (high - low) / 2.0f;
    *scale = *minimum = finite ? 0.0f : NAN;
    for (int t = 0; t < TRIES; t++) {
        float s, m;
        const float error = in_16_steps(x, middle, reach * SHRINKS[t], tried, &s, &m);
        if (t && !(error < least)) continue;
        if (error < least) least = error;
        if (finite) *scale = s, *minimum = m;
        memcpy(best, tried, sizeof best);
    }
    for (int i = 0; i < GROUP; i++) q[i] = (uint8_t)(int)best[i];
}

/* Quantise a row of floats: all of it, so that a part of a row has the bits that it has in the whole. */
static void quantise_stored(const packing *p, row_memory *row) {
    const int width = p->rows->width;
    if (p->format == CHANNEL8) {
        *row->scale = top_of(row->x, width) / 127.0f;
        in_8_bits(row->x, width, *row->scale, row->q);
        return;
    }
    for (int g = 0; g < width / GROUP; g++) {
        const float *x = row->x + g * GROUP;
        if (p->format == GROUP4) {
            in_4_bits(x, row->q + g * GROUP, row->scale + g, row->minimum + g);
            continue;
        }
        row->scale[g] = half_bits_value(half_bits(top_of(x, GROUP) / 127.0f));
        in_8_bits(x, GROUP, row->scale[g], row->q + g * GROUP);
    }
}

/* Convert the constants to the types that are packed. False: one of them is not finite. */
static int round_constants(const packing *p, row_memory *row) {
    if (p->format == CHANNEL8) return isfinite(*row->scale);
    const int groups = p->rows->width / GROUP;
    int finite = 1;
    for (int g = 0; g < groups; g++) {
        row->halves[g] = half_bits(row->scale[g]);
        finite &= (row->halves[g] & 0x7c00) != 0x7c00;
        if (p->format != GROUP4) continue;
        row->halves[groups + g] = half_bits(row->minimum[g]);
        finite &= (row->halves[groups + g] & 0x7c00) != 0x7c00;
    }
    return finite;
}

static int pack_row(const packing *p, row_memory *row, int i) {
    const stored_rows *from = p->rows;
    const uint8_t *stored = from->data + i * from->row_bytes;
    if (from->keep && stored_in_groups(from->kind)) {
        stored_groups(from->kind, stored, from->width, row->q, row->scale, row->minimum);
    } else {
        stored_floats(from->kind, stored, from->width, row->x);
        quantise_stored(p, row);
    }
    if (!round_constants(p, row)) return NOT_FINITE;
    const int output = from->places ? from->places[i] : from->first + i;
    const uint16_t *halves = row->halves + from->left / GROUP;
    pack_channel(p->tiles + output / TILE * p->stride, p->format, output % TILE, p->inputs, row->q + from->left,
                 p->format == CHANNEL8 ? (const void *)row->scale : halves, halves + from->width / GROUP);
    return FINE;
}

static void pack_all(member *self, void *argument) {
    packing *p = argument;
    const size_t inputs = (size_t)p->rows->width, groups = inputs / GROUP + 1;
    float *memory = malloc(sizeof(float) * (inputs + 2 * groups) + 2 * groups * sizeof(uint16_t) + inputs);
    row_memory row = {memory, memory + inputs, memory + inputs + groups, NULL, NULL};
    row.halves = (uint16_t *)(memory + inputs + 2 * groups);
    row.q = (uint8_t *)(row.halves + 2 * groups);
    work_begin(self, (p->rows->count + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT);
    for (int unit; (unit = work_next(self)) >= 0;)
        for (int i = unit * ROWS_PER_UNIT; i < p->rows->count && i < (unit + 1) * ROWS_PER_UNIT; i++) {
            const int status = memory ? pack_row(p, &row, i) : OUT_OF_MEMORY;
            if (status != FINE) atomic_store(&p->status, status);
        }
    work_end(self);
    free(memory);
}

EXPORT int paceline_pack_stored(pool *pool, uint8_t *tiles, int64_t stride, int format, int inputs,
                                const stored_rows *rows) {
    packing p = {.rows = rows, .tiles = tiles, .stride = stride, .format = format, .inputs = inputs};
    atomic_init(&p.status, FINE);
    pool_run(pool, pack_all, &p);
    return atomic_load(&p.status);
}
