/* What a CPU does between the matrix products of its fast path, each operation in one pass over its rows.
 *
 * Compiled by `native` where there is a C compiler. A row's result is computed by the same instructions whatever rows
 * stand beside it and whichever thread takes it: reductions run over a row's own elements, in their order.
 *
 * Activations are float or bfloat16 (`is_half`), sums are float. Legend: T rows, C channels, H query heads, K kv heads,
 * D head dim, P positions a block.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define LANES 16
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline vec all_of(float x) { return (vec){0} + x; }

static inline vec larger(vec a, vec b) {
    ints is_larger = a > b;
    return (vec)((is_larger & (ints)a) | (~is_larger & (ints)b));
}

static inline vec from_halves(const uint16_t *p) {
    return (vec)(__builtin_convertvector(*(const halves *)p, words) << 16);
}

/* Rounds to the nearest, ties to even; NaN stays NaN. */
static inline void to_halves(uint16_t *p, vec x) {
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    *(halves *)p = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), halves);
}

static inline vec load(const void *p, long at, int is_half) {
    return is_half ? from_halves((const uint16_t *)p + at) : *(const vec *)((const float *)p + at);
}

static inline void store(void *p, long at, vec x, int is_half) {
    if (is_half)
        to_halves((uint16_t *)p + at, x);
    else
        *(vec *)((float *)p + at) = x;
}

/* The last `count` < LANES elements of a row, with zeros behind them. */
static inline vec load_part(const void *p, long at, int count, int is_half) {
    float part[LANES] = {0};
    for (int i = 0; i < count; i++) {
        if (is_half) {
            uint32_t bits = (uint32_t)((const uint16_t *)p)[at + i] << 16;
            __builtin_memcpy(&part[i], &bits, 4);
        } else {
            part[i] = ((const float *)p)[at + i];
        }
    }
    return *(vec *)part;
}

static inline void store_part(void *p, long at, vec x, int count, int is_half) {
    uint16_t part[LANES];
    to_halves(part, x);
    for (int i = 0; i < count; i++) {
        if (is_half)
            ((uint16_t *)p)[at + i] = part[i];
        else
            ((float *)p)[at + i] = ((float *)&x)[i];
    }
}

#define FULL(n) ((n) - (n) % LANES)
#define FOR_PARTS(at, n) for (long at = 0; at < (n); at += LANES)
#define LOAD(p, row, at, n, half) \
    ((at) < FULL(n) ? load(p, (row) + (at), half) : load_part(p, (row) + (at), (int)((n) - (at)), half))
#define STORE(p, row, at, n, x, half) \
    do { \
        if ((at) < FULL(n)) store(p, (row) + (at), x, half); \
        else store_part(p, (row) + (at), x, (int)((n) - (at)), half); \
    } while (0)

static inline float sum_of(vec x) {
    float part[LANES];
    *(vec *)part = x;
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

/* exp for x <= 88, by 2^n times a polynomial (Cephes' coefficients); relative error below 2e-7. */
static inline vec exp_of(vec x) {
    x = larger(x, all_of(-87.0f)); /* what is smaller becomes about 1e-38: nothing beside a sum of at least 1 */
    vec shifted = x * 1.44269504088896341f + 12582912.0f;
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    ints exponent = __builtin_convertvector(n, ints);
    return (vec)((ints)y + (exponent << 23));
}

/* x [T, C] float (+ delta [T, C]) -> total [T, C] float, out = total / rms(total) * weight [T, C]. */
static inline void norm_row(const float *x, const void *delta, const float *weight, float *total, void *out, long row,
                            long width, float eps, int has_delta, int is_half) {
    vec squares = {0};
    FOR_PARTS(at, width) {
        vec value = LOAD(x, row, at, width, 0);
        if (has_delta) {
            value += LOAD(delta, row, at, width, is_half);
            STORE(total, row, at, width, value, 0);
        }
        squares += value * value;
    }
    const float *source = has_delta ? total : x;
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
    FOR_PARTS(at, width) {
        vec value = LOAD(source, row, at, width, 0) * scale * LOAD(weight, 0, at, width, 0);
        STORE(out, row, at, width, value, is_half);
    }
}

void rms_norm(const float *x, const float *weight, void *out, long num_rows, long width, float eps, int is_half,
              int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 4)
    for (long t = 0; t < num_rows; t++) {
        if (is_half) norm_row(x, 0, weight, 0, out, t * width, width, eps, 0, 1);
        else norm_row(x, 0, weight, 0, out, t * width, width, eps, 0, 0);
    }
}

