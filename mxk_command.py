"""The command `mxk`: imports the package, and says on one line why that fails.

Beside the package, not in it: whatever lies inside is imported after `mxk_compile/__init__.py`, which reads the
settings and needs torch.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    """Runs the command line; returns the exit code."""
    refused: list[str] = []
    while True:
        try:
            from mxk_compile.cli import main as run

            return run(refused=refused)
        except KeyboardInterrupt:
            return 130
        except Exception as error:  # of the import alone: what runs has its own handling
            if "mxk_compile.cli" in sys.modules:
                raise
            text = " ".join(f"{error}".split()) or "no reason given"
            is_doctor = sys.argv[1:2] == ["doctor"]
            variable = str(getattr(error, "what", ""))
            if is_doctor and type(error).__name__ == "SettingsError" and variable in os.environ:
                # Doctor says what is wrong with it and goes on with the default.
                refused.append(text)
                del os.environ[variable]
                continue
            if type(error).__name__ != "SettingsError":
                text = (
                    f"mxk_compile cannot be imported ({type(error).__name__}: {text}); reinstall torch and it"
                )
            return _report(text) if is_doctor else _fail(text)


def _report(text: str) -> int:
    """What `mxk doctor` prints where nothing but this can be checked."""
    if "--json" in sys.argv:
        given, _, fix = text.rpartition("; ")
        checks = [{"check": "package", "state": "fail", "found": given, "fix": fix}]
        print(json.dumps({"passed": False, "checks": checks}, indent=2))
    else:
        print(f"fail  package           {text}")
    return 1


def _fail(text: str) -> int:
    print(f"mxk: error: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
