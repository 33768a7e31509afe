"""Train a small gpt-oss model and write it as an MXFP4 checkpoint in the layout that openai/gpt-oss-20b has.

Two commands; work/ holds what examples/tiny_gptoss_corpus.py wrote, the tokenizer and the token streams::

    python examples/train_tiny_gptoss.py train work/             # 8 minutes on an H200; to try it: --steps 20 --batch 1
    python examples/train_tiny_gptoss.py export work/ models/tiny-gptoss

Nothing is downloaded. Needs torch and transformers. Same seed, device and versions give the same batches and dropout; a
GPU still sums some gradients in varying order.

The last fifth of the training sees the experts through MXFP4 (straight-through gradient), so that the exported
model loses little. What is trained is transformers' GptOssForCausalLM; during training only, two of its parts
are computed another way, because the stock ones are slow there (tests/examples compare values and gradients):

- experts: all of them for every token, as two matrix products, with the routing weight (zero where not routed)
  applied before the down projection;
- attention: the sink as an additional first key of value zero, for torch's fused attention.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_gptoss_corpus import CONTEXT, END, PAD
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mxk_compile.ops.formats import mxfp4

SEED = 20
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}  # below 0.8 so small a model repeats itself
PROMPTS = ("And it came to pass", "The server", "If the function", "A list is", "The king said unto")


def tiny_config(vocab_size: int) -> GptOssConfig:
    """gpt-oss at 1/11 of the width: 27.7 M parameters, of which about 10 M work on a token.

    Kept from gpt-oss-20b: top-4, sliding window 128 on every other layer, sinks, biases, SwiGLU limit and alpha,
    head_dim 64, YaRN, untied embeddings. Like 2880 there, 320 is a multiple of 64 but not of 128.
    """
    return GptOssConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=6,
        num_local_experts=16,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=CONTEXT,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": CONTEXT // 4,
        },
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


# ---------------------------------------------------------------- the training forward


@dataclass
class TrainingState:
    """What the replaced forwards read and leave behind."""

    fake_quantise: bool = False
    dropout: float = 0.0
    balance: list[torch.Tensor] = field(default_factory=list)  # one load-balancing term a layer


def through_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Rounds weight [E, K, N] to MXFP4 in blocks of 32 along K; the gradient passes straight through."""
    with torch.no_grad():
        packed, scale = mxfp4.quantize(weight.detach().transpose(1, 2))
        rounding = mxfp4.unpack(packed, scale, torch.float32).transpose(1, 2) - weight
    return weight + rounding


def dense_mlp(
    mlp: Any, state: TrainingState, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """GptOssMLP.forward with every expert computed for every token.

    hidden_states [B, S, K] -> the same shape, and the routing weights [B * S, top_k].
    """
    experts = mlp.experts
    num_experts, hidden_size, width = experts.gate_up_proj.shape
    tokens = hidden_states.reshape(-1, hidden_size)
    logits, scores, indices = mlp.router(tokens)
    gate_up_proj, down_proj = experts.gate_up_proj, experts.down_proj
    if state.fake_quantise:
        gate_up_proj, down_proj = through_mxfp4(gate_up_proj), through_mxfp4(down_proj)

    # Switch Transformer's balancing term: experts x sum(share of the routes * mean probability); 1 when even.
    probabilities = logits.float().softmax(-1)
    share = F.one_hot(indices, num_experts).sum(1).float().mean(0) / indices.shape[1]
    state.balance.append(num_experts * (share * probabilities.mean(0)).sum())

    combine = torch.zeros_like(logits).scatter(1, indices, scores.to(logits.dtype))
    gate_up = tokens @ gate_up_proj.transpose(0, 1).reshape(hidden_size, num_experts * width)
    gate_up = (gate_up + experts.gate_up_proj_bias.flatten().to(gate_up.dtype)).view(-1, num_experts, width)
    gate = gate_up[..., ::2].clamp(max=experts.limit)
    up = gate_up[..., 1::2].clamp(-experts.limit, experts.limit)
    activated = (up + 1) * gate * torch.sigmoid(gate * experts.alpha) * combine.to(gate.dtype).unsqueeze(-1)
    output = activated.flatten(1) @ down_proj.flatten(0, 1) + combine @ experts.down_proj_bias
    output = F.dropout(output, state.dropout, mlp.training)
    return output.view(hidden_states.shape).to(hidden_states.dtype), scores


def sink_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    scaling: float,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention with sinks. query [B, H, S, D], key and value [B, Hkv, S, D] -> [B, S, H, D].

    A first key k0 = (0, .., 0, sink / scaling) with value 0 meets queries extended by a 1: its logit is the sink. A
    first query, dropped at the end, keeps the problem square and so the causal mask plain.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = F.pad(query, (0, 8, 1, 0))  # 8: fused kernels want a multiple of 8
    key, value = F.pad(key, (0, 8, 1, 0)), F.pad(value, (0, 8, 1, 0))
    extra = query.shape[-1] - 8
    one = F.one_hot(torch.tensor(extra, device=query.device), query.shape[-1]).to(query.dtype)
    query = query + one
    sink = (rest["s_aux"] / scaling).to(key.dtype).view(1, -1, 1, 1)
    first = F.one_hot(torch.tensor(0, device=key.device), key.shape[2]).to(key.dtype).view(1, 1, -1, 1)
    key = key + sink * first * one
    window = rest.get("sliding_window")
    visible = None
    if window is not None:
        position = torch.arange(query.shape[2], device=query.device)
        distance = position[:, None] - position[None, :]
        visible = (distance >= 0) & ((distance < window) | (position[None, :] == 0))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scaling
    )
    return output[:, :, 1:, :extra].transpose(1, 2), None


