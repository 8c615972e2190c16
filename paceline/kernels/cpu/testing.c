/* Functions for tests only. Nothing else calls them. */
#include "noise.h"
#include "program.h"

/* Compute the noise of every token: out [vocab]. */
EXPORT void paceline_gumbel(uint32_t k0, uint32_t k1, int vocab, float *out) {
    for (int j = 0; j < vocab; j += LANES) {
        float values[LANES];
        vf_store(values, gumbel(uniform(vi_add(count_up(), vi_set1(j)), vi_set1((int32_t)k0), vi_set1((int32_t)k1))));
        memcpy(out + j, values, sizeof(float) * (size_t)(vocab - j < LANES ? vocab - j : LANES));
    }
}

/* Count the prefetched passes of a program that were asked for. */
EXPORT int64_t paceline_prefetched(const program *p) { return p->prefetch.hits; }

/* Count the times that a thread of a pool was lent a CPU. */
EXPORT int paceline_lent(const pool *p) { return pool_lent(p); }
