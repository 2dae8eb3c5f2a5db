"""Workers (benchmarks/peer_workers) as processes: they load a model once, then run on command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from engine.errors import RunError

_SCRIPTS = Path(__file__).parent / "peer_workers"
_END_S = 20
_LAST_LINES = 3


class Ran(msgspec.Struct, frozen=True):
    """seconds: from the order until the last worker's answer. tokens: the first token of each
    prompt.
    """

    seconds: float
    tokens: list[int]


class PeerProcess:
    """One worker. log: where its standard error goes."""

    def __init__(self, python: Path, script: str, log: Path, env: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPTS / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | env,
                text=True,
            )

    def order(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._pipe(self._process.stdin), flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> dict[str, Any]:
        """Waits for it. RunError, with the worker's last words, when it has ended."""
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failure(self) -> RunError:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        words = " / ".join([line for line in lines if line.strip()][-_LAST_LINES:])
        return RunError(f"exit code {code}: {words or 'it said nothing'} (all of it: {self._log})")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def run_on(workers: list[PeerProcess], shares: list[list[int]], prompts: list[list[int]]) -> Ran:
    """Worker i runs the prompts `shares[i]`, all at once; with one worker it has all cores."""
    threads = len(os.sched_getaffinity(0)) if len(workers) == 1 else 1
    start = time.perf_counter()
    for worker, share in zip(workers, shares, strict=True):
        worker.order({"prompts": [prompts[index] for index in share], "threads": threads})
    tokens = [0] * len(prompts)
    for worker, share in zip(workers, shares, strict=True):
        for index, token in zip(share, worker.answer()["tokens"], strict=True):
            tokens[index] = token
    return Ran(time.perf_counter() - start, tokens)
