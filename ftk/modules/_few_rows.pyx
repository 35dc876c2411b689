"""Products of a few rows with a matrix; `few_rows.h` says how, `few_rows.py` when."""

cdef extern from "few_rows.h":
    bint ftk_few_rows_supported() nogil
    bint ftk_few_rows_threaded() nogil
    void ftk_few_rows(
        const float* x, long M, const void* weight, const float* scale, const float* bias, long O, long K, float* y,
        int num_threads,
    ) nogil


def is_supported() -> bool:
    """Whether this build and this processor have the kernel."""
    return ftk_few_rows_supported()


def is_threaded() -> bool:
    """Whether it was built with OpenMP; without it there is one thread."""
    return ftk_few_rows_threaded()


def product(
    size_t hidden,
    long num_rows,
    size_t weight,
    size_t scale,
    size_t bias,
    long outputs,
    long inputs,
    size_t result,
    int num_threads,
) -> None:
    """result [num_rows, outputs] = hidden [num_rows, inputs] weight [outputs, inputs]^T scale [outputs] + bias [outputs].

    All are addresses of contiguous float32; those of scale and bias may be 0. With a scale the weight is int8.
    """
    with nogil:
        ftk_few_rows(
            <const float*>hidden, num_rows, <const void*>weight, <const float*>scale, <const float*>bias,
            outputs, inputs, <float*>result, num_threads,
        )
