/* A layer of a transformer for the tokens of a step, for one width of vectors: see few_rows.h, and FTK_NAME in
   few_rows_vectors.h. One thread of a team runs `layer`; it waits for the others where it reads what they wrote. */

#if FTK_WIDTH == 16
#define FTK_GREATER(a, b) ((FTK_VECTOR)_mm512_max_ps((__m512)(a), (__m512)(b))) /* b where one of them is NaN */
#define FTK_SMALLER(a, b) ((FTK_VECTOR)_mm512_min_ps((__m512)(a), (__m512)(b)))
#else
#define FTK_GREATER(a, b) ((FTK_VECTOR)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define FTK_SMALLER(a, b) ((FTK_VECTOR)_mm256_min_ps((__m256)(a), (__m256)(b)))
#endif

/* To about 2 units in the last place; 0 below -87; NaN of NaN. Coefficients: Cephes, expf. */
FTK_INLINE FTK_VECTOR FTK_NAME(exp)(FTK_VECTOR x) {
    FTK_VECTOR near = FTK_SMALLER(FTK_ALL(88.0f), FTK_GREATER(FTK_ALL(-87.0f), x));
    FTK_VECTOR shifted = near * 1.44269504088896341f + 12582912.0f; /* the integer is in its lowest bits */
    FTK_VECTOR power = shifted - 12582912.0f, r = near - power * 0.693359375f + power * 2.12194440e-4f;
    FTK_VECTOR y = FTK_ALL(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    FTK_INTS exponent = ((FTK_INTS)shifted - 0x4b400000 + 127) << 23;
    return (FTK_VECTOR)((FTK_INTS)(y * (FTK_VECTOR)exponent) & ~(FTK_INTS)(x < -87.0f));
}

FTK_INLINE FTK_VECTOR FTK_NAME(activated)(int activation, FTK_VECTOR x) {
    if (activation == FTK_RELU) return FTK_GREATER(FTK_ALL(0.0f), x);
    FTK_VECTOR of = activation == FTK_SILU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + FTK_NAME(exp)(-of)); /* (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) */
}

/* Numbers `begin` to `end` of x, activated and, where there are others, times those, in place. */
FTK_TARGET static void FTK_NAME(activate)(int activation, float *x, const float *others, long begin, long end) {
    for (long i = begin; i < end; i += FTK_WIDTH) {
        long count = end - i < FTK_WIDTH ? end - i : FTK_WIDTH;
        float some[FTK_WIDTH] = {0};
        if (count == FTK_WIDTH) {
            FTK_VECTOR y = FTK_NAME(activated)(activation, FTK_FLOATS(x + i));
            FTK_FLOATS(x + i) = others ? y * FTK_FLOATS(others + i) : y;
            continue;
        }
        memcpy(some, x + i, count * sizeof(float));
        FTK_FLOATS(some) = FTK_NAME(activated)(activation, FTK_FLOATS(some));
        for (long j = 0; j < count; j++) x[i + j] = others ? some[j] * others[i + j] : some[j];
    }
}

FTK_INLINE FTK_VECTOR FTK_NAME(parameters)(const void *at, int kind, long i) {
    return kind == FTK_FLOAT ? (FTK_VECTOR)FTK_FLOATS((const float *)at + i) : FTK_NAME(bf16s)((const short *)at + i);
}

