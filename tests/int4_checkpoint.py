"""A small random Qwen3-MoE checkpoint with compressed-tensors INT4 and MXFP4 experts, each layer in another scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 8
SCHEMES: list[dict[str, Any]] = [
    {"strategy": "group", "group_size": 32, "symmetric": True},
    {"strategy": "group", "group_size": 64, "symmetric": True},
    {"strategy": "group", "group_size": 128, "symmetric": True},
    {"strategy": "channel", "group_size": None, "symmetric": True},
    {"strategy": "group", "group_size": 32, "symmetric": False},
    {"strategy": "group", "group_size": 32, "symmetric": True, "type": "float", "scale_dtype": "torch.uint8"},
]
"""One layer each; "float" is MXFP4, the others INT4."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_IDS = {"eos_token_id": 256, "pad_token_id": 256, "bos_token_id": 256}


def _pack_rows(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] -> int32 [N, K / 8], low nibble first."""
    words = (codes.to(torch.int64).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _quantize(rows: int, columns: int, scheme: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of one projection, named as in the checkpoint, and the values they stand for, fp32."""
    group = scheme["group_size"] or columns
    codes = torch.randint(0, 16, (rows, columns))
    if scheme.get("type") == "float":
        exponent = torch.randint(119, 122, (rows, columns // group))
        values = _E2M1[codes].unflatten(-1, (-1, group)) * 2.0 ** (exponent[..., None] - 127)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}, values.flatten(1)
    scale = (torch.rand(rows, columns // group) * 0.02 + 0.005).to(torch.bfloat16)
    zero = torch.full_like(scale, 8.0)
    tensors = {"weight_packed": _pack_rows(codes), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if not scheme["symmetric"]:
        zero = torch.randint(4, 12, scale.shape).float()
        tensors["weight_zero_point"] = _pack_rows(zero.T).T.contiguous()
    values = (codes.unflatten(-1, (-1, group)) - zero.float()[..., None]) * scale.float()[..., None]
    return tensors, values.flatten(1)


def write(folder: Path) -> dict[str, Tensor]:
    """Writes config, tokenizer and tensors; returns the state of the same model with its experts unpacked, fp32."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

    torch.manual_seed(7)
    folder.mkdir(parents=True, exist_ok=True)
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=len(SCHEMES),
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        **_IDS,
    ).to_dict()
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    groups = {
        f"group_{layer}": {
            "targets": [f"re:.*layers\\.{layer}\\.mlp\\.experts.*"],
            "weights": {"num_bits": 4, "type": "int", "dynamic": False, "observer": "minmax", **scheme},
            "format": "mxfp4-pack-quantized" if scheme.get("type") == "float" else "pack-quantized",
        }
        for layer, scheme in enumerate(SCHEMES)
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(_IDS))

    def dense(*shape: int, std: float = 0.06) -> Tensor:
        return (torch.randn(*shape) * std).to(torch.bfloat16)

    packed = {"model.embed_tokens.weight": dense(512, HIDDEN, std=1.0), "lm_head.weight": dense(512, HIDDEN)}
    packed["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    unpacked = {}
    for layer, scheme in enumerate(SCHEMES):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            packed[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            packed[f"{prefix}self_attn.{name}.weight"] = dense(rows, HIDDEN)
        packed[f"{prefix}self_attn.o_proj.weight"] = dense(HIDDEN, 256)
        for name in ("q_norm", "k_norm"):
            packed[f"{prefix}self_attn.{name}.weight"] = torch.ones(64, dtype=torch.bfloat16)
        packed[f"{prefix}mlp.gate.weight"] = dense(EXPERTS, HIDDEN, std=0.3)  # routes that are no near-ties
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", (INTERMEDIATE, HIDDEN)),
                ("up_proj", (INTERMEDIATE, HIDDEN)),
                ("down_proj", (HIDDEN, INTERMEDIATE)),
            ):
                tensors, values = _quantize(*shape, scheme)
                base = f"{prefix}mlp.experts.{expert}.{name}."
                packed |= {base + key: tensor for key, tensor in tensors.items()}
                unpacked[base + "weight"] = values
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    return {key: value.float() for key, value in packed.items() if ".experts." not in key} | unpacked


def write_plain(packed: Path, state: dict[str, Tensor], folder: Path) -> None:
    """The same model with the same weight values in bf16, for servers that cannot read the packed one."""
    folder.mkdir(parents=True)
    for file in packed.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reference_model(folder: Path, state: dict[str, Tensor]) -> Any:
    """The transformers model in fp32 with the given state."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).float().eval()
    # transformers keeps a layer's experts in one tensor: gate rows, then up rows.
    merged = {key: value for key, value in state.items() if ".experts." not in key}
    for layer in range(len(SCHEMES)):
        prefix = f"model.layers.{layer}.mlp.experts."

        def stack(*names: str, prefix: str = prefix) -> Tensor:
            rows = [[state[f"{prefix}{e}.{name}.weight"] for name in names] for e in range(EXPERTS)]
            return torch.stack([torch.cat(parts) for parts in rows])

        merged[prefix + "gate_up_proj"] = stack("gate_proj", "up_proj")
        merged[prefix + "down_proj"] = stack("down_proj")
    model.load_state_dict(merged)
    return model
