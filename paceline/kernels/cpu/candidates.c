/* Candidates: tokens that may follow a row of a draft, and the probability that the target accepts each. */
#include <math.h>

#include "tree.h"
#include "vmath.h"

#define LOG_MASS_NATS 14.0f /* logits further below the best are too small to count in a softmax's sum */
#define AHEAD_MAX 6.0f      /* nats; a larger lead makes the best token no more likely to be accepted */
#define FILTER_NATS 16      /* nats below the best logit that the filters' histogram covers */
#define FILTER_STEPS 16     /* steps of the histogram per nat */
#define FILTERED_AT_ONCE 512 /* outputs that pass the filters and get their noise together */

/* The outputs of a row: all of them, or only the ones on its shortlists. */
typedef struct {
    const float *logits;
    const int32_t *ids; /* target tokens */
    int count;
} outputs;

/* ---- acceptance ---- */

static float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Probability that the target's own token is the drafter's token of this rank, for the trees of a compiled program.

   Fitted to rows of drafts whose ancestors were accepted (docs/experiments.md, "Chance of a token by its rank" and
   "Chances of greedy drafts, once more"). Without noise, a doubtful best token is right more often than its probability
   says, because the target takes its best token, too; a sure one of a head less often. With noise, which the target
   shares, two distances in nats between noisy values matter as well: how far the best token is ahead of the second, and
   how far another token is behind the best. Below temperature 1 they count in nats of the logits: a colder draw makes a
   token surer to be the drafter's best, not surer to be the target's. Chains that the host draws token by token know
   only the probability; a head's curve is in paceline/drafters/draft_in_progress.py. */
static float tree_acceptance(const order *o, int rank, float probability, const best *tops, float inverse_temperature) {
    const float unit = inverse_temperature > 1.0f ? inverse_temperature : 1.0f;
    const float ahead = (tops[0].value - tops[1].value) / unit, behind = (tops[0].value - tops[rank].value) / unit;
    const float odds = probability / (1.0f - probability);
    if (inverse_temperature <= 0.0f) return rank ? probability : logistic(o->odds_slope * logf(odds) + o->odds_offset);
    if (rank) return logistic(1.06f * sqrtf(probability) - 0.56f * behind - 0.24f * (float)rank - 1.31f);
    return logistic(0.83f * sqrtf(probability) + 0.74f * (ahead < AHEAD_MAX ? ahead : AHEAD_MAX) - 1.25f);
}

/* Compute log Σ exp(logit - most); vectors whose logits are all too small to count are left out. */
static float log_mass(const float *logits, int vocab, float most) {
    const vf top = vf_set1(most), lowest = vf_set1(most - LOG_MASS_NATS);
    vf sum = vf_set1(0.0f);
    float rest = 0.0f;
    const int whole = vocab / LANES * LANES;
    for (int j = 0; j < whole; j += LANES) {
        const vf l = vf_load(logits + j);
        if (vf_ge(l, lowest)) sum = vf_add(sum, vf_exp(vf_sub(l, top)));
    }
    for (int j = whole; j < vocab; j++) rest += expf(logits[j] - most);
    return logf(vf_sum(sum) + rest);
}

EXPORT float paceline_probability(const float *logits, int count, int place) {
    const int whole = count / LANES * LANES;
    vf tops = vf_set1(-INFINITY);
    for (int j = 0; j < whole; j += LANES) tops = vf_max(vf_load(logits + j), tops);
    float most = vf_top(tops);
    for (int j = whole; j < count; j++) most = logits[j] > most ? logits[j] : most;
    return expf(logits[place] - most - log_mass(logits, count, most));
}

/* ---- filters ---- */

/* Approximate the smallest logit that min-p, top-k and top-p keep; -INFINITY: they keep all.

   A histogram counts outputs by their distance below the best, in steps of 1 / FILTER_STEPS nat; a step is kept or
   dropped as a whole. A draft's filters need not be exact. Outputs more than FILTER_NATS below the best have a mass
   that is too small to count. */
static float filter_floor(const float *logits, int vocab, float best, float inverse_temperature, float min_p,
                          float top_p, int top_k) {
    int32_t counts[FILTER_NATS * FILTER_STEPS] = {0};
    const float lowest = best - FILTER_NATS / inverse_temperature;
    int last = FILTER_NATS * FILTER_STEPS - 1, whole = vocab / LANES * LANES;
    for (int j = 0; j < vocab; j++) {
        if (j < whole && j % LANES == 0 && !vf_ge(vf_load(logits + j), vf_set1(lowest))) j += LANES - 1;
        else if (logits[j] > lowest) {
            const int step = (int)((best - logits[j]) * inverse_temperature * FILTER_STEPS);
            counts[step < last ? step : last]++;
        }
    }
    if (min_p > 0.0f && -logf(min_p) * FILTER_STEPS < (float)last) last = (int)(-logf(min_p) * FILTER_STEPS);
    for (int step = 0, seen = 0; top_k && step < last; step++)
        if ((seen += counts[step]) >= top_k) last = step;
    float total = 0.0f, mass = 0.0f;
    for (int step = 0; step <= last; step++) total += (float)counts[step] * expf(-((float)step + 0.5f) / FILTER_STEPS);
    for (int step = 0; step < last; step++)
        if ((mass += (float)counts[step] * expf(-((float)step + 0.5f) / FILTER_STEPS)) >= top_p * total) last = step;
    if (last == FILTER_NATS * FILTER_STEPS - 1) return -INFINITY;
    return best - (float)(last + 1) / FILTER_STEPS / inverse_temperature;
}

