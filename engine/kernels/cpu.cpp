/* float32 kernels for CPUs where torch has none that are fused: the compiler's own vectors,
 * which become whatever instructions the machine has. One thread, no allocation.
 */

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
enum { WIDTH = 16, VECTORS = 4 };
#else
enum { WIDTH = 8, VECTORS = 2 };
#endif

/* A product's tile: ROWS x VECTORS accumulators stay in registers. */
enum { ROWS = 6, PANEL = VECTORS * WIDTH, BLOCK = 256 };

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef float loose __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4)));

static const float HIDDEN = -1e30f; /* the score of a key that a query does not see */

static inline vec load(const float *from) { return *(const loose *)from; }
static inline void store(float *to, vec value) { *(loose *)to = value; }
static inline vec all(float value) { return value - vec{}; }
static inline vec at_least(vec x, vec least) { return x > least ? x : least; }

/* e^x for x <= 88; below -87 it is that of -87. By 2^n e^r with |r| <= ln(2) / 2 and a polynomial;
 * within 2 units in the last place. */
static inline vec exponential(vec x) {
    x = at_least(x, all(-87.0f));
    vec shifted = x * 1.44269504f + all(12582912.0f); /* 1.5 * 2^23: rounds to a whole number */
    vec n = shifted - all(12582912.0f);
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    ivec value;
    std::memcpy(&value, &p, sizeof value);
    value += bits;
    std::memcpy(&p, &value, sizeof p);
    return p;
}

static inline float sum_of(vec x) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