void add_rms_norm(const float *x, const void *delta, const float *weight, float *total, void *out, long num_rows,
                  long width, float eps, int is_half, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 4)
    for (long t = 0; t < num_rows; t++) {
        if (is_half) norm_row(x, delta, weight, total, out, t * width, width, eps, 1, 1);
        else norm_row(x, delta, weight, total, out, t * width, width, eps, 1, 0);
    }
}

static inline void silu_row(const void *gate_up, void *out, long t, long width, int is_half) {
    FOR_PARTS(at, width) {
        vec gate = LOAD(gate_up, 2 * t * width, at, width, is_half);
        vec up = LOAD(gate_up, (2 * t + 1) * width, at, width, is_half);
        vec decay = exp_of(-larger(gate, all_of(-87.0f)));
        STORE(out, t * width, at, width, gate / (1.0f + decay) * up, is_half);
    }
}

/* gate_up [T, 2C] -> silu(gate) * up [T, C]. */
void silu_mul(const void *gate_up, void *out, long num_rows, long width, int is_half, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 2)
    for (long t = 0; t < num_rows; t++) {
        if (is_half) silu_row(gate_up, out, t, width, 1);
        else silu_row(gate_up, out, t, width, 0);
    }
}

/* Keys are cached in tiles of LANES positions, [D, LANES] each, so that a vector holds a dimension of all of them. */
static inline long key_place(long index, long dim) { return index / LANES * LANES * dim + index % LANES; }

static inline void rotate_row(const void *heads, const float *cos, const float *sin, float *queries, uint16_t *keys,
                              uint16_t *values, long t, long index, long num_heads, long num_kv, long dim,
                              long kv_stride, int is_half) {
    long half = dim / 2, num_all = num_heads + 2 * num_kv;
    for (long head = 0; head < num_all; head++) {
        long row = (t * num_all + head) * dim;
        long kv_head = head - num_heads;
        FOR_PARTS(at, half) {
            vec first = LOAD(heads, row, at, half, is_half);
            vec second = LOAD(heads, row + half, at, half, is_half);
            vec low = first, high = second;
            if (head < num_heads + num_kv) {
                vec c = LOAD(cos, t * half, at, half, 0), s = LOAD(sin, t * half, at, half, 0);
                low = first * c - second * s;
                high = second * c + first * s;
            }
            if (head < num_heads) {
                float *out = queries + (t * num_heads + head) * dim;
                STORE(out, 0, at, half, low, 0);
                STORE(out, half, at, half, high, 0);
            } else if (kv_head < num_kv) {
                uint16_t *out = keys + kv_head * kv_stride + key_place(index, dim);
                uint16_t rounded[2 * LANES];
                to_halves(rounded, low);
                to_halves(rounded + LANES, high);
                for (int i = 0; i < LANES && at + i < half; i++) {
                    out[(at + i) * LANES] = rounded[i];
                    out[(half + at + i) * LANES] = rounded[LANES + i];
                }
            } else {
                uint16_t *out = values + (kv_head - num_kv) * kv_stride + index * dim;
                STORE(out, 0, at, half, low, 1);
                STORE(out, half, at, half, high, 1);
            }
        }
    }
}

/* heads [T, H + 2K, D] -> queries [T, H, D] float; keys and values into the cache [K, positions, D] at indices [T]. */
void rotate_and_cache(const void *heads, const float *cos, const float *sin, float *queries, uint16_t *keys,
                      uint16_t *values, const int64_t *indices, long num_rows, long num_heads, long num_kv, long dim,
                      long kv_stride, int is_half, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows > 2)
    for (long t = 0; t < num_rows; t++) {
        if (is_half)
            rotate_row(heads, cos, sin, queries, keys, values, t, indices[t], num_heads, num_kv, dim, kv_stride, 1);
        else
            rotate_row(heads, cos, sin, queries, keys, values, t, indices[t], num_heads, num_kv, dim, kv_stride, 0);
    }
}

/* Scores of one query head, and the sum of their exponentials, which take their place. */
static inline float soften(float *scores, long num_keys) {
    vec peaks = *(vec *)scores;
    for (long n = LANES; n < num_keys; n += LANES) {
        peaks = larger(*(vec *)(scores + n), peaks);
    }
    float peak = -INFINITY;
    for (int i = 0; i < LANES; i++) peak = ((float *)&peaks)[i] > peak ? ((float *)&peaks)[i] : peak;
    vec total = {0};
    for (long n = 0; n < num_keys; n += LANES) {
        vec part = exp_of(*(vec *)(scores + n) - peak);
        if (n + LANES > num_keys)
            for (int i = 0; i < LANES; i++)
                if (n + i >= num_keys) ((float *)&part)[i] = 0.0f;
        *(vec *)(scores + n) = part;
        total += part;
    }
    return sum_of(total);
}

