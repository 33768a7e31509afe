"""Runs TPC-C kernels on the CPU: builds a kernel with the emulator header, calls it on torch tensors, counts.

Emulated means: the kernel's own, unmodified source, executed by `emulator/tpc_emulator.h` (read its conventions first).
Nothing here says how long a device takes; `time_model.py` does, and calls that modelled.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.signatures import MAX_NODE_TENSORS, NUM_TPC

EMULATOR = pathlib.Path(__file__).parent / "emulator"
KERNELS = pathlib.Path(__file__).parent / "kernels"
REGIONS = ("prologue", "chunk", "epilogue")
SLOTS = ("load", "spu", "vpu", "store")
MAX_SCALARS = 32  # of a TPC node (User Guide)
SMALL_VLM_BYTES, VLM_BYTES, SLM_BYTES = 16 * 1024, 80 * 1024, 16 * 1024  # small: a kernel that uses LOOKUP

_FLAGS = (
    *("-std=gnu++17", "-O2", "-march=native", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"),
    *("-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fsanitize=bounds", "-fno-sanitize-recover", "-w"),
)
_MAX_RANK = 5
_UNWRITTEN = 255  # owner of an output element that no invocation wrote


class _CTensor(ctypes.Structure):  # Tensor of emulator/counters.h
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("element_bytes", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int64 * _MAX_RANK),
        ("stride", ctypes.c_int64 * _MAX_RANK),
    )


def _operations() -> list[tuple[str, str, int]]:
    """Name, slot and slot cycles of each operation, in the header's order."""
    text = (EMULATOR / "counters.h").read_text()
    return [(name, slot, int(cycles)) for name, slot, cycles in re.findall(r"X\((\w+), (\w+), (\d)\)", text)]


_TOTALS = (
    *(
        "chunk_rows",
        "bytes_loaded",
        "bytes_stored",
        "padded_lanes",
        "culled_lanes",
        "repeated_partial_stores",
    ),
    *("mac_pairs", "mac_distance", "vlm_bytes", "slm_bytes", "lut_entries"),
)


@dataclasses.dataclass(frozen=True)
class Counters:
    """What one call did, summed over its invocations.

    Attributes:
        ops: operations by region and name, e.g. ops["chunk"]["lookup_1c"].
        chunk_rows: 512 weights of one row times one activation row, as the kernel marked them.
        bytes_loaded, bytes_stored: of tensors, inside their bounds.
        padded_lanes, culled_lanes: lanes of loads and stores beyond dim 0.
        repeated_partial_stores: partial stores with size and offset of the store before: the device drops them.
        mac_distance: least VPU ops from a MAC of the chunk region to one on its result, in source order, None without
            such pairs; the latency is 4 cycles.
        vlm_bytes, slm_bytes: local memory that the kernel declares, vectors and the rest.
        lut_entries: entries of the tables that were looked up.
        unwritten: elements that no invocation wrote, one number an output.
    """

    ops: Mapping[str, Mapping[str, int]]
    chunk_rows: int
    bytes_loaded: int
    bytes_stored: int
    padded_lanes: int
    culled_lanes: int
    repeated_partial_stores: int
    mac_distance: int | None
    vlm_bytes: int
    slm_bytes: int
    lut_entries: int
    unwritten: tuple[int, ...]

    def slot_ops(self, slot: str, region: str | None = None) -> int:
        """Operations of "load", "spu", "vpu" or "store", in one region or all."""
        return self._sum(slot, region, cycles=False)

    def slot_cycles(self, slot: str, region: str | None = None) -> int:
        """Slot cycles: as operations, but a lookup takes two."""
        return self._sum(slot, region, cycles=True)

    def per_chunk_row(self, slot: str = "vpu") -> float:
        """Slot cycles of the chunk loop for each chunk-row."""
        return self.slot_cycles(slot, "chunk") / max(self.chunk_rows, 1)

    @property
    def vlm_limit(self) -> int:
        """Bytes of vector local memory that the device grants this kernel."""
        return SMALL_VLM_BYTES if self.lut_entries else VLM_BYTES

    def _sum(self, slot: str, region: str | None, cycles: bool) -> int:
        regions = REGIONS if region is None else (region,)
        return sum(
            self.ops[name].get(operation, 0) * (weight if cycles else 1)
            for name in regions
            for operation, of, weight in _operations()
            if of == slot
        )


@dataclasses.dataclass(frozen=True)
class Output:
    """An output tensor: torch shape, slowest dimension first, and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_locks: dict[pathlib.Path, threading.Lock] = {}
"""Of each built library, held while it runs: its kernel's local memory and counters are static."""


