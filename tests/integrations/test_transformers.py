"""Loading gpt-oss checkpoints, parity with transformers' own experts, and decoding through the backend."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gptoss_checkpoint as gptoss
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mxk_compile
from mxk_compile.checkpoint import Checkpoint
from mxk_compile.errors import CallError, CheckpointError
from mxk_compile.integrations.stock_experts import StockExperts, stock_experts

pytest.importorskip("transformers")
from mxk_compile.integrations import transformers as models

LAYERS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
AOT = {"backend": "mxk", "options": {"inner_backend": "aot_eager"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gptoss.write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return mxk_compile.load(folder)


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 250, (1, 40), generator=torch.Generator().manual_seed(0))


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, N, K/32, 16] and [E, N, K/32] -> bf16 [E, K, N] as transformers has it; by definition, in fp64."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    data = blocks.numpy()
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 32)
    weight = values[codes] * np.exp2(scales.numpy().astype(np.float64) - 127)[..., None]
    result = torch.from_numpy(weight.reshape(*data.shape[:2], -1)).transpose(1, 2)
    assert torch.equal(result.bfloat16().double(), result)
    return result.bfloat16().contiguous()


def plain_model(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model with unpacked experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig.from_pretrained(folder)
    plain = GptOssForCausalLM(config).eval()
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        weights[stem] = unpacked(weights.pop(name), weights.pop(f"{stem}_scales"))
    plain.load_state_dict(weights, strict=True)
    plain.to(dtype)
    # Rotary frequencies stay fp32, as from_pretrained leaves them.
    plain.model.rotary_emb = type(plain.model.rotary_emb)(config)
    return plain


def rel_l2(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def test_the_experts_are_the_bytes_of_the_file(folder: Path, model: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    experts = stock_experts(model)
    assert list(experts) == LAYERS
    for name, module in experts.items():
        parts = {
            "w13_weight": weights[f"{name}.gate_up_proj_blocks"].flatten(-2),
            "w13_weight_scale": weights[f"{name}.gate_up_proj_scales"],
            "w13_bias": weights[f"{name}.gate_up_proj_bias"],
            "w2_weight": weights[f"{name}.down_proj_blocks"].flatten(-2),
            "w2_weight_scale": weights[f"{name}.down_proj_scales"],
            "w2_bias": weights[f"{name}.down_proj_bias"],
        }
        for part, expected in parts.items():
            assert torch.equal(getattr(module, part), expected), part
        assert module.w13_weight.shape == (8, 192, 32)
        assert module.w2_weight.shape == (8, 64, 48)


def test_the_model_is_complete_and_for_inference(folder: Path, model: Any) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors.values())
    assert not model.training
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    plain = plain_model(folder, torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, plain.model.rotary_emb.original_inv_freq)
    # Nothing unpacked anywhere: the experts take 4.25 bits a weight and their biases.
    weights = 8 * 3 * 64 * 96
    assert (
        sum(b.nbytes for b in stock_experts(model)[LAYERS[0]].buffers()) == weights * 17 // 32 + 8 * 256 * 2
    )


def test_logits_are_those_of_transformers_with_unpacked_experts(
    folder: Path, model: Any, ids: torch.Tensor
) -> None:
    with torch.no_grad():
        exact = plain_model(folder, torch.float32)(input_ids=ids).logits
        plain = plain_model(folder, torch.bfloat16)(input_ids=ids).logits
        logits = model(input_ids=ids).logits
    assert exact.std() > 0.5
    # The same steps in bf16, so the same error; a wrong nibble, row or expert gives about 1.
    assert rel_l2(logits, exact) < 1.3 * rel_l2(plain, exact) < 0.05


def test_float32_keeps_the_dense_part_exact(folder: Path, ids: torch.Tensor) -> None:
    model = mxk_compile.load(folder, dtype=torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        plain = plain_model(folder, torch.float32)(input_ids=ids).logits
    assert logits.dtype == torch.float32
    # What is left is the bf16 of the experts.
    assert rel_l2(logits, plain) < 1e-2


def test_limit_and_alpha_come_from_the_config(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "swiglu_limit": 3.5}))
    experts = stock_experts(mxk_compile.load(copy))[LAYERS[0]]
    assert (experts.alpha, experts.limit) == (1.702, 3.5)
    inputs = 8 * torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1]] * 3), torch.ones(3, 2).bfloat16()
    clamped, experts.limit = experts(*inputs), math.inf
    assert rel_l2(clamped, experts(*inputs)) > 0.01


def test_shards_and_tied_embeddings(folder: Path, model: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    sharded = gptoss.write_tiny(tmp_path, shard_bytes=60_000, tie_word_embeddings=True)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    tied = mxk_compile.load(sharded)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    with torch.no_grad():
        hidden = [one.model(input_ids=ids).last_hidden_state for one in (tied, model)]
    assert torch.equal(*hidden)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("model.layers.1.mlp.experts.down_proj_scales", "model.layers.1.mlp.experts.down_proj_scales"),
        ("model.layers.0.self_attn.sinks", "model.layers.0.self_attn.sinks"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_missing_tensors_are_named(copy: Path, name: str, gone: str) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights[name]
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing {gone}; allowed: exactly the \d+ tensors"):
        mxk_compile.load(copy)


def test_unexpected_tensors_are_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    save_file(
        {**weights, "model.layers.2.input_layernorm.weight": torch.ones(64)}, copy / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"unexpected model.layers.2.input_layernorm.weight"):
        mxk_compile.load(copy)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    folder = gptoss.write_tiny(tmp_path, shard_bytes=60_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        mxk_compile.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'; allowed: GptOssForCausalLM"),
        ({"architectures": []}, "'gpt_oss'; allowed: GptOssForCausalLM"),
        ({"num_local_experts": 16}, r"mlp\.(experts|router)"),
        ({"intermediate_size": 128}, r"mlp\.experts.*config.json"),
        ({"num_hidden_layers": 3}, r"missing model.layers.2.*and \d+ more"),
        ({"head_dim": 32}, "self_attn"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copy: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    if "num_hidden_layers" in change:
        change = {**change, "layer_types": ["full_attention"] * 3}
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message) as raised:
        mxk_compile.load(copy)
    assert "\n" not in str(raised.value)


def test_other_mistakes_are_one_line(folder: Path, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CallError, match="float16.*allowed: torch.bfloat16, torch.float32"):
        mxk_compile.load(folder, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="no such directory"):
        mxk_compile.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="a file, not a directory"):
        mxk_compile.load(copy / "config.json")
    with pytest.raises(CheckpointError, match="File name too long"):
        mxk_compile.load(tmp_path / ("a" * 5000))
    packed = Checkpoint(copy).experts(LAYERS[0])
    with pytest.raises(CallError, match="experts without biases"):
        StockExperts(replace(packed, w2_bias=None), 1.702, 7.0, torch.device("cpu"))
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        mxk_compile.load(copy)
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        models.load_tokenizer(copy)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_decode_compiles_once_and_follows_the_stock_path(
    model: Any, ids: torch.Tensor, dynamic: bool | None, fresh_compiler: None
) -> None:
    stock = models.Session(model, 64)
    fused = models.Session(model, 64, torch.compile(model, dynamic=dynamic, fullgraph=True, **AOT))
    # Across the sliding window of 24, and again after a reset and from another prompt length.
    for prompt in (20, 9):
        tokens = ids[0].tolist()
        for session in (stock, fused):
            session.reset()
            session.feed(tokens[:prompt])
        for token in tokens[prompt:]:
            assert rel_l2(fused.feed([token]), stock.feed([token])) < 2e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_session_agrees_with_one_forward(model: Any, ids: torch.Tensor) -> None:
    session = models.Session(model, 40)
    tokens = ids[0].tolist()
    session.feed(tokens[:7])
    steps = torch.stack([session.feed([token]) for token in tokens[7:]])
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0, 7:]
    assert rel_l2(steps, whole) < 2e-2
    with pytest.raises(CallError, match="300 tokens after 40"):
        session.feed([2] * 300)
    for token in (-1, 320):
        with pytest.raises(CallError, match=f"tokens {token} to {token}; allowed: 0 to 319"):
            session.feed([token])


def test_greedy_yields_the_most_probable_token_and_stops(model: Any, ids: torch.Tensor) -> None:
    prompt = ids[0, :10].tolist()
    pairs = list(models.greedy(models.Session(model, 20), prompt, 10))
    assert [int(logits.argmax()) for _, logits in pairs] == [token for token, _ in pairs]
    expected = model.generate(ids[:, :10], do_sample=False, max_new_tokens=10, eos_token_id=-1)[
        0, 10:
    ].tolist()
    assert [token for token, _ in pairs][:3] == expected[:3]
    stop = expected[2]
    assert [
        token for token, _ in models.greedy(models.Session(model, 20), prompt, 10, stop=[stop])
    ] == expected[:2]


@pytest.mark.parametrize(("num_tokens", "num_fused"), [(1, 2), (32, 2), (33, 0)])
def test_layers_are_fused_up_to_the_cap(model: Any, num_tokens: int, num_fused: int) -> None:
    ids = torch.full((1, num_tokens), 5)
    report = mxk_compile.explain(model, input_ids=ids, use_cache=False)
    assert [node.layer for node in report.nodes] == LAYERS
    assert report.num_fused == num_fused


def test_generate_of_transformers_runs_on_the_compiled_model(
    folder: Path, ids: torch.Tensor, fresh_compiler: None
) -> None:
    model = mxk_compile.load(folder)
    model.compile(**AOT)
    # From inside the sliding window of 24 to beyond it.
    tokens = model.generate(
        ids[:, :20], do_sample=False, max_new_tokens=12, cache_implementation="static", eos_token_id=-1
    )
    stats = torch._dynamo.utils.counters
    # The prompt, and decode before and after the window is full.
    assert stats["stats"]["unique_graphs"] <= 1 + 3
    assert not stats["graph_break"]
    with torch.no_grad():
        logits = mxk_compile.load(folder)(input_ids=tokens).logits[0, 19:-1]
    # Each was the most probable one for the stock path too, up to rounding.
    assert (logits.max(-1).values - logits.gather(-1, tokens[0, 20:, None])[:, 0]).max() < 0.1


_LOAD_20B = """
import re, sys, torch, mxk_compile, transformers
def peak():  # not ru_maxrss: that begins with the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = peak()
model = mxk_compile.load(sys.argv[1])
grown = peak() - before
tensors = [*model.parameters(), *model.buffers()]
print(grown, sum(t.nbytes for t in tensors), max(t.nbytes for t in tensors))
report = mxk_compile.explain(model, input_ids=torch.tensor([[5]]), use_cache=False)
print(report.num_fused, len(report.nodes))
with torch.no_grad():
    print(bool(model(input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_directory_like_openai_gpt_oss_20b(tmp_path: Path) -> None:
    """The published config and layout in shards, with 2 of 24 layers and a vocabulary of 2048 instead of 201088."""
    config = gptoss.published_config(num_hidden_layers=2, vocab_size=2048)
    folder = gptoss.write(tmp_path, config, shard_bytes=300_000_000)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    run = subprocess.run(
        [sys.executable, "-c", _LOAD_20B, str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    sizes, fused, finite = run.stdout.splitlines()
    grown, total, largest = map(int, sizes.split())
    assert total > 850_000_000
    # Once the tensors, one more, and what a first use of torch and transformers takes.
    assert 0.9 * total < grown < total + largest + 150_000_000
    assert fused.split() == ["2", "2"]
    assert finite == "True"
