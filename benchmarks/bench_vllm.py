"""Throughput of a vLLM server on this machine's CPU with the plugin, and of the stock one, by requests in flight.

The model is a random Qwen3-MoE of six layers, 32 experts of 1024 x 512, top-2, in INT4 and MXFP4, made for the run.
Stock vLLM for CPU reads packed experts on processors with AMX alone, and INT4 of group 32 on none, so it is given the
same weight values in bf16; `--model DIR` gives both the same checkpoint instead. Requests have prompts of about 100
tokens and generate 64. Both servers are up at once and take turns, since other work on the machine hits whatever runs.

Each line is one JSON object: the requests in flight, generated tokens a second of both, and the median of the turns'
ratios.

    python benchmarks/bench_vllm.py
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


async def measure(servers: dict[str, soak.Server], words: list[str], rounds: int) -> None:
    """Prints a line for each number of requests in flight."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        loads = {}
        for kind, server in servers.items():
            await soak.started(server, session)
            loads[kind] = soak.Load(session, server.url, words)
        random_ = random.Random(0)

        async def burst(kind: str, in_flight: int) -> float:
            async def client() -> None:
                prompt = loads[kind].text(random_, 40)[:100]
                await loads[kind].ask("completions", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)

            start = time.monotonic()
            await asyncio.gather(*(client() for _ in range(in_flight)))
            return in_flight * NEW_TOKENS / (time.monotonic() - start)

        for kind in loads:
            await burst(kind, max(IN_FLIGHT))
        for in_flight in IN_FLIGHT:
            turns = [{kind: await burst(kind, in_flight) for kind in loads} for _ in range(rounds)]
            row: dict[str, Any] = {"in_flight": in_flight, "turns": rounds}
            for kind in loads:
                row[f"{kind}_tokens_per_s"] = round(statistics.median(turn[kind] for turn in turns), 1)
            ratios = sorted(turn["plugin"] / turn["stock"] for turn in turns)
            row["plugin_over_stock"] = round(statistics.median(ratios), 2)
            row["ratios"] = [round(ratios[0], 2), round(ratios[-1], 2)]
            print(json.dumps(row), flush=True)


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
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (default: 5)")
    parser.add_argument("--model", type=Path, help="checkpoint directory that both servers read")
    arguments = parser.parse_args()
    words = soak.TEXT.read_text().split()
    with tempfile.TemporaryDirectory(prefix="mxk-bench.") as name:
        folder = Path(name)
        given = arguments.model
        models = dict.fromkeys(("plugin", "stock"), given) if given else _models(folder)
        servers: dict[str, soak.Server] = {}
        try:
            for kind, model in models.items():
                (folder / kind).mkdir()
                servers[kind] = soak.Server(model, folder / kind, kind == "stock", [])
            asyncio.run(measure(servers, words, arguments.rounds))
        finally:
            for server in servers.values():
                server.stop()
        for kind, server in servers.items():
            if (soak.TAKEN in server.log.read_text()) == (kind == "stock"):
                raise SystemExit(f"{kind}: the log says that the plugin was used, or not, as it should")


if __name__ == "__main__":
    main()
