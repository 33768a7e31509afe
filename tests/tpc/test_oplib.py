"""The op libraries that `mxk build-tpc` makes, the recorder in the place of the bridge, each in its own process."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from mxk_compile.kernels.tpc import tables, toolchain
from mxk_compile.kernels.tpc.signatures import VARIANT_LIMITS, variant_kernels
from mxk_compile.kernels.tpc.toolchain import Toolchain

SOURCES = pathlib.Path(toolchain.__file__).parent

PRELUDE = """
import ctypes, json, pathlib, struct, sys, torch
from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import load_ops
from mxk_compile.kernels.tpc.signatures import KERNELS
plugins, muse, gptoss = map(pathlib.Path, sys.argv[1:])
plugin = {
    "lazy": plugins / "libhabana_pytorch_plugin.so", "pt2": plugins / "libhabana_pytorch2_plugin.so",
}
TYPES = {"u8": torch.uint8, "i32": torch.int32, "bf16": torch.bfloat16, "f32": torch.float32}
SIZES = dict(T=3, k=4, R=12, E=5, K=1024, I=512, KP=1024, IP=512)

def tensors(name, device="cpu", **sizes):
    sizes = SIZES | sizes
    sizes["R"] = sizes["T"] * sizes["k"]
    shapes = [[d.size(sizes) for d in t.shape] for t in KERNELS[name].inputs]
    types = [TYPES[t.dtype] for t in KERNELS[name].inputs]
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types)]

def scalars(name):
    return [7 if s.kind == "int" else 1.5 for s in KERNELS[name].scalars]

def on_device(name, *arguments):  # the HPU kernel, on CPU tensors
    op = getattr(torch.ops.custom_op, name).default
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.HPU), *arguments)

def params(kind):
    words = (ctypes.c_uint32 * 8)()
    count = ctypes.CDLL(str(plugin[kind])).mxk_last_params(words, 8)
    return list(words)[:count]

