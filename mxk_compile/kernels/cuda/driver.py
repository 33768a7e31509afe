"""What of CUDA's driver the launches need: modules, attributes, and cuLaunchKernelEx on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError

_SUCCESS, _ADVICE = "a call that succeeds", "see the driver's documentation"


def ask(result: tuple[Any, ...]) -> Any:
    """The values of a driver call; raises KernelError with the driver's name for what went wrong."""
    status, *values = result
    if status.value != 0:
        raise KernelError("CUDA driver", status.name, _SUCCESS, _ADVICE)
    return values[0] if len(values) == 1 else values


class _Launch:
    """What one launch at a time fills in: its configuration and its argument, where the driver reads them."""

    __slots__ = ("argument", "config", "parameters", "where")

    def __init__(self, config: Any, handle: int, size: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        self.argument = memoryview(buffer).cast("B")
        self.config = config
        self.where: Any = None  # blocks and stream that stand in `config`
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.parameters = (ctypes.c_void_p(config.getPtr()), ctypes.c_void_p(handle), pointers, None)


class Kernel:
    """A kernel of a loaded library, how it is launched, and the layout of its one argument.

    Args:
        handle: of the kernel, valid on every device.
        layout: of the argument, as `struct` describes it.
        changing: parts of it that differ from launch to launch of one argument, by offset in bytes.
        threads, shared_bytes: of a block.
        overlap: whether it may start before the kernel ahead of it has ended (it waits in its own code).
        cooperative: whether all blocks must be resident at once.
    """

    def __init__(
        self,
        handle: Any,
        layout: struct.Struct,
        changing: tuple[tuple[int, struct.Struct], ...],
        threads: int,
        shared_bytes: int = 0,
        *,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.handle, self.layout, self.changing = handle, layout, changing
        self.threads, self.shared_bytes = threads, shared_bytes
        self.overlap, self.cooperative = overlap, cooperative
        self._free: list[_Launch] = []  # as many as threads that launch it at once
        self._ready: set[int] = set()

    def _new_launch(self) -> _Launch:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = self.threads, self.shared_bytes
        attributes = []
        for wanted, name, field in (
            (self.overlap, "PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"),
            (self.cooperative, "COOPERATIVE", "cooperative"),
        ):
            if wanted:
                attribute = driver.CUlaunchAttribute()
                attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
                setattr(attribute.value, field, 1)
                attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return _Launch(config, int(self.handle), self.layout.size)

    def _allow_shared(self, device: int) -> None:
        """Raises the limit of dynamic shared memory on a device, once."""
        from cuda.bindings import driver

        if self.shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ask(driver.cuKernelSetAttribute(attribute, self.shared_bytes, self.handle, device))
        self._ready.add(device)

    def bind(self, device: int, blocks: int, argument: bytes) -> Callable[..., None]:
        """`launch` with all but the stream and the values of the one changing part settled: a third of its time.

        The result is called with the stream, then the values; the device is to be current.
        """
        ((offset, part),) = self.changing
        head, tail = argument[:offset], argument[offset + part.size :]
        fields = struct.Struct(f"={len(head)}s{part.format.removeprefix('=')}{len(tail)}s")
        if device not in self._ready:
            self._allow_shared(device)
        free: list[tuple[Callable[..., None], Callable[[], int], _Launch]] = []

        def new() -> tuple[Callable[..., None], Callable[[], int], _Launch]:
            launch = self._new_launch()
            call = functools.partial(_driver().cuLaunchKernelEx, *launch.parameters)
            return functools.partial(fields.pack_into, launch.argument, 0, head), call, launch

        def run(stream: int, *values: int) -> None:
            try:
                ready = free.pop()
            except IndexError:
                ready = new()
            pack, call, launch = ready
            pack(*values, tail)
            if launch.where != stream:
                launch.config.gridDimX, launch.config.hStream, launch.where = blocks, stream, stream
            status = call()
            if status != 0:
                raise KernelError("CUDA driver", _name_of(status), _SUCCESS, _ADVICE)
            free.append(ready)

        return run

    def launch(
        self, device: int, stream: int, blocks: int, argument: bytes, *changes: tuple[int, ...]
    ) -> None:
        """Puts one launch on `stream` of the current device; `changes` go into the argument's changing parts."""
        if device not in self._ready:
            self._allow_shared(device)
        try:
            launch = self._free.pop()
        except IndexError:
            launch = self._new_launch()
        launch.argument[:] = argument
        for (offset, part), values in zip(self.changing, changes, strict=True):
            part.pack_into(launch.argument, offset, *values)
        if launch.where != (blocks, stream):
            launch.config.gridDimX, launch.config.hStream = launch.where = (blocks, stream)
        status = _driver().cuLaunchKernelEx(*launch.parameters)
        if status != 0:
            raise KernelError("CUDA driver", _name_of(status), _SUCCESS, _ADVICE)
        self._free.append(launch)


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's library, called past cuda-bindings where each microsecond is paid in each call.

    It is called without Python's lock: another thread may launch the same kernel meanwhile.
    """
    return ctypes.CDLL("libcuda.so.1")


def _name_of(status: int) -> str:
    from cuda.bindings import driver

    return str(driver.CUresult(status).name)


class Library:
    """Machine code, loaded for every device of the process."""

    def __init__(self, code: bytes) -> None:
        from cuda.bindings import driver

        self._code = code
        with _while_capturing():
            self._handle = ask(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))

    def kernel(self, name: str) -> Any:
        """Handle of a kernel."""
        from cuda.bindings import driver

        return ask(driver.cuLibraryGetKernel(self._handle, name.encode()))

    def constant(self, name: str) -> int:
        """Value of a 32-bit constant of the module, read on the current device."""
        from cuda.bindings import driver

        value = ctypes.c_int32()
        with _while_capturing():
            address, size = ask(driver.cuLibraryGetGlobal(self._handle, name.encode()))
            assert size == ctypes.sizeof(value)
            ask(driver.cuMemcpyDtoH(ctypes.addressof(value), address, size))
        return value.value


class _while_capturing:
    """Allows loading and reading back, which no captured work depends on, while a stream is being captured."""

    def __enter__(self) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # CUDA is initialised, and its context current
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._mode = ask(driver.cuThreadExchangeStreamCaptureMode(relaxed))

    def __exit__(self, *_: object) -> None:
        from cuda.bindings import driver

        ask(driver.cuThreadExchangeStreamCaptureMode(self._mode))


def persistent(make: Callable[[], Tensor], device: int) -> Tensor:
    """A tensor for later calls, from `make`, which is done when this returns.

    Made in a thread of its own: this one may be allocating from the private memory of a CUDA graph, which must not keep
    anything beyond the graph.
    """
    made: list[Tensor] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                made.append(make())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


@functools.cache
def multiprocessors(device: int) -> int:
    """Number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
