/* Sampling: argmax of logits * inverse temperature + Gumbel noise (noise.h).

   Noise costs two logarithms, and most tokens are too far behind to win with any noise. So a bound is found first: the
   noisy value of a token with a high logit. The winner is at least as high. Tokens that cannot reach it need no
   noise. */
#include "pick.h"

#include <math.h>
#include <stdlib.h>

#include "noise.h"
#include "pool.h"

#define TOKENS_PER_UNIT 4096 /* of the vocabulary, per unit of work */
#define BOUND_MAX 1e4f /* largest |bound| that is used; beyond it, rounding may exceed the slack of may_reach */

/* ---- one token a row ---- */

/* Keep the highest of some noisy values in `top`; the first among equals. */
static void note(best *top, vf noisy, int first, int count) {
    float values[LANES];
    if (!vf_ge(noisy, vf_set1(top->value))) return;
    vf_store(values, noisy);
    for (int i = 0; i < count; i++)
        if (values[i] > top->value || (values[i] == top->value && top->index == NOTHING))
            *top = (best){values[i], first + i};
}

/* Whether any of LANES tokens, with scaled logits l and uniform numbers u, may reach `least` with noise; computed
   without logarithms. Since -log(-log u) <= -log(1 - u), l + noise >= least needs 1 - u <= exp(l - least). A power of
   two that is not smaller replaces the exponential. The slack of 1 % is far above any rounding. NaN counts as far
   behind. */
INLINE int may_reach(vf l, vf u, vf least) {
    const vf behind = vf_max(vf_min(vf_sub(least, l), vf_set1(80.0f)), vf_set1(0.0f));
    const vi halvings = vf_to_int(vf_sub(vf_mul(behind, vf_set1(1.44269504f)), vf_set1(0.5f))); /* rounded down */
    const vf needed = vi_as_float(vi_shl(vi_sub(vi_set1(127), halvings), 23));
    return vf_ge(vf_mul(needed, vf_set1(1.01f)), vf_sub(vf_set1(1.0f), u)) != 0;
}

/* Find the vector of LANES outputs in [from, to) that holds the best logit, and return its first output; -1: there is
   no whole vector. */
static int best_vector(const float *logits, int from, int to) {
    float most = -INFINITY;
    int at = -1;
    for (int j = from; j + LANES <= to; j += LANES) {
        const vf l = vf_load(logits + j);
        if (vf_ge(l, vf_set1(most))) most = vf_top(l), at = j;
    }
    return at;
}

/* Find a bound for [from, to): the highest noisy value in the vector with the best logit. Not finite: there is no
   bound. */
static float find_bound(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids,
                        int from, int to) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]);
    const int at = best_vector(logits, from, to);
    if (at < 0) return -INFINITY;
    const vi token = ids ? vi_load(ids + at) : vi_add(count_up(), vi_set1(at));
    return vf_top(vf_add(vf_mul(vf_load(logits + at), vf_set1(inverse_temperature)), gumbel(uniform(token, k0, k1))));
}

/* Find the best output of [from, to); NOTHING: all are below the bound. */
static best pick_bounded(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids,
                         int from, int to, float bound) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]), lane = count_up();
    const vf factor = vf_set1(inverse_temperature);
    const int bounded = fabsf(bound) < BOUND_MAX;
    const vf least = vf_set1(bound), reach = vf_set1(bound - MAX_NOISE);
    best top = {-INFINITY, NOTHING};
    int j = from;
    for (; j + LANES <= to; j += LANES) {
        const vf l = vf_mul(vf_load(logits + j), factor);
        if (bounded && !vf_ge(l, reach)) continue;
        const vf u = uniform(ids ? vi_load(ids + j) : vi_add(lane, vi_set1(j)), k0, k1);
        if (!bounded || may_reach(l, u, least)) note(&top, vf_add(l, gumbel(u)), j, LANES);
    }
    if (j < to) {
        float rest[LANES] = {0};
        int32_t tokens[LANES] = {0};
        memcpy(rest, logits + j, sizeof(float) * (size_t)(to - j));
        for (int i = 0; i < to - j; i++) tokens[i] = ids ? ids[j + i] : j + i;
        note(&top, vf_add(vf_mul(vf_load(rest), factor), gumbel(uniform(vi_load(tokens), k0, k1))), j, to - j);
    }
    return top;
}

static best pick_between(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids,
                         int from, int to) {
    const float bound = find_bound(logits, inverse_temperature, keys, ids, from, to);
    return pick_bounded(logits, inverse_temperature, keys, ids, from, to, bound);
}

static void pick_all(member *self, void *argument) {
    const pick *w = argument;
    work_begin(self, w->rows * w->units);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int from = unit % w->units * TOKENS_PER_UNIT;
        const int to = from + TOKENS_PER_UNIT < w->vocab ? from + TOKENS_PER_UNIT : w->vocab;
        const int row = unit / w->units;
        const float *logits = w->logits[row], factor = w->inverse_temperature[row];
        const uint32_t *keys = w->keys + 2 * row;
        w->best[unit] = w->bound ? pick_bounded(logits, factor, keys, w->ids, from, to, w->bound[row])
                                 : pick_between(logits, factor, keys, w->ids, from, to);
    }
    work_end(self);
}

