"""The whole command but for its processes: real options, plan and demo model, a fake engine."""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from asapctl.prefill import prefill
from engine.control.messages import KvFile, PrefillRequest, PrefillResult
from engine.errors import AsapError, RunError, UsageError
from engine.model.demo import make_demo_checkpoint
from engine.offline.job import Options, run_job
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
        self.answer: Callable[[PrefillRequest], PrefillResult] | None = None

    def write(self, *lines: Any, name: str = "in.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def run(self, *arguments: object) -> Result:
        self.engine = FakeEngine(self.answer)
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
    from engine.launch import running

    bench = Bench(tmp_path, demo)

    @contextmanager
    def start(plan: object, on_progress: object = None) -> Iterator[FakeEngine]:
        with bench.engine.start() as engine:
            yield engine

    monkeypatch.setattr(running, "start_instance", start)
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


@pytest.mark.parametrize("other", ["in", "in.json"])
def test_inputs_whose_names_are_alike_share_no_output(bench: Bench, other: str) -> None:
    bench.run(bench.write({"id": "a", "prompt": "a"}))
    second = bench.write({"id": "b", "prompt": "b"}, name=other)
    if other == "in":
        with pytest.raises(UsageError, match=r"holds results, but none of .*/in; choose another"):
            bench.run(second)
    else:
        bench.run(second)
        assert [record["custom_id"] for record in bench.records("in.json.results.jsonl")] == ["b"]
    assert [record["custom_id"] for record in bench.records()] == ["a"]
    output = bench.folder / "in.results.jsonl"
    bench.run(second, "-o", output)  # who names an output may collect in it
    assert [record["custom_id"] for record in bench.records()] == ["a", "b"]


def test_names_that_are_no_text(bench: Bench) -> None:
    source = bench.write({"prompt": "a"}, name="in\udcff.jsonl")
    topology = bench.folder / "t\udcff.toml"
    topology.write_text("")
    result = bench.run(source, "--json", "--topology", topology)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["output"].endswith("/in\ufffd.results.jsonl")
    with pytest.raises(UsageError, match="so the path must be UTF-8; choose another --kv-dir"):
        bench.run(source, "--kv-dir", bench.folder / "kv\udcff")
    (bench.folder / "link").symlink_to(bench.folder / "kv\udcff")
    (bench.folder / "kv\udcff").mkdir()
    output = bench.folder / "out\udcff"
    assert bench.run(source, "-o", output, "--kv-dir", bench.folder / "link").exit_code == 0
    assert len(bench.records(output.name)) == 1
    with pytest.raises(UsageError, match=r"model directory .*: the path is not UTF-8"):
        run_job(Options(str(source), model=str(bench.folder / "m\udcff")), Quiet())


class Quiet:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...

    def loading(self, snapshot: object) -> None: ...

    def progress(self, tally: object, size: object, snapshot: object) -> None: ...


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
        (("-o", "o" * 256), "File name too long"),
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


def test_every_problem_comes_at_once_and_before_any_note(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        bench.run(
            *(bench.folder / "none.jsonl", "-o", "/nonexistent/x.jsonl", "--logprobs", 21),
            *("--prompt-logprobs", -1, "--kv-dir", "/dev/null/kv", "--set", "schedule.lanes=0"),
            *("--set", "experts.ranks=33", "--set", "attention.groups=500"),
        )
    starts = [
        "--logprobs must be 0 to 20", "--prompt-logprobs must be", "none.jsonl: cannot read",
        "/nonexistent/x.jsonl: cannot write results here", "/dev/null/kv: cannot write KV files",
        "--set schedule.lanes: expected", "--set attention.groups: expected",
        "--set experts.ranks: 33 ranks for 8 experts",
    ]  # fmt: skip
    lines = str(caught.value).splitlines()
    assert len(lines) == len(starts)
    for start in starts:
        assert sum(start in found for found in lines) == 1, start
    assert not (bench.folder / "kv").exists()


def test_an_output_that_cannot_be_is_refused_before_notes(bench: Bench) -> None:
    source = bench.write({"prompt": "a"})
    notes: list[str] = []

    class Listener:
        note = notes.append

    for output in ("/nonexistent/x.jsonl", None):
        options = Options(str(source), output, model=str(bench.demo))
        try:
            run_job(options, Listener())  # type: ignore[arg-type]
        except UsageError:
            assert not notes
        except AttributeError:  # it goes on to progress
            assert notes


def test_a_prompt_whose_kv_file_is_gone_is_done_again(bench: Bench) -> None:
    def answer(request: PrefillRequest) -> PrefillResult:
        assert request.kv_path is not None
        Path(request.kv_path).touch()
        kv = KvFile(request.kv_path, len(request.token_ids), "ff", {}, "float32")
        return PrefillResult(request.key, 120, kv=kv)

    bench.answer = answer
    source = bench.write(*[{"id": name, "prompt": name} for name in "abc"])
    kv = bench.folder / "kv"
    assert bench.run(source, "--kv-dir", kv).exit_code == 0
    lost = next(kv.glob("b-*.safetensors"))
    lost.unlink()
    again = bench.run(source, "--kv-dir", kv)
    assert "1 KV file gone" in again.stderr
    assert "3 prompts: 1 ok, 0 failed, 2 done before" in again.stderr
    assert lost.exists()
    assert sorted(record["custom_id"] for record in bench.records()) == ["a", "b", "c"]
    assert "nothing to do: 3 prompts were done before" in bench.run(source, "--kv-dir", kv).stderr


def test_a_compressed_pipe_is_refused(bench: Bench) -> None:
    fifo = bench.folder / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)
    os.write(held, gzip.compress(b"{}"))
    with pytest.raises(UsageError, match="gzip"):
        bench.run(fifo, "-o", bench.folder / "out")
    os.close(held)
    assert not (bench.folder / "out").exists()
