from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mxk_compile.errors import CallError
from mxk_compile.ops.formats import mxfp4

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
BYTES = range(256)


def table(dtype: torch.dtype) -> torch.Tensor:
    """Every value by [scale byte, code], from Python floats."""
    rows = []
    for byte in range(256):
        scale = math.nan if byte == 255 else 2.0 ** (byte - 127)
        rows.append(
            [math.copysign(MAGNITUDES[code & 7], -1 if code & 8 else 1) * scale for code in range(16)]
        )
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    nan = left.isnan()
    integer = INTEGER.get(left.dtype, torch.int64)
    equal = left.view(integer) == right.view(integer)
    return left.dtype == right.dtype and bool((torch.where(nan, right.isnan(), equal)).all())


def every_product(dtype: torch.dtype) -> torch.Tensor:
    """Unpacked [scale byte, byte of two codes, 2]."""
    packed = torch.tensor(list(BYTES), dtype=torch.uint8).expand(256, 256)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    return mxfp4.unpack(packed, scale, dtype).view(256, 256, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
def test_every_code_under_every_scale_is_the_exact_product(dtype: torch.dtype) -> None:
    values = every_product(dtype)
    want = table(dtype)
    low = torch.tensor([byte & 15 for byte in BYTES])
    high = torch.tensor([byte >> 4 for byte in BYTES])
    assert same_bits(values[..., 0].contiguous(), want[:, low])
    assert same_bits(values[..., 1].contiguous(), want[:, high])
    # The check can fail: with the nibbles swapped it does.
    assert not same_bits(values[..., 0].contiguous(), want[:, high])


def test_the_corners_of_bfloat16_by_name() -> None:
    values = table(torch.bfloat16)
    got = every_product(torch.bfloat16)
    assert got[0, 1, 0].item() == 2.0**-128 != 0.0  # code 1, byte 0: subnormal in bfloat16
    assert got[1, 1, 0].item() == 2.0**-127
    assert got[127, 8, 0].item() == 0.0
    assert math.copysign(1, got[127, 8, 0].item()) == -1
    assert got[254, 3, 0].item() == 1.5 * 2.0**127
    assert got[254, 4, 0].item() == math.inf
    assert got[254, 15, 0].item() == -math.inf
    assert bool(got[255].isnan().all())
    assert not bool(values[:255].isnan().any())
    assert tuple(table(torch.float64)[127].tolist()) == mxfp4.ELEMENTS


def test_a_thread_that_flushes_subnormals_changes_nothing() -> None:
    before = every_product(torch.bfloat16)
    weight = torch.randn(4, 64) * 2.0**-126
    packed = mxfp4.quantize(weight)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        mxfp4._pair_tables.clear()
        during, packed_during = every_product(torch.bfloat16), mxfp4.quantize(weight)
    finally:
        torch.set_flush_denormal(False)
        mxfp4._pair_tables.clear()
    assert same_bits(before, during)
    assert torch.equal(packed[0], packed_during[0])
    assert torch.equal(packed[1], packed_during[1])
    assert packed[0].any()


def quantize_one(values: list[float]) -> tuple[list[int], int]:
    """Scale rule and rounding of the specification in exact arithmetic, one block."""
    largest = max(abs(value) for value in values)
    exponent = max(math.frexp(largest)[1] - 1 - 2, -127) if largest else -127
    codes = []
    for value in values:
        target = min(math.ldexp(abs(value), -exponent), 6.0)
        nearest = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - target), code & 1))
        codes.append(nearest | (8 if math.copysign(1, value) < 0 else 0))
    return codes, exponent + 127


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_quantize_agrees_with_exact_arithmetic(values: list[float]) -> None:
    packed, scale = mxfp4.quantize(torch.tensor([values]))
    codes, byte = quantize_one(values)
    assert scale.tolist() == [[byte]]
    assert mxfp4.unpack_codes(packed).tolist() == [codes]


def test_quantize_agrees_with_exact_arithmetic_on_a_normal_weight() -> None:
    weight = torch.randn(64, 32) * torch.logspace(-40, 30, 64, base=2)[:, None]
    packed, scale = mxfp4.quantize(weight)
    want = [quantize_one(row) for row in weight.tolist()]
    assert scale.flatten().tolist() == [byte for _, byte in want]
    assert mxfp4.unpack_codes(packed).tolist() == [codes for codes, _ in want]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (0.2500001, 1),
        (1.7499999, 3),
        (5.0000005, 7),
        (7.9999995, 7),
        (0.0, 0),
        (-0.0, 8),
        (-0.25, 8),
        (-0.75, 10),
        (-2.5, 12),
        (-7.5, 15),
    ],
)
def test_ties_go_to_the_even_code_and_large_values_saturate(value: float, code: int) -> None:
    block = torch.zeros(32)
    block[0], block[5] = 4.0, value  # the 4 makes the scale 1
    packed, scale = mxfp4.quantize(block)
    assert scale.item() == 127
    assert mxfp4.unpack_codes(packed)[5].item() == code


