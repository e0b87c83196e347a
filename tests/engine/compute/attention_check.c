/* Runs attention.c against the textbook, for processors that only an emulator has. Arguments: numbers of variants.
 *
 * Compiled and run by test_kernel.py. Every case is computed whole, and again with its keys cut in two: the bits must be
 * the same. Prints the first case that is wrong and returns 1. */
#include "../../../engine/compute/attention.c"
#include <stdio.h>

static uint32_t state = 7;
static uint32_t below(uint32_t limit) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % limit;
}
static float number(void) { return ((int)below(20001) - 10000) / 5000.0f; }

static uint16_t half_of(float x) { /* bfloat16, cut off */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}
static float widened(const void *cache, int kind, int64_t at) {
    float x;
    uint32_t bits = (uint32_t)((const uint16_t *)cache)[at] << 16;
    if (kind == FLOAT32) return ((const float *)cache)[at];
    if (kind == INT8) return ((const int8_t *)cache)[at];
    memcpy(&x, &bits, 4);
    return x;
}

static void textbook(const call_t *c, const int32_t *table, int rows, float *out) {
    const int share = (int)(c->num_heads / c->num_kv_heads), dim = (int)c->head_dim;
    for (int row = 0; row < rows; row++)
        for (int head = 0; head < c->num_heads; head++) {
            double sum[MAX_DIM] = {0}, total = 0;
            for (int k = 0; k <= c->positions[row]; k++) {
                if (c->window && k <= c->positions[row] - c->window) continue;
                run_t run = {table, head / share, k, 1};
                int64_t at;
                find_keys(c, &run, 0, 1, &at);
                double score = 0;
                for (int d = 0; d < dim; d++)
                    score += (double)c->query[row * c->query_stride + head * dim + d] * widened(c->cache, c->kind, at + d);
                score *= c->scale * (c->kind == INT8 ? scale_of(c, at) : 1);
                if (c->softcap) score = c->softcap * tanh(score / c->softcap);
                total += exp(score);
                at += c->num_kv_heads * c->width;
                const double weight = exp(score) * (c->kind == INT8 ? scale_of(c, at) : 1);
                for (int d = 0; d < dim; d++) sum[d] += weight * widened(c->cache, c->kind, at + d);
            }
            for (int d = 0; d < dim; d++) out[(row * c->num_heads + head) * dim + d] = (float)(sum[d] / total);
        }
}

