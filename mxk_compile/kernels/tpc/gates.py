"""The two gates of the build: what the kernel library lists and exports, and what an op library registers.

Both run what was built in a process of its own, without a device: the op library's object is linked a second time with
oplib/recorder.cpp in the place of the bridge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.tables import ENTRY_POINTS, stub_functions

GAUDI2 = 3
"""DEVICE_ID_GAUDI2: the one device whose list has our GUIDs."""

LIST_OPS = """
import ctypes, json, sys, torch
before = set(torch._C._dispatch_get_all_op_names())
library = ctypes.CDLL(sys.argv[1])
recorded = ctypes.CDLL(sys.argv[2]).mxk_recorded
recorded.restype = ctypes.c_char_p
new = sorted(set(torch._C._dispatch_get_all_op_names()) - before)
has = torch._C._dispatch_has_kernel_for_dispatch_key
ops = {name: [key for key in ("HPU", "Meta") if has(name, key)] for name in new}
print(json.dumps({"ops": ops, "bridge": recorded().decode().splitlines()}))
"""
"""Program of the op gate: library, recorder -> what the dispatcher and the bridge were told, as JSON."""


def _fail(gate: str, given: str, allowed: str) -> KernelError:
    return KernelError(f"mxk build-tpc: {gate} gate", given, allowed, "nothing was installed")


def check_guids(stock: str, ours: str, own: Sequence[str]) -> None:
    """The kernel library's list (list_guids.cpp) is the stock list unchanged, then exactly `own` for Gaudi 2.

    Raises KernelError naming the first difference.
    """
    for device in range(1, 8):
        stock_rows, our_rows = (
            [line for line in text.splitlines() if line.startswith(f"{device} ")] for text in (stock, ours)
        )
        taken = {row.split()[1] for row in stock_rows} & set(own)
        if taken:
            raise _fail("GUID", f"the stock library has {sorted(taken)[0]} itself", "a name that is free")
        expected = stock_rows + ([f"{device} {name} 0 0" for name in own] if device == GAUDI2 else [])
        for index, (row, wanted) in enumerate(zip(our_rows, expected, strict=False)):
            if row != wanted:
                raise _fail("GUID", f"entry {index} of device {device} is {row!r}", repr(wanted))
        if len(our_rows) != len(expected):
            raise _fail("GUID", f"device {device} has {len(our_rows)} GUIDs", f"{len(expected)}")
    if not stock.strip():
        raise _fail("GUID", "the stock library lists no kernel", "the stock library of this image")


def check_exports(stock: str, ours: str) -> None:
    """Every function that the stock library exports is exported by ours (both texts from `nm -D --defined-only`).

    Raises KernelError naming one that is missing.
    """
    exported = {line.split()[2].split("@")[0] for line in ours.splitlines() if len(line.split()) == 3}
    missing = sorted((set(stub_functions(stock)[0]) | set(ENTRY_POINTS)) - exported)
    if missing:
        raise _fail("export", f"{len(missing)} functions are missing, the first {missing[0]}", "none")


def check_ops(listed: str, names: Sequence[str], library: str, keys: Sequence[str]) -> None:
    """The op library registered exactly `names`, for the dispatch keys `keys`, each with the bridge under its own GUID.

    Args:
        listed: what LIST_OPS printed.
        names: ops of the variant and of extra kernels, without their namespace.
        library, keys: for the error; ["HPU", "Meta"], in lazy mode ["HPU"].

    Raises:
        KernelError: naming the first difference.
    """
    found = json.loads(listed.splitlines()[-1])
    expected = {f"custom_op::{name}" for name in names}
    for text, ops in (
        ("the dispatcher", set(found["ops"])),
        ("the bridge", {line.split()[0] for line in found["bridge"]}),
    ):
        if ops != expected:
            wrong = [f"not {name}" for name in sorted(expected - ops)] + sorted(ops - expected)
            raise _fail("op", f"{library} registers {', '.join(wrong)} with {text}", ", ".join(names))
    for line in found["bridge"]:
        op, guid = line.split()
        if op != f"custom_op::{guid}":
            raise _fail("op", f"{op} runs the kernel {guid}", "the kernel of its own name")
    for name, registered in found["ops"].items():
        if not set(keys) <= set(registered):
            raise _fail("op", f"{name} is registered for {registered}", ", ".join(keys))
