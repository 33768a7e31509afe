"""`mxk parity`: the Gaudi kernels, emulated, against fp32 and beside the stock op; prints tables and PASS lines.

Each variant runs at its per-card K and I, full size, with fewer experts than a card holds (their number changes nothing
but memory): eight of sixteen are local. What runs is the code that a graph holds, kernels/tpc `sequence`, on
`custom_op::mxk_*` executed by the emulator.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from mxk_compile.checkpoint import Checkpoint
from mxk_compile.kernels import MoEDesc, tpc
from mxk_compile.kernels.tpc import emulate, emulated_ops, time_model
from mxk_compile.kernels.tpc.signatures import KERNELS, VARIANT_KERNELS
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.testing import MoECase, rel_l2, variant_case
from mxk_compile.variants import VARIANTS, MoEVariant

MAX_REL_L2 = 1.8e-3
"""Of a kernel against fp32 with a bf16 intermediate; the rounding of the bf16 result alone is 1.66e-3."""
DOCUMENT_VARIANTS = ("gptoss", "glm", "dsv41", "muse", "kimi")
"""The published five. `mimo` runs the kernels of glm at its own sizes; `kimi_int4` is beyond the document."""
NAMES = (*DOCUMENT_VARIANTS, "mimo", "kimi_int4")
LOCAL_EXPERTS, ALL_EXPERTS, FIRST_LOCAL = 8, 16, 4
_RMS = (1.0, 4.0)  # 4 drives the clamps of SwiGLU
_ROUTER_MODEL = pathlib.Path(__file__).parent.parent / "models" / "tiny-gptoss"
_PREFILL_TOKENS = 256
_SHARED_UNPACK = {"MXK_SHARE": 1}
"""Build flag of the kernels: a row is unpacked once for up to four routes of an expert."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: who, how it was routed, errors against fp32, counters of its kernels."""

    variant: str
    routing: str
    num_tokens: int
    local_routes: int
    rms: float
    kernel_rel_l2: float
    stock_rel_l2: float
    counters: tuple[tuple[str, emulate.Counters], ...]

    def __str__(self) -> str:
        return f"{self.variant} {self.routing} T={self.num_tokens} rms={self.rms:g}: {self.kernel_rel_l2:.2e}"


def run_parity(names: Sequence[str], *, quick: bool = False) -> bool:
    """Prints the tables for these variants; whether every check passed. `quick` runs the smallest and largest T."""
    print("emulated: TPC-C sources run on this CPU; nothing here ran on a Gaudi", flush=True)
    start = time.monotonic()
    library = emulated_ops.register()
    kernels = sorted({kernel for name in names for kernel in VARIANT_KERNELS[_kernels_of(name)]})
    _build(kernels)
    print(f"built {len(kernels)} kernels in {time.monotonic() - start:.0f} s\n", flush=True)
    rows = _print_parity(names, quick)
    worst = max(rows, key=lambda row: _badness(row.kernel_rel_l2))
    parity = _badness(worst.kernel_rel_l2) <= MAX_REL_L2
    _verdict("PARITY", parity, f"worst {worst}, limit {MAX_REL_L2:.1e}")
    passed = [parity]
    different = [name for name in names if not _same_alone_and_together(name)]
    passed.append(not different)
    _verdict("SIG_DEVICE", not different, f"in one graph other results than alone: {', '.join(different)}")
    if "glm" in names:
        reason = _prefill(quick)
        passed.append(not reason)
        _verdict("PREFILL", not reason, reason)
    del library
    print(f"emulated, in {time.monotonic() - start:.0f} s")
    return all(passed)


def _verdict(name: str, passed: bool, otherwise: str) -> None:
    print(f"{name} PASS" if passed else f"{name} FAIL: {otherwise}", flush=True)


def _badness(value: float) -> float:
    return value if value == value else float("inf")


def _kernels_of(name: str) -> str:
    return "glm" if name == "mimo" else name


def _build(kernels: Sequence[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: emulate.build(name, workers=2), kernels))