def refused(call):
    try:
        call()
    except (KernelError, ValueError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "accepted"
"""


def process(program: str, image: Any, muse: Any, gptoss: Any) -> Any:
    """The JSON that a program, run after PRELUDE, prints last."""
    plugins = image.site / "habana_frameworks/torch/lib"
    code = PRELUDE + textwrap.dedent(program)
    command = [sys.executable, "-c", code, str(plugins), str(muse.folder), str(gptoss.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pt2(image: Any, muse: Any, gptoss: Any) -> Any:
    """What a process with libmxk_op_pt2.so finds."""
    program = """
        from torch.fx.experimental.proxy_tensor import make_fx
        ctypes.CDLL(str(plugin["pt2"]), ctypes.RTLD_GLOBAL)
        load_ops(muse, "pt2")
        found = {"again": load_ops(muse, "pt2").variant}

        names = sorted(n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "custom_op::" in n)
        found["schemas"] = {n: str(getattr(torch.ops.custom_op, n).default._schema) for n in names}
        fakes = {n: getattr(torch.ops.custom_op, n)(*tensors(n, "meta"), *scalars(n)) for n in names}
        found["fakes"] = {n: [list(y.shape), str(y.dtype), y.device.type] for n, y in fakes.items()}
        found["calls"] = {}
        for n in names:
            y = on_device(n, *tensors(n), *scalars(n))
            found["calls"][n] = [list(y.shape), str(y.dtype), params("pt2")]

        w13, s13 = tensors("mxk_w13x")[2:]
        w2, s2 = tensors("mxk_w2xr")[3:]

        def layer(x, ids, rw):
            a = torch.ops.custom_op.mxk_w13x(x, ids, w13, s13, 0)
            return torch.ops.custom_op.mxk_w2xr(a, ids, rw, w2, s2, 0)

        arguments = tensors("mxk_w13x")[:2] + tensors("mxk_w2xr")[2:3]
        graph = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments).graph
        x = next(node for node in graph.nodes if node.op == "placeholder").meta["val"]
        a, y = (node.meta["val"] for node in graph.nodes if "custom_op" in str(node.target))
        found["symbolic"] = [[str(size) for size in shape] for shape in (x.shape, a.shape, y.shape)]

        op = torch.ops.custom_op.mxk_w13x

        def both(change, **sizes):
            out = []
            for run, device in ((op, "meta"), (lambda *a: on_device("mxk_w13x", *a), "cpu")):
                arguments = tensors("mxk_w13x", device, **sizes)
                change(arguments)
                out.append(refused(lambda: run(*arguments, 0)))
            return out

        def put(index, make):
            def change(arguments):
                arguments[index] = make(arguments[index])
            return change

        keep = lambda arguments: None
        found["refusals"] = {
            "type": both(put(1, lambda t: t.long())),
            "shape": both(put(3, lambda t: t[:, :, :-1])),
            "rank": both(put(0, lambda t: t[None])),
            "many": both(put(0, lambda t: t[None, None, None])),
            "tokens": both(keep, T=17),
            "none": both(keep, T=0),
            "routes": both(keep, T=16, k=9),
            "multiple": both(keep, K=1056, KP=1536),
            "fine": both(keep, T=16, k=8),
        }
        found["strided"] = both(put(2, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)))[1]
        found["scalar"] = refused(lambda: on_device("mxk_w13x", *tensors("mxk_w13x"), -1))
        print(json.dumps(found))
        """
    return process(program, image, muse, gptoss)


def test_pt2_ops_are_registered_at_load_and_know_their_outputs(pt2: Any) -> None:
    assert pt2["again"] == "muse"
    assert pt2["schemas"] == {
        "mxk_w13x": "custom_op::mxk_w13x(Tensor x, Tensor ids, Tensor w13, Tensor s13, int experts_min) -> Tensor",
        "mxk_w2xr": "custom_op::mxk_w2xr(Tensor a, Tensor ids, Tensor rw, Tensor w2, Tensor s2, int experts_min)"
        " -> Tensor",
    }
    shapes = {"mxk_w13x": [12, 512], "mxk_w2xr": [3, 4, 1024]}
    assert pt2["fakes"] == {name: [shape, "torch.bfloat16", "meta"] for name, shape in shapes.items()}
    assert pt2["calls"] == {name: [shape, "torch.bfloat16", [7]] for name, shape in shapes.items()}


def test_fakes_follow_a_symbolic_number_of_tokens(pt2: Any) -> None:
    x, a, y = pt2["symbolic"]
    tokens, slots = x[0], y[1]
    assert not tokens.isdigit()
    assert a in ([f"{tokens}*{slots}", "512"], [f"{slots}*{tokens}", "512"])
    assert y[::2] == [tokens, "1024"]


def test_calls_that_the_kernel_does_not_take_are_refused_by_every_key(pt2: Any) -> None:
    advice = "; keep the stock op for this call"
    expected = {
        "type": "mxk_w13x: ids is Long; allowed: Int; convert it before the call",
        "shape": "mxk_w13x: s13 is [5, 1024, 31]; allowed: [E, 2I, K/32] in the sizes of the other tensors"
        + advice,
        "rank": "mxk_w13x: x is [1, 3, 1024]; allowed: [T, KP] in the sizes of the other tensors" + advice,
        "many": "mxk_w13x: x has 5 dimensions; allowed: [T, KP]" + advice,
        "tokens": "mxk_w13x: T is 17; allowed: 1 to 16 in steps of 1" + advice,
        "none": "mxk_w13x: T is 0; allowed: 1 to 16 in steps of 1" + advice,
        "routes": "mxk_w13x: T*k is 144; allowed: 1 to 128 in steps of 1" + advice,
        "multiple": "mxk_w13x: K is 1056; allowed: 1 to 6144 in steps of 512" + advice,
        "fine": "accepted",
    }
    assert pt2["refusals"] == {case: [text, text] for case, text in expected.items()}
    assert (
        pt2["strided"] == "mxk_w13x: w13 is not contiguous; allowed: dense tensors; call .contiguous() on it"
    )
    assert pt2["scalar"] == "mxk_w13x: experts_min is -1; allowed: 0 to 2**31-1" + advice


def test_lazy_ops_state_type_and_shape_and_pass_scalars(image: Any, muse: Any, gptoss: Any) -> None:
    found = process(
        """
        ctypes.CDLL(str(plugin["lazy"]), ctypes.RTLD_GLOBAL)
        load_ops(gptoss, "lazy")
        out = {}
        for n in ("mxk_w13xib", "mxk_w2xb"):
            y = on_device(n, *tensors(n, K=2880, KP=3072, I=2880, IP=3072), *scalars(n))
            out[n] = [list(y.shape), str(y.dtype), params("lazy")]
        y = on_device("demo_scale", torch.zeros(2, 3), 0.5)
        out["demo_scale"] = [list(y.shape), str(y.dtype), params("lazy")]
        names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("custom_op::"))
        print(json.dumps([out, names]))
        """,
        image,
        muse,
        gptoss,
    )
    one_and_a_half, half = 0x3FC00000, 0x3F000000
    assert found[0] == {
        "mxk_w13xib": [[12, 3072], "torch.bfloat16", [7, one_and_a_half, one_and_a_half]],
        "mxk_w2xb": [[3, 2880], "torch.bfloat16", [7]],
        "demo_scale": [[2, 3], "torch.float32", [half]],
    }
    assert found[1] == ["custom_op::demo_scale", "custom_op::mxk_w13xib", "custom_op::mxk_w2xb"]


def test_a_process_holds_one_op_library(image: Any, muse: Any, gptoss: Any) -> None:
    found = process(
        """
        ctypes.CDLL(str(plugin["pt2"]), ctypes.RTLD_GLOBAL)
        first = load_ops(muse, "pt2").version == load_ops(muse, "pt2").version  # twice is once
        second = refused(lambda: load_ops(muse, "lazy"))
        other = refused(lambda: load_ops(gptoss, "lazy"))
        # Past the loader, the library itself refuses; ops of the first stay as they are.
        ctypes.CDLL(str(plugin["lazy"]), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(muse / "libmxk_op_lazy.so"))
        library.mxk_op_refusal.restype = ctypes.c_char_p
        said = library.mxk_op_refusal().decode()
        y = on_device("mxk_w13x", *tensors("mxk_w13x"), 3)
        print(json.dumps([first, second, other, said, list(y.shape), params("pt2")]))
        """,
        image,
        muse,
        gptoss,
    )
    first, second, other, said, shape, words = found
    assert first is True
    held = f"this process has {muse.folder}/libmxk_op_pt2.so already"
    assert second == f"{muse.folder}/libmxk_op_lazy.so: {held}; allowed: one op library a process; " + (
        "use a new process for this one"
    )
    assert held in other
    assert said.startswith(
        "libmxk_op_lazy.so: this process has an op library already, it registered custom_op::mxk_"
    )
    assert (shape, words) == ([12, 512], [3])


def test_what_cannot_be_loaded_here(image: Any, muse: Any, gptoss: Any) -> None:
    absent, lazy, unnamed, unknown = process(
        """
        before = refused(lambda: load_ops(muse, "pt2"))
        ctypes.CDLL(str(plugin["lazy"]), ctypes.RTLD_GLOBAL)
        print(json.dumps([before, *(refused(lambda: load_ops(*a)) for a in (
            (muse, "pt2"), (gptoss, "pt2"), (muse, "eager")))]))
        """,
        image,
        muse,
        gptoss,
    )
    library = f"{muse.folder}/libmxk_op_pt2.so"
    assert absent.startswith(f"{library}: it cannot be loaded: libhabana_pytorch2_plugin.so: cannot open")
    assert lazy == (
        f"{library}: the bridge of lazy mode is loaded; allowed: libmxk_op_lazy.so in lazy mode; "
        "load that one, or set PT_HPU_LAZY_MODE before the bridge is imported"
    )
    assert unnamed == (
        f"{gptoss.folder}/libmxk_op_pt2.so: MANIFEST does not name it; allowed: a build with it (--pt2 for "
        "torch.compile); build it again, in this image"
    )
    assert unknown == "op library: kind 'eager'; allowed: lazy, pt2; name one of them"


@pytest.mark.parametrize(
    "source", ["glue/glue.cpp", "glue/list_guids.cpp", "oplib/op_pt2.cpp", "oplib/op_lazy.cpp"]
)
def test_sources_compile_with_the_headers_of_the_gaudi_software(source: str, tmp_path: pathlib.Path) -> None:
    tools = Toolchain.find(pt2=True)
    if tools.kernel_headers is None or tools.bridge_headers is None:
        pytest.skip("no Gaudi software here: sources are compiled with our stand-ins of its headers only")
    kernels, limits = variant_kernels("glm"), VARIANT_LIMITS["glm"]
    (tmp_path / "op_table.inc").write_text(tables.kernel_rows(kernels, limits))
    (tmp_path / "kernel_table.inc").write_text(
        tables.glue_table(kernels, limits, (), pathlib.Path("/stock.so"))
    )
    torch_headers = pathlib.Path(torch.__path__[0]) / "include"
    system = [
        tools.kernel_headers,
        tools.bridge_headers,
        torch_headers,
        torch_headers / "torch/csrc/api/include",
    ]
    include = [word for folder in system for word in ("-isystem", str(folder))]
    own = ["-I", str(tmp_path), "-I", str(SOURCES / "glue"), "-I", str(SOURCES / "oplib")]
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", *own, *include, str(SOURCES / source)]
    subprocess.run(command, check=True)
