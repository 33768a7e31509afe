"""Waiting for other people's code, which may repack and compile for minutes, or never come back."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

_SAY_SECONDS, _END_SECONDS = 15.0, 300.0


@contextlib.contextmanager
def patience(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """`say` hears every 15 s that the block still runs; after 300 s the process ends with status 1.

    A library that waits for ever in its own code cannot be interrupted: rows that were made are out already.
    """
    done = threading.Event()

    def watch() -> None:
        waited = 0.0
        while not done.wait(_SAY_SECONDS):
            waited += _SAY_SECONDS
            if waited >= _END_SECONDS:
                say(f"{what}: no row within {waited:.0f} s, given up; rows so far stand")
                os._exit(1)
            say(f"{what}: since {waited:.0f} s; a peer repacks and compiles at its first call")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
