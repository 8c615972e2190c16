/* The arithmetic of attention on one chunk of keys: scores, their softmax, weighted values.

   The result of a query never depends on the queries beside it, nor the score of a key on the keys beside it. A score
   adds over pairs of dimensions in order, a weighted value over pairs of keys in order. A key of a pair that the query
   does not attend to has weight zero, and adds nothing. */
#ifndef PACELINE_ATTEND_H
#define PACELINE_ATTEND_H

#include <math.h>

#include "program.h"
#include "vmath.h"

typedef struct {
    const uint16_t *keys[2]; /* pages to score */
    const uint16_t *next[2]; /* pages to score after them */
    int pages;               /* 1 or 2 */
} score_job;

/* Adjacent values of `pairs` pairs of keys; the first is the value of key `key` of the chunk. */
typedef struct {
    const uint16_t *values;
    int key;
    int pairs;
} value_run;

/* Add one step to a tile of sums, [queries][vectors]: the products of the pair at left + i * stride with the pairs at
   right[j]. */
INLINE void add_products(vf *sum, const narrow *left, int stride, const uint16_t *const *right, const int queries,
                         const int vectors) {
    UNROLL for (int part = 0; part < PAIR_PARTS; part++) {
        vp pairs[VALUE_VECTORS > SCORE_PAGES ? VALUE_VECTORS : SCORE_PAGES];
        UNROLL for (int j = 0; j < vectors; j++) pairs[j] = vp_load(right[j], part);
        UNROLL for (int i = 0; i < queries; i++) {
            const vp one = vp_set1(left + i * stride, part);
            vf *row = sum + i * vectors;
            UNROLL for (int j = 0; j < vectors; j++) row[j] = vf_dot(pairs[j], one, row[j]);
        }
    }
}

/* Score the keys of one or two pages with queries [count][dim]: out [count][stride]. `fetching`: also prefetch the
   values of these pages and the keys of the next; pages are scattered, so the hardware cannot predict them. */
INLINE void score_pages(const narrow *queries, const int count, const int pages, const score_job *job, int dim,
                        const int fetching, float *out, int stride) {
    vf sum[SCORE_QUERIES * SCORE_PAGES];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int page = 0; page < pages; page++) sum[i * pages + page] = vf_set1(0.0f);
    for (int d = 0; d < dim; d += 2) {
        const uint16_t *keys[SCORE_PAGES];
        UNROLL for (int page = 0; page < pages; page++) {
            keys[page] = job->keys[page] + d * PAGE;
            if (fetching) {
                prefetch_l2(keys[page] + dim * PAGE);
                prefetch_l2(job->next[page] + d * PAGE);
            }
        }
        add_products(sum, queries + d, dim, keys, count, pages);
    }
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int page = 0; page < pages; page++) vf_store(out + i * stride + page * PAGE, sum[i * pages + page]);
}

#define SCORE_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        if (n <= SCORE_QUERIES) score_pages(queries, n, pages, job, dim, fetching, out, stride);                       \
        break;
INLINE void score_some(const narrow *queries, int count, const int pages, const score_job *job, int dim,
                       const int fetching, float *out, int stride) {
    switch (count) {
        SCORE_CASE(1) SCORE_CASE(2) SCORE_CASE(3) SCORE_CASE(4) SCORE_CASE(5) SCORE_CASE(6)
        SCORE_CASE(7) SCORE_CASE(8) SCORE_CASE(9) SCORE_CASE(10) SCORE_CASE(11) SCORE_CASE(12)
    }
}

static void score(const narrow *queries, int count, const score_job *job, int dim, int fetching, float *out,
                  int stride) {
    if (job->pages < SCORE_PAGES) score_some(queries, count, 1, job, dim, 1, out, stride);
    else if (fetching) score_some(queries, count, SCORE_PAGES, job, dim, 1, out, stride);
    else score_some(queries, count, SCORE_PAGES, job, dim, 0, out, stride);
}

/* ---- softmax ---- */

/* Hide the scores of [low, high) that are outside of [from, to). `low` and `high` are multiples of LANES. */
static void hide_scores(float *scores, int low, int high, int from, int to) {
    for (int key = low; key < from && key < high; key++) scores[key] = -INFINITY;
    for (int key = to > low ? to : low; key < high; key++) scores[key] = -INFINITY;
}

static float highest_score(const float *scores, int low, int high) {
    vf top = vf_load(scores + low);
    for (int key = low + LANES; key < high; key += LANES) top = vf_max(top, vf_load(scores + key));
    return vf_top(top);
}

/* weights ← exp(scores - maximum), rounded; return their sum. Without any key the maximum is -∞: exp(NaN) = 0. */
static float weigh_scores(const float *scores, narrow *weights, int low, int high, float maximum) {
    const vf top = vf_set1(maximum);
    vf total = vf_set1(0.0f);
    for (int key = low; key < high; key += LANES) {
        const vf weight = vf_exp_negative(vf_sub(vf_load(scores + key), top));
        total = vf_add(total, vf_narrow(weights + key, weight));
    }
    return vf_sum(total);
}

/* ---- values ---- */

/* out ← out + Σ weight * value over the pairs of some runs, in order, for `vectors` × 16 dimensions from d on */
INLINE void weigh(const narrow *weights, const int queries, const int vectors, const value_run *runs, int count,
                  int dim, int d, float *out) {
    vf sum[VALUE_QUERIES * VALUE_VECTORS];
    UNROLL for (int i = 0; i < queries; i++)
        UNROLL for (int j = 0; j < vectors; j++) sum[i * vectors + j] = vf_load(out + i * dim + d + j * LANES);
    for (const value_run *r = runs; r < runs + count; r++) {
        const uint16_t *value = r->values + 2 * d;
        const narrow *weight = weights + r->key, *end = weight + 2 * r->pairs;
        for (; weight < end; weight += 2, value += 2 * dim) {
            const uint16_t *values[VALUE_VECTORS];
            UNROLL for (int j = 0; j < vectors; j++) values[j] = value + 2 * j * LANES;
            add_products(sum, weight, CHUNK, values, queries, vectors);
        }
    }
    UNROLL for (int i = 0; i < queries; i++)
        UNROLL for (int j = 0; j < vectors; j++) vf_store(out + i * dim + d + j * LANES, sum[i * vectors + j]);
}

#define WEIGH_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        for (; n <= VALUE_QUERIES && d + VALUE_VECTORS * LANES <= dim; d += VALUE_VECTORS * LANES)                     \
            weigh(w, n, VALUE_VECTORS, runs, count, dim, d, out);                                                      \
        for (; n <= VALUE_QUERIES && d < dim; d += LANES) weigh(w, n, 1, runs, count, dim, d, out);                    \
        break;
static void weigh_values(const narrow *w, int queries, const value_run *runs, int count, int dim, float *out) {
    int d = 0;
    switch (queries) {
        WEIGH_CASE(1) WEIGH_CASE(2) WEIGH_CASE(3) WEIGH_CASE(4) WEIGH_CASE(5) WEIGH_CASE(6)
    }
}

#endif
