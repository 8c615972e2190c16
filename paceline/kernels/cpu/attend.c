/* Attention over pages.

   The keys of a row are taken in chunks of 128 positions that begin at multiples of 128. Each chunk gives a maximum,
   a sum and a weighted value, and these are folded from the lowest chunk to the highest. So a row's result depends on
   its position and keys alone: not on the rows beside it, not on who computed which chunk, and not on whether its
   ancestors were found through the page table or through `tails`. */
#include <math.h>
#include <stdlib.h>

#include "program.h"
#include "vmath.h"

#define PARTIAL_FLOATS_MAX (1 << 24)

typedef struct { /* what one unit of work looks at */
    program *p;
    const operation *o;
    scratch *s;
    query_block block;
    int index, head, group; /* of the block; kv head; queries a row */
    int low, high;          /* chunks that any row of the block needs: low … high-1 */
} walk;

typedef struct { /* keys of one chunk as a row sees them */
    const uint16_t *keys[CHUNK_PAGES], *values[CHUNK_PAGES];
    const uint16_t *ahead[CHUNK_PAGES]; /* what the next unit of work will probably begin with: keys, then values */
} chunk_pages;

static int first_key(int position, int window) { return window && position >= window ? position - window + 1 : 0; }

/* ---- one chunk ---- */

typedef struct {
    const uint16_t *keys[2];  /* pages to score; the second is the first where there is none */
    const uint16_t *ahead[2]; /* to be fetched meanwhile: pages lie apart, so the hardware cannot guess them */
} score_job;

/* Scores of 16 or 32 keys: out [queries][CHUNK]. */
INLINE void score_pages(const float *q, const int queries, const score_job *job, int dim, float *out) {
    const uint16_t *k = job->keys[0], *k2 = job->keys[1];
    vf a[SCORE_QUERIES], b[SCORE_QUERIES];
    for (int i = 0; i < queries; i++) a[i] = b[i] = vf_set1(0.0f);
    for (int d = 0; d < dim; d++, q += SCORE_QUERIES) {
        if (d % 2 == 0)
            for (int i = 0; i < SCORE_PAGES; i++) {
                prefetch_far(job->ahead[i] + d * PAGE);
                prefetch_far(job->ahead[i] + (dim + d) * PAGE);
            }
        const vf x = vf_load_half(k + d * PAGE);
        for (int i = 0; i < queries; i++) a[i] = vf_fma(vf_set1(q[i]), x, a[i]);
#if SCORE_PAGES == 2
        const vf y = vf_load_half(k2 + d * PAGE);
        for (int i = 0; i < queries; i++) b[i] = vf_fma(vf_set1(q[i]), y, b[i]);
#endif
    }
    for (int i = 0; i < queries; i++) {
        vf_store(out + i * CHUNK, a[i]);
        if (SCORE_PAGES == 2 && k2 != k) vf_store(out + i * CHUNK + PAGE, b[i]);
    }
}

#define SCORE_CASE(n) case n: score_pages(q, n < SCORE_QUERIES ? n : SCORE_QUERIES, job, dim, out); break;
static void score(const float *q, int queries, const score_job *job, int dim, float *out) {
    switch (queries) {
        SCORE_CASE(1) SCORE_CASE(2) SCORE_CASE(3) SCORE_CASE(4) SCORE_CASE(5) SCORE_CASE(6) SCORE_CASE(7) SCORE_CASE(8)
    }
}

/* The lanes [from, to) as bits; none where from >= to. */
static unsigned lanes_between(int from, int to) {
    from = from < 0 ? 0 : from > LANES ? LANES : from;
    to = to < 0 ? 0 : to > LANES ? LANES : to;
    return ((1u << to) - 1) & ~((1u << from) - 1);
}

