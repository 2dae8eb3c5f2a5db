"""The model in plain processes of one thread each, which share the batches out and nothing else.

The same kernels as the ranks', in the same batches: no dispatch, no windows, no messages between
layers. It is what the engine would be if disaggregation cost nothing.
"""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from engine.control.client import Client
from engine.errors import RunError
from engine.schedule.policy import AsapPolicy
from engine.schedule.types import Request
from engine.topology.schema import Topology

_END_S = 10
_ANSWER_S = 10.0


class Ran(NamedTuple):
    """seconds: from the first batch given out to the last one done. tokens: the first token of each
    prompt; 0 where attention alone ran.
    """

    seconds: float
    tokens: list[int]


class PlainProcesses:
    """A context manager: processes that hold the whole model, and wait for batches."""

    def __init__(self, model_dir: Path, count: int) -> None:
        self._links: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, model_dir), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "PlainProcesses":
        with _ended():
            for link in self._links:
                link.recv()  # it has loaded
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(_END_S)
            process.kill()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        batches: Sequence[Sequence[int]],
        attention_alone: bool = False,
    ) -> Ran:
        """Each process takes the next batch (places of prompts) as soon as it is done with one."""
        tokens = [0] * len(prompts)
        waiting = deque(batches)
        given: dict[Connection, Sequence[int]] = {}
        start = time.perf_counter()

        def give(link: Connection) -> None:
            if waiting:
                given[link] = batch = waiting.popleft()
                link.send((attention_alone, [list(prompts[key]) for key in batch]))

        with _ended():
            for link in self._links:
                give(link)
            while given:
                for ready in wait(list(given)):
                    assert isinstance(ready, Connection)
                    for key, token in zip(given.pop(ready), ready.recv(), strict=True):
                        tokens[key] = token
                    give(ready)
        return Ran(time.perf_counter() - start, tokens)


def least_batch(client: Client) -> int:
    """Up to how many tokens an instance aggregates prompts, which it may have measured."""
    snapshot = client.fresh_snapshot(_ANSWER_S)
    if snapshot is None or snapshot.min_batch_tokens is None:
        raise RunError("the controller does not say how large its batches are")
    return snapshot.min_batch_tokens


def engine_batches(
    topology: Topology, groups: int, min_batch_tokens: int, lengths: Sequence[int]
) -> list[list[int]]:
    """The batches that the engine makes of prompts that come all at once: places of prompts."""
    schedule = topology.schedule
    policy = AsapPolicy(
        groups,
        schedule.lanes,
        min_batch_tokens,
        schedule.max_batch_tokens,
        schedule.exclusive_tokens,
        max_wait_s=0.0,
    )
    for key, length in enumerate(lengths):
        policy.add(Request(key, length, arrival=0.0))
    policy.drain()
    batches = []
    while assignments := policy.next(now=0.0):
        for assignment in assignments:
            for batch in assignment.batches:
                batches.append([segment.key for segment in batch.segments])
                policy.finished(assignment.group, batch.id)
    return batches


@contextmanager
def _ended() -> Iterator[None]:
    """RunError when a process is gone with which something is exchanged inside."""
    try:
        yield
    except (EOFError, OSError):
        raise RunError("a plain process ended; what it said is above") from None


def _work(link: Connection, model_dir: Path) -> None:
    """Answers once when the model is there, and then each batch with its first tokens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from engine.device.base import open_device
    from engine.worker.heap import keep_freed_memory

    open_device("cpu")
    torch.set_num_threads(1)
    keep_freed_memory()
    with torch.inference_mode():
        run = _model(model_dir)
        link.send([])
        while True:
            try:
                attention_alone, prompts = link.recv()
            except (EOFError, OSError):
                return
            link.send(run(prompts, attention_alone))


def _model(model_dir: Path) -> Callable[[list[list[int]], bool], list[int]]:
    import torch

    from engine.comm.routing import plan_dispatch
    from engine.device.fused import fused
    from engine.model.attention import PromptKV, Span
    from engine.model.config import load_config
    from engine.model.loading import load_attention, load_experts

    config = load_config(model_dir)
    every = range(config.experts)
    attention = load_attention(model_dir, config, torch.float32)
    experts = load_experts(model_dir, config, torch.float32, every)
    if (prepare := fused(attention.device).prepare) is not None:
        prepare(experts.tables)

    def run(prompts: list[list[int]], attention_alone: bool) -> list[int]:
        spans = [Span(0, len(prompt)) for prompt in prompts]
        kvs = [PromptKV(config, s.length, attention.dtype, keep=False) for s in spans]
        hidden = attention.embed(torch.tensor([token for p in prompts for token in p]))
        rope = attention.rope(torch.cat([torch.arange(span.length) for span in spans]))
        for layer in range(config.layers):
            hidden = attention.attend(layer, hidden, rope, spans, kvs)
            if attention_alone:
                continue
            if not config.is_moe(layer):
                hidden = attention.dense(layer, hidden)
                continue
            routed = attention.route(layer, hidden)
            # Of one rank that has every expert: every token goes to it, in its own place.
            (part,) = plan_dispatch(routed.experts, routed.weights, [every])
            out = torch.empty_like(hidden)
            experts.serve(layer, routed.x, part.counts, part.row_index, part.weights, out)
            shared = attention.shared(layer, routed.x)
            hidden = hidden + (out if shared is None else out.add_(shared))
        if attention_alone:
            return [0] * len(prompts)
        last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        tokens: list[int] = attention.logits(hidden[last]).argmax(-1).tolist()
        return tokens

    return run
