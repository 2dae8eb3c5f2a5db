"""Which node of a launch this one is, where node 0 is, and the secret that they know each other by.

Each value comes from its flag, else from torchrun's environment (PET_NNODES, PET_NODE_RANK,
PET_RDZV_ENDPOINT, or PET_MASTER_ADDR and MASTER_ADDR with their ports), else from Slurm's, where a
task of `srun` finds it.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.echo import plain
from engine.errors import UsageError
from engine.launch.endpoint import DEFAULT_PORT, check_address, endpoint, resolve, split_endpoint
from engine.launch.hostlist import first_host
from engine.launch.secret import read_secret

MOST_NODES = 4096
# A cluster's name server may learn of node 0 after it has started, as Kubernetes' does.
NAME_PATIENCE_S = 30.0


class NodeOptions(msgspec.Struct, frozen=True):
    """This node's place in a launch, and its way to node 0, which binds `port` at `host` (a name or
    an address, without brackets). With one node, the rest is empty.
    """

    nnodes: int = 1
    node_rank: int = 0
    host: str = ""
    port: int = 0
    secret: bytes = b""

    def __repr__(self) -> str:
        """Without the secret."""
        where = endpoint(self.host, self.port)
        return f"NodeOptions({self.nnodes} nodes, this is {self.node_rank}, {where})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("", repr(self))]


def node_options(
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    secret_file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    on_note: Callable[[str], None] = lambda note: None,
    patience_s: float = NAME_PATIENCE_S,
) -> NodeOptions:
    """What flags and environment say. patience_s: how long node 0's name is looked for.

    Raises UsageError with every problem, one a line.
    """
    problems: list[str] = []
    place = find_place(nnodes, node_rank, rdzv_endpoint, environ, problems)
    secret = b""
    if place.nnodes > 1:
        try:
            secret = read_secret(secret_file, environ)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    if place.nnodes == 1:
        return place
    check_address(place.host, place.port, place.node_rank, environ, on_note, patience_s)
    return msgspec.structs.replace(place, secret=secret)


def find_place(
    nnodes: str | None,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    environ: Mapping[str, str],
    problems: list[str],
) -> NodeOptions:
    """What flags and environment say, the secret excepted; no address is looked at. What is wrong
    is added to `problems`.
    """
    found = _Sources(environ, problems)
    count = found.count(nnodes)
    if count == 1:
        if node_rank:
            problems.append(
                f"--node-rank {node_rank}: there is one node, whose rank is 0; give --nnodes"
            )
        return NodeOptions()
    rank = found.rank(node_rank, count)
    host, port = found.endpoint(rdzv_endpoint)
    return NodeOptions(nnodes=count, node_rank=rank, host=host, port=port)


def stated_nodes(
    nnodes: str | None, rdzv_endpoint: str | None, environ: Mapping[str, str] = os.environ
) -> NodeOptions:
    """The number of nodes, and where node 0 is if that is said: to show, and not to start anything.
    Raises UsageError.
    """
    problems: list[str] = []
    found = _Sources(environ, problems)
    count = found.count(nnodes)
    host, port = found.endpoint(rdzv_endpoint, needed=False) if count > 1 else ("", 0)
    if problems:
        raise UsageError("\n".join(problems))
    return NodeOptions(nnodes=count, host=host, port=port)


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`, as others on that way reach it. Nothing is sent.

    Raises UsageError: no way there.
    """
    problem: OSError | None = None
    try:
        for family, kind, protocol, _, address in resolve(host, port, socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as sock:
                try:
                    sock.connect(address)
                    return str(sock.getsockname()[0])
                except OSError as error:
                    problem = problem or error
    except OSError as error:
        problem = error
    reason = problem.strerror if problem else "it has no address"
    raise UsageError(
        f"--rdzv-endpoint {endpoint(host, port)}: there is no way to it from here: {reason}; "
        "give an address of node 0 in a network that all nodes are in"
    )


class _Sources:
    """Flags first, then torchrun's environment, then Slurm's."""

    def __init__(self, environ: Mapping[str, str], problems: list[str]) -> None:
        self._environ = environ
        self._problems = problems
        # Slurm sets the number of nodes in a shell of salloc too, which is on none of them.
        self._slurm = "SLURM_NODEID" in environ

    def count(self, flag: str | None) -> int:
        where, text = self._first(
            ("--nnodes", flag),
            self._torchrun("NNODES"),
            *self._slurms("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        )
        if text is None:
            return 1
        parts = text.strip().split(":")
        numbers = [int(part) for part in parts if re.fullmatch(r"[0-9]{1,6}", part)]
        if len(parts) == 2 and len(numbers) == 2:
            if numbers[0] == numbers[1] and numbers[0] > 0:
                return numbers[0]
            self._problems.append(
                f"{where} {plain(text)}: the number of nodes is fixed at the start; give one number"
            )
        elif len(parts) == 1 and len(numbers) == 1 and 1 <= numbers[0] <= MOST_NODES:
            return numbers[0]
        else:
            self._problems.append(
                f"{where} {plain(text) or 'empty'}: expected a whole number from 1 to {MOST_NODES}"
            )
        return 1

    def rank(self, flag: int | None, count: int) -> int:
        where, text = self._first(
            ("--node-rank", None if flag is None else str(flag)),
            self._torchrun("NODE_RANK"),
            *self._slurms("SLURM_NODEID"),
        )
        if text is None:
            self._problems.append(
                f"which of the {count} nodes is this? Give --node-rank, from 0 to {count - 1}"
            )
        elif not re.fullmatch(r"[0-9]{1,6}", text.strip()) or int(text) >= count:
            self._problems.append(
                f"{where} {plain(text) or 'empty'}: with {count} nodes it is from 0 to {count - 1}"
            )
        elif where == "SLURM_NODEID" and self._environ.get("SLURM_LOCALID", "0") != "0":
            self._problems.append(
                "Slurm started several tasks on this node; one a node is needed: "
                "srun --ntasks-per-node=1"
            )
        else:
            return int(text)
        return 0

    def endpoint(self, flag: str | None, needed: bool = True) -> tuple[str, int]:
        try:
            where, text = self._first(
                ("--rdzv-endpoint", flag), self._torchrun("RDZV_ENDPOINT"), self._master()
            )
            if text is not None:
                return split_endpoint(text.strip(), where)
            where, text = self._first(*self._slurms("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
            if text is not None:
                return first_host(text, where), DEFAULT_PORT
            if needed:
                raise UsageError(
                    "where is node 0? Give --rdzv-endpoint HOST:PORT, an address of node 0 and a "
                    "port that is free there, the same on every node"
                )
        except UsageError as error:
            self._problems.append(str(error))
        return "", 0

    def _master(self) -> tuple[str, str | None]:
        for prefix in ("PET_", ""):
            host = self._environ.get(f"{prefix}MASTER_ADDR")
            if host:
                port = self._environ.get(f"{prefix}MASTER_PORT") or str(DEFAULT_PORT)
                return f"{prefix}MASTER_ADDR", endpoint(host.strip().strip("[]"), port.strip())
        return "", None

    def _torchrun(self, name: str) -> tuple[str, str | None]:
        return f"PET_{name}", self._environ.get(f"PET_{name}") or None

    def _slurms(self, *names: str) -> list[tuple[str, str | None]]:
        return [(name, self._environ.get(name) or None) for name in names] if self._slurm else []

    @staticmethod
    def _first(*candidates: tuple[str, str | None]) -> tuple[str, str | None]:
        return next((found for found in candidates if found[1] is not None), ("", None))
