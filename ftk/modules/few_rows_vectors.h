/* What few_rows.h does, for one width of vectors; it includes this file once for each.

FTK_WIDTH: floats of a vector; FTK_TARGET: the attribute of functions that use them; FTK_NAME(name): the name of a
function of this width; FTK_MANY: outputs of a tile. */

typedef float FTK_NAME(vector) __attribute__((vector_size(4 * FTK_WIDTH)));
typedef int FTK_NAME(ints) __attribute__((vector_size(4 * FTK_WIDTH)));
typedef float FTK_NAME(in_memory) __attribute__((vector_size(4 * FTK_WIDTH), aligned(4), may_alias));

#define FTK_VECTOR FTK_NAME(vector)
#define FTK_INTS FTK_NAME(ints)
#define FTK_FLOATS(address) (*(FTK_NAME(in_memory) *)(address))
#define FTK_INLINE static inline __attribute__((always_inline)) FTK_TARGET
#define FTK_ALL(number) ((FTK_VECTOR){0} + (number))

FTK_INLINE FTK_VECTOR FTK_NAME(bf16s)(const void *at) {
#if FTK_WIDTH == 16
    return (FTK_VECTOR)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#else
    return (FTK_VECTOR)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#endif
}

FTK_INLINE FTK_VECTOR FTK_NAME(bytes)(const void *at) {
#if FTK_WIDTH == 16
    return (FTK_VECTOR)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#else
    return (FTK_VECTOR)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#endif
}

/* As many bytes as a vector has numbers, one in the low bits of each. */
FTK_INLINE FTK_INTS FTK_NAME(pairs)(const void *at) {
#if FTK_WIDTH == 16
    return (FTK_INTS)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#else
    return (FTK_INTS)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#endif
}

FTK_INLINE float FTK_NAME(sum)(FTK_VECTOR v) {
#if FTK_WIDTH == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#endif
}

/* Adds to `sums`, [rows][outputs], the products of inputs `begin` to `end` of x with those of the matrix from output `o`
   on. `kind`, `rows`, `outputs` and `fetches` are known when this is compiled. The weights that are read next are fetched
   ahead: of the first half of the outputs (1), of the second (2), of all (3) or of none (0). */
FTK_INLINE void FTK_NAME(tile)(
    const int kind, const int rows, const int outputs, const int fetches, const float *x, const ftk_matrix *matrix,
    long o, long begin, long end, FTK_VECTOR *in_memory
) {
    const long K = matrix->inputs, line = ftk_line(kind, K), step = kind == FTK_INT4 ? 2 * FTK_WIDTH : FTK_WIDTH;
    const long in_a_line = kind == FTK_FLOAT ? 16 : kind == FTK_BF16 ? 32 : kind == FTK_INT8 ? 64 : 128;
    const char *w = (const char *)matrix->weight + o * line;
    const long next = end + FTK_WIDTH <= K ? ftk_line(kind, FTK_BLOCK) : outputs * line - ftk_line(kind, begin);
    const long ahead = line < FTK_AHEAD / 8 ? FTK_AHEAD : next; /* of short lines the next tile comes too soon */
    FTK_VECTOR sums[4][FTK_MANY], weights[FTK_MANY], odd[FTK_MANY], scales[FTK_MANY] = {{0}};
#if FTK_WIDTH == 16
    const FTK_VECTOR values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
#else
    FTK_VECTOR offsets[FTK_MANY] = {{0}};
#endif
    FTK_UNROLL for (int m = 0; m < rows; m++)
        FTK_UNROLL for (int i = 0; i < outputs; i++) sums[m][i] = in_memory[m * FTK_MANY + i];
    for (long k = begin; k < end; k += step) {
        if (fetches && k % in_a_line == 0)
            FTK_UNROLL for (int i = 0; i < outputs; i++)
                if (fetches == 3 || (i < outputs / 2) == (fetches == 1))
                    __builtin_prefetch(w + i * line + ftk_line(kind, k) + ahead, 0, 0);
        if (kind == FTK_INT4 && k % 32 == 0) {
            const unsigned *of_group = (const unsigned *)matrix->scale + k / matrix->group * matrix->outputs + o;
            if (fetches) __builtin_prefetch(of_group + 32); /* some tiles ahead, in another line */
            FTK_UNROLL for (int i = 0; i < outputs; i++) {
                unsigned both = of_group[i];
                FTK_VECTOR scale = FTK_ALL(ftk_float_of(both << 16)), offset = FTK_ALL(ftk_float_of(both & 0xffff0000u));
#if FTK_WIDTH == 16
                scales[i] = values * scale + offset; /* what each of the 16 values stands for */
#else
                scales[i] = scale;
                offsets[i] = offset - 8.0f * scale;
#endif
            }
        }
        FTK_UNROLL for (int i = 0; i < outputs; i++) {
            const char *at = w + i * line + ftk_line(kind, k);
            if (kind == FTK_FLOAT) weights[i] = FTK_FLOATS(at);
            if (kind == FTK_BF16) weights[i] = FTK_NAME(bf16s)(at);
            if (kind == FTK_INT8) weights[i] = FTK_NAME(bytes)(at);
            if (kind == FTK_INT4) {
                FTK_INTS pairs = FTK_NAME(pairs)(at);
#if FTK_WIDTH == 16 /* a permutation looks at the low four bits */
                weights[i] = (FTK_VECTOR)_mm512_permutexvar_ps((__m512i)(pairs >> 4), (__m512)scales[i]);
                odd[i] = (FTK_VECTOR)_mm512_permutexvar_ps((__m512i)pairs, (__m512)scales[i]);
#else
                weights[i] = (FTK_VECTOR)_mm256_cvtepi32_ps((__m256i)(pairs >> 4)) * scales[i] + offsets[i];
                odd[i] = (FTK_VECTOR)_mm256_cvtepi32_ps((__m256i)(pairs & 15)) * scales[i] + offsets[i];
#endif
            }
        }
        FTK_UNROLL for (int m = 0; m < rows; m++) {
            FTK_VECTOR input = FTK_FLOATS(x + m * K + k);
            FTK_UNROLL for (int i = 0; i < outputs; i++) sums[m][i] += input * weights[i];
            if (kind == FTK_INT4) {
                input = FTK_FLOATS(x + m * K + k + FTK_WIDTH);
                FTK_UNROLL for (int i = 0; i < outputs; i++) sums[m][i] += input * odd[i];
            }
        }
    }
    FTK_UNROLL for (int m = 0; m < rows; m++)
        FTK_UNROLL for (int i = 0; i < outputs; i++) in_memory[m * FTK_MANY + i] = sums[m][i];
}

