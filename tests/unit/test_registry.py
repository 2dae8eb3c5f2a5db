"""Runtime folders and the records in them: who runs, under which name, and what dead ones leave."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import RunError, UsageError
from engine.launch.registry import (
    InstanceRecord,
    NoInstanceError,
    check_free,
    find_instance,
    list_instances,
    read_record,
    write_record,
)
from engine.launch.runtime_folder import (
    base_folder,
    check_name,
    create_folder,
    is_held,
    living_folders,
    remove_folder,
    remove_when_free,
)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def record(name: str, folder: Path, **more: object) -> InstanceRecord:
    return InstanceRecord(
        name=name,
        pid=os.getpid(),
        command="launch",
        model="/models/demo",
        topology="cpu.toml",
        started=1.5,
        controller=f"ipc://{folder}/control",
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of an instance "default" whose only process is another one than this."""
    code = (
        "from engine.launch.runtime_folder import create_folder\n"
        "print(create_folder('default'), flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        write_record(folder, record("default", folder, url="http://127.0.0.1:1"))
        yield folder
        owner.kill()


def hold(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.mark.parametrize("name", ["default", "a", "0-9", "prefill-123", "x" * 32])
def test_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "..", "a.b", "ä", "a\n", "-a", "x" * 33])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_a_record_is_found_by_name_and_alone_without(running: Path) -> None:
    found = find_instance("default")
    assert found == read_record(running)
    assert found == find_instance(None)
    assert (found.folder, found.logs) == (running, running / "logs")
    assert [path.name for path in running.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(NoInstanceError, match='no instance is named "other"; running: default'):
        find_instance("other")


def test_several_have_to_be_named(running: Path) -> None:
    second = create_folder("another")
    write_record(second, record("another", second))
    with pytest.raises(UsageError, match="name one of them: another, default"):
        find_instance(None)
    assert [found.name for found in list_instances()] == ["another", "default"]


def test_nothing_runs() -> None:
    assert list_instances() == []
    with pytest.raises(NoInstanceError, match="no instance is running") as error:
        find_instance(None)
    assert error.value.exit_code == 3


def test_a_name_is_given_once(running: Path) -> None:
    check_free("other")
    with pytest.raises(UsageError, match=rf'named "default" is already.*pid {os.getpid()}'):
        check_free("default")
    with pytest.raises(FileExistsError, match="already running"):
        create_folder("default")
    assert read_record(running) is not None


def test_what_the_dead_left_is_removed_and_its_name_is_free_again() -> None:
    stale = base_folder() / "default"
    (stale / "logs").mkdir(parents=True)
    write_record(stale, record("default", stale))
    assert not is_held(stale)
    assert list_instances() == []
    assert not stale.exists()
    stale.mkdir()
    assert is_held(create_folder("default"))


def test_a_link_in_the_base_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    (base_folder() / "link").symlink_to(tmp_path)
    assert living_folders() == []
    assert (tmp_path / "precious").exists()


def test_a_damaged_or_missing_record_is_no_instance(running: Path) -> None:
    (running / "instance.json").write_text('{"name": 3}')
    assert list_instances() == []
    (running / "instance.json").unlink()
    assert list_instances() == []
    with pytest.raises(NoInstanceError):
        find_instance("default")


def test_those_who_ask_at_the_same_time_are_not_taken_for_the_owner() -> None:
    folder = base_folder() / "default"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert not is_held(folder)
    os.close(fd)


def test_a_supervisor_removes_its_own_folder_only(running: Path) -> None:
    before = running.stat()
    remove_when_free(running, before, timeout_s=0.0)
    assert running.exists()  # its owner lives

    remove_folder(running)
    other = create_folder("default")  # of another instance, which took the name
    remove_when_free(other, before)
    assert other.exists()

    free = base_folder() / "free"
    free.mkdir()
    remove_when_free(free, free.stat())
    assert not free.exists()


@pytest.mark.parametrize("what", ["a file", "a dangling link", "open to others"])
def test_a_base_folder_that_is_none_is_one_error(runtime: Path, what: str) -> None:
    base = runtime / "asapctl"
    if what == "a file":
        base.touch()
    elif what == "a dangling link":
        base.symlink_to("nowhere")
    else:
        base.mkdir(0o755)
    for attempt in (list_instances, lambda: find_instance(None), lambda: check_free("x")):
        with pytest.raises(RunError, match=r"cannot look for instances: .*asapctl is not a folder"):
            attempt()
    with pytest.raises(PermissionError):  # not FileExistsError, which is a name that is taken
        create_folder("x")


def test_a_base_folder_that_cannot_be_made_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match=r"cannot look for instances: /.*asapctl: Permission denied"):
        list_instances()


def test_a_runtime_folder_whose_name_is_no_text_is_not_used(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / "\udcff").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "\udcff"))
    assert base_folder() == Path(f"/tmp/asapctl-{os.getuid()}")


def test_the_base_folder_is_short_and_private(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert base_folder() == runtime / "asapctl"
    assert base_folder().stat().st_mode & 0o777 == 0o700
    base_folder().chmod(0o755)
    with pytest.raises(PermissionError, match="only you can enter"):
        base_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{runtime}/{'x' * 60}")
    assert base_folder() == Path(f"/tmp/asapctl-{os.getuid()}")
    longest = f"{'x' * 40}/asapctl/{'n' * 32}/attention-239.999"
    assert len(longest) <= 107
