import os
from pathlib import Path

import psutil
import pytest

from engine.launch.machine import read_machine

GIB = 2**30


@pytest.fixture(autouse=True)
def big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 64 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.cores, machine.memory_bytes) == (16, 64 * GIB)
    assert machine.memory_limit == "this machine"


def test_version_2_limits_of_every_ancestor_count(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": str(GIB),
            "sys/fs/cgroup/job/cpu.max": "250000 100000",
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.current": str(5 * GIB),
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nfile 3",
        },
    )
    machine = read_machine(root)
    assert (machine.cores, machine.memory_bytes) == (2, 5 * GIB)
    assert machine.memory_limit == "its control group"


def test_version_1_limits_count_also_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    machine = read_machine(root)
    assert (machine.cores, machine.memory_bytes) == (1, 2 * GIB)


def test_version_1_without_limits(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert read_machine(root) == read_machine(tmp_path / "nothing")
