/* Attention over pages.

   A row's keys are taken in chunks of 128 positions that begin at multiples of 128. Each chunk gives a maximum, a sum
   and a weighted value, and these are folded from the lowest chunk to the highest. So a row's result depends on its
   position and keys alone: not on the rows beside it, not on which thread computed which chunk, and not on whether its
   ancestors were found through the page table or through `tails`. The values of positions 2i and 2i + 1 are added as
   one pair. If the two are not adjacent in memory, they are copied side by side first. The keys of a row end at its own
   position, or at `lasts`, as far as a window reaches: the rows of a drafted block see each other.

   The rows of a tree score the pages of all nodes together. Then each row copies the scores of its own ancestors to
   their positions:

       page table      0 ............... base │            shared by all queries of the block
       nodes' slots                           │ a b c d e   scored for all queries, in any order
       a query's own   0 ............... base │ a c e       in the order of positions */
#include "attend.h"

/* One unit of work: the queries of a block on one KV head, and their walk over the chunks. */
typedef struct {
    program *p;
    const operation *o;
    scratch *s;
    query_block block;
    int index; /* number of the block */
    int head;  /* KV head */
    int group; /* queries of a row: heads that share the KV head */
    int low;   /* first chunk that any row of the block needs */
    int high;  /* end of the chunks that any row needs */
} walk;

/* Keys [from, to) of a chunk that a query attends to; from >= to: none. Keys from `tail` on are found through `tails`,
   earlier ones through the page table. */
typedef struct {
    int from, to, tail;
} reach;

/* Results of the queries of a block: values weighted by exp(score - top), and the sum of the weights. */
typedef struct {
    float *values; /* [QUERY_BLOCK][head_dim] */
    float *tops;   /* [QUERY_BLOCK] highest score, -∞ without any key */
    float *sums;   /* [QUERY_BLOCK] */
} results;

static results results_in(float *memory, int dim) {
    return (results){memory, memory + QUERY_BLOCK * dim, memory + QUERY_BLOCK * (dim + 1)};
}

static int first_key(int position, int window) { return window && position >= window ? position - window + 1 : 0; }

static int even_below(int key) { return key & ~1; }
static int even_above(int key) { return (key + 1) & ~1; }

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

/* ---- one chunk ---- */

static int row_of_query(const walk *w, int q) { return w->block.first + q / w->group; }

/* First position of a tree, relative to chunk c. Positions before it are found through the page table. */
static int base_in(const walk *w, int c) {
    return w->p->batch->tails ? w->p->batch->bases[w->block.sequence] - c * CHUNK : CHUNK;
}

/* The last position that a row attends to. A window reaches as far ahead as back. */
static int last_key(const program *p, const operation *o, int row) {
    const int32_t *lasts = o->column ? NULL : p->batch->lasts;
    const int position = p->batch->positions[row];
    if (!lasts) return position;
    return o->window ? smaller(lasts[row], position + o->window - 1) : lasts[row];
}

static reach reach_of(const walk *w, int row, int c) {
    const int position = w->p->batch->positions[row], first = c * CHUNK;
    const int from = larger(first_key(position, w->o->window) - first, 0);
    const int to = smaller(last_key(w->p, w->o, row) + 1 - first, CHUNK);
    return (reach){from, to, larger(base_in(w, c), from)};
}

/* Find the keys of chunk c that any row of the block attends to. Keys before `tail` are found through the page
   table. */
static reach reach_of_all(const walk *w, int c) {
    reach all = {CHUNK, 0, 0};
    for (int r = 0; r < w->block.rows; r++) {
        const reach one = reach_of(w, w->block.first + r, c);
        if (one.from >= one.to) continue;
        all.from = smaller(all.from, one.from), all.to = larger(all.to, one.to);
    }
    all.tail = smaller(larger(base_in(w, c), 0), all.to);
    return all;
}

/* Divide the queries that are left into turns of about the same size, at most `most` each; return the size of a
   turn. */
static int some_of(int left, int most) {
    const int turns = (left + most - 1) / most;
    return (left + turns - 1) / turns;
}

/* Score one or two pages for all queries of the block: out [queries][stride]. */
static void score_block(const walk *w, const score_job *job, float *out, int stride) {
    const int queries = w->block.rows * w->group, dim = w->p->shape.head_dim;
    for (int q = 0, n; q < queries; q += n) {
        n = some_of(queries - q, SCORE_QUERIES);
        score(w->s->queries + q * dim, n, job, dim, q == 0, out + q * stride, stride);
    }
}

