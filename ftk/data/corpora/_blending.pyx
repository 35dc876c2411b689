"""Kernel of blending: which corpus each sample of an epoch is drawn from."""

import numpy as np

from libc.stdint cimport uint16_t

cdef enum:
    MOST_CORPORA = 1 << 16


def blend_corpora(const double[::1] shares, Py_ssize_t count):
    """A sequence of corpora in which every prefix has the wanted proportions, to less than one sample.

    The rule is Tijdeman's (1980, "The chairman assignment problem"): of the corpora that would not get too far
    ahead, the one whose deadline comes first. With K corpora no count at any prefix is off by more than
    1 - 1 / (2K - 2). (Taking the corpus that lags most, as is usual, can be off by more than one from K = 4 on.)

    Args:
        shares: [K], none negative, summing to 1.
        count: samples, N.

    Returns:
        uint16 [N], numbers of corpora.
    """
    cdef Py_ssize_t corpora = shares.shape[0], place, corpus, chosen
    weights = np.asarray(shares)
    if not (0 < corpora <= MOST_CORPORA and (weights >= 0.0).all() and 0.0 < weights.sum() < np.inf and count >= 0):
        raise ValueError(f"{corpora} shares, of 1 to {MOST_CORPORA}, for {count} samples: one must be above 0")
    corpus_array = np.empty(count, dtype=np.uint16)
    cdef uint16_t[::1] result = corpus_array
    counts_array = np.zeros(corpora, dtype=np.float64)
    cdef double[::1] counts = counts_array
    cdef double least_lag = 1.0 / (2 * corpora - 2) if corpora > 1 else 0.0
    cdef double lag, slack, best_slack, best_lag
    with nogil:
        for place in range(count):
            chosen = -1
            best_slack = 0.0
            for corpus in range(corpora):
                if shares[corpus] <= 0.0:
                    continue
                lag = shares[corpus] * (place + 1) - counts[corpus]
                if lag < least_lag - 1e-9:
                    continue
                slack = (1.0 - least_lag - lag) / shares[corpus]  # samples until its deadline
                if chosen < 0 or slack < best_slack:
                    chosen = corpus
                    best_slack = slack
            if chosen < 0:  # rounding: the shares sum to a little less than 1; the greatest lag is it
                best_lag = -1.0
                for corpus in range(corpora):
                    lag = shares[corpus] * (place + 1) - counts[corpus]
                    if shares[corpus] > 0.0 and lag > best_lag:
                        chosen = corpus
                        best_lag = lag
            counts[chosen] += 1.0
            result[place] = <uint16_t>chosen
    return corpus_array
