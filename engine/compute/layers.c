/* All layers of a step in one call, in float32: products with plain or quantised weights, norms, positions, keys and values
 * into their slots, attention, and the output layer. The order is that of engine/compute/fused.py, which calls it; each
 * number comes from the same functions as there, so it has the same bits.
 *
 * Included by attention.c. Between the attentions of two layers, rows are taken through in tiles: what finishes a layer
 * and what prepares the next find a tile in the cache.
 */
#define TILE_ROWS 512

enum { DONE, NO_MEMORY, GIVEN_UP };

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

/* A weight in float32 or of products.c. */
typedef struct linear_t {
    const product_t *panels;       /* what is the same in every product, or null */
    const void *quantized;         /* weight_t of products.c, or null */
    const struct linear_t *beside; /* a weight of the same inputs whose outputs come behind, or null */
    int64_t outputs;
} linear_t;

typedef struct {
    const float *input_norm, *qk_norm, *mlp_norm; /* as for rows_t; qk_norm may be null */
    const linear_t *qkv, *output, *gate, *up, *down;
    int64_t window;
} layer_t;

typedef struct {
    const layer_t *layers;
    const linear_t *head;
    const float *final_norm, *cos, *sin;
    int (*products)(const void *, const float *, int64_t, float *, int64_t, const float *, int64_t, int64_t, parallel_t);
    int64_t num_layers, hidden, inner, heads, kv_heads, head_dim; /* inner: outputs of gate and up */
    float epsilon, scale;
    int32_t variant, unused;
} decoder_t;

typedef struct {
    call_t attention;                 /* what is the same in every layer; cache: that of the first layer */
    float *hidden;                    /* (num_rows, hidden), in and out */
    float *state;                     /* (num_rows, heads + 2 * kv_heads, head_dim) */
    float *attended;                  /* (num_rows, heads, head_dim) */
    float *tile;                      /* (rows of a tile, hidden + inner) */
    float *logits;                    /* (num_rows, outputs of head), or null: not wanted */
    const int64_t *positions, *slots; /* (num_rows,) */
    int (*unwanted)(void);            /* whether the step is to be given up; or null */
    parallel_t parallel;              /* GOMP_parallel, or null */
    int64_t num_rows, layer_bytes, first, last, threads; /* first and last: see kvasir_layers */
} step_t;

/* Threads that stay together for a step, and look for the next work instead of sleeping: with GOMP alone they are woken and
 * waited for at each of some sixty products and attentions, which takes longer than the small ones themselves. */
typedef struct {
    void (*work)(void *);
    void *given;
    int64_t turn;    /* odd while there is work, negative after the last */
    int64_t working; /* threads that may have taken it */
    const decoder_t *decoder;
    const step_t *step;
    int result;
} team_t;

static __thread team_t *led; /* by this thread */

static void wait_a_moment(unsigned *times) {
    if (++*times % 1024 == 0) sched_yield(); /* perhaps another thread needs the processor */
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* A parallel_t for the thread that leads: returns when all have done the work. */
static void work_together(void (*work)(void *), void *given, unsigned threads, unsigned flags) {
    team_t *team = led;
    unsigned times = 0;
    (void)threads, (void)flags;
    team->work = work, team->given = given;
    __atomic_fetch_add(&team->turn, 1, __ATOMIC_SEQ_CST);
    work(given);
    __atomic_fetch_add(&team->turn, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->working, __ATOMIC_SEQ_CST)) wait_a_moment(&times);
}

static int run_layers(const decoder_t *d, const step_t *s);

static void join_team(void *given) {
    team_t *team = given;
    if (team == led) {
        team->result = run_layers(team->decoder, team->step);
        __atomic_store_n(&team->turn, -1, __ATOMIC_SEQ_CST);
        return;
    }
    unsigned times = 0;
    for (int64_t done = 0;;) {
        const int64_t turn = __atomic_load_n(&team->turn, __ATOMIC_SEQ_CST);
        if (turn < 0) return;
        if (turn % 2 == 0 || turn == done) {
            wait_a_moment(&times);
            continue;
        }
        __atomic_fetch_add(&team->working, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->turn, __ATOMIC_SEQ_CST) == turn) team->work(team->given); /* else it came too late */
        __atomic_fetch_sub(&team->working, 1, __ATOMIC_SEQ_CST);
        done = turn, times = 0;
    }
}

static int linear(const decoder_t *d, const step_t *s, const linear_t *l, const float *rows, int64_t num_rows, float *out,
                  int64_t stride, const float *other, int then) {
    for (; l; out += l->outputs, l = l->beside)
        if (l->panels) {
            product_t p = *l->panels;
            p.rows = rows, p.num_rows = num_rows, p.row_stride = p.in_features;
            p.out = out, p.out_stride = stride, p.other = other, p.then = then;
            p.parallel = s->parallel, p.threads = (int32_t)s->threads;
            kvasir_multiply(&p);
        } else if (d->products(l->quantized, rows, num_rows, out, stride, other, then, s->threads, s->parallel)) {
            return NO_MEMORY;
        }
    return DONE;
}

static void norm(const decoder_t *d, const step_t *s, const float *weight, const float *rows, int64_t num_rows, float *out) {
    const rows_t call = {.rows = rows, .out = out, .weight = weight, .parallel = s->parallel, .num_rows = num_rows,
                         .row_stride = d->hidden, .out_stride = d->hidden, .heads = 1, .dim = d->hidden,
                         .epsilon = d->epsilon * (float)d->hidden, .variant = d->variant, .threads = (int32_t)s->threads};
    kvasir_turn(&call);
}