# ---- kernel and stock op against fp32 ------------------------------------------------------------------------------


def _print_parity(names: Sequence[str], quick: bool) -> list[Row]:
    header = f"{'variant':10}{'K':>6}{'I':>6}  {'routing':8}{'rms':>4}{'T':>7}{'routes':>8}"
    print(f"{header}  {'kernel rel_l2':21}{'stock rel_l2':21}{'VPU':>6}{'LOAD':>6}   (emulated)")
    rows: list[Row] = []
    for name in names:
        part = _rows(name, quick)
        rows += part
        for group in {(row.routing, row.rms): None for row in part}:
            print(_table_row([row for row in part if (row.routing, row.rms) == group]), flush=True)
    print()
    return rows


def _table_row(rows: Sequence[Row]) -> str:
    variant = VARIANTS[rows[0].variant]
    tokens = f"{rows[0].num_tokens}-{rows[-1].num_tokens}"
    routes = f"{min(row.local_routes for row in rows)}-{max(row.local_routes for row in rows)}"
    kernel = f"{min(row.kernel_rel_l2 for row in rows):.2e} to {max(row.kernel_rel_l2 for row in rows):.2e}"
    stock = f"{min(row.stock_rel_l2 for row in rows):.2e} to {max(row.stock_rel_l2 for row in rows):.2e}"
    vpu, load = chunk_row_cycles([counters for row in rows for _, counters in row.counters])
    left = f"{variant.name:10}{variant.hidden_size:6}{variant.intermediate_size:6}  {rows[0].routing:8}"
    return f"{left}{rows[0].rms:4g}{tokens:>7}{routes:>8}  {kernel:21}{stock:21}{vpu:6.2f}{load:6.2f}"


def chunk_row_cycles(counters: Sequence[emulate.Counters]) -> tuple[float, float]:
    """VPU and LOAD cycles of the chunk loops for each chunk-row, over several calls."""
    rows = max(sum(each.chunk_rows for each in counters), 1)
    vpu, load = (sum(each.slot_cycles(slot, "chunk") for each in counters) / rows for slot in ("vpu", "load"))
    return vpu, load


def _rows(name: str, quick: bool) -> list[Row]:
    """All calls of a variant; `quick`: fewest and most tokens, one RMS for each routing."""
    variant = VARIANTS[name]
    most = tpc.token_range(_describe(_case(variant, 1, "hot", 1.0)))[1]
    tokens = [1, most] if quick else [2**n for n in range(most.bit_length()) if 2**n <= most]
    calls = [("random", 1.0), ("hot", 4.0)] + [("random", 4.0), ("hot", 1.0)] * (not quick)
    if name == "gptoss":
        calls += [("router", rms) for rms in (_RMS[1:] if quick else _RMS)]
    keys = [(routing, rms, num_tokens) for routing, rms in sorted(calls) for num_tokens in tokens]
    cases = [_case(variant, num_tokens, routing, rms) for routing, rms, num_tokens in keys]
    # Tokens do not touch one another: one call of reference and stock op unpacks each expert once for all of them.
    together = dataclasses.replace(
        cases[0],
        hidden_states=torch.cat([case.hidden_states for case in cases]),
        topk_ids=torch.cat([case.topk_ids for case in cases]),
        topk_weights=torch.cat([case.topk_weights for case in cases]),
    )
    sizes = [num_tokens for _, _, num_tokens in keys]
    references = together.reference(round_intermediate=True).split(sizes), stock(together).split(sizes)
    rows = []
    for (routing, rms, num_tokens), case, expected, beside in zip(keys, cases, *references, strict=True):
        with emulated_ops.recorded(emulated_ops.Build(workers=2)) as recorder:
            result = run_case(case)
        local = (case.topk_ids >= FIRST_LOCAL) & (case.topk_ids < FIRST_LOCAL + LOCAL_EXPERTS)
        errors = _error(result, expected), _error(beside, expected)
        rows.append(Row(name, routing, num_tokens, int(local.sum()), rms, *errors, tuple(recorder.calls)))
    return rows


