/* The suffix automaton of suffix.c, which suffix_draft.c reads. */
#ifndef PACELINE_SUFFIX_H
#define PACELINE_SUFFIX_H

#include "abi.h"

#define TOPS 3   /* most frequent children that a state knows */

typedef struct {
    int32_t link;       /* state of the longest suffix with more places; -1: the root */
    int32_t length;     /* tokens of its longest string */
    int32_t token;      /* last token of its strings */
    int32_t edges;      /* entry of its first edge; -1: none */
    int32_t count;      /* places where its strings end */
    int32_t followed;   /* places after which a token came */
    int32_t newest;     /* child that came last; 0: none */
    int32_t tops[TOPS]; /* most frequent children, most frequent first; 0: none */
} state;

/* An entry of the hash table of edges, by owner and token; target 0: it is free. */
typedef struct {
    int32_t owner, token, target;
    int32_t next; /* entry of the owner's next edge; -1: none */
} edge;

/* A string: its state and length. */
typedef struct {
    int32_t state, length;
} place;

struct suffixes {
    state *states;
    edge *edges; /* hash table with open addressing, whose size is a power of two */
    int64_t state_room, edge_room;
    int32_t state_count, edge_count;
    int32_t last; /* state of the whole text */
    place end;    /* its last tokens, at most SUFFIX_DEPTH + 1 */
};

/* Return the state that an edge leads to; 0: the state has no edge with this token. */
int32_t suffix_follow(const suffixes *a, int32_t state, int32_t token);

/* Return the place of the text's last tokens, at most SUFFIX_DEPTH. */
place suffix_end(const suffixes *a);

/* Return the place of the longest string of at most SUFFIX_DEPTH tokens that ends with the token and occurs, after the
   string at `at`. */
place suffix_step(const suffixes *a, place at, int32_t token);

#endif
