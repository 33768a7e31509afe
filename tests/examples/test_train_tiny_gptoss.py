"""The training script's replaced forwards against transformers' own, and the shipped model against its README."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import scripts
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-gptoss"


corpus = scripts.load("examples/tiny_gptoss_corpus.py")  # first: the script imports it, as it lies beside it
script = scripts.load("examples/train_tiny_gptoss.py")


@pytest.fixture
def small_model() -> Any:
    torch.manual_seed(0)
    config = script.tiny_config(64)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]  # one sliding, one full
    config.num_local_experts = 6
    config._attn_implementation = config._experts_implementation = "eager"  # in loops of plain products
    model = script.GptOssForCausalLM(config).double().eval()  # so that rounding hides nothing
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.1 if parameter.dim() > 1 else 0.5)
    return model


def logits_and_gradients(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def test_training_forward_equals_the_stock_one(small_model: Any) -> None:
    tokens = torch.randint(0, 64, (2, 150))  # longer than the sliding window of 128
    logits, gradients = logits_and_gradients(small_model, tokens)
    state = script.TrainingState()
    script.install(small_model, state)
    got_logits, got_gradients = logits_and_gradients(small_model, tokens)
    assert relative(got_logits, logits) < 1e-5
    for name, gradient in gradients.items():
        if not name.endswith("k_proj.bias"):  # softmax barely depends on it: the gradient is rounding noise
            assert relative(got_gradients[name], gradient) < 1e-3, name
    assert len(state.balance) == 2


def test_fake_quantisation_is_what_the_export_writes(small_model: Any) -> None:
    tokens = torch.randint(0, 64, (1, 40))
    # Master weights that are bf16 values, as the export rounds them before it quantises.
    weights = {name: tensor.bfloat16() for name, tensor in small_model.state_dict().items()}
    packed = script.pack_experts(weights)
    small_model.load_state_dict(
        {name: tensor.float() for name, tensor in script.unpack_experts(packed).items()}
    )
    want = small_model(input_ids=tokens, use_cache=False).logits
    small_model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    unquantised = small_model(input_ids=tokens, use_cache=False).logits
    script.install(small_model, script.TrainingState(fake_quantise=True))
    got = small_model(input_ids=tokens, use_cache=False).logits
    assert relative(got, want) < 1e-5
    assert relative(unquantised, want) > 1e-2


def test_fake_quantisation_passes_the_gradient_through() -> None:
    weight = torch.randn(2, 64, 3, requires_grad=True)
    rounded = script.through_mxfp4(weight)
    rounded.sum().backward()
    assert not torch.equal(rounded, weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_windows_cover_the_stream_once_an_epoch() -> None:
    stream = torch.arange(script.CONTEXT * 5, dtype=torch.int16)
    batches = script.windows(stream, 2, torch.Generator().manual_seed(0))
    first = [next(batches) for _ in range(2)]  # four whole windows fit behind any phase above 0
    starts = sorted(int(start) for batch in first for start in batch[:, 0])
    assert len({start % script.CONTEXT for start in starts}) == 1
    assert starts == [starts[0] + script.CONTEXT * i for i in range(4)]
    for batch in first:
        assert torch.equal(batch, batch[:, :1] + torch.arange(script.CONTEXT))


def test_corpus_keeps_sentences_and_drops_code() -> None:
    parser = corpus.ProseParser()
    parser.feed(
        '<html class="sidebar-visible"><body><nav><p>Skip this menu line, please do.</p></nav><h1>Title</h1>'
        "<p>A <code>Vec</code> owns its\nelements and frees them.</p><pre>let x = 1;<b>y</b></pre>"
        '<div class="sphinxsidebar"><div>Nested <p>side</p></div></div><li>The last item of the list.</li>'
    )
    parser.close()
    paragraphs = [" ".join(paragraph.split()) for paragraph in parser.paragraphs]
    kept = [paragraph for paragraph in paragraphs if paragraph and corpus.is_prose(paragraph)]
    assert kept == ["A Vec owns its elements and frees them.", "The last item of the list."]
    assert not corpus.is_prose("x = {1: 2, 3: 4}; y = f(x)[0] + 7;")


# ---------------------------------------------------------------- the shipped model


def test_shipped_model_has_the_published_layout() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 25_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    num_experts, hidden, width = (
        config[name] for name in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    expected = {
        "gate_up_proj_blocks": ((num_experts, 2 * width, hidden // 32, 16), "U8"),
        "gate_up_proj_scales": ((num_experts, 2 * width, hidden // 32), "U8"),
        "gate_up_proj_bias": ((num_experts, 2 * width), "BF16"),
        "down_proj_blocks": ((num_experts, hidden, width // 32, 16), "U8"),
        "down_proj_scales": ((num_experts, hidden, width // 32), "U8"),
        "down_proj_bias": ((num_experts, hidden), "BF16"),
    }
    with safe_open(MODEL / "model.safetensors", framework="pt") as checkpoint:
        names = set(checkpoint.keys())
        for layer in range(config["num_hidden_layers"]):
            for name, (shape, dtype) in expected.items():
                part = checkpoint.get_slice(f"model.layers.{layer}.mlp.experts.{name}")
                assert (tuple(part.get_shape()), part.get_dtype()) == (shape, dtype), name
            assert f"model.layers.{layer}.self_attn.sinks" in names
    assert sum("experts" in name for name in names) == len(expected) * config["num_hidden_layers"]


def test_transformers_reads_the_shipped_model_and_it_predicts_held_out_text() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    ours = script.unpack_experts(load_file(MODEL / "model.safetensors"))
    theirs = model.state_dict()
    assert theirs.keys() == ours.keys()
    for name, values in ours.items():
        assert torch.equal(theirs[name].float(), values.float()), name

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    text = (MODEL / "held_out.txt").read_text().split("\n\n")[0]
    tokens = tokenizer(script.END + text, return_tensors="pt").input_ids[:, :400]
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert math.exp(loss) < 30  # 4096 for no knowledge; README: about 18 over all held-out text
