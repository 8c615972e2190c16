/* Draw the tokens after a pass, and follow them through drafts. */
#ifndef PACELINE_DRAW_H
#define PACELINE_DRAW_H

#include "abi.h"

/* Draw the token after each row with logits, once the pass over the batch is done: FINE, or OUT_OF_MEMORY. */
int draw_tokens(const program *, const batch *, const draws *);

/* Find the row of sequence s that holds `token` and is a child of row `of` in its draft; -1: there is none. */
int row_after(const batch *, int s, int of, int32_t token);

#endif
