"""A stand-in for HCCL, over gloo: it refuses or blocks where HCCL's documentation says so.

Test code, for lack of an NPU: what passes here has kept the rules, which is not to say that it has
run on HCCL. The rules, from CANN's HCCL API and environment variable references (8.5 and 9.0) and
from torch-npu 2.13's ProcessGroupHCCL:

- HcclSend and HcclRecv are synchronous and come in pairs: after a send, the next operation begins
  when the matching receive has the data. So a send waits for its receive, and all operations of a
  communicator stand in one queue, where gloo lets the ones behind overtake.
- There is no receive from anyone, and no tag: operations match by their order alone.
- One tensor an operation, contiguous, of a documented type; both sides give the same number of
  elements and the same type. What a mismatch does is not documented (in practice: a hang), and
  neither is an operation without elements; both are refused.
- The first operation makes the communicator and blocks its caller until all ranks are there.
- The host ports that the environment names are free on the rank that all others ask.

Anything that would wait for ever fails at the deadline, and at once where both sides can see it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store

from engine.device.base import Kind
from engine.device.cpu import Cpu, gloo
from engine.launch.ports import LAST_PORT, parse_ports, ports_in_use

POINT_TO_POINT = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
)
REDUCED = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.bfloat16,
)
BASE_PORTS = 32  # from HCCL_IF_BASE_PORT on, since CANN 8.5; 16 before

_OPERATIONS = ("send", "recv", "allgather", "alltoall", "allreduce", "reduce_scatter", "barrier")
_HELLO, _DATA = 1, 2  # tags of the gloo group below


class HcclRefusedError(RuntimeError):
    """HCCL's documentation forbids it."""