/* Make a job that scores the first SCORE_PAGES of `count` pages and prefetches as many pages after them. */
static score_job job_of(const walk *w, const int32_t *pages, int count) {
    score_job job = {.pages = smaller(count, SCORE_PAGES)};
    for (int i = 0; i < job.pages; i++) {
        job.keys[i] = keys_of(&w->p->shape, w->o->layer, pages[i], w->head);
        job.next[i] = keys_of(&w->p->shape, w->o->layer, pages[smaller(i + SCORE_PAGES, count - 1)], w->head);
    }
    return job;
}

/* The part of the page table that holds chunk c. */
static const int32_t *table_of(const walk *w, int c) {
    const batch *b = w->p->batch;
    return b->page_table + (int64_t)w->block.sequence * b->table_width + c * CHUNK_PAGES;
}

static void score_shared(const walk *w, int c, reach all) {
    const int count = (all.tail + PAGE - 1) / PAGE;
    for (int page = all.from / PAGE; page < count; page += SCORE_PAGES) {
        const score_job job = job_of(w, table_of(w, c) + page, count - page);
        score_block(w, &job, w->s->scores + page * PAGE, CHUNK);
    }
}

/* Score all nodes of the sequence's tree. If the tree begins inside a shared page, that page's scores are copied. */
static void score_tails(const walk *w, int c, reach all) {
    const tail_plan *t = &w->p->plan.tails;
    const int32_t *pages = t->pages + t->starts[w->block.sequence];
    const int count = t->starts[w->block.sequence + 1] - t->starts[w->block.sequence], stride = t->widest * PAGE;
    const int last = all.tail / PAGE;
    const int known = all.from < all.tail && all.tail % PAGE && pages[0] == table_of(w, c)[last];
    for (int q = 0; known && q < w->block.rows * w->group; q++)
        vf_store(w->s->tail_scores + q * stride, vf_load(w->s->scores + q * CHUNK + last * PAGE));
    for (int page = known; page < count; page += SCORE_PAGES) {
        const score_job job = job_of(w, pages + page, count - page);
        score_block(w, &job, w->s->tail_scores + page * PAGE, stride);
    }
}

/* Copy the scores of a query's own ancestors to their positions. */
static void place_tail(const walk *w, int q, int c, reach own) {
    const batch *b = w->p->batch;
    const tail_plan *t = &w->p->plan.tails;
    const int row = row_of_query(w, q);
    const int32_t *places = t->places + (int64_t)row * b->depth + (c * CHUNK - b->bases[w->block.sequence]);
    for (int key = own.tail; key < own.to; key++)
        w->s->scores[q * CHUNK + key] = w->s->tail_scores[q * t->widest * PAGE + places[key]];
}

/* Add the weighted values of keys [from, to), both even, that all rows of the block find through the page table. */
static void weigh_shared(const walk *w, int c, int from, int to, float *out) {
    const program *p = w->p;
    const int32_t *table = table_of(w, c);
    const int queries = w->block.rows * w->group, dim = p->shape.head_dim;
    value_run runs[CHUNK_PAGES];
    int count = 0;
    for (int key = from, next; key < to; key = next) {
        next = smaller((key / PAGE + 1) * PAGE, to);
        const uint16_t *values = values_of(&p->shape, w->o->layer, table[key / PAGE], w->head) + key % PAGE * dim;
        runs[count++] = (value_run){values, key, (next - key) / 2};
    }
    for (int q = 0, n; q < queries; q += n) {
        n = some_of(queries - q, VALUE_QUERIES);
        weigh_values(w->s->weights + q * CHUNK, n, runs, count, dim, out + q * dim);
    }
}

/* Find the value of a key of chunk c: through the page table, or through the row's own `tails`. */
static const uint16_t *value_of(const walk *w, int row, int c, int key) {
    const batch *b = w->p->batch;
    const int step = c * CHUNK + key - b->bases[w->block.sequence];
    const int64_t slot = step < 0 ? (int64_t)table_of(w, c)[key / PAGE] * PAGE + key % PAGE
                                  : b->tails[(int64_t)row * b->depth + step];
    return value_at(&w->p->shape, w->o->layer, slot, w->head);
}

