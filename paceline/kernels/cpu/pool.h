/* A pool of threads that run one function together and share the work inside it.

   The calling thread is member 0, the others are helpers. After a run helpers spin for a moment, because the next pass
   usually follows at once, then they sleep. The system may suspend a thread at any time, so members never wait for a
   thread, only for the units of work that it has taken, and lend it a CPU meanwhile (lend.h). Which member computes
   which unit is decided while running, and no result may depend on it. A suspended helper catches up when it runs
   again: works that are over cost it nothing. */
#ifndef PACELINE_POOL_H
#define PACELINE_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi.h"

/* One thread in a run, and its place in the current work. */
typedef struct {
    pool *pool;
    int index;     /* number of this member */
    int count;     /* number of members */
    unsigned work; /* number of the current work, the same for all members */
    int units;     /* units of the current work */
    int victim;    /* member whose share units are taken from */
    int next;      /* first unit that is taken and not begun */
    int last;      /* end of the units that are taken */
    int done;      /* units that this member has finished */
} member;

typedef void pool_function(member *self, void *argument);

/* ---- runs ---- */

/* Run a function in every thread, and wait for its end. */
void pool_run(pool *, pool_function *, void *argument);

/* Let the helpers start a run while the caller continues, and return its number; 0: there are no helpers. The memory
   that the run uses must stay valid until the caller finishes or cancels it. If the pool runs anything else before, the
   run is cancelled. */
unsigned pool_start(pool *, pool_function *, void *argument);

/* Help with a started run until its end. False: it was cancelled, or a fork took the helpers away. */
int pool_finish(pool *, unsigned number);

/* Cancel a started run that is not finished, and wait until its members have left. */
void pool_cancel(pool *);

/* Run a short function like pool_run, but in the calling thread alone if a started run is in flight, which goes on. */
void pool_run_beside(pool *, pool_function *, void *argument);

int pool_threads(const pool *);

/* Count the times that a suspended thread was lent a CPU. */
int pool_lent(const pool *);

/* ---- works ----

   A work is one parallel loop over units 0 … units-1. Every member calls work_begin with the same number of units, then
   work_next until it returns -1, then work_end. Each member begins with its own contiguous share and then steals from
   others. */

void work_begin(member *, int units);

/* Take the next unit, or return -1. */
int work_next(member *);

/* Wait until all units are finished; everything that they wrote is visible afterwards. */
void work_end(member *);

/* Whether all units are finished; preparing for them is then useless. */
int work_over(const member *);

/* Wait a moment for a flag, and return it. */
int work_await(member *, atomic_int *flag);

/* Whether the run is cancelled. The member must then return; `works`: most works of the run that it leaves out. */
int work_cancelled(member *, int works);

#endif
