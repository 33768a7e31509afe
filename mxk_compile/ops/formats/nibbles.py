"""Two four-bit codes in a byte, the low nibble the even element: the order of every format here.

A 32-bit word of eight codes is the same four bytes, little endian: nibble i of word w is element 8w + i.
"""

from __future__ import annotations

import torch

from mxk_compile.errors import CallError


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, any integer dtype, [..., n] with n even, to uint8 [..., n / 2].

    Bits above the fourth are dropped: two's complement codes may be given signed.
    Raises CallError when n is odd.
    """
    if codes.dim() == 0 or codes.shape[-1] % 2:
        given = f"codes of shape {tuple(codes.shape)}"
        raise CallError("pack_nibbles", given, "an even last dimension", "pad the last dimension by one")
    nibbles = (codes & 15).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [..., n] or int32 [..., n] to codes 0..15, uint8 [..., 2n] or [..., 8n]."""
    packed = as_bytes(packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., r, n], each word eight codes of a column, to codes 0..15, uint8 [..., 8r, n]."""
    return unpack_nibbles(packed.transpose(-1, -2)).transpose(-1, -2)


def as_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 as it is; int32 [..., n] as uint8 [..., 4n], a view where the last dimension is dense.

    Raises CallError for any other dtype.
    """
    if packed.dtype == torch.uint8:
        return packed
    if packed.dtype != torch.int32 or packed.dim() == 0:
        given = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise CallError("packed weight", given, "uint8 or int32", "view the packed bytes as torch.uint8")
    dense = packed if packed.stride(-1) == 1 else packed.contiguous()
    return dense.view(torch.uint8)


def as_words(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4n] as int32 [..., n], the same bytes; copied where they are not dense.

    Raises CallError when the last dimension is no multiple of four bytes.
    """
    if packed.shape[-1] % 4:
        given = f"{packed.shape[-1]} bytes a row"
        raise CallError(
            "packed weight", given, "a multiple of 4 for int32 storage", "keep the bytes as uint8"
        )
    # Flat first: a dimension of length 1 may have any stride, which a view as wider elements would stumble over.
    return packed.flatten().view(torch.int32).view(*packed.shape[:-1], packed.shape[-1] // 4)