/* Number of tokens to find: at least two, because the acceptance of the first depends on the second. */
static int wanted_tops(const order *o) { return o->width > 1 ? o->width : 2; }

/* Pick the best noisy outputs among all whose logits are above the floor. */
static void pick_above(const order *o, const outputs *of, float floor, float inverse_temperature, const uint32_t *keys,
                       best *tops) {
    float values[FILTERED_AT_ONCE];
    int32_t tokens[FILTERED_AT_ONCE], places[FILTERED_AT_ONCE];
    for (int j = 0, n = 0; j < of->count; j++) {
        if (of->logits[j] > floor) values[n] = of->logits[j], tokens[n] = of->ids[j], places[n++] = j;
        if (n == FILTERED_AT_ONCE || (n && j + 1 == of->count)) {
            best found[WIDTH_MAX];
            clear_tops(found, wanted_tops(o));
            pick_several(values, inverse_temperature, keys, tokens, n, found, wanted_tops(o));
            for (int i = 0; i < wanted_tops(o) && found[i].index != NOTHING; i++)
                insert_top(tops, wanted_tops(o), (best){found[i].value, places[found[i].index]});
            n = 0;
        }
    }
}

/* ---- candidates ---- */

static void find_noisy(const drafting *d, int row, const outputs *of, float most, best *tops) {
    const order *o = d->o;
    const int s = d->owners[row], filters = o->min_p[s] > 0.0f || o->top_p[s] < 1.0f || o->top_k[s] > 0;
    const float factor = d->inverse_temperature[row];
    const float floor = filters ? filter_floor(of->logits, of->count, most, o->inverse_temperature[s], o->min_p[s],
                                               o->top_p[s], o->top_k[s])
                                : -INFINITY;
    if (floor > -INFINITY) pick_above(o, of, floor, factor, d->keys[row], tops);
    else pick_several(of->logits, factor, d->keys[row], of->ids, of->count, tops, wanted_tops(o));
}

static void find_best(const float *logits, int vocab, best *tops, int width) {
    for (int j = 0; j < vocab; j += LANES) {
        if (j + LANES <= vocab && !vf_ge(vf_load(logits + j), vf_set1(tops[width - 1].value))) continue;
        for (int i = j; i < vocab && i < j + LANES; i++) insert_top(tops, width, (best){logits[i], i});
    }
}

/* Copy a row's shortlists into `logits` and `ids`, and count them. */
static int gather(const drafting *d, int row, float *logits, int32_t *ids) {
    const shortlist *lists = d->p->screen.lists;
    int count = 0;
    for (const shortlist *l = &lists[row * SLICES]; l < &lists[(row + 1) * SLICES]; l++)
        for (int i = 0; i < l->count; i++) logits[count] = l->logits[i], ids[count++] = d->o->ids[l->places[i]];
    return count;
}

static float highest(const outputs *of) {
    float most = -INFINITY;
    for (int i = 0; i < of->count; i++) most = of->logits[i] > most ? of->logits[i] : most;
    return most;
}

void find_candidates(const drafting *d, int row) {
    const order *o = d->o;
    float logits[SLICES * SHORTLIST];
    int32_t ids[SLICES * SHORTLIST];
    outputs of = {d->now->logits + (int64_t)row * o->vocab, o->ids, o->vocab};
    if (d->p->screen.available) of = (outputs){logits, ids, gather(d, row, logits, ids)};
    const int noisy = d->inverse_temperature[row] > 0.0f;
    const float most = d->p->screen.available ? highest(&of) : of.logits[d->now->argmax[row]];
    best *tops = d->tops[row];
    float *acceptance = d->acceptance[row];
    clear_tops(tops, wanted_tops(o));
    if (noisy) find_noisy(d, row, &of, most, tops);
    else find_best(of.logits, of.count, tops, wanted_tops(o));
    const float mass = log_mass(of.logits, of.count, most), factor = d->inverse_temperature[row];
    for (int i = 0; i < o->width && tops[i].index != NOTHING; i++)
        acceptance[i] = tree_acceptance(o, i, expf(of.logits[tops[i].index] - most - mass), tops, factor);
    for (int i = 0; i < o->width && tops[i].index != NOTHING; i++) tops[i].index = of.ids[tops[i].index];
    if (tops[0].index == NOTHING) tops[0] = (best){0.0f, o->ids[0]}, acceptance[0] = 0.0f; /* all NaN */
}
