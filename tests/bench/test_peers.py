"""Adapters of public implementations, and taking turns: what can go wrong where a peer is missing, slow or dies."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import ROOT
from torch import Tensor

from mxk_compile.bench import cases, implementations
from mxk_compile.bench.points import Point
from mxk_compile.kernels import cpu
from mxk_compile.ops import moe
from mxk_compile.testing import MoECase, random_case, random_layer, rel_l2, variant_case
from mxk_compile.variants import VARIANTS

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
CPU_PEERS = ("aten_int4", "ggml", "kt_kernel", "openvino", "torch_bf16", "vllm_cpu")


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The package of adapters, as the command finds it."""
    implementations.load_peer("ggml")
    return sys.modules["peers"]


@pytest.fixture(scope="module")
def bench_peers() -> ModuleType:
    """The script benchmarks/bench_peers.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    import bench_peers  # type: ignore[import-not-found,unused-ignore]

    return bench_peers


def dense(codes: Tensor, scale: Tensor) -> Tensor:
    """[E, rows, columns] fp64 of a peers.Matrix, value by value."""
    nibbles = torch.stack([codes % 16, codes // 16], dim=-1).flatten(-2).long()
    if scale.dtype == torch.uint8:
        values = torch.tensor(E2M1, dtype=torch.float64)[nibbles]
        factor = torch.exp2(scale.double() - 127)
    else:
        values, factor = nibbles.double() - 8, scale.double()
    return values * factor.repeat_interleave(32, dim=-1)


@pytest.mark.parametrize("row_order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_matrices_are_the_layer_in_three_parts(peers: ModuleType, weight_format: str, row_order: str) -> None:
    case = random_case(weight_format=weight_format, row_order=row_order, bias=True, seed=3)
    parts = peers.matrices(case)
    weights = {name: dense(part.codes, part.scale) for name, part in parts.items()}
    expected = torch.zeros(case.hidden_states.shape, dtype=torch.float64)
    for token, slot in itertools.product(*map(range, case.topk_ids.shape)):
        e, x = int(case.topk_ids[token, slot]), case.hidden_states[token].double()
        gate, up = (weights[name][e] @ x + parts[name].bias[e] for name in ("gate", "up"))
        y = weights["down"][e] @ (torch.nn.functional.silu(gate) * up) + parts["down"].bias[e]
        expected[token] += case.topk_weights[token, slot].double() * y
    assert rel_l2(case.reference(), expected) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_format": "uint4", "pack_dim": "output"},
        {"weight_format": "uint4", "zero": True},
        {"weight_format": "uint4", "group_size": 64},
        {"per_route": True},
    ],
)
def test_matrices_refuse_other_layers(peers: ModuleType, changes: dict[str, Any]) -> None:
    with pytest.raises(peers.Unsuitable):
        peers.matrices(random_case(**changes))


@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_blocks_of_ggml_hold_the_same_values(peers: ModuleType, weight_format: str) -> None:
    down = peers.matrices(random_case(weight_format=weight_format))["down"]
    found = implementations.load_peer("ggml").blocks(down)
    num_experts, rows, groups = down.scale.shape
    size = 17 if weight_format == "mxfp4" else 18
    assert (found.shape, found.dtype) == ((num_experts, rows, groups, size), torch.uint8)
    block = found[1, 5, 1]
    if weight_format == "mxfp4":
        scale, bytes_ = 2.0 ** (int(block[0]) - 127), block[1:].tolist()
        values = [E2M1[byte & 15] * scale for byte in bytes_] + [E2M1[byte >> 4] * scale for byte in bytes_]
    else:
        scale, bytes_ = float(block[:2].clone().view(torch.float16)), block[2:].tolist()
        values = [((byte & 15) - 8) * scale for byte in bytes_] + [
            ((byte >> 4) - 8) * scale for byte in bytes_
        ]
    assert values == dense(down.codes, down.scale)[1, 5, 32:64].tolist()


# What each rounds: activations to 8 bits, or values to bf16; the last with bf16 out of it all but once.
@pytest.mark.parametrize(
    ("name", "variant", "limit"),
    [
        ("ggml", "gptoss", 1.6e-2),
        ("ggml", "kimi_int4", 1.6e-2),
        ("ggml", "dsv41", 1.6e-2),
        ("openvino", "gptoss", 2e-3),
        ("openvino", "kimi_int4", 2e-3),
        ("openvino", "dsv41", 2e-3),
        ("kt_kernel", "kimi", 6e-3),
        ("kt_kernel", "kimi_int4", 1.6e-2),
        ("vllm_cpu", "gptoss", 6e-3),
        ("vllm_cpu", "kimi", 6e-3),
        ("vllm_cpu", "kimi_int4", 4e-2),
        ("aten_int4", "kimi_int4", 6e-3),
    ],
)
def test_a_peer_computes_the_layer(name: str, variant: str, limit: float) -> None:
    peer = implementations.load_peer(name)
    reason = peer.missing()
    if reason is not None:
        pytest.skip(reason)
    if name == "ggml" and variant == "dsv41" and not hasattr(peer._ggml(), "swiglu_clamp"):
        pytest.skip("this build of ggml has no clamped SwiGLU")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_experts": 6, "num_tokens": 7}
    case = variant_case(VARIANTS[variant], **sizes)
    run = peer.layer(case)
    for few in (case, dataclasses.replace(case, topk_ids=case.topk_ids.flip(1)), tokens(case, 1), case):
        result = run(*few.routing)
        assert result.dtype == torch.bfloat16
        assert rel_l2(result, few.reference()) < limit
    assert peer.version()


def tokens(case: MoECase, count: int) -> MoECase:
    """The call of its first tokens."""
    x, ids, weights = (tensor[:count] for tensor in case.routing)
    return dataclasses.replace(case, hidden_states=x, topk_ids=ids, topk_weights=weights)


def test_peers_without_a_notion_of_foreign_experts_say_so(peers: ModuleType) -> None:
    case = random_case(num_experts=4)
    case.topk_ids[0, 0] = 4
    with pytest.raises(peers.Unsuitable, match="--routing hot"):
        peers.need_local_routes(case)


def test_all_peers_for_cpus_take_part_by_default(bench_peers: ModuleType) -> None:
    assert bench_peers.cpu_peers() == list(CPU_PEERS)


class Scripted:
    """A participant whose turns are known, and which may end."""

    def __init__(self, name: str, turns: list[list[float]], result: Tensor) -> None:
        self.name, self.version, self.closed = name, None, False
        self._turns, self._result = iter(turns), result

    def first_call(self, point: Point) -> Tensor:
        return self._result

    def turn(self) -> list[float]:
        import turns  # type: ignore[import-not-found,unused-ignore]

        found = next(self._turns, None)
        if found is None:
            raise turns.Gone("its process has ended with -11")
        return found

    def close(self) -> None:
        self.closed = True


def test_ratios_are_of_a_round_and_who_ends_is_left_out(
    bench_peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(VARIANTS["gptoss"], hidden_size=64, intermediate_size=32)
    monkeypatch.setitem(VARIANTS, "gptoss", small)
    monkeypatch.setattr(bench_peers.timing, "_PROBE_SECONDS", 0.001)
    point = Point("gptoss", 8, 2, "hot")
    layers = [random_layer(small, 8, 0, "cpu")]
    first = cases.rotation(point, layers, 1, chain=1).layers[0]
    exact = moe.reference(
        first.hidden_states.double(), *first.routing[1:], *first.weights, **first.attributes,
        round_intermediate=False,
    ).float()  # fmt: skip
    ours = Scripted("mxk avx512", [[1e-3, 3e-3, 1e-3], [2e-3], [9e-3], [1e-3]], exact)
    slow = Scripted("slow", [[2e-3], [6e-3], [1e-3], [2e-3]], exact * 1.5)
    dies = Scripted("dies", [[1e-3]], exact)
    taking_part = [ours, dies, slow]
    rows = bench_peers.measure(point, layers, taking_part, 4, 60.0)
    assert [row["peer"] for row in rows] == ["mxk avx512", "slow"]
    assert [row["us"] for row in rows] == [1500.0, 2000.0]
    assert [row["of_ours"] for row in rows] == [1.0, 2.0]  # of 2, 3, 1/9, 2: not 2.0 / 1.5
    assert rows[0]["rel_l2"] < 1e-6
    assert rows[1]["rel_l2"] == pytest.approx(0.5, rel=1e-3)
    assert dies.closed
    assert taking_part == [ours, slow]
    assert "dies: its process has ended with -11" in capsys.readouterr().err
    lines = bench_peers.table(rows).splitlines()
    assert lines[2] == "| mxk avx512 | 1.5 (1.00) | " + lines[2].split(" | ")[2]
    assert lines[3].startswith("| slow | 2 (2.00) | 5.00e-01 |")


def test_a_process_each_takes_turns_and_its_end_is_noticed(bench_peers: ModuleType) -> None:
    import turns

    setup = turns.Setup("mxk baseline", Point("gptoss", 2, 1, "hot"), 1, 1)
    one = turns.Participant(setup)
    try:
        assert (one.name, one.version) == ("mxk baseline", None)
        for num_tokens in (1, 2):
            point = dataclasses.replace(setup.point, num_tokens=num_tokens)
            layer = random_layer(VARIANTS["gptoss"], 2, 0, "cpu")
            case = cases.rotation(point, [layer], 1, chain=1).layers[0]
            assert rel_l2(one.first_call(point), case.reference()) < 1.8e-3
            taken = one.turn()
            assert 1 <= len(taken) <= 8
            assert min(taken) > 0
        one._process.kill()
        with pytest.raises(turns.Gone, match="has ended with -9"):
            one.turn()
    finally:
        one.close()
    absent = dataclasses.replace(setup, name="humming_kernels")
    with pytest.raises(turns.Gone, match="humming"):
        turns.Participant(absent)


def test_another_build_of_the_library_takes_part(bench_peers: ModuleType, tmp_path: Path) -> None:
    import turns

    setup = turns.Setup("", Point("gptoss", 2, 1, "hot"), 1, 1)
    same, broken = tmp_path / "same.so", tmp_path / "broken.so"
    same.write_bytes(cpu.LIBRARY.read_bytes())
    broken.write_bytes(b"no library")
    one = turns.Participant(dataclasses.replace(setup, name=f"mxk baseline@{same}"))
    try:
        assert one.name == f"mxk baseline@{same}"
        assert one.first_call(setup.point).isfinite().all()
    finally:
        one.close()
    with pytest.raises(turns.Gone, match="broken.so cannot be loaded"):
        turns.Participant(dataclasses.replace(setup, name=f"mxk baseline@{broken}"))
    assert bench_peers._isas(f"amx:1@{same},avx512") == [f"amx:1@{same}", "avx512"]
    for given, what in ((f"avx9@{same}", "'avx9' is none"), ("avx512@missing.so", "no library 'missing.so'")):
        with pytest.raises(argparse.ArgumentTypeError, match=what):
            bench_peers._isas(given)
