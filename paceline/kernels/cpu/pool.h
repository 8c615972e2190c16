/* A team of threads that runs one function together, with barriers and shared-out work inside it.

   The caller is member 0. Helpers spin for a moment after a run, because the next forward usually follows at once,
   then sleep. Which member does which unit of work is decided while running (machines are noisy), so no result may
   depend on it. */
#ifndef PACELINE_POOL_H
#define PACELINE_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct pool pool;
typedef struct {
    pool *pool;
    int index, count; /* this member, members */
    int phase;        /* work_begin calls so far: which set of counters is in use */
    int units;        /* of the current work */
    int victim;       /* whose share is being taken from */
} member;

typedef void team_function(member *self, void *argument);

EXPORT pool *paceline_pool_new(int threads);
EXPORT void paceline_pool_free(pool *);
void pool_run(pool *, team_function *, void *argument);
int pool_threads(const pool *);

/* Wait until every member is here; what they wrote before is visible after. */
void barrier(member *);
/* Units 0 … units-1 are shared out: each member begins with its own contiguous share and then takes from others.
   Between the work_begin calls of two works of a run must lie a barrier. */
void work_begin(member *, int units);
/* The next unit, or -1. */
int work_next(member *);

#endif
