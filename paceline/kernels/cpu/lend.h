/* The CPUs of a pool's threads: hold each thread to its own, and lend it another when the system suspends it.

   Other programs run on the same CPUs. If the system suspends a thread for one of them, the rest of the pool soon waits
   for the units that the thread has taken, for a time slice of some milliseconds. Instead, a waiting thread moves the
   suspended one to its own CPU and sleeps, so that it runs there at once. When it has finished its units, it goes back
   to its own CPU and waits there for its turn, while the others go on. Seat 0 is the pool's caller's.

   Only Linux has the calls for this; elsewhere threads run anywhere, and none is lent. */
#ifndef PACELINE_LEND_H
#define PACELINE_LEND_H

#include <stdatomic.h>
#include <stdint.h>

#include "simd.h"

/* How far others depend on a thread. */
enum { OUTSIDE, INSIDE, HOLDING }; /* takes no part in a run; takes part; may have taken units and not finished them */

/* The CPUs that a thread may run on. */
typedef struct {
    uint64_t bits[16];
    int known;
} cpu_mask;

/* The place of a thread in a pool. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_int state;
    atomic_int thread;   /* the system's number of the thread that sits here */
    atomic_uint turns;   /* times that it has given a lent CPU back */
    atomic_int borrows;  /* whether it was moved to a lent CPU; changed under `looking` */
    cpu_mask own;        /* CPUs that it may run on during a run, but for a lent one */
    int64_t ran;         /* nanoseconds that it had run at the last look; guarded by `looking` */
    const int32_t *cpus; /* [cpu_count] CPUs that it is held to */
    int cpu_count;       /* 0: it runs anywhere */
} seat;

typedef struct {
    seat *seats; /* [count] */
    int count;
    int32_t *cpus;       /* CPUs of all seats */
    atomic_flag looking; /* set by the member that looks at the others */
    atomic_int lent;     /* times that a CPU was lent; for tests */
} seating;

/* Make seats; seat i is held to cpus[starts[i] … starts[i + 1] - 1]. starts NULL: all run anywhere. False: out of
   memory. */
int make_seats(seating *, int count, const int32_t *starts, const int32_t *cpus);

void free_seats(seating *);

/* Forget who looks and who borrows: in a forked child those threads are gone. */
void reset_seats(seating *);

/* Hold the calling thread to the CPUs of a seat, as far as it may run there; return where it could run before. */
cpu_mask hold_to(const seat *);

/* Let the calling thread run where it could before, after it has left the seat. */
void release_to(seating *, seat *, const cpu_mask *before);

/* Note that the calling thread takes part in a run. */
void sit(seating *, seat *);

/* Note that the calling thread takes units. */
INLINE void hold(seat *s) { atomic_store_explicit(&s->state, HOLDING, memory_order_relaxed); }

/* Note that the calling thread has finished its units (INSIDE) or has left the run (OUTSIDE). A lent CPU is given
   back. */
void let_go(seating *, seat *, int state);

/* Remember how long every member has run. */
void look_at_members(seating *);

/* If a member in `state` or beyond has not run since the last look, lend it the CPU of this thread, whose seat is
   `self`, and sleep meanwhile. False: there is none. */
int lend_to_members(seating *, seat *self, int state);

#endif
