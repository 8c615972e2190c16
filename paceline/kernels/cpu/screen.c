/* A shortlist of a head's outputs, for a guess that needs only the best few.

   Every output is first computed roughly, from a third of the dimensions (`SKETCHED`, see runner/sketch.py), with about
   the noise that it will be drawn with. The best of each slice are then computed as they are. A slice is every SLICES-th
   tile, so that frequent tokens, which lie together, are shared out. */
#include <math.h>

#include "program.h"
#include "vmath.h"

#define LOOKS 12   /* at a slice, for a line between those that are on the list and those that are not */
#define DEPTH 32.0f /* below the best of a slice: nothing there is of interest */
#define USUAL 6.0f  /* where the line mostly is, below the best */
#define AT_ONCE 4   /* outputs: their sums wait for each other less */

/* Scores of a tile [rows][LANES] instead of logits. */
void score_tile(program *p, int tile, int vocab, int first_row, int rows, const float *rough) {
    const screening *s = p->screening;
    for (int row = first_row; row < first_row + rows; row++, rough += LANES) {
        const float warmth = s->inverse_temperature[row];
        const int32_t *ids = s->ids + tile * LANES;
        const vf scores = warmth > 0.0f ? rough_noise(vf_load(rough), warmth, s->keys + 2 * row, ids) : vf_load(rough);
        vf_store(p->batch->logits + (int64_t)row * vocab + tile * LANES, scores);
    }
}

/* The scores of a slice, side by side; how many there are. */
static int copy_slice(const float *scores, int slice, int vocab, float *out) {
    int count = 0;
    for (int i = slice * LANES; i < vocab; i += SLICES * LANES, count += LANES) vf_store(out + count, vf_load(scores + i));
    return count;
}

static float best_of(const float *scores, int count) {
    vf top = vf_set1(-INFINITY);
    for (int i = 0; i < count; i += LANES) top = vf_max(top, vf_load(scores + i));
    return vf_top(top);
}

static int count_from(const float *scores, int count, float line) {
    const vf least = vf_set1(line);
    int found = 0;
    for (int i = 0; i < count; i += LANES) found += __builtin_popcount(vf_ge(vf_load(scores + i), least));
    return found;
}

/* A score that at least `few` have, and not many more. */
static float find_line(const float *scores, int count, int few) {
    const int most = few + few / 2 + 1 < SHORTLIST ? few + few / 2 + 1 : SHORTLIST;
    float high = best_of(scores, count), low = high - DEPTH, middle = high - USUAL;
    for (int i = 0; i < LOOKS; i++, middle = 0.5f * (low + high)) {
        const int found = count_from(scores, count, middle);
        if (found >= few && found <= most) return middle;
        *(found < few ? &high : &low) = middle;
    }
    return high;
}

/* The places of those from the line on, among all outputs. */
static int list_from(const float *scores, int count, float line, int slice, int32_t *places) {
    int found = 0;
    for (int i = 0; i < count; i += LANES)
        for (unsigned left = vf_ge(vf_load(scores + i), vf_set1(line)); left && found < SHORTLIST; left &= left - 1)
            places[found++] = i * SLICES + slice * LANES + __builtin_ctz(left);
    return found;
}

/* Outputs as they are, of rows that lie apart: all are fetched before the first is used, and AT_ONCE computed. */
static void compute(const matrix *m, const float *x, shortlist *list) {
    const int8_t *weights = (const int8_t *)m->data, *w[AT_ONCE];
    for (int i = 0; i < list->count; i++)
        for (int j = 0; j < m->inputs; j += 64) prefetch(weights + list->places[i] * m->stride + j);
    for (int i = 0; i < list->count; i += AT_ONCE) {
        vf sums[AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++) {
            w[r] = weights + list->places[i + r < list->count ? i + r : i] * m->stride;
            sums[r] = vf_set1(0.0f);
        }
        for (int j = 0; j < m->inputs; j += LANES)
            for (int r = 0; r < AT_ONCE; r++) sums[r] = vf_fma(vf_load_bytes(w[r] + j), vf_load(x + j), sums[r]);
        for (int r = 0; r < AT_ONCE && i + r < list->count; r++)
            list->logits[i + r] = vf_sum(sums[r]) * m->bias[list->places[i + r]];
    }
}

void run_refine(member *self, program *p, const operation *o) {
    const matrix *m = o->part;
    float *x = p->scratch[self->index].row, *scores = p->scratch[self->index].slice;
    work_begin(self, p->batch->outs * SLICES);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int row = unit / SLICES, slice = unit % SLICES;
        const int count = copy_slice(p->batch->logits + (int64_t)row * m->outputs, slice, m->outputs, scores);
        shortlist *list = &p->shortlists[unit];
        list->count = list_from(scores, count, find_line(scores, count, o->few), slice, list->places);
        rms_norm(x, row_of(p, RESIDUAL, p->batch->logit_rows[row]), o->norm, m->inputs, o->epsilon);
        compute(m, x, list);
    }
}
