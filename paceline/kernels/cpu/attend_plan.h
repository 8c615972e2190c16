/* The plan of attention for one pass: which rows walk over the keys together, and which thread takes which chunks. */
#ifndef PACELINE_ATTEND_PLAN_H
#define PACELINE_ATTEND_PLAN_H

#include <stdatomic.h>

#include "abi.h"

/* Rows of one sequence that walk over the keys together. */
typedef struct {
    int32_t sequence;
    int32_t first;
    int32_t rows;
} query_block;

/* Places of the nodes of draft trees in KV memory. */
typedef struct {
    int32_t *pages;  /* pages of a sequence's nodes, each once, sequence after sequence */
    int32_t *starts; /* [sequences + 1] first of each sequence's pages */
    int32_t *places; /* [rows][depth] slots of `tails`, counted within the sequence's pages */
    int32_t widest;  /* most pages of a sequence */
    int32_t *memory; /* allocation of the arrays above */
    int64_t capacity; /* int32 numbers that `memory` has room for */
} tail_plan;

typedef struct {
    query_block *blocks; /* [rows] at most */
    int32_t block_count;
    int32_t splits;        /* threads that share the chunks of a query block; 1: one thread walks over all */
    int32_t chunks;        /* chunks of the row with the longest context */
    float *partials;       /* [blocks][kv_heads][chunks][QUERY_BLOCK * (head_dim + 2)]; used if splits > 1 */
    int64_t partial_floats; /* floats that `partials` has room for */
    atomic_int *finished;  /* [blocks][kv_heads] splits that are done */
    tail_plan tails;
} attend_plan;

/* Plan the pass of p->batch. Non-zero: out of memory. */
int plan_attention(program *p);

#endif