int pick_rows(pool *pool, pick *work, int32_t *tokens) {
    const int units = work->units = (work->vocab + TOKENS_PER_UNIT - 1) / TOKENS_PER_UNIT;
    work->best = malloc(sizeof(best) * (size_t)(work->rows * units + 1));
    if (!work->best) return -1;
    pool_run_beside(pool, pick_all, work);
    for (int row = 0; row < work->rows; row++) {
        best top = work->best[row * units];
        for (int i = 1; i < units; i++)
            if (work->best[row * units + i].value > top.value) top = work->best[row * units + i];
        tokens[row] = top.index == NOTHING ? 0 : top.index;
    }
    free(work->best);
    return 0;
}

EXPORT int paceline_pick(pool *pool, const float *const *logits, const float *inverse_temperature, const uint32_t *keys,
                         const int32_t *ids, int rows, int vocab, int32_t *tokens) {
    pick work = {.logits = logits, .inverse_temperature = inverse_temperature, .keys = keys, .ids = ids};
    work.rows = rows, work.vocab = vocab;
    return pick_rows(pool, &work, tokens);
}

/* ---- noise of one token ---- */

static uint64_t finalise(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

void token_keys(uint32_t *keys, uint64_t seed, int position) {
    const uint64_t counter = (uint64_t)position * 4; /* four streams per position; the first is for tokens */
    const uint64_t bits = finalise(seed ^ finalise(counter * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u));
    keys[0] = (uint32_t)(bits >> 32);
    keys[1] = (uint32_t)bits;
}

float noisy_value(float logit, float inverse_temperature, const uint32_t *keys, int token) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]);
    const vf noise = gumbel(uniform(vi_set1(token), k0, k1));
    return vf_top(vf_add(vf_mul(vf_set1(logit), vf_set1(inverse_temperature)), noise));
}

/* ---- the best few ---- */

void clear_tops(best *tops, int count) {
    for (int i = 0; i < count; i++) tops[i] = (best){-INFINITY, NOTHING};
}

void insert_top(best *tops, int count, best one) {
    if (!(one.value > tops[count - 1].value)) return;
    int i = count - 1;
    for (; i > 0 && one.value > tops[i - 1].value; i--) tops[i] = tops[i - 1];
    tops[i] = one;
}

/* Find a bound for the `count` best: the lowest of the `count` best noisy values in the vector with the best logit. */
static float find_bound_of_few(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids,
                               int vocab, int count) {
    best tops[LANES];
    float values[LANES];
    const int at = best_vector(logits, 0, vocab);
    if (at < 0) return -INFINITY;
    const vf noise = gumbel(uniform(vi_load(ids + at), vi_set1((int32_t)keys[0]), vi_set1((int32_t)keys[1])));
    vf_store(values, vf_add(vf_mul(vf_load(logits + at), vf_set1(inverse_temperature)), noise));
    clear_tops(tops, count);
    for (int i = 0; i < LANES; i++) insert_top(tops, count, (best){values[i], at + i});
    return tops[count - 1].value;
}

void pick_several(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int vocab,
                  best *tops, int count) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]);
    const vf factor = vf_set1(inverse_temperature);
    float bound = find_bound_of_few(logits, inverse_temperature, keys, ids, vocab, count), values[LANES];
    int j = 0;
    for (; j + LANES <= vocab; j += LANES) {
        const vf l = vf_mul(vf_load(logits + j), factor);
        const int bounded = fabsf(bound) < BOUND_MAX;
        if (bounded && !vf_ge(l, vf_set1(bound - MAX_NOISE))) continue;
        const vf u = uniform(vi_load(ids + j), k0, k1);
        if (bounded && !may_reach(l, u, vf_set1(bound))) continue;
        vf_store(values, vf_add(l, gumbel(u)));
        for (int i = 0; i < LANES; i++) insert_top(tops, count, (best){values[i], j + i});
        bound = tops[count - 1].value > bound ? tops[count - 1].value : bound;
    }
    for (int i = 0; j + i < vocab; i++) {
        const vf noise = gumbel(uniform(vi_set1(ids[j + i]), k0, k1));
        vf_store(values, vf_add(vf_set1(logits[j + i] * inverse_temperature), noise));
        insert_top(tops, count, (best){values[0], j + i});
    }
}

/* Approximate -log(-log u) with d = 1 - u. The inner logarithm is the cubic d + d²/2 + d³/2, which is accurate where
   the noise is large. The outer logarithm is read from the bits of a float; its error is at most 0.06. */
vf add_rough_noise(vf logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids) {
    const vf half = vf_set1(0.5f), one = vf_set1(1.0f);
    const vf d = vf_sub(one, uniform(vi_load(ids), vi_set1((int32_t)keys[0]), vi_set1((int32_t)keys[1])));
    const vf inner = vf_mul(d, vf_fma(d, vf_fma(d, half, half), one));
    const vf outer = vf_mul(vi_to_float(vi_sub(vi_set1(0x3F800000), vf_bits(inner))), vf_set1(0x1p-23f * 0.69314718f));
    return vf_fma(logits, vf_set1(inverse_temperature), outer);
}
