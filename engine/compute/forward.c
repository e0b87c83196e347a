/* What a forward computes besides attention, in float32: products with weights, norms, and the rotation of positions.
 *
 * Included by attention.c, once for its types and once for each instruction set; called by engine/compute/forward.py. A
 * weight lies in panels of PANEL outputs, (panels, in_features, PANEL), the order in which it is read: few rows read it at
 * the memory's speed, many take turns with a part of some panels, which stays near. Each output is one chain of
 * multiplications and additions over in_features, from the first to the last, whatever rows and panels are computed beside
 * it and by however many threads: a row's bits never depend on the batch. A weight whose numbers are all of bfloat16 is
 * kept in that, which halves what is read and changes no bit.
 */
#ifndef ISA

#define PANEL 16         /* outputs */
#define PANELS 4         /* that few rows are multiplied with by one thread; their number is a multiple of it */
#define MANY_PANELS 3    /* that many rows are: WIDE of AVX-512 */
#define MOST_ROWS 240    /* that stay near while panels pass: a multiple of TOGETHER of all instruction sets */
#define TURNED_ROWS 24   /* that are turned by one thread */
#define MAX_TOGETHER 8   /* rows of a product */
#define AHEAD 1024       /* bytes of a weight that are asked for before they are needed */
#define DEPTH 128        /* inputs of a panel that are multiplied before other rows take their turn */
#define THREAD_LEAST (1 << 16) /* numbers below which waking other threads takes longer than the work */

/* What becomes of a product: x, x * sigmoid(x), x * other, x + other, and the second of the fourth. */
enum { KEEP, SWISH, MULTIPLY, ADD, ADD_SWISH };

typedef struct {
    const void *weight;  /* (panels, in_features, PANEL) of kind FLOAT32 or BFLOAT16, zeros where there are no outputs */
    const float *bias;   /* (panels * PANEL,), or null */
    const float *rows;   /* (num_rows, in_features), row_stride apart */
    const float *other;  /* (num_rows, out_features), out_stride apart, or null; may be out */
    float *out;          /* (num_rows, out_features), out_stride apart */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or null */
    int64_t num_rows, row_stride, in_features, out_features, out_stride;
    int32_t then, variant, threads, kind;
} product_t;

/* Each head of each row is divided by its norm and multiplied with a weight, then turned by its position. */
typedef struct {
    const float *rows;        /* (num_rows, heads, dim), row_stride apart */
    float *out;               /* the same, out_stride apart; may be rows */
    const float *weight;      /* (heads, dim), or null: no norm */
    const float *cos, *sin;   /* (positions, dim), or null: not turned */
    const int64_t *positions; /* (num_rows,) */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int64_t num_rows, row_stride, out_stride, heads, dim;
    float epsilon;
    int32_t variant, threads, unused;
} rows_t;

#else

/* `rows` rows times `panels` panels, which begin at output `at`, over inputs from .. to - 1. `panel`: the panels from
 * there on, `apart` numbers from one to the next. `kept`: the sums of the inputs before, and for those behind. A group of
 * rows that is alone asks for what of the panels comes next. */
TARGET INLINE void N(multiply_of)(const int rows, const int panels, const int alone, const int kind, const product_t *p,
                                  int64_t row, int64_t at, int64_t from, int64_t to, const void *panel, int64_t apart,
                                  float *kept) {
    enum { PARTS = PANEL / WIDTH };
    floats sum[MAX_TOGETHER][PANELS * PARTS];
    const int64_t in = p->in_features, stride = p->row_stride, size = kind == FLOAT32 ? 4 : 2;
    const char *weight = panel;
    const float *first = p->rows + row * stride;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < panels * PARTS; v++) sum[r][v] = !alone && from ? LOAD(kept + (r * panels * PARTS + v) * WIDTH) : (floats){0};
    for (int64_t k = from; k < to; k++, weight += PANEL * size) {
        floats part[PANELS * PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < panels && alone; i++) __builtin_prefetch(weight + AHEAD + i * apart * size, 0, 2);
#pragma GCC unroll 16
        for (int v = 0; v < panels * PARTS; v++) part[v] = N(load)(kind, weight, v / PARTS * apart + v % PARTS * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            floats one = ALL(first[r * stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < panels * PARTS; v++) sum[r][v] = FMA(one, part[v], sum[r][v]);
        }
    }
    if (!alone && to < in) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int v = 0; v < panels * PARTS; v++) STORE(kept + (r * panels * PARTS + v) * WIDTH, sum[r][v]);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < panels * PARTS; v++) {
            const int64_t column = at + v * WIDTH, left = p->out_features - column;
            const int64_t to = (row + r) * p->out_stride + column;
            floats x = sum[r][v], other = {0};
            if (left <= 0) continue;
            if (p->bias) x += LOAD(p->bias + column);
            if (p->then >= MULTIPLY) {
                if (left >= WIDTH) other = LOAD(p->other + to);
                else memcpy(&other, p->other + to, sizeof(float) * (size_t)left);
            }
            if (p->then >= ADD) x += other;
            if (p->then == SWISH || p->then == ADD_SWISH) {
                floats size = (floats)((ints)x & 0x7fffffff), small = N(exp2_of)(size * ALL(-LOG2_E));
                x = x * SELECT(x < 0, small, ALL(1.0f)) / (ALL(1.0f) + small);
            }
            if (p->then == MULTIPLY) x *= other;
            if (left >= WIDTH) STORE(p->out + to, x);
            else memcpy(p->out + to, &x, sizeof(float) * (size_t)left);
        }
}

