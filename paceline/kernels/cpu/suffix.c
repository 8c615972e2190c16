/* A suffix automaton that counts, and drafts from several of them.

   A state stands for all strings that end at the same places of the texts. The longest of them has `length` tokens, and
   `link` leads to the state of the longest suffix with more places. All edges into a state carry one token. Appending a
   token takes O(1) amortised: Blumer et al. 1985, for several texts as in Mohri, Moreno and Weinstein 2009.

       text  a b c a b d        root ─a─▶ a ─b─▶ ab ┬─c─▶ …      after "a b": c once, d once, d latest
                                                    └─d─▶ …

   Places are counted for contexts of at most SUFFIX_DEPTH tokens and the token after them, so that appending a token
   counts for a bounded number of states. */
#include "suffix.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 256 /* states, and entries for edges, that a new automaton has room for */

/* ---- edges ---- */

/* Find the entry of an edge: the edge, or the free entry where it would be. */
static int32_t entry_of(const suffixes *a, int32_t owner, int32_t token) {
    const uint64_t key = ((uint64_t)(uint32_t)owner << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    const uint32_t mask = (uint32_t)a->edge_room - 1;
    uint32_t i = (uint32_t)(key >> 32) & mask;
    while (a->edges[i].target && (a->edges[i].owner != owner || a->edges[i].token != token)) i = (i + 1) & mask;
    return (int32_t)i;
}

int32_t suffix_follow(const suffixes *a, int32_t state, int32_t token) {
    return a->edges[entry_of(a, state, token)].target;
}

static void enter_edge(suffixes *a, int32_t owner, int32_t token, int32_t target) {
    const int32_t i = entry_of(a, owner, token);
    a->edges[i] = (edge){owner, token, target, a->states[owner].edges};
    a->states[owner].edges = i;
}

/* Double the room for edges. */
static int grow_edges(suffixes *a) {
    edge *old = a->edges, *new = calloc((size_t)a->edge_room * 2, sizeof(edge));
    const int64_t room = a->edge_room;
    if (!new) return 0;
    a->edges = new, a->edge_room = room * 2;
    for (int32_t s = 0; s < a->state_count; s++) a->states[s].edges = -1;
    for (int64_t i = 0; i < room; i++)
        if (old[i].target) enter_edge(a, old[i].owner, old[i].token, old[i].target);
    free(old);
    return 1;
}

/* Add an edge; 0: there is no memory. At most two thirds of the entries are in use. */
static int add_edge(suffixes *a, int32_t owner, int32_t target) {
    if (3 * (int64_t)a->edge_count >= 2 * a->edge_room && !grow_edges(a)) return 0;
    enter_edge(a, owner, a->states[target].token, target);
    a->edge_count++;
    return 1;
}

/* ---- states ---- */

/* Add a state; 0: there is no memory. */
static int32_t add_state(suffixes *a, const state *made) {
    if (a->state_count == a->state_room) {
        state *states = realloc(a->states, sizeof(state) * (size_t)a->state_room * 2);
        if (!states) return 0;
        a->states = states, a->state_room *= 2;
    }
    a->states[a->state_count] = *made;
    return a->state_count++;
}

static void replace_child(state *parent, int32_t old, int32_t new) {
    if (parent->newest == old) parent->newest = new;
    for (int i = 0; i < TOPS; i++)
        if (parent->tops[i] == old) parent->tops[i] = new;
}

/* Copy the edges of a state to another; 0: there is no memory. They may move meanwhile, so targets are collected. */
static int copy_edges(suffixes *a, int32_t from, int32_t to) {
    int32_t few[64], *targets = few, count = 0, fine = 1;
    for (int32_t i = a->states[from].edges; i >= 0; i = a->edges[i].next) count++;
    if (count > 64 && !(targets = malloc(sizeof(int32_t) * (size_t)count))) return 0;
    count = 0;
    for (int32_t i = a->states[from].edges; i >= 0; i = a->edges[i].next) targets[count++] = a->edges[i].target;
    while (fine && count) fine = add_edge(a, to, targets[--count]);
    if (targets != few) free(targets);
    return fine;
}

/* Split the strings that are at most one token longer than those of `parent` off from state `q`, its child, into a
   state of their own. Until now both have had the same places. 0: there is no memory. */
static int32_t split(suffixes *a, int32_t parent, int32_t q) {
    state made = a->states[q];
    made.length = a->states[parent].length + 1, made.edges = -1;
    const int32_t clone = add_state(a, &made);
    if (!clone || !copy_edges(a, q, clone)) return 0;
    a->states[q].link = clone;
    for (int32_t p = parent; p >= 0; p = a->states[p].link) {
        edge *e = &a->edges[entry_of(a, p, made.token)];
        if (e->target != q) break;
        e->target = clone;
        replace_child(&a->states[p], q, clone);
    }
    return clone;
}

/* Return the state of `parent`'s strings and the token of its child q. */
static int32_t child_of(suffixes *a, int32_t parent, int32_t q) {
    return a->states[q].length == a->states[parent].length + 1 ? q : split(a, parent, q);
}

/* Append a token to the text; 0: there is no memory. */
static int append(suffixes *a, int32_t token) {
    const int32_t known = suffix_follow(a, a->last, token);
    if (known) return (a->last = child_of(a, a->last, known)) != 0;
    const state made = {.length = a->states[a->last].length + 1, .token = token, .edges = -1};
    const int32_t whole = add_state(a, &made);
    if (!whole) return 0;
    int32_t p = a->last, q = 0;
    for (; p >= 0 && !(q = suffix_follow(a, p, token)); p = a->states[p].link)
        if (!add_edge(a, p, whole)) return 0;
    const int32_t link = p < 0 ? 0 : child_of(a, p, q);
    if (p >= 0 && !link) return 0;
    a->states[whole].link = link;
    a->last = whole;
    return 1;
}

/* ---- counts ---- */

/* Move to the state of a string's last `length` tokens: splits may have moved short strings to a link. */
static int32_t settle(const suffixes *a, int32_t state, int32_t length) {
    while (state && a->states[a->states[state].link].length >= length) state = a->states[state].link;
    return state;
}

static place shortened(const suffixes *a, place at, int32_t most) {
    const int32_t length = at.length < most ? at.length : most;
    return (place){settle(a, at.state, length), length};
}

/* Return the place of the longest string of at most `most` tokens that ends with the token and occurs, after `at`. */
static place step(const suffixes *a, place at, int32_t token, int32_t most) {
    int32_t next;
    while (!(next = suffix_follow(a, at.state, token)) && at.state)
        at.state = a->states[at.state].link, at.length = a->states[at.state].length;
    return next ? shortened(a, (place){next, at.length + 1}, most) : (place){0, 0};
}

place suffix_step(const suffixes *a, place at, int32_t token) { return step(a, at, token, SUFFIX_DEPTH); }

place suffix_end(const suffixes *a) { return shortened(a, a->end, SUFFIX_DEPTH); }

/* Keep the most frequent children of a state in order; of equals the latest comes first. */
static void note_child(const suffixes *a, state *parent, int32_t child) {
    const int32_t count = a->states[child].count;
    int i = 0;
    while (i < TOPS - 1 && parent->tops[i] != child) i++;
    if (parent->tops[i] != child && parent->tops[i] && a->states[parent->tops[i]].count > count) i = TOPS;
    for (; i > 0 && i < TOPS && (!parent->tops[i - 1] || a->states[parent->tops[i - 1]].count <= count); i--)
        parent->tops[i] = parent->tops[i - 1];
    if (i < TOPS) parent->tops[i] = child;
    parent->newest = child;
    parent->followed++;
}

static void count_token(suffixes *a, int32_t token) {
    const place before = suffix_end(a);
    a->end = step(a, before, token, SUFFIX_DEPTH + 1);
    for (int32_t s = a->end.state; s; s = a->states[s].link) a->states[s].count++;
    for (int32_t s = before.state; s; s = a->states[s].link)
        note_child(a, &a->states[s], suffix_follow(a, s, token));
}

/* ---- an automaton ---- */

EXPORT void paceline_suffix_free(suffixes *a) {
    if (!a) return;
    free(a->states), free(a->edges), free(a);
}

EXPORT suffixes *paceline_suffix_new(void) {
    suffixes *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->state_room = a->edge_room = FIRST_ROOM;
    a->states = malloc(sizeof(state) * FIRST_ROOM), a->edges = calloc(FIRST_ROOM, sizeof(edge));
    if (!a->states || !a->edges) return paceline_suffix_free(a), NULL;
    a->states[0] = (state){.link = -1, .edges = -1}, a->state_count = 1;
    return a;
}

EXPORT int paceline_suffix_extend(suffixes *a, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (!append(a, tokens[i])) return OUT_OF_MEMORY;
        count_token(a, tokens[i]);
    }
    return FINE;
}

EXPORT void paceline_suffix_end(suffixes *a) { a->last = 0, a->end = (place){0, 0}; }

EXPORT int64_t paceline_suffix_bytes(const suffixes *a) {
    return (int64_t)sizeof *a + (int64_t)sizeof(state) * a->state_room + (int64_t)sizeof(edge) * a->edge_room;
}
