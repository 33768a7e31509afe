"""Which schedule a call gets: a pure function, a table of tuned ones, an override."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from mxk_compile.errors import SettingsError
from mxk_compile.kernels.cuda import schedule
from mxk_compile.kernels.cuda.devices import DEVICES, HOPPER
from mxk_compile.kernels.cuda.schedule import Problem, Schedule, choose, heuristic
from mxk_compile.settings import Settings


def gptoss(num_tokens: int) -> Problem:
    return Problem("some device", "mxfp4", 128, 2880, 2880, 4, num_tokens, HOPPER)


GPTOSS = gptoss(1)


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty table, and no choice made before."""
    monkeypatch.setattr(schedule, "cache_folder", lambda: tmp_path)
    for function in (schedule.tuned, choose):
        function.cache_clear()
    yield
    for function in (schedule.tuned, choose):
        function.cache_clear()


def test_few_rows_an_expert_decode_and_many_prefill() -> None:
    kinds = [heuristic(gptoss(num_tokens)).kernel for num_tokens in (1, 32, 64, 4096, 16384)]
    assert kinds == ["decode", "decode", "decode", "prefill", "prefill"]
    # The same number of tokens over fewer experts are more rows an expert.
    assert heuristic(Problem("some device", "mxfp4", 2, 2880, 2880, 2, 256, HOPPER)).kernel == "prefill"


def problem(row: str, num_tokens: int) -> Problem:
    sizes = {
        "glm": (64, 1024, 6144, 8),
        "kimi": (48, 2048, 7168, 8),
        "muse": (128, 1024, 4096, 8),
        "dsv41": (48, 2304, 5120, 6),
    }
    return Problem("some device", "mxfp4", *sizes[row], num_tokens, HOPPER)


@pytest.mark.parametrize(
    ("row", "num_tokens", "start"),
    [
        ("kimi", 8, "decode:groups=3,column_tiles=1,"),
        ("kimi", 32, "decode:groups=2,column_tiles=2,"),
        ("kimi", 64, "prefill:"),
        ("dsv41", 16, "decode:groups=3,column_tiles=1,"),
        ("dsv41", 32, "decode:groups=2,column_tiles=2,"),
        ("muse", 1, "decode:groups=3,column_tiles=1,"),
        ("muse", 16, "decode:groups=3,column_tiles=1,"),
        ("muse", 64, "decode:groups=3,column_tiles=2,"),
        ("glm", 16, "decode:groups=3,column_tiles=1,"),
        ("glm", 32, "decode:groups=2,column_tiles=2,max_routes=256,chunk=24"),
        ("glm", 48, "decode:groups=2,column_tiles=2,"),
        ("glm", 64, "prefill:"),
    ],
)
def test_what_was_measured_to_be_faster_is_chosen(row: str, num_tokens: int, start: str) -> None:
    """docs/performance/h200.md"""
    assert str(heuristic(problem(row, num_tokens))).startswith(start)


def test_schedules_fit_the_shared_memory_of_the_device() -> None:
    small, roomy = DEVICES[12, 0], DEVICES[10, 0]
    for num_tokens in (1, 8, 32, 64, 256, 4096, 16384):
        assert heuristic(dataclasses.replace(gptoss(num_tokens), kind=roomy)) == heuristic(gptoss(num_tokens))
        chosen = heuristic(dataclasses.replace(gptoss(num_tokens), kind=small))
        assert max(chosen.sizes, default=16) <= small.most_rows == 96
    assert (
        str(heuristic(dataclasses.replace(GPTOSS, kind=small)))
        == "decode:groups=2,column_tiles=1,max_routes=64,chunk=16"
    )
    wide = Problem("some device", "mxfp4", 48, 2048, 7168, 8, 4, HOPPER)
    assert heuristic(wide).kernel == "decode"
    assert heuristic(dataclasses.replace(wide, kind=small)).kernel == "prefill", (
        "a row's activations alone take 57 KB"
    )


def test_the_choice_depends_on_nothing_but_the_problem() -> None:
    for num_tokens in (1, 7, 64, 1000, 16384):
        assert heuristic(gptoss(num_tokens)) == heuristic(gptoss(num_tokens)) == choose(gptoss(num_tokens))
        assert choose(gptoss(num_tokens)) is choose(gptoss(num_tokens)), "memoised"


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 4096, 16384])
def test_a_schedule_is_printed_and_read_back(num_tokens: int) -> None:
    chosen = heuristic(gptoss(num_tokens))
    assert Schedule.parse(str(chosen)) == chosen