/* One position, one kv head and its G query heads. scores [G, room] is scratch. */
static inline void attend_one(const float *queries, const uint16_t *keys, const uint16_t *values, void *out,
                              const int32_t *table, long num_keys, long group, long dim, long block, float scale,
                              float *scores, long room, int is_half) {
    for (long n = 0; n < num_keys;) {
        long index = table[n / block] * block + n % block, lane = index % LANES;
        long run = LANES - lane, left = block - n % block;
        run = run < left ? run : left;
        run = run < num_keys - n ? run : num_keys - n;
        const uint16_t *tile = keys + (index - lane) * dim;
        /* What is needed next is elsewhere in memory: ask for it while this is computed. */
        const uint16_t *value = values + index * dim, *ahead = tile;
        if (n + run < num_keys) ahead = keys + (long)table[(n + run) / block] * block / LANES * LANES * dim;
        for (long g = 0; g < group; g += 4) { /* four query heads share a load of the keys */
            vec a = {0}, b = {0}, c = {0}, d = {0};
            const float *q0 = queries + g * dim;
            const float *q1 = g + 1 < group ? q0 + dim : q0, *q2 = g + 2 < group ? q0 + 2 * dim : q0;
            const float *q3 = g + 3 < group ? q0 + 3 * dim : q0;
            for (long i = 0; i < dim; i++) {
                vec key = from_halves(tile + i * LANES);
                __builtin_prefetch(ahead + i * LANES);
                __builtin_prefetch(value + i * LANES);
                a += key * q0[i];
                b += key * q1[i];
                c += key * q2[i];
                d += key * q3[i];
            }
            vec all[4] = {a, b, c, d};
            for (long h = 0; h < 4 && g + h < group; h++)
                for (long i = 0; i < run; i++) scores[(g + h) * room + n + i] = ((float *)&all[h])[lane + i] * scale;
        }
        n += run;
    }
    for (long g = 0; g < group; g++) {
        for (long n = num_keys; n % LANES; n++) scores[g * room + n] = -INFINITY;
        float total = soften(scores + g * room, num_keys);
        for (long n = 0; n < num_keys; n += LANES) *(vec *)(scores + g * room + n) /= total;
    }
    FOR_PARTS(at, dim) {
        for (long g = 0; g < group; g += 4) {
            vec a = {0}, b = {0}, c = {0}, d = {0};
            const float *p0 = scores + g * room;
            const float *p1 = g + 1 < group ? p0 + room : p0, *p2 = g + 2 < group ? p0 + 2 * room : p0;
            const float *p3 = g + 3 < group ? p0 + 3 * room : p0;
            for (long start = 0; start < num_keys; start += block) {
                const uint16_t *value = values + table[start / block] * block * dim;
                long end = start + block < num_keys ? start + block : num_keys;
                for (long n = start; n < end; n++, value += dim) {
                    vec v = LOAD(value, 0, at, dim, 1);
                    a += v * p0[n];
                    b += v * p1[n];
                    c += v * p2[n];
                    d += v * p3[n];
                }
            }
            vec all[4] = {a, b, c, d};
            for (long h = 0; h < 4 && g + h < group; h++) STORE(out, (g + h) * dim, at, dim, all[h], is_half);
        }
    }
}

/* queries [T, H, D] float on the caches of a layer -> out [T, H, D]. Position t sees keys 0 to positions[t] of the
 * sequence whose block ids are row slots[t] of the tables. 1 when there is no memory for the scores. */
int attend(const float *queries, const uint16_t *keys, const uint16_t *values, void *out, const int64_t *slots,
           const int64_t *positions, const int32_t *tables, long num_rows, long num_heads, long num_kv, long dim,
           long block, long kv_stride, long table_stride, long most_keys, float scale, int is_half, int num_threads) {
    long group = num_heads / num_kv, room = (most_keys + LANES - 1) / LANES * LANES;
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_rows > 1 || most_keys > 256)
    {
        float *scores = malloc(sizeof(float) * (size_t)(group * room));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        } else {
#pragma omp for schedule(dynamic, 4) collapse(2)
            for (long t = 0; t < num_rows; t++)
                for (long k = 0; k < num_kv; k++) {
                    long head = t * num_heads + k * group;
                    const int32_t *table = tables + slots[t] * table_stride;
                    const float *q = queries + head * dim;
                    if (is_half)
                        attend_one(q, keys + k * kv_stride, values + k * kv_stride, (uint16_t *)out + head * dim, table,
                                   positions[t] + 1, group, dim, block, scale, scores, room, 1);
                    else
                        attend_one(q, keys + k * kv_stride, values + k * kv_stride, (float *)out + head * dim, table,
                                   positions[t] + 1, group, dim, block, scale, scores, room, 0);
                }
        }
        free(scores);
    }
    return failed;
}
