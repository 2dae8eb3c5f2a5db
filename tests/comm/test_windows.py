"""Windows: reserved, sealed, nameless, shared."""

import os
import resource
import signal

import pytest
import torch

from engine.comm.layout import WindowShape
from engine.comm.windows import Window, create_windows
from engine.errors import RunError

SHAPE = WindowShape(rows=3, hidden=5, top_k=2, local_experts=4, payload_bytes=2, lanes=2)


def test_two_mappings_see_the_same_and_need_no_descriptor() -> None:
    fd = create_windows(SHAPE.total_bytes)
    one, two = (Window(fd, SHAPE, torch.bfloat16) for _ in range(2))
    os.close(fd)
    for lane in range(2):
        region = one.region(lane)
        for number, name in enumerate(("hidden", "counts", "row_index", "weights", "out")):
            getattr(region, name).fill_(10 * lane + number)
    for lane in range(2):
        region = two.region(lane)
        assert region.hidden.shape == region.out.shape == (3, 5)
        assert region.row_index.shape == region.weights.shape == (6,)
        for number, name in enumerate(("hidden", "counts", "row_index", "weights", "out")):
            assert (getattr(region, name) == 10 * lane + number).all()


def test_memory_is_reserved_and_its_size_fixed() -> None:
    fd = create_windows(1 << 20)
    try:
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
        assert not os.get_inheritable(fd)
        for size in (0, 2 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_too_little_memory_says_how_much_is_needed() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(RunError, match=r"3\.0 MiB .* window_tokens"):
            create_windows(3 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_window_of_another_size_or_dtype_is_refused() -> None:
    fd = create_windows(SHAPE.total_bytes + 64)
    try:
        with pytest.raises(RunError, match="same plan"):
            Window(fd, SHAPE, torch.bfloat16)
        with pytest.raises(ValueError, match="2 bytes"):
            Window(fd, SHAPE, torch.float32)
    finally:
        os.close(fd)
