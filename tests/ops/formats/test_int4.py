from __future__ import annotations

import pytest
import torch

from mxk_compile.errors import CallError
from mxk_compile.ops.formats import int4

ROWS, COLUMNS = 16, 128


def reference(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, weight_format: str, pack_dim: str
) -> torch.Tensor:
    """Values [N, K] in float64, nibble by nibble, of one weight in either packing."""
    stored = packed.view(torch.uint8).tolist()
    codes = torch.tensor([[byte >> shift & 15 for byte in row for shift in (0, 4)] for row in stored])
    zeros = torch.full(scale.shape, 8 if weight_format == "uint4" else 0)
    if zero is not None and zero.dtype == torch.int32:
        rows = zero.tolist()
        zeros = torch.tensor([[(word >> 4 * i) & 15 for word in row for i in range(8)] for row in rows])
    elif zero is not None:
        zeros = zero.long()
    if weight_format == "int4":
        codes = torch.where(codes > 7, codes - 16, codes)
    if pack_dim == "output":
        codes, zeros, scale = codes.t(), zeros.t(), scale.t()
    group = codes.shape[1] // scale.shape[1]
    return (codes - zeros.repeat_interleave(group, 1)).double() * scale.double().repeat_interleave(group, 1)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("pack_dim", ["input", "output"])
@pytest.mark.parametrize(("weight_format", "with_zero"), [("uint4", False), ("uint4", True), ("int4", False)])
def test_unpack_against_nibble_by_nibble(
    weight_format: str, pack_dim: str, group: int, scale_dtype: torch.dtype, with_zero: bool
) -> None:
    codes = torch.randint(0, 16, (ROWS, COLUMNS))
    packed = int4.pack(codes, pack_dim)
    assert torch.equal(int4.unpack_codes(packed, pack_dim), codes.to(torch.uint8))
    shape = (ROWS, COLUMNS // group) if pack_dim == "input" else (COLUMNS // group, ROWS)
    scale = (torch.rand(shape) + 0.1).to(scale_dtype)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8) if with_zero else None
    want = reference(packed, scale, zero, weight_format, pack_dim)
    got = int4.unpack(packed, scale, zero, weight_format=weight_format, pack_dim=pack_dim)
    assert got.shape == (ROWS, COLUMNS)
    assert torch.equal(got, want.float())
    in_bf16 = int4.unpack(
        packed, scale, zero, weight_format=weight_format, pack_dim=pack_dim, dtype=torch.bfloat16
    )
    assert torch.equal(in_bf16, want.float().to(torch.bfloat16))
    other_storage = packed.view(torch.int32 if pack_dim == "input" else torch.uint8)
    assert torch.equal(
        int4.unpack(other_storage, scale, zero, weight_format=weight_format, pack_dim=pack_dim), got
    )
    swapped = (packed.view(torch.uint8) >> 4) | (packed.view(torch.uint8) << 4)
    assert not torch.equal(
        int4.unpack(swapped, scale, zero, weight_format=weight_format, pack_dim=pack_dim), got
    )
    if with_zero and pack_dim == "output":
        words = int4.pack(zero.t(), "output")
        assert words.dtype == torch.int32
        assert torch.equal(reference(packed, scale, words, weight_format, pack_dim), want)
        assert torch.equal(
            int4.unpack(packed, scale, words, weight_format=weight_format, pack_dim=pack_dim), got
        )


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pack_dim", ["input", "output"])
def test_quantize_is_within_half_a_step(pack_dim: str, symmetric: bool, group: int) -> None:
    weight = torch.randn(3, ROWS, 256)
    packed, scale, zero = int4.quantize(
        weight, group, pack_dim=pack_dim, symmetric=symmetric, scale_dtype=torch.float32
    )
    assert (zero is None) == symmetric
    values = int4.unpack(packed, scale, zero, pack_dim=pack_dim)
    step = (scale if pack_dim == "input" else scale.transpose(-1, -2)).repeat_interleave(group, -1)
    # An asymmetric zero point is rounded itself, which can cost the extreme value another half step.
    assert bool(((values - weight).abs() <= step * (0.5001 if symmetric else 1.001)).all())
    again = int4.quantize(values, group, pack_dim=pack_dim, symmetric=symmetric, scale_dtype=torch.float32)
    values_again = int4.unpack(again[0], again[1], again[2], pack_dim=pack_dim)
    torch.testing.assert_close(values_again, values, rtol=1e-5, atol=1e-6)


