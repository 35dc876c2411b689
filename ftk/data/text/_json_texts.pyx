"""The string under one key of each JSON line, without building the rest: the common case of `records`."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_FromKindAndData, PyUnicode_KIND, PyUnicode_Substring
from libc.stdint cimport uint8_t, uint16_t, uint32_t

cdef enum:
    MAX_DEPTH = 32  # deeper lines are left to Python's json

ctypedef fused char_t:
    uint8_t
    uint16_t
    uint32_t


def json_texts(str text, str key, fallback):
    """The value of `key` in the object on each line of `text`.

    A line is a whole JSON object by the rules of Python's `json`, or the work of `fallback`.

    Args:
        text: lines, each ended by "\\n" (the last one may not be); one "\\r" before that is no part of the line.
        key: field that holds a string.
        fallback: called with each line that is not plain; gives its string, or None.

    Returns:
        list of str, "" for lines of nothing but JSON's white space; None if `fallback` gave None.
    """
    cdef int kind = PyUnicode_KIND(text)
    if kind == 1:
        return _texts[uint8_t](text, <const uint8_t*> PyUnicode_DATA(text), key, fallback)
    if kind == 2:
        return _texts[uint16_t](text, <const uint16_t*> PyUnicode_DATA(text), key, fallback)
    return _texts[uint32_t](text, <const uint32_t*> PyUnicode_DATA(text), key, fallback)


cdef _texts(str text, const char_t* chars, str key, fallback):
    cdef Py_ssize_t length = len(text), start = 0, end = 0, stop, first = 0, last = 0
    cdef list found = []
    cdef int outcome
    while start < length:
        outcome = _scan(chars, start, length, key, &first, &last, &end)
        if outcome == 1:
            found.append(PyUnicode_Substring(text, first, last))
        elif outcome == 2:
            found.append(_unescaped(chars, first, last))
        elif outcome == 0:
            found.append("")
        else:
            end = start
            while end < length and chars[end] != c'\n':
                end += 1
            stop = end - 1 if end > start and chars[end - 1] == c'\r' else end
            value = fallback(PyUnicode_Substring(text, start, stop))
            if value is None:
                return None
            found.append(value)
        start = end + 1
    return found


cdef int _scan(
    const char_t* chars,
    Py_ssize_t at,
    Py_ssize_t stop,
    str key,
    Py_ssize_t* first,
    Py_ssize_t* last,
    Py_ssize_t* end,
):
    """Reads the line at `at` of chars[:stop] and says where it ends.

    Returns:
        1: an object whose text is chars[first:last]; 2: the text has escapes; 0: white space; -1: not plain.
    """
    cdef bint is_key = False, plain
    cdef int found = -1
    cdef char_t opened[MAX_DEPTH]
    cdef Py_ssize_t depth = 0, begin = 0
    at = _space(chars, at, stop)
    if at == stop or chars[at] == c'\n':
        end[0] = at
        return 0
    if chars[at] != c'{':
        return -1
    # One state: at a place where a value, or in an object a member, may begin.
    opened[0] = c'{'
    depth = 1
    at = _space(chars, at + 1, stop)
    if at < stop and chars[at] == c'}':
        return -1
    while True:
        is_key = False
        if opened[depth - 1] == c'{':
            begin = at + 1
            at = _string(chars, at, stop, &plain)
            if at < 0 or not plain:
                return -1
            is_key = depth == 1 and _equal(chars, begin, at - 1, key)
            at = _space(chars, at, stop)
            if at == stop or chars[at] != c':':
                return -1
            at = _space(chars, at + 1, stop)
        if at == stop:
            return -1
        if chars[at] == c'"':
            begin = at + 1
            at = _string(chars, at, stop, &plain)
            if at < 0:
                return -1
            if is_key:
                found = 1 if plain else 2
                first[0] = begin
                last[0] = at - 1
        elif is_key:
            return -1
        elif chars[at] == c'{' or chars[at] == c'[':
            if depth == MAX_DEPTH:
                return -1
            opened[depth] = chars[at]
            depth += 1
            at = _space(chars, at + 1, stop)
            if at == stop:
                return -1
            if chars[at] != (c'}' if opened[depth - 1] == c'{' else c']'):
                continue
            depth -= 1
            at += 1
        else:
            at = _scalar(chars, at, stop)
            if at < 0:
                return -1
        while True:  # behind a value: ends of what is open, then a comma or the end of the line
            at = _space(chars, at, stop)
            if at == stop:
                return -1
            if chars[at] == c',':
                at = _space(chars, at + 1, stop)
                break
            if chars[at] != (c'}' if opened[depth - 1] == c'{' else c']'):
                return -1
            depth -= 1
            at += 1
            if depth == 0:
                at = _space(chars, at, stop)
                end[0] = at
                return found if at == stop or chars[at] == c'\n' else -1


cdef _unescaped(const char_t* chars, Py_ssize_t first, Py_ssize_t last):
    """The text of chars[first:last], which holds escapes of one letter."""
    cdef char_t* out = <char_t*> PyMem_Malloc((last - first) * sizeof(char_t))
    cdef Py_ssize_t at = first, size = 0
    cdef char_t c
    if out == NULL:
        raise MemoryError
    try:
        while at < last:
            c = chars[at]
            if c == c'\\':
                at += 1
                c = chars[at]
                if c == c'n':
                    c = c'\n'
                elif c == c't':
                    c = c'\t'
                elif c == c'r':
                    c = c'\r'
                elif c == c'b':
                    c = c'\b'
                elif c == c'f':
                    c = c'\f'
            out[size] = c
            size += 1
            at += 1
        return PyUnicode_FromKindAndData(sizeof(char_t), out, size)
    finally:
        PyMem_Free(out)


cdef Py_ssize_t _space(const char_t* chars, Py_ssize_t at, Py_ssize_t stop) noexcept nogil:
    while at < stop and (chars[at] == c' ' or chars[at] == c'\t' or chars[at] == c'\r'):
        at += 1
    return at


cdef Py_ssize_t _string(const char_t* chars, Py_ssize_t at, Py_ssize_t stop, bint* plain) noexcept nogil:
    """Behind the string that begins at `at`, or -1; plain: without a backslash."""
    cdef char_t c
    plain[0] = True
    if at >= stop or chars[at] != c'"':
        return -1
    at += 1
    while at < stop:
        c = chars[at]
        if c > c'\\':  # most letters, at one comparison
            at += 1
            continue
        if c == c'"':
            return at + 1
        if c < 0x20:
            return -1
        if c == c'\\':
            plain[0] = False
            at += 1
            if at == stop or not _is_simple_escape(<uint32_t> chars[at]):
                return -1
        at += 1
    return -1


cdef bint _is_simple_escape(uint32_t c) noexcept nogil:
    return c == c'"' or c == c'\\' or c == c'/' or c == c'b' or c == c'f' or c == c'n' or c == c'r' or c == c't'


cdef Py_ssize_t _scalar(const char_t* chars, Py_ssize_t at, Py_ssize_t stop) noexcept nogil:
    """Behind true, false, null or a number of JSON's grammar, or -1."""
    cdef Py_ssize_t begin
    if chars[at] == c't':
        return _word(chars, at, stop, b"true", 4)
    if chars[at] == c'f':
        return _word(chars, at, stop, b"false", 5)
    if chars[at] == c'n':
        return _word(chars, at, stop, b"null", 4)
    if chars[at] == c'-':
        at += 1
    if at < stop and chars[at] == c'0':
        at += 1
    else:
        begin = at
        at = _digits(chars, at, stop)
        if at == begin:
            return -1
    if at < stop and chars[at] == c'.':
        begin = at + 1
        at = _digits(chars, begin, stop)
        if at == begin:
            return -1
    if at < stop and (chars[at] == c'e' or chars[at] == c'E'):
        begin = at + 1
        if begin < stop and (chars[begin] == c'+' or chars[begin] == c'-'):
            begin += 1
        at = _digits(chars, begin, stop)
        if at == begin:
            return -1
    return at


cdef Py_ssize_t _digits(const char_t* chars, Py_ssize_t at, Py_ssize_t stop) noexcept nogil:
    while at < stop and c'0' <= chars[at] <= c'9':
        at += 1
    return at


cdef Py_ssize_t _word(
    const char_t* chars, Py_ssize_t at, Py_ssize_t stop, const char* word, Py_ssize_t length
) noexcept nogil:
    cdef Py_ssize_t i
    if stop - at < length:
        return -1
    for i in range(length):
        if chars[at + i] != <char_t> word[i]:
            return -1
    return at + length


cdef bint _equal(const char_t* chars, Py_ssize_t begin, Py_ssize_t end, str key):
    cdef Py_ssize_t i
    if end - begin != len(key):
        return False
    for i in range(end - begin):
        if <Py_UCS4> chars[begin + i] != key[i]:
            return False
    return True
