"""Output files: safetensors written in place, and the folder that becomes the checkpoint when all is there.

Until then all lies in DST.partial, where nothing has a name that a loader takes: shards end in ".part", index and
config.json are not there. journal.json says which shards are whole; a shard enters it after it is on the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mxk_compile.checkpoint_files import INDEX_NAME
from mxk_compile.errors import CheckpointError
from mxk_compile.quantize.layouts import Output

JOURNAL = "journal.json"
_LOCK = "lock"
_DTYPE_NAMES = {
    **{torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
    **{torch.bool: "BOOL", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"},
    **{torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    torch.float8_e8m0fnu: "F8_E8M0",
}
_GO_ON = "make room and start it again: it goes on where it stopped"
_ELSEWHERE = "name another folder, or mend that and start it again: it goes on where it stopped"


class Shard:
    """One safetensors file, made at its full size and filled in any order; under its name only after `finish`."""

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        self.path, self._new = path, path.with_suffix(".new")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        for output in outputs:
            self._offsets[output.name] = end
            entry = {"dtype": _DTYPE_NAMES[output.dtype], "shape": list(output.shape)}
            header[output.name] = entry | {"data_offsets": [end, end + output.num_bytes]}
            end += output.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the format asks
        self._start, self.num_bytes = 8 + len(text), 8 + len(text) + end
        self._file = open(self._new, "wb", buffering=0)  # noqa: SIM115  closed by finish or abandon
        self._put(0, struct.pack("<Q", len(text)) + text)
        self._file.truncate(self.num_bytes)

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        """Bytes of a contiguous tensor, `offset` bytes into the output of that name."""
        dense = tensor.contiguous()
        if dense.nbytes:
            data = (ctypes.c_char * dense.nbytes).from_address(dense.data_ptr())
            self._put(self._start + self._offsets[name] + offset, memoryview(data).cast("B"))

    def _put(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written

    def finish(self) -> None:
        """On the disk, then under its name."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._new.replace(self.path)

    def abandon(self) -> None:
        """Takes the unfinished file away."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._new.unlink()


class Workplace:
    """DST.partial: the journal of what is done, and the step that makes it DST.

    Raises CheckpointError where DST is there already, cannot be made, or another run is at work on it.
    """

    def __init__(self, target: Path, identity: dict[str, Any]) -> None:
        _check_target(target)
        self.target, self.folder = target, target.with_name(f"{target.name}.partial")
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise CheckpointError(str(self.folder), "no folder", "a name that is free", "remove it")
        self.folder.mkdir(exist_ok=True)
        self._lock = _locked(self.folder / _LOCK)
        self.done: dict[str, dict[str, Any]] = {}
        self._identity = json.loads(json.dumps(identity))
        self._read_journal()

    def _read_journal(self) -> None:
        path = self.folder / JOURNAL
        if not path.exists():
            return
        try:
            journal = json.loads(path.read_bytes())
            identity, done = journal["identity"], dict(journal["done"])
            sizes = {name: int(record["bytes"]) for name, record in done.items()}
        except (OSError, ValueError, KeyError, TypeError):
            identity, done, sizes = None, {}, {}
        if identity != self._identity:
            given = "the unfinished output of another source, format or version"
            raise CheckpointError(
                str(self.folder), given, "a run that goes on", "delete that folder, or name another"
            )
        for name, record in done.items():
            # Under its last name where the run was interrupted at the very end.
            there = [each for each in (self.folder / name, self.path(name)) if each.is_file()]
            if there and there[0].stat().st_size == sizes[name]:
                self.done[name] = record

    def path(self, name: str) -> Path:
        """Where a shard lies until all are there."""
        return self.folder / f"{name}.part"

    def record(self, name: str, record: dict[str, Any]) -> None:
        """A shard is whole; the journal says so from now on."""
        self.done[name] = record
        _write_whole(self.folder / JOURNAL, {"identity": self._identity, "done": self.done})

    def publish(self, weight_map: dict[str, str], config: dict[str, Any], source: Path) -> None:
        """Index, config and the other files of the source, then the folder under its name: at once or not at all."""
        for path in sorted(source.iterdir()):
            if _is_carried(path):
                shutil.copyfile(path, self.folder / path.name)
        total = sum(record["data_bytes"] for record in self.done.values())
        _write_whole(self.folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_whole(self.folder / "config.json", config)
        for name in self.done:
            if self.path(name).exists():
                self.path(name).rename(self.folder / name)
        _sync(self.folder)
        self.folder.rename(self.target)
        for name in (JOURNAL, _LOCK):
            (self.target / name).unlink()
        _sync(self.target.parent)

    def close(self) -> None:
        """Another run may work here."""
        self._lock.close()


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part", ".new")


def _is_carried(path: Path) -> bool:
    """Whether a file of the source goes with the output: tokenizer, generation config, licence, code; no weights."""
    is_ours = path.name in ("config.json", JOURNAL, _LOCK) or path.name.endswith(".index.json")
    return path.is_file() and not path.name.startswith(".") and not is_ours and path.suffix not in _WEIGHTS


def _check_target(target: Path) -> None:
    allowed = "a folder that is not there yet"
    if target.is_symlink():
        raise CheckpointError(str(target), "a symbolic link", allowed, "name the folder itself")
    if target.exists():
        # The last step renames onto an empty folder; "." has no name, and a mount point keeps its own.
        can_be_replaced = target.is_dir() and target.name and not target.is_mount()
        if not can_be_replaced or any(target.iterdir()):
            raise CheckpointError(str(target), "it exists", allowed, "name another, or delete it")
    if not target.parent.is_dir():
        raise CheckpointError(str(target.parent), "no folder", "a folder that exists", "create it")


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises CheckpointError where the disk below `folder` has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        given = f"{free:,} bytes free"
        raise CheckpointError(str(folder), given, f"{num_bytes:,} bytes for the output", _GO_ON)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says of a file that is written into CheckpointError."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        allowed, advice = (
            ("a disk that takes it", _GO_ON) if is_full else ("files that can be written", _ELSEWHERE)
        )
        given = str(error.strerror)
        raise CheckpointError(str(error.filename or path), given, allowed, advice) from error


def _locked(path: Path) -> Any:
    import fcntl

    file = open(path, "w")  # noqa: SIM115  held until the run ends; the system lets go of it when it is killed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        advice = "wait for it, or name another folder"
        raise CheckpointError(str(path.parent), "another run is at work on it", "one run", advice) from error
    return file


def _write_whole(path: Path, value: dict[str, Any]) -> None:
    new = path.with_suffix(".tmp")
    with open(new, "w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
