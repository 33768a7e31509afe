"""What the host code asks of cuda.bindings and of libcuda, answered by the emulator: modules `nvrtc` and `driver`.

Machine code is the path of a library; a kernel's handle is an index; a launch runs to its end before it returns.
"""

from __future__ import annotations

import ctypes
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mxk_compile.kernels.cuda.devices import HOPPER

from . import build
from .translate import TranslationError

MAP = struct.Struct("=8sQ5Q4Q5H3B27x")  # struct TensorMap of device/tensor_map.h
_KERNEL = struct.Struct("=Q3I4x")  # struct Kernel of device/runtime.h
_OK, _FAILED = SimpleNamespace(value=0, name="SUCCESS"), SimpleNamespace(value=1, name="FAILED")
_ELEMENT_BYTES = {"UINT8": 1, "UINT16": 2, "BFLOAT16": 2, "UINT32": 4, "INT32": 4, "FLOAT32": 4, "UINT64": 8}
_REGISTERS, _MOST_REGISTERS, _SMALL_SHARED = 65536, 248, 48 * 1024
_lock = threading.Lock()


class EmulatorError(Exception):
    """A kernel did what it must not, or nothing of it can run any more."""


def _enumeration(prefix: str, names: str) -> SimpleNamespace:
    return SimpleNamespace(**{f"{prefix}{name}": name for name in names.split()})


