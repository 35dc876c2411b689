"""Products of a few rows with a matrix, and layers made of them; `few_rows.h` says how, `few_rows.py` when."""

cdef extern from "few_rows.h":
    ctypedef struct ftk_matrix:
        int kind
        const void* weight
        int scale_kind
        const void* scale
        int bias_kind
        const void* bias
        long outputs
        long inputs
        long group

    ctypedef struct ftk_norm:
        int kind
        const void* weight
        const void* bias
        int is_root_mean_square
        float epsilon

    ctypedef struct ftk_layer:
        ftk_norm attention_norm
        ftk_norm feed_forward_norm
        ftk_matrix joint
        ftk_matrix output
        ftk_matrix gate
        ftk_matrix inner
        ftk_matrix outer
        int activation
        long num_key_heads
        long group
        long head_size
        float* hidden
        long num_rows
        long width
        int cache_kind
        void* keys
        void* values
        long capacity
        long length
        const long long* places
        const void* mask
        long mask_of_row
        long mask_of_branch
        const float* cosines
        const float* sines
        long num_pairs
        int is_interleaved

    int ftk_use_level(int level) nogil
    size_t ftk_openmp() nogil
    bint ftk_few_rows(const float* x, long M, const ftk_matrix* matrix, float* y, int num_threads) nogil
    bint ftk_run_layer(ftk_layer* layer, int num_threads) nogil


def use_level(int level) -> int:
    """Uses 0: no kernel, 1: those for AVX2, 2: for AVX-512, at most what this processor has; -1: that. Returns it."""
    return ftk_use_level(level)


def openmp() -> int:
    """Where the kernels find OpenMP's `omp_get_num_threads`; 0: they were built without OpenMP, and have one thread."""
    return ftk_openmp()


cdef class Matrix:
    """A weight [outputs, inputs] with what belongs to it, by addresses of contiguous memory; 0 where there is none.

    Kinds: 0 float32, 1 bfloat16, 2 int8, 3 int4 in groups of `group` inputs; of scale and bias 0 or 1.
    """

    cdef ftk_matrix matrix

    def __init__(
        self, int kind, size_t weight, int scale_kind, size_t scale, int bias_kind, size_t bias,
        long outputs, long inputs, long group,
    ):
        self.matrix = ftk_matrix(
            kind, <const void*>weight, scale_kind, <const void*>scale, bias_kind, <const void*>bias,
            outputs, inputs, group,
        )

    def product(self, size_t hidden, long num_rows, size_t result, int num_threads) -> None:
        """result [num_rows, outputs] = hidden [num_rows, inputs] weight^T scale + bias; both float32, contiguous."""
        cdef bint done
        with nogil:
            done = ftk_few_rows(<const float*>hidden, num_rows, &self.matrix, <float*>result, num_threads)
        if not done:
            raise MemoryError("no memory for the inputs of a product")


cdef class Layer:
    """A pre-norm layer of a transformer; `run` reads and writes the tokens of a step.

    Norms: kind of its parameters, their addresses (0: no bias), whether it is one of the root mean square, epsilon.
    """

    cdef ftk_layer layer

    def __init__(
        self, tuple attention_norm, tuple feed_forward_norm, Matrix joint, Matrix output, Matrix gate, Matrix inner,
        Matrix outer, int activation, long num_key_heads, long group, long head_size,
    ):
        self.layer.attention_norm = norm_of(attention_norm)
        self.layer.feed_forward_norm = norm_of(feed_forward_norm)
        self.layer.joint, self.layer.output = joint.matrix, output.matrix
        self.layer.inner, self.layer.outer = inner.matrix, outer.matrix
        self.layer.gate.weight = NULL
        if gate is not None:
            self.layer.gate = gate.matrix
        self.layer.activation = activation
        self.layer.num_key_heads, self.layer.group, self.layer.head_size = num_key_heads, group, head_size

    def run(
        self, size_t hidden, long num_rows, long width, int cache_kind, size_t keys, size_t values, long capacity,
        long length, size_t places, size_t mask, long mask_of_row, long mask_of_branch, size_t cosines, size_t sines,
        long num_pairs, bint is_interleaved, int num_threads,
    ) -> None:
        """hidden float32 [num_rows * width, H], in place."""
        cdef ftk_layer layer = self.layer
        cdef bint done
        layer.hidden = <float*>hidden
        layer.num_rows, layer.width = num_rows, width
        layer.cache_kind, layer.keys, layer.values = cache_kind, <void*>keys, <void*>values
        layer.capacity, layer.length, layer.places = capacity, length, <const long long*>places
        layer.mask, layer.mask_of_row, layer.mask_of_branch = <const void*>mask, mask_of_row, mask_of_branch
        layer.cosines, layer.sines = <const float*>cosines, <const float*>sines
        layer.num_pairs, layer.is_interleaved = num_pairs, is_interleaved
        with nogil:
            done = ftk_run_layer(&layer, num_threads)
        if not done:
            raise MemoryError("no memory for a layer of a step")


cdef ftk_norm norm_of(tuple norm):
    kind, weight, bias, is_root_mean_square, epsilon = norm
    return ftk_norm(kind, <const void*><size_t>weight, <const void*><size_t>bias, is_root_mean_square, epsilon)


use_level(-1)
