"""The package's host code on the emulated machine: torch.cuda, allocators and caches while it is in use."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda import build as nvrtc_build
from mxk_compile.kernels.cuda import devices
from mxk_compile.kernels.cuda.devices import DEVICES
from mxk_compile.kernels.cuda.schedule import Schedule
from mxk_compile.kernels.desc import MoEDesc
from mxk_compile.testing import MoECase

from . import build
from .stand_ins import EmulatorError, Machine

_POISON = 0xFF
_ON_CPU = -1  # index of the device of CPU tensors, as Tensor.get_device has it


def _poisoned(tensor: Tensor) -> Tensor:
    if tensor.numel():
        tensor.untyped_storage().fill_(_POISON)
    return tensor


class _OnCpu(TorchFunctionMode):
    """Devices of CUDA are the CPU, and new memory holds poison."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def moved(value: Any) -> Any:
            return (
                "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value
            )

        kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("device") == _ON_CPU:
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        result = function(*map(moved, args), **kwargs)
        if function in (torch.empty, Tensor.new_empty) and result.device.type == "cpu":
            return _poisoned(result)
        return result


def _modules() -> list[Any]:
    names = [module.name for module in pkgutil.iter_modules(cuda.__path__)]
    return [cuda, *(importlib.import_module(f"{cuda.__name__}.{name}") for name in names)]


def _forget() -> None:
    """Empties what the host code keeps of a device: it is another one now."""
    for module in _modules():
        for name, value in vars(module).items():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, dict) and name in ("_built", "_prepared", "_counters", "_seen", "_kept"):
                value.clear()


@contextlib.contextmanager
def use(
    sources: Path | None = None, processors: int = 4, seed: int = 0, capability: tuple[int, int] = (9, 0)
) -> Iterator[Machine]:
    """While it is entered, the package's CUDA host code runs on an emulated device.

    Args:
        sources: folder of the CUDA sources, by default the package's.
        processors: multiprocessors of the device.
        seed: of the order in which threads run and copies arrive; 0 is one order, the quickest.
        capability: of the device: which instruction multiplies, and how much shared memory there is.

    Raises:
        EmulatorError: from launches, where a kernel waits for ever or does what it must not.
        KernelError: from launches, where a source does not compile here.
    """
    machine = Machine(processors, seed, DEVICES[capability].shared_bytes)
    driver = importlib.import_module(f"{cuda.__name__}.driver")

    def maker(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: _poisoned(torch.empty(shape, dtype=dtype))

    nothing = contextlib.nullcontext
    with contextlib.ExitStack() as stack:

        def patch(target: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value, create=True))

        _forget()
        stack.callback(_forget)
        stack.enter_context(mock.patch.dict(sys.modules, machine.modules()))
        for module in _modules():
            patch(
                module,
                **{
                    name: value
                    for name, value in (("maker", maker), ("persistent", lambda make, device: make().clone()))
                    if hasattr(module, name)
                },
            )
        patch(driver, _driver=lambda: machine)
        patch(cuda, unavailable=lambda device=None: None)
        patch(devices, refusal=lambda index=None: None)
        patch(nvrtc_build, _lock=nothing(), read_cached=lambda path: None, _write=lambda path, code: None)
        if sources is not None:
            patch(nvrtc_build, SOURCES=Path(sources))
        patch(
            torch.cuda,
            device=lambda device: nothing(),
            current_stream=lambda: None,
            is_current_stream_capturing=lambda: False,
            get_device_capability=lambda device=None: capability,
            get_device_name=lambda device=None: "emulated",
            get_device_properties=lambda device: SimpleNamespace(multi_processor_count=processors),
        )
        patch(
            torch._C,
            _cuda_getDevice=lambda: _ON_CPU,
            _cuda_getCurrentRawStream=lambda device: 0,
            _cuda_isCurrentStreamCapturing=lambda: False,
        )
        stack.enter_context(_OnCpu())
        yield machine


def prepared(case: MoECase, schedule: str | None = None, lists: bool = False) -> cuda.Prepared:
    """A call of `mxk::moe`, or `mxk::moe.lists`, for the CUDA kernels, which are in `use`.

    Args:
        case: on CPU.
        schedule: as `Schedule` prints; by default the one that is chosen.
        lists: whether each expert's weights are tensors of their own.
    """
    weights = case.lists if lists else case.weights
    desc = MoEDesc.from_call(*case.routing, *weights, **case.attributes)
    reason = cuda.supports(desc)
    assert reason is None, reason
    return cuda.Prepared(
        *(desc, *case.routing, *weights),
        **{name: case.attributes[name] for name in ("alpha", "limit", "experts_min")},
        schedule=None if schedule is None else Schedule.parse(schedule),
    )


def fused(case: MoECase, schedule: str | None = None, lists: bool = False) -> Tensor:
    """Result of a `prepared` call."""
    return prepared(case, schedule, lists)(*case.routing)


def build_ahead(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls that compile, by two threads: what they compile is there for later ones. In `use`."""

    def make(call: Callable[[], object]) -> None:
        with _OnCpu():
            call()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, calls))


def launch(
    source: Path,
    kernel: str,
    argument: bytes,
    *,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
    defines: Sequence[str] = (),
    processors: int = 4,
    seed: int = 0,
    cooperative: bool = False,
) -> None:
    """Runs a kernel of a source, without host code of its own.

    Args:
        source: file, whose includes lie beside it.
        kernel: name; declared extern "C", with one struct as its argument.
        argument: bytes of that struct; addresses are those of CPU tensors.
        defines: as "-DNAME=1".
        blocks, threads, shared_bytes, cooperative: of the launch.
        processors, seed: as in `use`.

    Raises:
        TranslationError: the source does not compile.
        EmulatorError: as in `use`, or the argument has another size.
    """
    machine = Machine(processors, seed)
    library = ctypes.CDLL(str(build.compile_source(source, defines)))
    found = ctypes.addressof(ctypes.c_char.in_dll(library, f"emulated_{kernel}"))
    if machine.argument_bytes(found) != len(argument):
        expected = machine.argument_bytes(found)
        raise EmulatorError(f"{kernel}: an argument of {len(argument)} bytes; allowed: {expected}")
    memory = ctypes.create_string_buffer(argument, len(argument))
    machine.launch(
        *(kernel, found, ctypes.addressof(memory), blocks, threads, shared_bytes), cooperative=cooperative
    )