/* Scores [low, high) to exp(score - maximum), zero outside of [from, to); gives maximum and sum. */
static void soften(float *scores, int low, int high, int from, int to, float *maximum, float *sum) {
    const vf nothing = vf_set1(-INFINITY);
    vf top = nothing, total = vf_set1(0.0f);
    for (int i = low / LANES * LANES; i < high; i += LANES) {
        const vf x = vf_select(lanes_between(from - i, to - i), vf_load(scores + i), nothing);
        vf_store(scores + i, x);
        top = vf_max(top, x);
    }
    *maximum = vf_top(top);
    for (int i = low / LANES * LANES; i < high; i += LANES) {
        const vf e = vf_exp(vf_sub(vf_load(scores + i), vf_set1(*maximum))); /* no key at all: exp(NaN) = 0 */
        vf_store(scores + i, e);
        total = vf_add(total, e);
    }
    *sum = vf_sum(total);
}

/* Σ weight * value over keys [from, to) for `vectors` × 16 dimensions. */
INLINE void weigh(const float *weights, const int queries, const int vectors, const chunk_pages *pages, int from, int to,
                  int dim, int d, float *out) {
    vf sum[VALUE_QUERIES][4];
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_set1(0.0f);
    for (int key = from; key < to; key++) {
        const uint16_t *value = pages->values[key / PAGE] + key % PAGE * dim + d;
        vf v[4];
        for (int j = 0; j < vectors; j++) v[j] = vf_load_half(value + j * LANES);
        for (int i = 0; i < queries; i++) {
            const vf w = vf_set1(weights[i * CHUNK + key]);
            for (int j = 0; j < vectors; j++) sum[i][j] = vf_fma(w, v[j], sum[i][j]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < vectors; j++) vf_store(out + i * (dim + 2) + d + j * LANES, sum[i][j]);
}

#define WEIGH_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        for (; d + 64 <= dim; d += 64) weigh(w, n < VALUE_QUERIES ? n : VALUE_QUERIES, 4, pages, from, to, dim, d, out); \
        for (; d < dim; d += LANES) weigh(w, n < VALUE_QUERIES ? n : VALUE_QUERIES, 1, pages, from, to, dim, d, out);  \
        break;
static void weigh_values(const float *w, int queries, const chunk_pages *pages, int from, int to, int dim, float *out) {
    int d = 0;
    switch (queries) {
        WEIGH_CASE(1) WEIGH_CASE(2) WEIGH_CASE(3) WEIGH_CASE(4) WEIGH_CASE(5) WEIGH_CASE(6)
    }
}

/* Keys [*from, *to) of chunk c that a row attends to, relative to the chunk; none: from >= to. */
static void row_range(const walk *w, int row, int c, int *from, int *to) {
    const int position = w->p->batch->positions[row], first = first_key(position, w->o->window) - c * CHUNK;
    const int last = position + 1 - c * CHUNK;
    *from = first > 0 ? first : 0;
    *to = last < CHUNK ? last : CHUNK;
}

/* The keys [*low, *high) of chunk c that any of the rows attends to. */
static void rows_range(const walk *w, int row, int rows, int c, int *low, int *high) {
    *low = CHUNK, *high = 0;
    for (int r = row; r < row + rows; r++) {
        int from, to;
        row_range(w, w->block.first + r, c, &from, &to);
        if (from >= to) continue;
        *low = from < *low ? from : *low;
        *high = to > *high ? to : *high;
    }
}

static score_job job_at(const chunk_pages *pages, int page, int count) {
    const int second = SCORE_PAGES == 2 && page + 1 < count ? page + 1 : page;
    score_job job = {{pages->keys[page], pages->keys[second]}, {pages->ahead[page], pages->ahead[second]}};
    return job;
}

static void score_chunk(const walk *w, int begin, int end, const chunk_pages *pages, int low, int high) {
    const int dim = w->p->shape.head_dim, count = (high + PAGE - 1) / PAGE;
    for (int page = low / PAGE; page < count; page += SCORE_PAGES) {
        const score_job job = job_at(pages, page, count);
        for (int q = begin, n; q < end; q += n) {
            n = SCORE_QUERIES - q % SCORE_QUERIES < end - q ? SCORE_QUERIES - q % SCORE_QUERIES : end - q;
            score(w->s->queries + q / SCORE_QUERIES * SCORE_QUERIES * dim + q % SCORE_QUERIES, n, &job, dim,
                  w->s->scores + q * CHUNK + page * PAGE);
        }
    }
}

/* Weighted values, maximum and sum of chunk c for rows [row, row + rows) of the block (which see the same pages):
   out [queries of the block][head_dim values, maximum, sum]. */
static void chunk_sums(const walk *w, int row, int rows, int c, const chunk_pages *pages, float *out) {
    const int dim = w->p->shape.head_dim, width = dim + 2, begin = row * w->group, end = begin + rows * w->group;
    float *scores = w->s->scores;
    int low, high, from, to;
    rows_range(w, row, rows, c, &low, &high);
    score_chunk(w, begin, end, pages, low, high);
    for (int q = begin; q < end; q++) {
        row_range(w, w->block.first + q / w->group, c, &from, &to);
        soften(scores + q * CHUNK, low, high, from, to, &out[q * width + dim], &out[q * width + dim + 1]);
    }
    for (int q = begin; q < end; q += VALUE_QUERIES)
        weigh_values(scores + q * CHUNK, end - q < VALUE_QUERIES ? end - q : VALUE_QUERIES, pages, low, high, dim,
                     out + q * width);
}

/* ---- finding the keys of a chunk ---- */

/* Keys of the same chunk for whoever comes after this walk: the next head, or the first of the next block. */
static const uint16_t *successor(const walk *w, int page) {
    const program *p = w->p;
    const int same = w->head + 1 < p->shape.kv_heads, last = w->index + 1 == p->block_count;
    const query_block *next = &p->blocks[same || last ? w->index : w->index + 1];
    const int id = p->batch->page_table[(int64_t)next->sequence * p->batch->table_width + page];
    const int known = id >= 0 && id < p->shape.pages; /* past the end of a sequence ids are arbitrary */
    return keys_of(&p->shape, w->o->layer, known ? id : 0, same ? w->head + 1 : 0);
}

static void shared_pages(const walk *w, int c, chunk_pages *pages) {
    const batch *b = w->p->batch;
    const int32_t *table = b->page_table + (int64_t)w->block.sequence * b->table_width;
    for (int i = 0; i < CHUNK_PAGES && c * CHUNK_PAGES + i < b->table_width; i++) {
        pages->keys[i] = keys_of(&w->p->shape, w->o->layer, table[c * CHUNK_PAGES + i], w->head);
        pages->values[i] = values_of(&w->p->shape, w->o->layer, table[c * CHUNK_PAGES + i], w->head);
        pages->ahead[i] = successor(w, c * CHUNK_PAGES + i);
    }
}

/* Put slot `slot` into place `offset` of a page of one's own. */
static void copy_slot(const walk *w, int slot, uint16_t *keys, uint16_t *values, int offset) {
    const int dim = w->p->shape.head_dim;
    const uint16_t *from = keys_of(&w->p->shape, w->o->layer, slot / PAGE, w->head) + slot % PAGE;
    for (int d = 0; d < dim; d++) keys[d * PAGE + offset] = from[d * PAGE];
    memcpy(values + offset * dim, values_of(&w->p->shape, w->o->layer, slot / PAGE, w->head) + slot % PAGE * dim,
           sizeof(uint16_t) * (size_t)dim);
}

/* Pages of chunk c as `row` sees them: from its base on, its own ancestors in the order of their positions. */
static void tail_pages(const walk *w, int row, int c, chunk_pages *pages) {
    const batch *b = w->p->batch;
    const int base = b->bases[w->block.sequence], position = b->positions[row];
    const int size = w->p->shape.head_dim * PAGE;
    for (int i = 0; i < CHUNK_PAGES; i++) {
        const int first = c * CHUNK + i * PAGE;
        if (first + PAGE <= base || first > position || position < base) continue;
        uint16_t *keys = w->s->keys + i * size, *values = w->s->values + i * size;
        if (first < base) {
            memcpy(keys, pages->keys[i], sizeof(uint16_t) * (size_t)size);
            memcpy(values, pages->values[i], sizeof(uint16_t) * (size_t)size);
        }
        for (int at = first > base ? first : base; at <= position && at < first + PAGE; at++)
            copy_slot(w, b->tails[(int64_t)row * b->depth + at - base], keys, values, at - first);
        pages->keys[i] = keys;
        pages->values[i] = values;
    }
}

/* Whether a row of the block finds keys of chunk c through its tail. */
static int needs_tails(const walk *w, int c) {
    const batch *b = w->p->batch;
    const int base = b->bases[w->block.sequence];
    if (!b->tails || (c + 1) * CHUNK <= base) return 0;
    for (int r = 0; r < w->block.rows; r++)
        if (b->positions[w->block.first + r] >= base) return 1;
    return 0;
}

static void block_chunk(const walk *w, int c, float *out) {
    chunk_pages shared, own;
    shared_pages(w, c, &shared);
    if (!needs_tails(w, c)) {
        chunk_sums(w, 0, w->block.rows, c, &shared, out);
        return;
    }
    for (int r = 0; r < w->block.rows; r++) {
        own = shared;
        tail_pages(w, w->block.first + r, c, &own);
        chunk_sums(w, r, 1, c, &own, out);
    }
}

/* ---- over chunks ---- */

/* state ← state and chunk together, for each query; both [queries][head_dim values, maximum, sum]. */
static void fold(float *state, const float *chunk, int queries, int dim) {
    for (int q = 0; q < queries; q++, state += dim + 2, chunk += dim + 2) {
        if (chunk[dim + 1] == 0.0f) continue;
        if (state[dim + 1] == 0.0f) {
            memcpy(state, chunk, sizeof(float) * (size_t)(dim + 2));
            continue;
        }
        const float top = state[dim] > chunk[dim] ? state[dim] : chunk[dim];
        const vf old = vf_exp(vf_set1(state[dim] - top)), new = vf_exp(vf_set1(chunk[dim] - top));
        float factors[2 * LANES];
        vf_store(factors, old);
        vf_store(factors + LANES, new);
        for (int d = 0; d < dim; d += LANES)
            vf_store(state + d, vf_fma(vf_load(chunk + d), new, vf_mul(vf_load(state + d), old)));
        state[dim] = top;
        state[dim + 1] = state[dim + 1] * factors[0] + chunk[dim + 1] * factors[LANES];
    }
}

static void clear_state(const walk *w) {
    const int dim = w->p->shape.head_dim;
    for (int q = 0; q < w->block.rows * w->group; q++) w->s->state[q * (dim + 2) + dim + 1] = 0.0f;
}

static void emit_state(const walk *w) {
    const int dim = w->p->shape.head_dim;
    for (int q = 0; q < w->block.rows * w->group; q++) {
        const float *state = w->s->state + q * (dim + 2);
        float *out = row_of(w->p, ATTENDED, w->block.first + q / w->group) + (w->head * w->group + q % w->group) * dim;
        const vf sum = vf_set1(state[dim + 1]);
        for (int d = 0; d < dim; d += LANES) vf_store(out + d, vf_div(vf_load(state + d), sum));
    }
}

/* Queries of the block in the order score() walks: [queries / SCORE_QUERIES][head_dim][SCORE_QUERIES]. */
static void load_queries(const walk *w) {
    const int dim = w->p->shape.head_dim;
    for (int q = 0; q < w->block.rows * w->group; q++) {
        const float *x = row_of(w->p, PROJECTED, w->block.first + q / w->group) + (w->head * w->group + q % w->group) * dim;
        float *to = w->s->queries + q / SCORE_QUERIES * SCORE_QUERIES * dim + q % SCORE_QUERIES;
        for (int d = 0; d < dim; d++) to[d * SCORE_QUERIES] = x[d];
    }
}

static float *partial(const walk *w, int chunk) {
    const program *p = w->p;
    const int64_t unit = (int64_t)w->index * p->shape.kv_heads + w->head;
    return p->partials + (unit * p->partial_chunks + chunk - w->low) * QUERY_BLOCK * (p->shape.head_dim + 2);
}

static void whole_walk(const walk *w) {
    clear_state(w);
    for (int c = w->low; c < w->high; c++) {
        block_chunk(w, c, w->s->sums);
        fold(w->s->state, w->s->sums, w->block.rows * w->group, w->p->shape.head_dim);
    }
    emit_state(w);
}

/* Some of the chunks; whoever is the last to finish folds all of them. */
static void split_walk(const walk *w, int split) {
    const program *p = w->p;
    const int chunks = w->high - w->low, first = w->low + chunks * split / p->splits;
    for (int c = first; c < w->low + chunks * (split + 1) / p->splits; c++) block_chunk(w, c, partial(w, c));
    atomic_int *finished = &p->finished[w->index * p->shape.kv_heads + w->head];
    if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) + 1 < p->splits) return;
    atomic_store_explicit(finished, 0, memory_order_relaxed);
    clear_state(w);
    for (int c = w->low; c < w->high; c++) fold(w->s->state, partial(w, c), w->block.rows * w->group, p->shape.head_dim);
    emit_state(w);
}

