/* Convolution (stride 1, no padding), BatchNorm with the batch's statistics, ReLU and 2x2 maximum, and their gradient.

       z = conv(x, w) + bias;  z^ = (z - mean) / sqrt(var + eps);  out = maxpool(relu(gamma z^ + beta))

   A vector holds one pixel of LANES samples. So every loop over channels, rows and columns is over whole vectors,
   whatever the sizes of the layer; a tile of sums stays in registers. Samples that a last vector lacks are zeros, and
   are kept out of every sum over samples.

   Compiled once for each type of number: cc -DREAL=float. cpu_fused.py owns the memory. */

#include <math.h>
#include <stddef.h>
#include <string.h>

/* The sums of a tile, and what they are made of, fill the registers. Where vectors are wider than a register or tiles
   larger, sums go to memory and back at every product: with AVX2 that took ten times as long. */
#if defined(BYTES) /* of a register; tests try all three */
#elif defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define MOST_CHANNELS 4
#define MOST_COLUMNS 7
#define MOST_FILTERS 4
#else /* 16 */
#define MOST_CHANNELS 3
#define MOST_COLUMNS 4
#define MOST_FILTERS 2
#endif
#define MOST_TAPS 5
#define LANES ((int)(BYTES / sizeof(REAL)))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef REAL vec __attribute__((vector_size(BYTES)));
typedef __typeof__((vec){0} < (vec){0}) mask;

typedef struct {
    int samples, in, height, width, out, rows, columns; /* rows and columns: of a filter */
} Shape;

/* ---- pieces of nearly equal size, and a switch from their size to code made for it ---- */

INLINE int pieces(int n, int most) { return (n + most - 1) / most; }
INLINE int begin_of(int piece, int n, int num) { return piece * n / num; }

#define EACH_COLUMNS(A, F) F(A, 1) F(A, 2) F(A, 3) F(A, 4) F(A, 5) F(A, 6) F(A, 7)
#define EACH_TAPS(A, F) F(A, 1) F(A, 2) F(A, 3) F(A, 4) F(A, 5)

/* ---- samples first, as torch has them, and samples last, in vectors ---- */

static void pack(const REAL *x, int samples, size_t pixels, vec *packed) {
    REAL *to = (REAL *)packed;
    if (samples < LANES) memset(to, 0, pixels * sizeof(vec));
    int lanes = samples < LANES ? samples : LANES;
    for (size_t p = 0; p < pixels; p += 16) {
        size_t n = pixels - p < 16 ? pixels - p : 16;
        for (int l = 0; l < lanes; l++)
            for (size_t q = p; q < p + n; q++) to[q * LANES + l] = x[l * pixels + q];
    }
}

static void unpack(const vec *packed, int samples, size_t pixels, size_t sample_stride, REAL *x) {
    const REAL *from = (const REAL *)packed;
    int lanes = samples < LANES ? samples : LANES;
    for (size_t p = 0; p < pixels; p += 16) {
        size_t n = pixels - p < 16 ? pixels - p : 16;
        for (int l = 0; l < lanes; l++)
            for (size_t q = p; q < p + n; q++) x[l * sample_stride + q] = from[q * LANES + l];
    }
}

INLINE vec where(mask m, vec a) { return (vec)((mask)a & m); } /* elsewhere 0 */
INLINE vec larger(vec a, vec b) { return (vec)(((mask)a & (a > b)) | ((mask)b & ~(a > b))); }

static double over_samples(vec sums, int samples) {
    double total = 0;
    for (int l = 0; l < LANES && l < samples; l++) total += sums[l];
    return total;
}

/* ---- convolution: out[o][w] = bias[o] + sum_cij k[c][i][j][o] in[c][i][w + j], o and w in one tile ---- */

typedef struct {
    const vec *in;
    size_t plane, row;                   /* strides of a channel and a row of `in` */
    int channels, from, to, rows, taps;  /* filter rows from..to of `rows` are used */
    const REAL *filters, *bias;          /* filters: [c][i][j][o]; no bias: NULL */
    vec *out;
    size_t out_plane;
} Tile;

INLINE void sum_tile(const int O, const int W, const Tile t) {
    if (O > MOST_CHANNELS || W > MOST_COLUMNS) return; /* never called */
    vec sum[MOST_CHANNELS][MOST_COLUMNS];
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int w = 0; w < W; w++) sum[o][w] = (vec){0} + (t.bias ? t.bias[o] : 0);
    for (int c = 0; c < t.channels; c++)
        for (int i = t.from; i < t.to; i++) {
            const vec *in = t.in + c * t.plane + i * t.row;
            const REAL *k = t.filters + (size_t)(c * t.rows + i) * t.taps * O;
            for (int j = 0; j < t.taps; j++, in++, k += O)
                UNROLL for (int w = 0; w < W; w++)
                    UNROLL for (int o = 0; o < O; o++) sum[o][w] += in[w] * k[o];
        }
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int w = 0; w < W; w++) t.out[o * t.out_plane + w] = sum[o][w];
}