/* Interleave the numbers of two values, as in a page. */
static void gather_pair(uint16_t *restrict out, const uint16_t *even, const uint16_t *odd, int dim) {
    for (int d = 0; d < 2 * dim; d += 2) out[d] = even[d], out[d + 1] = odd[d];
}

/* Add the weighted values of one row's keys [from, to), `from` even. Its ancestors are scattered, so their values are
   copied side by side first. A last key without a partner is paired with itself: the partner's weight is zero. */
static void weigh_tail(const walk *w, int r, int c, int from, int to, float *out) {
    const int dim = w->p->shape.head_dim, row = w->block.first + r;
    uint16_t *pair = w->s->gathered;
    for (int key = from; key < to; key += 2, pair += 2 * dim)
        gather_pair(pair, value_of(w, row, c, key), value_of(w, row, c, smaller(key + 1, to - 1)), dim);
    const value_run all = {w->s->gathered, from, (even_above(to) - from) / 2};
    for (int q = r * w->group, n; from < to && q < (r + 1) * w->group; q += n) {
        n = smaller((r + 1) * w->group - q, VALUE_QUERIES);
        weigh_values(w->s->weights + q * CHUNK, n, &all, 1, dim, out + q * dim);
    }
}

/* Add the weighted values of chunk c: first the pairs that all rows share, then the pairs of each row's own ancestors.
   A pair whose second key is the first key of a tree counts as the row's own. */
static void weigh_all(const walk *w, int c, reach all, float *out) {
    const int trees = all.tail < all.to, from = even_below(all.from), tail = even_below(all.tail);
    weigh_shared(w, c, from, trees ? tail : even_above(all.to), out);
    for (int r = 0; trees && r < w->block.rows; r++) {
        const reach own = reach_of(w, w->block.first + r, c);
        weigh_tail(w, r, c, larger(tail, even_below(own.from)), own.to, out);
    }
}

/* Make weights of the scores of chunk c, and fill in the tops and sums of `out`. All tops come first: the next query
   need not wait until the lanes of a top are compared. */
static void softmax(const walk *w, int c, reach all, results out) {
    const int low = all.from / LANES * LANES, high = (all.to + LANES - 1) / LANES * LANES;
    const int queries = w->block.rows * w->group;
    for (int q = 0; q < queries; q++) {
        const reach own = reach_of(w, row_of_query(w, q), c);
        if (all.tail < all.to) place_tail(w, q, c, own);
        hide_scores(w->s->scores + q * CHUNK, low, high, own.from, own.to);
        out.tops[q] = highest_score(w->s->scores + q * CHUNK, low, high);
    }
    for (int q = 0; q < queries; q++)
        out.sums[q] = weigh_scores(w->s->scores + q * CHUNK, w->s->weights + q * CHUNK, low, high, out.tops[q]);
}

/* Compute chunk c for the block. */
static void block_chunk(const walk *w, int c, results out) {
    const reach all = reach_of_all(w, c);
    score_shared(w, c, all);
    if (all.tail < all.to) score_tails(w, c, all);
    softmax(w, c, all, out);
    memset(out.values, 0, sizeof(float) * (size_t)(w->block.rows * w->group * w->p->shape.head_dim));
    weigh_all(w, c, all, out.values);
}

/* ---- over chunks ---- */

/* state ← state * old + chunk * new. An empty chunk changes no bit, and an empty state becomes the chunk. */
static void fold_values(results state, results chunk, int q, int dim, float old, float new) {
    float *values = state.values + q * dim;
    const float *others = chunk.values + q * dim;
    const vf olds = vf_set1(old), news = vf_set1(new);
    if (chunk.sums[q] == 0.0f) return;
    if (state.sums[q] == 0.0f) {
        memcpy(values, others, sizeof(float) * (size_t)dim);
        return;
    }
    for (int d = 0; d < dim; d += LANES)
        vf_store(values + d, vf_fma(vf_load(others + d), news, vf_mul(vf_load(values + d), olds)));
}

