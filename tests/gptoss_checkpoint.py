"""Writes small random checkpoints in the layout of openai/gpt-oss-20b: config, safetensors, index, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

TINY = {
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "initial_context_length": 128,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}
"""Changes of the published config that make a model of a few hundred kilobytes."""


def published_config(**changes: Any) -> dict[str, Any]:
    """config.json of openai/gpt-oss-20b, with changes."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    config.update(changes)
    count = config["num_hidden_layers"]
    config["layer_types"] = [("sliding_attention", "full_attention")[index % 2] for index in range(count)]
    if config["vocab_size"] < 200002:
        config["eos_token_id"], config["pad_token_id"] = 0, 1
    return config


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor that the published layout has for a config."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    bf16, u8 = torch.bfloat16, torch.uint8
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (bf16, (config["vocab_size"], hidden))
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (bf16, (hidden,))
        shapes[f"{layer}.post_attention_layernorm.weight"] = (bf16, (hidden,))
        for name, rows, columns in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (bf16, (rows, columns))
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (bf16, (rows,))
        shapes[f"{layer}.self_attn.sinks"] = (bf16, (config["num_attention_heads"],))
        shapes[f"{layer}.mlp.router.weight"] = (bf16, (experts, hidden))
        shapes[f"{layer}.mlp.router.bias"] = (bf16, (experts,))
        for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            shapes[f"{layer}.mlp.experts.{name}_blocks"] = (u8, (experts, rows, columns // 32, 16))
            shapes[f"{layer}.mlp.experts.{name}_scales"] = (u8, (experts, rows, columns // 32))
            shapes[f"{layer}.mlp.experts.{name}_bias"] = (bf16, (experts, rows))
    shapes["model.norm.weight"] = (bf16, (hidden,))
    shapes["lm_head.weight"] = (bf16, (config["vocab_size"], hidden))
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors one by one; scaled so that activations keep a size of about one through the layers."""
    generator, random_bytes = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    for name, (dtype, shape) in tensor_shapes(config).items():
        if name.endswith("_blocks"):
            # numpy, as torch makes random bytes at a tenth of the speed
            count = math.prod(shape)
            tensor = torch.from_numpy(np.frombuffer(random_bytes.bytes(count), np.uint8).copy()).view(shape)
        elif name.endswith("_scales"):
            # Codes have a root mean square of about 2.9; a row of n of them should have one of about 1 / sqrt(n).
            middle = 127 - round(math.log2(2.9 * math.sqrt(32 * shape[-1])))
            tensor = torch.randint(middle - 1, middle + 2, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("norm.weight"):
            tensor = 1 + 0.1 * torch.randn(shape, generator=generator)
        elif name.endswith(("bias", "sinks")):
            tensor = 0.1 * torch.randn(shape, generator=generator)
        else:
            fan = 1.0 if "embed" in name else shape[-1] ** -0.5
            tensor = fan * torch.randn(shape, generator=generator)
        yield name, tensor.to(dtype)


def write(folder: Path, config: dict[str, Any], shard_bytes: int | None = None, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors, or shards of about shard_bytes with their index; returns folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    limit = shard_bytes or math.inf

    def flush(number: int) -> None:
        name = f"model-{number:05d}-of-shards.safetensors" if shard_bytes else "model.safetensors"
        weight_map.update(dict.fromkeys(shards[0], name))
        save_file(shards[0], folder / name, metadata={"format": "pt"})
        shards[0] = {}

    number = 1
    for name, tensor in random_tensors(config, seed):
        if shards[0] and sum(t.nbytes for t in shards[0].values()) + tensor.nbytes > limit:
            flush(number)
            number += 1
        shards[0][name] = tensor
    flush(number)
    if shard_bytes:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges: ids 0 and 1 are end and pad, every byte is one more token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|endoftext|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    assert len(words) <= vocab_size
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0], pad_token=words[1])
    fast.save_pretrained(folder)


def write_tiny(folder: Path, shard_bytes: int | None = None, **changes: Any) -> Path:
    """A complete tiny checkpoint with a tokenizer."""
    config = published_config(**{**TINY, **changes})
    write(folder, config, shard_bytes)
    write_tokenizer(folder, config["vocab_size"])
    return folder