def _error(value: Tensor, expected: Tensor) -> float:
    if not expected.any():  # no local route
        return 0.0 if not value.any() else float("inf")
    return rel_l2(value, expected)


def _describe(case: MoECase) -> MoEDesc:
    return MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)


def run_case(case: MoECase) -> Tensor:
    """The call as a graph on a Gaudi makes it: `custom_op::mxk_*` in sequence."""
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    return tpc.sequence(_describe(case), *case.routing, *case.weights, **scalars)


def _case(variant: MoEVariant, num_tokens: int, routing: str, rms: float, seed: int = 0) -> MoECase:
    """The same weights for every T, routing and RMS of one seed."""
    sizes = {
        "num_experts": LOCAL_EXPERTS,
        "experts_min": FIRST_LOCAL,
        "num_tokens": 1,
        "top_k": variant.top_k,
    }
    case = variant_case(variant, **sizes, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    case.hidden_states = (torch.randn(num_tokens, variant.hidden_size, generator=generator) * rms).bfloat16()
    if routing == "router":
        logits = _router_logits(case.hidden_states)
    else:
        logits = torch.randn(num_tokens, ALL_EXPERTS, generator=generator)
        if routing == "hot":  # every route local
            logits[:, :FIRST_LOCAL] = logits[:, FIRST_LOCAL + LOCAL_EXPERTS :] = float("-inf")
    scores, case.topk_ids = logits.topk(variant.top_k, dim=1)
    case.topk_weights = torch.softmax(scores, dim=1).bfloat16()
    return case


def _router_logits(hidden_states: Tensor) -> Tensor:
    """Logits [T, 16] of a trained router, that of the repository's small model, on the first 256 values of each row.

    Without the model (an installed wheel), of random weights with a spread of one per expert: skewed likewise.
    """
    if _ROUTER_MODEL.is_dir():
        with Checkpoint(_ROUTER_MODEL) as files:
            weight, bias = (
                files.tensor(f"model.layers.3.mlp.router.{part}").float() for part in ("weight", "bias")
            )
    else:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(ALL_EXPERTS, 256, generator=generator) / 16
        bias = torch.randn(ALL_EXPERTS, generator=generator)
    return functional.linear(hidden_states[:, : weight.shape[1]].float(), weight, bias)


def stock(case: MoECase) -> Tensor:
    """The stock op's result, in its own rounding: the stand-in of ops/stock.py, or the bridge's op where it is there.

    No overload has the clamp without bias and `up + 1`: for that activation its steps are repeated here, each in bf16.
    Per route, it is called with one slot at a time.
    """
    ids, weights = case.topk_ids, case.topk_weights
    if case.attributes["per_route"]:
        slots = [_stock_call(case, ids[:, [k]], weights[:, [k]]) for k in range(ids.shape[1])]
        return torch.stack(slots, dim=1)
    if case.attributes["activation"] == "swiglu_clamp":
        return _stock_steps(case)
    return _stock_call(case, ids, weights)


def _stock_call(case: MoECase, ids: Tensor, weights: Tensor) -> Tensor:
    if case.attributes["weight_format"] == "uint4":
        return _stock_int4(case, ids, weights)
    lists = [list(tensor) for tensor in (case.w13, case.w2)]
    scales = [list(tensor) for tensor in (case.w13_scale, case.w2_scale)]
    common = {"block_size": mxfp4.BLOCK, "permuted_weights": True, "is_fp4": True}
    local = {"experts_min": FIRST_LOCAL, "experts_max": FIRST_LOCAL + len(case.w2) - 1}
    op = torch.ops.hpu.mixture_of_experts
    if case.w13_bias is not None and case.w2_bias is not None:
        biases = [list(tensor) for tensor in (case.w13_bias, case.w2_bias)]
        oai = {name: case.attributes[name] for name in ("alpha", "limit")}
        arguments = (case.hidden_states, ids, weights, *lists, *biases, *scales)
        result: Tensor = op.bias_mxfp4_fused_weights(*arguments, **common, **local, **oai)
        return result
    arguments = (case.hidden_states, ids, weights, *lists, *scales)
    result = op.mxfp4_fused_weights(*arguments, **common, **local, activation="silu")
    return result


def _stock_int4(case: MoECase, ids: Tensor, weights: Tensor) -> Tensor:
    """What vllm-gaudi does with INT4: weights converted to bf16, then the bf16 op."""
    lists = [
        [
            dequantize(*part, None, weight_format="uint4", pack_dim="input", dtype=torch.bfloat16)
            for part in pairs
        ]
        for pairs in (
            zip(case.w13, case.w13_scale, strict=True),
            zip(case.w2, case.w2_scale, strict=True),
        )
    ]
    local = {"experts_min": FIRST_LOCAL, "experts_max": FIRST_LOCAL + len(case.w2) - 1}
    result: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
        case.hidden_states, ids, weights, *lists, permuted_weights=True, activation="silu", **local
    )
    return result


