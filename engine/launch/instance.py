"""A running instance: from a Plan to processes and a client of their controller."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import zmq

from engine import __version__
from engine.comm.windows import create_windows
from engine.control.client import Client
from engine.control.controller import ControllerSpec
from engine.control.messages import Agreement, Snapshot
from engine.launch.plan import Plan
from engine.launch.supervisor import Supervisor
from engine.topology.ranks import RankId
from engine.worker.spec import PeerSpec, RankSpec

_POLL_S = 0.1

OnProgress = Callable[[Snapshot], None]


@contextmanager
def start_instance(
    plan: Plan, on_progress: OnProgress | None = None, name: str = "prefill"
) -> Iterator[Client]:
    """Starts every process of `plan`, waits until all are ready, and yields a client.

    on_progress is called several times a second while ranks load. Leaving the context ends every
    process. RunError, in here or from the client: a process failed; it names the first one.
    """
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(name))
        _spawn_all(plan, supervisor)
        context = stack.enter_context(zmq.Context())
        client = Client(context, _controller_address(supervisor.folder), supervisor)
        stack.callback(client.close)
        while True:
            snapshot = client.fresh_snapshot(timeout_s=5.0)
            if snapshot is not None and on_progress is not None:
                on_progress(snapshot)
            if snapshot is not None and snapshot.ready:
                break
            client.receive(_POLL_S)
        yield client


def _spawn_all(plan: Plan, supervisor: Supervisor) -> None:
    agreement = _agreement(plan)
    attention = [RankId("attention", group) for group in range(plan.groups)]
    expert = [RankId("expert", rank) for rank in range(len(plan.experts))]
    controller = _controller_spec(plan, agreement, supervisor.folder, attention + expert)
    supervisor.spawn(
        "engine.control.controller:main", "controller", msgspec.msgpack.encode(controller)
    )
    windows: dict[tuple[RankId, RankId], int] = {}
    try:
        for a in attention:
            for e in expert:
                windows[a, e] = create_windows(plan.windows[e.rank].total_bytes)
        for e in expert:
            spec = _rank_spec(plan, agreement, supervisor.folder, e, attention)
            fds = [windows[a, e] for a in attention]
            supervisor.spawn("engine.worker.expert:main", str(e), msgspec.msgpack.encode(spec), fds)
        for a in attention:
            spec = _rank_spec(plan, agreement, supervisor.folder, a, expert)
            fds = [windows[a, e] for e in expert]
            supervisor.spawn(
                "engine.worker.attention:main", str(a), msgspec.msgpack.encode(spec), fds
            )
    finally:
        for fd in windows.values():
            os.close(fd)  # the packet to the zygote holds its own


def _controller_address(folder: Path) -> str:
    return f"ipc://{folder}/control"


def _bell_address(folder: Path, rank: RankId) -> str:
    return f"ipc://{folder}/{rank.role}-{rank.rank}.{rank.incarnation}"


def _agreement(plan: Plan) -> Agreement:
    return Agreement(
        version=__version__,
        model=str(plan.model_dir),
        model_hash=plan.model_hash,
        dtype=plan.dtype,
        hidden_size=plan.config.hidden_size,
        layers=plan.config.layers,
        experts=plan.config.experts,
        top_k=plan.config.top_k,
        lanes=plan.lanes,
        window_tokens=plan.window_tokens,
    )


def _controller_spec(
    plan: Plan, agreement: Agreement, folder: Path, ranks: list[RankId]
) -> ControllerSpec:
    schedule = plan.topology.schedule
    return ControllerSpec(
        address=_controller_address(folder),
        agreement=agreement,
        ranks=ranks,
        groups=plan.groups,
        min_batch_tokens=schedule.min_batch_tokens,
        max_batch_tokens=schedule.max_batch_tokens,
        exclusive_tokens=schedule.exclusive_tokens,
        max_wait_s=schedule.max_wait_ms / 1000,
    )


def _rank_spec(
    plan: Plan, agreement: Agreement, folder: Path, rank: RankId, others: list[RankId]
) -> RankSpec:
    def expert_of(other: RankId) -> int:
        return rank.rank if rank.role == "expert" else other.rank

    return RankSpec(
        id=rank,
        model_dir=str(plan.model_dir),
        agreement=agreement,
        controller=_controller_address(folder),
        bell=_bell_address(folder, rank),
        peers=[
            PeerSpec(other, _bell_address(folder, other), plan.windows[expert_of(other)])
            for other in others
        ],
        experts=[(span.start, span.stop) for span in plan.experts],
        threads=1,
    )
