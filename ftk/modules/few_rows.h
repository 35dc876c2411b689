/* Products of a few rows with a matrix: y = x W^T s + b, x [M, K], W [O, K], s [O], b [O], y [M, O]. All are float32; W may
   be int8, of which s are the scales, and without s they are 1.

Each weight is read from memory once and multiplied with all rows while it is in a register or the nearest cache; the
matrix is neither packed nor copied. Tiles of 4 rows by 3 outputs: 12 sums, 3 weights and 1 input fill the 16 vector
registers of AVX2. The weights of the next tile are fetched ahead, since a processor foresees reading within a line
only: that takes a fifth off the time of 4 rows. Each sum runs over K in one order, whatever M and the number of
threads, so that a row's results are the same bits alone and among others.

Vectors are GCC's (also Clang's) vector extension, but for the reading of bytes; the functions are compiled for AVX2 with FMA and called only where
the processor has both. */

#ifndef FTK_FEW_ROWS_H
#define FTK_FEW_ROWS_H

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define FTK_WIDTH 8
typedef float ftk_vector __attribute__((vector_size(32)));
typedef float ftk_in_memory __attribute__((vector_size(32), aligned(4), may_alias));

#define FTK_AVX2 __attribute__((target("avx2,fma")))
#define FTK_UNROLL _Pragma("GCC unroll 4")

/* A tile of `rows` lines of x and `outputs` lines of w, whose weights are read eight at a time by LOAD. The strides of x
   and w are K, that of y is `stride`; `scale` and `bias` are of these outputs, 0 for none. */
#define FTK_TILE(kind, weight_type, LOAD, rows, outputs)                                                           \
    FTK_AVX2 static void ftk_##kind##_##rows##_##outputs(                                                          \
        const float *x, const void *matrix, const float *scale, const float *bias, long K, float *y, long stride   \
    ) {                                                                                                            \
        const weight_type *w = (const weight_type *)matrix;                                                        \
        ftk_vector sums[rows][outputs];                                                                            \
        long k = 0;                                                                                                \
        FTK_UNROLL for (int m = 0; m < rows; m++)                                                                  \
            FTK_UNROLL for (int o = 0; o < outputs; o++) sums[m][o] = (ftk_vector){0};                             \
        for (; k + FTK_WIDTH <= K; k += FTK_WIDTH) {                                                               \
            ftk_vector weights[outputs];                                                                           \
            FTK_UNROLL for (int o = 0; o < outputs; o++) __builtin_prefetch(w + (outputs + o) * K + k);            \
            FTK_UNROLL for (int o = 0; o < outputs; o++) weights[o] = LOAD(w + o * K + k);                         \
            FTK_UNROLL for (int m = 0; m < rows; m++) {                                                            \
                ftk_vector input = *(const ftk_in_memory *)(x + m * K + k);                                        \
                FTK_UNROLL for (int o = 0; o < outputs; o++) sums[m][o] += input * weights[o];                     \
            }                                                                                                      \
        }                                                                                                          \
        FTK_UNROLL for (int m = 0; m < rows; m++) FTK_UNROLL for (int o = 0; o < outputs; o++) {                   \
            float lanes[FTK_WIDTH], sum = 0.0f;                                                                    \
            *(ftk_in_memory *)lanes = sums[m][o];                                                                  \
            for (int lane = 0; lane < FTK_WIDTH; lane++) sum += lanes[lane];                                       \
            for (long rest = k; rest < K; rest++) sum += x[m * K + rest] * (float)w[o * K + rest];                 \
            y[m * stride + o] = sum * (scale ? scale[o] : 1.0f) + (bias ? bias[o] : 0.0f);                         \
        }                                                                                                          \
    }

#define FTK_TILES(kind, weight_type, LOAD)                                                                         \
    FTK_TILE(kind, weight_type, LOAD, 1, 1)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 2, 1)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 3, 1)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 4, 1)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 1, 3)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 2, 3)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 3, 3)                                                                        \
    FTK_TILE(kind, weight_type, LOAD, 4, 3)                                                                        \
    static const ftk_tile ftk_##kind##_tiles[2][4] = {                                                             \
        {ftk_##kind##_1_1, ftk_##kind##_2_1, ftk_##kind##_3_1, ftk_##kind##_4_1},                                  \
        {ftk_##kind##_1_3, ftk_##kind##_2_3, ftk_##kind##_3_3, ftk_##kind##_4_3},                                  \
    };

#define FTK_FLOATS(address) *(const ftk_in_memory *)(address)
#define FTK_BYTES(address)                                                                                         \
    (ftk_vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(address))))

typedef void (*ftk_tile)(const float *, const void *, const float *, const float *, long, float *, long);

FTK_TILES(float, float, FTK_FLOATS)
FTK_TILES(int8, signed char, FTK_BYTES)

/* Outputs `begin` to `end` of all rows; a weight has `size` bytes. */
static void ftk_some_outputs(
    const ftk_tile tiles[2][4], long size, const float *x, long M, const char *w, const float *scale, const float *bias,
    long O, long K, float *y, long begin, long end
) {
    for (long o = begin; o < end;) {
        long outputs = end - o >= 3 ? 3 : 1;
        const float *scales = scale ? scale + o : 0, *biases = bias ? bias + o : 0;
        for (long m = 0; m < M; m += 4) {
            long rows = M - m < 4 ? M - m : 4;
            tiles[outputs == 3][rows - 1](x + m * K, w + o * K * size, scales, biases, K, y + m * O + o, O);
        }
        o += outputs;
    }
}

static int ftk_few_rows_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* `weight` is int8, one `scale` an output, or float32 without. */
static void ftk_few_rows(
    const float *x, long M, const void *weight, const float *scale, const float *bias, long O, long K, float *y,
    int num_threads
) {
    const ftk_tile(*tiles)[4] = scale ? ftk_int8_tiles : ftk_float_tiles;
    long size = scale ? 1 : (long)sizeof(float);
    const char *w = (const char *)weight;
#ifdef _OPENMP
    long num_triples = (O + 2) / 3;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
    for (int part = 0; part < num_threads; part++) {
        long begin = num_triples * part / num_threads * 3, end = num_triples * (part + 1) / num_threads * 3;
        ftk_some_outputs(tiles, size, x, M, w, scale, bias, O, K, y, begin, end < O ? end : O);
    }
#else
    (void)num_threads;
    ftk_some_outputs(tiles, size, x, M, w, scale, bias, O, K, y, 0, O);
#endif
}

#else

static int ftk_few_rows_supported(void) { return 0; }

static void ftk_few_rows(
    const float *x, long M, const void *weight, const float *scale, const float *bias, long O, long K, float *y,
    int num_threads
) {
    (void)x, (void)M, (void)weight, (void)scale, (void)bias, (void)O, (void)K, (void)y, (void)num_threads;
}

#endif

#ifdef _OPENMP
static int ftk_few_rows_threaded(void) { return 1; }
#else
static int ftk_few_rows_threaded(void) { return 0; }
#endif

#endif
