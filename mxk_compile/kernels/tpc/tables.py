"""The generated parts of the two libraries: C++ tables of the kernels, embedded ELFs, jump stubs.

Texts in, texts out; build.py writes and compiles them. Nothing in them names a folder of the machine that builds, so
the same kernels and sources give the same library wherever it is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.signatures import (
    MAX_COLUMNS,
    MAX_EXPERTS,
    MAX_ROUTES,
    MAX_ROWS,
    NUM_TPC,
    Kernel,
    Limits,
    Tensor,
)

ENTRY_POINTS = (
    "GetKernelGuids",
    "InstantiateTpcKernel",
    "GetSupportedDataLayouts",
    "GetShapeInference",
    "GetLibVersion",
    "GetSuggestedManipulation",
)
"""What the graph compiler looks up in a kernel library; glue.cpp defines them."""

_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*")


def kernel_rows(kernels: Sequence[Kernel], limits: Limits) -> str:
    """C++ definitions of `kLimits` and `kKernels` (glue/signature.h)."""
    sizes = (
        limits.hidden_multiple,
        limits.hidden_max,
        limits.intermediate_multiple,
        limits.intermediate_max,
        limits.max_tokens,
        MAX_ROUTES,
        MAX_EXPERTS,
        MAX_ROWS,
        MAX_COLUMNS,
    )
    rows = ",\n".join(_kernel_row(kernel) for kernel in kernels)
    return (
        "// Generated from signatures.py.\n"
        f"static const Limits kLimits = {{{', '.join(map(str, sizes))}}};\n"
        f"static const KernelSpec kKernels[] = {{\n{rows},\n}};\n"
    )


def _kernel_row(kernel: Kernel) -> str:
    tensors = ",\n   ".join(_tensor_row(tensor) for tensor in (*kernel.inputs, kernel.output))
    scalars = ", ".join(
        f'{{"{scalar.name}", {str(scalar.kind == "float").lower()}}}' for scalar in kernel.scalars
    )
    return (
        f' {{"{kernel.name}", "{kernel.schema}", {len(kernel.inputs)},\n'
        f"  {{{tensors}}},\n"
        f"  {len(kernel.scalars)}, {{{scalars}}}}}"
    )


def _tensor_row(tensor: Tensor) -> str:
    dims = ", ".join(f"{{Symbol::{dim.symbol}, {dim.times}, {dim.divide}}}" for dim in tensor.shape)
    return f'{{"{tensor.name}", Type::{tensor.dtype}, "{tensor.text}", {len(tensor.shape)}, {{{dims}}}}}'


def glue_table(
    kernels: Sequence[Kernel], limits: Limits, extra_guids: Sequence[str], stock_library: Path
) -> str:
    """kernel_table.inc of glue.cpp; kernels in the order of the GUID list, extra ones (with a glue.inc each) last."""
    names = [kernel.name for kernel in kernels]
    elfs = "".join(
        f"extern const unsigned char mxk_elf_{index}[], mxk_elf_{index}_end[];\n"
        for index in range(len(names) + len(extra_guids))
    )
    own = [
        f' {{"{name}", &mxk::kKernels[{index}], nullptr, mxk_elf_{index}, mxk_elf_{index}_end}},\n'
        for index, name in enumerate(names)
    ]
    own += [
        f' {{"{guid}", nullptr, &instantiate_{guid}, mxk_elf_{index}, mxk_elf_{index}_end}},\n'
        for index, guid in enumerate(extra_guids, len(names))
    ]
    includes = "".join(f'#include "extra_{guid}.inc"\n' for guid in extra_guids)
    return (
        f"namespace mxk {{\n{kernel_rows(kernels, limits)}}}  // namespace mxk\n"
        f"#define MXK_NUM_TPC {NUM_TPC}\n"
        f'#define MXK_STOCK_LIBRARY "{stock_library}"\n'
        f'extern "C" {{\n{elfs}}}\n'
        f"{includes}"
        f"static const OwnKernel kOwn[] = {{\n{''.join(own)}}};\n"
    )


def embed_assembly(elf_names: Sequence[str]) -> str:
    """Assembly that holds the ELF files, found by name in the folder of the build."""
    lines = ['.section .rodata.mxk_elf, "a"']
    for index, name in enumerate(elf_names):
        for label in (f"mxk_elf_{index}", f"mxk_elf_{index}_end"):
            lines += [f".globl {label}", f".hidden {label}"]
        lines += [".balign 64", f"mxk_elf_{index}:", f'.incbin "{name}"', f"mxk_elf_{index}_end:", ".byte 0"]
    return "\n".join([*lines, '.section .note.GNU-stack, "", @progbits', ""])


def stub_assembly(functions: Sequence[str]) -> str:
    """Assembly of one exported jump per function of the stock library (x86-64); glue.cpp fills the slots."""
    code, names, strings = ["\t.text"], [], []
    for index, function in enumerate(functions):
        if not _SYMBOL.fullmatch(function):
            raise KernelError(
                "mxk build-tpc",
                f"the stock library exports {function!r}",
                "names of letters, digits, _ . $",
                "report this library",
            )
        code += [
            f"\t.globl {function}",
            f"\t.type {function}, @function",
            f"{function}:",
            f"\tjmp *(mxk_stub_slots+{8 * index})(%rip)",
            f"\t.size {function}, .-{function}",
        ]
        names.append(f"\t.quad .Lname{index}")
        strings += [f".Lname{index}:", f'\t.string "{function}"']
    data = [
        '\t.section .data.rel.ro, "aw"',
        "\t.globl mxk_stub_names\n\t.hidden mxk_stub_names\n\t.balign 8\nmxk_stub_names:",
        *names,
        "\t.quad 0",
        "\t.section .rodata",
        "\t.globl mxk_stub_count\n\t.hidden mxk_stub_count\n\t.balign 4\nmxk_stub_count:",
        f"\t.long {len(functions)}",
        *strings,
        "\t.bss",
        "\t.globl mxk_stub_slots\n\t.hidden mxk_stub_slots\n\t.balign 8\nmxk_stub_slots:",
        f"\t.zero {8 * len(functions) + 8}",
        '\t.section .note.GNU-stack, "", @progbits',
        "",
    ]
    return "\n".join([*code, *data])


def stub_functions(symbols: str) -> tuple[list[str], list[str]]:
    """Splits the output of `nm -D --defined-only` of the stock library.

    Returns:
        the functions to be stubbed (sorted, without our six and without the loader's own), and its data symbols.
    """
    functions, data = set(), set()
    for line in symbols.splitlines():
        fields = line.split()
        if len(fields) != 3:
            continue
        kind, name = fields[1], fields[2].split("@")[0]
        if kind in "TWi" and name not in (*ENTRY_POINTS, "_init", "_fini"):
            functions.add(name)
        elif kind in "BDRVGSu":
            data.add(name)
    return sorted(functions), sorted(data)
