"""Throughput of a vLLM server on this machine's CPU with the plugin, and of the stock one, by requests in flight.

The model is a random Qwen3-MoE of six layers, 32 experts of 1024 x 512, top-2, in INT4 and MXFP4, made for the run.
Stock vLLM for CPU reads packed experts on processors with AMX alone, and INT4 of group 32 on none, so it is given the
same weight values in bf16; `--model DIR` gives both the same checkpoint instead. Requests have prompts of about 100
tokens and generate 64. Servers take turns, since other work on the machine hits whatever runs.

Each line is one JSON object: a server, the requests in flight, generated tokens a second. The last has the ratios.

    python benchmarks/bench_vllm.py --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import soak

SIZES = {"HIDDEN": 1024, "INTERMEDIATE": 512, "EXPERTS": 32}
IN_FLIGHT = (1, 4, 16)
NEW_TOKENS = 64


async def measure(server: soak.Server, words: list[str]) -> dict[int, float]:
    """Generated tokens a second by requests in flight."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await soak.started(server, session)
        load = soak.Load(session, server.url, words)
        random_ = random.Random(0)

        async def client(count: int) -> None:
            for _ in range(count):
                prompt = load.text(random_, 40)[:100]
                await load.ask("completions", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)

        await asyncio.gather(*(client(1) for _ in range(max(IN_FLIGHT))))
        rates = {}
        for in_flight in IN_FLIGHT:
            start, count = time.monotonic(), max(2, 6 // in_flight)
            await asyncio.gather(*(client(count) for _ in range(in_flight)))
            rates[in_flight] = in_flight * count * NEW_TOKENS / (time.monotonic() - start)
        return rates


def _models(folder: Path) -> dict[str, Path]:
    sys.path.insert(0, str(soak.ROOT / "tests"))
    import int4_checkpoint

    for name, size in SIZES.items():
        setattr(int4_checkpoint, name, size)
    state = int4_checkpoint.write(folder / "packed")
    int4_checkpoint.write_plain(folder / "packed", state, folder / "bf16")
    return {"plugin": folder / "packed", "stock": folder / "bf16"}


def main() -> None:
    """The command; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="servers of each kind (default: 1)")
    parser.add_argument("--model", type=Path, help="checkpoint directory that both servers read")
    arguments = parser.parse_args()
    words = soak.TEXT.read_text().split()
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="mxk-bench.") as name:
        folder = Path(name)
        given = arguments.model
        models = dict.fromkeys(("plugin", "stock"), given) if given else _models(folder)
        for _ in range(arguments.rounds):
            for kind, model in models.items():
                server = soak.Server(model, folder, kind == "stock", [])
                try:
                    found = asyncio.run(measure(server, words))
                finally:
                    server.stop()
                if (soak.TAKEN in server.log.read_text()) == (kind == "stock"):
                    raise SystemExit(f"{kind}: the log says that the plugin was used, or not, as it should")
                for in_flight, rate in found.items():
                    rates.setdefault((kind, in_flight), []).append(rate)
                    row: dict[str, Any] = {"server": kind, "in_flight": in_flight}
                    print(json.dumps(row | {"generated_tokens_per_s": round(rate, 1)}), flush=True)
    middle = {key: statistics.median(values) for key, values in rates.items()}
    print(
        json.dumps(
            {"plugin_over_stock": {n: round(middle["plugin", n] / middle["stock", n], 2) for n in IN_FLIGHT}}
        )
    )


if __name__ == "__main__":
    main()
