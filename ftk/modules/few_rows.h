/* Products of a few rows with a matrix: y = x W^T + b, x [M, K] and y [M, O] float32, W [O, K] of one of these kinds:

    FTK_FLOAT, FTK_BF16
    FTK_INT8    times a scale an output, [O]
    FTK_INT4    two values a byte, the even input in the high half; (value - 8) * scale + offset, both bfloat16, [K / G,
                O, 2], one of each for G inputs of an output. K is a multiple of G, and G of 32

Each weight is read from memory once, made float32 in a register and multiplied with all rows while it is there or in the
nearest cache; the matrix is neither packed nor copied. Tiles of 4 rows by some outputs: sums, weights and 1 input fill
the 16 vector registers of AVX2, or the 32 of AVX-512. The weights of the next tile are fetched ahead, since a processor
foresees reading within a line only. Each sum runs over K in one order, whatever M and the number of threads, so that
a row's results are the same bits alone and among others.

The functions are compiled for AVX2 with FMA and for AVX-512, and called only where the processor has them. */

#ifndef FTK_FEW_ROWS_H
#define FTK_FEW_ROWS_H

enum { FTK_FLOAT, FTK_BF16, FTK_INT8, FTK_INT4 };

typedef struct {
    int kind;
    const void *weight;
    int scale_kind; /* FTK_FLOAT or FTK_BF16, as bias_kind */
    const void *scale;
    int bias_kind;
    const void *bias; /* 0: none */
    long outputs, inputs, group;
} ftk_matrix;

typedef struct {
    int kind; /* FTK_FLOAT or FTK_BF16 */
    const void *weight, *bias; /* bias 0: none */
    int is_root_mean_square;
    float epsilon;
} ftk_norm;

enum { FTK_GELU_TANH, FTK_RELU, FTK_SILU };

/* A pre-norm layer of a transformer: what stays, and, from `hidden` on, what a step has. */
typedef struct {
    ftk_norm attention_norm, feed_forward_norm;
    ftk_matrix joint, output, gate, inner, outer; /* weight 0 of gate: there is none */
    int activation;
    long num_key_heads, group, head_size;
    float *hidden; /* [R W, H], in place */
    long num_rows, width;
    int cache_kind; /* FTK_FLOAT or FTK_BF16 */
    void *keys, *values; /* [.., K, capacity, D] */
    long capacity, length;
    const long long *places; /* [R, K, W]: lines of keys and values that are written */
    const void *mask; /* [R, W, length], 0: none; of the kind of the cache */
    long mask_of_row, mask_of_branch;
    const float *cosines, *sines; /* [R, W, num_pairs]; 0: no rotation */
    long num_pairs;
    int is_interleaved;
} ftk_layer;

#include <stddef.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#define FTK_UNROLL _Pragma("GCC unroll 8")
#define FTK_ROWS_AT_ONCE 16
#define FTK_BLOCK 768
#define FTK_AHEAD 4096 /* bytes */

static inline __attribute__((always_inline)) long ftk_line(int kind, long inputs) { /* bytes of this many weights */
    return kind == FTK_FLOAT ? 4 * inputs : kind == FTK_BF16 ? 2 * inputs : kind == FTK_INT8 ? inputs : inputs / 2;
}

