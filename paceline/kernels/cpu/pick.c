/* Sampling: argmax of logits * inverse temperature + Gumbel noise, with noise from a counter.

   paceline/kernels/noise.py defines the noise; every operation here rounds as the one there does. */
#include <math.h>
#include <stdlib.h>

#include "pool.h"
#include "program.h"
#include "vmath.h"

#define SLICE 4096       /* tokens a unit of work */
#define MOST_NOISE 17.0f /* more than any number of 23 bits gives: -log(-log(1 - 2^-24)) is 16.64 */

typedef struct {
    const float *const *logits; /* [rows] */
    const float *inverse_temperature;
    const uint32_t *keys; /* [rows][2] */
    const int32_t *ids;   /* [vocab] the tokens that the noise speaks of; NULL: the places themselves */
    int rows, vocab, slices;
    best *best; /* [rows][slices] */
} pick;

/* 16 numbers of the counter `j` … in (0, 1). */
INLINE vf uniform(vi j, vi k0, vi k1) {
    vi x = vi_add(vi_mul(j, vi_set1((int32_t)0x9E3779B9)), k0);
    x = vi_mul(vi_xor(x, vi_shr(x, 16)), vi_set1((int32_t)0x85EBCA6B));
    x = vi_mul(vi_xor(x, vi_shr(x, 13)), vi_set1((int32_t)0xC2B2AE35));
    x = vi_mul(vi_xor(vi_xor(x, vi_shr(x, 16)), k1), vi_set1(0x27D4EB2F));
    x = vi_xor(x, vi_shr(x, 15));
    return vf_mul(vf_add(vi_to_float(vi_shr(x, 9)), vf_set1(0.5f)), vf_set1(0x1p-23f));
}

INLINE vf gumbel(vf u) {
    return vf_negate(vf_log(vf_negate(vf_log(u))));
}

static vi count_up(void) {
    int32_t j[LANES];
    for (int i = 0; i < LANES; i++) j[i] = i;
    return vi_load(j);
}

static void note(best *top, vf noisy, int first, int count) {
    float values[LANES];
    if (!vf_ge(noisy, vf_set1(top->value))) return;
    vf_store(values, noisy);
    for (int i = 0; i < count; i++)
        if (values[i] > top->value || (values[i] == top->value && top->index == INT32_MAX))
            *top = (best){values[i], first + i};
}

/* Most tokens are so far behind that hardly any noise could bring them forward, and a bound tells so without logarithms:
   -log(-log u) <= -log(1 - u), so that l + noise >= least needs 1 - u <= exp(l - least). The slack is far above what
   rounding could make of it. */
INLINE int may_reach(vf l, vf u, vf least) {
    const vf needed = vf_mul(vf_exp(vf_sub(l, least)), vf_set1(1.01f));
    return vf_ge(needed, vf_sub(vf_set1(1.0f), u)) != 0;
}

/* What the best place of [from, to), or one beside it, has with noise: who is surely below is not the winner. Where this
   is no number there is no bound. */
static float certain(const float *logits, vf warmth, const int32_t *ids, vi k0, vi k1, int from, int to) {
    float most = -INFINITY;
    int at = -1;
    for (int j = from; j + LANES <= to; j += LANES) {
        const vf l = vf_load(logits + j);
        if (vf_ge(l, vf_set1(most))) most = vf_top(l), at = j;
    }
    if (at < 0) return -INFINITY;
    const vi token = ids ? vi_load(ids + at) : vi_add(count_up(), vi_set1(at));
    return vf_top(vf_add(vf_mul(vf_load(logits + at), warmth), gumbel(uniform(token, k0, k1))));
}

best pick_between(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int from, int to) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]), lane = count_up();
    const vf warmth = vf_set1(inverse_temperature);
    const float sure = certain(logits, warmth, ids, k0, k1, from, to);
    const int bounded = fabsf(sure) < 1e4f; /* beyond it rounding alone may be worth more than the slack */
    const vf least = vf_set1(sure), reach = vf_set1(sure - MOST_NOISE);
    best top = {-INFINITY, INT32_MAX};
    int j = from;
    for (; j + LANES <= to; j += LANES) {
        const vf l = vf_mul(vf_load(logits + j), warmth);
        if (bounded && !vf_ge(l, reach)) continue;
        const vf u = uniform(ids ? vi_load(ids + j) : vi_add(lane, vi_set1(j)), k0, k1);
        if (!bounded || may_reach(l, u, least)) note(&top, vf_add(l, gumbel(u)), j, LANES);
    }
    if (j < to) {
        float rest[LANES] = {0};
        int32_t tokens[LANES] = {0};
        memcpy(rest, logits + j, sizeof(float) * (size_t)(to - j));
        for (int i = 0; i < to - j; i++) tokens[i] = ids ? ids[j + i] : j + i;
        note(&top, vf_add(vf_mul(vf_load(rest), warmth), gumbel(uniform(vi_load(tokens), k0, k1))), j, to - j);
    }
    return top;
}

static void pick_all(member *self, void *argument) {
    const pick *w = argument;
    work_begin(self, w->rows * w->slices);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int from = unit % w->slices * SLICE, to = from + SLICE < w->vocab ? from + SLICE : w->vocab;
        const int row = unit / w->slices;
        w->best[unit] = pick_between(w->logits[row], w->inverse_temperature[row], w->keys + 2 * row, w->ids, from, to);
    }
    work_end(self);
}

/* tokens[row]: the lowest index among equals, 0 where all is NaN. Non-zero: out of memory. */
EXPORT int paceline_pick(pool *team, const float *const *logits, const float *inverse_temperature, const uint32_t *keys,
                         const int32_t *ids, int rows, int vocab, int32_t *tokens) {
    const int slices = (vocab + SLICE - 1) / SLICE;
    best *found = malloc(sizeof(best) * (size_t)(rows * slices + 1));
    pick work = {logits, inverse_temperature, keys, ids, rows, vocab, slices, found};
    if (!work.best) return -1;
    pool_run(team, pick_all, &work);
    for (int row = 0; row < rows; row++) {
        best top = work.best[row * slices];
        for (int i = 1; i < slices; i++)
            if (work.best[row * slices + i].value > top.value) top = work.best[row * slices + i];
        tokens[row] = top.index == INT32_MAX ? 0 : top.index;
    }
    free(work.best);
    return 0;
}

/* The noise itself, for tests: out [vocab]. */
EXPORT void paceline_gumbel(uint32_t k0, uint32_t k1, int vocab, float *out) {
    for (int j = 0; j < vocab; j += LANES) {
        float values[LANES];
        vf_store(values, gumbel(uniform(vi_add(count_up(), vi_set1(j)), vi_set1((int32_t)k0), vi_set1((int32_t)k1))));
        memcpy(out + j, values, sizeof(float) * (size_t)(vocab - j < LANES ? vocab - j : LANES));
    }
}
