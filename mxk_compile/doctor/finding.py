"""One line of `mxk doctor`."""

from __future__ import annotations

import dataclasses

from mxk_compile.errors import MxkError, printable


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: which one.
        state: "ok"; "warn": works, but not as it could; "fail": does not work.
        found: versions, paths, reasons, on one line.
        fix: what to do about it; empty for "ok".
    """

    check: str
    state: str
    found: str
    fix: str = ""

    @classmethod
    def failed(cls, check: str, error: MxkError) -> Finding:
        """What an error of ours says."""
        return cls(check, "fail", f"{error.what}: {error.given}; allowed: {error.allowed}", error.advice)

    def __str__(self) -> str:
        line = f"{self.state:5} {self.check:17} {self.found}"
        return printable(" ".join(line.splitlines()) + (f"; {self.fix}" if self.fix else ""))
