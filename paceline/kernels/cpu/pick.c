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
    const float *sure;    /* [rows] what some place has with noise; NULL: to be found out */
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
   -log(-log u) <= -log(1 - u), so that l + noise >= least needs 1 - u <= exp(l - least), and a power of two that is not
   less will do for it. The slack is far above what rounding could make of it. NaN is as far behind as can be. */
INLINE int may_reach(vf l, vf u, vf least) {
    const vf behind = vf_max(vf_min(vf_sub(least, l), vf_set1(80.0f)), vf_set1(0.0f));
    const vi halvings = vf_to_int(vf_sub(vf_mul(behind, vf_set1(1.44269504f)), vf_set1(0.5f))); /* rounded down */
    const vf needed = vi_as_float(vi_shl(vi_sub(vi_set1(127), halvings), 23));
    return vf_ge(vf_mul(needed, vf_set1(1.01f)), vf_sub(vf_set1(1.0f), u)) != 0;
}

/* Where the LANES whole places of [from, to) begin among which the best is; -1: there are none. */
static int best_vector(const float *logits, int from, int to) {
    float most = -INFINITY;
    int at = -1;
    for (int j = from; j + LANES <= to; j += LANES) {
        const vf l = vf_load(logits + j);
        if (vf_ge(l, vf_set1(most))) most = vf_top(l), at = j;
    }
    return at;
}

/* What the best place of [from, to), or one beside it, has with noise: who is surely below is not the winner. Where this
   is no number there is no bound. */
static float certain(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int from,
                     int to) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]);
    const int at = best_vector(logits, from, to);
    if (at < 0) return -INFINITY;
    const vi token = ids ? vi_load(ids + at) : vi_add(count_up(), vi_set1(at));
    return vf_top(vf_add(vf_mul(vf_load(logits + at), vf_set1(inverse_temperature)), gumbel(uniform(token, k0, k1))));
}

/* The best place of [from, to); none where all are below `sure`, which some place is known to have. */
static best pick_from(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int from,
                      int to, float sure) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]), lane = count_up();
    const vf warmth = vf_set1(inverse_temperature);
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

static best pick_between(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids, int from, int to) {
    const float sure = certain(logits, inverse_temperature, keys, ids, from, to);
    return pick_from(logits, inverse_temperature, keys, ids, from, to, sure);
}

static void pick_all(member *self, void *argument) {
    const pick *w = argument;
    work_begin(self, w->rows * w->slices);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int from = unit % w->slices * SLICE, to = from + SLICE < w->vocab ? from + SLICE : w->vocab;
        const int row = unit / w->slices;
        const float *logits = w->logits[row], warmth = w->inverse_temperature[row];
        const uint32_t *keys = w->keys + 2 * row;
        w->best[unit] = w->sure ? pick_from(logits, warmth, keys, w->ids, from, to, w->sure[row])
                                : pick_between(logits, warmth, keys, w->ids, from, to);
    }
    work_end(self);
}

/* tokens[row]: the lowest index among equals, 0 where all is NaN. Non-zero: out of memory. */
static int pick_rows(pool *team, pick *work, int32_t *tokens) {
    const int slices = work->slices = (work->vocab + SLICE - 1) / SLICE;
    work->best = malloc(sizeof(best) * (size_t)(work->rows * slices + 1));
    if (!work->best) return -1;
    pool_run(team, pick_all, work);
    for (int row = 0; row < work->rows; row++) {
        best top = work->best[row * slices];
        for (int i = 1; i < slices; i++)
            if (work->best[row * slices + i].value > top.value) top = work->best[row * slices + i];
        tokens[row] = top.index == INT32_MAX ? 0 : top.index;
    }
    free(work->best);
    return 0;
}

EXPORT int paceline_pick(pool *team, const float *const *logits, const float *inverse_temperature, const uint32_t *keys,
                         const int32_t *ids, int rows, int vocab, int32_t *tokens) {
    pick work = {.logits = logits, .inverse_temperature = inverse_temperature, .keys = keys, .ids = ids};
    work.rows = rows, work.vocab = vocab;
    return pick_rows(team, &work, tokens);
}

/* ---- after a pass ---- */

