"""`mxk tune` without a GPU: what is timed, what is refused, what is kept. Times and results are made up."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import devices, schedule, tune
from mxk_compile.kernels.cuda.devices import HOPPER
from mxk_compile.kernels.cuda.schedule import Problem, Schedule, choose, heuristic
from mxk_compile.testing import MoECase, variant_case
from mxk_compile.variants import VARIANTS

VARIANT = dataclasses.replace(VARIANTS["gptoss"], hidden_size=96, intermediate_size=64)
EXPERTS, TOKENS = 4, 3
PROBLEM = Problem("some device", "mxfp4", EXPERTS, 64, 96, 4, TOKENS, HOPPER)


class Machine:
    """Answers as the kernels would, in the times given by schedule."""

    def __init__(self, case: MoECase) -> None:
        self.case = case
        self.times: dict[str, float] = {}
        self.wrong: set[str] = set()
        self.broken: set[str] = set()
        self.running = ""

    def prepared(self, *_: Any, schedule: Schedule, **__: Any) -> Any:
        """Stands for `Prepared`."""
        text = str(schedule)
        if text in self.broken:
            raise KernelError("NVRTC", "an error", "sources that compile", "report it")

        def call(*_: Tensor) -> Tensor:
            self.running = text
            result = self.case.reference().bfloat16()
            return result * 2 if text in self.wrong else result

        return call

    def replay_us(self, run: Any, samples: int) -> float:
        """Stands for a measurement over all copies."""
        run()
        return 2 * self.times.get(self.running, 50.0)


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A device that is none, with an empty table of tuned schedules."""
    case = variant_case(VARIANT, num_tokens=TOKENS, num_experts=EXPERTS)
    fake = Machine(case)
    for module in (schedule, tune):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(tune, "random_layer", lambda *_: case)
    monkeypatch.setattr(tune, "random_routing", lambda *_: case.routing)
    monkeypatch.setattr(tune, "supports", lambda desc: None)
    monkeypatch.setattr(tune, "Prepared", fake.prepared)
    monkeypatch.setattr(tune, "replay_us", fake.replay_us)
    monkeypatch.setattr(torch, "Generator", lambda device: torch.default_generator)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some device")
    monkeypatch.setattr(devices, "served", lambda device: HOPPER)
    for function in (schedule.tuned, choose):
        function.cache_clear()
    yield fake
    for function in (schedule.tuned, choose):
        function.cache_clear()


def run(lines: list[str]) -> Schedule:
    return tune.tune(VARIANT, EXPERTS, TOKENS, copies=2, say=lines.append)


def test_the_fastest_right_candidate_is_kept_and_chosen_from_then_on(machine: Machine) -> None:
    candidates = [str(candidate) for candidate in tune.candidates(PROBLEM)]
    assert len(candidates) == len(set(candidates)) > 3
    assert candidates[0] == str(heuristic(PROBLEM))
    machine.times = {candidates[1]: 1.0, candidates[2]: 2.0, candidates[3]: 3.0}
    machine.wrong, machine.broken = {candidates[1]}, {candidates[2]}
    lines: list[str] = []
    assert str(run(lines)) == candidates[3]
    assert choose(PROBLEM) == Schedule.parse(candidates[3])
    assert len(lines) == len(candidates)
    assert lines[0] == f"    50.0 us  {candidates[0]}"
    assert "rel_l2 1.0e+00; allowed: at most 4e-03" in lines[1]
    assert "NVRTC: an error" in lines[2]


def test_nothing_is_kept_where_nothing_is_right(machine: Machine) -> None:
    machine.wrong = {str(candidate) for candidate in tune.candidates(PROBLEM)}
    with pytest.raises(KernelError, match="^mxk tune: no candidate ran"):
        run([])
    assert choose(PROBLEM) == heuristic(PROBLEM)


def test_a_cache_folder_that_takes_no_file_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "write_whole", lambda path, data: False)
    with pytest.raises(KernelError, match="takes no file; allowed: a folder to write to; set MXK_CACHE_DIR$"):
        run([])


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 512, 4096])
def test_candidates_are_schedules_that_print(num_tokens: int) -> None:
    problem = Problem("some device", "mxfp4", 128, 2880, 2880, 4, num_tokens, HOPPER)
    for candidate in tune.candidates(problem):
        assert Schedule.parse(str(candidate)) == candidate
