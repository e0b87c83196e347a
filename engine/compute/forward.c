/* What a forward computes besides attention, in float32: products with weights, norms, and the rotation of positions.
 *
 * Included by attention.c, once for its types and once for each instruction set; called by engine/compute/forward.py. A
 * weight lies in panels of PANEL outputs, (panels, in_features, PANEL), the order in which it is read: few rows read it at
 * the memory's speed, many keep a panel near while a block of rows takes its turn. Each output is one chain of
 * multiplications and additions over in_features, from the first to the last, whatever rows and panels are computed beside
 * it and by however many threads: a row's bits never depend on the batch.
 */
#ifndef ISA

#define PANEL 16         /* outputs */
#define PANELS 4         /* that are computed by one thread; their number is a multiple of it */
#define ROW_BLOCK 24     /* blocks of rows are multiples of it: of TOGETHER of all instruction sets */
#define NEAR (1 << 16)   /* floats of rows that stay in the second cache */
#define MAX_TOGETHER 8   /* rows of a product */
#define AHEAD 256        /* floats of a weight that are asked for before they are needed */
#define THREAD_LEAST (1 << 16) /* numbers below which waking other threads takes longer than the work */

/* What becomes of a product: x, x * sigmoid(x), x * other, x + other, and the second of the fourth. */
enum { KEEP, SWISH, MULTIPLY, ADD, ADD_SWISH };

typedef struct {
    const float *weight; /* (panels, in_features, PANEL), zeros where there are no outputs */
    const float *bias;   /* (panels * PANEL,), or null */
    const float *rows;   /* (num_rows, in_features), row_stride apart */
    const float *other;  /* (num_rows, out_features), out_stride apart, or null; may be out */
    float *out;          /* (num_rows, out_features), out_stride apart */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or null */
    int64_t num_rows, row_stride, in_features, out_features, out_stride;
    int32_t then, variant, threads, unused;
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

/* `rows` rows times `panels` panels, which begin at output `at`. Of some groups of rows each asks for its part of the
 * panels that come next: the memory works while the first group waits for nothing. */
TARGET INLINE void N(multiply_of)(const int rows, const int panels, const product_t *p, int64_t row, int64_t at, int group,
                                  int groups) {
    enum { PARTS = PANEL / WIDTH };
    floats sum[MAX_TOGETHER][PANELS * PARTS];
    const float *weight = p->weight + at * p->in_features, *first = p->rows + row * p->row_stride;
    const int64_t in = p->in_features, stride = p->row_stride, step = groups == 1 ? PANEL : PANEL / groups;
    const float *ahead = weight + (groups == 1 ? AHEAD : panels * in * PANEL + group * in * step);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < panels * PARTS; v++) sum[r][v] = (floats){0};
    for (int64_t k = 0; k < in; k++, weight += PANEL, ahead += step) {
        floats part[PANELS * PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < panels; i++) __builtin_prefetch(ahead + i * in * PANEL, 0, 2);
#pragma GCC unroll 16
        for (int v = 0; v < panels * PARTS; v++) part[v] = LOAD(weight + v / PARTS * in * PANEL + v % PARTS * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            floats one = ALL(first[r * stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < panels * PARTS; v++) sum[r][v] = FMA(one, part[v], sum[r][v]);
        }
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

/* Rows begin .. end - 1 times PANELS panels that begin at output `at`. */
TARGET static void N(multiply)(const product_t *p, int64_t begin, int64_t end, int64_t at) {
    const int64_t groups = (end - begin + TOGETHER - 1) / TOGETHER;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = begin + (end - begin) * group / groups, next = begin + (end - begin) * (group + 1) / groups;
        switch (next - row) {
#define CASE(n) \
    case n: \
        for (int i = 0; i < PANELS; i += BESIDE(n)) N(multiply_of)(n, BESIDE(n), p, row, at + i * PANEL, (int)group, (int)groups); \
        break;
            CASE(1) CASE(2) CASE(3)
#if TOGETHER > 3
            CASE(4) CASE(5) CASE(6)
#endif
#if TOGETHER > 6
            CASE(7) CASE(8)
#endif
#undef CASE
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
