/* A draft in one call: a head's first pass, then one pass a level over the tokens that are worth going on from.

       root ── the ── cat ── sat        Every row with logits gives its best tokens, with or without noise. A node is
            │     └── dog               believed in as much as its parent times the chance that it is the target's own
            └─ a ──── cat               token. Believed in too little it is left out, and nothing follows it.

   Nodes of a level wait for one pass together. A node's keys and values go behind those of the committed text, in the
   order in which nodes are read; its row sees the text and its own ancestors (`tails`). The first pass is the caller's
   batch, with one logit row a sequence. Where one token follows each (`width` 1) the tree is a chain. */
#include <math.h>
#include <stdlib.h>

#include "program.h"
#include "vmath.h"

#define DEPTH_MAX 16
#define USUAL 0.7f /* the chance that the best of what follows a node is right */

typedef struct {
    float belief;           /* that it and all before it are right */
    int32_t token, parent;  /* parent: a node, -1: the root */
    int32_t depth;          /* from 1 */
    int32_t row;            /* of the last pass over it; -1: it was not read */
    int32_t tail[DEPTH_MAX]; /* slots of its ancestors and of itself, once it is read */
} node;

#define NODES_MAX (BEAM * WIDTH_MAX * DEPTH_MAX)

typedef struct {
    int32_t base, root; /* the first position of a drafted row; the root's row of the first pass */
    int32_t count, fresh, read; /* nodes; the first of the last level; how many were read */
    node nodes[NODES_MAX];
} tree;

typedef struct {
    program *p;
    const order *o;
    const batch *first, *now;
    tree *trees;
    int32_t *owners, *origins; /* [rows with logits] the sequence of each, and its node */
    best (*tops)[WIDTH_MAX];   /* [rows with logits] with the token instead of its place, once they have been looked at */
    float (*chances)[WIDTH_MAX];
    uint32_t (*keys)[2];       /* [rows with logits] of the noise */
    float *warmths;            /* [rows with logits] what logits are multiplied by under it; 0: there is none */
} drafting;

typedef struct { /* the outputs of a row, all of them or those on the shortlists */
    const float *logits;
    const int32_t *ids; /* the target's tokens */
    int count;
} outputs;

/* ---- what may follow a row ---- */

static float squash(float x) { return 1.0f / (1.0f + expf(-x)); }

/* How often the target's own token is the one of this rank, fitted to what was measured (docs/experiments.md). Greedy the
   best is right more often than its probability says, for the target goes for its best one, too. Where both draw with
   the same noise it matters as much how far the best is ahead of the second, noise included, and the others are behind. */
static float chance(int rank, float probability, const best *tops, int drawn) {
    const float ahead = tops[0].value - tops[1].value, behind = tops[0].value - tops[rank].value;
    if (!drawn) return rank ? probability : 2.5f * probability / (1.0f + 1.5f * probability);
    if (rank) return squash(1.06f * sqrtf(probability) - 0.56f * behind - 0.24f * (float)rank - 1.31f);
    return squash(0.83f * sqrtf(probability) + 0.74f * (ahead < 6.0f ? ahead : 6.0f) - 1.25f);
}