FTK_TARGET static void FTK_NAME(norm)(const ftk_norm *norm, const float *x, long size, float *y) {
    float mean = 0.0f;
    long whole = size / FTK_WIDTH * FTK_WIDTH;
    FTK_VECTOR sums = {0}, squares = {0};
    if (!norm->is_root_mean_square) {
        for (long i = 0; i < whole; i += FTK_WIDTH) sums += FTK_FLOATS(x + i);
        mean = FTK_NAME(sum)(sums);
        for (long i = whole; i < size; i++) mean += x[i];
        mean /= size;
    }
    for (long i = 0; i < whole; i += FTK_WIDTH) {
        FTK_VECTOR off = FTK_FLOATS(x + i) - mean;
        squares += off * off;
    }
    float square = FTK_NAME(sum)(squares);
    for (long i = whole; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / __builtin_sqrtf(square / size + norm->epsilon);
    for (long i = 0; i < whole; i += FTK_WIDTH) {
        FTK_VECTOR bias = norm->bias ? FTK_NAME(parameters)(norm->bias, norm->kind, i) : (FTK_VECTOR){0};
        FTK_FLOATS(y + i) = (FTK_FLOATS(x + i) - mean) * factor * FTK_NAME(parameters)(norm->weight, norm->kind, i) + bias;
    }
    for (long i = whole; i < size; i++) {
        float bias = norm->bias ? ftk_number(norm->bias, norm->kind, i) : 0.0f;
        y[i] = (x[i] - mean) * factor * ftk_number(norm->weight, norm->kind, i) + bias;
    }
}

/* This thread's outputs of all rows, of an x that all threads have. */
FTK_TARGET static void FTK_NAME(shared)(
    const ftk_matrix *matrix, const float *x, long N, float *apart, float *y, int thread, int num_threads
) {
    if (matrix->kind == FTK_INT4) {
        FTK_NAME(apart)(x, N * matrix->inputs, apart);
        x = apart;
    }
    long begin = ftk_part(matrix->outputs, FTK_MANY, thread, num_threads);
    long end = ftk_part(matrix->outputs, FTK_MANY, thread + 1, num_threads);
    FTK_NAME(product)(x, N, matrix, begin, end, y, matrix->outputs);
}

/* Dimensions from d on, `vectors` times the width, of the sum of values [S, D] by weights. */
FTK_INLINE void FTK_NAME(mix)(
    const int kind, const int vectors, const float *weights, const void *values, long S, long D, long d, float *y
) {
    FTK_VECTOR sums[4];
    FTK_UNROLL for (int i = 0; i < vectors; i++) sums[i] = (FTK_VECTOR){0};
    for (long s = 0; s < S; s++)
        FTK_UNROLL for (int i = 0; i < vectors; i++) {
            const char *at = (const char *)values + ftk_line(kind, s * D + d + i * FTK_WIDTH);
            __builtin_prefetch(at + FTK_AHEAD, 0, 0);
            sums[i] += weights[s] * (kind == FTK_FLOAT ? (FTK_VECTOR)FTK_FLOATS(at) : FTK_NAME(bf16s)(at));
        }
    FTK_UNROLL for (int i = 0; i < vectors; i++) FTK_FLOATS(y + d + i * FTK_WIDTH) = sums[i];
}

FTK_INLINE void FTK_NAME(mixed)(
    const int kind, const float *weights, const void *values, long S, long D, float *y
) {
    long d = 0;
    for (; d + 4 * FTK_WIDTH <= D; d += 4 * FTK_WIDTH) FTK_NAME(mix)(kind, 4, weights, values, S, D, d, y);
    for (; d + FTK_WIDTH <= D; d += FTK_WIDTH) FTK_NAME(mix)(kind, 1, weights, values, S, D, d, y);
    for (; d < D; d++) {
        y[d] = 0.0f;
        for (long s = 0; s < S; s++) y[d] += weights[s] * ftk_number(values, kind, s * D + d);
    }
}

/* scores [S] -> their exponentials, which are not divided by their sum; returns it. */
FTK_TARGET static float FTK_NAME(exponentials)(float *scores, long S) {
    long whole = S / FTK_WIDTH * FTK_WIDTH;
    float most = -__builtin_inff();
    float rest[FTK_WIDTH];
    FTK_VECTOR sums = {0};
    for (long s = 0; s < S; s++) most = scores[s] > most ? scores[s] : most;
    for (long s = 0; s < whole; s += FTK_WIDTH) sums += FTK_FLOATS(scores + s) = FTK_NAME(exp)(FTK_FLOATS(scores + s) - most);
    for (int i = 0; i < FTK_WIDTH; i++) rest[i] = whole + i < S ? scores[whole + i] : -__builtin_inff();
    FTK_FLOATS(rest) = FTK_NAME(exp)(FTK_FLOATS(rest) - most);
    memcpy(scores + whole, rest, (S - whole) * sizeof(float));
    sums += FTK_FLOATS(rest);
    return FTK_NAME(sum)(sums);
}

static void FTK_NAME(rotate)(const ftk_layer *layer, long row, float *head) {
    long half = layer->num_pairs;
    const float *cosines = layer->cosines + row * half, *sines = layer->sines + row * half;
    for (long i = 0; i < half; i++) {
        float *first = head + (layer->is_interleaved ? 2 * i : i), *second = first + (layer->is_interleaved ? 1 : half);
        float a = *first, b = *second;
        *first = a * cosines[i] - b * sines[i];
        *second = b * cosines[i] + a * sines[i];
    }
}

/* The queries of row r (W hypotheses) that read key head k: writes its new keys and values, then reads all. */
FTK_TARGET static void FTK_NAME(attend)(
    const ftk_layer *layer, long r, long k, float *joint, float *attended, float *own
) {
    const long W = layer->width, G = layer->group, D = layer->head_size, K = layer->num_key_heads, S = layer->length;
    const int kind = layer->cache_kind;
    const float scale = 1.0f / __builtin_sqrtf((float)D);
    float *queries = own, *scores = own + W * G * D; /* [W G, D], [W G, S] */
    for (long w = 0; w < W; w++) {
        float *heads = joint + (r * W + w) * layer->joint.outputs + k * (G + 2) * D;
        if (layer->cosines)
            for (long g = 0; g <= G; g++) FTK_NAME(rotate)(layer, r * W + w, heads + g * D);
        for (long i = 0; i < G * D; i++) queries[w * G * D + i] = heads[i] * scale;
        long place = layer->places[(r * K + k) * W + w] * D;
        for (long i = 0; i < D; i++) {
            ftk_store(layer->keys, kind, place + i, heads[G * D + i]);
            ftk_store(layer->values, kind, place + i, heads[(G + 1) * D + i]);
        }
    }
    const long first = ftk_line(kind, (r * K + k) * layer->capacity * D);
    const char *values = (const char *)layer->values + first;
    const ftk_matrix keys = {kind, (const char *)layer->keys + first, 0, 0, 0, 0, S, D, 0};
    FTK_NAME(product)(queries, W * G, &keys, 0, S, scores, S);
    for (long q = 0; q < W * G; q++) {
        long w = q / G;
        float *of_query = scores + q * S, *y = attended + (r * W + w) * K * G * D + (k * G + q % G) * D;
        if (layer->mask) {
            long from = r * layer->mask_of_row + w * layer->mask_of_branch;
            for (long s = 0; s < S; s++) of_query[s] += ftk_number(layer->mask, kind, from + s);
        }
        float sum = FTK_NAME(exponentials)(of_query, S);
        if (kind == FTK_FLOAT) FTK_NAME(mixed)(FTK_FLOAT, of_query, values, S, D, y);
        if (kind == FTK_BF16) FTK_NAME(mixed)(FTK_BF16, of_query, values, S, D, y);
        for (long d = 0; d < D; d++) y[d] /= sum;
    }
}

/* Adds this thread's outputs to the residual path. */
FTK_TARGET static void FTK_NAME(add)(ftk_layer *layer, const float *output, long N, long begin, long end) {
    const long H = layer->joint.inputs;
    for (long n = 0; n < N; n++)
        for (long i = begin; i < end; i++) layer->hidden[n * H + i] += output[n * H + i];
}

FTK_TARGET static void FTK_NAME(layer)(
    ftk_layer *layer, float *joint, float *attended, float *inner, float *own, int thread, int num_threads
) {
    const long N = layer->num_rows * layer->width, H = layer->joint.inputs, F = layer->inner.outputs;
    const long items = layer->num_rows * layer->num_key_heads;
    const long begin = ftk_part(H, FTK_MANY, thread, num_threads), end = ftk_part(H, FTK_MANY, thread + 1, num_threads);
    const long first = ftk_part(F, FTK_MANY, thread, num_threads), last = ftk_part(F, FTK_MANY, thread + 1, num_threads);
    float *normal = own, *gate = normal + N * H, *rest = gate + N * F; /* [N, H], [N, F], what products need */
    for (long n = 0; n < N; n++) FTK_NAME(norm)(&layer->attention_norm, layer->hidden + n * H, H, normal + n * H);
    FTK_NAME(shared)(&layer->joint, normal, N, rest, joint, thread, num_threads);
    ftk_barrier();
    for (long item = items * thread / num_threads; item < items * (thread + 1) / num_threads; item++)
        FTK_NAME(attend)(layer, item / layer->num_key_heads, item % layer->num_key_heads, joint, attended, rest);
    ftk_barrier();
    FTK_NAME(shared)(&layer->output, attended, N, rest, normal, thread, num_threads);
    FTK_NAME(add)(layer, normal, N, begin, end);
    ftk_barrier();
    for (long n = 0; n < N; n++) FTK_NAME(norm)(&layer->feed_forward_norm, layer->hidden + n * H, H, normal + n * H);
    FTK_NAME(shared)(&layer->inner, normal, N, rest, inner, thread, num_threads);
    if (layer->gate.weight) FTK_NAME(shared)(&layer->gate, normal, N, rest, gate, thread, num_threads);
    for (long n = 0; n < N; n++) {
        if (!layer->gate.weight) FTK_NAME(activate)(layer->activation, inner + n * F, 0, first, last);
        else {
            FTK_NAME(activate)(layer->activation, gate + n * F, inner + n * F, first, last);
            memcpy(inner + n * F + first, gate + n * F + first, (last - first) * sizeof(float));
        }
    }
    ftk_barrier();
    FTK_NAME(shared)(&layer->outer, inner, N, rest, normal, thread, num_threads);
    FTK_NAME(add)(layer, normal, N, begin, end);
}

#undef FTK_GREATER
#undef FTK_SMALLER
