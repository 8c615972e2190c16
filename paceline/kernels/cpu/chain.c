/* A draft of several tokens in one call: a head's first pass, then one pass a token on its own output.

   Each sequence ends its draft where it is long enough or the head no longer believes in all of it; the rows of the
   others close up. The first pass is the caller's batch, with one logit row a sequence. */
#include <math.h>
#include <stdlib.h>

#include "program.h"
#include "vmath.h"

typedef struct { /* mirrored in layout.py */
    const int32_t *ids;               /* [vocab] the target's token of each output */
    const int32_t *limits;            /* [sequences] tokens wanted, at least 1 */
    const float *inverse_temperature; /* [sequences]; 0: the best token without noise */
    const float *least;               /* [sequences] a draft ends where the belief in all of it is lower */
    const float *min_p, *top_p;       /* [sequences]; 0 and 1: not wanted */
    const int32_t *top_k;             /* [sequences]; 0: not wanted */
    const uint32_t *keys;             /* [sequences][longest][2] */
    int32_t *tokens;                  /* out [sequences][longest] */
    int32_t *counts;                  /* out [sequences] */
    int32_t longest, vocab;
} chain;

typedef struct {
    program *p;
    const chain *c;
    const batch *now;
    const int32_t *owners; /* [rows with logits] the sequence of each */
    float *beliefs;        /* [sequences] in all tokens so far */
} drawing;

/* How often a token of this probability is the target's own: `chance` of drafters/drawing.py. */
static float chance(float probability, int drawn) {
    return drawn ? 0.22f + 0.65f * sqrtf(probability) : 2.5f * probability / (1.0f + 1.5f * probability);
}

/* The probability of one output among all. */
static float probability_of(const float *logits, int vocab, int chosen) {
    vf top = vf_set1(-INFINITY), sum = vf_set1(0.0f);
    float rest = 0.0f, most = logits[chosen];
    int whole = vocab / LANES * LANES;
    for (int j = 0; j < whole; j += LANES) top = vf_max(top, vf_load(logits + j));
    if (whole) most = vf_top(top) > most ? vf_top(top) : most;
    for (int j = whole; j < vocab; j++) most = logits[j] > most ? logits[j] : most;
    for (int j = 0; j < whole; j += LANES) sum = vf_add(sum, vf_exp(vf_sub(vf_load(logits + j), vf_set1(most))));
    for (int j = whole; j < vocab; j++) rest += expf(logits[j] - most);
    return expf(logits[chosen] - most) / (vf_sum(sum) + rest);
}

/* About the smallest logit that min-p, top-k and top-p leave: outputs are counted by how far they are below the best in
   steps of 1 / STEPS of a natural logarithm, and a step stays or goes as a whole. A guess need not be exact, and what is
   more than DEPTH below the best has no mass to speak of. */
#define DEPTH 16
#define STEPS 16

static float floor_of(const float *logits, int vocab, float best, float warmth, float min_p, float top_p, int top_k) {
    int32_t counts[DEPTH * STEPS] = {0};
    const float lowest = best - DEPTH / warmth;
    int last = DEPTH * STEPS - 1, whole = vocab / LANES * LANES;
    for (int j = 0; j < vocab; j++) {
        if (j < whole && j % LANES == 0 && !vf_ge(vf_load(logits + j), vf_set1(lowest))) j += LANES - 1;
        else if (logits[j] > lowest) {
            const int step = (int)((best - logits[j]) * warmth * STEPS);
            counts[step < last ? step : last]++;
        }
    }
    if (min_p > 0.0f && -logf(min_p) * STEPS < (float)last) last = (int)(-logf(min_p) * STEPS);
    for (int step = 0, seen = 0; top_k && step < last; step++)
        if ((seen += counts[step]) >= top_k) last = step;
    float total = 0.0f, mass = 0.0f;
    for (int step = 0; step <= last; step++) total += (float)counts[step] * expf(-((float)step + 0.5f) / STEPS);
    for (int step = 0; step < last; step++)
        if ((mass += (float)counts[step] * expf(-((float)step + 0.5f) / STEPS)) >= top_p * total) last = step;
    return last == DEPTH * STEPS - 1 ? -INFINITY : best - (float)(last + 1) / STEPS / warmth;
}

/* The best of those outputs with noise whose logits are above the floor. */
static int pick_above(const drawing *d, const float *logits, float floor, float warmth, const uint32_t *keys) {
    enum { MANY = 512 };
    float values[MANY];
    int32_t tokens[MANY], places[MANY];
    best top = {-INFINITY, INT32_MAX};
    const int vocab = d->c->vocab;
    for (int j = 0, n = 0; j < vocab; j++) {
        if (logits[j] > floor) values[n] = logits[j], tokens[n] = d->c->ids[j], places[n++] = j;
        if (n == MANY || (n && j + 1 == vocab)) {
            const best found = pick_between(values, warmth, keys, tokens, 0, n);
            if (found.value > top.value) top = (best){found.value, places[found.index]};
            n = 0;
        }
    }
    return top.index;
}

