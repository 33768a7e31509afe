"""Errors: one line, four parts, and the same after crossing a process boundary."""

from __future__ import annotations

import copy
import pathlib
import pickle
import re

import pytest

from mxk_compile import errors

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]
SOURCES = pathlib.Path(errors.__file__).parent


def test_classes_are_value_errors_of_one_family() -> None:
    assert len(CLASSES) > 3
    assert all(issubclass(cls, errors.MxkError) for cls in CLASSES)
    assert issubclass(errors.MxkError, ValueError)


@pytest.mark.parametrize("cls", CLASSES)
def test_text_is_one_line_of_four_parts(cls: type[errors.MxkError]) -> None:
    error = cls("mxk::moe", "w13 is [2,\n  3]\tuint8", "[E, 2I, K/2]", "correct the call")
    assert str(error) == "mxk::moe: w13 is [2, 3] uint8; allowed: [E, 2I, K/2]; correct the call"


def test_names_in_files_do_not_reach_the_terminal_as_control_characters() -> None:
    error = errors.CheckpointError("é\x1b[31m\u202e", "\ud800", "b\x85c", "d\0")
    assert str(error) == r"é\x1b[31m\u202e: \ud800; allowed: b c; d\x00"


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy_keep_class_text_and_parts(cls: type[errors.MxkError], protocol: int) -> None:
    error = cls("a file", "a\nvalue", "others", "do this")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.deepcopy(error)):
        assert type(again) is cls
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not errors.MxkError])
def test_every_class_is_raised_somewhere(cls: type[errors.MxkError]) -> None:
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "errors.py")
    assert re.search(rf"\b{cls.__name__}\(", text), f"nothing raises {cls.__name__}"
