"""What is asked of `mxk build-tpc`, checked before anything is looked for or made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import MANIFEST
from mxk_compile.kernels.tpc.signatures import variant_kernels

COMMAND = "mxk build-tpc"
_SOURCES = Path(__file__).with_name("kernels")
_ASKED = re.compile(r"^#\s*(?:if|elif|ifdef|ifndef)\b.*$", re.MULTILINE)
_DEFINED = re.compile(r"^#\s*define\s+(\w+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Request:
    """One build.

    Attributes:
        variant: model family (signatures.py).
        target: folder that will hold the libraries and the MANIFEST.
        extra: folders with one more kernel each: <guid>.c, glue.inc, op.cpp (docs/gaudi.md).
        pt2: also build the op library for torch.compile.
        defines: NAME or NAME=VALUE for the kernels' preprocessor.
    """

    variant: str
    target: Path
    extra: tuple[Path, ...] = ()
    pt2: bool = False
    defines: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises KernelError for what no build can be made of."""
        if self.pt2 and self.variant == "gptoss":
            raise KernelError(
                COMMAND,
                "--pt2 with gptoss",
                "--pt2 with another variant",
                "leave --pt2 out: vllm-gaudi runs gpt-oss in lazy mode",
            )
        if self.pt2 and self.extra:
            raise KernelError(
                COMMAND,
                "--pt2 with --extra-kernel",
                "one of the two",
                "extra kernels have lazy-mode ops only",
            )
        names = [kernel.name for kernel in variant_kernels(self.variant)]
        for folder in self.extra:
            guid = extra_guid(folder)
            if guid in names:
                raise KernelError(
                    COMMAND, f"{folder} is a second kernel {guid}", "one name once", "rename it"
                )
            names.append(guid)
        for define in self.defines:
            if not re.fullmatch(r"[A-Za-z_]\w*(=.*)?", define, re.ASCII | re.DOTALL):
                raise KernelError(
                    COMMAND, f"--define {define!r}", "NAME or NAME=VALUE", "correct or leave it out"
                )
            allowed = known_defines(self.extra)
            if define.partition("=")[0] not in allowed:
                given = f"--define {define!r}, which no source asks for"
                raise KernelError(COMMAND, given, ", ".join(allowed), "correct or leave it out")

    def check_target(self) -> None:
        """Raises KernelError if the target is none that a build can be put to."""
        folder = self.target.resolve().parent
        if not folder.is_dir():
            raise KernelError(
                COMMAND,
                f"{folder} is no folder",
                "a folder in one that exists",
                "create it",
            )
        kept = self.target.exists() and (
            not self.target.is_dir()
            or (any(self.target.iterdir()) and not (self.target / MANIFEST).is_file())
        )
        if kept:
            raise KernelError(
                COMMAND,
                f"{self.target} holds something else",
                "a new folder, an empty one, or an earlier build",
                "choose another",
            )


def known_defines(extra: Sequence[Path] = ()) -> list[str]:
    """Macros that a build may set: those the sources ask for, less what the kernels define to be themselves."""
    texts = [path.read_text() for path in sorted(_SOURCES.glob("*.[ch]"))]
    fixed = {name for path in _SOURCES.glob("*.c") for name in _DEFINED.findall(path.read_text())}
    fixed |= {name for text in texts for name in re.findall(r"\bMXK_\w+_H\b", text)} | {
        "MXK_REGION"
    }  # emulator
    texts += [path.read_text(errors="replace") for folder in extra for path in sorted(folder.glob("*.c"))]
    asked = {
        name for text in texts for line in _ASKED.findall(text) for name in re.findall(r"\b[A-Z_]\w+", line)
    }
    return sorted(asked - fixed)


def extra_guid(folder: Path) -> str:
    """Name of the kernel in an extra folder; raises KernelError if the folder is not as it must be."""

    def refuse(given: str, allowed: str) -> KernelError:
        return KernelError(f"{COMMAND} --extra-kernel {folder}", given, allowed, "see docs/gaudi.md")

    sources = sorted(folder.glob("*.c"))
    if len(sources) != 1:
        raise refuse(f"{len(sources)} files *.c", "one, named as the kernel's GUID")
    guid = sources[0].stem
    if not guid.isidentifier() or guid.startswith("mxk_") or len(guid) > 63:
        raise refuse(
            f"the name {guid!r}", "an identifier of at most 63 letters that does not begin with mxk_"
        )
    for name in ("glue.inc", "op.cpp"):
        if not (folder / name).is_file():
            raise refuse(f"no {name}", "<guid>.c, glue.inc and op.cpp")
    return guid
