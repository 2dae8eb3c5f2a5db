"""What a worker and benchmarks/peer_process.py say to each other: JSON lines, over the worker's
standard input and output.

First {"model": DIR, "threads": N, ...}, answered by {"setting": TEXT} once the model is warm; then
{"prompts": [[ID, ...], ...], "threads": N}, answered by {"seconds": S, "tokens": [ID, ...]}.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Worker(Protocol):
    """setting: what was chosen at the warm-up, for the table."""

    setting: str

    def prefill(self, prompts: list[list[int]], threads: int) -> list[int]:
        """The likeliest first token after each prompt."""


def serve(load: Callable[[dict[str, Any]], Worker]) -> None:
    """Until standard input ends. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=answers, flush=True)

        worker = load(json.loads(sys.stdin.readline()))
        answer({"setting": worker.setting})
        for line in sys.stdin:
            order = json.loads(line)
            start = time.perf_counter()
            tokens = worker.prefill(order["prompts"], order["threads"])
            answer({"seconds": time.perf_counter() - start, "tokens": tokens})


def fastest(choices: dict[str, Callable[[], object]]) -> str:
    """The name of the choice that takes the least time, each after a first try."""
    took: dict[str, float] = {}
    for name, run in choices.items():
        run()
        start = time.perf_counter()
        run()
        took[name] = time.perf_counter() - start
    return min(took, key=lambda name: took[name])


def batches(lengths: list[int], most_tokens: int, waste: float) -> list[list[int]]:
    """Indices of prompts that go together: of similar lengths, padded at most `most_tokens`, of
    which at most the share `waste` is padding. A longer prompt goes alone.
    """
    found: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found:
            padded = lengths[found[-1][0]] * (len(found[-1]) + 1)
            more = real + lengths[index]
            if padded <= most_tokens and padded - more <= waste * padded:
                found[-1].append(index)
                real = more
                continue
        found.append([index])
        real = lengths[index]
    return found
