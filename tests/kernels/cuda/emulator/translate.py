"""CUDA C++ sources, preprocessed, to C++ for device/cuda.h: asm statements to calls of device/ptx.h, shared variables.

Lines keep their numbers: what g++ and the emulator say about a place holds for the source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

DEVICE = Path(__file__).parent / "device"
_TYPES = {
    "pred": "bool",
    "f32": "float",
    "f64": "double",
    "b16": "emu::u16",
    "u16": "emu::u16",
    "s16": "short",
}
_TYPES |= {
    "b32": "emu::u32",
    "u32": "emu::u32",
    "s32": "int",
    "b64": "emu::u64",
    "u64": "emu::u64",
    "s64": "emu::i64",
}
_INPUTS = {"r": "emu::u32", "l": "emu::u64", "h": "emu::u16", "f": "float", "d": "double"}
_KINDS = {"f32.bf16.bf16": "BF16", "f32.f16.f16": "F16", "f32.e4m3.e4m3": "E4M3", "s32.s8.s8": "S8"}
_DEPTHS = {"BF16": 16, "F16": 16, "E4M3": 32, "S8": 32}
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+\.\w+\.\w+)$")


class TranslationError(Exception):
    """A source holds what the emulator does not know."""


@functools.cache
def instructions() -> frozenset[str]:
    """Functions of device/ptx.h."""
    return frozenset(
        re.findall(r"^(?:PTX|inline) void (\w+)\(", (DEVICE / "ptx.h").read_text(), re.MULTILINE)
    )


def translate(text: str) -> str:
    """The C++ of a preprocessed source, whose lines are said by g++'s marks.

    Raises:
        TranslationError: an instruction that device/ptx.h does not have, with file and line.
    """
    kernels = list(_kernels(text))
    text = re.sub(r"^[ \t]*#pragma unroll.*$", "", text, flags=re.MULTILINE)
    text = _replace(text, r"\basm\b\s*(?:volatile|__volatile__)?\s*\(", _asm, ")")
    text = _replace(text, r"(?:\bextern\s+)?\b__shared__\b", _shared, ";")
    entries = "".join(
        f'extern "C" const emu::Kernel emulated_{name};\n'
        f"const emu::Kernel emulated_{name} = emu::Entry<{name}>::kernel({bounds});\n"
        for name, bounds in kernels
    )
    return f'#include "ptx.h"\n{text}\n{entries}'


def _kernels(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"__global__\s+void\s+", text):
        at, bounds = match.end(), ""
        if text.startswith("__launch_bounds__", at):
            begin = text.index("(", at)
            at = _end(text, begin + 1, ")")
            bounds = text[begin + 1 : at - 1]
        name = re.compile(r"\s*(\w+)\s*\(").match(text, at)
        if name is not None:
            yield name.group(1), bounds


def _end(text: str, at: int, closing: str) -> int:
    """Behind the first `closing` from `at` on that no bracket or string holds."""
    depth = 0
    while True:
        character = text[at]
        at += 1
        if character == '"':
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
            at += 1
        elif depth == 0 and character == closing:
            return at
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1


def _replace(text: str, begin: str, write: object, closing: str) -> str:
    assert callable(write)
    parts, done = [], 0
    for match in re.finditer(begin, text):
        end = _end(text, match.end(), closing)
        given = text[match.start() : end]
        written = write(text[match.end() : end - 1], given, functools.partial(_place, text, match.start()))
        parts += [text[done : match.start()], written, "\n" * given.count("\n")]
        done = end
    return "".join((*parts, text[done:]))


def _place(text: str, at: int) -> str:
    line, file = 0, "?"
    for number, content in enumerate(text[:at].split("\n")):
        mark = re.match(r'# (\d+) "([^"]*)"', content)
        if mark is not None:
            line, file = int(mark[1]) - number - 1, Path(mark[2]).name
    return f"{file}:{line + text.count(chr(10), 0, at)}"


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that no bracket or string holds."""
    parts, at, text = [], 0, text + separator
    while at < len(text):
        end = _end(text, at, separator)
        parts.append(text[at : end - 1].strip())
        at = end
    return parts


# ---- shared variables


def _shared(declaration: str, given: str, place: object) -> str:
    declaration = re.sub(r"__align__\s*\(\s*\d+\s*\)|alignas\s*\(\s*\d+\s*\)", "", declaration).replace(
        "\n", " "
    )
    first, *more = _split(declaration, ",")
    head = re.match(r"(.*?)(\w+)\s*((?:\[.*\])?)$", first)
    assert head is not None, given
    kind, name, size = head.group(1).strip(), head.group(2), head.group(3)
    if given.startswith("extern"):
        return f"{kind}* const {name} = static_cast<{kind}*>(emu::dynamic_shared());"
    variables = [(name, size)]
    for other in more:
        parts = re.match(r"(\w+)\s*((?:\[.*\])?)$", other)
        assert parts is not None, given
        variables.append((parts.group(1), parts.group(2)))
    return "".join(
        f"static char emu_site_{name}; using emu_type_{name} = {kind} {size}; emu_type_{name}& {name} = "
        f"*static_cast<emu_type_{name}*>(emu::static_shared(&emu_site_{name}, sizeof(emu_type_{name}), 16));"
        for name, size in variables
    )


