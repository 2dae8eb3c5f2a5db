"""Windows: nameless shared memory that two ranks map, as torch tensors without a copy."""

import fcntl
import mmap
import os

import torch
from torch import Tensor

from engine.comm.channel import Region
from engine.comm.layout import WindowShape
from engine.errors import RunError


def create_windows(total: int) -> int:
    """A file descriptor of `total` bytes of shared memory, all of it reserved now.

    It has no name, so it vanishes with the last process that holds it, however that ends. It can
    neither shrink nor grow, so no mapping of it can fault. RunError when there is not the memory.
    """
    fd = os.memfd_create("asapctl-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise RunError(
            f"cannot reserve {total / 2**20:.1f} MiB of shared memory for a window: "
            f"{error.strerror}. Free memory, or lower [comm] window_tokens or [schedule] lanes."
        ) from error
    return fd


class Window:
    """A mapped window. `fd` may be closed afterwards: the mapping stands by itself.

    dtype: the payload's. ValueError when it does not fit the shape, RunError when fd's size does
    not.
    """

    def __init__(self, fd: int, shape: WindowShape, dtype: torch.dtype) -> None:
        if dtype.itemsize != shape.payload_bytes:
            raise ValueError(f"{dtype} does not have {shape.payload_bytes} bytes an element")
        size = os.fstat(fd).st_size
        if size != shape.total_bytes:
            raise RunError(
                f"a window has {size} bytes where {shape.total_bytes} were agreed; "
                "both ends must run the same plan"
            )
        self.shape = shape
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
        self._regions = [_region(memory, shape, dtype, lane) for lane in range(shape.lanes)]

    def region(self, lane: int) -> Region:
        """The lane's arrays at full size."""
        return self._regions[lane]

    def close(self) -> None:
        """Lets go of the memory. It is unmapped when the last tensor that views it is gone.

        Unmapping it here would leave such a tensor pointing at nothing.
        """
        self._regions = []


def _region(memory: mmap.mmap, shape: WindowShape, dtype: torch.dtype, lane: int) -> Region:
    base = shape.lane_at(lane)

    def view(at: int, dtype: torch.dtype, *sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        if count == 0:  # torch.frombuffer refuses to make an empty tensor
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + at).view(sizes)

    return Region(
        hidden=view(shape.hidden_at, dtype, shape.rows, shape.hidden),
        counts=view(shape.counts_at, torch.int32, shape.local_experts),
        row_index=view(shape.row_index_at, torch.int32, shape.pairs),
        weights=view(shape.weights_at, torch.float32, shape.pairs),
        out=view(shape.out_at, dtype, shape.rows, shape.hidden),
    )
