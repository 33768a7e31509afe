"""ggml, the library under llama.cpp: the graph that llama.cpp builds for such experts, called through ctypes.

The weights lie where llama.cpp would put them: repacked for the processor where ggml has a form for that, which reads
whole matrices, so a copy. It makes 8-bit integers of the activations, a scale for each 32.

    pip install llama-cpp-python==0.3.36      # compiled here for this processor: half an hour on two cores
    pip install libggml-python==0.20.2.post1  # a wheel, AVX2
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mxk_compile.testing import MoECase

from . import GROUP, Matrix, Unsuitable, matrices, need_local_routes

NAME = "ggml (llama.cpp)"
DEVICE, CAPTURABLE = "cpu", False
# Packages that hold its libraries, and where; the one compiled for this processor first.
_PACKAGES = (("llama-cpp-python", "llama_cpp", "lib"), ("libggml-python", "libggml", "lib64"))
_F32, _Q4_0, _I32, _BF16, _MXFP4 = 0, 2, 26, 30, 39  # enum ggml_type
_CONTEXT_BYTES = 4 << 20  # of descriptions of tensors; a graph of 20 nodes takes less than a tenth

_P, _N, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float, ctypes.c_int


_LOG = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _P)(lambda level, text, data: None)


class _ContextParameters(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


# Result, then arguments, of what is called; each is ggml_NAME in the library.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "init": (_P, _ContextParameters),
    "free": (None, _P),
    "new_tensor_2d": (_P, _P, _INT, _N, _N),
    "new_tensor_3d": (_P, _P, _INT, _N, _N, _N),
    "view_2d": (_P, _P, _P, _N, _N, _SIZE, _SIZE),
    "cast": (_P, _P, _P, _INT),
    "add": (_P, _P, _P, _P),
    "mul": (_P, _P, _P, _P),
    "mul_mat_id": (_P, _P, _P, _P, _P),
    "add_id": (_P, _P, _P, _P, _P),
    "swiglu_split": (_P, _P, _P, _P),
    "swiglu_oai": (_P, _P, _P, _P, _FLOAT, _FLOAT),
    "swiglu_clamp": (_P, _P, _P, _P, _FLOAT),
    "set_input": (None, _P),
    "set_output": (None, _P),
    "new_graph": (_P, _P),
    "build_forward_expand": (None, _P, _P),
    "gallocr_new": (_P, _P),
    "gallocr_alloc_graph": (ctypes.c_bool, _P, _P),
    "gallocr_free": (None, _P),
    "backend_cpu_init": (_P,),
    "backend_cpu_set_n_threads": (None, _P, _INT),
    "backend_cpu_buffer_type": (_P,),
    "backend_get_device": (_P, _P),
    "backend_dev_backend_reg": (_P, _P),
    "backend_reg_get_proc_address": (_P, _P, ctypes.c_char_p),
    "backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "backend_buffer_free": (None, _P),
    "backend_supports_op": (ctypes.c_bool, _P, _P),
    "backend_tensor_set": (None, _P, _P, _SIZE, _SIZE),
    "backend_tensor_get": (None, _P, _P, _SIZE, _SIZE),
    "backend_graph_compute": (_INT, _P, _P),
    "log_set": (None, _P, _P),
    "cpu_has_avx512": (_INT,),
    "cpu_has_avx2": (_INT,),
}


def _found() -> tuple[str, Path] | None:
    for distribution, package, folder in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return distribution, Path(spec.origin).parent / folder
    return None


@functools.cache
def _ggml() -> SimpleNamespace:
    """Its functions; what this build of it lacks is missing."""
    found = _found()
    assert found is not None
    # In this order each finds what it needs loaded.
    names = [f"lib{name}.so" for name in ("ggml-base", "ggml-cpu", "ggml")]
    libraries = [ctypes.CDLL(str(found[1] / name), mode=ctypes.RTLD_GLOBAL) for name in names]
    functions = SimpleNamespace()
    for name, (result, *arguments) in _FUNCTIONS.items():
        for library in libraries:
            function = getattr(library, f"ggml_{name}", None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                setattr(functions, name, function)
                break
    functions.log_set(_LOG, None)
    functions.backend = functions.backend_cpu_init()
    return functions


def version() -> str:
    """Of the package, and what it was compiled for."""
    found, ggml = _found(), _ggml()
    assert found is not None
    isa = "AVX-512" if ggml.cpu_has_avx512() else "AVX2" if ggml.cpu_has_avx2() else "no AVX2"
    return f"{found[0]} {importlib.metadata.version(found[0])}, {isa}"


def missing() -> str | None:
    """None, or why it cannot run."""
    if _found() is None:
        return "neither llama-cpp-python nor libggml-python is installed"
    try:
        _ggml()
    except OSError as error:
        return f"its libraries do not load: {error}"
    return None


def blocks(matrix: Matrix) -> Tensor:
    """A projection as ggml stores it, [E, rows, columns / 32, bytes of a block]; MXFP4, or Q4_0 where scales are bf16.

    A block is its scale, then 16 bytes: value j in the lower and value j + 16 in the upper four bits of byte j.
    """
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1)
    halves = codes.view(*matrix.scale.shape, 2, GROUP // 2)
    values = halves[..., 0, :] | (halves[..., 1, :] << 4)
    scale = matrix.scale if matrix.scale.dtype == torch.uint8 else matrix.scale.half()
    return torch.cat([scale[..., None].view(torch.uint8), values], dim=-1)


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    need_local_routes(case)
    return _Layer(matrices(case), case.attributes)


class _Layer:
    def __init__(self, parts: dict[str, Matrix], attributes: dict[str, Any]) -> None:
        ggml = _ggml()
        activations: dict[str, tuple[str, tuple[float, ...]]] = {
            "silu": ("swiglu_split", ()),
            "swiglu_oai": ("swiglu_oai", (attributes["alpha"], attributes["limit"])),
            "swiglu_clamp": ("swiglu_clamp", (attributes["limit"],)),
        }
        name, self._constants = activations[attributes["activation"]]
        if not hasattr(ggml, name):
            raise Unsuitable("activations that this build of it has")
        self._activate = getattr(ggml, name)
        self._hidden_size = parts["down"].codes.shape[1]
        self._graphs: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._frees: list[tuple[Any, Any]] = []
        weakref.finalize(self, _free, self._frees)
        self._threads = torch.get_num_threads()
        self._weights = self._allocated(parts)
        for part, matrix in parts.items():
            _set(self._weights[part], blocks(matrix))
        context = self._context()
        biases = {part: matrix.bias for part, matrix in parts.items() if matrix.bias is not None}
        self._biases = {
            part: ggml.new_tensor_2d(context, _F32, bias.shape[1], len(bias)) for part, bias in biases.items()
        }
        if biases:
            self._buffer(context, ggml.backend_cpu_buffer_type())
        for part, bias in biases.items():
            _set(self._biases[part], bias)

    def _context(self) -> Any:
        context = _ggml().init(_ContextParameters(_CONTEXT_BYTES, None, True))
        self._frees.append((_ggml().free, context))
        return context

    def _buffer(self, context: Any, kind: Any) -> None:
        self._frees.append(
            (_ggml().backend_buffer_free, _ggml().backend_alloc_ctx_tensors_from_buft(context, kind))
        )

    def _allocated(self, parts: dict[str, Matrix]) -> dict[str, Any]:
        """The weights' tensors, in the first kind of buffer whose multiplication the backend has, as llama.cpp does."""
        ggml = _ggml()
        kind = _MXFP4 if parts["down"].scale.dtype == torch.uint8 else _Q4_0
        ordinary = ggml.backend_cpu_buffer_type()
        for buffer in [*_extra_buffer_types(), ordinary]:
            context, kept = self._context(), len(self._frees)
            tensors = {
                part: ggml.new_tensor_3d(context, kind, matrix.codes.shape[2] * 2, *matrix.codes.shape[1::-1])
                for part, matrix in parts.items()
            }
            self._buffer(context, buffer)
            columns = parts["down"].codes.shape[2] * 2
            scratch = self._context()
            x = ggml.new_tensor_3d(scratch, _F32, columns, 1, 1)
            ids = ggml.new_tensor_2d(scratch, _I32, 1, 1)
            product = ggml.mul_mat_id(scratch, tensors["down"], x, ids)
            if buffer == ordinary or ggml.backend_supports_op(ggml.backend, product):
                return tensors
            _free(self._frees[kept:])
            del self._frees[kept:]
        raise AssertionError("the ordinary buffer is the last")

    def _graph(self, num_tokens: int, top_k: int) -> tuple[Any, ...]:
        """Three inputs, the output and the graph for so many tokens."""
        ggml, context, hidden_size = _ggml(), self._context(), self._hidden_size
        x = ggml.new_tensor_3d(context, _BF16, hidden_size, 1, num_tokens)
        ids = ggml.new_tensor_2d(context, _I32, top_k, num_tokens)
        weights = ggml.new_tensor_3d(context, _F32, 1, top_k, num_tokens)
        for tensor in (x, ids, weights):
            ggml.set_input(tensor)

        def multiply(part: str, values: Any) -> Any:
            product = ggml.mul_mat_id(context, self._weights[part], values, ids)
            bias = self._biases.get(part)
            return product if bias is None else ggml.add_id(context, product, bias, ids)

        values = ggml.cast(context, x, _F32)
        up, gate = multiply("up", values), multiply("gate", values)
        routes = multiply("down", self._activate(context, gate, up, *self._constants))
        routes = ggml.mul(context, routes, weights)
        row = 4 * hidden_size
        total = ggml.view_2d(context, routes, hidden_size, num_tokens, row * top_k, 0)
        for slot in range(1, top_k):
            one = ggml.view_2d(context, routes, hidden_size, num_tokens, row * top_k, row * slot)
            total = ggml.add(context, total, one)
        out = ggml.cast(context, total, _BF16)
        ggml.set_output(out)
        graph = ggml.new_graph(context)
        ggml.build_forward_expand(graph, out)
        allocator = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        self._frees.append((ggml.gallocr_free, allocator))
        if not ggml.gallocr_alloc_graph(allocator, graph):
            raise MemoryError("ggml found no memory for its graph")
        return x, ids, weights, out, graph

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ggml = _ggml()
        shape = ids.shape[0], ids.shape[1]
        if shape not in self._graphs:
            self._graphs[shape] = self._graph(*shape)
        *inputs, out, graph = self._graphs[shape]
        for tensor, given in zip(inputs, (x, ids.int(), weights.float()), strict=True):
            _set(tensor, given)
        ggml.backend_cpu_set_n_threads(ggml.backend, self._threads)
        status = ggml.backend_graph_compute(ggml.backend, graph)
        if status:
            raise RuntimeError(f"ggml computes no such graph: status {status}")
        result = torch.empty_like(x)
        ggml.backend_tensor_get(out, result.data_ptr(), 0, result.numel() * result.element_size())
        return result


def _extra_buffer_types() -> list[Any]:
    ggml = _ggml()
    device = ggml.backend_get_device(ggml.backend)
    register = ggml.backend_dev_backend_reg(device)
    address = ggml.backend_reg_get_proc_address(register, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    array = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device)
    found: list[Any] = []
    while array and array[len(found)]:
        found.append(array[len(found)])
    return found


def _set(tensor: Any, values: Tensor) -> None:
    values = values.contiguous()
    _ggml().backend_tensor_set(tensor, values.data_ptr(), 0, values.numel() * values.element_size())


def _free(frees: list[tuple[Any, Any]]) -> None:
    for free, what in reversed(frees):
        free(what)
