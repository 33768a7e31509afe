"""Safetensors files: one file, or shards with an index, as one set of named tensors.

Format: 8 bytes of header length (little endian), a JSON header `{name: {dtype, shape, data_offsets}}`, then the data.
All headers are read when a set is opened, so that what is absent or truncated fails at once. Data is read when asked
for, straight into the memory that is returned: mapped files would count twice, as pages of the file and as tensors,
until the mapping is closed.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from mxk_compile.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_CHUNK_BYTES = 64 << 20  # read at a time, for the progress bar
_QUIET_SECONDS = 2.0  # a load shorter than this shows no progress bar
_REFETCH = "fetch the file again"
_MAX_DIMS = 64  # of a tensor: what torch computes with
_MAX_SIZE = 2**63 - 1  # of a size, an offset or a tensor's bytes: what torch takes
_ENTRY_KEYS = ("dtype", "shape", "data_offsets")
_DTYPES = {
    **{"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"BOOL": torch.bool, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
    **{"F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: file, dtype (None for one that torch lacks), shape, offset and length in bytes."""

    path: Path
    dtype_name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class TensorFiles:
    """The tensors below a path: a directory, one `.safetensors` file, or an index file.

    A directory holds `model.safetensors`, or an index with its shards, or exactly one other `.safetensors` file.
    `config` is the content of config.json beside them, {} without one. No file is held open.
    Raises CheckpointError for anything absent, truncated or contradictory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _reading(self.path):
            self.directory = self.path if self.path.is_dir() else self.path.parent
            file = _find(self.path)
            self._entries = _read_index(file) if file.suffix == ".json" else _read_header(file)
            config = self.directory / "config.json"
            self.config: dict[str, Any] = _read_json(config, config.read_bytes()) if config.is_file() else {}
        self._bar: Any = None

    def close(self) -> None:
        """End the progress bar that a long load shows."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Where a tensor lies. Raises CheckpointError when there is none of that name."""
        if name not in self._entries:
            allowed = f"one of the {len(self._entries)} tensors of the checkpoint"
            advice = "check the name and the scheme, or fetch the checkpoint again"
            raise CheckpointError(str(self.path), f"missing tensor {name}", allowed, advice)
        return self._entries[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own. Raises CheckpointError when it is absent or cannot be read."""
        entry = self.entry(name)
        if entry.dtype is None:
            self.refuse(name, f"dtype {entry.dtype_name}", ", ".join(_DTYPES), "convert the tensor")
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, out)
        return out

    def expect(
        self, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
    ) -> tuple[int, ...]:
        """Return a tensor's shape, checked against dtypes and a shape in which None is any size of at least 1."""
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.refuse(name, f"dtype {entry.dtype_name}", allowed, "check the scheme")
        fits = len(entry.shape) == len(shape) and all(
            have > 0 and want in (None, have) for want, have in zip(shape, entry.shape, strict=True)
        )
        if not fits:
            allowed = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
            advice = "check the scheme, and that all files are of one checkpoint"
            self.refuse(name, f"shape {list(entry.shape)}", allowed, advice)
        return entry.shape

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor's bytes into `out`, contiguous CPU memory of as many bytes, whatever its dtype."""
        entry = self.entry(name)
        if not out.is_contiguous() or out.nbytes != entry.num_bytes:
            allowed = f"{entry.num_bytes} contiguous bytes"
            self.refuse(
                name, f"memory of {out.nbytes} bytes to read into", allowed, "allocate as the header says"
            )
        if entry.num_bytes == 0:
            return
        self._read(name, entry, entry.offset, out)

    def tensor_at(self, name: str, index: int) -> torch.Tensor:
        """Read tensor[index] alone, into memory of its own. Raises CheckpointError as `tensor`."""
        entry = self.entry(name)
        if entry.dtype is None:
            self.refuse(name, f"dtype {entry.dtype_name}", ", ".join(_DTYPES), "convert the tensor")
        out = torch.empty(entry.shape[1:], dtype=entry.dtype)
        self._read(name, entry, entry.offset + index * out.nbytes, out)
        return out

    def _read(self, name: str, entry: Entry, offset: int, out: torch.Tensor) -> None:
        """Fill `out` with the file's bytes from `offset` on."""
        progress, done = self._progress(), 0
        view = memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")
        with _reading(entry.path), open(entry.path, "rb", buffering=0) as file:
            file.seek(offset)
            while done < out.nbytes:
                count = file.readinto(view[done : done + _CHUNK_BYTES])
                if not count:
                    self.refuse(name, f"{done} bytes", f"{out.nbytes} bytes", _REFETCH)
                done += count
                progress.update(count)

    def skip(self, num_bytes: int) -> None:
        """Count bytes as read that need not be, for the progress bar."""
        self._progress().update(num_bytes)

    def refuse(self, name: str, given: str, allowed: str, advice: str) -> NoReturn:
        """Raise CheckpointError about a tensor, with the file it lies in."""
        path = self._entries[name].path if name in self._entries else self.path
        raise CheckpointError(f"{path}: {name}", given, allowed, advice)

    def _progress(self) -> Any:
        if self._bar is None:
            total = sum(entry.num_bytes for entry in self._entries.values())
            # disable=None: a bar only on a terminal.
            self._bar = tqdm(
                total=total,
                desc=self.path.name,
                unit="B",
                unit_scale=True,
                delay=_QUIET_SECONDS,
                disable=None,
                leave=False,
            )
        return self._bar


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the system says of a file (name too long, no permission, an error of the disk) into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            str(error.filename or path), str(error.strerror), "a file that can be read", _REFETCH
        ) from error


