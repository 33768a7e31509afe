"""Which tile sizes the prefill kernel runs with: a pure function of an expert's rows."""

from __future__ import annotations

import functools
import itertools
import math

TILE_SIZES = range(16, 177, 16)
MOST_SIZES = 4
_COSTS = {
    **{16: 252, 32: 275, 48: 304, 64: 344, 80: 386, 96: 442, 112: 463, 128: 521},
    **{144: 558, 160: 598, 176: 649},
}
"""Time of the prefill kernel for one tile an expert, by the tile's rows: µs for 48 experts of 4096 x 7168 INT4 weights,
measured on an H200 (docs/performance/h200.md)."""
_PLAN_AND_GATHER = 12  # µs of a projection, there
_ANOTHER_SIZE = 1.02  # a further tile size is a further launch, whose last tiles leave multiprocessors idle
_SPREAD = 2.5  # standard deviations of an expert's rows that count
_MANY_ROWS = 16384  # from an eighth of it on all tiles are full: what is chosen depends on the rows no longer


@functools.lru_cache(maxsize=4096)
def tile_sizes(rows: float, *, even: bool = False, most: int = TILE_SIZES[-1]) -> tuple[int, ...]:
    """Tile sizes, ascending, for experts with about this many rows: those that are expected to take least time.

    Each expert's rows are divided evenly over as few tiles as the largest size allows (rows.cuh).

    Args:
        rows: mean of an expert.
        even: whether all experts have that many, else they are drawn at random.
        most: the largest size that the device takes.
    """
    return _cheapest(rows, even, most)[1]


def product_us(rows: float, *, even: bool = False, most: int = TILE_SIZES[-1]) -> float:
    """Time of the prefill kernel with those tile sizes, plan and gather included, as `_COSTS` has it."""
    return _cheapest(rows, even, most)[0] + _PLAN_AND_GATHER


def rows_stay(outputs: int, size: int, ordered: bool) -> bool:
    """Whether prefill.cu reads rows of a projection where they lie, and no launch brings them into panels before.

    What it saves is that launch's bytes, as many for few outputs as for many. What it costs is a share of the product:
    for columns in their natural order 10 % with 128 rows a tile, 15 with 64; rows that lie apart, which threads copy in
    place of bulk copies, 15 to 20 %. The limits are where both came to the same on an H200.

    Args:
        outputs: N.
        size: rows of the largest tile.
        ordered: whether an expert's rows lie one behind the other.
    """
    return size > _SMALL_TILE and outputs <= (32 if ordered else 12) * size


_SMALL_TILE = 64  # of four warpgroups of consumers, with which rows that stay were not timed


def likely_rows(rows: float, even: bool) -> dict[int, float]:
    """How likely an expert has so many rows, if the mean is `rows` and the expert has any.

    As of `_MANY_ROWS` where there are more, and not all experts have them: the counts would be as many as their root.
    """
    if even:
        return {math.ceil(rows): 1.0}
    rows = min(rows, _MANY_ROWS)
    deviation = math.sqrt(max(rows, 1.0))
    low, high = (rows + sign * _SPREAD * deviation for sign in (-1, 1))
    counts = range(max(1, math.floor(low)), math.ceil(high) + 1)
    likely = {count: math.exp(-(((count - rows) / deviation) ** 2) / 2) for count in counts}
    total = sum(likely.values())
    return {count: value / total for count, value in likely.items()}


def _cheapest(rows: float, even: bool, most: int) -> tuple[float, tuple[int, ...]]:
    counts: dict[int, float] = {}
    for count, likely in likely_rows(rows, even).items():
        counts[_up(count)] = counts.get(_up(count), 0.0) + likely
    # A fourth size never pays.
    taken = range(16, most + 1, 16)
    candidates = (sizes for number in range(1, 4) for sizes in itertools.combinations(taken, number))
    return min((_expected_cost(sizes, counts), sizes) for sizes in candidates)


def _up(rows: int) -> int:
    return -(-rows // 16) * 16


def _expected_cost(sizes: tuple[int, ...], counts: dict[int, float]) -> float:
    cost = 0.0
    for padded, likely in counts.items():
        tiles = -(-padded // sizes[-1])
        step = _up(-(-padded // tiles))
        cost += likely * tiles * _COSTS[next(size for size in sizes if size >= step)]
    return cost * _ANOTHER_SIZE ** len(sizes)
