"""Which kernel runs a call, and how: one function from a printable problem to a printable schedule.

The order of authority: the settings (`MXK_CUDA_SCHEDULE`), what `mxk tune` stored for this device, `heuristic`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable

from mxk_compile.errors import SettingsError
from mxk_compile.kernels.cuda import int4_splits
from mxk_compile.kernels.cuda.build import cache_folder, write_whole
from mxk_compile.kernels.cuda.devices import HOPPER, Device
from mxk_compile.kernels.cuda.tiles import MOST_SIZES, TILE_SIZES, likely_rows, product_us, tile_sizes
from mxk_compile.settings import settings, whole_number
from mxk_compile.variants import INT4_FORMATS

_ROUTES = (64, 256, 512, 1024)
"""Routes that the decode kernel is compiled for: shared memory holds its lists."""
_MAX_ROUTES = 256  # MXK_MAX_ROUTES's default
_DECODE_NAMES = {
    **{"groups": range(2, 5), "column_tiles": range(1, 9), "units": range(1, 4), "chunk": range(1, 1025)},
    **{"laid": range(1, 4), "stages": range(2, 9), "buffers": range(1, 3), "max_routes": range(8, 65536, 8)},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a schedule may depend on.

    Attributes:
        device_name: for which `mxk tune` may have stored a schedule.
        weight_format: as in `mxk::moe`.
        num_experts, intermediate_size, hidden_size, top_k: E, I, K, k of the layer.
        num_tokens: T of the call.
        kind: of the device.
    """

    device_name: str
    weight_format: str
    num_experts: int
    intermediate_size: int
    hidden_size: int
    top_k: int
    num_tokens: int
    kind: Device

    @property
    def rows_per_expert(self) -> float:
        """Mean number of routes of an expert, if all are local."""
        return self.num_tokens * self.top_k / self.num_experts

    @property
    def key(self) -> str:
        """Name in the table of tuned schedules: calls with about as many rows an expert share one."""
        bucket = (
            2 ** round(2 * math.log2(max(self.rows_per_expert, 1 / self.num_experts)))
            if self.num_tokens
            else 0
        )
        sizes = f"E{self.num_experts} I{self.intermediate_size} K{self.hidden_size} k{self.top_k}"
        return f"{self.weight_format} {sizes} rows^2={bucket:g}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel and its parameters.

    Attributes:
        kernel: "decode" (moe_decode.cu) or "prefill" (prefill.cu).
        macros: of the decode kernel, without MXK_.
        sizes: tile sizes of the prefill kernel, ascending.
    """

    kernel: str
    macros: tuple[tuple[str, int], ...] = ()
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kernel == "prefill":
            return f"prefill:{'/'.join(map(str, self.sizes))}"
        return f"decode:{','.join(f'{name}={value}' for name, value in self.macros)}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that prints as `text`; raises ValueError if none does."""
        kernel, _, rest = text.partition(":")
        if kernel == "prefill":
            sizes = tuple(whole_number(size) for size in rest.split("/"))
            if not sizes or len(sizes) > MOST_SIZES or sorted(set(sizes)) != list(sizes):
                raise ValueError(text)
            if any(size not in TILE_SIZES for size in sizes):
                raise ValueError(text)
            return cls("prefill", sizes=sizes)
        pairs = [part.split("=") for part in rest.split(",") if part]
        if kernel != "decode" or any(len(pair) != 2 or pair[0] not in _DECODE_NAMES for pair in pairs):
            raise ValueError(text)
        macros = tuple((name, whole_number(value)) for name, value in pairs)
        if any(value not in _DECODE_NAMES[name] for name, value in macros):
            raise ValueError(text)
        return cls("decode", macros)

    def has_room(self, routes: int) -> bool:
        """Whether a call with so many routes fits the decode kernel's lists; the prefill kernel's fit any."""
        return self.kernel == "prefill" or routes <= dict(self.macros).get("max_routes", _MAX_ROUTES)


def heuristic(problem: Problem) -> Schedule:
    """The schedule for a problem nobody tuned: a pure function.

    The decode kernel streams an expert's bytes again for every `4 * column_tiles` of its rows: with more rows, prefill.
    """
    rows = problem.rows_per_expert
    if problem.weight_format == "mxfp4" and rows <= _DECODE_ROWS:
        for column_tiles in (1, 2) if rows <= _ONE_TILE_ROWS else (2, 1):
            for groups in (3, 2) if _third_group_is_free(problem, column_tiles) else (2,):
                macros = decode_macros(problem, groups, column_tiles)
                if macros is not None:
                    return Schedule("decode", macros)
    if problem.weight_format in INT4_FORMATS:
        return _cheaper(splits_of(problem), rows, problem.kind, even=False)
    return Schedule("prefill", sizes=tile_sizes(rows, most=problem.kind.most_rows))


