"""`mxk demo`: one model generated from twice, with the stock op and with the `mxk` backend, and what differs.

Both runs go through torch.compile and the same inner compiler, so that the MoE calls are all that differs; the prompt
runs eagerly on the stock op in both. Times are of decode steps, one token each, after warm-up.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxk_compile.errors import CallError
from mxk_compile.explain import explain
from mxk_compile.integrations import transformers as models
from mxk_compile.integrations.stock_experts import StockExperts, stock_experts
from mxk_compile.ops import moe
from mxk_compile.passes import Report
from mxk_compile.testing import machine, rel_l2, settle_vector_math

HELD_OUT_FILE = "held_out.txt"
"""Text that the model was not trained on, where its folder has some."""
_OTHER_TEXT = (
    "When the ferry had left, the harbour master counted the lamps along the pier and wrote the number in a small "
    "book. Nobody had asked him to do so. In winter the count told him which of the keepers had gone home early, and "
    "in summer it told him nothing at all, because the light was still on the water when he closed the cover. He kept "
    "the books in order on a shelf above the stove, one for each year, and he was fond of saying that a harbour is "
    "only a list of things which have so far come back."
)
"""Written for this file: held-out text for models without a text of their own."""
_MAX_TEXT_TOKENS = 128
_PREFILL_TOKENS = 64
"""More than the cap of the fused kernels, so that the table shows the stock op."""
_WARM_UP_TOKENS = 4
# A step of a model that fits the caches is shorter than what its threads wait for each other: torch's pool and that
# of Inductor's code are two, and where cores are few or busy each spins on the core that the other needs.
_ONE_THREAD_BYTES = 64 << 20
# Ranges that the profiler sees: ours, Inductor's around its compiled code, and the op.
_STEP, _GRAPH, _MOE, _KERNEL = "mxk decode step", "## Call CompiledFxGraph", "mxk::moe", "mxk kernel"


@dataclasses.dataclass
class Run:
    """What one path generated: tokens, the logits [vocabulary] of each, and seconds of each decode step."""

    name: str
    tokens: list[int]
    logits: list[Tensor]
    step_seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Of the median decode step."""
        return 1 / statistics.median(self.step_seconds) if self.step_seconds else float("nan")


class ReferenceExperts(nn.Module):
    """The experts of one layer in fp32 without any rounding, unpacked one at a time: the yardstick of parity."""

    def __init__(self, experts: StockExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """As `StockExperts.forward`."""
        arguments, attributes = self.experts.fused_call()
        return moe.reference(
            hidden_states, router_indices, routing_weights, *arguments, **attributes, round_intermediate=False
        )


def reference_model(model: Any) -> Any:
    """A copy of a loaded model that computes everything in fp32; packed experts are shared, not copied."""
    shared = {id(module): module for module in stock_experts(model).values()}
    reference = copy.deepcopy(model, dict(shared))
    for name, experts in stock_experts(reference).items():
        reference.get_submodule(name.rpartition(".")[0]).experts = nn.Identity()
        shared[id(experts)] = experts
    reference.float()
    for name, experts in stock_experts(model).items():
        reference.get_submodule(name.rpartition(".")[0]).experts = ReferenceExperts(experts)
    return reference


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of a prompt, after the token that begins a text where the tokenizer has one; at least one id."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # what Python makes of bytes that are none
        raise CallError(
            "prompt", f"no UTF-8 text ({error})", "UTF-8 text", "give the prompt as text"
        ) from error
    ids = list(tokenizer(prompt).input_ids)
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids.insert(0, begin)
    if not ids:
        raise CallError("prompt", "no tokens", "at least one token", "give a longer prompt")
    return ids


def compiled(model: Any, backend: str) -> Callable[..., Any]:
    """The model's decode step through backend "mxk", or "stock": the same inner compiler without the passes.

    The inner compiler is Inductor, or aot_eager on a machine without the C++ compiler that Inductor needs.
    """
    inner = "inductor" if _has_compiler() else "aot_eager"
    if backend == "stock":
        return torch.compile(model, backend=inner)
    return torch.compile(model, backend="mxk", options={"inner_backend": inner})


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):
        return False


