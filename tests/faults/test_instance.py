"""What an instance does when one of its processes dies, and what it leaves behind: nothing."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.control.client import Client
from engine.control.messages import PrefillRequest
from engine.errors import RunError
from engine.launch import supervisor
from engine.launch.running import start_instance
from engine.launch.supervisor import Supervisor
from engine.topology.ranks import RankId
from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import collect, instance, layout, plan, wait_for
from helpers.program import alive

FAMILY = "qwen3_moe"


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder and a state folder of this test's own; empty again afterwards."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/state")
        before = set(psutil.Process().children(recursive=True))
        yield Path(folder)
        left = set(psutil.Process().children(recursive=True)) - before
        assert not left
        assert list((Path(folder) / "asapctl").iterdir()) == []


def pid_of(client: Client, rank: RankId) -> int:
    snapshot = client.fresh_snapshot(10.0)
    assert snapshot is not None
    return next(status.pid for status in snapshot.ranks if status.id == rank)


def process_titled(title: str) -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if process.cmdline() and process.cmdline()[0].strip() == title:
            return process
    raise AssertionError(f"no process is titled {title}")


def test_a_killed_controller_ends_the_run() -> None:
    with (
        pytest.raises(RunError, match=r"controller \(pid \d+\) was ended by SIGKILL") as error,
        instance(checkpoint(FAMILY), layout(1, 1)) as client,
    ):
        process_titled("asapctl: controller").kill()
        client.receive(30.0)
    kept = re.search(r"logs: (.*)", str(error.value))
    assert kept
    assert (Path(kept[1]) / "controller.log").is_file()


def test_a_killed_zygote_takes_the_ranks_with_it() -> None:
    with (
        pytest.raises(RunError, match=r"zygote \(pid \d+\) was ended by SIGKILL"),
        instance(checkpoint(FAMILY), layout(1, 1)) as client,
    ):
        zygote = process_titled("asapctl: zygote")
        ranks = zygote.children()
        assert len(ranks) == 3
        zygote.kill()
        wait_for(lambda: not any(map(alive, ranks)), "the ranks ended")
        client.receive(30.0)


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(checkpoint(FAMILY), model_dir)
    planned = plan(model_dir, layout(1, 2))
    (shard,) = model_dir.glob("*.safetensors")
    shard.rename(tmp_path / "away")
    with (
        pytest.raises(RunError, match=rf"(attention|expert) \d .*exit code.*{model_dir}"),
        start_instance(planned),
    ):
        pass


def test_a_rank_with_another_checkpoint_is_refused(tmp_path: Path) -> None:
    """The plan was made for a checkpoint that has been replaced since."""
    model_dir = tmp_path / "model"
    shutil.copytree(checkpoint(FAMILY), model_dir)
    planned = plan(model_dir, layout(1, 1))
    shutil.copytree(checkpoint("mixtral"), model_dir, dirs_exist_ok=True)
    with (
        pytest.raises(RunError, match=r"refused by the controller: .*at the controller"),
        start_instance(planned),
    ):
        pass


def test_one_group_runs_ahead_of_another_at_the_same_expert_rank(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group 0 is stopped in the middle; group 1 goes through all layers meanwhile."""
    monkeypatch.setenv("ASAPCTL_LOG", "debug")
    long, short = token_ids(1024), token_ids(9)
    # With windows of one token a layer of the long prompt takes a thousand round trips.
    overrides = layout(2, 1, "schedule.exclusive_tokens=8", "comm.window_tokens=1")
    with instance(checkpoint(FAMILY), overrides) as client:
        (folder,) = (runtime / "asapctl").iterdir()
        log = folder / "logs" / "expert-0.log"

        def served(group: int) -> list[int]:
            return [int(n) for n in re.findall(rf"group={group}, .*layer=(\d+)", log.read_text())]

        client.submit([PrefillRequest(0, long)])
        wait_for(lambda: bool(served(0)), "group 0 reached the expert rank")
        attention = psutil.Process(pid_of(client, RankId("attention", 0)))
        attention.suspend()
        client.submit([PrefillRequest(1, short)])
        assert set(collect(client, 1)) == {1}
        assert sorted(set(served(1))) == [0, 1, 2]
        assert max(served(0)) < 2
        attention.resume()
        assert set(collect(client, 1)) == {0}


def test_a_folder_of_which_nobody_has_heard_yet_goes_too(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between the zygote's making it and the supervisor's reading of it."""
    base = runtime / "asapctl"

    def interrupted(self: Supervisor) -> None:
        wait_for(lambda: base.exists() and bool(list(base.iterdir())), "the folder is made")
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "_await_folder", interrupted)
    with pytest.raises(KeyboardInterrupt), Supervisor("early"):
        pass
    assert list(base.iterdir()) == []


def test_many_descriptors_wait_for_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MOST_IN_FLIGHT", 6)
    with instance(checkpoint(FAMILY), layout(3, 3)) as client:
        client.submit([PrefillRequest(0, token_ids(30))])
        client.drain()
        assert collect(client, 1)[0].error is None


def test_two_instances_run_side_by_side() -> None:
    with (
        instance(checkpoint(FAMILY), layout(1, 1)) as first,
        instance(checkpoint("mixtral"), layout(1, 1)) as second,
    ):
        for client in (first, second):
            client.submit([PrefillRequest(0, token_ids(30))])
            client.drain()
        assert collect(first, 1)[0].token_id != collect(second, 1)[0].token_id


def test_a_folder_that_nobody_holds_is_swept(runtime: Path) -> None:
    base = runtime / "asapctl"
    base.mkdir(mode=0o700)
    (base / "stale" / "logs").mkdir(parents=True)
    with instance(checkpoint(FAMILY), layout(1, 1)):
        assert "stale" not in {path.name for path in base.iterdir()}
