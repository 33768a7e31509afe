"""One line of `mxk doctor`."""

from __future__ import annotations

import dataclasses


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

    def __str__(self) -> str:
        line = f"{self.state:5} {self.check:17} {self.found}"
        return " ".join(line.splitlines()) + (f"; {self.fix}" if self.fix else "")