class HcclWork:
    """An operation that is queued."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"still waiting after {timeout}")
        if self._error is not None:
            raise self._error
        return True


class HcclDouble:
    """One communicator, as ProcessGroupHCCL(store, rank, size, options)."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self._environ = environ
        self._connecting = threading.Lock()
        self._group: Any = None
        self._broken: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[HcclWork, Callable[[], None]] | None]
        self._queue = queue.SimpleQueue()
        self._pending: list[HcclWork] = []
        self._worker = threading.Thread(target=self._run, daemon=True)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> HcclWork:
        tensor = self._one(tensors, POINT_TO_POINT)
        self._check_peer(destination, tag)

        def run() -> None:
            self._meet("send", destination, tensor)
            self._wait(self._group.send([_bytes(tensor)], destination, _DATA))

        return self._put(run)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> HcclWork:
        tensor = self._one(tensors, POINT_TO_POINT)
        self._check_peer(source, tag)

        def run() -> None:
            self._meet("recv", source, tensor)
            self._wait(self._group.recv([_bytes(tensor)], source, _DATA))

        return self._put(run)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> HcclWork:
        raise HcclRefusedError("hccl does not support recvAnysource")

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> HcclWork:
        own, whole = self._one([tensor], POINT_TO_POINT), self._one([output], POINT_TO_POINT)
        self._check_size(whole, self._size * own.numel())
        return self._put(lambda: self._gather("allgather", own, whole))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> HcclWork:
        own = self._one(tensors, POINT_TO_POINT)
        ((*parts,),) = outputs

        def run() -> None:
            whole = own.new_empty(self._size, own.numel())
            self._gather("allgather", own, whole)
            for part, found in zip(parts, whole, strict=True):
                part.copy_(found.view(part.shape))

        return self._put(run)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> HcclWork:
        own, out = self._one([tensor], POINT_TO_POINT), self._one([output], POINT_TO_POINT)
        if output_splits or input_splits:
            raise NotImplementedError("uneven parts")
        self._check_size(out, own.numel())
        if len(own) % self._size:
            raise HcclRefusedError(f"{len(own)} rows in {self._size} equal parts")

        def run() -> None:
            self._agree("alltoall", own)
            self._wait(self._group.alltoall_base(_bytes(out), _bytes(own), [], []))

        return self._put(run)

    def allreduce(self, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM) -> HcclWork:
        own = self._one(tensors, REDUCED)
        self._check_reduction(op)

        def run() -> None:
            own.copy_(self._sum("allreduce", own))

        return self._put(run)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> HcclWork:
        own, out = self._one([tensor], REDUCED), self._one([output], REDUCED)
        self._check_reduction(opts.reduceOp if opts is not None else ReduceOp.SUM)
        self._check_size(own, self._size * out.numel())

        def run() -> None:
            total = self._sum("reduce_scatter", own).view(self._size, -1)
            out.copy_(total[self._rank].view(out.shape))

        return self._put(run)

    def barrier(self, opts: Any = None) -> HcclWork:
        return self._put(lambda: self._agree("barrier", torch.empty(1)))

    def abort(self) -> None:
        """What is queued fails; nothing more is taken."""
        self._fail(RuntimeError("the communicator was aborted"))
        self._queue.put(None)

    def shutdown(self) -> None:
        """After what is queued."""
        self._queue.put(None)
        if self._worker.is_alive():
            self._worker.join(self._timeout.total_seconds())

    # What the host refuses to queue.

    def _one(self, tensors: Sequence[Tensor], allowed: Sequence[torch.dtype]) -> Tensor:
        if len(tensors) != 1:
            raise HcclRefusedError(f"{len(tensors)} tensors; HCCL takes one")
        (tensor,) = tensors
        if tensor.dtype not in allowed:
            raise HcclRefusedError(f"Unsupported data type for HCCL process group: {tensor.dtype}")
        if not tensor.is_contiguous():
            raise HcclRefusedError("the tensor is not contiguous")
        if tensor.numel() == 0:
            raise HcclRefusedError("no elements")
        return tensor

    def _check_peer(self, peer: int, tag: int) -> None:
        if tag != 0:
            raise HcclRefusedError(f"tag {tag}: HCCL has no tags")
        if not 0 <= peer < self._size or peer == self._rank:
            raise HcclRefusedError(f"rank {self._rank} of {self._size} with {peer}")

    def _check_size(self, tensor: Tensor, expected: int) -> None:
        if tensor.numel() != expected:
            raise HcclRefusedError(f"{tensor.numel()} elements, expected {expected}")

    def _check_reduction(self, op: Any) -> None:
        if op != ReduceOp.SUM:
            raise NotImplementedError(f"{op}")

    def _connect(self) -> None:
        with self._connecting:
            if self._group is not None:
                return
            if self._rank == 0:
                check_ports(self._environ, ports_in_use())
            store = PrefixStore("hccl_double", self._store)
            store.set_timeout(self._timeout)
            self._group = gloo(store, self._rank, self._size, self._timeout)
            self._worker.start()

    # The queue of the communicator.

    def _put(self, run: Callable[[], None]) -> HcclWork:
        if self._broken is not None:
            raise self._broken
        self._connect()
        work = HcclWork()
        self._pending = [other for other in self._pending if not other.is_completed()] + [work]
        self._queue.put((work, run))
        return work

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                work, run = job
                if self._broken is None:
                    try:
                        run()
                    except Exception as error:
                        self._fail(error)
                work.finish(self._broken)

    def _fail(self, error: Exception) -> None:
        """A communicator that has failed does nothing more."""
        self._broken = self._broken or error
        for work in self._pending:
            work.finish(self._broken)

    # What ranks tell each other before data moves, so that what is wrong fails and hangs nobody.

    def _meet(self, operation: str, peer: int, tensor: Tensor) -> None:
        """Blocks until the peer has come to its operation with this rank, which must be the other
        half of this one.
        """
        mine, other = _describe(operation, tensor), torch.empty(3, dtype=torch.int64)
        sending = self._group.send([mine], peer, _HELLO)
        try:
            self._wait(self._group.recv([other], peer, _HELLO))
            self._wait(sending)
        except RuntimeError as error:
            raise RuntimeError(
                f"deadline: rank {peer} does not come to the other half of rank {self._rank}'s "
                f"{operation} within {self._timeout}: {error}"
            ) from None
        if other[0] == mine[0]:
            raise HcclRefusedError(
                f"deadlock: ranks {self._rank} and {peer} both {operation}, and each waits for "
                "what the other has queued behind it"
            )
        if other[0] not in (0, 1) or not torch.equal(other[1:], mine[1:]):
            raise HcclRefusedError(
                f"unmatched: rank {self._rank} has {_say(mine)}, rank {peer} {_say(other)}"
            )

    def _agree(self, operation: str, tensor: Tensor) -> None:
        """All ranks have come to the same collective."""
        mine = _describe(operation, tensor)
        all_ = torch.empty(self._size * 3, dtype=torch.int64)
        self._wait(self._group._allgather_base(all_, mine))
        for rank, other in enumerate(all_.view(self._size, 3)):
            if not torch.equal(other, mine):
                raise HcclRefusedError(
                    f"unmatched: rank {self._rank} has {_say(mine)}, rank {rank} {_say(other)}"
                )

    def _gather(self, operation: str, own: Tensor, whole: Tensor) -> None:
        self._agree(operation, own)
        self._wait(self._group._allgather_base(_bytes(whole), _bytes(own)))

    def _sum(self, operation: str, own: Tensor) -> Tensor:
        """In rank order."""
        whole = own.new_empty(self._size, *own.shape)
        self._gather(operation, own, whole)
        total = whole[0]
        for part in whole[1:]:
            total = total + part
        return total

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)