/* `outputs` outputs of at most FTK_ROWS_AT_ONCE rows. The inputs go in blocks, of which the weights and the inputs of
   all rows fit into the nearest cache. */
FTK_INLINE void FTK_NAME(tiles)(
    const int kind, const int outputs, const float *x, long M, const ftk_matrix *matrix, long o, float *y, long stride
) {
    const long K = matrix->inputs, whole = K / FTK_WIDTH * FTK_WIDTH;
    FTK_VECTOR sums[FTK_ROWS_AT_ONCE][FTK_MANY];
    for (long m = 0; m < M; m++)
        for (int i = 0; i < outputs; i++) sums[m][i] = (FTK_VECTOR){0};
    for (long k = 0; k < whole; k += FTK_BLOCK) {
        long end = whole < k + FTK_BLOCK ? whole : k + FTK_BLOCK;
        long m = 0;
#define FTK_SOME(rows, fetches) FTK_NAME(tile)(kind, rows, outputs, fetches, x + m * K, matrix, o, k, end, sums[m])
        switch (M) {
            case 1: FTK_SOME(1, 3); break;
            case 2: FTK_SOME(2, 3); break;
            case 3: FTK_SOME(3, 3); break;
            case 4: FTK_SOME(4, 3); break;
            default:
                FTK_SOME(4, 1);
                m = 4;
                if (M >= 8) {
                    FTK_SOME(4, 2);
                    for (m = 8; m + 4 <= M; m += 4) FTK_SOME(4, 0);
                }
                for (; m < M; m++) FTK_SOME(1, 0);
        }
#undef FTK_SOME
    }
    for (long m = 0; m < M; m++)
        for (int i = 0; i < outputs; i++) {
            float sum = FTK_NAME(sum)(sums[m][i]);
            const char *w = (const char *)matrix->weight + (o + i) * ftk_line(kind, K);
            for (long rest = whole; rest < K; rest++) sum += x[m * K + rest] * ftk_number(w, kind, rest);
            if (kind == FTK_INT8) sum *= ftk_number(matrix->scale, matrix->scale_kind, o + i);
            if (matrix->bias) sum += ftk_number(matrix->bias, matrix->bias_kind, o + i);
            y[m * stride + o + i] = sum;
        }
}

/* Outputs `begin` to `end` of M rows: output o of row m is y[m * stride + o]. */
#define FTK_OF_KIND(name, kind)                                                                                        \
    FTK_TARGET static void FTK_NAME(name)(                                                                             \
        const float *x, long M, const ftk_matrix *matrix, long begin, long end, float *y, long stride                  \
    ) {                                                                                                                \
        for (long m = 0; m < M; m += FTK_ROWS_AT_ONCE) {                                                               \
            long rows = M - m < FTK_ROWS_AT_ONCE ? M - m : FTK_ROWS_AT_ONCE, o = begin;                                \
            const float *from = x + m * matrix->inputs;                                                                \
            float *to = y + m * stride;                                                                                \
            for (; o + FTK_MANY <= end; o += FTK_MANY)                                                                 \
                FTK_NAME(tiles)(kind, FTK_MANY, from, rows, matrix, o, to, stride);                                    \
            for (; o < end; o++) FTK_NAME(tiles)(kind, 1, from, rows, matrix, o, to, stride);                          \
        }                                                                                                              \
    }
FTK_OF_KIND(of_floats, FTK_FLOAT)
FTK_OF_KIND(of_bf16, FTK_BF16)
FTK_OF_KIND(of_int8, FTK_INT8)
FTK_OF_KIND(of_int4, FTK_INT4)

/* x [M, K] as the products of int4 read it: of each pair of vectors first the even inputs, then the odd ones. */
FTK_TARGET static void FTK_NAME(apart)(const float *x, long size, float *into) {
    for (long k = 0; k < size; k += 2 * FTK_WIDTH)
        for (int i = 0; i < FTK_WIDTH; i++) {
            into[k + i] = x[k + 2 * i];
            into[k + FTK_WIDTH + i] = x[k + 2 * i + 1];
        }
}

FTK_TARGET static void FTK_NAME(product)(
    const float *x, long M, const ftk_matrix *matrix, long begin, long end, float *y, long stride
) {
    switch (matrix->kind) {
        case FTK_FLOAT: FTK_NAME(of_floats)(x, M, matrix, begin, end, y, stride); break;
        case FTK_BF16: FTK_NAME(of_bf16)(x, M, matrix, begin, end, y, stride); break;
        case FTK_INT8: FTK_NAME(of_int8)(x, M, matrix, begin, end, y, stride); break;
        default: FTK_NAME(of_int4)(x, M, matrix, begin, end, y, stride);
    }
}
