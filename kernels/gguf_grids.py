"""The search for the grid of GGUF's blocks, in reference form: formulas in kernels/gguf_quants.py.

Arrays are [place in a group, lane], float32; a lane is a block. Sums run along the places in order, so that the bytes
are llama.cpp's.
"""

import numpy as np

TINY = np.float32(1e-15)  # a group whose largest number is below is a group of zeros
_F = np.float32

Array = np.ndarray


def nearest(v: Array) -> Array:
    """int32, half to even. Numbers beyond 2^22, inf and nan give what ggml's trick with the mantissa gives."""
    return ((v + _F(12582912)).view(np.int32) & 0x7FFFFF) - 0x400000


def rounded(v: Array, low: int, high: int) -> Array:
    return np.clip(nearest(v), low, high)


def sum_places(rows: Array) -> Array:
    total = np.zeros(rows.shape[1:], _F)
    for row in rows:
        total = total + row
    return total


def largest(x: Array) -> tuple[Array, Array]:
    """max |x| of each lane, and the first number of that size with its sign (0 in a lane of zeros)"""
    size = np.abs(x).max(0)
    first = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    return size, np.where(size > 0, first, _F(0))


def extremes(x: Array) -> tuple[Array, Array]:
    """min and max of each lane, the first of equal ones: 0 and -0 are equal"""
    return tuple(np.take_along_axis(x, index[None], 0)[0] for index in (x.argmin(0), x.argmax(0)))


def fit_symmetric(x: Array, weights: Array, levels: int) -> tuple[Array, Array]:
    """scale and codes in 0..2 levels - 1 of scale * (code - levels), by the least weighted squares of 19 grids"""
    size, extreme = largest(x)

    def fit(inverse: Array) -> tuple[Array, Array]:
        codes = rounded(inverse * x, -levels, levels - 1).astype(_F)
        return sum_places(weights * x * codes), sum_places(weights * codes * codes)

    inverse = _F(-levels) / extreme
    sum_xl, sum_ll = fit(inverse)
    scale = np.where(sum_ll != 0, sum_xl / sum_ll, _F(0))
    best = scale * sum_xl
    for step in (*range(-9, 0), *range(1, 10)):
        trial = -(_F(levels) + _F(0.1) * _F(step)) / extreme
        sum_xl, sum_ll = fit(trial)
        better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll)
        inverse = np.where(better, trial, inverse)
        scale = np.where(better, sum_xl / sum_ll, scale)
        best = np.where(better, scale * sum_xl, best)
    codes = rounded(inverse * x, -levels, levels - 1) + levels
    zeros = size < TINY
    return np.where(zeros, _F(0), scale), np.where(zeros, 0, codes)


def fit_affine(x: Array, weights: Array, high: int, grids: tuple[float, float, int]) -> tuple[Array, Array, Array]:
    """scale, offset <= 0 and codes in 0..high of scale * code + offset; grids: first, step, how many after the first"""
    low, top = extremes(x)
    sum_w, sum_x = sum_places(weights), sum_places(weights * x)
    low = np.where(low > 0, _F(0), low)
    flat, floor = top == low, low

    def error(scale: Array, low: Array, codes: Array) -> Array:
        difference = scale * codes + low - x
        return sum_places(weights * (difference * difference))

    inverse = _F(high) / (top - low)
    scale = _F(1) / inverse
    codes = rounded(inverse * (x - low), 0, high).astype(_F)
    best = error(scale, low, codes)
    first, step, count = grids
    for i in range(count + 1):
        inverse = (_F(first) + _F(step) * _F(i) + _F(high)) / (top - low)
        trial = rounded(inverse * (x - low), 0, high).astype(_F)
        weighted = weights * trial
        sum_l, sum_ll, sum_xl = sum_places(weighted), sum_places(weighted * trial), sum_places(weighted * x)
        determinant = sum_w * sum_ll - sum_l * sum_l
        trial_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        above = trial_low > 0
        trial_scale = np.where(above, sum_xl / sum_ll, (sum_w * sum_xl - sum_x * sum_l) / determinant)
        trial_low = np.where(above, _F(0), trial_low)
        trial_error = error(trial_scale, trial_low, trial)
        better = (determinant > 0) & (trial_error < best)
        codes, best = np.where(better, trial, codes), np.where(better, trial_error, best)
        scale, low = np.where(better, trial_scale, scale), np.where(better, trial_low, low)
    return np.where(flat, _F(0), scale), np.where(flat, floor, low), np.where(flat, 0, codes.astype(np.int32))


def fit_positive(x: Array, weights: Array, high: int) -> tuple[Array, Array]:
    """scale and codes of numbers >= 0: the best of 9 grids, then single codes are moved while that helps, 5 rounds"""
    top = np.maximum(x.max(0), _F(0))

    def error(scale: Array, codes: Array) -> Array:
        difference = x - scale * codes.astype(_F)
        return sum_places(weights * difference * difference)

    inverse = _F(high) / top
    best = error(_F(1) / inverse, nearest(inverse * x) & 255)
    for step in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = (_F(0.1) * _F(step) + _F(high)) / top
        trial_error = error(_F(1) / trial, np.minimum(nearest(trial * x), high))
        better = trial_error < best
        best, inverse = np.where(better, trial_error, best), np.where(better, trial, inverse)
    codes = np.minimum(nearest(inverse * x), high)
    floats = codes.astype(_F)
    sum_xl, sum_ll = sum_places(weights * x * floats), sum_places(weights * floats * floats)
    codes = codes & 255
    for _ in range(5):
        for i, (value, weight) in enumerate(zip(x, weights, strict=True)):
            code = codes[i].astype(_F)
            rest_xl, rest_ll = sum_xl - weight * value * code, sum_ll - weight * code * code
            moved = np.minimum(nearest(value * rest_ll / rest_xl), high)
            usable = (rest_xl > 0) & (rest_ll > 0) & (moved != codes[i])
            code = moved.astype(_F)
            xl, ll = rest_xl + weight * value * code, rest_ll + weight * code * code
            better = usable & (xl * xl * sum_ll > sum_xl * sum_xl * ll)
            codes[i] = np.where(better, moved & 255, codes[i])
            sum_xl, sum_ll = np.where(better, xl, sum_xl), np.where(better, ll, sum_ll)
    zeros = top < TINY
    return np.where(zeros | ~(sum_ll > 0), _F(0), sum_xl / sum_ll), np.where(zeros, 0, codes)
