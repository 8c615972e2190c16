/* A draft in one call: the first pass of a head or a model, then one pass for each level of a tree.

       root ── the ── cat ── sat        Every row with logits gives its best tokens, with or without noise. A node's
            │     └── dog               confidence is its parent's times the probability that the target
            └─ a ──── cat               accepts it. A node with too little confidence is left out, and has no children.

   The nodes of a level are read in one pass. A node's keys and values go behind those of the committed text, in the
   order in which nodes are read; its row sees the text and its own ancestors (`tails`). The first pass is the caller's
   batch, with one logit row a sequence. With `width` 1 each node has one child, and the tree is a chain. */
#include "tree.h"

#include <math.h>
#include <stdlib.h>

/* ---- growing ---- */

static void find_all_candidates(member *self, void *argument) {
    const drafting *d = argument;
    work_begin(self, d->now->outs);
    for (int row; (row = work_next(self)) >= 0;) find_candidates(d, row);
    work_end(self);
}

/* Count the nodes with at least this confidence. */
static int count_above(const tree *t, float confidence) {
    int count = 0;
    for (int i = 0; i < t->count; i++) count += t->nodes[i].confidence >= confidence;
    return count;
}

static void add_nodes(const drafting *d, int row) {
    const int s = d->owners[row], at = d->origins[row];
    tree *t = &d->trees[s];
    const node none = {.confidence = 1.0f, .parent = -1}, *above = at < 0 ? &none : &t->nodes[at];
    for (int i = 0; i < d->o->width && d->tops[row][i].index != NOTHING; i++) {
        const float product = above->confidence * d->acceptance[row][i];
        const float confidence = product >= 0.0f ? product : 0.0f; /* no NaN */
        const int is_too_little = confidence < d->o->min_confidence[s] || count_above(t, confidence) >= d->o->limits[s];
        if (t->count && is_too_little) continue;
        t->nodes[t->count++] = (node){confidence, d->tops[row][i].index, at, above->depth + 1, -1, {0}};
    }
}

static void grow(const drafting *d) {
    for (int s = 0; s < d->first->sequences; s++) d->trees[s].fresh = d->trees[s].count;
    if (d->now->outs == 1) find_candidates(d, 0);
    else pool_run(d->p->pool, find_all_candidates, (void *)d);
    for (int row = 0; row < d->now->outs; row++) add_nodes(d, row);
}

/* Count the nodes with more confidence than node `at`, and earlier nodes with equal confidence. */
static int rank_of(const tree *t, int at) {
    const float own = t->nodes[at].confidence;
    int rank = 0;
    for (int i = 0; i < t->count; i++)
        rank += t->nodes[i].confidence > own || (t->nodes[i].confidence == own && i < at);
    return rank;
}

/* Estimate the rank of a node after the better nodes of its level have been read and have got their usual children. */
static int expected_rank(const drafting *d, const tree *t, int at) {
    const float own = t->nodes[at].confidence;
    int rank = rank_of(t, at);
    const float per_child = -logf(d->o->child_acceptance);
    for (int i = t->fresh; i < t->count; i++)
        if (t->nodes[i].confidence > own) {
            const float children = logf(t->nodes[i].confidence / own) / per_child; /* infinite if `own` is 0 */
            rank += children < NODES_MAX ? (int)children : NODES_MAX;
        }
    return rank;
}

/* Expect a node to get a chain of children, and return what the best length gains: their confidence, less the prices of
   their rows, and of their levels after the first. One row may cost much and the next ones little, so a child that does
   not pay alone may pay with its own children. */
static float expected_gain(const drafting *d, int s, int at, int rank) {
    const int last = d->o->longest - 1;
    float confidence = d->trees[s].nodes[at].confidence, gain = 0.0f, most = 0.0f;
    for (int i = 1; i <= d->o->lookahead && rank + i < d->o->limits[s]; i++) {
        const int row = rank + i < last ? rank + i : last;
        confidence *= d->o->child_acceptance;
        gain += confidence - d->o->row_prices[(int64_t)s * (last + 1) + row];
        most = gain > most ? gain : most;
        gain -= d->o->level_prices[s];
    }
    return most;
}

