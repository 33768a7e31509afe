"""Deliberate faults in the CUDA kernels: each must be seen emulated, so that a right result there says something."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels.cuda import emulator
from kernels.cuda.emulator.build import compile_source

from mxk_compile.kernels.cuda import build
from mxk_compile.testing import most_rel_l2, random_case, rel_l2

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

DECODE, PREFILL = "decode:groups=2,stages=2,buffers=1,max_routes=64", "prefill:128"
AHEAD = DECODE.replace("buffers=1", "buffers=2")
SEED = 1  # in the quick order some of them do no harm


@dataclasses.dataclass(frozen=True)
class Fault:
    """One edit of one source, and what the emulator says of it; None: something, or the result is wrong."""

    file: str
    old: str
    new: str
    said: str | None = None
    schedule: str = DECODE
    processors: int = 2
    num_tokens: int = 20
    slow: bool = False


def wait(barrier: str) -> str:
    """A statement of the sources."""
    return f"barrier_wait({barrier});"


FAULTS = {
    "no wait for a slot": Fault(
        "decode_multiply.cuh", wait("barriers + AT_SLOT_FULL + 8 * turn.slot.slot, turn.slot.parity"), "", slow=True
    ),
    "slot overwritten": Fault(
        "decode_ring.cuh", wait("barriers + AT_SLOT_EMPTY + 8 * turn.slot, turn.parity ^ 1"), "",
    ),
    "parity": Fault(
        "decode_ring.cuh", "AT_SLOT_EMPTY + 8 * turn.slot, turn.parity ^ 1",
        "AT_SLOT_EMPTY + 8 * turn.slot, turn.parity", "no thread can run",
    ),
    "sums overwritten": Fault(
        "decode_multiply.cuh", wait("barriers + AT_SUMS_EMPTY + 8 * turn.sums.slot, turn.sums.parity ^ 1"), "",
    ),
    "fragment": Fault("decode_multiply.cuh", "unpack(low, a[i][0], a[i][2])", "unpack(low, a[i][2], a[i][0])"),
    "descriptor": Fault("decode_wgmma.cuh", "address >> 4 | (128 >> 4) << 16", "address >> 4 | (64 >> 4) << 16"),
    "no proxy fence": Fault(
        "decode_digits.cuh", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "",
        "without a fence.proxy.async",
    ),
    "no wait for products": Fault("decode_wgmma.cuh", "wgmma_wait<0>();", ""),
    "no fence of registers": Fault("decode_wgmma.cuh", "{ wgmma_fence(); }", "{}", "without a wgmma.fence", slow=True),
    "registers": Fault(
        "decode.cuh", "(CONSUMERS * 32) / 8 * 8;", "(CONSUMERS * 32) / 8 * 8 + 8;", "setmaxnreg", slow=True
    ),
    "no barrier of the grid": Fault(
        "decode_multiply.cuh", "ready.wait<2, CONSUMERS * 32>(part = walk.part(), thread);", "part = walk.part();",
        processors=9, num_tokens=4
    ),
    "a part's arrival before its rows": Fault(
        "decode_finish.cuh", "const int end = more ? next.part() : PARTS;", "const int end = PARTS;",
        schedule=AHEAD, processors=9, num_tokens=4
    ),
    "slots before they are stored": Fault(
        "decode_finish.cuh", "ready.wait<6, ADDERS>(RowsReady::OF_Y, thread);", "", processors=9, num_tokens=4
    ),
    "digits read too early": Fault(
        "decode_multiply.cuh", "        team_sync<2, CONSUMERS * 32>();\n      }", "      }",
    ),
    "position for token": Fault(
        "decode_finish.cuh", "(lane - q + token % 4) * 8", "lane * 8", num_tokens=4, slow=True
    ),
    "team": Fault(
        "decode_digits.cuh", "constexpr u32 TEAM = DIGIT_WARPS * 32;", "constexpr u32 TEAM = DIGIT_WARPS * 32 + 32;",
        "bar.sync 3", slow=True
    ),
    "routes unsorted": Fault(
        "decode_routes.cuh", "  __syncthreads();\n  if (BY_ALL) {\n    for (int r", "  if (BY_ALL) {\n    for (int r",
        slow=True
    ),
    "swizzle": Fault("rows.cuh", "(c ^ (row & 7)) * 16", "c * 16", schedule=PREFILL),
    "exchange": Fault("rows.cuh", "__syncwarp();\n    // Chunk", "// Chunk", schedule=PREFILL, slow=True),
    "stage released": Fault("prefill_wgmma.cuh", "wgmma_wait<1>();", "wgmma_wait<4>();", schedule=PREFILL),
    "rows of the operand": Fault("wgmma.cuh", "1024 >> 4", "512 >> 4", schedule=PREFILL, slow=True),
    "half a fragment": Fault(
        "prefill_multiply.cuh", "a[half + 2] =", "a[3 - half] =", schedule=PREFILL, slow=True
    ),
    "arrival before copies": Fault(
        "prefill_feed.cuh", "barrier_arrive_after_copies(ring.filled());", "barrier_arrive(ring.filled());",
        schedule=PREFILL, slow=True
    ),
    "no dependency": Fault(
        "routing.cu", "  wait_for_earlier_kernels();\n  counts", "  counts", "without griddepcontrol.wait",
        schedule=PREFILL,
    ),
}  # fmt: skip


def run(
    schedule: str, sources: Path | None = None, processors: int = 2, num_tokens: int = 20
) -> tuple[float, emulator.Machine]:
    """rel_l2, in units of what is allowed, of a call that is long enough for every ring to turn; and the device."""
    case = random_case(
        num_tokens=num_tokens,
        num_experts=3,
        hidden_size=736,
        intermediate_size=96,
        bias=True,
        row_order="interleaved",
    )
    with emulator.use(sources, processors, SEED) as machine:
        result = emulator.fused(case, schedule)
    expected = case.reference(round_intermediate=True)
    return rel_l2(result, expected) / most_rel_l2(expected), machine


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sources with each chosen fault in them, compiled by two threads."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [
        item.callspec.params["name"] for item in items if "folders" in getattr(item, "fixturenames", ())
    ]
    compiled = {schedule: run(schedule)[1].compiled for schedule in (DECODE, AHEAD, PREFILL)}
    made, work = {}, []
    for name in chosen:
        fault = FAULTS[name]
        made[name] = tmp_path_factory.mktemp("fault") / "sources"
        shutil.copytree(build.SOURCES, made[name], ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        text = (made[name] / fault.file).read_text()
        (made[name] / fault.file).write_text(text.replace(fault.old, fault.new))
        work += [(made[name] / source, defines) for source, defines in compiled[fault.schedule]]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: compile_source(*source), work))
    return made


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_sources_have_what_a_fault_replaces(fault: Fault) -> None:
    assert fault.old in (build.SOURCES / fault.file).read_text(), "say the fault anew"


@pytest.mark.parametrize("schedule", [DECODE, PREFILL])
def test_without_a_fault_results_are_right(schedule: str) -> None:
    assert run(schedule)[0] <= 1


def seen(fault: Fault, sources: Path) -> str:
    """What shows the fault; empty if nothing does."""
    try:
        return (
            ""
            if run(fault.schedule, sources, fault.processors, fault.num_tokens)[0] <= 1
            else "a wrong result"
        )
    except emulator.EmulatorError as said:
        return str(said)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * fault.slow) for name, fault in FAULTS.items()]
)
def test_the_emulator_sees_the_fault(name: str, folders: dict[str, Path]) -> None:
    fault = FAULTS[name]
    what = seen(fault, folders[name])
    assert what, "nothing is seen"
    assert (fault.said or "") in what