def test_a_block_of_zeros_and_the_smallest_values() -> None:
    weight = torch.zeros(3, 32)
    weight[1, 3], weight[2, 4] = 2.0**-149, 2.0**-127
    packed, scale = mxfp4.quantize(weight)
    assert scale.tolist() == [[0], [0], [0]]
    values = mxfp4.unpack(packed, scale)
    assert not values[:2].any()
    assert values[2, 4].item() == 2.0**-127


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 15), min_size=32, max_size=32).filter(
        lambda codes: any(c & 7 > 5 for c in codes)
    ),
    st.integers(2, 252),
)
def test_values_of_mxfp4_come_back_as_the_same_bytes(codes: list[int], byte: int) -> None:
    packed = mxfp4.pack(torch.tensor([codes]))
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    again, scale_again = mxfp4.quantize(mxfp4.unpack(packed, scale))
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, scale)


@pytest.mark.parametrize("num_columns", [2, 30, 48, 64, 130])
def test_the_last_block_of_a_row_may_be_short(num_columns: int) -> None:
    weight = torch.randn(3, 5, num_columns)
    packed, scale = mxfp4.quantize(weight)
    assert packed.shape == (3, 5, num_columns // 2)
    assert scale.shape == (3, 5, math.ceil(num_columns / 32))
    padded = torch.nn.functional.pad(weight, (0, -num_columns % 32))
    whole = mxfp4.unpack(*mxfp4.quantize(padded))
    assert torch.equal(mxfp4.unpack(packed, scale), whole[..., :num_columns])


def test_views_give_what_contiguous_tensors_give() -> None:
    packed = torch.randint(0, 256, (4, 6, 64), dtype=torch.uint8)
    scale = torch.randint(100, 140, (4, 6, 8), dtype=torch.uint8)
    part, part_scale = packed[::2, 1:, 16:48], scale[::2, 1:, ::4]
    want = mxfp4.unpack(part.contiguous(), part_scale.contiguous())
    assert torch.equal(mxfp4.unpack(part, part_scale), want)
    transposed = mxfp4.unpack(packed.transpose(0, 1), scale[..., :4].transpose(0, 1))
    assert torch.equal(transposed, mxfp4.unpack(packed, scale[..., :4].contiguous()).transpose(0, 1))
    words = packed.view(torch.int32)
    assert torch.equal(mxfp4.unpack(words, scale[..., :4]), mxfp4.unpack(packed, scale[..., :4]))
    weight = torch.randn(64, 6).t()
    assert torch.equal(mxfp4.quantize(weight)[0], mxfp4.quantize(weight.contiguous())[0])
    assert mxfp4.unpack(packed[:0], scale[:0, :, :4]).shape == (0, 6, 128)


def test_unpack_under_fake_tensors_and_in_a_compiled_function() -> None:
    packed = torch.randint(0, 256, (2, 32), dtype=torch.uint8)
    scale = torch.randint(100, 140, (2, 2), dtype=torch.uint8)
    with FakeTensorMode() as mode:
        fake = mxfp4.unpack(mode.from_tensor(packed), mode.from_tensor(scale))
    assert (fake.shape, fake.dtype) == ((2, 64), torch.bfloat16)
    want = mxfp4.unpack(packed, scale)
    compiled = torch.compile(mxfp4.unpack, backend="eager", fullgraph=True)
    assert torch.equal(compiled(packed, scale), want)


def test_blocks_are_the_published_layout() -> None:
    weight = torch.randn(2, 6, 96)
    blocks, scales = mxfp4.quantize_blocks(weight)
    assert blocks.shape == (2, 6, 3, 16)
    assert scales.shape == (2, 6, 3)
    assert torch.equal(mxfp4.unpack(blocks.flatten(-2), scales), mxfp4.unpack(*mxfp4.quantize(weight)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mxfp4.quantize(torch.full((1, 32), math.nan)), "inf or NaN"),
        (lambda: mxfp4.quantize(torch.full((1, 32), math.inf)), "inf or NaN"),
        (lambda: mxfp4.quantize(torch.ones(1, 32, dtype=torch.int8)), "torch.int8; allowed: a floating"),
        (lambda: mxfp4.quantize(torch.ones(1, 33)), r"\(1, 33\); allowed: an even"),
        (lambda: mxfp4.quantize_blocks(torch.ones(1, 48)), r"\(1, 48\); allowed: a last dimension of 32 n"),
        (lambda: mxfp4.pack(torch.ones(3)), r"\(3,\); allowed: an even"),
        (
            lambda: mxfp4.unpack(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)),
            r"scale \(2, 4\) for packed \(2, 32\); allowed: scale \(2, 2\)",
        ),
        (
            lambda: mxfp4.unpack(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1)),
            "scale of torch.float32; allowed: uint8",
        ),
        (
            lambda: mxfp4.unpack(torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.uint8)),
            "torch.float32 of shape .* allowed: uint8 or int32",
        ),
        (
            lambda: mxfp4.unpack(*[torch.zeros(1, n, dtype=torch.uint8) for n in (16, 1)], torch.int32),
            "torch.int32; allowed: bfloat16",
        ),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(call: object, text: str) -> None:
    with pytest.raises(CallError, match=text):
        call()  # type: ignore[operator]