static inline float largest_of(vec x) {
    float most = x[0];
    for (int i = 1; i < WIDTH; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* to [ROWS][stride] = or += left [depth][ROWS] transposed times right, whose rows of PANEL floats
 * are `step` apart. */
static inline void tile(const float *left, const float *right, ptrdiff_t step, int depth,
                        float *to, ptrdiff_t stride, int add) {
    vec sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            sums[i][j] = add ? load(to + i * stride + j * WIDTH) : vec{};
    for (int k = 0; k < depth; k++) {
        vec b[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) b[j] = load(right + k * step + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            vec a = all(left[k * ROWS + i]);
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) sums[i][j] += a * b[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) store(to + i * stride + j * WIDTH, sums[i][j]);
}

static inline ptrdiff_t up(ptrdiff_t n, ptrdiff_t to) { return (n + to - 1) / to * to; }

/* Scores of one strip of ROWS queries over a block of keys become weights: exp(score - highest so
 * far), transposed to [keys][ROWS]; what was summed before is scaled to the new highest. */
static void soften(float *scores, int keys, int whole, const int64_t *seen_from,
                   const int64_t *seen_to, int64_t first_key, float *weights, float *sums,
                   ptrdiff_t wide, float *highest, float *total) {
    for (int i = 0; i < ROWS; i++) {
        float *row = scores + i * BLOCK;
        int64_t from = seen_from[i] - first_key, to = seen_to[i] - first_key;
        for (int64_t k = 0; k < from && k < whole; k++) row[k] = HIDDEN;
        for (int64_t k = to < 0 ? 0 : to; k < whole; k++) row[k] = HIDDEN;
        vec most = load(row);
        for (int k = WIDTH; k < whole; k += WIDTH) most = at_least(load(row + k), most);
        float before = highest[i], now = largest_of(most);
        now = now > before ? now : before;
        vec top = all(now), sum = {};
        for (int k = 0; k < whole; k += WIDTH) {
            vec weight = exponential(load(row + k) - top);
            sum += weight;
            store(row + k, weight);
        }
        if (now != before) {
            float less = std::exp(before - now);
            for (int k = 0; k < wide; k += WIDTH)
                store(sums + i * wide + k, load(sums + i * wide + k) * less);
            total[i] *= less;
            highest[i] = now;
        }
        total[i] += sum_of(sum);
    }
    for (int k = 0; k < keys; k++)
        for (int i = 0; i < ROWS; i++) weights[k * ROWS + i] = scores[i * BLOCK + k];
}

extern "C" {

/* How many floats `attend` works in. */
int64_t attend_space(int64_t n, int64_t m, int64_t group, int64_t d, int64_t dv) {
    ptrdiff_t rows = up(n * group, ROWS), keys = up(m, BLOCK), wide = up(dv, PANEL);
    return rows * d + keys * d + keys * wide + rows * wide + 2 * rows + 2 * ROWS * BLOCK;
}

/* Causal attention: queries [n, heads, d] are the last n of the positions of keys [m, kv_heads, d]
 * and values [m, kv_heads, dv]; out [n, heads, dv]. Strides are in floats, of positions and heads;
 * features lie side by side. window: how many keys a query sees, its own the last. */
void attend(const float *query, int64_t query_step, int64_t query_head, const float *key,
            int64_t key_step, int64_t key_head, const float *value, int64_t value_step,
            int64_t value_head, float *out, int64_t n, int64_t m, int64_t heads, int64_t kv_heads,
            int64_t d, int64_t dv, int64_t window, float scale, float *space) {
    ptrdiff_t group = heads / kv_heads, rows = n * group, strips = up(rows, ROWS) / ROWS;
    ptrdiff_t keys = up(m, BLOCK), wide = up(dv, PANEL);
    float *q = space, *k = q + strips * ROWS * d, *v = k + keys * d, *sums = v + keys * wide;
    float *highest = sums + strips * ROWS * wide, *total = highest + strips * ROWS;
    float *scores = total + strips * ROWS, *weights = scores + ROWS * BLOCK;
    std::memset(v, 0, (size_t)(keys * wide) * sizeof *v);
    for (int64_t h = 0; h < kv_heads; h++) {
        /* Row r is head h * group + r % group of query r / group. */
        for (ptrdiff_t r = 0; r < strips * ROWS; r++) {
            const float *from = query + (r / group) * query_step + (h * group + r % group) * query_head;
            float *to = q + r / ROWS * ROWS * d + r % ROWS;
            for (int64_t i = 0; i < d; i++) to[i * ROWS] = r < rows ? from[i] * scale : 0;
        }
        for (ptrdiff_t p = 0; p < keys; p += PANEL)
            for (ptrdiff_t j = 0; j < PANEL; j++) {
                const float *from = key + (p + j) * key_step + h * key_head;
                float *to = k + p * d + j;
                for (int64_t i = 0; i < d; i++) to[i * PANEL] = p + j < m ? from[i] : 0;
            }
        for (ptrdiff_t j = 0; j < m; j++)
            std::memcpy(v + j * wide, value + j * value_step + h * value_head, (size_t)dv * sizeof *v);
        std::memset(sums, 0, (size_t)(strips * ROWS * wide) * sizeof *sums);
        std::memset(total, 0, (size_t)(strips * ROWS) * sizeof *total);
        for (ptrdiff_t r = 0; r < strips * ROWS; r++) highest[r] = HIDDEN;
        for (int64_t first = 0; first < m; first += BLOCK) {
            for (ptrdiff_t s = 0; s < strips; s++) {
                int64_t from[ROWS], to[ROWS], low = m, high = 0;
                for (int i = 0; i < ROWS; i++) {
                    ptrdiff_t r = s * ROWS + i < rows ? s * ROWS + i : rows - 1;
                    to[i] = m - n + r / group + 1;
                    from[i] = to[i] > window ? to[i] - window : 0;
                    low = from[i] < low ? from[i] : low;
                    high = to[i] > high ? to[i] : high;
                }
                if (low >= first + BLOCK || high <= first) continue;
                int count = (int)std::min<int64_t>(high - first, BLOCK);
                int whole = (int)up(count, PANEL);
                for (int p = 0; p < whole; p += PANEL)
                    tile(q + s * ROWS * d, k + (first + p) * d, PANEL, (int)d, scores + p, BLOCK, 0);
                float *mine = sums + s * ROWS * wide;
                soften(scores, count, whole, from, to, first, weights, mine, wide,
                       highest + s * ROWS, total + s * ROWS);
                for (ptrdiff_t p = 0; p < wide; p += PANEL)
                    tile(weights, v + first * wide + p, wide, count, mine + p, wide, 1);
            }
        }
        for (ptrdiff_t r = 0; r < rows; r++) {
            float *to = out + ((r / group) * heads + h * group + r % group) * dv;
            float share = 1.0f / total[r];
            for (int64_t i = 0; i < dv; i++) to[i] = sums[r * wide + i] * share;
        }
    }
}

/* out [rows, width] = weight * x / sqrt(mean(x^2) + eps). */
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width,
              float eps) {
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        vec squares = {};
        int64_t i = 0;
        for (; i + WIDTH <= width; i += WIDTH) squares += load(x + i) * load(x + i);
        float total = sum_of(squares);
        for (; i < width; i++) total += x[i] * x[i];
        float factor = 1.0f / std::sqrt(total / (float)width + eps);
        for (i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
    }
}

/* out [tokens, heads, 2 * half] = x, pair by pair turned by the angles of cos, sin [tokens, half]:
 * pairs are (i, i + half), or (2i, 2i + 1) when interleaved; halves lie apart in `out`. */
void rotate(const float *x, const float *cosines, const float *sines, float *out, int64_t tokens,
            int64_t heads, int64_t half, int64_t interleaved) {
    for (int64_t t = 0; t < tokens; t++, cosines += half, sines += half)
        for (int64_t h = 0; h < heads; h++, x += 2 * half, out += 2 * half) {
            if (interleaved)
                for (int64_t i = 0; i < half; i++) {
                    out[i] = x[2 * i] * cosines[i] - x[2 * i + 1] * sines[i];
                    out[half + i] = x[2 * i + 1] * cosines[i] + x[2 * i] * sines[i];
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    out[i] = x[i] * cosines[i] - x[half + i] * sines[i];
                    out[half + i] = x[half + i] * cosines[i] + x[i] * sines[i];
                }
        }
}

/* out [rows, width] = silu(first half of both) * second half; both [rows, 2 * width]. */
void gated(const float *both, float *out, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, both += 2 * width, out += width) {
        int64_t i = 0;
        for (; i + WIDTH <= width; i += WIDTH) {
            vec gate = load(both + i), low = -gate;
            low = low < all(87.0f) ? low : all(87.0f);
            store(out + i, gate / (exponential(low) + 1.0f) * load(both + width + i));
        }
        for (; i < width; i++) out[i] = both[i] / (1.0f + std::exp(-both[i])) * both[width + i];
    }
}

/* out[places[r]] += weights[r] * x[r]: rows of `width`. */
void add_rows(float *out, const int32_t *places, const float *weights, const float *x, int64_t rows,
              int64_t width) {
    for (int64_t r = 0; r < rows; r++, x += width) {
        float *to = out + places[r] * width;
        for (int64_t i = 0; i < width; i++) to[i] += weights[r] * x[i];
    }
}

}