def run_demo(folder: Path, prompt: str, new_tokens: int, profile: bool, out: Any = None) -> None:
    """Runs everything and prints it to `out` (stdout); raises MxkError for a folder that cannot be loaded."""
    settle_vector_math()
    model = models.load(folder)
    num_threads = torch.get_num_threads()
    if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) < _ONE_THREAD_BYTES:
        torch.set_num_threads(1)
    try:
        _run(model, folder, prompt, new_tokens, profile, out)
    finally:
        torch.set_num_threads(num_threads)


def _run(model: Any, folder: Path, prompt: str, new_tokens: int, profile: bool, out: Any) -> None:
    def say(*lines: object) -> None:
        print(*lines, sep="\n", file=out or sys.stdout, flush=True)

    started = time.perf_counter()
    tokenizer = models.load_tokenizer(folder)
    ids = prompt_tokens(tokenizer, prompt)
    text_ids, text_name = held_out_tokens(folder, tokenizer)
    length = max(len(ids) + new_tokens, len(text_ids))
    config = model.config
    say(
        f"model      {folder}: {config.num_hidden_layers} layers, {config.num_local_experts} experts, "
        f"top-{config.num_experts_per_tok}, K={config.hidden_size}, I={config.intermediate_size}",
        "machine    " + machine(),
        "memory     " + memory_line(model),
    )

    runs, scored = [], {}
    for name in ("stock", "mxk"):
        session = models.Session(model, length, compiled(model, name))
        run, seconds = generate(session, name, ids, new_tokens)
        runs.append(run)
        scored[name] = decode_logits(session, text_ids)
        say(
            "",
            f"--- {name}: {run.tokens_per_second:.1f} tokens/s (measured; {seconds:.0f} s to compile and warm up)",
        )
        say(prompt + tokenizer.decode(run.tokens))
        if name == "mxk" and profile:
            say("", *profile_lines(session, ids))
    ratio = runs[1].tokens_per_second / runs[0].tokens_per_second
    say(
        "",
        f"speed      mxk {ratio:.2f} x the tokens/s of stock",
        "greedy     " + parting_line(runs[0], runs[1], tokenizer),
    )

    with torch.no_grad():
        ids_tensor = torch.tensor([text_ids[:-1]], device=model.device)
        exact = reference_model(model)(input_ids=ids_tensor, use_cache=False).logits[0]
    say("", *parity_lines(scored, exact, text_ids, text_name), *layer_lines(model, text_ids))
    say("", f"rewrite table, prefill of {_PREFILL_TOKENS} tokens", rewrite_table(model, _PREFILL_TOKENS))
    say("", "rewrite table, decode", rewrite_table(model, 1))
    say("", f"done in {time.perf_counter() - started:.0f} s")


