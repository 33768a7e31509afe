"""Deliberate faults in the kernels: each must break parity, so that parity says something."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from emulated_pair import run_pair

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import emulate, emulated_ops
from mxk_compile.testing import MAX_REL_L2, MoECase, random_case, rel_l2

BIAS, PLAIN = ("mxk_w13xib", "mxk_w2xb"), ("mxk_w13x", "mxk_w2x")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One edit of one source, seen through one of the two kernels of a pair."""

    file: str
    old: str
    new: str
    pair: tuple[str, str] = PLAIN
    which: int = 0  # the kernel that is built from the faulty sources


_NIBBLE_1 = "#define MXK_NIBBLE_1(w) v_u16_and_b(v_u16_shr_b(w, 4), 0xF)"
_SUM = "v_f32_mac_b(run, weight, MXK_LD_L(mxk_total[token]))"

FAULTS = {
    "nibble order": Fault("mxk_dot.h", _NIBBLE_1, _NIBBLE_1.replace("w, 4", "w, 8")),
    "plane": Fault("mxk_dot.h", "X(plane1, c, 1)", "X(plane1, c, 2)"),
    "scale block": Fault("mxk_dot.h", "v_u8_shr_b(read_lane_id_1b_b(), 4)", "v_u8_shr_b(read_lane_id_1b_b(), 5)"),
    "scale shift": Fault("mxk_dot.h", "control, 0, zero_u8), 23)", "control, 0, zero_u8), 22)"),
    "interleave": Fault(
        "mxk_w13.h", "MXK_NEXT_PASS(row, row + 1, row + 2, row + 3, expert)",
        "MXK_NEXT_PASS(row, row + 2, row + 1, row + 3, expert)", BIAS,
    ),
    "tail": Fault("mxk_w13.h", "get_dim_size(x, 0) >> 9", "get_dim_size(mxk_w, 0) >> 8"),
    "padding": Fault("mxk_w13.h", "padding < 128", "padding < 0"),
    "expert skip": Fault("mxk_common.h", "if (e < (unsigned)(num_experts))", "if (e + 1 < (unsigned)(num_experts))"),
    "sort": Fault("mxk_common.h", "mxk_sorted[mxk_start[e]] = r;", "mxk_sorted[mxk_start[e]] = e;"),
    "bias weight": Fault(
        "mxk_w2.h", "run = v_f32_add_b(run, bias);", "run = v_f32_add_b(run, v_f32_add_b(bias, bias));", BIAS, 1,
    ),
    "clamp side": Fault("mxk_w13.h", "MXK_AT_LEAST(MXK_AT_MOST(up, limit), -limit)", "MXK_AT_MOST(up, limit)", BIAS),
    "gate clamped below": Fault(
        "mxk_w13.h", "gate = MXK_AT_MOST(gate, limit)", "gate = MXK_AT_LEAST(MXK_AT_MOST(gate, limit), 0.0f)", BIAS,
    ),
    "rounding order": Fault(
        "mxk_w2.h", _SUM, f"(float64)v_u32_and_b((uint64){_SUM}, 0xFFFF0000)", PLAIN, 1,
    ),
    "output slice": Fault("mxk_w2.h", "point * slice", "point * (slice - 1)", PLAIN, 1),
    "duplicate route": Fault(
        "mxk_common.h", "if (e >= 0) {", "if (e >= 0 && (r == 0 || mxk_expert[r - 1] != e)) {", PLAIN, 1,
    ),
    "routing weight": Fault("mxk_w2.h", "at_rw[0] = (route) - token * top_k;", "at_rw[0] = 0;", PLAIN, 1),
}  # fmt: skip


def mutate(fault: Fault, folder: pathlib.Path) -> emulated_ops.Build:
    """The kernels' folder, copied, with the fault in it."""
    shutil.copytree(emulate.KERNELS, folder, dirs_exist_ok=True)
    text = (folder / fault.file).read_text()
    (folder / fault.file).write_text(text.replace(fault.old, fault.new))
    return emulated_ops.Build(folder=folder)


@pytest.mark.parametrize("name", FAULTS)
def test_the_sources_have_what_a_fault_replaces(name: str) -> None:
    fault = FAULTS[name]
    assert fault.old in (emulate.KERNELS / fault.file).read_text(), "say the fault anew"
    assert fault.old != fault.new


def case_of(pair: tuple[str, str]) -> MoECase:
    """A call that has everything a fault can be in: partial chunks, duplicate and foreign ids, values beyond limits."""
    sizes = {"num_tokens": 3, "num_experts": 4, "top_k": 3, "hidden_size": 1056, "intermediate_size": 1120}
    oai = {"row_order": "interleaved", "activation": "swiglu_oai", "alpha": 1.702, "limit": 2.0, "bias": True}
    case = random_case(**sizes, experts_min=2, rms=3.0, **(oai if pair == BIAS else {}))  # type: ignore[arg-type]
    case.topk_ids = torch.tensor([[5, 2, 5], [3, 3, 7], [1, 4, 2]])
    return case


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulated_ops.Build]:
    """All faulty kernels, built by two at a time."""
    folders = {name: mutate(fault, tmp_path_factory.mktemp("fault")) for name, fault in FAULTS.items()}

    def build(name: str) -> None:
        fault = FAULTS[name]
        emulate.build(folders[name].folder / f"{fault.pair[fault.which]}.c")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, FAULTS))
    return folders


def error(
    case: MoECase, pair: tuple[str, str], builds: tuple[emulated_ops.Build, emulated_ops.Build]
) -> float:
    """rel_l2 of the pair against fp32."""
    return rel_l2(run_pair(case, pair, builds)[0], case.reference(round_intermediate=True))


@pytest.mark.parametrize("pair", [BIAS, PLAIN], ids=["bias", "plain"])
def test_without_a_fault_parity_holds(pair: tuple[str, str]) -> None:
    assert error(case_of(pair), pair, (emulated_ops.Build(), emulated_ops.Build())) <= MAX_REL_L2


@pytest.mark.parametrize("name", FAULTS)
def test_parity_sees_the_fault(name: str, builds: dict[str, emulated_ops.Build]) -> None:
    fault = FAULTS[name]
    used = [emulated_ops.Build(), emulated_ops.Build()]
    used[fault.which] = builds[name]
    try:
        measured = error(case_of(fault.pair), fault.pair, (used[0], used[1]))
    except KernelError:  # refused by the emulator: seen as well
        return
    assert not measured <= MAX_REL_L2