static inline float ftk_float_of(unsigned bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline float ftk_number(const void *at, int kind, long i) {
    if (kind == FTK_BF16) return ftk_float_of((unsigned)((const unsigned short *)at)[i] << 16);
    return kind == FTK_FLOAT ? ((const float *)at)[i] : (float)((const signed char *)at)[i];
}

/* Rounded to nearest, of two that are as near to even, as torch does it. */
static inline void ftk_store(void *at, int kind, long i, float number) {
    unsigned bits;
    if (kind == FTK_FLOAT) {
        ((float *)at)[i] = number;
        return;
    }
    memcpy(&bits, &number, sizeof bits);
    ((unsigned short *)at)[i] = number != number ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

/* The first output of part number `part` of them, for tiles of `size`. */
static inline long ftk_part(long outputs, long size, long part, long num_parts) {
    long num_tiles = (outputs + size - 1) / size, begin = num_tiles * part / num_parts * size;
    return begin < outputs ? begin : outputs;
}

static inline void ftk_barrier(void) {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

#define FTK_WIDTH 8
#define FTK_MANY 3
#define FTK_NAME(name) ftk_avx2_##name
#define FTK_TARGET __attribute__((target("avx2,fma")))
#include "few_rows_vectors.h"
#include "few_rows_layer.h"
#undef FTK_WIDTH
#undef FTK_MANY
#undef FTK_NAME
#undef FTK_TARGET

#define FTK_WIDTH 16
#define FTK_MANY 6
#define FTK_NAME(name) ftk_avx512_##name
#define FTK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "few_rows_vectors.h"
#include "few_rows_layer.h"

typedef void (*ftk_product)(const float *, long, const ftk_matrix *, long, long, float *, long);

/* What runs here: 0 nothing, 1 AVX2, 2 AVX-512. */
static int ftk_level(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
}

static int ftk_used_level = -1;

/* Which of them is used from now on, at most what runs here. */
static int ftk_use_level(int level) {
    int most = ftk_level();
    return ftk_used_level = level < 0 || level > most ? most : level;
}

static void ftk_apart(const float *x, long size, float *into) {
    (ftk_used_level == 2 ? ftk_avx512_apart : ftk_avx2_apart)(x, size, into);
}

/* False where there is no memory. */
static int ftk_few_rows(const float *x, long M, const ftk_matrix *matrix, float *y, int num_threads) {
    ftk_product product = ftk_used_level == 2 ? ftk_avx512_product : ftk_avx2_product;
    long O = matrix->outputs;
    float *apart = 0;
    if (matrix->kind == FTK_INT4) {
        if (!(apart = malloc(M * matrix->inputs * sizeof(float)))) return 0;
        ftk_apart(x, M * matrix->inputs, apart);
        x = apart;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
    for (int part = 0; part < num_threads; part++) {
        long begin = ftk_part(O, 12, part, num_threads); /* whole tiles of both */
        product(x, M, matrix, begin, ftk_part(O, 12, part + 1, num_threads), y, O);
    }
#else
    (void)num_threads;
    product(x, M, matrix, 0, O, y, O);
#endif
    free(apart);
    return 1;
}

/* What threads share: `joint`, `attended` and `inner`; and of each `own`. */
static long ftk_own_floats(const ftk_layer *layer) {
    long N = layer->num_rows * layer->width, widest = layer->outer.inputs;
    if (layer->output.inputs > widest) widest = layer->output.inputs;
    if (layer->joint.inputs > widest) widest = layer->joint.inputs;
    long of_head = layer->width * layer->group * (layer->head_size + layer->length);
    return N * (layer->joint.inputs + widest + layer->inner.outputs) + of_head;
}

/* False where there is no memory. */
static int ftk_run_layer(ftk_layer *layer, int num_threads) {
    long N = layer->num_rows * layer->width, own = ftk_own_floats(layer);
    long num_joint = N * layer->joint.outputs, num_attended = N * layer->output.inputs;
    long size = num_joint + num_attended + N * layer->inner.outputs + own * num_threads;
    float *floats = malloc(size * sizeof(float));
    if (!floats) return 0;
    void (*part)(ftk_layer *, float *, float *, float *, float *, int, int) =
        ftk_used_level == 2 ? ftk_avx512_layer : ftk_avx2_layer;
    float *attended = floats + num_joint, *inner = attended + num_attended, *rest = inner + N * layer->inner.outputs;
#ifdef _OPENMP
#pragma omp parallel num_threads(num_threads)
    part(layer, floats, attended, inner, rest + own * omp_get_thread_num(), omp_get_thread_num(), omp_get_num_threads());
#else
    part(layer, floats, attended, inner, rest, 0, 1);
#endif
    free(floats);
    return 1;
}

#else

static int ftk_use_level(int level) { return 0 * level; }

static int ftk_few_rows(const float *x, long M, const ftk_matrix *matrix, float *y, int num_threads) {
    (void)x, (void)M, (void)matrix, (void)y, (void)num_threads;
    return 0;
}

static int ftk_run_layer(ftk_layer *layer, int num_threads) {
    (void)layer, (void)num_threads;
    return 0;
}

#endif

/* The OpenMP library that the kernels' threads are of, by the address of one of its functions; 0: built without one. */
#ifdef _OPENMP
static size_t ftk_openmp(void) { return (size_t)omp_get_num_threads; }
#else
static size_t ftk_openmp(void) { return 0; }
#endif

#endif
