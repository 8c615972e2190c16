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

/* Score the keys of one or two pages with queries [count][dim]: out [count][stride]. `fetching`: also prefetch the
   values of these pages and the keys of the next; pages are scattered, so the hardware cannot predict them. */
INLINE void score_pages(const narrow *queries, const int count, const int pages, const score_job *job, int dim,
                        const int fetching, float *out, int stride) {
    const narrow *q[(SCORE_QUERIES + 2) / 3]; /* every third query, so that all pointers fit the registers */
    vf sum[SCORE_PAGES][SCORE_QUERIES];
    for (int i = 0; i < count; i++) {
        q[i / 3] = queries + i / 3 * 3 * dim;
        for (int page = 0; page < pages; page++) sum[page][i] = vf_set1(0.0f);
    }
    for (int d = 0; d < dim; d += 2) {
        vp keys[SCORE_PAGES];
        for (int page = 0; page < pages; page++) {
            if (fetching) {
                prefetch_l2(job->keys[page] + (dim + d) * PAGE);
                prefetch_l2(job->next[page] + d * PAGE);
            }
            keys[page] = vp_load(job->keys[page] + d * PAGE);
        }
        for (int i = 0; i < count; i++) {
            const vp two = vp_set1(q[i / 3] + i % 3 * dim + d);
            for (int page = 0; page < pages; page++) sum[page][i] = vf_dot2(keys[page], two, sum[page][i]);
        }
    }
    for (int page = 0; page < pages; page++)
        for (int i = 0; i < count; i++) vf_store(out + i * stride + page * PAGE, sum[page][i]);
}

#define SCORE_CASE(n)                                                                                                  \
    case n: score_pages(queries, n < SCORE_QUERIES ? n : SCORE_QUERIES, pages, job, dim, fetching, out, stride); break;
INLINE void score_some(const narrow *queries, int count, const int pages, const score_job *job, int dim,
                       const int fetching, float *out, int stride) {
    switch (count) {
        SCORE_CASE(1) SCORE_CASE(2) SCORE_CASE(3) SCORE_CASE(4) SCORE_CASE(5) SCORE_CASE(6)
        SCORE_CASE(7) SCORE_CASE(8) SCORE_CASE(9) SCORE_CASE(10) SCORE_CASE(11) SCORE_CASE(12)
    }
}

static void score(const narrow *queries, int count, const score_job *job, int dim, int fetching, float *out,
                  int stride) {
    if (job->pages == 1) score_some(queries, count, 1, job, dim, 1, out, stride);
    else if (fetching) score_some(queries, count, SCORE_PAGES, job, dim, 1, out, stride);
    else score_some(queries, count, SCORE_PAGES, job, dim, 0, out, stride);
}

/* Bits of the lanes [from, to); none where from >= to. */
static unsigned lanes_between(int from, int to) {
    from = from < 0 ? 0 : from > LANES ? LANES : from;
    to = to < 0 ? 0 : to > LANES ? LANES : to;
    return ((1u << to) - 1) & ~((1u << from) - 1);
}

/* weights[low, high) ← exp(score - maximum), zero outside of [from, to); sum ← sum of the rounded weights */
static void softmax(float *scores, narrow *weights, int low, int high, int from, int to, float *maximum, float *sum) {
    const vf nothing = vf_set1(-INFINITY);
    vf top = nothing, total = vf_set1(0.0f);
    for (int i = low / LANES * LANES; i < high; i += LANES) {
        const vf x = vf_select(lanes_between(from - i, to - i), vf_load(scores + i), nothing);
        vf_store(scores + i, x);
        top = vf_max(top, x);
    }
    *maximum = vf_top(top);
    for (int i = low / LANES * LANES; i < high; i += LANES) {
        const vf e = vf_exp(vf_sub(vf_load(scores + i), vf_set1(*maximum))); /* without any key: exp(NaN) = 0 */
        total = vf_add(total, vf_narrow(weights + i, e));
    }
    *sum = vf_sum(total);
}

/* out ← out + Σ weight * value over the pairs of some runs, in order, for `vectors` × 16 dimensions */
INLINE void weigh(const narrow *weights, const int queries, const int vectors, const value_run *runs, int count,
                  int dim, int d, float *out) {
    vf sum[VALUE_QUERIES][4];
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_load(out + i * (dim + 2) + d + j * LANES);
    for (const value_run *r = runs; r < runs + count; r++) {
        const uint16_t *value = r->values + 2 * d;
        const narrow *weight = weights + r->key, *end = weight + 2 * r->pairs;
        for (; weight < end; weight += 2, value += 2 * dim) {
            for (int j = 0; j < vectors; j++) {
                const vp v = vp_load(value + 2 * j * LANES);
                for (int i = 0; i < queries; i++) sum[i][j] = vf_dot2(v, vp_set1(weight + i * CHUNK), sum[i][j]);
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int j = 0; j < vectors; j++) vf_store(out + i * (dim + 2) + d + j * LANES, sum[i][j]);
}

#define WEIGH_CASE(n)                                                                                                  \
    case n:                                                                                                            \
        for (; d + 64 <= dim; d += 64) weigh(w, n < VALUE_QUERIES ? n : VALUE_QUERIES, 4, runs, count, dim, d, out);   \
        for (; d < dim; d += LANES) weigh(w, n < VALUE_QUERIES ? n : VALUE_QUERIES, 1, runs, count, dim, d, out);      \
        break;
static void weigh_values(const narrow *w, int queries, const value_run *runs, int count, int dim, float *out) {
    int d = 0;
    switch (queries) {
        WEIGH_CASE(1) WEIGH_CASE(2) WEIGH_CASE(3) WEIGH_CASE(4) WEIGH_CASE(5) WEIGH_CASE(6)
    }
}

#endif
