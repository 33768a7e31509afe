"""The kernels as calls on named tensors, and as `custom_op::mxk_*` on the CPU: what parity runs and tests stand on.

Shapes and argument order come from signatures.py; the sources run are kernels/*.c (emulate.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import emulate
from mxk_compile.kernels.tpc.signatures import DTYPES, KERNELS, Kernel, padded


@dataclasses.dataclass(frozen=True)
class Build:
    """How kernels are built: preprocessor flags, threads that share a call's invocations, folder of the sources."""

    defines: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    workers: int = 1
    folder: pathlib.Path = emulate.KERNELS


@dataclasses.dataclass
class Recorder:
    """Names and counters of the kernel calls that were made while it was the current one."""

    build: Build
    calls: list[tuple[str, emulate.Counters]] = dataclasses.field(default_factory=list)


_current = Recorder(Build())


def call(
    kernel: Kernel, arguments: Mapping[str, Any], build: Build | None = None, *, seed: int = 0
) -> tuple[Tensor, emulate.Counters]:
    """Runs one kernel on its tensors and scalars by name.

    Returns its output (elements that it promises nothing about are NaN) and what was counted. Raises KernelError for
    arguments that do not fit the signature, and as `emulate.EmulatedKernel.run`.
    """
    build = build or Build()
    inputs = [arguments[tensor.name] for tensor in kernel.inputs]
    shape = output_shape(kernel, inputs)
    output = emulate.Output(shape, DTYPES[kernel.output.dtype])
    scalars = [
        float(arguments[scalar.name]) if scalar.kind == "float" else int(arguments[scalar.name])
        for scalar in kernel.scalars
    ]
    library = emulate.build(build.folder / f"{kernel.name}.c", build.defines, workers=build.workers)
    (result,), counters = library.run(inputs, [output], scalars, seed=seed)
    return result, counters


def output_shape(kernel: Kernel, inputs: list[Tensor]) -> tuple[int, ...]:
    """Shape of the output, from the symbols of the signature. Raises KernelError where the inputs contradict it."""
    sizes: dict[str, int] = {}
    for given, expected in zip(inputs, kernel.inputs, strict=True):
        fits = given.dim() == len(expected.shape) and given.dtype == DTYPES[expected.dtype]
        for dimension, length in zip(expected.shape, given.shape, strict=False):
            value = length * dimension.divide // dimension.times
            fits = fits and sizes.setdefault(dimension.symbol, value) == value
        if not fits:
            raise KernelError(
                f"emulated {kernel.name}",
                f"{expected.name} is {given.dtype} {list(given.shape)}",
                f"{expected.dtype} with the sizes of the other tensors",
                "see kernels/tpc/signatures.py",
            )
    if "T" in sizes:
        sizes.setdefault("R", sizes["T"] * sizes["k"])
    for symbol, size in (("KP", "K"), ("IP", "I")):
        if size in sizes:
            sizes.setdefault(symbol, padded(sizes[size]))
    return tuple(dimension.size(sizes) for dimension in kernel.output.shape)


@contextlib.contextmanager
def recorded(build: Build | None = None) -> Iterator[Recorder]:
    """Ops called inside are built by `build`, and their counters are kept."""
    global _current
    before, _current = _current, Recorder(build or Build())
    try:
        yield _current
    finally:
        _current = before


def register() -> torch.library.Library:
    """Defines `custom_op::mxk_*` for CPU tensors, run by the emulator. Keep the result: it holds the definitions.

    Raises RuntimeError where somebody else has defined them.
    """
    library = torch.library.Library("custom_op", "FRAGMENT")
    for kernel in KERNELS.values():
        library.define(kernel.schema)
        library.impl(kernel.name, _implementation(kernel), "CPU")
    return library


def _implementation(kernel: Kernel) -> Any:
    def run(*arguments: Any) -> Tensor:
        recorder = _current
        result, counters = call(kernel, dict(zip(kernel.arguments, arguments, strict=True)), recorder.build)
        recorder.calls.append((kernel.name, counters))
        return result

    return run