def _stock_steps(case: MoECase) -> Tensor:
    result = torch.zeros_like(case.hidden_states)
    for expert in range(len(case.w2)):
        token, slot = torch.where(case.topk_ids == FIRST_LOCAL + expert)
        if not len(token):
            continue
        w13 = mxfp4.unpack(case.w13[expert], case.w13_scale[expert])
        w2 = mxfp4.unpack(case.w2[expert], case.w2_scale[expert])
        halves = split_rows(functional.linear(case.hidden_states[token], w13), case.attributes["row_order"])
        a = activate(*halves, case.attributes["activation"], 1.0, case.attributes["limit"])
        result.index_add_(0, token, functional.linear(a, w2) * case.topk_weights[token, slot, None])
    return result


# ---- two ops of one signature; prefill -----------------------------------------------------------------------------


def _same_alone_and_together(variant: str) -> bool:
    """Two calls of equal shapes in one graph: each has the result that it has alone, and they differ."""
    first, second = (_case(VARIANTS[variant], 2, "hot", 1.0, seed) for seed in (0, 1))
    names = [
        field.name for field in dataclasses.fields(first) if isinstance(getattr(first, field.name), Tensor)
    ]
    inputs = [getattr(case, name) for case in (first, second) for name in names]

    def both(*values: Tensor) -> tuple[Tensor, ...]:
        parts = (first, values[: len(names)]), (second, values[len(names) :])
        cases = [dataclasses.replace(case, **_named(names, part)) for case, part in parts]
        return tuple(map(run_case, cases))

    with emulated_ops.recorded(emulated_ops.Build(workers=2)):
        graph = make_fx(both)(*inputs)
        alone = run_case(first), run_case(second)
        together = graph(*inputs)
    same = all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    return same and not torch.equal(*alone)