static uint64_t finalise(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

void token_keys(uint32_t *keys, uint64_t seed, int position) {
    const uint64_t counter = (uint64_t)position * 4;
    const uint64_t bits = finalise(seed ^ finalise(counter * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u));
    keys[0] = (uint32_t)(bits >> 32);
    keys[1] = (uint32_t)bits;
}

/* What one place has with noise. */
static float with_noise(float logit, float inverse_temperature, const uint32_t *keys, int place) {
    const vi k0 = vi_set1((int32_t)keys[0]), k1 = vi_set1((int32_t)keys[1]);
    const vf noise = gumbel(uniform(vi_set1(place), k0, k1));
    return vf_top(vf_add(vf_mul(vf_set1(logit), vf_set1(inverse_temperature)), noise));
}

typedef struct { /* the rows of a pass that are drawn with noise; each array [outs] */
    const float **logits;
    float *inverse_temperature, *sure;
    uint32_t *keys;
    int32_t *outs, *tokens;
    int count;
} noisy_rows;

static void add_noisy(noisy_rows *n, const batch *b, int out, int vocab, uint64_t seed, float inverse_temperature) {
    const int i = n->count++, top = b->argmax[out];
    n->logits[i] = b->logits + (int64_t)out * vocab;
    n->inverse_temperature[i] = inverse_temperature;
    token_keys(n->keys + 2 * i, seed, b->positions[b->logit_rows[out]] + 1);
    n->sure[i] = with_noise(n->logits[i][top], inverse_temperature, n->keys + 2 * i, top);
    n->outs[i] = out;
}

/* Where the row's own key lies among its tree's, -1: it belongs to no tree. */
static int depth_of(const batch *b, int s, int row) {
    return b->tails && b->positions[row] >= b->bases[s] ? b->positions[row] - b->bases[s] : -1;
}

static int is_child(const batch *b, int s, int row, int of) {
    const int depth = depth_of(b, s, row);
    if (depth < 0) return row == of + 1;
    if (depth == 0) return b->positions[of] == b->bases[s] - 1; /* the root */
    return b->tails[(int64_t)row * b->depth + depth - 1] == b->slots[of];
}

int row_after(const batch *b, int s, int of, int32_t token) {
    for (int row = of + 1; row < b->row_starts[s + 1]; row++)
        if (b->tokens[row] == token && is_child(b, s, row, of)) return row;
    return -1;
}

/* The outputs that are drawn next: of each sequence that of the row `at`, or all where there is no `at`. */
static void find_noisy(noisy_rows *n, const batch *b, int vocab, const draws *d, const int32_t *at) {
    n->count = 0;
    for (int out = 0, s = 0; out < b->outs; out++) {
        while (b->logit_rows[out] >= b->row_starts[s + 1]) s++;
        if (d->inverse_temperature[s] > 0.0f && (!at || at[s] == b->logit_rows[out]))
            add_noisy(n, b, out, vocab, d->seeds[s], d->inverse_temperature[s]);
    }
}

static int pick_noisy(const program *p, const noisy_rows *n, const draws *d) {
    pick work = {.logits = n->logits, .inverse_temperature = n->inverse_temperature, .keys = n->keys};
    work.sure = n->sure, work.rows = n->count, work.vocab = p->shape.vocab;
    if (pick_rows(p->pool, &work, n->tokens)) return OUT_OF_MEMORY;
    for (int i = 0; i < n->count; i++) d->tokens[n->outs[i]] = n->tokens[i];
    return FINE;
}

/* From each row that was drawn after to the drafted one that was drawn; -1: it was not drafted. */
static void go_on(const noisy_rows *n, const batch *b, int32_t *at) {
    for (int s = 0, i = 0; s < b->sequences; s++) {
        const int drawn = i < n->count && b->logit_rows[n->outs[i]] == at[s];
        at[s] = drawn ? row_after(b, s, at[s], n->tokens[i]) : -1;
        i += drawn;
    }
}

static int any_warm(const draws *d, int sequences) {
    int warm = 0;
    for (int s = 0; d->inverse_temperature && s < sequences; s++) warm |= d->inverse_temperature[s] > 0.0f;
    return warm;
}

/* Of drafts only those are drawn after that were drawn themselves: about every third. */
static int draw_noisy(const program *p, const batch *b, const draws *d) {
    const size_t n = (size_t)b->outs, sequences = (size_t)b->sequences;
    char *memory = malloc(n * (sizeof(float *) + 2 * sizeof(float) + 4 * sizeof(int32_t)) + sizeof(int32_t) * sequences);
    if (!memory) return OUT_OF_MEMORY;
    noisy_rows rows = {.logits = (const float **)memory};
    rows.inverse_temperature = (float *)(rows.logits + n), rows.sure = rows.inverse_temperature + n;
    rows.keys = (uint32_t *)(rows.sure + n);
    rows.outs = (int32_t *)(rows.keys + 2 * n), rows.tokens = rows.outs + n;
    int32_t *at = d->roots ? rows.tokens + n : NULL;
    int status = FINE;
    if (at) memcpy(at, d->roots, sizeof(int32_t) * sequences);
    do {
        find_noisy(&rows, b, p->shape.vocab, d, at);
        if (rows.count) status = pick_noisy(p, &rows, d);
        if (at) go_on(&rows, b, at);
    } while (at && rows.count && status == FINE);
    free(memory);
    return status;
}

/* A pass, and the token after each row with logits: the best, or by noise of its sequence's seed and its position. After
   drafts that were not drawn themselves it is the best: nobody will ask. */
EXPORT int paceline_program_draw(program *p, const batch *b, const draws *d) {
    int status = run_pass(p, b);
    if (status != FINE || !b->outs) return status;
    memcpy(d->tokens, b->argmax, sizeof(int32_t) * (size_t)b->outs);
    if (any_warm(d, b->sequences)) status = draw_noisy(p, b, d);
    if (status == FINE) begin_to_follow(p, b, d);
    return status;
}

/* ---- the best few ---- */

void clear_tops(best *tops, int count) {
    for (int i = 0; i < count; i++) tops[i] = (best){-INFINITY, INT32_MAX};
}

/* Into its place among the best so far, after its equals. */
void insert_top(best *tops, int count, best one) {
    if (!(one.value > tops[count - 1].value)) return;
    int i = count - 1;
    for (; i > 0 && one.value > tops[i - 1].value; i--) tops[i] = tops[i - 1];
    tops[i] = one;
}

/* A value that the last of the best few is not below: that of the noisy ones beside the best place. */
static float surely_among(const float *logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids,
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
    const vf warmth = vf_set1(inverse_temperature);
    float sure = surely_among(logits, inverse_temperature, keys, ids, vocab, count), values[LANES];
    int j = 0;
    for (; j + LANES <= vocab; j += LANES) {
        const vf l = vf_mul(vf_load(logits + j), warmth);
        const int bounded = fabsf(sure) < 1e4f;
        if (bounded && !vf_ge(l, vf_set1(sure - MOST_NOISE))) continue;
        const vf u = uniform(vi_load(ids + j), k0, k1);
        if (bounded && !may_reach(l, u, vf_set1(sure))) continue;
        vf_store(values, vf_add(l, gumbel(u)));
        for (int i = 0; i < LANES; i++) insert_top(tops, count, (best){values[i], j + i});
        sure = tops[count - 1].value > sure ? tops[count - 1].value : sure;
    }
    for (int i = 0; j + i < vocab; i++) {
        const vf noise = gumbel(uniform(vi_set1(ids[j + i]), k0, k1));
        vf_store(values, vf_add(vf_set1(logits[j + i] * inverse_temperature), noise));
        insert_top(tops, count, (best){values[0], j + i});
    }
}

/* Of -log(-log u) the inner logarithm as the beginning of its series, which is right where the noise is large, and the
   outer one as the bits of a float say it, which is 0.06 off at most. */
vf rough_noise(vf logits, float inverse_temperature, const uint32_t *keys, const int32_t *ids) {
    const vf half = vf_set1(0.5f), one = vf_set1(1.0f);
    const vf d = vf_sub(one, uniform(vi_load(ids), vi_set1((int32_t)keys[0]), vi_set1((int32_t)keys[1])));
    const vf inner = vf_mul(d, vf_fma(d, vf_fma(d, half, half), one));
    const vf outer = vf_mul(vi_to_float(vi_sub(vi_set1(0x3F800000), vf_bits(inner))), vf_set1(0x1p-23f * 0.69314718f));
    return vf_fma(logits, vf_set1(inverse_temperature), outer);
}

/* The noise itself, for tests: out [vocab]. */
EXPORT void paceline_gumbel(uint32_t k0, uint32_t k1, int vocab, float *out) {
    for (int j = 0; j < vocab; j += LANES) {
        float values[LANES];
        vf_store(values, gumbel(uniform(vi_add(count_up(), vi_set1(j)), vi_set1((int32_t)k0), vi_set1((int32_t)k1))));
        memcpy(out + j, values, sizeof(float) * (size_t)(vocab - j < LANES ? vocab - j : LANES));
    }
}
