"""`asapctl launch`, `ps`, `stop` and `logs` as programs: what they say, how they end, what they
leave behind.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from engine.control.client import Client
from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import wait_for
from helpers.launched import (
    SMALL,
    complete,
    instances,
    launched,
    left_behind,
    private_home,
)
from helpers.program import ASAPCTL, alive, descendants, environment, run, start

FAMILY = "qwen3_moe"


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as folder:
        yield folder


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint(FAMILY)


def detached(home: Path, model: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(
        *("launch", "cpu", "--model", str(model), "--port", "0", "--detach", *SMALL, *arguments),
        env=environment(home),
    )


def test_an_instance_serves_is_listed_and_stops(home: Path, model: Path) -> None:
    with launched(home, model, "--name", "mine") as (process, url):
        assert complete(url, token_ids(20))["choices"]
        (found,) = instances(home)
        assert (found["name"], found["command"], found["state"]) == ("mine", "launch", "ready")
        assert (found["pid"], found["url"], found["model"]) == (process.pid, url, str(model))
        table = run("ps", env=environment(home)).stdout
        for word in ("mine", str(process.pid), "launch", model.name, url, "ready", "uptime"):
            assert word in table

        again = run("launch", "--name", "mine", "--port", "0", env=environment(home))
        assert again.returncode == 2
        assert f'"mine" is already running (pid {process.pid}); stop it' in again.stderr
        assert run("stop", "other", env=environment(home)).returncode == 3

        stopped = run("stop", env=environment(home))
        assert (stopped.returncode, stopped.stderr) == (0, "mine has ended\n")
        assert process.wait(10) == 0
        _, stderr = process.communicate()
        for rank in ("attention 0", "expert 0"):
            assert len(re.findall(rf"^{rank}: ready after", stderr, re.MULTILINE)) == 1
        assert "Traceback" not in stderr
    assert run("ps", env=environment(home)).stderr == "no instance is running\n"
    assert run("stop", env=environment(home)).returncode == 3


def test_stop_lets_requests_finish_and_refuses_others(home: Path, model: Path) -> None:
    with launched(home, model) as (process, url), controller_of(home) as client:
        attention = attention_of(process.pid)
        attention.suspend()  # nothing is answered before all have been taken
        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda: answers.append(complete(url, token_ids(300))["id"]))
            for _ in range(30)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: unfinished(client) == 30, "all requests were taken")

        late = run("stop", "--timeout", "0.5", env=environment(home))
        assert late.returncode == 1
        assert "30 requests are not done" in late.stderr
        assert "stop default --now" in late.stderr
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(url, token_ids(3))
        assert refused.value.code == 503
        refused.value.close()

        stop = start("stop", env=environment(home))
        attention.resume()
        stop.communicate(timeout=30)
        assert stop.returncode == 0
        assert process.wait(10) == 0
        for thread in threads:
            thread.join(10)
        assert len(set(answers)) == 30


def test_stop_now_does_not_wait_for_requests(home: Path, model: Path) -> None:
    with launched(home, model) as (process, url), controller_of(home) as client:
        attention_of(process.pid).suspend()
        request = threading.Thread(target=lambda: ignore_failure(url))
        request.start()
        wait_for(lambda: unfinished(client) == 1, "the request was taken")
        assert run("stop", "--now", env=environment(home)).returncode == 0
        assert process.wait(10) == 143
        request.join(10)


def attention_of(pid: int) -> psutil.Process:
    return next(p for p in descendants(pid) if "asapctl: attention" in p.cmdline()[0])


@contextmanager
def controller_of(home: Path) -> Iterator[Client]:
    (found,) = instances(home)
    with zmq.Context() as context:
        client = Client(context, found["controller"])
        try:
            yield client
        finally:
            client.close()


def unfinished(client: Client) -> int:
    snapshot = client.fresh_snapshot(10.0)
    assert snapshot is not None
    return snapshot.waiting + snapshot.running


def ignore_failure(url: str) -> None:
    try:
        complete(url, token_ids(10))
    except OSError:
        pass


def test_what_cannot_be_served_is_refused_before_anything_starts(home: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("launch", "--model", str(model), "--port", str(port), env=environment(home))
    assert done.returncode == 2
    assert f"cannot serve on 127.0.0.1 port {port}: Address already in use" in done.stderr
    done = run("launch", "--model", str(model), "--host", "0.0.0.0", env=environment(home))
    assert done.returncode == 2
    assert "set ASAPCTL_API_KEY" in done.stderr
    done = detached(home, model / "nothing")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(
            *("launch", "--name", "No Name", "--port", str(port), "--model", "Qwen/Qwen3-30B-A3B"),
            env=environment(home),
        )
    assert done.returncode == 2
    name, listen, hub = done.stderr.splitlines()
    assert "'No Name' cannot be the name of an instance" in name
    assert f"cannot serve on 127.0.0.1 port {port}" in listen
    assert "hf download Qwen/Qwen3-30B-A3B" in hub
    assert left_behind(home) == []


def test_two_who_start_at_the_same_time(home: Path, model: Path, tmp_path: Path) -> None:
    """Both have found the name to be free; the faster has it by the time of the folder."""
    (tmp_path / "logs").mkdir()
    code = (
        "from asapctl.cli import run\n"
        "from engine.launch import job\n"
        "job.check_free = lambda name: None\n"
        "run()"
    )
    with launched(home, model):
        (found,) = instances(home)
        done = subprocess.run(
            [sys.executable, "-c", code, "launch", "--model", str(model), "--port", "0", *SMALL],
            cwd=tmp_path,
            env={**environment(home), "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert f'"default" is already running (pid {found["pid"]}); stop it' in error
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]  # which are somebody else's


def test_an_instance_whose_output_is_lost_serves_all_the_same(home: Path, model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [ASAPCTL, "launch", "--model", str(model), "--port", "0", *SMALL],
            env=environment(home),
            stdout=full,
            stderr=full,
        )
    wait_for(lambda: [i["state"] for i in instances(home)] == ["ready"], "it is ready")
    assert complete(instances(home)[0]["url"], token_ids(20))["choices"]
    assert run("stop", env=environment(home)).returncode == 0
    assert process.wait(10) == 0


@pytest.mark.parametrize("moment", ["at once", "zygote", "ranks", "serving"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_ended_at_any_moment(
    moment: str, number: signal.Signals, code: int, home: Path, model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("launch", "--model", str(model), "--port", str(port), *SMALL)
    process = start(*arguments, env=environment(home))
    if moment == "serving":
        assert process.stdout is not None
        assert process.stdout.readline() == f"default http://127.0.0.1:{port}\n"
    processes = {"at once": 0, "zygote": 1, "ranks": 3, "serving": 5}[moment]
    wait_for(lambda: len(descendants(process.pid)) >= processes, f"{processes} processes started")
    if moment == "at once":  # after the interpreter has started and says something to signals
        wait_for(lambda: b"asapctl" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "it runs")
    others = descendants(process.pid)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode != 0
    if moment != "at once":
        assert process.returncode == code
        assert "Traceback" not in stderr
    wait_for(lambda: not any(map(alive, others)), "every process ended", deadline_s=15)
    wait_for(lambda: left_behind(home) == [], "the runtime folder is gone")
    wait_for(lambda: _is_free(port), "the port is free again")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
    return True


def test_a_detached_instance_is_on_its_own_and_has_logs(home: Path, model: Path) -> None:
    done = detached(home, model)  # which reads both pipes to their end: nobody else holds them
    assert done.returncode == 0, done.stderr
    name, url = done.stdout.split()
    (found,) = instances(home)
    assert (name, url) == ("default", found["url"])
    supervisor = psutil.Process(found["pid"])
    assert os.getsid(supervisor.pid) == supervisor.pid
    others = descendants(supervisor.pid)
    assert complete(url, token_ids(20))["choices"]

    env = environment(home)
    with subprocess.Popen(
        [ASAPCTL, "logs", "-f"], env=env, stdout=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        assert " | " in follower.stdout.readline()
        assert f"ready at {url}" in run("logs", "--rank", "supervisor", env=env).stdout
        one = run("logs", "default", "--rank", "nobody", env=env)
        assert one.returncode == 2
        assert "there are: attention-0, controller, expert-0, http" in one.stderr
        assert run("stop", env=env).returncode == 0
        follower.communicate(timeout=15)
        assert follower.returncode == 0
    wait_for(lambda: not any(map(alive, [supervisor, *others])), "every process ended")
    assert run("logs", env=env).returncode == 3  # it did not fail, so its logs went with it


def test_a_rank_that_dies_while_loading_is_named_and_its_logs_are_kept(
    home: Path, model: Path
) -> None:
    arguments = ("launch", "--model", str(model), "--port", "0", "--detach", *SMALL)
    parent = start(*arguments, env=environment(home))
    killed: list[psutil.Process] = []

    def kill_expert() -> bool:
        for process in descendants(parent.pid):
            try:
                if "asapctl: expert 0" in process.cmdline()[0]:
                    process.kill()
                    killed.append(process)
            except (psutil.NoSuchProcess, IndexError):
                continue
        return bool(killed)

    wait_for(kill_expert, "an expert rank started")
    others = descendants(parent.pid)
    stdout, stderr = parent.communicate(timeout=30)
    assert (parent.returncode, stdout) == (1, "")
    assert "error: expert 0 (pid" in stderr
    assert "SIGKILL" in stderr
    wait_for(lambda: not any(map(alive, others)), "every process ended")
    assert left_behind(home) == []

    logs = run("logs", "default", env=environment(home))
    assert logs.returncode == 0
    assert str(home / "state" / "asapctl" / "logs" / "default.") in logs.stderr
    assert run("logs", "another", env=environment(home)).returncode == 3


def test_a_detached_instance_holds_nothing_that_its_shell_left_open(
    home: Path, model: Path
) -> None:
    reader, writer = os.pipe()
    arguments = ("launch", "cpu", "--model", str(model), "--port", "0", "--detach", *SMALL)
    done = subprocess.run(
        [ASAPCTL, *arguments],
        env=environment(home),
        pass_fds=[writer],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    os.close(writer)
    try:
        assert select.select([reader], [], [], 10)[0], "somebody still holds the pipe"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
        assert run("stop", env=environment(home)).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_who_detaches_and_is_ended_before_it_is_ready_takes_the_instance_along(
    number: signal.Signals, home: Path, model: Path
) -> None:
    arguments = ("launch", "--model", str(model), "--port", "0", "--detach", *SMALL)
    parent = start(*arguments, env=environment(home))
    wait_for(lambda: len(descendants(parent.pid)) >= 2, "supervisor and zygote started")
    others = descendants(parent.pid)
    os.kill(parent.pid, number)
    parent.communicate(timeout=30)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    assert parent.returncode == codes.get(number, -number)
    wait_for(lambda: not any(map(alive, others)), "every process ended")
    wait_for(lambda: left_behind(home) == [], "the runtime folder is gone")


def test_a_detached_instance_that_fails_later_says_so_in_its_logs(home: Path, model: Path) -> None:
    assert detached(home, model, "--name", "mine").returncode == 0
    supervisor = psutil.Process(instances(home)[0]["pid"])
    others = descendants(supervisor.pid)
    next(p for p in others if "asapctl: controller" in p.cmdline()[0]).kill()
    wait_for(lambda: not any(map(alive, [supervisor, *others])), "every process ended")
    wait_for(lambda: left_behind(home) == [], "the runtime folder is gone")
    logs = run("logs", "mine", env=environment(home))
    assert logs.returncode == 0
    said = next(line for line in logs.stdout.splitlines() if "SIGKILL" in line)
    assert said.startswith("supervisor  | ")
    assert "controller (pid" in said


def test_a_prefill_run_is_listed_and_stopped(tmp_path: Path, home: Path, model: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.results.jsonl"
    source.write_text(
        "\n".join(json.dumps({"prompt_token_ids": token_ids(300)}) for _ in range(400))
    )
    process = start("prefill", str(source), "--model", str(model), env=environment(home))
    wait_for(lambda: output.exists() and output.stat().st_size > 2000, "some results were written")
    (found,) = instances(home)
    assert (found["name"], found["command"]) == (f"prefill-{process.pid}", "prefill")
    assert found["url"] is None
    started = time.monotonic()
    assert run("stop", env=environment(home)).returncode == 0
    assert process.wait(10) == 143
    assert time.monotonic() - started < 10