/* Choose the nodes of the last level to read next, the most likely first. A node is read only if its children may still
   be among the best `limit` nodes, and a level only if it is expected to gain its price. */
static int choose(const drafting *d, int s, int32_t *chosen) {
    tree *t = &d->trees[s];
    const int limit = d->o->limits[s], room = limit - 1 - t->read;
    int n = 0;
    float gain = 0.0f;
    while (n < d->o->beam && n < room) {
        int most = -1;
        for (int i = t->fresh; i < t->count; i++) {
            const int taken = t->nodes[i].row >= 0;
            if (!taken && (most < 0 || t->nodes[i].confidence > t->nodes[most].confidence)) most = i;
        }
        const int rank = most < 0 ? limit : expected_rank(d, t, most);
        if (rank + 1 >= limit || t->nodes[most].depth == DEPTH_MAX) break;
        t->nodes[most].row = n;
        gain += expected_gain(d, s, most, rank);
        chosen[n++] = most;
    }
    return gain >= d->o->level_prices[s] ? n : 0;
}

/* ---- the pass of a level ---- */

/* Memory for the batch of a level. */
typedef struct {
    int32_t *tokens, *positions, *slots, *starts, *bases, *rows, *carry, *tails, *table;
} level;

/* Make a node a row of the batch; it takes the next KV slot behind the committed text. */
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

/* Plan the next pass: the chosen nodes of each sequence that goes on. */
static void plan_level(const drafting *d, batch *next, const level *l) {
    const int width = d->first->table_width;
    const size_t table_bytes = sizeof(int32_t) * (size_t)width;
    int rows = 0, going = 0;
    for (int s = 0; s < d->first->sequences; s++) {
        int32_t chosen[BEAM];
        const int count = choose(d, s, chosen);
        tree *t = &d->trees[s];
        if (!count) continue;
        t->passes++;
        memcpy(l->table + (int64_t)going * width, d->first->page_table + (int64_t)s * width, table_bytes);
        l->starts[going] = rows;
        l->bases[going++] = t->base;
        for (int i = 0; i < count; i++, rows++) {
            const int parent = t->nodes[chosen[i]].parent;
            put_row(d, l, s, chosen[i], rows, parent < 0 ? t->root : t->nodes[parent].row);
            d->owners[rows] = s, d->origins[rows] = chosen[i];
        }
    }
    l->starts[going] = rows;
    *next = (batch){.tokens = l->tokens, .positions = l->positions, .slots = l->slots, .row_starts = l->starts,
                    .bases = l->bases, .page_table = l->table, .logit_rows = l->rows, .tails = l->tails,
                    .carry = l->carry, .logits = d->first->logits, .argmax = d->first->argmax, .rows = rows,
                    .sequences = going, .table_width = width, .outs = rows, .depth = DEPTH_MAX};
}

/* Run a pass under the noise of the tokens that follow its rows; it makes shortlists if the head can. */
static int read_level(const drafting *d, const batch *b) {
    const row_noise noise = {d->inverse_temperature, &d->keys[0][0], d->o->ids};
    for (int row = 0; row < b->outs; row++) {
        const int owner = d->owners[row], at = d->origins[row];
        const tree *t = &d->trees[owner];
        token_keys(d->keys[row], d->o->seeds[owner], t->base + d->o->ahead + (at < 0 ? 0 : t->nodes[at].depth));
        d->inverse_temperature[row] = d->o->inverse_temperature[owner];
    }
    if (b == d->first && take_prefetched(d->p, b, &noise)) return FINE;
    d->p->screen.noise = d->p->screen.available ? &noise : NULL;
    const int status = run_pass(d->p, b);
    d->p->screen.noise = NULL;
    return status;
}