static walk begin_walk(program *p, const operation *o, scratch *s, int index, int head) {
    walk w = {p, o, s, p->blocks[index], index, head, p->shape.heads / p->shape.kv_heads, INT32_MAX, 0};
    for (int r = w.block.first; r < w.block.first + w.block.rows; r++) {
        const int position = p->batch->positions[r];
        const int low = first_key(position, o->window) / CHUNK, high = position / CHUNK + 1;
        w.low = low < w.low ? low : w.low;
        w.high = high > w.high ? high : w.high;
    }
    load_queries(&w);
    return w;
}

void run_attend(member *self, program *p, const operation *o) {
    const int heads = p->shape.kv_heads;
    work_begin(self, p->block_count * heads * p->splits);
    for (int unit; (unit = work_next(self)) >= 0;) {
        const int split = unit % p->splits, head = unit / p->splits % heads, index = unit / p->splits / heads;
        const walk w = begin_walk(p, o, &p->scratch[self->index], index, head);
        if (p->splits > 1) split_walk(&w, split);
        else whole_walk(&w);
    }
}

/* ---- before a pass ---- */

static int make_blocks(program *p) {
    const batch *b = p->batch;
    const int group = p->shape.heads / p->shape.kv_heads, most = QUERY_BLOCK / group;
    int chunks = 1;
    p->block_count = 0;
    for (int s = 0; s < b->sequences; s++)
        for (int row = b->row_starts[s]; row < b->row_starts[s + 1]; row += most) {
            const int left = b->row_starts[s + 1] - row;
            p->blocks[p->block_count++] = (query_block){s, row, left < most ? left : most};
        }
    for (int row = 0; row < b->rows; row++)
        if (b->positions[row] / CHUNK >= chunks) chunks = b->positions[row] / CHUNK + 1;
    return chunks;
}

static int reserve_partials(program *p, int64_t floats) {
    if (floats <= p->partial_capacity) return 0;
    free(p->partials);
    p->partials = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64);
    p->partial_capacity = p->partials ? floats : 0;
    return p->partials ? 0 : -1;
}

/* Rows into query blocks, and whether the walk over chunks must be shared out to keep every member busy. */
int plan_attention(program *p) {
    p->partial_chunks = make_blocks(p);
    const int units = p->block_count * p->shape.kv_heads, wanted = 4 * pool_threads(p->pool);
    const int64_t floats = (int64_t)units * p->partial_chunks * QUERY_BLOCK * (p->shape.head_dim + 2);
    p->splits = 1;
    if (pool_threads(p->pool) == 1 || units == 0 || units >= wanted || floats > PARTIAL_FLOATS_MAX) return 0;
    const int splits = (wanted + units - 1) / units;
    p->splits = splits < p->partial_chunks ? splits : p->partial_chunks;
    return p->splits > 1 ? reserve_partials(p, floats) : 0;
}