def _find(path: Path) -> Path:
    """The file to open for a path that a user gave."""
    if path.is_dir():
        for name in (SINGLE_NAME, INDEX_NAME):
            if (path / name).is_file():
                return path / name
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        given = f"{len(found)} .safetensors files and no index"
        allowed = f"{SINGLE_NAME}, {INDEX_NAME}, or one other .safetensors file"
        raise CheckpointError(str(path), given, allowed, "give the directory of a whole checkpoint")
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "a file or directory that exists", "check the path")
    return path


def _read_index(path: Path) -> dict[str, Entry]:
    """Entries of all shards that an index names."""
    weight_map = _read_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(path), "no weight_map", "an object of tensor: file", _REFETCH)
    shards: dict[str, dict[str, Entry]] = {}
    for name, shard in weight_map.items():
        # A shard lies beside its index: a name that leads elsewhere would let an index read any file.
        plain = isinstance(shard, str) and shard == Path(shard).name and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            given = f"file {shard!r} for {name}"
            raise CheckpointError(str(path), given, "the plain name of a .safetensors file", _REFETCH)
        if shard not in shards:
            if not (path.parent / shard).is_file():
                given = f"shard {shard} is absent (needed for {name})"
                raise CheckpointError(
                    str(path), given, "all shards beside the index", "fetch the missing shard"
                )
            shards[shard] = _read_header(path.parent / shard)
    entries: dict[str, Entry] = {}
    for shard, header in shards.items():
        for name, entry in header.items():
            if name in entries:
                given = f"duplicate tensor {name} in {entries[name].path.name} and {shard}"
                raise CheckpointError(str(path), given, "each tensor in one file", "remove the older file")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            given = f"no tensor {name} in {shard}"
            raise CheckpointError(str(path), given, "the tensors that the index lists", _REFETCH)
    return {name: entry for name, entry in entries.items() if name in weight_map}


def _read_header(path: Path) -> dict[str, Entry]:
    """Entries of one safetensors file, each within the file's length."""
    with open(path, "rb") as file:
        file_bytes = path.stat().st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            given = f"{file_bytes} bytes, header of {header_bytes}"
            raise CheckpointError(str(path), given, "a whole safetensors file", _REFETCH)
        header = _read_json(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    return {name: _parse_entry(path, name, value, start, file_bytes) for name, value in header.items()}


def _parse_entry(path: Path, name: str, value: Any, start: int, file_bytes: int) -> Entry:
    fields: dict[str, Any] = dict.fromkeys(_ENTRY_KEYS) | (value if isinstance(value, dict) else {})
    dtype_name, shape, offsets = (fields[key] for key in _ENTRY_KEYS)
    # Exact types: int() would take "4", 4.9 and true, and a str or an object would pass as a list.
    is_read = isinstance(dtype_name, str) and all(
        isinstance(sizes, list)
        and len(sizes) <= _MAX_DIMS
        and all(type(size) is int and abs(size) <= _MAX_SIZE for size in sizes)
        for sizes in (shape, offsets)
    )
    if not is_read or len(offsets) != 2:
        given = "a header entry that cannot be read"
        raise CheckpointError(f"{path}: {name}", given, ", ".join(_ENTRY_KEYS), _REFETCH)
    begin, end = offsets
    if start + end > file_bytes:
        given = f"truncated, {file_bytes} bytes"
        raise CheckpointError(f"{path}: {name}", given, f"at least {start + end} bytes", _REFETCH)
    dtype = _DTYPES.get(dtype_name)
    wanted = max(end - begin, 0) if dtype is None else dtype.itemsize * math.prod(shape)
    # torch computes strides of an empty tensor too.
    is_too_large = 8 * math.prod(max(size, 1) for size in shape) > _MAX_SIZE
    if begin < 0 or min(shape, default=0) < 0 or wanted != end - begin or is_too_large:
        given = f"{dtype_name} {list(shape)} at bytes {begin} to {end}"
        allowed = f"{wanted} bytes, and less than 2**60 elements if each empty size were 1"
        raise CheckpointError(
            f"{path}: {name}", given, allowed if is_too_large else f"{wanted} bytes", _REFETCH
        )
    return Entry(path, dtype_name, dtype, tuple(shape), start + begin, end - begin)


def _read_json(path: Path, text: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(str(path), f"duplicate name {twice}", "each name once", _REFETCH)
        return seen

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, too many digits, too deep
        given = f"text that is not JSON ({error})"
        raise CheckpointError(str(path), given, "a JSON object", _REFETCH) from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"JSON {type(value).__name__}", "a JSON object", _REFETCH)
    return value
