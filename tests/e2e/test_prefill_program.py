"""`asapctl prefill` as a program: what it writes, how it ends, and what it leaves behind."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import checkpoint, reference_logits, token_ids
from helpers.instances import wait_for
from helpers.program import alive, descendants, environment, records, run, start

FAMILY = "qwen3_moe"


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder for sockets and logs; afterwards, no instance has left anything in it."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)
        base = Path(folder) / "asapctl"
        assert not base.exists() or list(base.iterdir()) == []


def write_prompts(path: Path, lengths: list[int]) -> list[list[int]]:
    prompts = [token_ids(length, seed) for seed, length in enumerate(lengths)]
    lines = [json.dumps({"id": str(n), "prompt_token_ids": p}) for n, p in enumerate(prompts)]
    path.write_text("\n".join(lines))
    return prompts


def first_token(record: dict[str, Any]) -> int:
    token: int = record["response"]["body"]["choices"][0]["token_ids"][0]
    return token


def test_results_are_those_of_transformers(tmp_path: Path, home: Path) -> None:
    model_dir = checkpoint(FAMILY)
    source = tmp_path / "in.jsonl"
    prompts = write_prompts(source, [1, 2, 3, 50, 200, 640] * 3)
    done = run(
        *("prefill", str(source), "--model", str(model_dir), "--topology", "cpu-3a2e"),
        *("--kv-dir", str(tmp_path / "kv"), "--json", "--logprobs", "2"),
        *("--set", "schedule.min_batch_tokens=256"),
        env=environment(home),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["prompts"], summary["failed"]) == (18, 0)
    assert summary["prompt_tokens"] == sum(map(len, prompts))
    assert {rank["role"] for rank in summary["ranks"]} == {"attention", "expert"}
    found = records(tmp_path / "in.results.jsonl")
    for number, ids in enumerate(prompts):
        record = found[str(number)]
        assert first_token(record) == int(reference_logits(model_dir, ids)[-1].argmax())
        assert len(record["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"]) == 1
    assert len(list((tmp_path / "kv").glob("*.safetensors"))) == 18


def test_standard_input_and_output(home: Path) -> None:
    model_dir = checkpoint(FAMILY)
    lines = b'\xef\xbb\xbf{"prompt_token_ids": [3, 4]}\r\nnot json\r\n{"prompt_token_ids": []}'
    done = run("prefill", "-", "--model", str(model_dir), env=environment(home), stdin=lines)
    assert done.returncode == 3, done.stderr
    found = {record["custom_id"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"line-1", "line-2", "line-3"}
    assert found["line-1"]["error"] is None
    assert first_token(found["line-1"]) == int(reference_logits(model_dir, [3, 4])[-1].argmax())
    for bad in ("line-2", "line-3"):
        assert found[bad]["response"]["status_code"] == 400
        assert found[bad]["error"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_ended_in_the_middle_and_run_again(
    number: signal.Signals, code: int, tmp_path: Path, home: Path
) -> None:
    model_dir = checkpoint(FAMILY)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = write_prompts(source, [300] * 400)
    arguments = ("prefill", str(source), "-o", str(output), "--model", str(model_dir))
    keys = ("attention.groups=1", "experts.ranks=1")
    keys += ("schedule.min_batch_tokens=300", "schedule.max_batch_tokens=600")
    small = [f"--set={key}" for key in keys]
    process = start(*arguments, *small, env=environment(home))
    wait_for(lambda: output.exists() and output.stat().st_size > 2000, "some results were written")
    others = descendants(process.pid)
    assert len(others) == 4  # zygote, controller, attention, expert
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in stderr
    wait_for(lambda: not any(map(alive, others)), "every process ended", deadline_s=10)
    wait_for(lambda: not list((home / "asapctl").iterdir()), "the runtime folder is gone")

    before = output.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 0 < whole.count(b"\n") < 400
    again = run(*arguments, *small, env=environment(home))
    assert again.returncode == 0, again.stderr
    assert output.read_bytes().startswith(whole)
    assert len(records(output)) == len(prompts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "torch._C", "torch.nn", "zmq"])
def test_a_signal_during_an_import_is_obeyed(
    module: str, number: signal.Signals, tmp_path: Path, home: Path
) -> None:
    """A module that stands in front of the real one sends the signal while it is imported."""
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r} and 'asapctl' in sys.argv[0]:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    source = tmp_path / "in.jsonl"
    write_prompts(source, [10])
    env = environment(home) | {"PYTHONPATH": str(tmp_path)}
    done = run("prefill", str(source), "--model", str(checkpoint(FAMILY)), env=env)
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("moment", ["at once", "zygote", "ranks"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_during_start(
    moment: str, number: signal.Signals, tmp_path: Path, home: Path
) -> None:
    source = tmp_path / "in.jsonl"
    write_prompts(source, [10])
    process = start(
        *("prefill", str(source), "--model", str(checkpoint(FAMILY))), env=environment(home)
    )
    processes = {"at once": 0, "zygote": 1, "ranks": 3}[moment]
    wait_for(lambda: len(descendants(process.pid)) >= processes, f"{processes} processes started")
    if moment == "at once":  # after the interpreter has started and says something to signals
        wait_for(lambda: b"asapctl" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "it runs")
    others = descendants(process.pid)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    # Python itself may not have come to life yet, and then dies of the signal, or says so.
    if moment == "at once" and "init_import_site" in stderr:
        return
    assert process.returncode in {128 + number if number != signal.SIGKILL else -number, -number}
    assert "Traceback" not in stderr
    wait_for(lambda: not any(map(alive, others)), "every process ended", deadline_s=15)
    base = home / "asapctl"
    wait_for(lambda: not base.exists() or not list(base.iterdir()), "the runtime folder is gone")


def test_a_killed_rank_costs_nothing(tmp_path: Path, home: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.results.jsonl"
    prompts = write_prompts(source, [300] * 400)
    process = start(
        *("prefill", str(source), "--model", str(checkpoint(FAMILY))), env=environment(home)
    )
    wait_for(lambda: output.exists() and output.stat().st_size > 2000, "some results were written")
    (expert,) = (p for p in descendants(process.pid) if "asapctl: expert 0" in p.cmdline()[0])
    expert.kill()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert len(records(output)) == len(prompts)


def test_a_killed_controller_is_named_and_a_rerun_does_the_rest(tmp_path: Path, home: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.results.jsonl"
    prompts = write_prompts(source, [300] * 400)
    arguments = ("prefill", str(source), "--model", str(checkpoint(FAMILY)))
    process = start(*arguments, env=environment(home))
    wait_for(lambda: output.exists() and output.stat().st_size > 2000, "some results were written")
    (victim,) = (p for p in descendants(process.pid) if "asapctl: controller" in p.cmdline()[0])
    victim.kill()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "error: controller (pid" in stderr
    assert "SIGKILL" in stderr
    assert run(*arguments, env=environment(home)).returncode == 0
    assert len(records(output)) == len(prompts)