class Machine:
    """The device: its size, the order in which threads run, and what was loaded.

    Attributes:
        processors: multiprocessors; as many blocks run at a time, or all of a cooperative launch.
        seed: 0 for the quick order, else of a random one.
        most_shared: bytes of shared memory that a block may take.
        launches: names of kernels, in order.
        compiled: sources, and the macros that they were compiled with.
    """

    def __init__(self, processors: int, seed: int, most_shared: int = HOPPER.shared_bytes) -> None:
        self.processors, self.seed, self.most_shared = processors, seed, most_shared
        self.libraries: list[ctypes.CDLL] = []
        self.kernels: list[tuple[str, int]] = []  # name and address of struct Kernel
        self.shared_limits: dict[int, int] = {}
        self.configs: dict[int, Any] = {}
        self.launches: list[str] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self._run = build.runtime().emu_launch
        self._run.restype = ctypes.c_char_p
        self._run.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_uint32,) * 6,
            ctypes.c_uint64,
        )

    @staticmethod
    def argument_bytes(kernel: int) -> int:
        """Size of a kernel's argument, by address of its struct Kernel."""
        size: int = _KERNEL.unpack(ctypes.string_at(kernel, _KERNEL.size))[1]
        return size

    def cuLaunchKernelEx(self, config: Any, handle: Any, parameters: Any, extra: None) -> int:
        """As the driver's."""
        settings = self.configs[config.value]
        limit = self.shared_limits.get(handle.value, _SMALL_SHARED)
        name, kernel = self.kernels[handle.value - 1]
        if settings.sharedMemBytes > limit:
            raise EmulatorError(f"{name}: {settings.sharedMemBytes} bytes of shared memory; allowed: {limit}")
        attributes = {attribute.id for attribute in settings.attrs}
        self.launch(
            *(name, kernel, parameters[0], settings.gridDimX, settings.blockDimX, settings.sharedMemBytes),
            cooperative="COOPERATIVE" in attributes,
            overlap="PROGRAMMATIC_STREAM_SERIALIZATION" in attributes,
        )
        return 0

    def launch(
        self, name: str, kernel: int, argument: Any, blocks: int, threads: int, shared_bytes: int,
        *, cooperative: bool = False, overlap: bool = False,
    ) -> None:  # fmt: skip
        """Runs a kernel to its end, by address of its struct Kernel (device/runtime.h) and of its argument.

        Raises:
            EmulatorError: no thread can run any more, or one did what it must not.
        """
        _, _, bound, blocks_a_processor = _KERNEL.unpack(ctypes.string_at(kernel, _KERNEL.size))
        resident = self.processors * max(1, blocks_a_processor)
        registers = min(_MOST_REGISTERS, _REGISTERS // (threads * max(1, blocks_a_processor)) // 8 * 8)
        if bound and threads > bound:
            raise EmulatorError(f"{name}: {threads} threads; allowed by __launch_bounds__: {bound}")
        if cooperative and blocks > resident:
            raise EmulatorError(f"{name}: {blocks} blocks that must be resident; allowed: {resident}")
        with _lock:
            self.launches.append(name)
            error = self._run(
                kernel, argument, blocks, threads, shared_bytes, resident, registers, overlap, self.seed
            )
        if error is not None:
            text = re.sub(r"<([^<>]+)\+(0x\w+)>", lambda m: build.inlined_at(m[1], m[2]), error.decode())
            raise EmulatorError(f"{name}: {text}")

    def modules(self) -> dict[str, ModuleType]:
        """Stand-ins for the packages that the host code imports, by name."""
        cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        nvrtc, driver = ModuleType("cuda.bindings.nvrtc"), ModuleType("cuda.bindings.driver")
        for function in (*_nvrtc(self.compiled), *self._driver()):
            setattr(nvrtc if function.__name__.startswith("nvrtc") else driver, function.__name__, function)
        for name, prefix, names in (
            ("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_", "RELAXED GLOBAL"),
            ("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_", "COOPERATIVE PROGRAMMATIC_STREAM_SERIALIZATION"),
            ("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_", "MAX_DYNAMIC_SHARED_SIZE_BYTES"),
            ("CUtensorMapDataType", "CU_TENSOR_MAP_DATA_TYPE_", " ".join(_ELEMENT_BYTES)),
            ("CUtensorMapInterleave", "CU_TENSOR_MAP_INTERLEAVE_", "NONE"),
            ("CUtensorMapSwizzle", "CU_TENSOR_MAP_SWIZZLE_", "NONE 32B 64B 128B"),
            ("CUtensorMapL2promotion", "CU_TENSOR_MAP_L2_PROMOTION_", "NONE L2_64B L2_128B L2_256B"),
            ("CUtensorMapFloatOOBfill", "CU_TENSOR_MAP_FLOAT_OOB_FILL_", "NONE"),
        ):
            setattr(driver, name, _enumeration(prefix, names))
        driver.CUresult = lambda status: SimpleNamespace(name=f"CUDA_ERROR_{status}")  # type: ignore[attr-defined]
        driver.cuuint64_t = driver.cuuint32_t = int  # type: ignore[attr-defined]
        cuda.bindings, bindings.driver, bindings.nvrtc = bindings, driver, nvrtc  # type: ignore[attr-defined]
        return {"cuda": cuda, "cuda.bindings": bindings, nvrtc.__name__: nvrtc, driver.__name__: driver}

    def _driver(self) -> list[Callable[..., Any]]:
        def CUlaunchConfig() -> Any:
            config = SimpleNamespace(attrs=[], numAttrs=0, hStream=0)
            config.getPtr = lambda: id(config)
            self.configs[id(config)] = config  # which keeps it
            return config

        def CUlaunchAttribute() -> Any:
            return SimpleNamespace(id=None, value=SimpleNamespace())

        def cuLibraryLoadData(code: bytes, *_: Any) -> Any:
            self.libraries.append(ctypes.CDLL(code.decode()))
            return _OK, len(self.libraries) - 1

        def cuLibraryGetKernel(library: int, name: bytes) -> Any:
            kernel = ctypes.c_char.in_dll(self.libraries[library], f"emulated_{name.decode()}")
            self.kernels.append((name.decode(), ctypes.addressof(kernel)))
            return _OK, len(self.kernels)

        def cuLibraryGetGlobal(library: int, name: bytes) -> Any:
            return _OK, ctypes.addressof(ctypes.c_int32.in_dll(self.libraries[library], name.decode())), 4

        def cuMemcpyDtoH(target: int, source: int, size: int) -> Any:
            ctypes.memmove(target, source, size)
            return (_OK,)

        def cuKernelSetAttribute(attribute: str, value: int, kernel: int, device: int) -> Any:
            self.shared_limits[kernel] = value
            return (_OK if value <= self.most_shared else _FAILED,)

        def cuThreadExchangeStreamCaptureMode(mode: str) -> Any:
            return _OK, mode

        def cuTensorMapEncodeTiled(*arguments: Any) -> Any:
            encoded = ctypes.create_string_buffer(_tensor_map(*arguments), MAP.size)
            return _OK, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded))

        return [value for name, value in locals().items() if name.startswith(("cu", "CU"))]