/* ---- the draft ---- */

/* Count the nodes to draft: as many of the most likely as gain most, where a node gains its confidence less the price
   of its row. One row may cost much and the next ones little, so a node that does not pay alone may pay with others. */
static int count_paying(const float *prices, const float *confidence, int count) {
    float gain = 0.0f, most = -INFINITY;
    int paying = 0;
    for (int i = 0; i < count; i++)
        if ((gain += confidence[i] - prices[i]) >= most) most = gain, paying = i + 1;
    return paying;
}

/* Write the most likely nodes. A parent is at least as likely as its children, and comes before them. */
static void write_draft(const order *o, int s, const tree *t) {
    int32_t *tokens = o->tokens + (int64_t)s * o->longest, *parents = o->parents + (int64_t)s * o->longest;
    float *confidence = o->confidence + (int64_t)s * o->longest;
    int32_t places[NODES_MAX];
    int count = 0;
    for (int i = 0; i < t->count; i++) {
        places[i] = rank_of(t, i);
        if (places[i] >= o->limits[s]) continue;
        confidence[places[i]] = t->nodes[i].confidence;
        tokens[places[i]] = t->nodes[i].token;
        parents[places[i]] = t->nodes[i].parent < 0 ? -1 : places[t->nodes[i].parent];
        count++;
    }
    o->counts[s] = count_paying(o->row_prices + (int64_t)s * o->longest, confidence, count);
    o->passes[s] = t->passes;
}

/* Start an empty tree for each sequence. BAD_ROWS: a sequence's logit row does not exist. */
static int plant(const drafting *d) {
    const batch *first = d->first;
    int status = FINE;
    for (int s = 0; s < first->sequences; s++) {
        tree *t = &d->trees[s];
        const int root = first->logit_rows[s], is_there = root >= 0 && root < first->rows;
        t->root = root, t->base = is_there ? first->positions[root] + 1 : 0, t->count = t->read = 0;
        t->passes = 1;
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

static level carve(int32_t *memory, int64_t sequences) {
    const int64_t rows = sequences * BEAM;
    level l = {.tokens = memory};
    l.positions = l.tokens + rows, l.slots = l.positions + rows, l.rows = l.slots + rows, l.carry = l.rows + rows;
    l.starts = l.carry + rows, l.bases = l.starts + sequences + 1, l.tails = l.bases + sequences;
    l.table = l.tails + rows * DEPTH_MAX;
    return l;
}

EXPORT int paceline_draft(program *p, const batch *first, const order *o) {
    const int64_t n = first->sequences, rows = n * BEAM;
    const int64_t whole = 5 * rows + 2 * n + 1 + rows * DEPTH_MAX + n * first->table_width; /* int32 of a level */
    int32_t *memory = malloc(sizeof(int32_t) * (size_t)(whole + 2 * rows));
    tree *trees = malloc(sizeof(tree) * (size_t)n);
    best (*tops)[WIDTH_MAX] = malloc((size_t)rows * (sizeof *tops + sizeof(float[WIDTH_MAX])));
    uint32_t (*keys)[2] = malloc((size_t)rows * (sizeof *keys + sizeof(float)));
    int status = OUT_OF_MEMORY;
    if (memory && trees && tops && keys && reserve_rows(p, first->rows > rows ? first->rows : (int)rows)) {
        drafting d = {.p = p, .o = o, .first = first, .now = first, .trees = trees, .tops = tops, .keys = keys};
        d.owners = memory + whole, d.origins = d.owners + rows;
        d.acceptance = (float (*)[WIDTH_MAX])(tops + rows);
        d.inverse_temperature = (float *)(keys + rows);
        const level l = carve(memory, n);
        status = draft(&d, &l);
    }
    free(memory), free(trees), free(tops), free(keys);
    return status;
}
