/* The next pass of a head or of the target, started before the host asks for it: see prefetch.c. */
#ifndef PACELINE_PREFETCH_H
#define PACELINE_PREFETCH_H

#include <stddef.h>

#include "pick.h"

typedef struct {
    program *head;   /* set in a target: the head whose passes are prefetched; or NULL */
    program *target; /* set in a head: the target whose passes start the prefetched ones; or NULL */

    /* The following fields belong to the prefetched pass of this program. */
    unsigned run; /* number of the pool's run that computes the pass; 0: none is in flight */
    batch batch;  /* the pass; it points to the arrays below */
    int32_t *tokens;
    int32_t *positions;
    int32_t *slots;
    int32_t *row_starts;
    int32_t *bases;
    int32_t *page_table;
    int32_t *logit_rows;
    row_noise noise;            /* noise of the tokens to draw after the pass; it points to the arrays below */
    float *inverse_temperature; /* [sequences] */
    uint32_t *keys;             /* [sequences][2] */
    const int32_t *ids;         /* [vocab] target token of each of a head's outputs */
    int32_t vocab;              /* outputs of a head; 0 in a target, whose logits are the caller's memory */
    int32_t misses;  /* passes in a row that were not asked for */
    int32_t skipped; /* passes considered after too many misses; one in RETRY_INTERVAL of them is started */
    int64_t hits;    /* passes that were asked for */
    char *memory;    /* allocation of the arrays above */
    size_t capacity; /* bytes of `memory` */
} prefetch;

/* After a pass of the target and the draws from it, start the pass that is likely to be needed next: the first pass of
   the head's draft, or the target's own pass over the drawn tokens. */
void start_prefetch(program *target, const batch *, const draws *);

/* Take the prefetched first pass of a draft if it is the one that is asked for; true: its results are in the batch.
   Nothing of the head is in flight afterwards. */
int take_prefetched(program *head, const batch *, const row_noise *);

/* Take the prefetched pass of a target in the same way, and compute its logits. */
int take_next_pass(program *, const batch *);

/* Cancel a prefetched pass. */
void drop_prefetched(program *);

/* Detach a program, target or head, and free its memory for prefetched passes. */
void free_prefetch(program *);

#endif