def rewrite_table(model: Any, num_tokens: int) -> Report:
    """What the backend does with a call of num_tokens tokens."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        return explain(model, input_ids=ids, use_cache=False)


def memory_line(model: Any) -> str:
    """Bytes of the experts, packed as they are and as a bf16 copy, and of the rest."""
    packed = unpacked = 0
    for experts in stock_experts(model).values():
        packed += sum(buffer.nbytes for buffer in experts.buffers())
        unpacked += 2 * 2 * (experts.w13_weight.nbytes + experts.w2_weight.nbytes)
        unpacked += sum(bias.nbytes for bias in (experts.w13_bias, experts.w2_bias) if bias is not None)
    rest = sum(parameter.nbytes for parameter in model.parameters())
    return f"experts {packed:,} bytes packed, {unpacked:,} as bf16 ({packed / unpacked:.2f} x); the rest {rest:,} bytes"


def generate(session: models.Session, name: str, prompt: Sequence[int], new_tokens: int) -> tuple[Run, float]:
    """A greedy run after a warm-up of a few tokens; returns it and the seconds of the warm-up."""
    start = time.perf_counter()
    for _ in models.greedy(session, prompt, _WARM_UP_TOKENS):
        pass
    warm_up_seconds = time.perf_counter() - start
    run = Run(name, [], [], [])
    last = None
    for token, logits in models.greedy(session, prompt, new_tokens):
        now = time.perf_counter()
        if last is not None:
            run.step_seconds.append(now - last)
        last = now
        run.tokens.append(token)
        run.logits.append(logits.float())
    return run, warm_up_seconds


def parting_line(first: Run, second: Run, tokenizer: Any) -> str:
    """Where two greedy runs part, and how sure the first was there."""
    for index, (a, b) in enumerate(zip(first.tokens, second.tokens, strict=True)):
        if a == b:
            continue
        margins = []
        for run in (first, second):
            top = run.logits[index].topk(2).values
            margins.append(f"{run.name} {float(top[0] - top[1]):.3f}")
        words = f"{tokenizer.decode([a])!r} against {tokenizer.decode([b])!r}"
        where = f"outputs part at token {index + 1} of {len(first.tokens)}"
        return f"{where}: {words}; top-1 over top-2 logit: {', '.join(margins)}"
    return f"outputs are the same for all {len(first.tokens)} tokens"


def held_out_tokens(folder: Path, tokenizer: Any) -> tuple[list[int], str]:
    """Ids of the text that is scored, and what to call it."""
    path = folder / HELD_OUT_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _OTHER_TEXT
    name = HELD_OUT_FILE if path.is_file() else "a text of this package"
    # Cut before the tokenizer warns of a text longer than the model's context; no token has more than 16 letters here.
    return prompt_tokens(tokenizer, text[: 16 * _MAX_TEXT_TOKENS])[:_MAX_TEXT_TOKENS], name


def decode_logits(session: models.Session, ids: Sequence[int]) -> Tensor:
    """Logits [n - 1, vocabulary] fp32 after each token but the last, fed one by one through the decode step."""
    session.reset()
    return torch.stack([session.feed([token]).float() for token in ids[:-1]])


def perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    """exp of the mean negative log likelihood of ids[1:]."""
    targets = torch.tensor(ids[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.float(), targets).exp())


def parity_lines(scored: dict[str, Tensor], exact: Tensor, ids: Sequence[int], text_name: str) -> list[str]:
    """Logits and perplexity of both paths beside the fp32 model."""
    lines = [
        f"parity on {len(ids)} tokens of {text_name}, one by one",
        f"{'':8}{'perplexity':>12}{'logits rel_l2 to fp32':>24}{'same top token':>17}",
        f"{'fp32':8}{perplexity(exact, ids):12.4f}",
    ]
    for name, logits in scored.items():
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        lines.append(f"{name:8}{perplexity(logits, ids):12.4f}{rel_l2(logits, exact):24.2e}{same:17.1%}")
    lines.append(f"{'mxk to stock':32}{rel_l2(scored['mxk'], scored['stock']):12.2e}")
    return lines


def layer_lines(model: Any, ids: Sequence[int]) -> list[str]:
    """Error of the MoE op alone against fp32, and its time for one token, on what the layers get from the text."""
    calls: list[tuple[StockExperts, tuple[Tensor, ...], Tensor]] = []

    def record(module: StockExperts, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((module, inputs, output))

    handles = [experts.register_forward_hook(record) for experts in stock_experts(model).values()]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids[:32])], device=model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    errors: dict[str, list[float]] = {"stock": [], "mxk": []}
    for experts, inputs, stock in calls:
        arguments, attributes = experts.fused_call()
        exact = moe.reference(
            inputs[0].float(), *inputs[1:], *arguments, **attributes, round_intermediate=False
        )
        errors["stock"].append(rel_l2(stock, exact))
        errors["mxk"].append(rel_l2(torch.ops.mxk.moe(*inputs, *arguments, **attributes), exact))
    worst = ", ".join(f"{name} {max(values):.2e}" for name, values in errors.items())
    one_token = [tensor[:1] for tensor in inputs]
    stock_us = _median_us(lambda: experts(*one_token))
    mxk_us = _median_us(lambda: torch.ops.mxk.moe(*one_token, *arguments, **attributes))
    return [
        f"MoE op alone, worst of {len(calls)} layers, rel_l2 to fp32: {worst}",
        f"MoE op alone, one token: stock {stock_us:.0f} us, mxk {mxk_us:.0f} us, {stock_us / mxk_us:.1f} x (measured)",
    ]


def _median_us(call: Callable[[], Any], repeats: int = 50) -> float:
    seconds = []
    with torch.no_grad():
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


def profile_lines(session: models.Session, prompt: Sequence[int], steps: int = 50) -> list[str]:
    """Shares of one decode step of the `mxk` session, medians.

    Under torch.profiler: MoE is the op's time, in its kernel and in what this package does around it; framework is the
    time of a step outside the compiled graph (guards, wrappers, the logits' way out). Attention, which Inductor fuses
    with its neighbours, is what a step without it saves. The rest is the remainder (embedding, norms, router, head) and
    takes the noise of the others.
    """
    shared = {id(tensor): tensor for tensor in (*session.model.parameters(), *session.model.buffers())}
    without = copy.deepcopy(session.model, dict(shared))
    for layer in without.model.layers:
        layer.self_attn = _NoAttention()
    reduced = models.Session(without, session.length, compiled(without, "mxk"))
    _steps((session, reduced), prompt, _WARM_UP_TOKENS)
    whole, less = (statistics.median(seconds) for seconds in _steps((session, reduced), prompt, steps))
    kernel, ours, framework = _profiled(session, prompt, steps)

    parts = {
        "MoE kernels": kernel,
        "MoE overhead that is ours": ours,
        "attention with its projections": whole - less,
    }
    if framework is not None:
        parts["framework, outside the graph"] = framework
    parts["rest"] = whole - sum(parts.values())
    lines = [f"decode step {whole * 1e3:.3f} ms (measured, median of {steps})"]
    return lines + [
        f"  {name:32}{seconds * 1e3:8.3f} ms {seconds / whole:6.1%}" for name, seconds in parts.items()
    ]


def _steps(sessions: Sequence[models.Session], prompt: Sequence[int], steps: int) -> list[list[float]]:
    """Seconds of each decode step after a prompt, for each session; they take turns, so that a busy moment hits all."""
    for session in sessions:
        session.reset()
        session.feed(prompt)
    seconds: list[list[float]] = [[] for _ in sessions]
    for _ in range(steps):
        for session, found in zip(sessions, seconds, strict=True):
            start = time.perf_counter()
            with torch.profiler.record_function(_STEP):
                session.feed(prompt[-1:])
            found.append(time.perf_counter() - start)
    return seconds


def _profiled(
    session: models.Session, prompt: Sequence[int], steps: int
) -> tuple[float, float, float | None]:
    """Seconds a step in the kernels of `mxk::moe`, around them in its calls, and outside the compiled graph.

    Kernels of devices that do not name them to the profiler count as calls; the last is None where it is not shown.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _steps((session,), prompt, steps)
    durations: dict[str, list[float]] = {_STEP: [], _GRAPH: [], _MOE: [], _KERNEL: []}
    for event in profiler.events():
        for name, found in durations.items():
            if event.name.startswith(name):
                found.append(event.cpu_time_total * 1e-6)
    median = {name: statistics.median(found) if found else None for name, found in durations.items()}
    calls = len(durations[_MOE]) / steps
    call = median[_MOE] or 0.0
    kernel = call if median[_KERNEL] is None else median[_KERNEL] or 0.0
    step, graph = median[_STEP], median[_GRAPH]
    framework = None if step is None or graph is None else step - graph
    return calls * kernel, calls * (call - kernel), framework
