"""How the decode kernel divides INT4 products: what fits into shared memory, and what it is expected to cost."""

from __future__ import annotations

import dataclasses
import math

SHARED_BYTES = 232448  # of a block, as SHARED_LIMIT of decode.cuh
_BATCH = 4  # steps, as `batch_of` of decode.cuh
_FEWEST_STAGES = 3  # of the ring: a slot that is read, and two on their way
_MOST_UNITS = 3  # warps of the epilogue, which have one each
MOST_SLICED = 8192  # outputs of a layer whose columns are sliced: counters of both share a page
_ROUTES = (
    64,
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
)  # that the kernel is compiled for: shared memory holds its lists


@dataclasses.dataclass(frozen=True)
class Split:
    """Macros of the kernel.

    Attributes:
        column_tiles: rows of an expert taken at once, in fours; even.
        units: of 16 weight rows in a slot.
        slices: blocks that share a projection's columns.
        max_routes: of the lists.
        chunk: steps of 32 columns in a slot, about.
        groups: warpgroups of consumers: each of their warps has a share of the columns.
    """

    column_tiles: int
    units: int
    slices: int
    max_routes: int = 256
    chunk: int = 64
    groups: int = 2

    @classmethod
    def of(cls, macros: tuple[tuple[str, int], ...]) -> Split:
        """The split of a schedule's macros; those that are not there are as in decode.cuh."""
        given = dict(macros)
        return cls(
            *(given.get("column_tiles", 1), given.get("units", 1), given.get("slices", 1)),
            *(given.get("max_routes", 256), given.get("chunk", 64), given.get("groups", 3)),
        )

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """As `Schedule` has them."""
        return tuple(vars(self).items())

    def product_us(self, likely: dict[int, float]) -> float:
        """Time of the product that tiles.py's costs are of, *modelled*, for experts with these likelihoods of rows.

        Bytes for each `4 * column_tiles` rows of an expert, or shared memory's time where that is longer, and what a
        launch costs.
        """
        passes = sum(part * math.ceil(rows / (4 * self.column_tiles)) for rows, part in likely.items())
        return (
            _LAUNCH_US
            + _SLICE_US * (self.slices - 1)
            + passes * _FLOOR_US * max(1 / _BYTES_AT_BEST, self._shared_clocks / (_SHARED_AT_BEST * _CLOCKS))
        )

    @property
    def _shared_clocks(self) -> float:
        """Of shared memory, for 16 weight rows and 32 columns, by four warps; units share the activations read."""
        own = 4.75  # weights and scales, written and read
        return 4 * (own + 5 * self.column_tiles / 2 / self.units)

    def shared_bytes(self, weights: tuple[Weight, ...], num_experts: int, masked: bool) -> int:
        """Shared memory of a block, at most, with a ring of `_FEWEST_STAGES`: as decode.cuh divides it."""
        slot = rows = scales = 0
        chunks = _FEWEST_STAGES
        for weight in weights:
            slices = self.slices if weight.sliced else 1
            steps = weight.columns // slices // 32
            batch = min(steps, _BATCH)
            batches = -(-steps // batch)
            parts = -(-steps // self.chunk)
            chunk, chunks = -(-batches // parts) * batch, min(chunks, parts)
            slot = max(slot, 16 * self.units * 16 * (chunk | 1))
            rows = max(rows, batches * batch * 272 * self.column_tiles + 128)
            own, rest = divmod(weight.scale_bytes, slices)
            padded = own + 32 if rest == 0 and own % 16 == 0 else weight.scale_bytes
            scales = max(scales, 16 * self.units * (padded + weight.zero_bytes) + 256)
        sums = 4 * self.groups * self.units * 256 * self.column_tiles  # in two places if that fits
        lists = 8 * num_experts + (6 if masked else 16) * self.max_routes + 24 * 4 * self.column_tiles + 1024
        scale_stages = 1 + math.ceil((_FEWEST_STAGES - 1) / chunks)
        return _FEWEST_STAGES * slot + rows + scale_stages * scales + sums + lists

    def fits(self, weights: tuple[Weight, ...], num_experts: int, masked: bool = False) -> bool:
        """Whether the kernel can be compiled with this split."""
        sliced = [weight for weight in weights if weight.sliced]
        return (
            self.column_tiles % 2 == 0
            and self.units <= _MOST_UNITS
            and all(weight.columns % (32 * self.slices) == 0 for weight in sliced)
            and self.shared_bytes(weights, num_experts, masked) <= SHARED_BYTES
        )


@dataclasses.dataclass(frozen=True)
class Weight:
    """Of a product.

    Attributes:
        columns: inputs.
        scale_bytes, zero_bytes: of a row.
        sliced: whether its columns may be shared between blocks.
    """

    columns: int
    scale_bytes: int
    zero_bytes: int = 0
    sliced: bool = True

    @classmethod
    def common(cls, columns: int, sliced: bool = True) -> Weight:
        """With the most common scales, of two bytes for 32 columns."""
        return cls(columns, columns // 32 * 2, sliced=sliced)


def around(rows: float) -> dict[int, float]:
    """Likelihoods of an expert's rows where the caller expects `rows`: some have more."""
    return {math.ceil(rows): 0.9, math.ceil(1.3 * rows) + 1: 0.1}


_BYTES_AT_BEST, _SHARED_AT_BEST = 0.9, 0.8  # of the card's rates
_FLOOR_US = 184  # bytes of 48 experts' 4096 x 7168 weights at the card's rate
_CLOCKS = 61.3  # in which a multiprocessor reads 16 rows of 32 columns, four times: 288 bytes each
_SLICE_US = 2  # waiting for each other
_LAUNCH_US = 12  # sorting, the first rows and the last wait
SPLITS = (
    *((2, 2, 1, 64), (2, 1, 1, 64), (4, 2, 1, 64), (4, 1, 1, 64)),
    *((4, 2, 2, 64), (4, 1, 2, 64), (4, 2, 4, 64), (8, 2, 2, 64), (8, 2, 4, 28), (8, 1, 4, 64)),
)
"""Column tiles, units, slices and chunk; of two that cost the same the earlier is taken."""


def _that_fit(weights: tuple[Weight, ...], num_experts: int, places: int, masked: bool) -> tuple[Split, ...]:
    found = []
    for column_tiles, units, slices, chunk in SPLITS:
        needed = num_experts * -(-places // (4 * column_tiles)) if masked else places
        room = next((size for size in _ROUTES if needed <= size), None)
        if room is not None:
            split = Split(column_tiles, units, slices, room, chunk)
            if split.fits(weights, num_experts, masked):
                found.append(split)
    return tuple(found)


def of_layer(hidden_size: int, intermediate_size: int, num_experts: int, routes: int) -> tuple[Split, ...]:
    """Splits of a layer, as far as its sizes tell."""
    weights = Weight.common(hidden_size), Weight.common(intermediate_size, sliced=False)
    fitting = _that_fit(weights, num_experts, routes, masked=False)
    return tuple(split for split in fitting if split.slices == 1 or hidden_size <= MOST_SLICED)


def of_product(weight: Weight, num_experts: int, routes: int, most_rows: int = 0) -> tuple[Split, ...]:
    """Splits of one product; with `most_rows` of an expert rows lie by expert, and only column blocks are listed."""
    return _that_fit((weight,), num_experts, most_rows or routes, masked=most_rows > 0)
