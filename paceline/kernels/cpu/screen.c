/* Shortlists of a head's outputs, for drafts that need only the best few (docs/adr/0013).

   Every output first gets a rough score: its product in a subspace of at most a third of the dimensions (`SKETCHED`,
   see runner/heads/sketch.py), plus an approximation of its noise. The best outputs of each slice are then computed
   exactly. A slice is every SLICES-th tile: frequent tokens have neighbouring ids, and are so spread over all
   slices. */
#include "screen.h"

#include <math.h>

#include "program.h"
#include "vmath.h"

#define CUT_STEPS 12      /* most steps of the search for a cut */
#define CUT_RANGE 32.0f   /* nats from the best score of a slice down to the lowest cut */
#define FIRST_CUT 6.0f    /* nats from the best score of a slice down to the usual cut */
#define OUTPUTS_AT_ONCE 4 /* outputs computed together; their sums are independent, so that none waits for another */

void score_tile(program *p, int tile, int vocab, int first_row, int rows, const float *rough) {
    const row_noise *noise = p->screen.noise;
    for (int row = first_row; row < first_row + rows; row++, rough += TILE) {
        const float factor = noise->inverse_temperature[row];
        const int32_t *ids = noise->ids + tile * TILE;
        const vf logits = vf_load(rough);
        const vf scores = factor > 0.0f ? add_rough_noise(logits, factor, noise->keys + 2 * row, ids) : logits;
        vf_store(p->batch->logits + (int64_t)row * vocab + tile * TILE, scores);
    }
}

/* Copy the scores of a slice side by side, and count them. */
static int copy_slice(const float *scores, int slice, int vocab, float *out) {
    int count = 0;
    for (int i = slice * TILE; i < vocab; i += SLICES * TILE, count += TILE) vf_store(out + count, vf_load(scores + i));
    return count;
}

static float best_of(const float *scores, int count) {
    vf top = vf_set1(-INFINITY);
    for (int i = 0; i < count; i += LANES) top = vf_max(top, vf_load(scores + i));
    return vf_top(top);
}

static int count_from(const float *scores, int count, float cut) {
    const vf least = vf_set1(cut);
    int found = 0;
    for (int i = 0; i < count; i += LANES) found += __builtin_popcount(vf_ge(vf_load(scores + i), least));
    return found;
}

/* Find a score that at least `few` outputs reach, and not many more. If the search finds none, return a higher
   score, which fewer outputs may reach. */
static float find_cut(const float *scores, int count, int few) {
    const int most = few + few / 2 + 1 < SHORTLIST ? few + few / 2 + 1 : SHORTLIST;
    float high = best_of(scores, count), low = high - CUT_RANGE, middle = high - FIRST_CUT;
    for (int i = 0; i < CUT_STEPS; i++, middle = 0.5f * (low + high)) {
        const int found = count_from(scores, count, middle);
        if (found >= few && found <= most) return middle;
        *(found < few ? &high : &low) = middle;
    }
    return high;
}

/* List the outputs of a slice that reach the cut, by their places among all outputs. */
static int list_from(const float *scores, int count, float cut, int slice, int32_t *places) {
    int found = 0;
    for (int i = 0; i < count; i += LANES)
        for (unsigned left = vf_ge(vf_load(scores + i), vf_set1(cut)); left && found < SHORTLIST; left &= left - 1)
            places[found++] = i * SLICES + slice * LANES + __builtin_ctz(left);
    return found;
}

/* Compute the listed outputs exactly. Their weights are scattered: all are prefetched before the first is used. */
static void compute_exactly(const matrix *m, const float *x, shortlist *list) {
    const int8_t *weights = (const int8_t *)m->data, *w[OUTPUTS_AT_ONCE];
    for (int i = 0; i < list->count; i++)
        for (int j = 0; j < m->inputs; j += CACHE_LINE) prefetch_l1(weights + list->places[i] * m->stride + j);
    for (int i = 0; i < list->count; i += OUTPUTS_AT_ONCE) {
        vf sums[OUTPUTS_AT_ONCE];
        for (int r = 0; r < OUTPUTS_AT_ONCE; r++) {
            w[r] = weights + list->places[i + r < list->count ? i + r : i] * m->stride;
            sums[r] = vf_set1(0.0f);
        }
        for (int j = 0; j < m->inputs; j += LANES)
            for (int r = 0; r < OUTPUTS_AT_ONCE; r++)
                sums[r] = vf_fma(vf_load_bytes(w[r] + j), vf_load(x + j), sums[r]);
        for (int r = 0; r < OUTPUTS_AT_ONCE && i + r < list->count; r++)
            list->logits[i + r] = vf_sum(sums[r]) * m->bias[list->places[i + r]];
    }
}

/* shortlists ← outputs of each slice with the best scores, computed exactly */
void run_refine(member *self, program *p, const operation *o) {
    const matrix *m = o->part;
    float *x = p->scratch[self->index].row, *scores = p->scratch[self->index].slice;
    work_begin(self, p->batch->outs * SLICES);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int row = unit / SLICES, slice = unit % SLICES;
        const int count = copy_slice(p->batch->logits + (int64_t)row * m->outputs, slice, m->outputs, scores);
        shortlist *list = &p->screen.lists[unit];
        list->count = list_from(scores, count, find_cut(scores, count, o->few), slice, list->places);
        rms_norm(x, row_of(p, RESIDUAL, p->batch->logit_rows[row]), o->norm, m->inputs, o->epsilon);
        compute_exactly(m, x, list);
    }
}
