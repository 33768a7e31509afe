"""Every error a user can meet: what was asked, what was given, what is allowed, what to do, on one line."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters, which names in files may hold, as escapes: no file steers a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class MxkError(ValueError):
    """Base of all errors raised by this package.

    The text is one line: ``{what}: {given}; allowed: {allowed}; {advice}``, `printable`.

    Args:
        what: the op, file, variable or option that was used.
        given: the offending value, with the name of the argument or tensor.
        allowed: the values or shapes that are accepted.
        advice: what to do now.
    """

    def __init__(self, what: str, given: str, allowed: str, advice: str) -> None:
        self.what, self.given, self.allowed, self.advice = what, given, allowed, advice
        super().__init__(printable(" ".join(f"{what}: {given}; allowed: {allowed}; {advice}".split())))

    def __reduce__(self) -> tuple[type[MxkError], tuple[str, str, str, str]]:
        return type(self), (self.what, self.given, self.allowed, self.advice)


class CallError(MxkError):
    """An op was called with arguments that contradict each other or its schema."""


class CheckpointError(MxkError):
    """A checkpoint lacks something, or holds something that is not understood."""


class SettingsError(MxkError):
    """A setting, environment variable or backend option has a name or value that is not allowed."""


class KernelError(MxkError):
    """A kernel library could not be loaded, or refused a call that `supports()` had accepted."""


class InstallError(MxkError):
    """Hooks could not be written into, or taken out of, the files of another package; they are as they were."""


class GraphError(MxkError):
    """A pass produced a graph that `passes/verify.py` does not accept: a defect of this package."""


class BackwardError(MxkError):
    """A gradient was asked of an op that has none."""
