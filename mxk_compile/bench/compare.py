"""`mxk bench --compare`: the published table's form, from rows of two implementations.

Tokens  Routing  Local routes    stock µs    fused µs  Speed-up  stock rel_l2  fused rel_l2
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mxk_compile.bench.rows import Row
from mxk_compile.errors import CallError

Pair = tuple[Row, Row]
_SHAPE = ("weight_format", "hidden_size", "intermediate_size", "num_experts", "all_experts", "top_k")
_CALL = ("local_routes", "experts_touched")


def split(rows: Sequence[Row], source: str) -> tuple[list[Row], list[Row]]:
    """Rows of one file that holds two implementations: the other one first, "fused" second."""
    impls = list(dict.fromkeys(row.impl for row in rows))
    if len(impls) != 2:
        given = f"rows of {', '.join(impls)}"
        raise CallError(source, given, "two implementations, or two files", "give --compare A B")
    second = "fused" if "fused" in impls else impls[1]
    return [row for row in rows if row.impl != second], [row for row in rows if row.impl == second]


def pair(first: Sequence[Row], second: Sequence[Row]) -> tuple[list[Pair], list[Row]]:
    """Rows of the same line of a table, and the rows without a partner.

    Raises CallError where a line stands twice, where shape, seed or device of a pair differ, or there is no pair.
    """
    tables = [_by_key(rows) for rows in (first, second)]
    pairs = [(tables[0][key], tables[1][key]) for key in tables[0] if key in tables[1]]
    for a, b in pairs:
        _check(a, b)
    if not pairs:
        given = f"no common line of {len(first)} and {len(second)} rows"
        advice = "run both with the same variant, experts, tokens and routing"
        raise CallError("mxk bench --compare", given, "rows of the same calls", advice)
    alone = [row for table, other in (tables, tables[::-1]) for key, row in table.items() if key not in other]
    return pairs, alone


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, int, int, str], Row]:
    table: dict[tuple[str, int, int, str], Row] = {}
    for row in rows:
        if row.key in table:
            given = f"{row.name} stands there twice"
            raise CallError("mxk bench --compare", given, "one row a line", "give one run a file")
        table[row.key] = row
    return table


def _check(a: Row, b: Row) -> None:
    names = [("device", ("device", "threads")), ("seed", ("seed",)), ("shape", _SHAPE), ("routing", _CALL)]
    for what, fields in names:
        for field in fields:
            values = getattr(a, field), getattr(b, field)
            if values[0] != values[1]:
                given = f"{what} of {a.name} and {b.name} differs: {field} {values[0]} and {values[1]}"
                advice = "run both on one device with the same arguments"
                raise CallError("mxk bench --compare", given, "rows that differ in implementation", advice)


def labels(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Names of the two sides: the implementations, or A and B where they are the same."""
    sides = [" / ".join(dict.fromkeys(row.impl for row in side)) for side in zip(*pairs, strict=True)]
    return (sides[0], sides[1]) if sides[0] != sides[1] else (f"A {sides[0]}", f"B {sides[1]}")


def table(pairs: Sequence[Pair]) -> str:
    """The tables of the pairs, one a layer, as text."""
    first, second = labels(pairs)
    blocks = []
    for _, group in itertools.groupby(pairs, lambda rows: (rows[0].variant, rows[0].num_experts)):
        lines = list(group)
        header = (
            f"{'Tokens':>6}  {'Routing':7}  {'Local routes':>12}  {first + ' µs':>14}  {second + ' µs':>14}"
        )
        block = [
            caption(lines[0]),
            f"{header}  {'Speed-up':>8}  {first + ' rel_l2':>14}  {second + ' rel_l2':>14}",
        ]
        for a, b in lines:
            call = f"{a.num_tokens:6}  {a.routing:7}  {a.local_routes:12}"
            errors = "  ".join(
                "-".rjust(14) if row.rel_l2 is None else f"{row.rel_l2:14.2e}" for row in (a, b)
            )
            block.append(f"{call}  {a.us:14.1f}  {b.us:14.1f}  {a.us / b.us:7.1f}x  {errors}")
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def caption(rows: Pair) -> str:
    """What the layer is, and where and how both sides were had."""
    a, b = rows
    sizes = f"{a.num_experts} of {a.all_experts} experts, K = {a.hidden_size}, I = {a.intermediate_size}"
    evidence = a.evidence if a.evidence == b.evidence else f"{a.evidence} and {b.evidence}"
    threads = f", {a.threads} threads" if a.threads else ""
    return f"{a.variant}: {sizes}, top-{a.top_k}, {a.weight_format}; {evidence}, {a.device}{threads}"
