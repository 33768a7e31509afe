"""How the decode kernel divides INT4 products: what fits into shared memory, and what it is expected to cost."""

from __future__ import annotations

import dataclasses
import math

_CHUNK = 126  # groups of 32 columns: a box of a tensor map has up to 256 elements a row, of 8 bytes
_MOST_HELD = {2: 112, 3: 48, 4: 32}
"""Registers of a thread that activations may take, by warpgroups: what is left is enough for the rest."""
_SHORT_CHUNK = 56  # of layers, whose products share slots, and beside rows in shared memory; measured
_MOST_RING = 120 * 1024  # as MOST_RING of decode_int4_layout.cuh
_FEWEST_STAGES = 3  # of the ring: a slot that is read, and two on their way
_MOST_UNITS = 3  # warps of the epilogue, which have one each
_ROUTES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""That the kernel is compiled for: shared memory holds its lists."""

_COSTS = {(2, 2, 0): 1.1, (2, 1, 0): 1.11, (4, 2, 0): 1.22, (4, 1, 1): 1.23}
"""By column tiles, units and eights in shared memory, those that pay: time of a pass over the weights, by what their
bytes take at the card's rate. With `_FIXED_US` as measured on an H200 (docs/performance/h200.md). Where two cost the
same, the earlier."""
_BYTES_US = 184  # 48 experts' 4096 x 7168 weights at the card's rate
_FIXED_US = 18  # sorting, the first rows, and the end


@dataclasses.dataclass(frozen=True)
class Split:
    """Macros of the kernel.

    Attributes:
        column_tiles: rows of an expert taken at once, in fours; even.
        units: of 16 weight rows in a slot.
        max_routes: of the lists.
        chunk: groups of 32 columns in a slot, at most, about.
        groups: warpgroups of consumers: each of their warps has a share of the columns.
        laid: of the eights of rows those whose activations lie in shared memory, not in registers.
    """

    column_tiles: int
    units: int
    max_routes: int = 256
    chunk: int = _CHUNK
    groups: int = 2
    laid: int = 0

    @classmethod
    def of(cls, macros: tuple[tuple[str, int], ...]) -> Split:
        """The split of a schedule's macros; those that are not there are as in decode.cuh."""
        given = dict(macros)
        return cls(
            *(given.get("column_tiles", 1), given.get("units", 1), given.get("max_routes", 256)),
            *(given.get("chunk", _CHUNK), given.get("groups", 3), given.get("laid", 0)),
        )

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """As `Schedule` has them, without `laid` where it is none."""
        return tuple((name, value) for name, value in vars(self).items() if value)

    def product_us(self, likely: dict[int, float]) -> float:
        """Time of the product that tiles.py's costs are of, for experts with these likelihoods of rows.

        An expert's bytes are read again for every `4 * column_tiles` of its rows.
        """
        passes = sum(part * math.ceil(rows / (4 * self.column_tiles)) for rows, part in likely.items())
        return _FIXED_US + passes * _BYTES_US * _COSTS[self.column_tiles, self.units, self.laid]

    def _divided(self, groups: int) -> tuple[int, int]:
        """Chunks of a row with so many groups of columns, a warp's groups of a chunk: the source's CHUNKS, STEPS."""
        chunks = -(-groups // min(self.chunk, _CHUNK))
        return chunks, -(-groups // (chunks * 4 * self.groups))

    def slot_bytes(self, weights: tuple[Weight, ...]) -> int:
        """Of a slot of the ring, but for a few bytes."""
        steps = (self._divided(weight.columns // 32)[1] for weight in weights)
        return max(16 * self.units * 16 * (each * 4 * self.groups | 1) for each in steps)

    def shared_bytes(
        self, weights: tuple[Weight, ...], num_experts: int, masked: bool, stages: int = _FEWEST_STAGES
    ) -> int:
        """Shared memory of a block, at most, with a ring of so many stages: as decode_int4_layout.cuh divides it."""
        sums_of_rows = scales = 0
        fewest_chunks = _FEWEST_STAGES
        for weight in weights:
            chunks, steps = self._divided(weight.columns // 32)
            width, fewest_chunks = steps * 4 * self.groups, min(fewest_chunks, chunks)
            sums_of_rows = max(sums_of_rows, chunks * width * 16 * (self.column_tiles + 32 * self.laid) + 128)
            own = weight.scale_bytes
            padded = own + 32 if own % 16 == 0 else own
            scales = max(scales, 16 * self.units * (padded + weight.zero_bytes) + 256)
        sums = (
            4 * self.groups * self.units * 256 * self.column_tiles
        )  # in two places if that fits beside the fewest stages
        lists = 8 * num_experts + (6 if masked else 16) * self.max_routes + 24 * 4 * self.column_tiles + 1024
        lists += 0 if masked else 4096  # at most
        sums *= 1 if stages <= _FEWEST_STAGES else 2
        scale_stages = 1 + math.ceil((stages - 1) / fewest_chunks)
        slots = stages * self.slot_bytes(weights)
        return slots + sums_of_rows + scale_stages * scales + sums + lists

    def held(self, weights: tuple[Weight, ...]) -> int:
        """Registers of a thread that hold activations, at most."""
        most = 0
        for weight in weights:
            chunks, steps = self._divided(weight.columns // 32)
            most = max(most, chunks * steps * 4 * (self.column_tiles // 2 - self.laid))
        return most

    def places(self, num_experts: int, most_rows: int) -> int:
        """Places that the lists need for masked rows, of which an expert has up to `most_rows`: its column blocks."""
        return num_experts * -(-most_rows // (4 * self.column_tiles))

    def fits(
        self,
        weights: tuple[Weight, ...],
        num_experts: int,
        limit: int,
        masked: bool = False,
        stages: int = _FEWEST_STAGES,
    ) -> bool:
        """Whether the kernel can be compiled with this split; `limit`: of a block's shared memory, in bytes."""
        return (
            self.column_tiles % 2 == 0
            and 2 * self.laid < self.column_tiles
            and self.units <= _MOST_UNITS
            and self.held(weights) <= _MOST_HELD.get(self.groups, 0)
            and self.shared_bytes(weights, num_experts, masked, stages) <= limit
        )


def stages_of(macros: tuple[tuple[str, int], ...]) -> int:
    """Of the ring that a schedule's macros want at least; the source takes more where they fit."""
    return max(dict(macros).get("stages", 0), _FEWEST_STAGES)


@dataclasses.dataclass(frozen=True)
class Weight:
    """Of a product.

    Attributes:
        columns: inputs.
        scale_bytes, zero_bytes: of a row.
    """

    columns: int
    scale_bytes: int
    zero_bytes: int = 0

    @classmethod
    def common(cls, columns: int) -> Weight:
        """With the most common scales, of two bytes for 32 columns."""
        return cls(columns, columns // 32 * 2)


def around(rows: float) -> dict[int, float]:
    """Likelihoods of an expert's rows where the caller expects `rows`: some have more."""
    return {math.ceil(rows): 0.95, math.ceil(1.3 * rows) + 1: 0.05}


def _that_fit(
    weights: tuple[Weight, ...], num_experts: int, places: int, limit: int, masked: bool, chunk: int = _CHUNK
) -> tuple[Split, ...]:
    found = []
    for column_tiles, units, laid in _COSTS:
        split = Split(column_tiles, units, chunk=_SHORT_CHUNK if laid else chunk, laid=laid)
        needed = split.places(num_experts, places) if masked else places
        room = next((size for size in _ROUTES if needed <= size), None)
        if room is not None:
            split = dataclasses.replace(split, max_routes=room)
            few = _FEWEST_STAGES * split.slot_bytes(weights) <= _MOST_RING
            if few and split.fits(weights, num_experts, limit, masked):
                found.append(split)
    return tuple(found)


def of_layer(
    hidden_size: int, intermediate_size: int, num_experts: int, routes: int, limit: int
) -> tuple[Split, ...]:
    """Splits of a layer, as far as its sizes tell, in `limit` bytes of shared memory."""
    weights = Weight.common(hidden_size), Weight.common(intermediate_size)
    return _that_fit(weights, num_experts, routes, limit, masked=False, chunk=_SHORT_CHUNK)


def of_product(
    weight: Weight, num_experts: int, routes: int, limit: int, most_rows: int = 0
) -> tuple[Split, ...]:
    """Splits of one product; with `most_rows` of an expert rows lie by expert, and only column blocks are listed."""
    return _that_fit((weight,), num_experts, most_rows or routes, limit, masked=most_rows > 0)
