"""A row: one point, run one way, on one device; how rows are written and read. One JSON object a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mxk_compile.errors import CallError

SCHEMA = "mxk-bench-1"
EVIDENCE = ("measured", "modelled", "published")
_MOST_BYTES = 64 << 20
# Anything outside is no measurement, and would leave the range of what is drawn from it.
_LEAST, _MOST = 1e-12, 1e15
_LONGEST_TEXT = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of `mxk bench`.

    Attributes:
        variant: model row, or the name of what was measured where it is none.
        weight_format, hidden_size, intermediate_size, num_experts, all_experts, top_k: the layer; E is local.
        num_tokens, routing, local_routes, experts_touched, seed: the call.
        impl: "fused", "stock", "unpacked", or a peer's name.
        kernel: what ran it.
        device: name of the processor or accelerator.
        threads: of the CPU; 0 elsewhere.
        evidence: one of EVIDENCE.
        us, us_p10, us_p90: microseconds a call: median, tenth and ninetieth percentile of the samples.
        floor_us: packed bytes of the experts touched over the read bandwidth that the same process reaches.
        packed_gb_s, read_gb_s: those bytes over `us`, and that bandwidth, in 1e9 bytes a second.
        rotated_bytes: packed bytes that the calls walk over before they meet the same again.
        rel_l2: error of the first call's result against fp32 without any rounding; None where nothing ran.
        rel_l2_bf16: the same against fp32 with a bf16 intermediate, as the published tables have it.
        method: how `us` was taken.
        versions: of what could change it, by name.
        counts: what the emulator counted for one call, where it is modelled.
    """

    variant: str
    weight_format: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    all_experts: int
    top_k: int
    num_tokens: int
    routing: str
    local_routes: int
    experts_touched: int
    seed: int
    impl: str
    kernel: str
    device: str
    threads: int = 0
    evidence: str
    us: float
    us_p10: float | None = None
    us_p90: float | None = None
    floor_us: float | None = None
    packed_gb_s: float | None = None
    read_gb_s: float | None = None
    rotated_bytes: int = 0
    rel_l2: float | None = None
    rel_l2_bf16: float | None = None
    method: str
    versions: dict[str, str]
    counts: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What makes two rows the same line of a table: model row, local experts, tokens, routing."""
        return self.variant, self.num_experts, self.num_tokens, self.routing

    @property
    def call(self) -> str:
        """The call in words."""
        return f"{self.variant} E={self.num_experts} T={self.num_tokens} {self.routing}"

    @property
    def name(self) -> str:
        """The call and who made it."""
        return f"{self.call} ({self.impl})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, allow_nan=False)


_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(Row)}
_POSITIVE = ("hidden_size", "intermediate_size", "num_experts", "all_experts", "top_k", "num_tokens", "us")


def _fault(values: Any) -> str | None:
    """What is wrong with a decoded line."""
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        return f"is no row of schema {SCHEMA}"
    for name in {*_FIELDS} ^ ({*values} - {"schema"}):
        return f"{'lacks' if name in _FIELDS else 'has an unknown field'} {name!r}"
    for name, kind in _FIELDS.items():
        value = values[name]
        right = {
            "str": _is_text(value),
            "int": type(value) is int and 0 <= value < _MOST,
            "float": _is_number(value),
            "float | None": value is None or _is_number(value),
            "dict[str, str]": isinstance(value, dict) and all(map(_is_text, (*value, *value.values()))),
            "dict[str, float]": isinstance(value, dict)
            and all(map(_is_text, value))
            and all(map(_is_number, value.values())),
        }[kind]
        if not right or (name in _POSITIVE and value <= 0):
            return f"has {name} {value!r:.40}"
    return None if values["evidence"] in EVIDENCE else f"has evidence {values['evidence']!r:.40}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or _LEAST <= value < _MOST)


def _is_text(value: Any) -> bool:
    """Printable, so that no file can steer the terminal that shows a table of it."""
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT


def parse(lines: Iterable[str], source: str) -> list[Row]:
    """Rows of lines, blank ones left out; raises CallError naming `source` and the line that is none."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            fault = _fault(values)
        except (ValueError, RecursionError):
            fault = "is no JSON, or cut off"
        if fault is not None:
            raise CallError(
                source, f"line {number} {fault}", "lines that `mxk bench` printed", "run it again"
            )
        del values["schema"]
        rows.append(Row(**values))
    if not rows:
        raise CallError(source, "no rows", "lines that `mxk bench` printed", "run it again")
    return rows


def read(path: Path) -> list[Row]:
    """Rows of a file; raises CallError naming the file where it cannot be read or is not what `mxk bench` printed."""
    try:
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise CallError(
                str(path), f"more than {_MOST_BYTES >> 20} MiB", "rows of `mxk bench`", "check the path"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CallError(
            str(path), error.strerror or str(error), "a file that can be read", "check the path"
        ) from None
    except UnicodeDecodeError:
        raise CallError(str(path), "no text", "lines that `mxk bench` printed", "check the path") from None
    return parse(text.splitlines(), str(path))