def install(model: GptOssForCausalLM, state: TrainingState) -> None:
    """Replace the two forwards and put dropout behind the embedding and the attention of every layer."""
    ALL_ATTENTION_FUNCTIONS.register("tiny_gptoss_sink", sink_attention)
    model.config._attn_implementation = "tiny_gptoss_sink"

    def drop(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, state.dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.forward = partial(dense_mlp, layer.mlp, state)


# ---------------------------------------------------------------- train


def windows(stream: torch.Tensor, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Batches [batch, CONTEXT] for ever: every epoch cuts the stream at another phase, in another order."""
    while True:
        phase = int(torch.randint(CONTEXT, (), generator=generator))
        usable = (len(stream) - phase) // CONTEXT * CONTEXT
        cut = stream[phase : phase + usable].view(-1, CONTEXT)
        order = torch.randperm(len(cut), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            yield cut[order[start : start + batch]].long()


@torch.no_grad()
def held_out_loss(
    model: GptOssForCausalLM, streams: dict[str, torch.Tensor], batch: int
) -> dict[str, tuple[float, int]]:
    """Summed negative log likelihood (nats) and number of predicted tokens of each held-out stream."""
    device = next(model.parameters()).device
    sums = {}
    for name, stream in streams.items():
        total, count = 0.0, 0
        whole = len(stream) // CONTEXT * CONTEXT
        groups = [*stream[:whole].view(-1, CONTEXT).split(batch), stream[None, whole:]]
        for group in groups:
            if group.shape[0] == 0 or group.shape[1] < 2:
                continue
            tokens = group.long().to(device)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
            losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            total, count = total + losses.item(), count + tokens[:, 1:].numel()
        sums[name] = (total, count)
    return sums


def mean_loss(sums: dict[str, tuple[float, int]]) -> float:
    return sum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())


def train(work: Path, options: argparse.Namespace) -> None:
    """AdamW, warm-up and cosine; writes work/checkpoint.pt (best held-out loss) and work/training.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = torch.load(work / "tokens.pt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model: Any = GptOssForCausalLM(tiny_config(len(tokenizer)))
    model.to(device)
    state = TrainingState(dropout=options.dropout)
    install(model, state)
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    plain = [p for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    batches = windows(data["training"], options.batch, torch.Generator().manual_seed(SEED))
    quantised_from = int(0.8 * options.steps)
    log: list[dict[str, float]] = []
    best, started, running = math.inf, time.perf_counter(), torch.zeros((), device=device)
    for step in range(1, options.steps + 1):
        if step == quantised_from:
            state.fake_quantise, best = True, math.inf  # from here only what survives the rounding counts
        warm_up = min(1.0, step / (0.05 * options.steps))
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / options.steps)
        rate = options.learning_rate * warm_up * (0.02 + 0.98 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        tokens = next(batches).to(device, non_blocking=True)
        state.balance.clear()
        with autocast():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        balance = torch.stack(state.balance).mean()
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = running.lerp(loss.detach(), 0.02 if step > 50 else 1 / step)
        if step % options.evaluate_every == 0 or step == options.steps:
            model.eval()
            with autocast():
                held_out = mean_loss(held_out_loss(model, data["held_out"], options.batch))
            seconds = time.perf_counter() - started
            entry = {"step": step, "train": running.item(), "held_out": held_out, "balance": balance.item()}
            log.append({name: round(value, 4) for name, value in {**entry, "seconds": seconds}.items()})
            print(log[-1], "MXFP4" if state.fake_quantise else "", flush=True)
            if held_out < best and options.steps - step < 0.6 * options.steps:
                best = held_out
                torch.save(model.state_dict(), work / "checkpoint.pt")
    settings = {name: value for name, value in vars(options).items() if isinstance(value, (int, float))}
    (work / "training.json").write_text(json.dumps({"settings": settings, "log": log}, indent=1))


# ---------------------------------------------------------------- export


def published_config(config: GptOssConfig) -> dict[str, Any]:
    """config.json as openai/gpt-oss-20b has it: rope_theta and rope_scaling apart, and quantization_config."""
    generic = PreTrainedConfig().to_dict().keys() - {"model_type"}
    values = {name: value for name, value in config.to_dict().items() if name not in generic}
    rope = dict(values.pop("rope_parameters"))
    values.update(
        architectures=["GptOssForCausalLM"],
        dtype="bfloat16",
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope,
        initial_context_length=rope["original_max_position_embeddings"],
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    )
    return values


def pack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """state_dict -> checkpoint tensors: [E, K, N] becomes blocks [E, N, K/32, 16] and scales [E, N, K/32]."""
    packed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = mxfp4.quantize_blocks(weight.transpose(1, 2))
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks.contiguous(), scales.contiguous()
        else:
            packed[name] = weight.contiguous()
    return packed


def unpack_experts(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse: a state_dict whose experts hold the rounded values, exact in bf16."""
    weights = {name: tensor for name, tensor in packed.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in packed.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            values = mxfp4.unpack(blocks.flatten(-2), packed[f"{stem}_scales"], torch.bfloat16)
            weights[stem] = values.transpose(1, 2).contiguous()
    return weights


def export(work: Path, output: Path) -> None:
    """Quantises work/checkpoint.pt into output/; measures both precisions with transformers' own forward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.load(work / "tokens.pt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    config = tiny_config(len(tokenizer))
    config._attn_implementation = "eager"
    weights = torch.load(work / "checkpoint.pt", map_location="cpu")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    packed = pack_experts(weights)
    output.mkdir(parents=True, exist_ok=True)
    save_file(packed, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(published_config(config), indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, **SAMPLING}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(output)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    tokenizer_config |= {"bos_token": END, "eos_token": END, "pad_token": PAD}
    (output / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")

    report: dict[str, Any] = {"parameters": sum(tensor.numel() for tensor in weights.values())}
    report["bytes"] = (output / "model.safetensors").stat().st_size
    model: Any = GptOssForCausalLM(config).eval()
    model.to(device, torch.bfloat16)
    for precision, values in (("bf16", weights), ("mxfp4", unpack_experts(packed))):
        model.load_state_dict(values)
        sums = held_out_loss(model, data["held_out"], 8)
        report[precision] = {
            "perplexity": round(math.exp(mean_loss(sums)), 3),
            "bits_per_byte": round(sum(total for total, _ in sums.values()) / data["bytes"] / math.log(2), 4),
            "by_source": {name: round(math.exp(total / count), 2) for name, (total, count) in sums.items()},
        }
        print(precision, report[precision], flush=True)
    report["held_out_tokens"] = sum(count for _, count in sums.values())
    torch.manual_seed(SEED)
    report["samples"] = []
    for prompt in PROMPTS:
        tokens = tokenizer(END + prompt, return_tensors="pt").input_ids.to(device)
        mask = torch.ones_like(tokens)
        sampled = model.generate(tokens, attention_mask=mask, max_new_tokens=100, **SAMPLING)
        report["samples"].append(tokenizer.decode(sampled[0], skip_special_tokens=True))
        print(report["samples"][-1], "\n", flush=True)
    (work / "export.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, keep the best checkpoint")
    training.add_argument("work", type=Path)
    training.add_argument("--steps", type=int, default=5000)
    training.add_argument("--batch", type=int, default=24, help=f"windows of {CONTEXT} tokens in a step")
    training.add_argument("--learning-rate", type=float, default=2e-3)
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--evaluate-every", type=int, default=250)
    exporting = commands.add_parser("export", help="quantise, measure, write the model folder")
    exporting.add_argument("work", type=Path)
    exporting.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.command == "train":
        train(options.work, options)
    else:
        export(options.work, options.output)


if __name__ == "__main__":
    main()
