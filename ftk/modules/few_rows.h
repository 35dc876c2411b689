/* Products of a few rows with a matrix, float32: y = x W^T + b, x [M, K], W [O, K], b [O], y [M, O].

Each weight is read from memory once and multiplied with all rows while it is in a register or the nearest cache; the
matrix is neither packed nor copied. Tiles of 4 rows by 3 outputs: 12 sums, 3 weights and 1 input fill the 16 vector
registers of AVX2. The weights of the next tile are fetched ahead, since a processor foresees reading within a line
only (4 rows: 9.5 ms without it, 7.3 with it, of what `few_rows.py` measures). Each sum runs over K in one order, whatever M and the number of threads, so that a row's results are
the same bits alone and among others.

Vectors are GCC's (also Clang's) vector extension; the functions are compiled for AVX2 with FMA and called only where
the processor has both. */

#ifndef FTK_FEW_ROWS_H
#define FTK_FEW_ROWS_H

#if defined(__x86_64__) && defined(__GNUC__)

#define FTK_WIDTH 8
typedef float ftk_vector __attribute__((vector_size(32)));
typedef float ftk_in_memory __attribute__((vector_size(32), aligned(4), may_alias));

#define FTK_AVX2 __attribute__((target("avx2,fma")))
#define FTK_UNROLL _Pragma("GCC unroll 4")

/* `rows` lines of x, `outputs` lines of w; the strides of x and w are K, that of y is `stride`. */
#define FTK_TILE(rows, outputs)                                                                                \
    FTK_AVX2 static void ftk_tile_##rows##_##outputs(                                                          \
        const float *x, const float *w, const float *bias, long K, float *y, long stride                       \
    ) {                                                                                                        \
        ftk_vector sums[rows][outputs];                                                                        \
        long k = 0;                                                                                            \
        FTK_UNROLL for (int m = 0; m < rows; m++)                                                              \
            FTK_UNROLL for (int o = 0; o < outputs; o++) sums[m][o] = (ftk_vector){0};                         \
        for (; k + FTK_WIDTH <= K; k += FTK_WIDTH) {                                                           \
            ftk_vector weights[outputs];                                                                       \
            FTK_UNROLL for (int o = 0; o < outputs; o++) __builtin_prefetch(w + (outputs + o) * K + k);        \
            FTK_UNROLL for (int o = 0; o < outputs; o++) weights[o] = *(const ftk_in_memory *)(w + o * K + k); \
            FTK_UNROLL for (int m = 0; m < rows; m++) {                                                        \
                ftk_vector input = *(const ftk_in_memory *)(x + m * K + k);                                    \
                FTK_UNROLL for (int o = 0; o < outputs; o++) sums[m][o] += input * weights[o];                 \
            }                                                                                                  \
        }                                                                                                      \
        FTK_UNROLL for (int m = 0; m < rows; m++) FTK_UNROLL for (int o = 0; o < outputs; o++) {               \
            float lanes[FTK_WIDTH], sum = bias ? bias[o] : 0.0f;                                               \
            *(ftk_in_memory *)lanes = sums[m][o];                                                              \
            for (int lane = 0; lane < FTK_WIDTH; lane++) sum += lanes[lane];                                   \
            for (long rest = k; rest < K; rest++) sum += x[m * K + rest] * w[o * K + rest];                    \
            y[m * stride + o] = sum;                                                                           \
        }                                                                                                      \
    }

FTK_TILE(1, 1)
FTK_TILE(2, 1)
FTK_TILE(3, 1)
FTK_TILE(4, 1)
FTK_TILE(1, 3)
FTK_TILE(2, 3)
FTK_TILE(3, 3)
FTK_TILE(4, 3)

typedef void (*ftk_tile)(const float *, const float *, const float *, long, float *, long);

/* Outputs `begin` to `end` of all rows. */
static void ftk_some_outputs(
    const float *x, long M, const float *w, const float *bias, long O, long K, float *y, long begin, long end
) {
    static const ftk_tile of_one[] = {ftk_tile_1_1, ftk_tile_2_1, ftk_tile_3_1, ftk_tile_4_1};
    static const ftk_tile of_three[] = {ftk_tile_1_3, ftk_tile_2_3, ftk_tile_3_3, ftk_tile_4_3};
    for (long o = begin; o < end;) {
        long outputs = end - o >= 3 ? 3 : 1;
        const ftk_tile *tiles = outputs == 3 ? of_three : of_one;
        for (long m = 0; m < M; m += 4) {
            long rows = M - m < 4 ? M - m : 4;
            tiles[rows - 1](x + m * K, w + o * K, bias ? bias + o : 0, K, y + m * O + o, O);
        }
        o += outputs;
    }
}

static int ftk_few_rows_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static void ftk_few_rows(
    const float *x, long M, const float *w, const float *bias, long O, long K, float *y, int num_threads
) {
#ifdef _OPENMP
    long num_triples = (O + 2) / 3;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
    for (int part = 0; part < num_threads; part++) {
        long begin = num_triples * part / num_threads * 3, end = num_triples * (part + 1) / num_threads * 3;
        ftk_some_outputs(x, M, w, bias, O, K, y, begin, end < O ? end : O);
    }
#else
    (void)num_threads;
    ftk_some_outputs(x, M, w, bias, O, K, y, 0, O);
#endif
}

#else

static int ftk_few_rows_supported(void) { return 0; }

static void ftk_few_rows(
    const float *x, long M, const float *w, const float *bias, long O, long K, float *y, int num_threads
) {
    (void)x, (void)M, (void)w, (void)bias, (void)O, (void)K, (void)y, (void)num_threads;
}

#endif

#ifdef _OPENMP
static int ftk_few_rows_threaded(void) { return 1; }
#else
static int ftk_few_rows_threaded(void) { return 0; }
#endif

#endif