class EmulatedKernel:
    """A built kernel. `run` may be called any number of times, from any thread: calls of one build take turns."""

    def __init__(self, name: str, libraries: Sequence[pathlib.Path]) -> None:
        self.name = name
        self._lock = _locks.setdefault(libraries[0], threading.Lock())
        self._libraries = [ctypes.CDLL(str(path)) for path in libraries]

    def run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Output],
        scalars: Sequence[int | float] = (),
        auxiliary: Sequence[Tensor] = (),
        *,
        invocations: int = NUM_TPC,
        seed: int = 0,
    ) -> tuple[list[Tensor], Counters]:
        """Runs all invocations in an order shuffled by `seed`; outputs start as bytes of 0xff (NaN).

        inputs, auxiliary: contiguous CPU tensors of 1, 2 or 4 bytes an element. scalars: ints, floats; one word each.
        Returns the outputs and what was counted. Raises KernelError for a call that the kernel does not take and
        for whatever the emulator refuses, with kernel, invocation and coordinate.
        """
        results = [torch.empty(output.shape, dtype=output.dtype) for output in outputs]
        owners = [torch.full((max(result.numel(), 1),), _UNWRITTEN, dtype=torch.uint8) for result in results]
        for result in results:
            result.view(torch.uint8).fill_(0xFF) if result.numel() else None
        tensors = [
            *(_describe(self.name, tensor, None) for tensor in inputs),
            *(_describe(self.name, result, owner) for result, owner in zip(results, owners, strict=True)),
            *(_describe(self.name, tensor, None) for tensor in auxiliary),
        ]
        self._check_arguments(tensors, scalars)
        words = (ctypes.c_int32 * (len(tensors) + len(scalars)))(*range(len(tensors)), *map(_word, scalars))
        descriptors = (_CTensor * len(tensors))(*tensors)
        order = invocation_order(invocations, seed)
        num_workers = min(len(self._libraries), invocations)

        def work(index: int) -> list[int]:
            part = order[index::num_workers]
            totals = (ctypes.c_int64 * _num_totals())()
            error = ctypes.create_string_buffer(512)
            arguments = descriptors, len(tensors), words, (ctypes.c_int32 * len(part))(*part), len(part)
            if self._libraries[index].mxk_run(*arguments, totals, error):
                raise KernelError(
                    "emulated TPC kernel", error.value.decode(), "what the device does", "correct the kernel"
                )
            return list(totals)

        with self._lock:
            if num_workers == 1:
                totals = [work(0)]
            else:
                with ThreadPoolExecutor(num_workers) as pool:
                    totals = list(pool.map(work, range(num_workers)))
        unwritten = tuple(
            int((owner[: result.numel()] == _UNWRITTEN).sum())
            for owner, result in zip(owners, results, strict=True)
        )
        return results, _counters(totals, unwritten)

    def _check_arguments(self, tensors: Sequence[_CTensor], scalars: Sequence[int | float]) -> None:
        given, takes = len(tensors) + len(scalars), self._libraries[0].mxk_arity()
        if len(tensors) > MAX_NODE_TENSORS or len(scalars) > MAX_SCALARS or given != takes:
            raise KernelError(
                f"emulated TPC kernel {self.name}",
                f"{len(tensors)} tensors and {len(scalars)} scalars",
                f"{takes} parameters, at most {MAX_NODE_TENSORS} tensors and {MAX_SCALARS} scalars",
                "pass what its main() lists",
            )