static void draw_row(const drawing *d, int row) {
    const chain *c = d->c;
    const int s = d->owners[row], turn = c->counts[s];
    const float *logits = d->now->logits + (int64_t)row * c->vocab;
    const int noisy = c->inverse_temperature[s] > 0.0f;
    int chosen = d->now->argmax[row];
    if (noisy) {
        const uint32_t *keys = c->keys + 2 * ((int64_t)s * c->longest + turn);
        const float warmth = c->inverse_temperature[s];
        const int filters = c->min_p[s] > 0.0f || c->top_p[s] < 1.0f || c->top_k[s] > 0;
        const float floor = filters ? floor_of(logits, c->vocab, logits[chosen], warmth, c->min_p[s], c->top_p[s], c->top_k[s])
                                    : -INFINITY;
        const int picked = floor > -INFINITY ? pick_above(d, logits, floor, warmth, keys)
                                             : pick_between(logits, warmth, keys, c->ids, 0, c->vocab).index;
        chosen = picked == INT32_MAX ? 0 : picked;
    }
    c->tokens[(int64_t)s * c->longest + turn] = c->ids[chosen];
    c->counts[s] = turn + 1;
    if (c->least[s] > 0.0f && turn + 1 < c->limits[s]) {
        d->beliefs[s] *= chance(probability_of(logits, c->vocab, chosen), noisy);
    }
}

static void draw_all(member *self, void *argument) {
    const drawing *d = argument;
    work_begin(self, d->now->outs);
    for (int row; (row = work_next(self)) >= 0;) draw_row(d, row);
    work_end(self);
}

static void draw(const drawing *d) {
    if (d->now->outs == 1) draw_row(d, 0);
    else pool_run(d->p->pool, draw_all, (void *)d);
}

static int goes_on(const drawing *d, int s) {
    return d->c->counts[s] < d->c->limits[s] && d->beliefs[s] >= d->c->least[s];
}

/* The next pass: one row for each sequence that goes on. It may be written where the pass before it lies: what is
   written is never ahead of what is read. */
static void close_up(const drawing *d, const batch *first, batch *next, int32_t *memory, int32_t *owners) {
    const int most = first->sequences, width = first->table_width;
    int32_t *tokens = memory, *positions = tokens + most, *slots = positions + most, *starts = slots + most,
            *bases = starts + most + 1, *rows = bases + most, *carry = rows + most, *table = carry + most;
    const batch before = *d->now;
    int n = 0;
    for (int out = 0; out < before.outs; out++) {
        const int s = owners[out], row = before.logit_rows[out], position = before.positions[row] + 1;
        if (!goes_on(d, s)) continue;
        const int32_t *pages = first->page_table + (int64_t)s * width;
        const int page = position / PAGE < width ? pages[position / PAGE] : -1;
        memcpy(table + (int64_t)n * width, pages, sizeof(int32_t) * (size_t)width);
        carry[n] = row; /* places at or after n are still as the pass before left them */
        tokens[n] = d->c->tokens[(int64_t)s * d->c->longest + d->c->counts[s] - 1];
        positions[n] = position;
        slots[n] = page < 0 ? -1 : page * PAGE + position % PAGE;
        starts[n] = rows[n] = n;
        bases[n] = position + 1;
        owners[n++] = s;
    }
    starts[n] = n;
    *next = (batch){tokens, positions, slots, starts, bases, table, rows, NULL, carry, first->logits, NULL,
                    first->argmax, n, n, width, n, 0};
}

/* FINE, or why a pass was not run; then `counts` tell what had been drafted before. */
EXPORT int paceline_chain(program *p, const batch *first, const chain *c) {
    const int64_t n = first->sequences;
    int32_t *memory = malloc(sizeof(int32_t) * (size_t)(8 * n + 1 + n * first->table_width));
    float *beliefs = malloc(sizeof(float) * (size_t)(n + 1));
    int32_t *owners = memory;
    int status = memory && beliefs ? FINE : OUT_OF_MEMORY;
    batch next;
    drawing d = {p, c, first, owners, beliefs};
    for (int s = 0; status == FINE && s < n; s++) owners[s] = s, beliefs[s] = 1.0f, c->counts[s] = 0;
    if (status == FINE) status = run_pass(p, first);
    while (status == FINE && d.now->outs) {
        draw(&d);
        close_up(&d, first, &next, memory + n, owners);
        d.now = &next;
        if (next.outs) status = run_pass(p, &next);
    }
    free(memory), free(beliefs);
    return status;
}
