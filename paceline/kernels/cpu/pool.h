/* A team of threads that runs one function together, sharing out the work inside it.

   The caller is member 0. Helpers spin for a moment after a run, because the next forward usually follows at once,
   then sleep. Machines are noisy: which member does which unit of work is decided while running, so no result may
   depend on it, and nobody waits for a member, only for the units it has taken. A helper that the system put aside
   catches up when it is back: the works it finds over cost it nothing. */
#ifndef PACELINE_POOL_H
#define PACELINE_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi.h"

typedef struct {
    pool *pool;
    int index, count; /* this member, members */
    unsigned work;    /* number of the current work, the same for all members */
    int units;        /* of the current work */
    int victim;       /* whose share is being taken from */
    int next, last;   /* units taken and not yet begun */
    int done;         /* units this member has finished */
} member;

typedef void pool_function(member *self, void *argument);

void pool_run(pool *, pool_function *, void *argument);
/* Let the helpers begin, and go on with something else; there is a number for it, 0: there are no helpers. What it reads
   and writes must stay. It is over once it was finished, by the caller's help, or anything else was run. */
unsigned pool_start(pool *, pool_function *, void *argument);
/* False: it was never run to its end, for a fork has taken the helpers. */
int pool_finish(pool *, unsigned number);
int pool_threads(const pool *);

/* A work: every member calls work_begin, work_next until it gives -1, work_end, with the same number of units.
   Units 0 … units-1 are shared out: each member begins with its own contiguous share and then takes from others. */
void work_begin(member *, int units);
/* The next unit, or -1. */
int work_next(member *);
/* Wait until all units are finished; what was written in them is visible after. */
void work_end(member *);
/* True when there is nothing left to take: what would only prepare for it can be left out. */
int work_over(const member *);

#endif