def invocation_order(invocations: int, seed: int) -> list[int]:
    """The order in which a run of one worker calls its invocations."""
    order: list[int] = torch.randperm(invocations, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _describe(kernel: str, tensor: Tensor, owner: Tensor | None) -> _CTensor:
    if tensor.dim() > _MAX_RANK or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise KernelError(
            f"emulated TPC kernel {kernel}",
            f"tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}",
            "contiguous CPU tensors of at most 5 dimensions",
            "pass it contiguous",
        )
    sizes = [*reversed(tensor.shape), *[1] * (_MAX_RANK - tensor.dim())]
    strides = [1]
    for size in sizes[:-1]:
        strides.append(strides[-1] * size)
    return _CTensor(
        base=tensor.data_ptr(),
        owner=None if owner is None else owner.data_ptr(),
        element_bytes=tensor.element_size(),
        rank=max(tensor.dim(), 1),
        size=(ctypes.c_int64 * _MAX_RANK)(*sizes),
        stride=(ctypes.c_int64 * _MAX_RANK)(*strides),
    )


def _word(scalar: int | float) -> int:
    raw = ctypes.c_float(scalar) if isinstance(scalar, float) else ctypes.c_int32(scalar)
    return int.from_bytes(bytes(raw), "little", signed=True)


@functools.cache
def _num_totals() -> int:
    return len(_TOTALS) + len(REGIONS) * len(_operations())


def _counters(parts: Sequence[Sequence[int]], unwritten: tuple[int, ...]) -> Counters:
    names = [name for name, _, _ in _operations()]
    values = {name: sum(part[index] for part in parts) for index, name in enumerate(_TOTALS)}
    for name in ("vlm_bytes", "slm_bytes", "lut_entries"):  # of the kernel, not of an invocation
        values[name] = max(part[_TOTALS.index(name)] for part in parts)
    pairs, distance = _TOTALS.index("mac_pairs"), _TOTALS.index("mac_distance")
    distances = [part[distance] for part in parts if part[pairs]]
    del values["mac_pairs"], values["mac_distance"]
    ops = {}
    for index, region in enumerate(REGIONS):
        start = len(_TOTALS) + index * len(names)
        sums = [sum(part[start + offset] for part in parts) for offset in range(len(names))]
        ops[region] = {name: n for name, n in zip(names, sums, strict=True) if n}
    return Counters(ops=ops, mac_distance=min(distances, default=None), unwritten=unwritten, **values)


def compiler() -> str:
    """Path of g++. Raises KernelError where there is none."""
    path = shutil.which("g++")
    if path is None:
        raise KernelError(
            "TPC emulator", "no g++ on PATH", "g++ 12 or newer", "install it, or do without emulation"
        )
    return path


def cache_folder() -> pathlib.Path:
    """Where built kernels are kept, by hash of source, flags and compiler: a folder of this user's, made if need be.

    Raises KernelError if somebody else has made it: libraries of theirs would run here.
    """
    folder = pathlib.Path(tempfile.gettempdir()) / f"mxk-tpc-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # a link is another user's to turn, whoever owns what is behind it
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise KernelError(
            "TPC emulator", f"{folder} is not this user's own", "mode 0700", "remove it, or set TMPDIR"
        )
    return folder


def _sources(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h", ".cpp"))


def build(
    source: pathlib.Path | str, defines: Mapping[str, str | int] | None = None, *, workers: int = 1
) -> EmulatedKernel:
    """Builds a kernel, or takes the one built before from equal sources.

    source: a .c file, or the name of one in kernels/. defines: preprocessor flags. workers: threads that `run` may
    use. Raises KernelError where g++ is missing or refuses the source (its first error line is in the text).
    """
    path = KERNELS / f"{source}.c" if isinstance(source, str) else source
    flags = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
    digest = hashlib.sha256(repr((str(path.resolve()), flags, _FLAGS, compiler(), workers)).encode())
    for file in (*_sources(EMULATOR), *_sources(path.parent)):
        digest.update(file.name.encode() + file.read_bytes())
    folder = cache_folder()
    key = f"{path.stem}-{digest.hexdigest()[:16]}"
    libraries = [folder / f"{key}-{index}.so" for index in range(workers)]
    if not all(library.is_file() for library in libraries):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = _compile(path, flags, pathlib.Path(work))
            # Equal files under names of their own: each is loaded with its own static state.
            for index, library in enumerate(libraries):
                copy = pathlib.Path(work) / str(index)
                shutil.copy(built, copy)
                copy.replace(library)
    return EmulatedKernel(path.stem, libraries)


def _compile(path: pathlib.Path, flags: Sequence[str], work: pathlib.Path) -> pathlib.Path:
    names = (f'-DMXK_KERNEL_SOURCE="{path.resolve()}"', f'-DMXK_KERNEL_NAME="{path.stem}"')
    command = [compiler(), *_FLAGS, *flags, *names]
    runner = str(EMULATOR / "runner.cpp")
    # The kernel alone: its `__local__` variables do not depend on the emulator.
    only = (compiler(), "-E", "-P", "-x", "c++", *flags, str(path))
    preprocessed = _run(path, only)
    variables = "".join(f"MXK_LOCAL({name})" for name in local_variables(preprocessed))
    compiled, library = work / "kernel.o", work / "kernel.so"
    _run(path, [*command, f"-DMXK_LOCALS={variables}", "-c", "-o", str(compiled), runner])
    # Linked without -fsanitize, which would ask for its runtime library: runner.cpp has what is called.
    _run(path, [compiler(), "-shared", "-o", str(library), str(compiled)])
    return library


def local_variables(preprocessed: str) -> list[str]:
    """Names of the `__local__` variables of a preprocessed source."""
    declarations = re.findall(r"\b__local(?:__)?\b([^;]*);", preprocessed)
    names = []
    for declaration in declarations:
        without_extents = re.sub(r"\[[^\]]*\]", "", declaration)
        names += [part.split()[-1] for part in without_extents.split(",")]
    return names


def _run(path: pathlib.Path, command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        given = (lines or done.stderr.splitlines() or ["no output"])[0]
        raise KernelError(f"g++ on {path.name}", given, "TPC-C that the emulator knows", "correct the source")
    return done.stdout