/* Products, each row among others and alone, against the textbook: 0 where all are right. */
static int check_product(int variant) {
    static float weight[64 * 64 * 2], rows[30 * 64], out[30 * 100], alone[100], bias[128];
    product_t p = {weight, bias, rows, 0, out, 0, 30, 64, 1 + below(64), 1 + below(100), 0, KEEP, variant, 1, 0};
    p.out_stride = p.out_features;
    for (int i = 0; i < 64 * 64 * 2; i++) weight[i] = number();
    for (int i = 0; i < 30 * 64; i++) rows[i] = number();
    for (int i = 0; i < 128; i++) bias[i] = number();
    kvasir_multiply(&p);
    for (int row = 0; row < 30; row++) {
        product_t one = p;
        one.rows += row * 64, one.num_rows = 1, one.out = alone;
        kvasir_multiply(&one);
        if (memcmp(alone, out + row * p.out_features, 4 * p.out_features)) return 1;
        for (int o = 0; o < p.out_features; o++) {
            double sum = bias[o];
            for (int k = 0; k < p.in_features; k++)
                sum += (double)rows[row * 64 + k] * weight[(o / PANEL * p.in_features + k) * PANEL + o % PANEL];
            if (!(fabs(sum - alone[o]) < 1e-3)) return 1;
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    static const int dims[] = {8, 32, 40, 64, 96, 128, 256}, lengths[] = {1, 31, 127, 128, 129, 200, 256, 300};
    for (int i = 0; i < 20 * (argc - 1); i++)
        if (check_product(atoi(argv[1 + i / 20]))) return printf("variant %s: a product is wrong\n", argv[1 + i / 20]), 1;
    for (int arg = 1; arg < argc; arg++)
        for (int number_of = 0; number_of < 40; number_of++) {
            call_t c = {.variant = atoi(argv[arg]), .threads = 1, .block_size = 16, .scale = 0.2f};
            c.kind = c.variant == AVX512_BF16 ? BFLOAT16 : (int)below(3);
            if (c.kind == FLOAT16) c.kind = INT8;
            c.head_dim = c.variant == AVX512_BF16 ? 32 << below(4) : dims[below(7)];
            c.width = c.head_dim + (c.kind == INT8 ? 4 : 0);
            c.num_kv_heads = 1 + below(2);
            c.num_heads = c.num_kv_heads * (1 + below(6)); /* at most MAX_ROWS in an item */
            c.window = below(3) ? 0 : 1 + below(150);
            c.softcap = below(3) ? 0 : 1.5f;
            const int length = lengths[below(8)], blocks = (length + 15) / 16;
            int rows = 1 + below(length < 20 ? length : 20);
            const int64_t elements = (int64_t)(blocks + 2) * 16 * 2 * c.num_kv_heads * c.width;
            float *cache = malloc(4 * elements), *query = malloc(4 * rows * c.num_heads * c.head_dim), *out[3];
            int32_t table[64], positions[64], index[128];
            for (int64_t i = 0; i < elements; i++) {
                if (c.kind == FLOAT32) cache[i] = number();
                else if (c.kind == INT8) ((int8_t *)cache)[i] = (int8_t)((int)below(255) - 127);
                else ((uint16_t *)cache)[i] = half_of(number());
            }
            for (int64_t i = c.head_dim; c.kind == INT8 && i < elements; i += c.width) {
                const float scale = (1 + below(100)) / 5000.0f;
                memcpy((int8_t *)cache + i, &scale, 4);
            }
            for (int i = 0; i < rows * c.num_heads * c.head_dim; i++) {
                const uint32_t bits = (uint32_t)half_of(number()) << 16;
                memcpy(query + i, &bits, 4);
            }
            for (int i = 0; i < blocks; i++) table[i] = blocks - i;
            for (int i = 0; i < rows; i++) positions[i] = length - rows + i, index[i] = index[rows + i] = i;
            for (int i = 0; i < 3; i++) out[i] = calloc(rows * c.num_heads * c.head_dim, 4);
            int64_t results_at[64];
            for (int i = 0; i < rows; i++) results_at[i] = 3 * i;
            c.cache = cache, c.query = query, c.query_stride = c.num_heads * c.head_dim;
            c.row_index = index, c.positions = positions, c.tables = table, c.results_at = results_at;
            c.results = malloc(4 * 3 * rows * c.num_heads * (c.head_dim + 34));
            const int heads = (int)c.num_kv_heads; /* cut for all of them together, whole for each */
            item_t items[2] = {{0, 0, rows, 0, 128, 0, 0, heads, 0}, {0, 0, rows, 0, length, 1, 0, heads, 0}};
            item_t whole[2] = {{0, 0, rows, 0, length, 0, 0, 1, 0}, {0, 0, rows, 0, length, 0, 1, 1, 0}};

            textbook(&c, table, rows, out[0]);
            c.items = whole, c.num_items = heads, c.out = out[1];
            int failed = kvasir_attend(&c);
            c.items = items, c.num_items = 2, c.num_keeping = 1, c.out = out[2];
            failed |= kvasir_attend(&c);
            float worst = 0;
            for (int i = 0; i < rows * c.num_heads * c.head_dim; i++) {
                const float off = fabsf(out[0][i] - out[1][i]);
                if (!(off <= worst)) worst = off;
            }
            const int same = !memcmp(out[1], out[2], 4 * rows * c.num_heads * c.head_dim);
            if (failed || !same || !(worst < (c.variant == AVX512_BF16 ? 0.02f : 1e-5f))) {
                printf("variant %d kind %d dim %d heads %d/%d window %d softcap %g length %d rows %d: off by %g, %s\n",
                       c.variant, c.kind, (int)c.head_dim, (int)c.num_heads, (int)c.num_kv_heads, (int)c.window, c.softcap,
                       length, rows, worst, same ? "same bits" : "other bits when cut");
                return 1;
            }
            free(cache), free(query), free(c.results);
            for (int i = 0; i < 3; i++) free(out[i]);
        }
    return 0;
}
