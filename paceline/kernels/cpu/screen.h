/* Shortlists: the outputs of a head that may be among the best, for drafts that need no others. */
#ifndef PACELINE_SCREEN_H
#define PACELINE_SCREEN_H

#include "pick.h"

#define SLICES 16    /* slices of a row's outputs; each has its own shortlist */
#define SHORTLIST 40 /* most outputs on a shortlist */

/* The outputs of one slice of a row that may be among the row's best. */
typedef struct {
    int32_t count;
    int32_t places[SHORTLIST];
    float logits[SHORTLIST];
} shortlist;

typedef struct {
    int32_t available;      /* whether the program has the operations for shortlists */
    const row_noise *noise; /* the pass makes shortlists under this noise; NULL: it computes all logits */
    shortlist *lists;       /* [outs][SLICES] */
} screen;

/* Score one tile of rough logits [rows][TILE], and store the scores in the memory for logits. */
void score_tile(program *, int tile, int vocab, int first_row, int rows, const float *rough);

#endif
