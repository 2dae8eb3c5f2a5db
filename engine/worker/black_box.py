"""What a rank was doing when it died: two numbers in memory that outlives it.

The rank writes them, the supervisor reads them after its death. Without this, whoever shared a
rank with a prompt that kills it would be suspected along with it.
"""

import mmap
import os
import struct

_FORMAT = struct.Struct("<qq")
_NOTHING = -1


def create_black_box() -> int:
    """A descriptor of memory for one life of one rank."""
    fd = os.memfd_create("asapctl-black-box", os.MFD_CLOEXEC)
    os.write(fd, _FORMAT.pack(_NOTHING, 0))
    return fd


def read_black_box(fd: int) -> tuple[int | None, int]:
    """The batch that was being computed, if any, and how many work items had been finished."""
    batch, work_items = _FORMAT.unpack(os.pread(fd, _FORMAT.size, 0))
    return (None if batch == _NOTHING else batch), work_items


class BlackBox:
    """The rank's side. Takes over `fd`."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _FORMAT.size)
        os.close(fd)

    def write(self, batch: int | None, work_items: int) -> None:
        _FORMAT.pack_into(self._memory, 0, _NOTHING if batch is None else batch, work_items)