/* Rows begin .. end - 1 times some panels, which begin at output `at`: PANELS for rows that one product takes. Else groups of
 * rows take turns with DEPTH inputs of WIDE panels, which stay in the first cache, and each asks for its share of the next. */
TARGET static void N(multiply)(const product_t *p, int64_t begin, int64_t end, int64_t at, int64_t panels) {
    const int64_t groups = (end - begin + TOGETHER - 1) / TOGETHER, in = p->in_features, stop = at + panels * PANEL;
    const int64_t size = p->kind == FLOAT32 ? 4 : 2;
    const char *weight = p->weight;
    float near[WIDE * DEPTH * PANEL] __attribute__((aligned(64))), kept[MOST_ROWS * WIDE * PANEL];
    switch (end - begin) {
#define CASE(n) \
    case n: \
        for (int64_t i = at; i < at + PANELS * PANEL; i += BESIDE(n) * PANEL) \
            if (p->kind == FLOAT32) N(multiply_of)(n, BESIDE(n), 1, FLOAT32, p, begin, i, 0, in, weight + i * in * size, in * PANEL, 0); \
            else N(multiply_of)(n, BESIDE(n), 1, BFLOAT16, p, begin, i, 0, in, weight + i * in * size, in * PANEL, 0); \
        return;
        CASES
#undef CASE
    }
    for (int64_t beside = WIDE; at < stop; at += beside * PANEL) {
        if (beside > (stop - at) / PANEL) beside = (stop - at) / PANEL;
        for (int64_t from = 0, to; from < in; from = to) {
            to = from + DEPTH < in ? from + DEPTH : in;
            const char *next = weight + (to < in ? at * in + to * PANEL : (at + beside * PANEL) * in) * size;
            const char *panel = weight + (at * in + from * PANEL) * size;
            const int64_t apart = p->kind == FLOAT32 ? in * PANEL : DEPTH * PANEL;
            if (p->kind == BFLOAT16) { /* widened once for all rows */
                for (int64_t i = 0; i < beside; i++)
                    for (int64_t j = 0; j < (to - from) * PANEL; j += WIDTH)
                        STORE(near + i * apart + j, N(load)(BFLOAT16, panel, i * in * PANEL + j));
                panel = (const char *)near;
            }
            for (int64_t group = 0, line = 0; group < groups; group++) {
                const int64_t row = begin + (end - begin) * group / groups, after = begin + (end - begin) * (group + 1) / groups;
                float *sums = kept + (row - begin) * beside * PANEL;
                for (; line < (to - from) * (group + 1) / groups; line++)
                    for (int i = 0; i < beside; i++) __builtin_prefetch(next + (line + i * in) * PANEL * size, 0, 2);
                switch (after - row) {
#define CASE(n) \
    case n: \
        if (WIDE == 1 || beside == 1) N(multiply_of)(n, 1, 0, FLOAT32, p, row, at, from, to, panel, apart, sums); \
        else if (beside == 2) N(multiply_of)(n, 2, 0, FLOAT32, p, row, at, from, to, panel, apart, sums); \
        else N(multiply_of)(n, 3, 0, FLOAT32, p, row, at, from, to, panel, apart, sums); \
        break;
                    CASES
#undef CASE
                }
            }
        }
    }
}

TARGET static void N(normalise)(const float *x, const float *weight, float *out, int64_t dim, float epsilon) {
    floats squares = {0};
    float sum = epsilon;
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) squares += LOAD(x + d) * LOAD(x + d);
    for (; d < dim; d++) sum += x[d] * x[d];
    const float inverse = 1.0f / sqrtf(sum + N(reduce_add)(squares));
    for (d = 0; d + WIDTH <= dim; d += WIDTH) STORE(out + d, LOAD(x + d) * ALL(inverse) * LOAD(weight + d));
    for (; d < dim; d++) out[d] = x[d] * inverse * weight[d];
}

/* Row `row` of a rows_t. */
TARGET static void N(turn)(const rows_t *c, int64_t row) {
    const int64_t dim = c->dim, half = dim / 2;
    for (int64_t head = 0; head < c->heads; head++) {
        const float *x = c->rows + row * c->row_stride + head * dim;
        float *out = c->out + row * c->out_stride + head * dim;
        if (c->weight) N(normalise)(x, c->weight + head * dim, out, dim, c->epsilon), x = out;
        if (!c->cos) continue;
        const float *cos = c->cos + c->positions[row] * dim, *sin = c->sin + c->positions[row] * dim;
        for (int64_t d = 0; d < half; d++) {
            const float low = x[d], high = x[d + half];
            out[d] = low * cos[d] + high * sin[d];
            out[d + half] = high * cos[d + half] + low * sin[d + half];
        }
    }
}

#endif
