"""Checkpoint files that nobody would write by accident: one line that names the file, whatever is in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gptoss_checkpoint as gptoss
import pytest

import mxk_compile
from mxk_compile.errors import CheckpointError

pytest.importorskip("transformers")
from mxk_compile.integrations import transformers as models


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return gptoss.write_tiny(tmp_path)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("architectures", (5, [["x"]], "GptOssForCausalLM"), "architecture .*in a list"),
        ("num_hidden_layers", ("x", -1, 0, 7, 10**12), "num_hidden_layers"),
        ("layer_types", (["x"] * 2, ["full_attention"], "x", ["linear_attention"] * 2), "layer_types"),
        ("swiglu_limit", ("abc", -7.0, math.nan), "swiglu_limit"),
        ("swiglu_alpha", ("abc", math.nan), "swiglu_alpha"),
        ("quantization_config", ("x", {"quant_method": "awq"}, {"bits": 4}), "quant"),
        ("dtype", ("zzz",), "zzz"),
        ("num_attention_heads", (0, 3), "num_attention_heads 0|num_key_value_heads 2.*divisor of 3"),
        ("head_dim", (0, 15, None), "head_dim"),
        ("hidden_size", (0, -4), "hidden_size"),
        ("vocab_size", (-1, 10**15), "vocab_size|embed_tokens"),
        ("pad_token_id", (10**9,), "within num_embeddings"),
        ("rope_scaling", ({"rope_type": "zzz"}, [1]), "zzz|rope"),
        ("attn_implementation", ("zzz", "someone/kernel"), "_attn_implementation .*eager"),
        ("num_experts_per_tok", (100, 0), "num_experts_per_tok"),
        ("sliding_window", (-5, 0, None), "sliding_window"),
        ("hidden_act", ("gelu", "zzz"), "hidden_act .*silu"),
        ("eos_token_id", ("abc", ["a"]), "eos_token_id"),
    ],
)
def test_hostile_values_of_the_config_are_one_line(
    copy: Path, key: str, values: tuple[Any, ...], message: str
) -> None:
    config = json.loads((copy / "config.json").read_text())
    for value in values:
        (copy / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=message) as raised:
            mxk_compile.load(copy)
        assert str(raised.value).startswith(str(copy))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        (
            "generation_config.json",
            (b"\xff\0", b"[]", b'{"eos_token_id": "abc"}', b'{"eos_token_id": ["a"]}', b"[" * 100_000),
        ),
        (
            "tokenizer.json",
            (b"\xff\0", b"{}", b"[]", b'{"version": "1.0", "model": {"type": "BPE", "merges": ["a"]}}'),
        ),
        ("tokenizer_config.json", (b"\xff", b"[]", b"5")),
    ],
)
def test_hostile_files_beside_the_config_are_one_line(
    copy: Path, name: str, contents: tuple[bytes, ...]
) -> None:
    read = mxk_compile.load if name.startswith("generation") else models.load_tokenizer
    for content in contents:
        (copy / name).write_bytes(content)
        with pytest.raises(
            CheckpointError, match="that transformers reads|what transformers reads"
        ) as raised:
            read(copy)
        assert "\n" not in str(raised.value)
