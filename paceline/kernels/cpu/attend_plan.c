/* Before a pass: rows into query blocks, who walks over which chunks, and where the nodes of trees are.

   Made once a pass and used by every layer. Nothing here changes what is computed for a row. */
#include <stdlib.h>

#include "program.h"

#define PARTIAL_FLOATS_MAX (1 << 24)

/* ---- trees ---- */

static int reserve_ints(int32_t **memory, int64_t *capacity, int64_t ints) {
    if (ints <= *capacity) return 1;
    free(*memory);
    *memory = malloc(sizeof(int32_t) * (size_t)ints);
    *capacity = *memory ? ints : 0;
    return *memory != NULL;
}

/* Which of the pages [first, count) is `page`; it becomes the last where it is none of them. */
static int page_among(int32_t *pages, int first, int *count, int page) {
    for (int i = first; i < *count; i++)
        if (pages[i] == page) return i - first;
    pages[*count] = page;
    return (*count)++ - first;
}

/* The pages of a sequence's tails, and where in them each of its rows finds its ancestors; how many there are so far. */
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
        s->tail_scores = aligned_alloc(64, sizeof(float) * QUERY_BLOCK * PAGE * (size_t)t->widest);
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

/* The rows of a sequence in `parts` blocks of about the same size, or in as many as it needs. */
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

/* Chunks that the row with the most of them needs. */
static int count_chunks(const batch *b) {
    int chunks = 1;
    for (int row = 0; row < b->rows; row++)
        if (b->positions[row] / CHUNK >= chunks) chunks = b->positions[row] / CHUNK + 1;
    return chunks;
}

/* Whether so few units of about the same size are shared out well. */
static int is_even(int units, int threads) {
    const int turns = (units + threads - 1) / threads;
    return turns * threads * 7 <= units * 8;
}

static int reserve_partials(program *p, int64_t floats) {
    if (floats <= p->plan.partial_floats) return 0;
    free(p->plan.partials);
    p->plan.partials = aligned_alloc(64, (size_t)(floats * 4 + 63) / 64 * 64);
    p->plan.partial_floats = p->plan.partials ? floats : 0;
    return p->plan.partials ? 0 : -1;
}

/* Rows into query blocks, and whether the walk over chunks must be shared out to keep every member busy. A sequence that
   cannot be shared out evenly by its heads is cut in two first: that costs less than to put chunks together again. */
int plan_attention(program *p) {
    if (!plan_trees(p)) return -1;
    const int threads = pool_threads(p->pool), heads = p->shape.kv_heads, wanted = 4 * threads;
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
