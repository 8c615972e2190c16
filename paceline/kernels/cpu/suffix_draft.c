/* Drafts from suffix automata: the continuations of the last tokens that the texts make most likely.

   A token's probability comes from the contexts that end here, from short to long, in all automata. Each gives the
   token the share of its own places that it followed, and leaves the rest to the shorter contexts before it:

       p ← (times the token followed + escape · p) / (times any token followed + escape)

   The draft is a tree. Its likeliest next node is added as long as that pays for its row. */
#include "suffix.h"

#define CONTEXTS 4    /* longest contexts of an automaton that are asked */
#define CANDIDATES 12   /* tokens whose probability is computed for one node */
/* Escapes, in places, of a context of one token; one of n tokens has an n-th. Measured: docs/experiments.md, "Suffix
   automata: how likely a continuation is". */
#define OWN_ESCAPE 2.0f
#define SHARED_ESCAPE 6.0f

typedef struct {
    const suffixes *a;
    int32_t state, length;
    float escape;
} context;

/* A drafted token, or the last committed one: the places of its path in all automata. */
typedef struct {
    place at[SOURCES_MAX];
    float confidence; /* of the whole path */
} node;

typedef struct {
    int32_t token, parent;
    float confidence; /* of the whole path */
} guess;

/* Insert a context into those found, which are sorted by length. */
static void insert_context(context *found, int count, context made) {
    for (; count > 0 && found[count - 1].length >= made.length; count--) found[count] = found[count - 1];
    found[count] = made;
}

/* Collect the contexts that end at a node, from short to long. Only the first automaton is the text's own. */
static int collect(const suffix_order *o, const node *n, context *found) {
    int count = 0;
    for (int i = 0; i < o->source_count; i++) {
        const suffixes *a = o->sources[i];
        place at = n->at[i];
        for (int taken = 0; at.state && taken < CONTEXTS;) {
            const state *s = &a->states[at.state];
            const float escape = (i ? SHARED_ESCAPE : OWN_ESCAPE) / (float)at.length;
            if (s->followed) insert_context(found, count++, (context){a, at.state, at.length, escape}), taken++;
            at = (place){s->link, a->states[s->link].length};
        }
    }
    return count;
}

static float probability_of(int32_t token, const context *found, int count) {
    float p = 0.0f;
    for (int i = 0; i < count; i++) {
        const suffixes *a = found[i].a;
        const int32_t child = suffix_follow(a, found[i].state, token);
        const float times = child ? (float)a->states[child].count : 0.0f;
        p = (times + found[i].escape * p) / ((float)a->states[found[i].state].followed + found[i].escape);
    }
    return p;
}

static void add_candidate(int32_t *tokens, int *count, const suffixes *a, int32_t child) {
    const int32_t token = a->states[child].token;
    if (!child || *count == CANDIDATES) return;
    for (int i = 0; i < *count; i++)
        if (tokens[i] == token) return;
    tokens[(*count)++] = token;
}

/* List the tokens that are frequent or latest after the contexts, those of the longest first. */
static int list_candidates(const context *found, int contexts, int32_t *tokens) {
    int count = 0;
    for (int i = contexts - 1; i >= 0; i--) {
        const state *s = &found[i].a->states[found[i].state];
        for (int j = 0; j < TOPS; j++) add_candidate(tokens, &count, found[i].a, s->tops[j]);
        add_candidate(tokens, &count, found[i].a, s->newest);
    }
    return count;
}

/* Add the likeliest children of a node to the fringe, and return its new size. */
static int expand(const suffix_order *o, const node *n, int32_t parent, guess *fringe, int fringed) {
    context found[SOURCES_MAX * CONTEXTS];
    int32_t tokens[CANDIDATES];
    const int contexts = collect(o, n, found), count = list_candidates(found, contexts, tokens);
    guess *best = fringe + fringed;
    int kept = 0;
    for (int i = 0; i < count; i++) {
        const float p = probability_of(tokens[i], found, contexts) * o->trust;
        const guess made = {tokens[i], parent, p * n->confidence};
        int j = kept;
        for (; j > 0 && best[j - 1].confidence < made.confidence; j--) best[j] = best[j - 1];
        best[j] = made;
        kept = kept < o->width ? kept + 1 : kept; /* the entry after the last one is free */
    }
    return fringed + kept;
}

static guess take_likeliest(guess *fringe, int *count) {
    int top = 0;
    for (int i = 1; i < *count; i++)
        if (fringe[i].confidence > fringe[top].confidence) top = i;
    const guess taken = fringe[top];
    fringe[top] = fringe[--*count];
    return taken;
}

/* Write a guess as token `index` of the draft, and return its node. */
static node write_guess(const suffix_order *o, const node *nodes, int index, guess g) {
    node made = {.confidence = g.confidence};
    for (int i = 0; i < o->source_count; i++)
        made.at[i] = suffix_step(o->sources[i], nodes[g.parent + 1].at[i], g.token);
    o->tokens[index] = g.token, o->parents[index] = g.parent, o->confidence[index] = g.confidence;
    return made;
}

/* Grow the draft from the last committed token, and return how many of its tokens pay. */
static int grow(const suffix_order *o, node *nodes) {
    guess fringe[SUFFIX_NODES_MAX * WIDTH_MAX + 2 * WIDTH_MAX];
    int fringed = expand(o, &nodes[0], -1, fringe, 0), paying = 0;
    float gain = 0.0f, most = 0.0f;
    for (int made = 0; made < o->longest && fringed; made++) {
        const guess g = take_likeliest(fringe, &fringed);
        if (g.confidence < o->min_confidence) break;
        nodes[made + 1] = write_guess(o, nodes, made, g);
        gain += g.confidence - o->prices[made < o->price_count ? made : o->price_count - 1];
        if (gain > most) most = gain, paying = made + 1;
        fringed = expand(o, &nodes[made + 1], made, fringe, fringed);
    }
    return paying;
}

EXPORT int paceline_suffix_draft(const suffix_order *o, const int32_t *recent, int count, int unread) {
    node nodes[SUFFIX_NODES_MAX + 1]; /* the last committed token, then the draft */
    if (paceline_suffix_extend(o->sources[0], recent + count - unread, unread) != FINE) return -1;
    nodes[0] = (node){.confidence = 1.0f, .at = {suffix_end(o->sources[0])}};
    for (int i = 1; i < o->source_count; i++)
        for (int j = count > SUFFIX_DEPTH ? count - SUFFIX_DEPTH : 0; j < count; j++)
            nodes[0].at[i] = suffix_step(o->sources[i], nodes[0].at[i], recent[j]);
    return grow(o, nodes);
}
