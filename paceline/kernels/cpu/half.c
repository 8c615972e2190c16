/* Linear layers with fp16 weights and float inputs, for inputs that lose too much in 8 bits.

   A tile is [inputs][TILE]. Inputs are added one after the other, so that a row's outputs never depend on other
   rows. */
#include "program.h"

/* Compute one tile for up to BLOCK rows. */
INLINE void half_tile(const program *p, const operation *o, int tile, int first, const int rows) {
    const matrix *m = o->part;
    const uint16_t *w = (const uint16_t *)(m->data + tile * m->stride);
    const float *x[BLOCK];
    vf total[BLOCK];
    const vf bias = m->bias ? vf_load(m->bias + tile * TILE) : vf_set1(0.0f);
    for (int r = 0; r < rows; r++) x[r] = row_of(p, o->input, first + r), total[r] = bias;
    for (int j = 0; j < m->inputs; j++, w += TILE) {
        const vf weights = vf_load_half(w);
        for (int r = 0; r < rows; r++) total[r] = vf_fma(weights, vf_set1(x[r][j]), total[r]);
    }
    for (int r = 0; r < rows; r++) vf_store(row_of(p, o->output, first + r) + tile * TILE, total[r]);
}

static void half_rows(const program *p, const operation *o, int tile, int first, int rows) {
#define KERNEL(n) half_tile(p, o, tile, first, n)
    ROWS_SWITCH(rows, KERNEL)
#undef KERNEL
}

/* output ← input times one matrix, plus its bias, without any epilogue; the number of outputs is a multiple of TILE */
void run_linear_half(member *self, program *p, const operation *o) {
    const int tiles = o->part[0].outputs / TILE, rows = p->batch->rows;
    work_begin(self, tiles);
    for (int tile; (tile = work_next(self)) >= 0;)
        for (int row = 0; row < rows; row += BLOCK)
            half_rows(p, o, tile, row, rows - row < BLOCK ? rows - row : BLOCK);
}