def _tensor_map(
    kind: str, rank: int, address: int, sizes: list[int], strides: list[int], box: list[int], steps: list[int],
    interleave: str, swizzle: str, promotion: str, fill: str,
) -> bytes:  # fmt: skip
    """Bytes of a map; raises EmulatorError where the driver refuses one (CUDA driver API, cuTensorMapEncodeTiled)."""
    element = _ELEMENT_BYTES[kind]
    inner = box[0] * element
    bits = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}[swizzle]
    refused = {
        "address": address % 16 != 0,
        "sizes": not all(0 < size <= 1 << 32 for size in sizes),
        "strides": any(stride % 16 or not 0 < stride < 1 << 40 for stride in strides),
        "box": not all(0 < size <= 256 for size in box) or inner % 16 != 0,
        "swizzle": bits > 0 and inner > 16 << bits,
        "element strides": any(step != 1 for step in steps),
    }
    if any(refused.values()):
        names = ", ".join(name for name, wrong in refused.items() if wrong)
        raise EmulatorError(f"tensor map: {names}: {address=} {sizes=} {strides=} {box=} {swizzle=}")
    pad = [0] * (5 - rank)
    return MAP.pack(
        *(b"EMULATED", address, *sizes, *pad, *strides, *pad, *box, *pad, rank, element, bits),
    )


def _nvrtc(compiled: list[tuple[str, tuple[str, ...]]]) -> list[Callable[..., Any]]:
    def nvrtcVersion() -> Any:
        return _OK, 0, 0

    def nvrtcCreateProgram(source: bytes, name: bytes, count: int, texts: Any, names: Any) -> Any:
        files = {name.decode(): source, **{n.decode(): text for n, text in zip(names, texts, strict=True)}}
        return _OK, SimpleNamespace(name=name.decode(), files=files, log="", code=b"")

    def nvrtcCompileProgram(program: Any, count: int, options: list[bytes]) -> Any:
        defines = tuple(option.decode() for option in options if option.startswith(b"-D"))
        compiled.append((program.name, defines))
        with tempfile.TemporaryDirectory(dir=build.folder()) as folder:
            for name, text in program.files.items():
                (Path(folder) / name).write_bytes(text)
            try:
                program.code = str(build.compile_source(Path(folder) / program.name, defines)).encode()
            except TranslationError as error:
                program.log = f"error: {error}"
                return (_FAILED,)
        return (_OK,)

    def nvrtcGetProgramLogSize(program: Any) -> Any:
        return _OK, len(program.log.encode())

    def nvrtcGetProgramLog(program: Any, log: bytes) -> Any:
        ctypes.memmove(log, program.log.encode(), len(log))
        return (_OK,)

    def nvrtcGetCUBINSize(program: Any) -> Any:
        return _OK, len(program.code)

    def nvrtcGetCUBIN(program: Any, code: bytes) -> Any:
        ctypes.memmove(code, program.code, len(code))
        return (_OK,)

    def nvrtcDestroyProgram(program: Any) -> Any:
        return (_OK,)

    return [value for value in locals().values() if callable(value)]
