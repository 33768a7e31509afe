"""The rows of a parity table: every call of a variant run, and held against fp32 and the stock op.

On CPU and CUDA what runs is `mxk::moe`, as an eager call makes it; on a Gaudi, and emulated, what its graph holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxk_compile.kernels import tpc
from mxk_compile.parity.cases import (
    ROWS,
    Run,
    Source,
    badness,
    describe,
    error_of,
    local_routes,
    make_case,
    on_device,
    random_source,
    say,
)
from mxk_compile.parity.stock import run_stock
from mxk_compile.testing import MAX_REL_L2, MoECase, most_rel_l2

TITLES = (
    f"{'variant':10}{'K':>6}{'I':>6}  {'routing':8}{'rms':>4}{'T':>7}{'routes':>8}"
    f"  {'kernel rel_l2':21}stock rel_l2"
)
_QUICK_RANDOM = 4  # tokens: several, some of whose routes are to other cards


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: who, how it was routed, errors against fp32 and their limit, and what was counted, where that is.

    `stock_rel_l2` is the reason where the stock op did not run.
    """

    variant: str
    sizes: tuple[int, int]
    routing: str
    num_tokens: int
    local_routes: int
    rms: float
    kernel_rel_l2: float
    stock_rel_l2: float | str
    limit: float = MAX_REL_L2
    counters: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.variant} {self.routing} T={self.num_tokens} rms={self.rms:g}: {self.kernel_rel_l2:.2e}"


def calls_of(source: Source, most: int, quick: bool) -> list[tuple[str, float, int]]:
    """Routing, RMS and T up to `most` of each call. An RMS of 4 drives the clamps of SwiGLU.

    `quick`: one RMS for each routing, fewest and most tokens, and of random routes no more than `_QUICK_RANDOM`.
    """
    groups = [("random", 1.0), ("hot", 4.0)] + [("random", 4.0), ("hot", 1.0)] * (not quick)
    if source.router is not None:
        groups += [("router", 4.0)] + [("router", 1.0)] * (not quick)

    def token_counts(routing: str) -> list[int]:
        if quick:
            return [1, min(most, _QUICK_RANDOM) if routing == "random" else most]
        return [2**n for n in range(most.bit_length())]

    return [(routing, rms, count) for routing, rms in sorted(groups) for count in token_counts(routing)]


def references(
    cases: Sequence[MoECase], device: torch.device, round_intermediate: bool
) -> list[tuple[Tensor, Tensor | str]]:
    """For each of some calls with the same weights: the fp32 result, and the stock op's or why it did not run.

    Tokens do not touch one another: one call unpacks each expert once for all of them.
    """
    routing: dict[str, Any] = {
        name: torch.cat([getattr(case, name) for case in cases])
        for name in ("hidden_states", "topk_ids", "topk_weights")
    }
    together = dataclasses.replace(cases[0], **routing)
    sizes = [len(case.hidden_states) for case in cases]
    exact = together.reference(round_intermediate=round_intermediate).split(sizes)
    if device.type == "hpu":  # the bridge's op, with the calls that it serves
        return [(value, _stock(on_device(case, device))) for value, case in zip(exact, cases, strict=True)]
    beside = run_stock(on_device(together, device)).cpu().split(sizes)
    return list(zip(exact, beside, strict=True))


def _stock(case: MoECase) -> Tensor | str:
    try:
        return run_stock(case).cpu()
    except RuntimeError as error:  # the bridge runs its MXFP4 ops in graphs only: it is shown, not required
        return f"not run ({str(error).splitlines()[0][:60]})"


def measure(
    name: str,
    source: Source,
    run: Run,
    device: torch.device,
    *,
    quick: bool,
    most: int | None = None,
    round_intermediate: bool = True,
) -> list[Row]:
    """All calls of one variant.

    Args:
        name, source: the row, and its weights.
        run: takes cases on `device`.
        quick: as for `calls_of`.
        most: tokens a call; by default what the Gaudi kernels take.
        round_intermediate: as the kernels there do.
    """
    if most is None:
        one = on_device(make_case(source.variant, 1, "hot", 1.0, source=source), device)
        _, most = tpc.token_range(describe(one))
    keys = calls_of(source, most, quick)
    cases = [
        make_case(source.variant, num_tokens, routing, rms, source=source)
        for routing, rms, num_tokens in keys
    ]
    rows, weights = [], on_device(source.weights, device)  # moved once, not with each call
    for (routing, rms, num_tokens), case, (expected, beside) in zip(
        keys, cases, references(cases, device, round_intermediate), strict=True
    ):
        x, ids, router = (part.to(device) for part in case.routing)
        call = dataclasses.replace(weights, hidden_states=x, topk_ids=ids, topk_weights=router)
        error = error_of(run([call])[0].cpu(), expected)
        stock = beside if isinstance(beside, str) else error_of(beside, expected)
        sizes = (source.variant.hidden_size, source.variant.intermediate_size)
        errors = (error, stock, most_rel_l2(expected))
        rows.append(Row(name, sizes, routing, num_tokens, local_routes(case), rms, *errors))
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    """A line for each routing and RMS."""
    for group in grouped(rows):
        print(line_of(group), flush=True)


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one routing and RMS together, in order."""
    keys = {(row.routing, row.rms): None for row in rows}
    return [[row for row in rows if (row.routing, row.rms) == key] for key in keys]


def line_of(rows: Sequence[Row]) -> str:
    """Ranges over the rows of one variant, routing and RMS, below `TITLES`."""
    first = rows[0]
    tokens = f"{first.num_tokens}-{rows[-1].num_tokens}"
    routes = f"{min(row.local_routes for row in rows)}-{max(row.local_routes for row in rows)}"
    kernel = _range([row.kernel_rel_l2 for row in rows])
    numbers = [row.stock_rel_l2 for row in rows if not isinstance(row.stock_rel_l2, str)]
    stock = _range(numbers) if numbers else str(first.stock_rel_l2)
    left = f"{first.variant:10}{first.sizes[0]:6}{first.sizes[1]:6}  {first.routing:8}{first.rms:4g}"
    return f"{left}{tokens:>7}{routes:>8}  {kernel:21}{stock:21}".rstrip()


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2e} to {max(values, key=badness):.2e}"


def judge(rows: Sequence[Row]) -> bool:
    """Prints the PARITY line, with the worst call where it fails."""
    worst = max(rows, key=lambda row: badness(row.kernel_rel_l2) / row.limit)
    passed = badness(worst.kernel_rel_l2) <= worst.limit
    say("PARITY", passed, f"worst {worst}, limit {worst.limit:.1e}")
    return passed


def source_of(name: str, sources: dict[str, Source]) -> Source:
    """What is given for a row, else its random weights."""
    return sources.get(name) or random_source(ROWS[name])