def splits_of(problem: Problem) -> tuple[int4_splits.Split, ...]:
    """The decode kernel's splits of an INT4 layer."""
    sizes = (problem.hidden_size, problem.intermediate_size, problem.num_experts)
    return int4_splits.of_layer(*sizes, problem.num_tokens * problem.top_k, problem.kind.shared_bytes)


@dataclasses.dataclass(frozen=True)
class Product:
    """One projection by itself, as `Problem` a layer.

    Attributes:
        weight_format: as in `Problem`.
        num_experts, outputs: of the weight.
        weight: its columns and scales.
        rows: mean of an expert.
        even: whether all experts have about that many.
        routes: rows of the result.
        most_rows: of an expert where that is known, else 0: rows lie by expert then, and are not sorted.
        kind: of the device.
    """

    weight_format: str
    num_experts: int
    outputs: int
    weight: int4_splits.Weight
    rows: float
    even: bool
    routes: int
    most_rows: int
    kind: Device


def heuristic_of_product(product: Product) -> Schedule:
    """The schedule of a projection: a pure function."""
    even = product.even and not product.most_rows  # what is said of masked rows is a guess
    splits: tuple[int4_splits.Split, ...] = ()
    if product.weight_format in INT4_FORMATS and product.outputs % 16 == 0 and product.routes <= _MOST_ROUTES:
        sizes = (product.weight, product.num_experts, product.routes, product.kind.shared_bytes)
        splits = int4_splits.of_product(*sizes, product.most_rows)
    return _cheaper(splits, product.rows, product.kind, even, guessed=product.most_rows > 0)


def choose_of_product(product: Product) -> Schedule:
    """The schedule of a projection. Raises SettingsError for an override that names none."""
    if settings.cuda_schedule is not None:
        return _forced(settings.cuda_schedule)
    return heuristic_of_product(product)


def _cheaper(
    splits: tuple[int4_splits.Split, ...], rows: float, kind: Device, even: bool, guessed: bool = False
) -> Schedule:
    """Of prefill and the decode kernel's INT4 products; their costs are of one shape, whose ratio is taken for all."""
    likely = int4_splits.around(rows) if guessed else likely_rows(rows, even)
    best = min(splits, key=lambda split: split.product_us(likely), default=None)
    prefill = product_us(rows, even=even or guessed, most=kind.most_rows)
    if best is not None and best.product_us(likely) < _CLEARLY * prefill:
        return Schedule("decode", best.macros)
    return Schedule("prefill", sizes=tile_sizes(rows, even=even, most=kind.most_rows))


DECODE_SPLITS = ((2, 1), (3, 1), (2, 2), (3, 2))
"""Warpgroups of the decode kernel, and rows of an expert that it takes at once, in fours."""
# As measured (docs/performance/h200.md), by the mean of an expert's rows.
_ONE_TILE_ROWS = 3  # up to here streaming the few with more than four twice costs less than eight at once
_DECODE_ROWS = 6.5  # at 6: glm 239 us, by prefill 260, dsv41 325, 347; at 8: glm 286, 265, dsv41 418, 368
_CHUNK = 32  # MXK_CHUNK's default
_SHORT_CHUNKS = (24,)  # where a ring of three slots has room then, and not with the default
_SHORTEST_CHUNKS = (16, 8)  # for devices with less shared memory
_CLEARLY = 0.97  # of the one's time the other's, whose costs are of one shape, to be taken on any
_MOST_ROUTES = 65535  # rows of a projection, which its lists number in 16 bits


def decode_macros(problem: Problem, groups: int, column_tiles: int) -> tuple[tuple[str, int], ...] | None:
    """Macros of the decode kernel for `4 * column_tiles` rows of an expert at once; None if it cannot hold them."""
    routes = problem.num_tokens * problem.top_k
    room = next((size for size in _ROUTES if routes <= size), None)
    if room is None:
        return None
    macros = ("groups", groups), ("column_tiles", column_tiles), ("max_routes", room)
    limit = problem.kind.shared_bytes
    chunks = (_CHUNK, *(_SHORT_CHUNKS if limit >= HOPPER.shared_bytes else _SHORTEST_CHUNKS))
    for places, chunk in itertools.product((3, 2), chunks):  # of weights, and of scales
        shortest = _decode_bytes(problem, groups, column_tiles, room, chunk, 1, places, places)
        if _round_up(shortest, 128) <= limit:
            return macros if chunk == _CHUNK else (*macros, ("chunk", chunk))
    return None


def decode_runs(problem: Problem, macros: tuple[tuple[str, int], ...]) -> bool:
    """Whether the decode kernel of an MXFP4 layer can be compiled with these macros, which may be anybody's."""
    given, limit = dict(macros), problem.kind.shared_bytes
    groups, column_tiles = given.get("groups", 3), given.get("column_tiles", 1)
    room, chunk = given.get("max_routes", _MAX_ROUTES), given.get("chunk", _CHUNK)

    def fits(*parts: int) -> bool:
        return _round_up(_decode_bytes(problem, groups, column_tiles, room, chunk, *parts), 128) <= limit

    # SCALE_STAGES, BUFFERS and the fewest STAGES of decode_mxfp4_layout.cuh.
    scale_places = 3 if fits(1, 2, 3) else 2
    buffers = given.get("buffers", 2 if fits(2, 3, scale_places) else 1)
    return fits(buffers, given.get("stages", 2), scale_places)


