"""Implementations of a layer by turns, a process each: they share neither threads nor memory, but the machine's time.

In one process the thread pools of two libraries would be in each other's way: a pool that has just worked spins for a
while, on a core that the next one needs. So each turn begins after a pause.
"""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxk_compile.bench import cases, implementations
from mxk_compile.bench.implementations import Implementation
from mxk_compile.bench.points import Point
from mxk_compile.errors import KernelError
from mxk_compile.kernels import cpu
from mxk_compile.testing import MoECase, random_layer
from mxk_compile.variants import VARIANTS

OURS = "mxk"
_TURN_SECONDS, _MOST_CALLS = 0.1, 8  # of the timed calls of a turn
_PAUSE_SECONDS = 0.05  # pools were idle 5 to 50 ms after their last call
_WAIT_SECONDS = 5.0  # for a process to end
_ANSWER_SECONDS = 300.0  # repacking a layer is what takes longest


class Gone(Exception):
    """A participant cannot take part, or its process has ended: why."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a process is to run.

    Attributes:
        name: "mxk ISA[:ROWS][@LIBRARY]": rows from which an expert takes the tile unit, another build of the
            kernel library; or a peer's module.
        point: the first call; of others, only tokens may differ.
        copies: of the layer, used in turn.
        threads: of the CPU.
        cpu_time: counts CPU time of all threads instead of wall time.
    """

    name: str
    point: Point
    copies: int
    threads: int
    cpu_time: bool = False


class Participant:
    """An implementation in a process of its own, idle between turns; raises Gone where it cannot take part."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_take_part, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.name, self.version = self._answer()
        except Gone:
            self.close()
            raise

    def first_call(self, point: Point) -> Tensor:
        """Takes up another point and makes each of its calls once; the result of the first, fp32."""
        return torch.from_numpy(self._answer(point))

    def turn(self) -> list[float]:
        """A pause, a call to warm up, then some that are timed: their seconds."""
        time.sleep(_PAUSE_SECONDS)
        seconds: list[float] = self._answer(None)
        return seconds

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(_WAIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self, *messages: Any) -> Any:
        try:
            for message in messages:
                self._connection.send(message)
            if not self._connection.poll(_ANSWER_SECONDS):
                raise Gone(f"no answer within {_ANSWER_SECONDS:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):  # of a pipe whose other end is gone
            self._process.join(_WAIT_SECONDS)
            raise Gone(f"its process has ended with {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise Gone(str(answer))
        return answer


def _take_part(connection: Connection, setup: Setup) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no row
    torch.set_num_threads(setup.threads)
    clock = time.process_time if setup.cpu_time else time.perf_counter
    with torch.inference_mode():
        try:
            implementation, layers = _prepared(setup)
        except (KernelError, Gone) as error:
            connection.send(Gone(str(error)))
            return
        name = setup.name if setup.name.startswith(OURS) else implementation.kernel
        connection.send((name, implementation.version))
        step = 0
        while True:
            try:
                point = connection.recv()
            except EOFError:
                return
            if point is not None:
                rotation = cases.rotation(point, layers, cases.cache_bytes("cpu"), chain=1)
                x, ids, weights = rotation.layers[0].routing
                first = implementation.layers[0](x, ids, weights).float().numpy()
                for layer, ids in rotation.calls:  # libraries that prepare what they meet have met it all
                    implementation.layers[layer](x, ids, weights)
                connection.send(first)
                continue
            seconds: list[float] = []
            wanted = 0
            while len(seconds) <= wanted:
                layer, ids = rotation.calls[step % len(rotation.calls)]
                step += 1
                start = clock()
                implementation.layers[layer](x, ids, weights)
                seconds.append(clock() - start)
                wanted = wanted or min(_MOST_CALLS, max(1, int(_TURN_SECONDS / max(seconds[0], 1e-9))))
            connection.send(seconds[1:])


def _prepared(setup: Setup) -> tuple[Implementation, list[MoECase]]:
    """The implementation, and the layers without memory for their weights: it holds what it needs."""
    ours, _, isa = setup.name.partition(" ")
    if ours == OURS:
        isa, _, build = isa.partition("@")
        name, _, rows = isa.partition(":")
        if build:
            cpu.LIBRARY = Path(build).absolute()
            cpu._open.cache_clear()
        library = cpu._library()
        if library.mxk_cpu_select(name.encode()):
            raise Gone("not here")
        library.mxk_cpu_matrix_rows(ctypes.c_int64(int(rows or 0)))
    variant, point = VARIANTS[setup.point.variant], setup.point
    layers = [random_layer(variant, point.num_experts, seed, "cpu") for seed in range(setup.copies)]
    rotation = cases.rotation(point, layers, cases.cache_bytes("cpu"), chain=1)
    implementation = implementations.make("fused" if ours == OURS else setup.name, rotation.layers)
    return implementation, [_hollow(layer) for layer in layers]


def _hollow(layer: MoECase) -> MoECase:
    def shape_of(tensor: Tensor) -> Tensor:
        return tensor.new_empty(()).expand(tensor.shape)

    return dataclasses.replace(
        layer,
        w13=shape_of(layer.w13),
        w13_scale=shape_of(layer.w13_scale),
        w2=shape_of(layer.w2),
        w2_scale=shape_of(layer.w2_scale),
    )