class NpuDouble(Cpu):
    """A CPU that talks as an NPU does: a Device for the transports' tests."""

    kind: ClassVar[Kind] = "npu"
    backend: ClassVar[str] = "hccl"

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        return HcclDouble(store, rank, size, timeout)


def check_ports(environ: Mapping[str, str], used: frozenset[int]) -> None:
    """Raises HcclRefusedError for host ports that HCCL would not take.

    Where nothing is set, none are looked at: HCCL's own, 60000 and on, lie where Linux gives ports
    to anybody.
    """
    host = environ.get("HCCL_HOST_SOCKET_PORT_RANGE")
    base = environ.get("HCCL_IF_BASE_PORT")
    if host is not None:  # goes before the base port
        ranges = parse_ports(host)
        if ranges is None:
            raise HcclRefusedError(f"HCCL_HOST_SOCKET_PORT_RANGE={host}")
        # A range is a choice: one process needs one of its ports.
        if ranges and all(port in used for ports in ranges for port in ports):
            raise HcclRefusedError(f"no port of {host} is free")
    elif base is not None:
        if not base.isascii() or not base.isdigit() or not 1024 <= int(base) <= 65520:
            raise HcclRefusedError(f"HCCL_IF_BASE_PORT={base}: not of 1024 to 65520")
        ports = range(int(base), int(base) + BASE_PORTS)
        if ports.stop - 1 > LAST_PORT:
            raise HcclRefusedError(f"HCCL_IF_BASE_PORT={base}: {BASE_PORTS} ports pass {LAST_PORT}")
        if taken := sorted(used.intersection(ports)):
            raise HcclRefusedError(f"port {taken[0]} is in use")


def _describe(operation: str, tensor: Tensor) -> Tensor:
    kind = POINT_TO_POINT.index(tensor.dtype)
    return torch.tensor([_OPERATIONS.index(operation), tensor.numel(), kind])


def _say(description: Tensor) -> str:
    operation, count, kind = description.tolist()
    return f"{_OPERATIONS[operation]} of {count} {POINT_TO_POINT[kind]}"


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: gloo has fewer types than HCCL."""
    return tensor.view(-1).view(torch.uint8)