def another(problem: Problem, runs: Callable[[tuple[tuple[str, int], ...]], bool]) -> Schedule:
    """The schedule where what `choose` says cannot run: of the splits of INT4 that run, or prefill.

    `splits_of` takes the most common scales; fp32 ones of small groups, or with zero points, may need a smaller split.
    """
    splits = splits_of(problem) if problem.weight_format in INT4_FORMATS else ()
    fitting = tuple(split for split in splits if runs(split.macros))
    return _cheaper(fitting, problem.rows_per_expert, problem.kind, even=False)


def _third_group_is_free(problem: Problem, column_tiles: int) -> bool:
    """Whether a third warpgroup leaves the room for a ring of three slots.

    Where it does, it is up to 6 % faster; kimi, glm and dsv41 with eight rows at once were up to 6 % slower. Not
    measured where there is less shared memory than Hopper's.
    """
    limit = problem.kind.shared_bytes
    three = _decode_bytes(problem, 3, column_tiles, 256, _CHUNK, buffers=1, slots=3, scale_places=3)
    return HOPPER.shared_bytes <= limit >= three


def _decode_bytes(
    problem: Problem,
    groups: int,
    column_tiles: int,
    max_routes: int,
    chunk_groups: int,
    buffers: int,
    slots: int,
    scale_places: int,
) -> int:
    """Bytes of shared memory that moe_decode.cu takes with MXFP4, before it rounds them up to 128."""
    slot = digits = scales = 0
    for size in (problem.hidden_size, problem.intermediate_size):
        columns = size // 32  # in groups that share a scale
        batch = _decode_batch(columns, groups, column_tiles)
        batches = -(-columns // batch)
        chunk = -(-batches // -(-columns // chunk_groups)) * batch
        slot = max(slot, 64 * 16 * (chunk | 1))
        digits = max(digits, batches * batch * 256 * column_tiles)
        rows = 64 * (columns + 16) if columns % 16 == 0 else 2 * _round_up(32 * columns + 15, 16)
        scales = max(scales, _round_up(rows, 128))
    sums = 2 * groups * 4 * 256 * column_tiles
    lists = 2 * _round_up(4 * problem.num_experts, 16) + 16 * max_routes + 96 * column_tiles + 400
    return slots * slot + buffers * digits + scale_places * scales + sums + lists


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _decode_batch(columns: int, groups: int, column_tiles: int) -> int:
    """`batch_of` of decode_mxfp4_layout.cuh."""
    most = 4 if column_tiles > 1 else 6
    if columns <= most:
        return columns
    sizes = [size for size in range(most, 3, -1) if columns % size == 0]
    even = [size for size in sizes if columns // size % groups == 0]
    return (even or sizes or [4])[0]


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> Schedule:
    """The schedule of a call. Raises SettingsError for an override that names none."""
    if settings.cuda_schedule is not None:
        return _forced(settings.cuda_schedule)
    stored = tuned(problem.device_name).get(problem.key)  # of a call with about as many routes
    if stored is not None and stored.has_room(problem.num_tokens * problem.top_k):
        return stored
    return heuristic(problem)


def _forced(text: str) -> Schedule:
    try:
        return Schedule.parse(text)
    except ValueError as error:
        names = ", ".join(f"{name} ({each.start} to {each[-1]})" for name, each in _DECODE_NAMES.items())
        allowed = f"'prefill:SIZE/...' with SIZE of 16..176 in 16s, or 'decode:NAME=N,...' of {names}"
        raise SettingsError("MXK_CUDA_SCHEDULE", repr(text), allowed, "correct or unset it") from error


def _table(device: str) -> str:
    return "tuned-" + "".join(c if c.isalnum() else "-" for c in device) + ".json"


@functools.cache
def tuned(device: str) -> dict[str, Schedule]:
    """What `mxk tune` stored for a device, by problem; entries of other versions are passed over."""
    try:
        texts = json.loads((cache_folder() / _table(device)).read_text())
    except (OSError, ValueError):
        return {}
    found = {}
    for key, text in texts.items() if isinstance(texts, dict) else ():
        try:
            found[key] = Schedule.parse(text)
        except (ValueError, AttributeError):
            continue
    return found


def store(device: str, schedules: dict[str, Schedule]) -> bool:
    """Adds schedules to the table of a device; False if the cache folder takes no file."""
    texts = {key: str(schedule) for key, schedule in (tuned(device) | schedules).items()}
    done = write_whole(cache_folder() / _table(device), json.dumps(texts, indent=1).encode())
    tuned.cache_clear()
    choose.cache_clear()
    return done
