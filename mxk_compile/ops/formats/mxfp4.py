"""MXFP4 as in the OCP Microscaling Formats (MX) specification v1.0: 32 E2M1 elements share one E8M0 scale.

Element (section 5.3.3, E2M1): bit 3 sign, bits 2..1 exponent with bias 1, bit 0 mantissa; no inf, no NaN.
Scale (section 5.4.1, E8M0): byte b means 2^(b - 127), b = 255 means NaN; there is no zero and no sign.
Value of an element = element * scale. In a byte the low nibble is the element with the even index.

Everything here is integer arithmetic on bit patterns: the results do not depend on the device, on the number
of threads or on whether the calling thread flushes subnormals.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from mxk_compile.errors import CallError
from mxk_compile.ops.formats.nibbles import as_bytes, pack_nibbles, unpack_nibbles

BLOCK = 32  # elements that share a scale (k in the specification)
BLOCK_BYTES = 16  # BLOCK elements of four bits
SCALE_BIAS = 127  # byte 127 is the scale 1
SCALE_NAN = 255
MAX_ELEMENT = 6.0  # code 7: 2^2 * 1.5
MAX_EXPONENT = 2  # floor(log2(MAX_ELEMENT)), emax of the specification's quantisation rule
ELEMENTS = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),  # codes 0..7; 0.5 is the one subnormal
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),  # codes 8..15
)

# dtype: bits of the exponent field, bits of the mantissa field, integer of that width, dtype that holds a
# pair
_FORMATS = {
    torch.bfloat16: (8, 7, torch.int16, torch.int32),
    torch.float32: (8, 23, torch.int32, torch.int64),
    torch.float64: (11, 52, torch.int64, torch.complex128),
}
_FLOAT32_INFINITY = 0x7F800000
# Between neighbouring codes, in quarters; a tie goes to the even code.
_THRESHOLDS = ((1, 0), (3, 1), (5, 0), (7, 1), (10, 0), (14, 1), (20, 0))
_LEAST_TABLE_SCALE = 3  # below it a block may hold subnormals that are more than 1/4 of its scale
_HALF_TABLE = 0x4100  # upper half of 8.0
_pair_tables: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, [..., K] with K even, to packed uint8 [..., K / 2]. Raises CallError for odd K."""
    return pack_nibbles(codes)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [..., K / 2] or int32 [..., K / 8] to codes 0..15, uint8 [..., K]."""
    return unpack_nibbles(packed)


def unpack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of packed MXFP4.

    packed: uint8 [..., K / 2] or int32 [..., K / 8]; scale: uint8 [..., ceil(K / 32)], leading dimensions
    equal (the last block may be short); any strides. dtype: bfloat16, float32 or float64 (all products
    exact; a product of 2^128 or more is inf except in float64) or float16 (rounded, as float32 is).
    Returns [..., K] of dtype, contiguous. Raises CallError for other dtypes and for shapes that disagree.
    """
    what = "mxfp4.unpack"
    packed = as_bytes(packed)
    num_bytes = packed.shape[-1]
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    if scale.dtype != torch.uint8:
        raise CallError(what, f"scale of {scale.dtype}", "uint8", "view E8M0 scales as torch.uint8")
    if scale.shape != (*packed.shape[:-1], num_blocks):
        given = f"scale {tuple(scale.shape)} for packed {tuple(packed.shape)}"
        allowed = f"scale {(*packed.shape[:-1], num_blocks)}"
        raise CallError(what, given, allowed, "give one scale byte for each 32 elements of a row")
    if dtype == torch.float16:
        return unpack(packed, scale, torch.float32).to(torch.float16)
    if dtype not in _FORMATS:
        raise CallError(what, f"{dtype}", "bfloat16, float16, float32, float64", "convert the result")
    table = _pair_table(packed, dtype)
    blocks = F.pad(packed, (0, num_blocks * BLOCK_BYTES - num_bytes)).unflatten(-1, (num_blocks, BLOCK_BYTES))
    index = (scale.to(torch.int32) << 8).unsqueeze(-1) | blocks
    pairs = table.index_select(0, index.flatten()).view(dtype)
    return pairs.view(*packed.shape[:-1], num_blocks * BLOCK)[..., : 2 * num_bytes].contiguous()


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest MXFP4 of a float tensor [..., K] with K even.

    Returns packed uint8 [..., K / 2] and scale uint8 [..., ceil(K / 32)].
    Scale = 2^(floor(log2(largest magnitude of the block)) - 2) (specification, section 6.3), not below
    2^-127; elements are rounded to the nearest code, ties to the even code, and saturate at 6. The sign of
    zero is kept. A block of zeros gets scale byte 0. float64 is rounded to float32 first.
    Raises CallError for integer tensors, odd K, and for inf or NaN, which E2M1 cannot hold.
    """
    what = "mxfp4.quantize"
    if not weight.is_floating_point():
        raise CallError(what, f"{weight.dtype}", "a floating point dtype", "convert to float32")
    if weight.dim() == 0 or weight.shape[-1] % 2:
        given = f"shape {tuple(weight.shape)}"
        raise CallError(what, given, "an even last dimension", "pad the rows with a zero")
    num_columns = weight.shape[-1]
    num_blocks = -(-num_columns // BLOCK)
    bits = weight.to(torch.float32).contiguous().view(torch.int32)
    bits = F.pad(bits, (0, num_blocks * BLOCK - num_columns)).unflatten(-1, (num_blocks, BLOCK))
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.amax(-1, keepdim=True)
    if bool((largest >= _FLOAT32_INFINITY).any()):
        raise CallError(what, "a weight with inf or NaN", "finite values", "repair the weight first")
    # The float32 exponent field has the bias of E8M0, so the field less MAX_EXPONENT is the scale byte.
    scale = ((largest >> 23) - MAX_EXPONENT).clamp_(min=0)
    if bool(((largest > 0) & (scale < _LEAST_TABLE_SCALE)).any()):
        codes = _round_all(bits, scale)
    else:
        codes = _round_by_table(bits, scale)
    packed = pack_nibbles(codes.flatten(-2)[..., :num_columns])
    return packed, scale.squeeze(-1).to(torch.uint8)


def _round_by_table(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of float32 bit patterns in blocks [..., 32] with scale bytes [..., 1], of which none is 1 or 2.

    |weight| / scale is a shift of the exponent field. Its upper half, made odd where the lower half is not zero, is on
    the same side of each threshold: these have no bit below the upper half's second. Zeros and values whose exponent
    field is none, or falls below zero, get one below 1/4 instead: code 0 too.
    """
    shifted = (bits & 0x7FFFFFFF).sub_((scale.clamp(min=_LEAST_TABLE_SCALE) - SCALE_BIAS) << 23).clamp_(min=0)
    index = (shifted >> 16) | (((shifted & 0xFFFF) + 0xFFFF) >> 16)
    index.sub_((bits >> 31) * _HALF_TABLE)
    return _code_table(bits.device).index_select(0, index.flatten()).view(bits.shape)


