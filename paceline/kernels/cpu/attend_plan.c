/* Plan attention before a pass: cut rows into query blocks, give chunks to threads, and place the nodes of trees.

   A plan is made once a pass and used by every layer. It never changes the result of a row. */
#include "attend_plan.h"

#include <stdlib.h>

#include "program.h"

#define PARTIAL_FLOATS_MAX (1 << 24) /* 64 MiB for the partial results of split walks */
#define UNITS_PER_THREAD 4           /* units of work per thread that keep every thread busy */

/* ---- trees ---- */

static int reserve_ints(int32_t **memory, int64_t *capacity, int64_t ints) {
    if (ints <= *capacity) return 1;
    free(*memory);
    *memory = malloc(sizeof(int32_t) * (size_t)ints);
    *capacity = *memory ? ints : 0;
    return *memory != NULL;
}

/* Index of `page` among the pages [first, count). A page that is not among them is appended. */
static int page_among(int32_t *pages, int first, int *count, int page) {
    for (int i = first; i < *count; i++)
        if (pages[i] == page) return i - first;
    pages[*count] = page;
    return (*count)++ - first;
}

/* Collect the pages of a sequence's nodes, and the places of each row's ancestors in them. Return the number of pages
   of all sequences so far. */
static int plan_tree(const batch *b, tail_plan *t, int s, int count) {
    const int first = count;
    for (int row = b->row_starts[s]; row < b->row_starts[s + 1]; row++)
        for (int i = 0; i <= b->positions[row] - b->bases[s]; i++) {
            const int64_t at = (int64_t)row * b->depth + i;
            t->places[at] = page_among(t->pages, first, &count, b->tails[at] / PAGE) * PAGE + b->tails[at] % PAGE;
        }
    t->widest = count - first > t->widest ? count - first : t->widest;
    return count;
}

static int reserve_tail_scores(program *p) {
    const tail_plan *t = &p->plan.tails;
    for (int i = 0; i < p->shape.threads; i++) {
        scratch *s = &p->scratch[i];
        if (t->widest <= s->tail_pages) continue;
        free(s->tail_scores);
        s->tail_scores = aligned_alloc(CACHE_LINE, sizeof(float) * QUERY_BLOCK * PAGE * (size_t)t->widest);
        s->tail_pages = s->tail_scores ? t->widest : 0;
        if (!s->tail_scores) return 0;
    }
    return 1;
}

static int plan_trees(program *p) {
    const batch *b = p->batch;
    tail_plan *t = &p->plan.tails;
    const int64_t places = (int64_t)b->rows * b->depth;
    t->widest = 0;
    if (!b->tails) return 1;
    if (!reserve_ints(&t->memory, &t->capacity, 2 * places + b->sequences + 1)) return 0;
    t->places = t->memory, t->pages = t->places + places, t->starts = t->pages + places;
    t->starts[0] = 0;
    for (int s = 0; s < b->sequences; s++) t->starts[s + 1] = plan_tree(b, t, s, t->starts[s]);
    return reserve_tail_scores(p);
}

/* ---- blocks and splits ---- */

/* Cut the rows of a sequence into `parts` blocks of about the same size, or more where a block has no room. */
static void cut_rows(program *p, int s, int parts) {
    const int first = p->batch->row_starts[s], rows = p->batch->row_starts[s + 1] - first;
    const int most = QUERY_BLOCK / (p->shape.heads / p->shape.kv_heads), least = (rows + most - 1) / most;
    parts = parts < least ? least : parts < rows ? parts : rows;
    for (int i = 0; i < parts; i++) {
        const int begin = (int)((int64_t)rows * i / parts), end = (int)((int64_t)rows * (i + 1) / parts);
        p->plan.blocks[p->plan.block_count++] = (query_block){s, first + begin, end - begin};
    }
}

static void make_blocks(program *p, int parts) {
    p->plan.block_count = 0;
    for (int s = 0; s < p->batch->sequences; s++) cut_rows(p, s, parts);
}

/* Count the chunks of the row with the longest context. */
static int count_chunks(const batch *b) {
    int chunks = 1;
    const int32_t *lasts = b->lasts ? b->lasts : b->positions;
    for (int row = 0; row < b->rows; row++)
        if (lasts[row] / CHUNK >= chunks) chunks = lasts[row] / CHUNK + 1;
    return chunks;
}

/* Whether units of about the same size keep all threads busy for at least 7/8 of the time. */
static int is_even(int units, int threads) {
    const int turns = (units + threads - 1) / threads;
    return turns * threads * 7 <= units * 8;
}

static int reserve_partials(program *p, int64_t floats) {
    if (floats <= p->plan.partial_floats) return 0;
    free(p->plan.partials);
    p->plan.partials = aligned_alloc(CACHE_LINE, (size_t)(floats * 4 + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    p->plan.partial_floats = p->plan.partials ? floats : 0;
    return p->plan.partials ? 0 : -1;
}

/* Work is divided in three steps, each only if the one before does not keep all threads busy: by query blocks and KV
   heads; then by cutting each sequence's rows in two; then by splitting chunks among threads. Cutting rows costs less
   than folding the chunks of several threads. */
int plan_attention(program *p) {
    if (!plan_trees(p)) return -1;
    const int threads = pool_threads(p->pool), heads = p->shape.kv_heads, wanted = UNITS_PER_THREAD * threads;
    p->plan.chunks = count_chunks(p->batch);
    p->plan.splits = 1;
    make_blocks(p, 1);
    if (threads == 1 || p->plan.block_count == 0 || p->plan.block_count * heads >= wanted) return 0;
    if (!is_even(p->plan.block_count * heads, threads)) make_blocks(p, 2);
    const int units = p->plan.block_count * heads;
    const int64_t floats = (int64_t)units * p->plan.chunks * QUERY_BLOCK * (p->shape.head_dim + 2);
    if (units >= wanted || is_even(units, threads) || floats > PARTIAL_FLOATS_MAX) return 0;
    const int splits = (wanted + units - 1) / units;
    p->plan.splits = splits < p->plan.chunks ? splits : p->plan.chunks;
    return p->plan.splits > 1 ? reserve_partials(p, floats) : 0;
}
