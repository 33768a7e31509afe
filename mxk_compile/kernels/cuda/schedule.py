"""Which kernel runs a call, and how: one function from a printable problem to a printable schedule.

The order of authority: the settings (`MXK_CUDA_SCHEDULE`), what `mxk tune` stored for this device, `heuristic`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math

from mxk_compile.errors import SettingsError
from mxk_compile.kernels.cuda.build import cache_folder, write_whole
from mxk_compile.settings import settings

DECODE_ROUTES = (64, 256, 1024)
"""Routes that the decode kernel is compiled for: shared memory holds its lists."""
_SHARED_BYTES = 232448  # of a block, as SHARED_LIMIT of moe_decode.cu
_TILE_SIZES = range(16, 177, 16)  # of the prefill kernel
_LARGEST = 128  # of tiles that are chosen for calls
_MOST_SIZES = 4
_DECODE_NAMES = ("warps", "groups", "stages", "tiles13", "tiles2", "column_tiles", "max_routes")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a schedule may depend on.

    Attributes:
        device: name of the device.
        weight_format: as in `mxk::moe`.
        num_experts, intermediate_size, hidden_size, top_k: E, I, K, k of the layer.
        num_tokens: T of the call.
    """

    device: str
    weight_format: str
    num_experts: int
    intermediate_size: int
    hidden_size: int
    top_k: int
    num_tokens: int

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
            sizes = tuple(int(size) for size in rest.split("/"))
            if not sizes or len(sizes) > _MOST_SIZES or sorted(set(sizes)) != list(sizes):
                raise ValueError(text)
            if any(size not in _TILE_SIZES for size in sizes):
                raise ValueError(text)
            return cls("prefill", sizes=sizes)
        pairs = [part.split("=") for part in rest.split(",") if part]
        if kernel != "decode" or any(len(pair) != 2 or pair[0] not in _DECODE_NAMES for pair in pairs):
            raise ValueError(text)
        return cls("decode", tuple((name, int(value)) for name, value in pairs))


def heuristic(problem: Problem) -> Schedule:
    """The schedule for a problem nobody tuned: a pure function.

    The decode kernel unpacks an expert's bytes again for every eight of its rows: with more rows, prefill.
    """
    rows = problem.rows_per_expert
    if problem.weight_format != "mxfp4":
        return Schedule("prefill", sizes=prefill_sizes(rows))
    if rows <= _DECODE_ROWS or (rows <= _COLUMNS and problem.num_tokens <= _DECODE_TOKENS):
        for split in DECODE_SPLITS:
            macros = decode_macros(problem, split)
            if macros is not None:
                return Schedule("decode", macros)
    return Schedule("prefill", sizes=prefill_sizes(rows))


_COLUMNS = 8  # rows of an expert that the decode kernel takes at once
_DECODE_ROWS = 4  # mean of an expert; nearly all have at most eight then
_DECODE_TOKENS = (
    32  # up to here experts are likelier to have fewer rows than the mean: where not all routes are local
)
DECODE_SPLITS = ((6, 2, 4), (4, 2, 8), (8, 1, 7), (12, 1, 4))
"""Warps and groups of the decode kernel, the faster ones first (docs/performance/h200.md), and how many steps of 128
columns a warp's registers hold: 16 registers each, beside about 80 for the rest."""


def decode_macros(problem: Problem, split: tuple[int, int, int]) -> tuple[tuple[str, int], ...] | None:
    """Macros of the decode kernel with one of `DECODE_SPLITS`; None if registers or shared memory do not hold it."""
    warps, groups, held = split
    routes = problem.num_tokens * problem.top_k
    room = next((size for size in DECODE_ROUTES if routes <= size), None)
    steps = -(-max(problem.hidden_size, problem.intermediate_size) // 128)
    if room is None or -(-steps // warps) > held:
        return None
    # A slot of the ring holds 16 rows of w13, or as many more of w2 as they are shorter. The room for routes is not
    # looked at, so that the ring is the same for every number of tokens.
    shorter = min(3, _decode_slot(problem.hidden_size, 1) // _decode_slot(problem.intermediate_size, 1))
    rings = [
        (stages * tiles2, stages, tiles2)
        for stages in ((4, 3, 2) if groups == 1 else (4, 2))
        for tiles2 in range(1, max(1, shorter) + 1)
        if _decode_shared(problem, warps, groups, stages, tiles2, DECODE_ROUTES[-1]) <= _SHARED_BYTES
    ]
    if not rings:
        return None
    _, stages, tiles2 = max(rings)
    ring = ("stages", stages), ("tiles2", tiles2)
    return ("warps", warps), ("groups", groups), *ring, ("max_routes", room)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _decode_slot(columns: int, tiles: int) -> int:
    """Bytes of `tiles` times 16 rows in a slot of the ring, at most: where rows are copied one by one."""
    row = columns // 2
    stride = row // 128 * 128 + (64 if row % 128 <= 64 else 192)
    return _up(16 * tiles * stride + 2 * (_up(8 * tiles * (columns // 32), 16) + 32), 128)


def _decode_shared(
    problem: Problem, warps: int, groups: int, stages: int, tiles2: int, max_routes: int
) -> int:
    """Bytes of shared memory of moe_decode.cu, at most."""
    slot = max(_decode_slot(problem.hidden_size, 1), _decode_slot(problem.intermediate_size, tiles2))
    buffers = 6 if groups == 2 else 3
    partials = buffers * tiles2 * warps * 512
    lists = _up(16 * (stages + buffers), 16) + 2 * _up(4 * problem.num_experts, 16) + 16 * max_routes
    return _up(stages * slot + partials + lists + 16, 128)


def prefill_sizes(rows: float) -> tuple[int, ...]:
    """Tile sizes for experts with about this many rows: what even divisions of likely counts come to."""
    spread = 2 * math.sqrt(rows)
    found = set()
    for count in range(max(1, int(rows - spread)), int(rows + spread) + 17, 16):
        padded = -(-count // 16) * 16
        tiles = -(-padded // _LARGEST)
        found.add(-(-padded // (16 * tiles)) * 16)
    # The largest must be there: it sets the number of tiles. Few launches: of the others, what lies highest.
    sizes = sorted(found)[-3:]
    if rows > _LARGEST / 2 and sizes[-1] != _LARGEST:
        sizes = [*sizes[-2:], _LARGEST]
    return tuple(sizes)


def project_sizes(rows: float) -> tuple[int, ...]:
    """Tile sizes of a projection for experts with about this many rows."""
    return prefill_sizes(rows)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> Schedule:
    """The schedule of a call. Raises SettingsError for an override that names none."""
    if settings.cuda_schedule is not None:
        return _forced(settings.cuda_schedule)
    stored = tuned(problem.device).get(problem.key)
    return stored if stored is not None else heuristic(problem)


def _forced(text: str) -> Schedule:
    try:
        return Schedule.parse(text)
    except ValueError as error:
        names = ", ".join(_DECODE_NAMES)
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