static void tile(int channels, int columns, const Tile t) {
#define F(O, W) case O * 8 + W: sum_tile(O, W, t); break;
    switch (channels * 8 + columns) { EACH_COLUMNS(1, F) EACH_COLUMNS(2, F) EACH_COLUMNS(3, F) EACH_COLUMNS(4, F) }
#undef F
}

/* One row of all output channels. `t` points at its first column; filters are grouped by tile. */
static void convolve_row(Tile t, int channels, int width) {
    int groups = pieces(channels, MOST_CHANNELS), strips = pieces(width, MOST_COLUMNS);
    Tile each = t;
    for (int g = 0; g < groups; g++) {
        int o = begin_of(g, channels, groups), num = begin_of(g + 1, channels, groups) - o;
        each.filters = t.filters + (size_t)o * t.channels * t.rows * t.taps;
        each.bias = t.bias ? t.bias + o : NULL;
        for (int s = 0; s < strips; s++) {
            int w = begin_of(s, width, strips);
            each.in = t.in + w;
            each.out = t.out + o * t.out_plane + w;
            tile(num, begin_of(s + 1, width, strips) - w, each);
        }
    }
}

/* [o][c][i][j] -> for each group of o: [c][i][j][o]. `turned`: o and c change places, i and j are reversed. */
static void group_filters(const REAL *w, Shape s, int turned, REAL *filters) {
    int to = turned ? s.in : s.out, from = turned ? s.out : s.in, taps = s.rows * s.columns;
    int groups = pieces(to, MOST_CHANNELS);
    for (int g = 0; g < groups; g++)
        for (int c = 0; c < from; c++)
            for (int t = 0; t < taps; t++)
                for (int o = begin_of(g, to, groups); o < begin_of(g + 1, to, groups); o++)
                    *filters++ = turned ? w[(size_t)(c * to + o) * taps + taps - 1 - t] : w[(size_t)(o * from + c) * taps + t];
}

/* ---- gradient of the filters: sum[o][j] += sum_w g[o][w] x[w + j], one row of one channel ---- */

INLINE void add_taps(const int O, const int J, const vec *g, size_t plane, const vec *x, int width, vec *sums, size_t filter) {
    if (O > MOST_FILTERS) return; /* never called */
    vec sum[MOST_FILTERS][MOST_TAPS];
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int j = 0; j < J; j++) sum[o][j] = sums[o * filter + j];
    for (int w = 0; w < width; w++)
        UNROLL for (int o = 0; o < O; o++)
            UNROLL for (int j = 0; j < J; j++) sum[o][j] += g[o * plane + w] * x[w + j];
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int j = 0; j < J; j++) sums[o * filter + j] = sum[o][j];
}

static void taps(int channels, int num, const vec *g, size_t plane, const vec *x, int width, vec *sums, size_t filter) {
#define F(O, J) case O * 8 + J: add_taps(O, J, g, plane, x, width, sums, filter); break;
    switch (channels * 8 + num) { EACH_TAPS(1, F) EACH_TAPS(2, F) EACH_TAPS(3, F) EACH_TAPS(4, F) }
#undef F
}

static void add_filter_gradient(Shape s, const vec *x, const vec *g, size_t g_plane, size_t g_row, vec *sums) {
    int height = s.height - s.rows + 1, width = s.width - s.columns + 1;
    int groups = pieces(s.out, MOST_FILTERS), strips = pieces(s.columns, MOST_TAPS);
    size_t filter = (size_t)s.in * s.rows * s.columns;
    for (int h = 0; h < height; h++)
        for (int p = 0; p < groups; p++) {
            int o = begin_of(p, s.out, groups), num = begin_of(p + 1, s.out, groups) - o;
            for (int c = 0; c < s.in; c++)
                for (int i = 0; i < s.rows; i++)
                    for (int q = 0; q < strips; q++) {
                        int j = begin_of(q, s.columns, strips);
                        taps(num, begin_of(q + 1, s.columns, strips) - j, g + o * g_plane + h * g_row, g_plane,
                             x + ((size_t)c * s.height + h + i) * s.width + j, width,
                             sums + o * filter + ((size_t)c * s.rows + i) * s.columns + j, filter);
                    }
        }
}

