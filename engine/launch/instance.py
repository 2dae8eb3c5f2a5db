"""One instance of a launch: its controller and its ranks, wherever they are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from engine.control.client import Client
from engine.control.controller import ControllerSpec
from engine.control.messages import Supervise
from engine.curve import Keys
from engine.errors import RunError
from engine.launch.endpoint import endpoint
from engine.launch.host import listen_at
from engine.launch.orders import Death
from engine.launch.plan import Plan
from engine.launch.ranks import Ranks
from engine.launch.supervisor import Supervisor
from engine.serve.spec import prompt_cost
from engine.topology.ranks import RankId

if TYPE_CHECKING:
    from engine.launch.running import Launch

# Over the others a communicator whose other end died cannot be relied on to let go.
RECOVERING = ("shm", "gloo")


class Instance:
    """The guard of its client (`engine.control.client.Guard`).

    A rank that ends is started again once the instance has been ready. The end of its controller,
    and of a rank before that, is the end of the instance, and `launch` says what that means.
    """

    def __init__(
        self, index: int, plan: Plan, supervisor: Supervisor, launch: Launch, keys: Keys | None
    ) -> None:
        self.index = index
        one = plan.instances == 1
        self.controller = "controller" if one else f"controller {index}"
        self.address = f"ipc://{supervisor.folder}/{'control' if one else f'control-{index}'}"
        self.ready = False
        self.lost = False
        self.client: Client | None = None
        self._plan = plan
        self._supervisor = supervisor
        self._launch = launch
        self._keys = keys
        self._listener = listen_at(plan.address) if keys is not None else None
        self._remote = None
        if self._listener is not None:
            self._remote = f"tcp://{endpoint(*self._listener.getsockname()[:2])}"
        self.ranks = Ranks(
            plan,
            self._remote or self.address,
            lambda id_: launch.host_of(index, id_),
            index,
            keys,
        )

    def start(self, client: Client) -> None:
        """Starts every process. `client` is told of deaths from now on."""
        self.client = client
        schedule = self._plan.topology.schedule
        least = schedule.min_batch_tokens
        controller = ControllerSpec(
            address=self.address,
            agreement=self.ranks.agreement,
            ranks=self.ranks.ids,
            groups=self._plan.groups,
            min_batch_tokens=None if least == "auto" else least,
            max_batch_tokens=schedule.max_batch_tokens,
            exclusive_tokens=schedule.exclusive_tokens,
            max_wait_s=schedule.max_wait_ms / 1000,
            policy=schedule.policy,
            chunk_tokens=schedule.chunk_tokens,
            in_lockstep=schedule.in_lockstep,
            stall_timeout_s=schedule.stall_timeout_s,
            ttft_slo_s=schedule.ttft_slo_s,
            tensor_parallel=self._plan.tensor_parallel,
            cost=prompt_cost(self._plan.config),
            remote=self._remote,
            keys=self._keys,
            paced=self._plan.paced,
        )
        fds = [] if self._listener is None else [os.dup(self._listener.fileno())]
        payload = msgspec.msgpack.encode(controller)
        self._supervisor.spawn("engine.control.service:main", self.controller, payload, fds)
        for fd in fds:
            os.close(fd)
        client.send(Supervise())
        self.ranks.start()

    def fileno(self) -> int:
        return self._launch.fileno()

    def check(self) -> None:
        self._launch.check()

    def kill(self, id_: RankId) -> None:
        self.ranks.kill(id_)

    def end(self, reason: str | None) -> None:
        """The controller says that the instance is over. Raises RunError if the launch failed."""
        if reason is not None:
            self._launch.lose(self, reason)

    def died(self, death: Death) -> None:
        """Raises RunError when the instance cannot go on without the rank."""
        if not self.ready or self.client is None:
            raise RunError(death.reason)
        if self._plan.transport not in RECOVERING:
            raise RunError(
                f"{death.reason}\nover {self._plan.transport} a rank cannot be started again by "
                "itself: start the instance again"
            )
        self.client.send(self.ranks.restart(death))

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def end_processes(self) -> None:
        """Kills what is left of a lost instance."""
        for id_ in self.ranks.ids:
            self.ranks.kill(id_)
        self._supervisor.kill(self.controller)
