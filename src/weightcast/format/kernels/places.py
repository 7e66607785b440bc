"""Elements of a checkpoint tensor in an engine's parameter: nested loops of evenly spaced elements, on both sides.

``table`` has a row per loop, outermost first: the count, the step in the tensor, the step in the parameter.
"""

import numpy as np

from weightcast.format.kernels.compile import kernel
from weightcast.format.kernels.cpu import mix


@kernel
def translate(indices, source, target, table, which, where):
    """Flat indices of the tensor to places in the parameter, for those that are in the box; returns how many are."""
    found = 0
    for i in range(indices.size):
        rest = indices[i] - source
        place = target
        for k in range(table.shape[0]):
            step = table[k, 1]
            at = rest // step
            if at < 0 or at >= table[k, 0]:
                rest = -1
                break
            rest -= at * step
            place += at * table[k, 2]
        if rest == 0:
            which[found], where[found] = i, place
            found += 1
    return found


@kernel
def digest_places(words, source, target, table):
    """What the elements of a box add to the tensor's digest, read from the parameter."""
    total = np.uint64(0)
    depth = table.shape[0]
    at = np.zeros(depth, np.int64)
    count, there, here = table[depth - 1, 0], table[depth - 1, 1], table[depth - 1, 2]
    while True:
        for i in range(count):
            total += mix(source + i * there, words[target + i * here])
        k = depth - 2
        while k >= 0:
            at[k] += 1
            source += table[k, 1]
            target += table[k, 2]
            if at[k] < table[k, 0]:
                break
            source -= at[k] * table[k, 1]
            target -= at[k] * table[k, 2]
            at[k] = 0
            k -= 1
        if k < 0:
            return total