/* Fold a chunk into the state. */
static void fold(results state, results chunk, int queries, int dim) {
    for (int first = 0; first < queries; first += LANES) {
        float factors[2][LANES];
        const vf top = vf_max(vf_load(state.tops + first), vf_load(chunk.tops + first));
        const vf old = vf_exp_negative(vf_sub(vf_load(state.tops + first), top));
        const vf new = vf_exp_negative(vf_sub(vf_load(chunk.tops + first), top));
        vf_store(factors[0], old);
        vf_store(factors[1], new);
        for (int i = 0; i < LANES && first + i < queries; i++)
            fold_values(state, chunk, first + i, dim, factors[0][i], factors[1][i]);
        const vf kept = vf_mul(vf_load(state.sums + first), old), added = vf_mul(vf_load(chunk.sums + first), new);
        vf_store(state.tops + first, top);
        vf_store(state.sums + first, vf_add(kept, added));
    }
}

/* Make the state empty. */
static results clear_state(const walk *w) {
    const results state = results_in(w->s->state, w->p->shape.head_dim);
    for (int q = 0; q < QUERY_BLOCK; q++) state.tops[q] = -INFINITY, state.sums[q] = 0.0f;
    return state;
}

static void emit_state(const walk *w, results state) {
    const int dim = w->p->shape.head_dim;
    for (int q = 0; q < w->block.rows * w->group; q++) {
        const float *values = state.values + q * dim;
        float *out = row_of(w->p, ATTENDED, row_of_query(w, q)) + (w->head * w->group + q % w->group) * dim;
        const vf sum = vf_set1(state.sums[q]);
        for (int d = 0; d < dim; d += LANES) vf_store(out + d, vf_div(vf_load(values + d), sum));
    }
}

static results partial(const walk *w, int chunk) {
    const program *p = w->p;
    const int dim = p->shape.head_dim;
    const int64_t unit = (int64_t)w->index * p->shape.kv_heads + w->head;
    return results_in(p->plan.partials + (unit * p->plan.chunks + chunk - w->low) * QUERY_BLOCK * (dim + 2), dim);
}

static void whole_walk(const walk *w) {
    const int dim = w->p->shape.head_dim;
    const results state = clear_state(w), chunk = results_in(w->s->sums, dim);
    for (int c = w->low; c < w->high; c++) {
        block_chunk(w, c, chunk);
        fold(state, chunk, w->block.rows * w->group, dim);
    }
    emit_state(w, state);
}

/* Walk over the chunks of one split. The split that finishes last folds the chunks of all splits. */
static void split_walk(const walk *w, int split) {
    const program *p = w->p;
    const int chunks = w->high - w->low, first = w->low + chunks * split / p->plan.splits;
    for (int c = first; c < w->low + chunks * (split + 1) / p->plan.splits; c++) block_chunk(w, c, partial(w, c));
    atomic_int *finished = &p->plan.finished[w->index * p->shape.kv_heads + w->head];
    if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) + 1 < p->plan.splits) return;
    atomic_store_explicit(finished, 0, memory_order_relaxed);
    const results state = clear_state(w);
    for (int c = w->low; c < w->high; c++)
        fold(state, partial(w, c), w->block.rows * w->group, p->shape.head_dim);
    emit_state(w, state);
}

static void load_queries(const walk *w) {
    const int numbers = w->group * w->p->shape.head_dim;
    for (int r = 0; r < w->block.rows; r++) {
        const float *row = row_of(w->p, PROJECTED, w->block.first + r) + w->head * numbers;
        for (int i = 0; i < numbers; i += LANES) vf_narrow(w->s->queries + r * numbers + i, vf_load(row + i));
    }
}

static walk begin_walk(program *p, const operation *o, scratch *s, int index, int head) {
    walk w = {p, o, s, p->plan.blocks[index], index, head, p->shape.heads / p->shape.kv_heads, INT32_MAX, 0};
    for (int r = w.block.first; r < w.block.first + w.block.rows; r++) {
        const int position = p->batch->positions[r];
        const int low = first_key(position, o->window) / CHUNK, high = last_key(p, o, r) / CHUNK + 1;
        w.low = low < w.low ? low : w.low;
        w.high = high > w.high ? high : w.high;
    }
    load_queries(&w);
    return w;
}

/* attended ← attention of the projected queries over their pages */
void run_attend(member *self, program *p, const operation *o) {
    const int heads = p->shape.kv_heads, splits = p->plan.splits;
    work_begin(self, p->plan.block_count * heads * splits);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int split = unit % splits, head = unit / splits % heads, index = unit / splits / heads;
        const walk w = begin_walk(p, o, &p->scratch[self->index], index, head);
        if (splits > 1) split_walk(&w, split);
        else whole_walk(&w);
    }
}