/* ---- the four layers ---- */

typedef struct {
    REAL mean, scale, offset;
} Norm;

INLINE vec value(vec z, Norm norm) { return (z - norm.mean) * norm.scale + norm.offset; }

/* x, w, bias, gamma, beta, running_mean, running_var -> out; packed x, z, mean and rstd are kept for `backward`. */
void forward(Shape s, const REAL *x, const REAL *w, const REAL *bias, const REAL *gamma, const REAL *beta,
             REAL *running_mean, REAL *running_var, double eps, double momentum, vec *x_packed, vec *z, REAL *mean,
             REAL *rstd, REAL *filters, REAL *out) {
    int height = s.height - s.rows + 1, width = s.width - s.columns + 1, blocks = pieces(s.samples, LANES);
    int pooled_height = height / 2, pooled_width = width / 2;
    size_t in_pixels = (size_t)s.in * s.height * s.width, plane = (size_t)height * width;
    group_filters(w, s, 0, filters);
    for (int b = 0; b < blocks; b++) {
        vec *mine = x_packed + b * in_pixels;
        pack(x + b * LANES * in_pixels, s.samples - b * LANES, in_pixels, mine);
        Tile t = {mine, (size_t)s.height * s.width, s.width, s.in, 0, s.rows, s.rows, s.columns, filters, bias,
                  z + b * s.out * plane, plane};
        for (int h = 0; h < height; h++, t.in += s.width, t.out += width) convolve_row(t, s.out, width);
    }
    double n = (double)s.samples * plane;
    for (int o = 0; o < s.out; o++) {
        double total = 0, squares = 0;
        for (int b = 0; b < blocks; b++) {
            vec sums[4] = {{0}, {0}, {0}, {0}};
            const vec *mine = z + (b * s.out + o) * plane;
            for (size_t p = 0; p < plane; p++) sums[p % 4] += mine[p];
            total += over_samples((sums[0] + sums[1]) + (sums[2] + sums[3]), s.samples - b * LANES);
        }
        mean[o] = total / n;
        for (int b = 0; b < blocks; b++) {
            vec sums[4] = {{0}, {0}, {0}, {0}};
            const vec *mine = z + (b * s.out + o) * plane;
            for (size_t p = 0; p < plane; p++) sums[p % 4] += (mine[p] - mean[o]) * (mine[p] - mean[o]);
            squares += over_samples((sums[0] + sums[1]) + (sums[2] + sums[3]), s.samples - b * LANES);
        }
        double var = squares / n;
        rstd[o] = 1 / sqrt(var + eps);
        running_mean[o] = (1 - momentum) * running_mean[o] + momentum * mean[o];
        running_var[o] = (1 - momentum) * running_var[o] + momentum * var * n / (n - 1);
        Norm norm = {mean[o], rstd[o] * gamma[o], beta[o]};
        vec row[pooled_width];
        for (int b = 0; b < blocks; b++)
            for (int h = 0; h < pooled_height; h++) {
                const vec *upper = z + ((b * s.out + o) * (size_t)height + 2 * h) * width, *lower = upper + width;
                for (int p = 0; p < pooled_width; p++, upper += 2, lower += 2) {
                    vec most = larger(larger(value(upper[0], norm), value(upper[1], norm)),
                                      larger(value(lower[0], norm), value(lower[1], norm)));
                    row[p] = where(~(most < 0), most); /* what is not a number stays so */
                }
                unpack(row, s.samples - b * LANES, pooled_width, (size_t)s.out * pooled_height * pooled_width,
                       out + ((size_t)(b * LANES * s.out + o) * pooled_height + h) * pooled_width);
            }
    }
}

/* The gradient of a 2x2 window's maximum goes to the first of the largest, if that one is positive. */
INLINE void spread(const vec *upper, const vec *lower, vec g, Norm norm, vec *upper_g, vec *lower_g) {
    vec a = value(upper[0], norm), b = value(upper[1], norm), c = value(lower[0], norm), d = value(lower[1], norm);
    vec top = larger(a, b), bottom = larger(c, d);
    mask on = larger(top, bottom) > 0, above = on & (top >= bottom), below = on & (top < bottom);
    upper_g[0] = where(above & (a >= b), g), upper_g[1] = where(above & (a < b), g);
    lower_g[0] = where(below & (c >= d), g), lower_g[1] = where(below & (c < d), g);
}

