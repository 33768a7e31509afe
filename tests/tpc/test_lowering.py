"""The lowered graph on the ops of a built library: its C++ fakes keep T symbolic, the warm calls are legal to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import ctypes, json, pathlib, sys, types, torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
import mxk_compile
from mxk_compile.kernels import tpc
from mxk_compile.kernels.tpc.libraries import load_ops
from mxk_compile.kernels.tpc.signatures import KERNELS
from mxk_compile.passes import run_passes
from mxk_compile.settings import Settings

plugin, build, helper = map(pathlib.Path, sys.argv[1:])
ctypes.CDLL(str(plugin), ctypes.RTLD_GLOBAL)
load_ops(build, "pt2")
sys.path.insert(0, str(helper))
import gaudi_stand_ins
torch.hpu = sys.modules["torch.hpu"] = gaudi_stand_ins.hpu_module()

environment = ShapeEnv()
source = ConstantSource("T")
symbol = environment.create_symbol(5, source, dynamic_dim=DimDynamic.DYNAMIC)
T = environment.create_symintnode(symbol, hint=5, source=source)
E, K, I, k = 4, 1024, 512, 8
shapes = {"x": (T, K), "ids": (T, k), "rw": (T, k), "w13": (E, 2 * I, K // 2), "s13": (E, 2 * I, K // 32),
          "w2": (E, K, I // 2), "s2": (E, K, I // 32)}
dtypes = {"x": torch.bfloat16, "ids": torch.int64, "rw": torch.bfloat16}
graph, nodes = fx.Graph(), []
with FakeTensorMode(shape_env=environment):
    for name, shape in shapes.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = torch.empty(shape, dtype=dtypes.get(name, torch.uint8), device="hpu")
attributes = dict(weight_format="mxfp4", row_order="gate_up", activation="silu", per_route=True)
moe = graph.call_function(torch.ops.mxk.moe.default, tuple(nodes), attributes)
moe.meta["val"] = torch.ops.mxk.moe.default(*(node.meta["val"] for node in nodes), **attributes)
graph.output(moe)
module = fx.GraphModule(torch.nn.Module(), graph)
run_passes(module, Settings(), can_guard=True)
ours = [node for node in graph.nodes if "custom_op" in str(node.target)]
low, high = environment.bound_sympy(symbol).lower, environment.bound_sympy(symbol).upper

def on_device(name):  # the HPU kernel, on CPU tensors
    op = getattr(torch.ops.custom_op, name).default
    arguments = tpc.smallest_arguments(KERNELS[name], "cpu")
    return list(op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.HPU), *arguments).shape)

print(json.dumps({
    "ours": [str(node.target) for node in ours],
    "shapes": [[str(size) for size in node.meta["val"].shape] for node in ours],
    "devices": [node.meta["val"].device.type for node in ours],
    "range": [int(low), int(high)],
    "warm": [on_device(name) for name in ("mxk_w13x", "mxk_w2xr")],
}))
"""


def test_symbolic_tokens_through_the_built_ops(image: Any, muse: Any) -> None:
    plugin = image.site / "habana_frameworks/torch/lib/libhabana_pytorch2_plugin.so"
    helper = Path(__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, str(plugin), str(muse.folder), str(helper)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == ["custom_op.mxk_w13x.default", "custom_op.mxk_w2xr.default"]
    (rows, columns), (tokens, *rest) = found["shapes"]
    assert (columns, rest) == ("512", ["8", "1024"])
    # T stays a symbol: guards bound it, none fixes it. The cap of muse is 16, and 8 routes a token allow as many.
    assert tokens.startswith("s")
    assert rows == f"8*{tokens}"
    assert found["range"] == [2, 16]
    assert found["devices"] == ["hpu", "hpu"]
    assert found["warm"] == [[1, 512], [1, 1, 512]]
