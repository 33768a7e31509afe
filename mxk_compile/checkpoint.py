"""Expert weights of a checkpoint, kept packed: the bytes of its files, stacked over the experts of a layer.

    with Checkpoint("directory") as checkpoint:
        experts = checkpoint.experts("model.layers.0.mlp.experts")

Schemes (`quantization_config` in config.json names one, or the caller does):
    "gpt_oss"             gate_up_proj_blocks [E, 2I, K/32, 16], gate_up_proj_scales, gate_up_proj_bias, and down_proj_*
    "mxfp4"               stacks [E, 2I, K/2] and [E, K, I/2], as `mxk quantize` writes them; of other writers the
                          caller states the row order, which shapes cannot tell
    "compressed_tensors"  pack-quantized INT4: experts.{e}.gate_proj.weight_packed, .weight_scale, .weight_zero_point,
                          or the stacks that servers make of it: experts.w13_weight_packed, .w13_weight_scale, ...
    "gptq"                GPTQ INT4 without activation order: experts.{e}.gate_proj.qweight, .qzeros, .scales, .g_idx
    "awq"                 AWQ INT4, version "gemm": experts.{e}.gate_proj.qweight, .qzeros, .scales
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.checkpoint_int4 import GPTQ_FORMATS, Int4Layer
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES
from mxk_compile.variants import STACKED_ROW_ORDERS

SCHEMES = ("gpt_oss", "mxfp4", "compressed_tensors", "gptq", "awq")
_SCHEME_OF_METHOD = {
    "mxfp4": "gpt_oss",
    "mxfp4_stacked": "mxfp4",
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptq",
    "awq": "awq",
}
_STACKED_NAMES = (("gate_up_proj", "down_proj"), ("w13_weight", "w2_weight"))
_E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The experts of one layer, as `mxk::moe` takes them (E experts, hidden size K, intermediate size I).

    w13: uint8 [E, 2I, K/2] with rows in `row_order`; w2: uint8 [E, K, I/2]. w13_scale, w2_scale: [E, rows, groups],
    uint8 E8M0 for "mxfp4", else bfloat16, float16 or float32 as in the file. w13_zero, w2_zero: uint8 like the
    scale, None for symmetric weights (8). w13_bias [E, 2I], w2_bias [E, K]: as in the file, or None.
    Stacks that a server packed along the outputs have pack_dim "output" and its layouts (ops/moe.py).
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w13_zero: torch.Tensor | None
    w2_zero: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    weight_format: str
    row_order: str
    pack_dim: str = "input"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))


class Checkpoint(TensorFiles):
    """A checkpoint: `config`, `names()`, `tensor(name)` and `experts(prefix)`; see `TensorFiles` for the files.

    A load of more than two seconds shows a progress bar on a terminal; leaving the `with` block ends it.
    """

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def experts(
        self,
        prefix: str,
        *,
        scheme: str | None = None,
        row_order: str | None = None,
        gptq_format: str | None = None,
        scale_bias: int = mxfp4.SCALE_BIAS,
    ) -> PackedExperts:
        """Read the experts of one layer; prefix is for example "model.layers.0.mlp.experts".

        scheme: one of SCHEMES, by default what `quantization_config` names. row_order: with scheme "mxfp4" one of
        STACKED_ROW_ORDERS, by default what `quantization_config` names, else None. gptq_format: "gptq" or "gptq_v2"
        to overrule a wrong label in the file.
        scale_bias: 125 for MXFP4 files of writers that used that bias; by default no scale byte is changed.
        Peak memory is the packed bytes and one more tensor. Raises CheckpointError for anything missing,
        contradictory or unknown: one line with file, tensor, what is there and what is allowed.
        """
        scheme = self._scheme(prefix) if scheme is None else scheme
        if scheme == "mxfp4" and row_order is None:
            row_order = self.quantization().get("row_order")
        if scheme not in SCHEMES:
            self.refuse(prefix, f"scheme {scheme!r}", ", ".join(SCHEMES), "name the scheme of the checkpoint")
        if row_order not in (STACKED_ROW_ORDERS if scheme == "mxfp4" else (None,)):
            allowed = f"{', '.join(STACKED_ROW_ORDERS)} for scheme 'mxfp4', None for every other"
            self.refuse(
                prefix, f"row_order={row_order!r} for scheme {scheme!r}", allowed, "state the row order"
            )
        if type(scale_bias) is not int or not 0 <= scale_bias < mxfp4.SCALE_NAN:
            allowed = f"0 to {mxfp4.SCALE_NAN - 1}, {mxfp4.SCALE_BIAS} in files of the standard"
            self.refuse(prefix, f"scale_bias={scale_bias!r}", allowed, "leave it out")
        if gptq_format is not None and (scheme != "gptq" or gptq_format not in tuple(GPTQ_FORMATS)):
            allowed = f"{', '.join(GPTQ_FORMATS)} for scheme 'gptq', None for every other"
            self.refuse(prefix, f"gptq_format={gptq_format!r}", allowed, "leave it to the metadata")
        if scheme in ("gpt_oss", "mxfp4"):
            return _read_mxfp4(self, prefix, row_order, scale_bias)
        if scale_bias != mxfp4.SCALE_BIAS:
            self.refuse(
                prefix, f"scale_bias={scale_bias} for scheme {scheme!r}", "MXFP4 schemes", "leave it out"
            )
        layer = Int4Layer(self, prefix, scheme, self.quantization(), gptq_format)
        return PackedExperts(**layer.read(self.num_experts()), weight_format="uint4", row_order="gate_up")

    def quantization(self) -> dict[str, Any]:
        """Return `quantization_config` of config.json, of its text_config where that has it, or {}."""
        text = self.config.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, dict) else None
        found = self.config.get("quantization_config") or nested or {}
        if not isinstance(found, dict):
            self._refuse_config(f"quantization_config {found!r}", "a JSON object")
        return found

    def num_experts(self) -> int | None:
        """Return the number of routed experts that config.json gives, None where it gives none."""
        for config in (self.config, self.config.get("text_config")):
            for key in ("num_local_experts", "num_experts", "n_routed_experts"):
                value = config.get(key) if isinstance(config, dict) else None
                if value is None:
                    continue
                if type(value) is not int or value < 1:
                    self._refuse_config(f"{key} {value!r}", "a number of at least 1")
                return value
        return None

    def _refuse_config(self, given: str, allowed: str) -> NoReturn:
        raise CheckpointError(str(self.directory / "config.json"), given, allowed, "repair it")

    def _scheme(self, prefix: str) -> str:
        method = self.quantization().get("quant_method")
        if method not in tuple(_SCHEME_OF_METHOD):
            what = f"{self.directory / 'config.json'}: quantization_config of {prefix}"
            advice = f"pass scheme= with one of {', '.join(SCHEMES)}"
            raise CheckpointError(what, f"quant_method {method!r}", ", ".join(_SCHEME_OF_METHOD), advice)
        return _SCHEME_OF_METHOD[method]


def _read_mxfp4(files: Checkpoint, prefix: str, row_order: str | None, scale_bias: int) -> PackedExperts:
    """Schemes "gpt_oss" (row_order None) and "mxfp4": tensors that are stacked in the file already."""
    is_gpt_oss = row_order is None
    names = _STACKED_NAMES[0]
    if is_gpt_oss:
        suffix, scale_suffix = "_blocks", "_scales"
    else:
        suffix, scale_suffix = "", "_scale"
        names = next((pair for pair in _STACKED_NAMES if f"{prefix}.{pair[0]}" in files), names)
    w13_name, w2_name = (f"{prefix}.{name}" for name in names)

    def expect(name: str, shape: tuple[int | None, ...]) -> tuple[int, int, int]:
        """Check weight and scale [E, rows, columns]; returns that shape."""
        experts, rows, columns = shape
        half = None if columns is None else columns // 2
        if is_gpt_oss:
            blocks = None if columns is None else -(-columns // mxfp4.BLOCK)
            found = files.expect(name + suffix, (torch.uint8,), (experts, rows, blocks, mxfp4.BLOCK_BYTES))
            found = (*found[:2], found[2] * mxfp4.BLOCK)
        else:
            found = files.expect(name + suffix, (torch.uint8,), (experts, rows, half))
            found = (*found[:2], found[2] * 2)
        files.expect(name + scale_suffix, _E8M0_DTYPES, (*found[:2], -(-found[2] // mxfp4.BLOCK)))
        return found[0], found[1], found[2]

    num_experts, num_rows, hidden_size = expect(w13_name, (files.num_experts(), None, None))
    row_step = 2 * (mxfp4.BLOCK if is_gpt_oss else 2)  # gate and up, each as long as a packed row of w2
    if num_rows % row_step:
        allowed = f"a multiple of {row_step}"
        files.refuse(w13_name + suffix, f"{num_rows} rows", allowed, "check that the file holds gate and up")
    expect(w2_name, (num_experts, hidden_size, num_rows // 2))
    bias_names = [name.removesuffix("_weight") + "_bias" for name in (w13_name, w2_name)]
    has_bias = is_gpt_oss or any(name in files for name in bias_names)
    if has_bias:
        files.expect(bias_names[0], FLOAT_DTYPES, (num_experts, num_rows))
        files.expect(bias_names[1], FLOAT_DTYPES, (num_experts, hidden_size))

    def weight(name: str) -> torch.Tensor:
        tensor = files.tensor(name + suffix)
        return tensor.flatten(-2) if is_gpt_oss else tensor

    def scale(name: str) -> torch.Tensor:
        return _shift_scale(files, name + scale_suffix, scale_bias)

    return PackedExperts(
        w13=weight(w13_name),
        w13_scale=scale(w13_name),
        w2=weight(w2_name),
        w2_scale=scale(w2_name),
        w13_zero=None,
        w2_zero=None,
        w13_bias=files.tensor(bias_names[0]) if has_bias else None,
        w2_bias=files.tensor(bias_names[1]) if has_bias else None,
        weight_format="mxfp4",
        row_order="interleaved" if row_order is None else row_order,
    )


def _shift_scale(files: Checkpoint, name: str, scale_bias: int) -> torch.Tensor:
    """Read scale bytes; of a file with another bias than 127 they are moved to 127, NaN stays."""
    scale = files.tensor(name).view(torch.uint8)
    shift = mxfp4.SCALE_BIAS - scale_bias
    if shift:
        is_nan = scale == mxfp4.SCALE_NAN
        moved = scale.to(torch.int16) + shift
        if bool(((moved < 0) | (moved >= mxfp4.SCALE_NAN)).logical_and_(~is_nan).any()):
            given = f"a scale byte that leaves 0..254 when moved by {shift}"
            files.refuse(name, given, "bytes of that bias", f"check that scale_bias={scale_bias} is right")
        scale = torch.where(is_nan, mxfp4.SCALE_NAN, moved).to(torch.uint8)
    return scale