/* g, and what `forward` kept -> dw, dgamma, dbeta, and dx unless it is NULL. dbias is 0: BatchNorm takes a constant out.
   dz has room for a margin of columns - 1 zeros on both sides of a row, so that dx is a convolution too. */
void backward(Shape s, const REAL *g, const REAL *w, const REAL *gamma, const REAL *beta, const vec *x_packed,
              const vec *z, const REAL *mean, const REAL *rstd, vec *g_packed, vec *dz, vec *dw_sums, vec *dx_packed,
              REAL *filters, REAL *dx, REAL *dw, REAL *dgamma, REAL *dbeta) {
    int height = s.height - s.rows + 1, width = s.width - s.columns + 1, blocks = pieces(s.samples, LANES);
    int pooled_height = height / 2, pooled_width = width / 2, margin = s.columns - 1, row = width + 2 * margin;
    size_t in_pixels = (size_t)s.in * s.height * s.width, plane = (size_t)height * width;
    size_t pooled = (size_t)s.out * pooled_height * pooled_width, dz_plane = (size_t)height * row;
    size_t num_filters = (size_t)s.out * s.in * s.rows * s.columns;
    double n = (double)s.samples * plane;
    memset(dz, 0, blocks * s.out * dz_plane * sizeof(vec));
    for (int b = 0; b < blocks; b++)
        pack(g + b * LANES * pooled, s.samples - b * LANES, pooled, g_packed + b * pooled);
    for (int o = 0; o < s.out; o++) {
        Norm norm = {mean[o], rstd[o] * gamma[o], beta[o]};
        double by_beta = 0, by_gamma = 0;
        for (int b = 0; b < blocks; b++) {
            vec sums = {0}, products = {0};
            for (int h = 0; h < pooled_height; h++) {
                const vec *upper = z + ((b * s.out + o) * (size_t)height + 2 * h) * width;
                const vec *here = g_packed + b * pooled + ((size_t)o * pooled_height + h) * pooled_width;
                vec *to = dz + (b * s.out + o) * dz_plane + (size_t)2 * h * row + margin;
                for (int p = 0; p < pooled_width; p++, upper += 2, to += 2) {
                    const vec *lower = upper + width;
                    spread(upper, lower, here[p], norm, to, to + row);
                    sums += (to[0] + to[1]) + (to[row] + to[row + 1]);
                    products += (to[0] * (upper[0] - mean[o]) + to[1] * (upper[1] - mean[o])) +
                                (to[row] * (lower[0] - mean[o]) + to[row + 1] * (lower[1] - mean[o]));
                }
            }
            by_beta += over_samples(sums, s.samples - b * LANES);
            by_gamma += over_samples(products, s.samples - b * LANES) * rstd[o];
        }
        dbeta[o] = by_beta, dgamma[o] = by_gamma;
        REAL offset = by_beta / n, slope = by_gamma / n * rstd[o];
        for (int b = 0; b < blocks; b++) {
            vec scale = {0}; /* of padding */
            for (int l = 0; l < LANES && l < s.samples - b * LANES; l++) scale[l] = norm.scale;
            for (int h = 0; h < height; h++) {
                const vec *from = z + ((b * s.out + o) * (size_t)height + h) * width;
                vec *to = dz + ((b * s.out + o) * (size_t)height + h) * row + margin;
                for (int p = 0; p < width; p++) to[p] = scale * (to[p] - offset - slope * (from[p] - mean[o]));
            }
        }
    }
    memset(dw_sums, 0, num_filters * sizeof(vec));
    for (int b = 0; b < blocks; b++)
        add_filter_gradient(s, x_packed + b * in_pixels, dz + b * s.out * dz_plane + margin, dz_plane, row, dw_sums);
    for (size_t f = 0; f < num_filters; f++) dw[f] = over_samples(dw_sums[f], LANES);
    if (!dx) return;
    group_filters(w, s, 1, filters);
    for (int b = 0; b < blocks; b++) {
        for (int h = 0; h < s.height; h++) {
            int from = s.rows - 1 - h, to = height + s.rows - 1 - h;
            Tile t = {dz + b * s.out * dz_plane + (ptrdiff_t)(h - s.rows + 1) * row, dz_plane, row, s.out,
                      from > 0 ? from : 0, to < s.rows ? to : s.rows, s.rows, s.columns, filters, NULL,
                      dx_packed + (size_t)h * s.width, (size_t)s.height * s.width};
            convolve_row(t, s.in, s.width);
        }
        unpack(dx_packed, s.samples - b * LANES, in_pixels, in_pixels, dx + b * LANES * in_pixels);
    }
}
