"""The two gates of `mxk build-tpc`: each difference is found, in texts and in libraries built wrong on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import gates, tables
from mxk_compile.kernels.tpc.signatures import VARIANT_KERNELS, variant_kernels

STOCK = "1 old 5 0\n3 add 77 1\n3 cast 0 0\n4 add 77 1\n"
OWN = ("mxk_w13x", "mxk_w2x")
OURS = "1 old 5 0\n3 add 77 1\n3 cast 0 0\n3 mxk_w13x 0 0\n3 mxk_w2x 0 0\n4 add 77 1\n"


def test_the_right_list_passes() -> None:
    gates.check_guids(STOCK, OURS, OWN)


@pytest.mark.parametrize(
    ("stock", "ours", "reason"),
    [
        (STOCK, OURS.replace("77", "78", 1), "entry 0 of device 3 is '3 add 78 1'; allowed: '3 add 77 1'"),
        (STOCK, OURS.replace("3 cast 0 0\n", ""), "entry 1 of device 3 is '3 mxk_w13x 0 0'"),
        (STOCK, OURS.replace("3 mxk_w2x 0 0\n", ""), "device 3 has 3 GUIDs; allowed: 4"),
        (STOCK, OURS + "3 more 0 0\n", "device 3 has 5 GUIDs; allowed: 4"),
        (STOCK, OURS + "4 mxk_w2x 0 0\n", "device 4 has 2 GUIDs; allowed: 1"),
        (STOCK, OURS.replace("3 mxk_w13x 0 0\n3 mxk_w2x", "3 mxk_w2x 0 0\n3 mxk_w13x"), "'3 mxk_w2x 0 0'"),
        (STOCK, OURS.replace("3 mxk_w13x 0 0", "3 mxk_w13x 0 1"), "'3 mxk_w13x 0 1'"),
        (STOCK + "3 mxk_w2x 1 1\n", OURS, "the stock library has mxk_w2x itself"),
        ("", "3 mxk_w13x 0 0\n3 mxk_w2x 0 0\n", "the stock library lists no kernel"),
    ],
)
def test_every_difference_of_the_lists_is_found(stock: str, ours: str, reason: str) -> None:
    with pytest.raises(KernelError) as caught:
        gates.check_guids(stock, ours, OWN)
    assert str(caught.value).startswith("mxk build-tpc: GUID gate: ")
    assert reason in str(caught.value)


def test_a_function_that_is_not_exported_is_found() -> None:
    stock = "0001 T Other\n0002 W _ZN1a1bEv\n0003 T GetKernelGuids@@V1\n0004 D data\n0005 T _init\n"
    ours = "\n".join(f"1 T {name}" for name in (*tables.ENTRY_POINTS, "Other", "_ZN1a1bEv"))
    gates.check_exports(stock, ours)
    with pytest.raises(KernelError, match=r"export gate: 1 functions are missing, the first _ZN1a1bEv; "):
        gates.check_exports(stock, ours.replace("1 T _ZN1a1bEv", ""))
    with pytest.raises(KernelError, match="the first GetSuggestedManipulation"):
        gates.check_exports(stock, ours.replace("1 T GetSuggestedManipulation", ""))


def listed(ops: dict[str, list[str]], bridge: list[str]) -> str:
    return "a line of noise\n" + json.dumps({"ops": ops, "bridge": bridge})


def test_every_difference_of_the_ops_is_found() -> None:
    keys = ["HPU", "Meta"]
    ops = {f"custom_op::{name}": keys for name in OWN}
    bridge = [f"custom_op::{name} {name}" for name in OWN]
    gates.check_ops(listed(ops, bridge), OWN, "lib.so", keys)
    foreign = ops | {"custom_op::mxk_w2xr": keys}
    wrong = [bridge[0], "custom_op::mxk_w2x mxk_w2xb"]
    for text, reason in (
        (
            listed(foreign, bridge),
            "lib.so registers custom_op::mxk_w2xr with the dispatcher; allowed: mxk_w13x,",
        ),
        (listed(ops, bridge[:1]), "lib.so registers not custom_op::mxk_w2x with the bridge"),
        (listed(dict([*ops.items()][:1]), bridge), "registers not custom_op::mxk_w2x with the dispatcher"),
        (
            listed(ops, wrong),
            "custom_op::mxk_w2x runs the kernel mxk_w2xb; allowed: the kernel of its own name",
        ),
        (
            listed(ops | {"custom_op::mxk_w2x": ["HPU"]}, bridge),
            "is registered for ['HPU']; allowed: HPU, Meta",
        ),
    ):
        with pytest.raises(KernelError) as caught:
            gates.check_ops(text, OWN, "lib.so", keys)
        assert reason in str(caught.value)
        assert str(caught.value).endswith("; nothing was installed")


def test_a_stock_library_that_has_our_name_fails_the_build(
    image: Any, tmp_path: Any, mxk: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxk_compile.kernels.tpc.build import Build

    monkeypatch.setattr(Build, "link_ops", lambda self, kind: None)  # not what this is about
    original = image.stock.read_bytes()
    image.compile_stock("mxk_w2xr")
    try:
        code, _, error = mxk("build-tpc", "--variant", "muse", str(tmp_path / "lib"))
    finally:
        image.stock.write_bytes(original)
    assert code == 2
    assert "GUID gate: the stock library has mxk_w2xr itself; allowed: a name that is free" in error
    assert list(tmp_path.iterdir()) == []


def test_no_two_ops_of_a_variant_have_the_same_number_of_tensors() -> None:
    # The bridge's legacy ops are cached by input signature, not by name.
    for variant in VARIANT_KERNELS:
        counts = [len(kernel.inputs) for kernel in variant_kernels(variant)]
        assert len(set(counts)) == len(counts), variant
        assert all(count + 1 <= 16 for count in counts)