def _named(names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _prefill(quick: bool) -> str:
    """mxk_deq against the exact unpack, then the stock bf16 op on its weights beside the stock MXFP4 op.

    Returns what is wrong, or an empty string.
    """
    case = _case(VARIANTS["glm"], 1 if quick else _PREFILL_TOKENS, "random", 1.0)
    unpacked: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    build = emulated_ops.Build(workers=2)
    for name, weight, scale in (("w13", case.w13, case.w13_scale), ("w2", case.w2, case.w2_scale)):
        for expert in range(len(weight)):
            given = {"w": weight[expert].contiguous(), "s": scale[expert].contiguous()}
            values, _ = emulated_ops.call(KERNELS["mxk_deq"], given, build)
            if not torch.equal(
                values.view(torch.int16), mxfp4.unpack(given["w"], given["s"]).view(torch.int16)
            ):
                return f"mxk_deq of {name}, expert {expert}, is not the exact unpack"
            unpacked[name].append(values)
    local = {"experts_min": FIRST_LOCAL, "experts_max": FIRST_LOCAL + LOCAL_EXPERTS - 1}
    result = torch.ops.hpu.mixture_of_experts.fused_weights(
        *case.routing[:3], unpacked["w13"], unpacked["w2"], permuted_weights=True, activation="silu", **local
    )
    expected = case.reference(round_intermediate=True)
    prefill, fused = rel_l2(result, expected), rel_l2(stock(case), expected)
    tokens = len(case.hidden_states)
    print(
        f"prefill  glm, T={tokens}: mxk_deq + stock bf16 op {prefill:.2e}, stock MXFP4 op {fused:.2e} (emulated)"
    )
    return "" if prefill <= 1.05 * fused else f"rel_l2 {prefill:.2e}, stock MXFP4 op {fused:.2e}"


# ---- the time model ------------------------------------------------------------------------------------------------


def print_model(names: Sequence[str]) -> None:
    """Modelled microseconds a call, at the counts that the emulator finds, beside the published kernels' formula."""
    model = time_model.calibrated()
    print(
        f"modelled: t = {model.call_us:.1f} + {model.route_us:.2f} * routes"
        f" + {model.chunk_row_us * 1000:.2f}e-3 * chunk-rows of a TPC * (VPU ops / 17) us"
    )
    print(f"\n{'published row':22}{'routes':>7}{'published us':>14}{'modelled us':>13}{'error':>8}")
    for row in time_model.PUBLISHED:
        predicted = model.predict_us(row.hidden_size, row.intermediate_size, row.routes)
        error = predicted / row.kernel_us - 1
        print(f"{row.variant:22}{row.routes:7}{row.kernel_us:14.1f}{predicted:13.1f}{error:8.1%}")
    library = emulated_ops.register()
    header = f"{'variant':10}{'T':>4}{'routes':>7}{'published kernels us':>22}"
    counts = " (VPU, LOAD)"
    print("\nall local, top-k over the card's experts")
    print(f"{header}{'ours us':>10}{counts}{'shared unpack us':>18}{counts}")
    for name in names:
        variant = VARIANTS[name]
        for num_tokens in (1, tpc.token_range(_describe(_zeros(variant, 1)))[1]):
            sizes = variant.hidden_size, variant.intermediate_size, num_tokens * variant.top_k
            columns = [f"{name:10}{num_tokens:4}{sizes[2]:7}{model.predict_us(*sizes):22.1f}"]
            for defines, width in (({}, 10), (_SHARED_UNPACK, 18)):
                if defines and variant.weight_format != "mxfp4":
                    continue  # that flag scales in bf16, which would round products of INT4
                with emulated_ops.recorded(emulated_ops.Build(defines, workers=2)) as recorder:
                    run_case(_zeros(variant, num_tokens))
                cycles = chunk_row_cycles([counters for _, counters in recorder.calls])
                columns.append(
                    f"{model.predict_us(*sizes, *cycles):{width}.1f} ({cycles[0]:.2f}, {cycles[1]:.2f})"
                )
            print("".join(columns), flush=True)
    print("modelled, from emulated counts; nothing here was measured")
    del library


def _zeros(variant: MoEVariant, num_tokens: int) -> MoECase:
    """A call with all of a card's experts, every route local, and weights of zeros: counts do not depend on them."""
    hidden, inner, experts = variant.hidden_size, variant.intermediate_size, variant.num_experts
    case = variant_case(variant, hidden_size=32, intermediate_size=32, num_tokens=num_tokens)
    zeros = functools.partial(torch.zeros, dtype=torch.uint8)
    case.hidden_states = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
    case.w13, case.w2 = zeros(experts, 2 * inner, hidden // 2), zeros(experts, hidden, inner // 2)
    scale = case.w13_scale.dtype
    case.w13_scale = torch.zeros(experts, 2 * inner, hidden // 32, dtype=scale)
    case.w2_scale = torch.zeros(experts, hidden, inner // 32, dtype=scale)
    if variant.bias:
        case.w13_bias, case.w2_bias = torch.zeros(experts, 2 * inner), torch.zeros(experts, hidden)
    return case
