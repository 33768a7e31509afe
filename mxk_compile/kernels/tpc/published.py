"""The published table of calls on one Gaudi 2: "MXFP4 MoE decode kernels", measured there, never here.

Microseconds a call inside an HPU graph, a chain of 8, median of 30 replays; stock op and kernel in separate processes;
Gaudi software 1.24.1. Routing "hot" is "all local" there.
"""

from __future__ import annotations

import dataclasses

DEVICE = "Gaudi 2"
READ_BYTES_A_SECOND = 2.2e12
"""What the same text says that the card's memory delivers."""


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row: a call of a model row (variants.py) with E local experts and T tokens; times in µs."""

    variant: str
    num_experts: int
    num_tokens: int
    routing: str
    local_routes: int
    stock_us: float
    kernel_us: float


# fmt: off
_TABLES = {
    ("gptoss", 32): """1 random 1 246.0 51.5; 2 random 2 528.7 82.4; 4 random 4 1153.3 141.6; 8 random 7 2362.9 235.8;
        16 random 17 3003.3 532.3; 32 random 31 3437.5 952.3; 1 hot 4 523.9 140.9; 8 hot 32 4082.0 968.2""",
    ("gptoss", 64): """1 random 3 427.2 113.9; 2 random 4 761.3 141.5; 4 random 7 1466.2 231.2;
        8 random 16 3238.3 499.8; 16 random 31 5713.0 947.4; 32 random 65 6863.7 1975.1; 1 hot 4 525.6 142.4;
        8 hot 32 4562.4 972.4""",
    ("gptoss", 128): "1 hot 4 536.4 142.8; 4 hot 16 2416.4 495.9; 32 hot 128 13751.1 3824.0",
    ("kimi", 48): """1 random 1 390.2 68.7; 2 random 1 432.1 77.8; 4 random 4 1043.3 217.5; 8 random 6 1589.7 310.6;
        16 random 12 3002.7 589.5; 1 hot 8 2055.2 398.2; 8 hot 64 9687.8 2976.3""",
    ("muse", 128): """1 random 3 381.2 66.9; 2 random 8 764.4 139.7; 4 random 16 1457.7 260.0; 1 hot 8 694.4 138.7;
        4 hot 32 2301.5 489.2""",
    ("dsv41", 48): """1 random 1 368.4 61.1; 2 random 1 447.4 62.1; 4 random 2 654.7 108.1; 8 random 4 1129.9 192.1;
        16 random 12 2499.6 521.8; 1 hot 6 1344.1 264.2; 8 hot 48 7974.2 2007.8""",
    ("glm", 64): """1 random 1 273.0 42.2; 2 random 5 598.7 128.6; 4 random 9 979.3 219.5; 8 random 14 1525.4 331.6;
        16 random 29 2672.5 659.9; 1 hot 8 928.8 191.9; 8 hot 64 4691.9 1397.5""",
}
# fmt: on


def _rows() -> tuple[PublishedRow, ...]:
    rows = []
    for (variant, num_experts), table in _TABLES.items():
        for line in table.split(";"):
            tokens, routing, routes, stock, kernel = line.split()
            rows.append(
                PublishedRow(
                    variant, num_experts, int(tokens), routing, int(routes), float(stock), float(kernel)
                )
            )
    return tuple(rows)


PUBLISHED = _rows()