def test_a_zero_group_and_leading_dimensions_and_views() -> None:
    weight = torch.randn(2, 3, 8, 64)
    weight[0, 0, 0] = 0
    packed, scale, _ = int4.quantize(weight, 32)
    values = int4.unpack(packed, scale)
    assert not values[0, 0, 0].any()
    assert values.shape == weight.shape
    view, view_scale = packed[:, ::2, 1:, 16:], scale[:, ::2, 1:, 1:]
    assert torch.equal(int4.unpack(view, view_scale), values[:, ::2, 1:, 32:])
    assert torch.equal(int4.quantize(weight.transpose(0, 1), 32)[0], packed.transpose(0, 1))


@pytest.mark.parametrize("pack_dim", ["input", "output"])
def test_rebias_turns_one_code_set_into_the_other(pack_dim: str) -> None:
    packed, scale, _ = int4.quantize(torch.randn(ROWS, COLUMNS), 32, pack_dim=pack_dim)
    signed = int4.rebias(packed)
    assert signed.dtype == packed.dtype
    assert torch.equal(int4.rebias(signed), packed)
    assert torch.equal(
        int4.unpack(signed, scale, weight_format="int4", pack_dim=pack_dim),
        int4.unpack(packed, scale, weight_format="uint4", pack_dim=pack_dim),
    )
    of_int4 = int4.quantize(torch.ones(ROWS, COLUMNS), 32, weight_format="int4")[0]
    of_uint4 = int4.quantize(torch.ones(ROWS, COLUMNS), 32)[0]
    assert torch.equal(int4.rebias(of_int4), of_uint4)


def test_zero_points_up_to_15_of_a_sign_bit_word() -> None:
    """0x88888888 is a negative int32: a shift without a mask would give -8."""
    packed = int4.pack(torch.full((8, 32), 9), "output")
    scale = torch.ones(1, 8)
    words = torch.tensor([[0x88888888 - (1 << 32)]], dtype=torch.int32)
    assert torch.equal(int4.unpack(packed, scale, words, pack_dim="output"), torch.ones(8, 32))
    words.fill_(-1)
    assert torch.equal(int4.unpack(packed, scale, words, pack_dim="output"), torch.full((8, 32), -6.0))


@pytest.mark.parametrize(
    ("columns", "groups", "size"),
    [(256, 8, 32), (256, 4, 64), (256, 2, 128), (256, 1, 256), (96, 1, 96), (96, 3, 32)],
)
def test_group_size_comes_from_the_shapes(columns: int, groups: int, size: int) -> None:
    assert int4.group_size(columns, groups) == size


@pytest.mark.parametrize(("columns", "groups"), [(96, 2), (256, 16), (256, 3), (256, 0), (512, 2), (16, 2)])
def test_other_group_sizes_are_refused(columns: int, groups: int) -> None:
    with pytest.raises(CallError, match=f"{groups} scales for {columns} columns; allowed: groups of 32"):
        int4.group_size(columns, groups)


def unpack(scale_shape: tuple[int, ...], **options: object) -> object:
    packed = torch.zeros(8, 64, dtype=torch.uint8)
    return int4.unpack(packed, torch.ones(scale_shape), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: unpack((8, 3)), "3 scales for 128 columns"),
        (lambda: unpack((4, 4)), r"rows \(4,\), weight with rows \(8,\)"),
        (lambda: unpack((1, 8, 4)), r"rows \(1, 8\), weight with rows \(8,\)"),
        (lambda: unpack((8, 4), weight_format="fp4"), "weight_format='fp4'; allowed: .'uint4', 'int4'"),
        (lambda: unpack((8, 4), pack_dim="both"), "pack_dim='both'; allowed: .'input', 'output'"),
        (lambda: unpack((8, 4), zero=torch.zeros(8, 4)), "zero torch.float32"),
        (lambda: unpack((8, 4), zero=torch.zeros(8, 2, dtype=torch.uint8)), r"\(8, 2\) for scale \(8, 4\)"),
        (
            lambda: unpack((8, 4), zero=torch.zeros(8, 4, dtype=torch.uint8), weight_format="int4"),
            "zero points with 'int4'",
        ),
        (
            lambda: int4.unpack(torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.float64)),
            "scale of torch.float64",
        ),
        (lambda: int4.quantize(torch.ones(1, 96), 64), "group 64 for K=96"),
        (lambda: int4.quantize(torch.ones(1, 96), 48), "2 scales for 96 columns"),
        (lambda: int4.quantize(torch.full((1, 32), torch.inf), 32), "inf or NaN"),
        (
            lambda: int4.quantize(torch.ones(1, 32), 32, weight_format="int4", symmetric=False),
            "symmetric=False",
        ),
        (lambda: int4.rebias(torch.zeros(1)), "torch.float32; allowed: uint8 or int32"),
        (lambda: int4.pack(torch.zeros(12, 32, dtype=torch.uint8), "output"), "6 bytes a row"),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(call: object, text: str) -> None:
    with pytest.raises(CallError, match=text):
        call()  # type: ignore[operator]