def _round_all(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same for every scale, at a third of the speed."""
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((exponent > 0).to(torch.int32) << 23)
    # |weight| / scale in units of 2^-26. It is below 8; where the shift is negative it is below 1/8: code 0.
    fixed = significand << (exponent.clamp_(min=1) - scale + 3).clamp_(min=0)
    codes = (bits >> 31) & 8
    for quarters, tie_rounds_up in _THRESHOLDS:
        codes += fixed > (quarters << 24) - tie_rounds_up
    return codes


@functools.cache
def _code_table(device: torch.device) -> torch.Tensor:
    """Codes by the upper half of a positive float32 below 8, then those of negative ones."""
    value = (torch.arange(_HALF_TABLE, dtype=torch.int32) << 16).view(torch.float32) * 4
    codes = torch.zeros(_HALF_TABLE, dtype=torch.uint8)
    for quarters, tie_rounds_up in _THRESHOLDS:
        codes += value >= quarters if tie_rounds_up else value > quarters
    return torch.cat((codes, codes | 8)).to(device)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `quantize`, in the published gpt-oss layout: blocks [..., K / 32, 16], scales [..., K / 32].

    Raises CallError when K is no multiple of 32, besides what `quantize` raises.
    """
    if weight.dim() == 0 or weight.shape[-1] % BLOCK:
        given = f"shape {tuple(weight.shape)}"
        raise CallError("mxfp4.quantize_blocks", given, "a last dimension of 32 n", "pad the rows")
    packed, scale = quantize(weight)
    return packed.unflatten(-1, (-1, BLOCK_BYTES)), scale


def _pair_table(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Both values of a byte under a scale byte, at index 256 * scale + byte: 65536 pairs, on packed's device.

    Kept from call to call (256 KB for bfloat16), but never a traced tensor or one from a CUDA graph's memory
    pool.
    """
    traced = torch.compiler.is_compiling() or type(packed) not in (torch.Tensor, torch.nn.Parameter)
    if traced or (packed.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _build_pair_table(packed.device, dtype)
    key = (dtype, packed.device)
    if key not in _pair_tables:
        _pair_tables[key] = _build_pair_table(packed.device, dtype)
    return _pair_tables[key]


def _build_pair_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    byte = torch.arange(256, device=device)
    code = torch.stack((byte & 15, byte >> 4), dim=-1)
    return _product_bits(code.view(1, 256, 2), byte.view(256, 1, 1), dtype).view(_FORMATS[dtype][3]).flatten()


def _product_bits(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bit pattern in dtype of element * 2^(scale - 127), from int64 code and scale bytes, broadcast."""
    exponent_bits, mantissa_bits, integer, _ = _FORMATS[dtype]
    infinity = (1 << exponent_bits) - 1
    rebias = (1 << (exponent_bits - 1)) - 1 - SCALE_BIAS
    magnitude = code & 7
    half = (magnitude & 1) * (magnitude > 1)  # code 1, the subnormal element, is 2^-1 and not 2^-1 * 1.5
    exponent = (magnitude >> 1) - 1 + scale + rebias
    significand = (2 + half) << (mantissa_bits - 1)
    # An exponent field of 0 or -1 is a subnormal of dtype; two bits are free below the significand: still
    # exact.
    subnormal = significand >> (1 - exponent).clamp(min=0)
    normal = (exponent << mantissa_bits) | (half << (mantissa_bits - 1))
    bits = torch.where(exponent > 0, normal, subnormal)
    bits = torch.where(exponent < infinity, bits, infinity << mantissa_bits)
    bits = torch.where(magnitude > 0, bits, 0) + ((code >> 3) << (exponent_bits + mantissa_bits))
    quiet_nan = (infinity << mantissa_bits) | (1 << (mantissa_bits - 1))
    return torch.where(scale == SCALE_NAN, quiet_nan, bits).to(integer)