# ---- asm statements


def _asm(inside: str, given: str, place: object) -> str:
    assert callable(place)
    template, *sections = _split(inside, ":")
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", "\n").replace("\\t", " ")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).strip()
    if not text:
        return ";"
    sections += [""] * (3 - len(sections))
    before, number = [], 0
    for is_input, section in enumerate(sections[:2]):
        for operand in filter(None, _split(section, ",")):
            match = re.match(r'((?:"[^"]*"\s*)+)\((.*)\)$', operand, re.DOTALL)
            if match is None:
                raise TranslationError(f"{place()}: asm operand {operand!r} is not emulated")
            constraint, expression = re.sub(r'["\s]', "", match.group(1)), " ".join(match.group(2).split())
            before.append(_operand(constraint, expression, number, bool(is_input)))
            number += 1
    try:
        return f"{{ {' '.join(before)} {_body(text)} }}"
    except TranslationError as error:
        raise TranslationError(f"{place()}: {error}") from None


def _operand(constraint: str, expression: str, number: int, is_input: bool) -> str:
    if not is_input:
        return f"auto& emu_{number} = {expression};"
    if constraint == "n":
        return f"const auto emu_{number} = ({expression});"
    # C casts: pointers become integers.
    return f"const {_INPUTS[constraint]} emu_{number} = ({_INPUTS[constraint]})({expression});"


def _body(text: str) -> str:
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    labels, written = [], []
    for statement in filter(None, _split(text, ";")):
        label = re.match(r"([\w$]+):(?!:)\s*", statement)
        while label is not None:
            labels.append(label.group(1))
            written.append(f"{label.group(1)}:;")
            statement = statement[label.end() :]
            label = re.match(r"([\w$]+):(?!:)\s*", statement)
        if statement:
            written.append(_instruction(statement))
    local = f"__label__ {', '.join(labels)}; " if labels else ""
    return f"{{ {local}{' '.join(written)} }}" if labels else " ".join(written)


def _instruction(statement: str) -> str:
    guard = re.match(r"@(!?)(\w+)\s+", statement)
    if guard is not None:
        return f"if ({guard.group(1)}{guard.group(2)}) {_instruction(statement[guard.end() :])}"
    opcode, _, rest = statement.partition(" ")
    operands = _split(rest.strip(), ",") if rest.strip() else []
    if opcode == ".reg":
        kind, names = rest.split(None, 1)
        return f"{_TYPES[kind[1:]]} {names};"
    if opcode in ("bra", "bra.uni"):
        return f"goto {operands[0]};"
    wgmma = _WGMMA.match(opcode)
    if wgmma is not None:
        return _wgmma(opcode, *map(int, wgmma.groups()[:2]), wgmma.group(3), operands)
    name = re.sub(r"\.L2::\w+", "", opcode).replace("::", "_").replace(".", "_")
    if name not in instructions():
        raise TranslationError(f"PTX instruction {opcode!r} is not emulated; add it to device/ptx.h")
    return f"ptx::{name}({', '.join(_values(operands))});"


def _values(operands: list[str]) -> list[str]:
    """Operands as C++ expressions, the members of vectors and addresses one by one."""
    values: list[str] = []
    for operand in operands:
        if operand[0] in "[{":
            values += _values(_split(operand[1:-1], ","))
        elif "|" in operand:
            values += _values(operand.split("|"))
        elif operand == "_":
            values.append("ptx::sink")
        else:
            values.append(re.sub(r"%(\d+)", r"emu_\1", operand))
    return values


def _wgmma(opcode: str, columns: int, depth: int, kind: str, operands: list[str]) -> str:
    if kind not in _KINDS:
        raise TranslationError(f"PTX instruction {opcode!r} is not emulated; add it to device/wgmma.cpp")
    target, a, b, *more = operands
    # Shapes of the PTX ISA, "wgmma.mma_async": those of integers have gaps.
    step = 16 if _KINDS[kind] == "S8" and columns > 32 else 8
    if (
        columns % step
        or columns > 256
        or depth != _DEPTHS[_KINDS[kind]]
        or len(_values([target])) * 2 != columns
    ):
        raise TranslationError(
            f"{opcode!r} with {len(_values([target]))} accumulators; there is no such shape"
        )
    add, *signs = _values(more)
    sign_a, sign_b = signs[:2] if len(signs) >= 2 else ("1", "1")
    if any(flag != "0" for flag in signs[2:]):
        raise TranslationError(f"{opcode!r} with a transposed operand is not emulated")
    registers = a.startswith("{")
    pointers = ", ".join(f"&{value}" for value in _values([target]))
    fragment = f"const emu::u32 a[] = {{{', '.join(_values([a]))}}};" if registers else ""
    of_a = "a, 0" if registers else f"nullptr, {_values([a])[0]}"
    return (
        f"void* const d[] = {{{pointers}}}; {fragment} emu::wgmma({{emu::{_KINDS[kind]}, {columns}, "
        f"sizeof d / sizeof *d, d, {of_a}, {_values([b])[0]}, ({add}) != 0, {sign_a}, {sign_b}}});"
    )