def test_the_setting_overrides_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule.store("some device", {GPTOSS.key: Schedule("prefill", sizes=(32,))})
    monkeypatch.setattr(schedule, "settings", Settings(cuda_schedule="prefill:64/128"))
    assert choose(GPTOSS) == Schedule("prefill", sizes=(64, 128))


@pytest.mark.parametrize(
    "text",
    [
        "prefill",
        "prefill:",
        "prefill:128/64",
        "prefill:100",
        "prefill:256",
        "prefill:16/32/48/64/80",
        "decode:a=1",
        "decode:groups",
        "decode:groups=x",
        "decode:groups=٣",
        "prefill:٦٤",
        "fast",
    ],
)
def test_a_wrong_override_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "settings", Settings(cuda_schedule=text))
    with pytest.raises(SettingsError) as caught:
        choose(GPTOSS)
    assert str(caught.value).startswith(f"MXK_CUDA_SCHEDULE: {text!r}; allowed: 'prefill:SIZE/...'")
    assert "\n" not in str(caught.value)


def test_what_was_tuned_is_used_for_its_device_only() -> None:
    tuned = Schedule("decode", (("groups", 2), ("max_routes", 256)))
    assert schedule.store("some device", {GPTOSS.key: tuned})
    assert choose(GPTOSS) == tuned
    other = dataclasses.replace(GPTOSS, device_name="another device")
    assert choose(other) == heuristic(other)
    assert choose(gptoss(4096)) == heuristic(gptoss(4096))
    assert schedule.store("some device", {gptoss(4096).key: Schedule("prefill", sizes=(64,))})
    assert choose(GPTOSS) == tuned, "kept"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"a": "decode:unknown=1"}'])
def test_a_broken_table_is_passed_over(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / schedule._table("some device")).write_text(content)
    assert choose(GPTOSS) == heuristic(GPTOSS)


def test_a_folder_that_takes_no_file_is_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(schedule, "cache_folder", lambda: tmp_path / "file")
    assert not schedule.store("some device", {GPTOSS.key: heuristic(GPTOSS)})


def test_a_tuned_schedule_serves_only_calls_that_its_lists_hold() -> None:
    """Calls with nearly as many rows share an entry of the table; lists of 64 routes hold 16 tokens, not 17."""
    assert gptoss(16).key == gptoss(17).key
    stored = Schedule.parse("decode:groups=2,column_tiles=2,max_routes=64")
    assert schedule.store("some device", {gptoss(16).key: stored})
    assert choose(gptoss(16)) == stored
    assert choose(gptoss(17)) == heuristic(gptoss(17)) != stored
    assert Schedule.parse("decode:groups=2").has_room(256)
    assert not Schedule.parse("decode:groups=2").has_room(257)
    assert Schedule.parse("prefill:16").has_room(10**9)


@pytest.mark.parametrize(
    "text", ["units=0", "column_tiles=0", "chunk=0", "groups=1", "stages=1", "max_routes=60"]
)
def test_parameters_that_the_kernel_cannot_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule.parse(f"decode:{text}")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("groups=3,column_tiles=1", True),
        ("groups=2,column_tiles=2,buffers=2,stages=3", True),
        ("groups=2,column_tiles=2,buffers=1,stages=4", True),
        (
            "groups=2,column_tiles=2,stages=4",
            False,
        ),  # two buffers are taken where they fit beside three stages
        ("stages=8", False),
        ("column_tiles=8", False),
        ("max_routes=65528", False),
        ("chunk=1024", False),
        ("column_tiles=2,buffers=2,stages=4", False),
    ],
)
def test_parameters_that_do_not_fit_a_layer_are_known_before_it_is_compiled(text: str, fits: bool) -> None:
    macros = Schedule.parse(f"decode:{text}").macros
    assert schedule.decode_runs(GPTOSS, macros) == fits


def test_what_runs_where_the_choice_cannot() -> None:
    """kimi's INT4 layer on a device with little shared memory: of its two splits the second, or prefill."""
    small = Problem("some device", "uint4", 48, 1024, 2048, 8, 8, DEVICES[12, 0])
    first = choose(small)
    taken = schedule.another(small, lambda macros: macros != first.macros)
    assert first.kernel == taken.kernel == "decode"
    assert dict(first.macros)["units"] == 2
    assert dict(taken.macros)["units"] == 1
    assert schedule.another(small, lambda macros: True) == first == heuristic(small)
    assert schedule.another(small, lambda macros: False).kernel == "prefill"
    assert schedule.another(gptoss(4), lambda macros: True).kernel == "prefill", "MXFP4 has no splits"
