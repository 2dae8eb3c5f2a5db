"""The whole command but for its processes: real options, plan and demo model, a fake engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from asapctl.prefill import prefill
from engine.errors import AsapError, RunError, UsageError
from engine.model.demo import make_demo_checkpoint
from helpers.offline import FakeEngine


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    make_demo_checkpoint(folder)
    return folder


class Bench:
    def __init__(self, folder: Path, demo: Path) -> None:
        self.folder = folder
        self.demo = demo
        self.engine = FakeEngine()

    def write(self, *lines: Any, name: str = "in.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def run(self, *arguments: object) -> Result:
        self.engine = FakeEngine()
        app = typer.Typer()
        app.command()(prefill)
        given = [str(argument) for argument in arguments]
        result = CliRunner().invoke(app, [*given, "--model", str(self.demo)])
        if isinstance(result.exception, AsapError):
            raise result.exception
        return result

    def records(self, name: str = "in.results.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    from engine.launch import instance

    bench = Bench(tmp_path, demo)

    @contextmanager
    def start(plan: object, on_progress: object = None) -> Iterator[FakeEngine]:
        with bench.engine.start() as engine:
            yield engine

    monkeypatch.setattr(instance, "start_instance", start)
    return bench


def test_all_done(bench: Bench) -> None:
    source = bench.write({"prompt": "Once upon"}, {"messages": [{"role": "user", "content": "a"}]})
    result = bench.run(source)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "2 prompts: 2 ok, 0 failed" in result.stderr
    assert {record["custom_id"] for record in bench.records()} == {"line-1", "line-2"}
    fingerprint = bench.records()[0]["response"]["body"]["system_fingerprint"]
    assert len(fingerprint) == len("fp_00000000_00000000")


def test_some_failed_as_json(bench: Bench) -> None:
    source = bench.write({"prompt": "Once upon"}, {"prompt": ""})
    result = bench.run(source, "--json", "--set", "attention.groups=1")
    assert result.exit_code == 3
    summary = json.loads(result.stdout)
    assert (summary["prompts"], summary["ok"], summary["failed"]) == (2, 1, 1)
    assert summary["ranks"][0]["busy"] == 0.5
    assert {"prompt_tokens", "load_seconds", "seconds", "tokens_per_s"} <= summary.keys()
    assert "prompts:" not in result.stderr


def test_a_rerun_has_nothing_to_do_and_starts_nothing(bench: Bench) -> None:
    source = bench.write({"prompt": "Once upon"})
    bench.run(source, "--logprobs", 2)
    assert bench.run(source, "--logprobs", 2).exit_code == 0
    assert bench.engine.starts == 0
    with pytest.raises(UsageError, match="other options"):
        bench.run(source, "--logprobs", 3)
    assert bench.run(source, "--logprobs", 3, "--overwrite").exit_code == 0
    assert bench.engine.starts == 1


def test_a_changed_line_is_refused_before_anything_starts(bench: Bench) -> None:
    source = bench.write({"prompt": "a"}, {"prompt": "b"})
    bench.run(source)
    bench.write({"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(UsageError, match="line 1"):
        bench.run(source)
    assert bench.engine.starts == 0


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_an_empty_input(bench: Bench, text: str) -> None:
    source = bench.folder / "in.jsonl"
    source.write_text(text)
    with pytest.raises(UsageError, match="is empty"):
        bench.run(source)
    assert not (bench.folder / "in.results.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--json", "-o", "-"), "name a file"),
        (("--logprobs", 21), "--logprobs must be 0 to 20"),
        (("--prompt-logprobs", -1), "--prompt-logprobs must be"),
        (("-o", "/nonexistent/out"), "no folder"),
        (("-o", "/"), "cannot write results"),
        (("--kv-dir", "/dev/null"), "cannot write KV files"),
        (("--topology", "nowhere"), "nowhere"),
    ],
)
def test_usage(bench: Bench, arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench.run(bench.write({"prompt": "a"}), *arguments)
    assert bench.engine.starts == 0


def test_a_full_disk_ends_the_run(bench: Bench) -> None:
    with pytest.raises(RunError, match="/dev/full: cannot write"):
        bench.run(bench.write({"prompt": "a"}), "-o", "/dev/full")
    assert bench.engine.ended == 1


def test_kv_paths_are_absolute(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    bench.run(bench.write({"id": "a/b", "prompt": "a"}), "--kv-dir", "kv")
    (request,) = bench.engine.requests
    assert request.kv_path is not None
    assert Path(request.kv_path).parent == bench.folder / "kv"
    assert (bench.folder / "kv" / "manifest.jsonl").exists()
