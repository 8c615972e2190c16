/* A draft in progress: the trees of all sequences, and the pass whose rows add nodes to them. */
#ifndef PACELINE_TREE_H
#define PACELINE_TREE_H

#include "program.h"

#define DEPTH_MAX 16                                /* levels of a tree */
#define NODES_MAX (BEAM * WIDTH_MAX * DEPTH_MAX)

typedef struct {
    float confidence;        /* probability that this node and all its ancestors are accepted */
    int32_t token;
    int32_t parent;          /* a node; -1: the root */
    int32_t depth;           /* from 1 */
    int32_t row;             /* row in the pass that read the node; -1: not read */
    int32_t tail[DEPTH_MAX]; /* KV slots of its ancestors and itself, once it is read */
} node;

typedef struct {
    int32_t base;  /* position of the first drafted row */
    int32_t root;  /* row of the first pass that the tree grows from */
    int32_t count; /* nodes */
    int32_t fresh; /* first node of the last level */
    int32_t read;  /* nodes that have been read */
    int32_t passes; /* passes with rows of this tree */
    node nodes[NODES_MAX];
} tree;

typedef struct {
    program *p;
    const order *o;
    const batch *first; /* the first pass */
    const batch *now;   /* the last pass */
    tree *trees;        /* [sequences] */

    /* Arrays with one element per row with logits of the last pass. */
    int32_t *owners;                 /* sequence of the row */
    int32_t *origins;                /* node of the row; -1: the root */
    best (*tops)[WIDTH_MAX];         /* tokens that may follow the row, the best first */
    float (*acceptance)[WIDTH_MAX];  /* probability that each is the target's own token */
    uint32_t (*keys)[2];             /* keys of the noise */
    float *inverse_temperature;      /* 0: no noise */
} drafting;

/* Find the tokens that may follow one row, and the probability that the target accepts each; fill `tops` and
   `acceptance`. */
void find_candidates(const drafting *, int row);

#endif
