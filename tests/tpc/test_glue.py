"""The kernel library against a stub stock library and a fake graph compiler (stand_ins/): lists, nodes, forwarding."""

from __future__ import annotations

import pathlib
import random
import shutil
import subprocess
from collections.abc import Callable

import pytest

from mxk_compile.kernels.tpc import gates, tables
from mxk_compile.kernels.tpc.build import Build
from mxk_compile.kernels.tpc.request import Request
from mxk_compile.kernels.tpc.signatures import (
    KERNELS,
    VARIANT_KERNELS,
    VARIANT_LIMITS,
    Kernel,
    variant_kernels,
)
from mxk_compile.kernels.tpc.toolchain import Toolchain

STOCK = {2: "", 3: "add_fwd_f32 77 1\ncast_bf16_to_f32 0 0\n", 4: "add_fwd_f32 77 1\n"}
"""GUIDs of the stub by device: name, hash, properties."""
UNSUPPORTED, INCOMPATIBLE_TYPE, FAILED = 8, 7, 400  # GlueCodeReturn

Library = Callable[[str], pathlib.Path]


@pytest.fixture(scope="module")
def library(image: object, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """libmxk_tpc.so of a variant, with bytes in the place of compiled kernels: this file is about the glue."""
    built: dict[str, pathlib.Path] = {}

    def make(variant: str) -> pathlib.Path:
        if variant not in built:
            work = tmp_path_factory.mktemp(f"glue-{variant}")
            (work / "out").mkdir()
            with pytest.MonkeyPatch.context() as patch:
                image.enter(patch)  # type: ignore[attr-defined]
                tools = Toolchain.find()
            steps = Build(Request(variant, work / "target"), tools, work, None)
            for index, guid in enumerate(steps.guids):
                (work / f"{guid}.o").write_bytes(b"\x7fELF" + guid.encode() * (index + 50))
            steps.link_kernel_library()
            built[variant] = work / "out/libmxk_tpc.so"
        return built[variant]

    return make


def compile_graph(
    image: object, library: pathlib.Path, *arguments: str, nodes: str = "", preload: bool = False
) -> list[str]:
    """Lines that the fake graph compiler says; `preload` puts the library's names before all others."""
    command = [str(image.graph_compiler), str(library), *arguments]  # type: ignore[attr-defined]
    if preload:
        command = ["env", f"LD_PRELOAD={library}", *command]
    done = subprocess.run(command, input=nodes, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines() + done.stderr.splitlines()


def sizes_of(variant: str) -> dict[str, int]:
    """A small legal call of a variant, in the symbols of signatures.py."""
    sizes = {
        "gptoss": {"K": 2880, "I": 2880},
        "dsv41": {"K": 5120, "I": 2304},
        "kimi": {"K": 7168, "I": 2048},
    }.get(variant, {"K": 4096, "I": 1024}) | {"T": 3, "k": 4, "R": 12, "E": 5, "N": 64, "C": 96}
    return sizes | {"KP": -(-sizes["K"] // 512) * 512, "IP": -(-sizes["I"] // 512) * 512}


def node(kernel: Kernel, sizes: dict[str, int], device: int = 3, **changes: str) -> str:
    """One line for the fake graph compiler; `changes` replace tensors by name."""

    def text(name: str, dtype: str, shape: list[int]) -> str:
        return changes.get(name, f"{dtype}:{'x'.join(map(str, shape))}")

    tensors = [
        text(tensor.name, tensor.dtype, [dim.size(sizes) for dim in tensor.shape])
        for tensor in (*kernel.inputs, kernel.output)
    ]
    words = [f"{index + 1:x}" for index in range(len(kernel.scalars))]
    scalars = changes.get("scalars", ",".join(words) or "-")
    inputs = changes.get("inputs", ",".join(tensors[:-1]))
    return f"{device} {kernel.name} {scalars} {inputs} {tensors[-1]}\n"


@pytest.mark.parametrize("variant", VARIANT_KERNELS)
def test_stock_guids_come_first_and_ours_follow_on_gaudi_2_alone(
    image: object, library: Library, variant: str
) -> None:
    own = "".join(f"{name} 0 0\n" for name in VARIANT_KERNELS[variant])
    for device in range(1, 5):
        expected = STOCK.get(device, "") + (own if device == 3 else "")
        assert compile_graph(image, library(variant), "guids", str(device)) == expected.splitlines()


def test_a_list_without_room_is_refused(image: object, library: Library) -> None:
    assert compile_graph(image, library("glm"), "short", "3") == [str(FAILED)]


@pytest.mark.parametrize("variant", VARIANT_KERNELS)
def test_a_node_gets_its_kernel_after_one_retry_for_the_buffer(
    image: object, library: Library, variant: str
) -> None:
    kernels = variant_kernels(variant)
    nodes = "".join(node(kernel, sizes_of(variant)) for kernel in kernels)
    said = compile_graph(image, library(variant), "node", nodes=nodes)
    for index, (kernel, line) in enumerate(zip(kernels, said, strict=True)):
        words = ",".join(f"{word + 1:x}" for word in range(len(kernel.scalars))) or "-"
        size = 4 + len(kernel.name) * (index + 50)
        # Code 0 also says that asking once more, with more room, gave the same bytes and scalars.
        assert line == f"0 1 1 24 {words} {'1' * len(kernel.inputs)}/1 {size} 0 1"


def refusals(kernel: Kernel, sizes: dict[str, int]) -> dict[str, str]:
    """What must be refused: node line and a part of the reason."""
    wrong_types = {
        f"{kernel.name}: {tensor.name} is of data type": node(
            kernel, sizes, **{tensor.name: f"{other}:{'x'.join(str(d.size(sizes)) for d in tensor.shape)}"}
        )
        for tensor in (*kernel.inputs, kernel.output)
        for other in ["i8" if tensor.dtype == "u8" else "f16"]
    }
    first = kernel.inputs[0]
    whole = f"{first.dtype}:{'x'.join(str(d.size(sizes)) for d in first.shape)}"
    cases = {
        "number of tensors is 1 in, 1 out": node(kernel, sizes, inputs=whole),
        "user parameters is 20 bytes": node(kernel, sizes, scalars="1,2,3,4,5"),
        f"{first.name} is of dynamic shape": node(kernel, sizes, **{first.name: whole + ":dynamic"}),
        f"{first.name} is transposed": node(kernel, sizes, **{first.name: whole + ":transposed"}),
        f"{first.name} is absent": node(kernel, sizes, **{first.name: whole + ":null"}),
        "dimensions": node(kernel, sizes, **{first.name: whole + "x1x1x1x1"}),
        f"{first.name} is [": node(kernel, sizes, **{first.name: whole + "x1"}),
    }
    scale = next((tensor for tensor in kernel.inputs if tensor.name in ("s13", "s2", "s")), first)
    wraps = [dim.size(sizes) for dim in scale.shape[:-1]] + [scale.shape[-1].size(sizes) + 2**64 // 32]
    cases[f"{scale.name} is of 2**31 or more"] = node(
        kernel, sizes, **{scale.name: f"{scale.dtype}:{'x'.join(map(str, wraps))}"}
    )
    for index, tensor in enumerate((*kernel.inputs, kernel.output)):
        shape = [dim.size(sizes) for dim in tensor.shape]
        for axis in range(len(shape)):
            larger = [size + (axis == at) for at, size in enumerate(shape)]
            cases[f"#{index}.{axis}"] = node(
                kernel, sizes, **{tensor.name: f"{tensor.dtype}:{'x'.join(map(str, larger))}"}
            )
    return wrong_types | cases


@pytest.mark.parametrize("variant", VARIANT_KERNELS)
def test_everything_else_is_unsupported_and_changes_nothing(
    image: object, library: Library, variant: str
) -> None:
    for kernel in variant_kernels(variant):
        cases = refusals(kernel, sizes_of(variant))
        said = compile_graph(image, library(variant), "node", nodes="".join(cases.values()))
        answers, reasons = said[: len(cases)], said[len(cases) :]
        for (case, line), answer in zip(cases.items(), answers, strict=True):
            code, *_, touched = answer.split()
            assert (int(code), touched) == (UNSUPPORTED, "0"), f"{case}: {answer} for {line}"
            assert int(code) != INCOMPATIBLE_TYPE
        assert len(reasons) == len(cases)
        for case, reason in zip(cases, reasons, strict=True):
            assert case.startswith("#") or case in reason
            assert reason.startswith(f"{kernel.name}: ")
            assert "; allowed: " in reason
            assert reason.endswith("; keep the stock op for this call")


@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("glm", {"T": 17}, "T is 17; allowed: 1 to 16 in steps of 1"),
        ("glm", {"T": 0}, "T is 0; allowed: 1 to 16"),
        ("glm", {"T": 16, "k": 9}, "T*k is 144; allowed: 1 to 128"),
        ("glm", {"E": 129}, "E is 129; allowed: 1 to 128"),
        ("glm", {"K": 6656}, "K is 6656; allowed: 1 to 6144 in steps of 512"),
        ("glm", {"K": 4128}, "K is 4128; allowed: 1 to 6144 in steps of 512"),
        ("glm", {"I": 768}, "I is 768; allowed: 1 to 3072 in steps of 512"),
        ("dsv41", {"I": 2432}, "I is 2432; allowed: 1 to 3072 in steps of 256"),
        ("gptoss", {"T": 33}, "T is 33; allowed: 1 to 32"),
        ("gptoss", {"K": 3104}, "K is 3104; allowed: 1 to 3072 in steps of 32"),
        ("kimi", {"K": 8704}, "K is 8704; allowed: 1 to 8192 in steps of 512"),
        ("kimi_int4", {"K": 8704}, "K is 8704; allowed: 1 to 8192 in steps of 512"),
    ],
)
def test_limits_of_the_variants(
    image: object, library: Library, variant: str, changes: dict[str, int], reason: str
) -> None:
    sizes = sizes_of(variant) | changes
    sizes |= {name: -(-sizes[name[0]] // 512) * 512 for name in ("KP", "IP")} | {"R": sizes["T"] * sizes["k"]}
    for kernel in variant_kernels(variant)[:2]:
        answer, said = compile_graph(image, library(variant), "node", nodes=node(kernel, sizes))
        assert answer.split()[0] == str(UNSUPPORTED)
        assert reason in said


@pytest.mark.parametrize("variant", VARIANT_KERNELS)
def test_glue_and_supports_agree_on_any_sizes(image: object, library: Library, variant: str) -> None:
    limits, draw = VARIANT_LIMITS[variant], random.Random(variant)
    nodes, expected = "", []
    for _ in range(150):
        sizes = {
            "T": draw.choice([0, 1, 2, 15, 16, 17, 31, 32, 33, 64]),
            "k": draw.choice([1, 2, 4, 8, 9, 128]),
        }
        sizes |= {"E": draw.choice([1, 8, 127, 128, 129]), "R": sizes["T"] * sizes["k"]}
        for name, multiple, most in (
            ("K", limits.hidden_multiple, limits.hidden_max),
            ("I", limits.intermediate_multiple, limits.intermediate_max),
        ):
            near = draw.choice(
                [multiple, most, most - multiple, most + multiple, draw.randrange(32, most, 32)]
            )
            sizes |= {name: near, f"{name}P": -(-near // 512) * 512}
        for kernel in variant_kernels(variant)[:2]:
            nodes += node(kernel, sizes)
            expected.append(limits.refuse(sizes["T"], sizes["k"], sizes["K"], sizes["I"], sizes["E"]) is None)
    said = compile_graph(image, library(variant), "node", nodes=nodes)[: len(expected)]
    assert [line.split()[0] for line in said] == ["0" if runs else str(UNSUPPORTED) for runs in expected]
    assert 10 < sum(expected) < len(expected) - 10


def test_limits_of_the_unpack(image: object, library: Library) -> None:
    for rows, columns, reason in (
        (8192, 96, "rows is 8192; allowed: 1 to 8168"),
        (64, 8224, "columns is 8224; allowed: 1 to 8192 in steps of 32"),
    ):
        line = node(KERNELS["mxk_deq"], sizes_of("glm") | {"N": rows, "C": columns})
        answer, said = compile_graph(image, library("glm"), "node", nodes=line)
        assert answer.split()[0] == str(UNSUPPORTED)
        assert reason in said


def test_other_guids_devices_and_functions_reach_the_stock_library(image: object, library: Library) -> None:
    w2x, sizes = KERNELS["mxk_w2x"], sizes_of("glm")
    stock_node = node(w2x, sizes).replace("mxk_w2x", "add_fwd_f32")
    # Our name on another device is the stock library's business; its answer is 1000 + the hash it is given back.
    said = compile_graph(image, library("glm"), "node", nodes=stock_node + node(w2x, sizes, device=4))
    assert [line.split()[:4] for line in said] == [["0", "0", "1", "1077"], ["0", "0", "1", "1000"]]
    said = compile_graph(image, library("glm"), "others")
    # With our names before the stock library's, its calls of its own ones still stay there.
    assert compile_graph(image, library("glm"), "others", preload=True) == said
    assert said == [
        "layouts 0 1 ##** ###* ##** 0 3",  # ours: every dimension kept; the stock's: 3
        "shapes 23 0 5",
        "manipulation 400 0",
        "version 42",
        "sum 3.75",
        "itself 2",
        "twice 42",
    ]


def test_every_exported_function_of_the_stock_library_is_exported(image: object, library: Library) -> None:
    def exports(path: pathlib.Path) -> str:
        return subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        ).stdout

    stock, ours = exports(image.stock), exports(library("glm"))  # type: ignore[attr-defined]
    functions, data = tables.stub_functions(stock)
    assert functions == ["StockAsksItself", "StockSum", "StockWeak", "_ZN5stock5twiceEi"]
    assert data == ["stock_datum"]
    gates.check_exports(stock, ours)
    names = {line.split()[-1] for line in ours.splitlines()}
    assert names == {*functions, *tables.ENTRY_POINTS}  # and nothing of the C++ library


def test_a_missing_stock_library_is_said_and_no_list_is_given(
    image: object, library: Library, tmp_path: pathlib.Path
) -> None:
    ours = library("glm")
    stock = pathlib.Path(image.stock)  # type: ignore[attr-defined]
    away = shutil.move(stock, tmp_path / "away.so")
    try:
        said = compile_graph(image, ours, "guids", "3")
    finally:
        shutil.move(away, stock)
    assert said[0] == str(FAILED)
    assert "libmxk_tpc.so: the stock kernel library cannot be used:" in said[1]
    assert str(stock) in said[1]
    assert compile_graph(image, ours, "guids", "4") == STOCK[4].splitlines()