/* A key or value in 8 bits and its scale: KVCache.encode of engine/compute/kv_cache.py. */
static void encode(const float *x, int64_t dim, int64_t width, int8_t *to) {
    int32_t most = 0;
    for (int64_t i = 0; i < dim; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        if ((bits & 0x7fffffff) > most) most = bits & 0x7fffffff; /* as a whole number NaN is the largest */
    }
    float peak;
    memcpy(&peak, &most, 4);
    const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
    for (int64_t i = 0; i < dim; i++) {
        const float moved = x[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &moved, 4);
        to[i] = (int8_t)bits;
    }
    memcpy(to + width - 4, &scale, 4);
}

/* Keys and values of rows of `state` into their slots. */
static void store(const decoder_t *d, const step_t *s, char *cache, int64_t row, int64_t end) {
    const int64_t vectors = 2 * d->kv_heads, dim = d->head_dim, width = s->attention.width;
    const int is_int8 = s->attention.kind == INT8;
    for (; row < end; row++) {
        const float *from = s->state + (row * (d->heads + vectors) + d->heads) * dim;
        char *to = cache + s->slots[row] * vectors * width * (is_int8 ? 1 : 4);
        if (!is_int8) memcpy(to, from, (size_t)(4 * vectors * dim));
        else
            for (int64_t i = 0; i < vectors; i++) encode(from + i * dim, dim, width, (int8_t *)to + i * width);
    }
}

/* Output projection and MLP, each added to the hidden states. */
static int finish(const decoder_t *d, const step_t *s, const layer_t *layer, int64_t row, int64_t count) {
    const int64_t size = d->hidden, inner = d->inner;
    float *hidden = s->hidden + row * size, *normed = s->tile, *gated = normed + count * size;
    int failed = linear(d, s, layer->output, s->attended + row * d->heads * d->head_dim, count, hidden, size, hidden, ADD);
    norm(d, s, layer->mlp_norm, hidden, count, normed);
    failed |= linear(d, s, layer->gate, normed, count, gated, inner, 0, SWISH);
    failed |= linear(d, s, layer->up, normed, count, gated, inner, gated, MULTIPLY);
    return failed | linear(d, s, layer->down, gated, count, hidden, size, hidden, ADD);
}

/* Queries, keys and values, with positions; the latter two are stored. */
static int project(const decoder_t *d, const step_t *s, int64_t index, int64_t row, int64_t count) {
    const layer_t *layer = d->layers + index;
    const int64_t width = (d->heads + 2 * d->kv_heads) * d->head_dim;
    float *state = s->state + row * width;
    norm(d, s, layer->input_norm, s->hidden + row * d->hidden, count, s->tile);
    if (linear(d, s, layer->qkv, s->tile, count, state, width, 0, KEEP)) return NO_MEMORY;
    const rows_t call = {.rows = state, .out = state, .weight = layer->qk_norm, .cos = d->cos, .sin = d->sin,
                         .positions = s->positions + row, .parallel = s->parallel, .num_rows = count, .row_stride = width,
                         .out_stride = width, .heads = d->heads + d->kv_heads, .dim = d->head_dim,
                         .epsilon = d->epsilon * (float)d->head_dim, .variant = d->variant,
                         .threads = (int32_t)s->threads};
    kvasir_turn(&call);
    store(d, s, (char *)s->attention.cache + index * s->layer_bytes, row, row + count);
    return DONE;
}

static int attend_layer(const decoder_t *d, const step_t *s, int64_t index) {
    call_t call = s->attention;
    call.query = s->state, call.query_stride = (d->heads + 2 * d->kv_heads) * d->head_dim;
    call.out = s->attended, call.cache = (const char *)call.cache + index * s->layer_bytes;
    call.scale = d->scale, call.softcap = 0, call.window = d->layers[index].window;
    return kvasir_attend(&call);
}

/* From gap `first` to gap `last`, with the attentions between them. In gap i layer i - 1 is finished and layer i projected;
 * the first and the last have one of both. Then logits, where they are wanted. Returns DONE, NO_MEMORY or GIVEN_UP. */
static int run_layers(const decoder_t *d, const step_t *s) {
    const int64_t parts = (s->num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t gap = s->first; gap <= s->last; gap++) {
        for (int64_t part = 0; part < parts; part++) {
            const int64_t row = s->num_rows * part / parts, count = s->num_rows * (part + 1) / parts - row;
            if (s->unwanted && s->unwanted()) return GIVEN_UP;
            if (gap > 0 && finish(d, s, d->layers + gap - 1, row, count)) return NO_MEMORY;
            if (gap < d->num_layers && project(d, s, gap, row, count)) return NO_MEMORY;
        }
        if (s->unwanted && s->unwanted()) return GIVEN_UP;
        if (gap < s->last && attend_layer(d, s, gap)) return NO_MEMORY;
    }
    if (!s->logits) return DONE;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t row = s->num_rows * part / parts, count = s->num_rows * (part + 1) / parts - row;
        norm(d, s, d->final_norm, s->hidden + row * d->hidden, count, s->tile);
        const int64_t size = d->head->outputs;
        if (linear(d, s, d->head, s->tile, count, s->logits + row * size, size, 0, KEEP)) return NO_MEMORY;
    }
    return DONE;
}

/* Runs the layers, with all threads. */
int kvasir_layers(const decoder_t *d, const step_t *s) {
    if (s->threads < 2 || !s->parallel) return run_layers(d, s);
    step_t step = *s;
    step.parallel = work_together;
    if (step.attention.parallel) step.attention.parallel = work_together;
    team_t team = {.decoder = d, .step = &step};
    led = &team;
    s->parallel(join_team, &team, (unsigned)s->threads, 0);
    led = 0;
    return team.result;
}
