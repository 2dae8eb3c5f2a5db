"""Ending an instance from outside: politely, by its controller, or at once, by a signal."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from engine.control.messages import Snapshot
from engine.errors import RunError
from engine.launch.attached import attached
from engine.launch.registry import InstanceRecord
from engine.launch.runtime_folder import is_held

_LOOK_S = 0.5

OnWait = Callable[[Snapshot], None]


def stop_instance(
    record: InstanceRecord,
    now: bool = False,
    timeout_s: float | None = None,
    on_wait: OnWait = lambda snapshot: None,
) -> None:
    """Ends the instance, and returns when its supervisor is gone.

    It finishes the requests that it has, unless `now`. One that has not started yet, and a prefill
    run, whose results so far stay, end at once anyway. on_wait is told how things stand meanwhile.
    Raises RunError when it has not ended after `timeout_s` seconds; it goes on ending then.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with _open_process(record) as supervisor:
        if supervisor is None:
            return
        if now or record.command == "prefill" or record.state == "starting":
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(supervisor, signal.SIGTERM)
            if not _ended(supervisor, _left(deadline)):
                raise RunError(
                    f"{record.name} (pid {record.pid}) has not ended within {timeout_s:g} s; "
                    "it is still ending"
                )
        else:
            _drain(record, supervisor, deadline, on_wait)


def _drain(
    record: InstanceRecord, supervisor: int, deadline: float | None, on_wait: OnWait
) -> None:
    with attached(record) as clients:
        for client in clients:
            client.quit()
        while True:
            for client in clients:
                client.request_snapshot()
                client.receive(0)
            snapshots = [s for client in clients if (s := client.snapshot()) is not None]
            for snapshot in snapshots:
                on_wait(snapshot)
            left = _left(deadline)
            if _ended(supervisor, _LOOK_S if left is None else min(left, _LOOK_S)):
                return
            if left == 0:
                there = (
                    f"{sum(s.running + s.waiting for s in snapshots)} requests are not done"
                    if snapshots
                    else "its controller does not answer"
                )
                raise RunError(
                    f"{record.name} has not ended: {there}; it takes no new ones, and "
                    f"`asapctl stop {record.name} --now` ends it at once"
                )


@contextlib.contextmanager
def _open_process(record: InstanceRecord) -> Iterator[int | None]:
    """A descriptor of the supervisor, which no later process of that number can be mistaken for."""
    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield fd if is_held(record.folder) else None
    finally:
        os.close(fd)


def _ended(process: int, timeout_s: float | None) -> bool:
    return bool(select.select([process], [], [], timeout_s)[0])


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