/* The logarithm of Σ exp(logit - most), without those that are too small to count. */
static float log_mass(const float *logits, int vocab, float most) {
    const vf top = vf_set1(most), lowest = vf_set1(most - 14.0f);
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

/* Tokens to find: how sure one is of the first depends on the second. */
static int looked_at(const order *o) { return o->width > 1 ? o->width : 2; }

/* The best of those outputs with noise whose logits are above the floor. */
static void pick_above(const order *o, const outputs *of, float floor, float warmth, const uint32_t *keys, best *tops) {
    enum { MANY = 512 };
    float values[MANY];
    int32_t tokens[MANY], places[MANY];
    for (int j = 0, n = 0; j < of->count; j++) {
        if (of->logits[j] > floor) values[n] = of->logits[j], tokens[n] = of->ids[j], places[n++] = j;
        if (n == MANY || (n && j + 1 == of->count)) {
            best found[WIDTH_MAX];
            clear_tops(found, looked_at(o));
            pick_several(values, warmth, keys, tokens, n, found, looked_at(o));
            for (int i = 0; i < looked_at(o) && found[i].index != INT32_MAX; i++)
                insert_top(tops, looked_at(o), (best){found[i].value, places[found[i].index]});
            n = 0;
        }
    }
}

static void find_noisy(const drafting *d, int row, const outputs *of, float most, best *tops) {
    const order *o = d->o;
    const int s = d->owners[row], filters = o->min_p[s] > 0.0f || o->top_p[s] < 1.0f || o->top_k[s] > 0;
    const float floor = filters ? floor_of(of->logits, of->count, most, o->inverse_temperature[s], o->min_p[s],
                                           o->top_p[s], o->top_k[s])
                                : -INFINITY;
    if (floor > -INFINITY) pick_above(o, of, floor, d->warmths[row], d->keys[row], tops);
    else pick_several(of->logits, d->warmths[row], d->keys[row], of->ids, of->count, tops, looked_at(o));
}

static void find_best(const float *logits, int vocab, best *tops, int width) {
    for (int j = 0; j < vocab; j += LANES) {
        if (j + LANES <= vocab && !vf_ge(vf_load(logits + j), vf_set1(tops[width - 1].value))) continue;
        for (int i = j; i < vocab && i < j + LANES; i++) insert_top(tops, width, (best){logits[i], i});
    }
}

/* What is on the shortlists of a row, into `logits` and `ids`. */
static int gather(const drafting *d, int row, float *logits, int32_t *ids) {
    int count = 0;
    for (const shortlist *l = &d->p->shortlists[row * SLICES]; l < &d->p->shortlists[(row + 1) * SLICES]; l++)
        for (int i = 0; i < l->count; i++) logits[count] = l->logits[i], ids[count++] = d->o->ids[l->places[i]];
    return count;
}

static float most_of(const outputs *of) {
    float most = -INFINITY;
    for (int i = 0; i < of->count; i++) most = of->logits[i] > most ? of->logits[i] : most;
    return most;
}

/* What may follow a row, the best first, and how likely each is the target's own. */
static void look_at(const drafting *d, int row) {
    const order *o = d->o;
    float logits[SLICES * SHORTLIST];
    int32_t ids[SLICES * SHORTLIST];
    outputs of = {d->now->logits + (int64_t)row * o->vocab, o->ids, o->vocab};
    if (d->p->refines) of = (outputs){logits, ids, gather(d, row, logits, ids)};
    const int noisy = d->warmths[row] > 0.0f;
    const float most = d->p->refines ? most_of(&of) : of.logits[d->now->argmax[row]];
    best *tops = d->tops[row];
    clear_tops(tops, looked_at(o));
    if (noisy) find_noisy(d, row, &of, most, tops);
    else find_best(of.logits, of.count, tops, looked_at(o));
    const float mass = log_mass(of.logits, of.count, most);
    for (int i = 0; i < o->width && tops[i].index != INT32_MAX; i++)
        d->chances[row][i] = chance(i, expf(of.logits[tops[i].index] - most - mass), tops, noisy);
    for (int i = 0; i < o->width && tops[i].index != INT32_MAX; i++) tops[i].index = of.ids[tops[i].index];
    if (tops[0].index == INT32_MAX) tops[0] = (best){0.0f, o->ids[0]}, d->chances[row][0] = 0.0f; /* nothing but NaN */
}

static void look_at_all(member *self, void *argument) {
    const drafting *d = argument;
    work_begin(self, d->now->outs);
    for (int row; (row = work_next(self)) >= 0;) look_at(d, row);
    work_end(self);
}

/* ---- growing ---- */

/* How many nodes are believed in at least as much. */
static int count_above(const tree *t, float belief) {
    int count = 0;
    for (int i = 0; i < t->count; i++) count += t->nodes[i].belief >= belief;
    return count;
}

static void add_nodes(const drafting *d, int row) {
    const int s = d->owners[row], at = d->origins[row];
    tree *t = &d->trees[s];
    const node none = {.belief = 1.0f, .parent = -1}, *above = at < 0 ? &none : &t->nodes[at];
    for (int i = 0; i < d->o->width && d->tops[row][i].index != INT32_MAX; i++) {
        const float product = above->belief * d->chances[row][i], belief = product >= 0.0f ? product : 0.0f; /* no NaN */
        if (t->count && (belief < d->o->min_confidence[s] || count_above(t, belief) >= d->o->limits[s])) continue;
        t->nodes[t->count++] = (node){belief, d->tops[row][i].index, at, above->depth + 1, -1, {0}};
    }
}

static void grow(const drafting *d) {
    for (int s = 0; s < d->first->sequences; s++) d->trees[s].fresh = d->trees[s].count;
    if (d->now->outs == 1) look_at(d, 0);
    else pool_run(d->p->pool, look_at_all, (void *)d);
    for (int row = 0; row < d->now->outs; row++) add_nodes(d, row);
}

/* How many nodes are believed in more; among equals the earlier. */
static int rank_of(const tree *t, int at) {
    int rank = 0;
    for (int i = 0; i < t->count; i++)
        rank += t->nodes[i].belief > t->nodes[at].belief || (t->nodes[i].belief == t->nodes[at].belief && i < at);
    return rank;
}

/* The same once the better ones of the last level have been read, if what follows them is about as likely as usual. */
static int expected_rank(const tree *t, int at) {
    int rank = rank_of(t, at);
    for (int i = t->fresh; i < t->count; i++)
        if (t->nodes[i].belief > t->nodes[at].belief)
            rank += (int)(logf(t->nodes[i].belief / t->nodes[at].belief) / -logf(USUAL));
    return rank;
}

/* The nodes of the last level to read next, the most likely first: those after which there is room for more. */
static int choose(const drafting *d, int s, int32_t *chosen) {
    tree *t = &d->trees[s];
    const int limit = d->o->limits[s], room = limit - 1 - t->read;
    int n = 0;
    float together = 0.0f;
    while (n < BEAM && n < room) {
        int most = -1;
        for (int i = t->fresh; i < t->count; i++) {
            const int taken = t->nodes[i].row >= 0;
            if (!taken && (most < 0 || t->nodes[i].belief > t->nodes[most].belief)) most = i;
        }
        if (most < 0 || t->nodes[most].depth == DEPTH_MAX || expected_rank(t, most) + 1 >= limit) break;
        t->nodes[most].row = n;
        together += t->nodes[most].belief;
        chosen[n++] = most;
    }
    return together >= d->o->min_level_confidence[s] ? n : 0;
}

typedef struct { /* memory for the batch of a level */
    int32_t *tokens, *positions, *slots, *starts, *bases, *rows, *carry, *tails, *table;
} level;

/* A node becomes a row: its slot is the next behind the text. */
static void put_row(const drafting *d, const level *l, int s, int at, int row, int carry) {
    tree *t = &d->trees[s];
    node *n = &t->nodes[at];
    const int width = d->first->table_width, place = t->base + t->read++;
    const int32_t *pages = d->first->page_table + (int64_t)s * width;
    if (n->parent >= 0) memcpy(n->tail, t->nodes[n->parent].tail, sizeof n->tail);
    n->tail[n->depth - 1] = place / PAGE < width ? pages[place / PAGE] * PAGE + place % PAGE : -1;
    n->row = row;
    l->tokens[row] = n->token;
    l->positions[row] = t->base + n->depth - 1;
    l->slots[row] = n->tail[n->depth - 1];
    l->rows[row] = row;
    l->carry[row] = carry;
    memcpy(l->tails + (int64_t)row * DEPTH_MAX, n->tail, sizeof n->tail);
}

/* The next pass: the chosen nodes of each sequence that goes on. */
static void plan_level(const drafting *d, batch *next, const level *l) {
    const int width = d->first->table_width;
    int rows = 0, going = 0;
    for (int s = 0; s < d->first->sequences; s++) {
        int32_t chosen[BEAM];
        const int count = choose(d, s, chosen);
        tree *t = &d->trees[s];
        if (!count) continue;
        memcpy(l->table + (int64_t)going * width, d->first->page_table + (int64_t)s * width, sizeof(int32_t) * (size_t)width);
        l->starts[going] = rows;
        l->bases[going++] = t->base;
        for (int i = 0; i < count; i++, rows++) {
            const int parent = t->nodes[chosen[i]].parent;
            put_row(d, l, s, chosen[i], rows, parent < 0 ? t->root : t->nodes[parent].row);
            d->owners[rows] = s, d->origins[rows] = chosen[i];
        }
    }
    l->starts[going] = rows;
    *next = (batch){l->tokens, l->positions, l->slots, l->starts, l->bases, l->table, l->rows, l->tails, l->carry,
                    d->first->logits, NULL, d->first->argmax, rows, going, width, rows, DEPTH_MAX};
}

/* ---- the draft ---- */

/* The most likely nodes. A parent is at least as likely as its children, and stands before them. */
static void write_draft(const order *o, int s, const tree *t) {
    int32_t *tokens = o->tokens + (int64_t)s * o->longest, *parents = o->parents + (int64_t)s * o->longest;
    int32_t places[NODES_MAX];
    int count = 0;
    for (int i = 0; i < t->count; i++) {
        places[i] = rank_of(t, i);
        if (places[i] >= o->limits[s]) continue;
        tokens[places[i]] = t->nodes[i].token;
        parents[places[i]] = t->nodes[i].parent < 0 ? -1 : places[t->nodes[i].parent];
        count++;
    }
    o->counts[s] = count;
}

static level carve(int32_t *memory, int64_t sequences) {
    const int64_t rows = sequences * BEAM;
    level l = {.tokens = memory};
    l.positions = l.tokens + rows, l.slots = l.positions + rows, l.rows = l.slots + rows, l.carry = l.rows + rows;
    l.starts = l.carry + rows, l.bases = l.starts + sequences + 1, l.tails = l.bases + sequences;
    l.table = l.tails + rows * DEPTH_MAX;
    return l;
}

/* A pass for the best outputs, under the noise of what is to be drawn from them. */
static int read_level(const drafting *d, const batch *b) {
    const screening s = {d->warmths, &d->keys[0][0], d->o->ids};
    for (int row = 0; row < b->outs; row++) {
        const int owner = d->owners[row], at = d->origins[row];
        const tree *t = &d->trees[owner];
        token_keys(d->keys[row], d->o->seeds[owner], t->base + 1 + (at < 0 ? 0 : t->nodes[at].depth));
        d->warmths[row] = d->o->inverse_temperature[owner];
    }
    if (b == d->first && was_begun(d->p, b, &s)) return FINE;
    d->p->screening = d->p->refines ? &s : NULL;
    const int status = run_pass(d->p, b);
    d->p->screening = NULL;
    return status;
}

/* FINE, or why there cannot be a first pass. */
static int plant(const drafting *d) {
    const batch *first = d->first;
    int status = FINE;
    for (int s = 0; s < first->sequences; s++) {
        tree *t = &d->trees[s];
        const int root = first->logit_rows[s], is_there = root >= 0 && root < first->rows;
        t->root = root, t->base = is_there ? first->positions[root] + 1 : 0, t->count = t->read = 0;
        d->owners[s] = s, d->origins[s] = -1;
        status = is_there ? status : BAD_ROWS;
    }
    return status;
}

static int draft(drafting *d, const level *l) {
    const batch *first = d->first;
    batch next;
    int status = plant(d);
    if (status == FINE) status = read_level(d, first);
    for (d->now = first; status == FINE && d->now->outs; d->now = &next) {
        grow(d);
        plan_level(d, &next, l);
        if (next.outs) status = read_level(d, &next);
    }
    for (int s = 0; s < first->sequences; s++) write_draft(d->o, s, &d->trees[s]);
    return status;
}

/* FINE, or why a pass was not run; then the draft is what was known before. Room for BEAM rows of logits a sequence. */
EXPORT int paceline_draft(program *p, const batch *first, const order *o) {
    const int64_t n = first->sequences, rows = n * BEAM;
    const int64_t whole = 5 * rows + 2 * n + 1 + rows * DEPTH_MAX + n * first->table_width;
    int32_t *memory = malloc(sizeof(int32_t) * (size_t)(whole + 2 * rows));
    tree *trees = malloc(sizeof(tree) * (size_t)n);
    best (*tops)[WIDTH_MAX] = malloc((size_t)rows * (sizeof *tops + sizeof(float[WIDTH_MAX])));
    uint32_t (*keys)[2] = malloc((size_t)rows * (sizeof *keys + sizeof(float)));
    int status = OUT_OF_MEMORY;
    if (memory && trees && tops && keys && reserve_rows(p, first->rows > rows ? first->rows : (int)rows)) {
        drafting d = {p, o, first, first, trees, memory + whole, memory + whole + rows, tops, (float (*)[WIDTH_MAX])(tops + rows),
                      keys, (float *)(keys + rows)};
        const level l = carve(memory, n);
        status = draft(&d, &l);
    }
    free(memory), free(trees), free(tops), free(keys);
    return status;
}
