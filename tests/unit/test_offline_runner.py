import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.control.messages import KvFile, PrefillRequest, PrefillResult
from engine.errors import RunError, UsageError
from engine.kv.manifest import Manifest, read_manifest
from engine.offline.lines import LineReader
from engine.offline.output import open_output
from engine.offline.resume import Done, take_stock
from engine.offline.runner import KvOutput, Runner, Window
from helpers.offline import FINGERPRINT, FakeEngine, parser, writer


class Bench:
    """A folder with an input and an output, and runs between them."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "in.jsonl"
        self.path = folder / "out.jsonl"

    def write(self, *lines: Any) -> None:
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(
        self, engine: FakeEngine, window: Window | None = None, kv: KvOutput | None = None
    ) -> Runner:
        fd = os.open(self.source, os.O_RDONLY)
        try:
            with open_output(self.path) as output:
                runner = Runner(
                    LineReader(fd), parser(), writer(), output, engine.start,
                    window or Window(1000),
                    done=take_stock(output, FINGERPRINT, overwrite=False), kv=kv,
                )  # fmt: skip
                self.ranks = runner.run()
                return runner
        finally:
            os.close(fd)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def ids(self) -> list[str]:
        return sorted(record["custom_id"] for record in self.records())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_line_gets_its_record(bench: Bench) -> None:
    bench.write({"prompt": "a"}, {"prompt": ""}, {"id": "x", "prompt": "bc"}, [1], {"prompt": "d"})
    engine = FakeEngine()
    tally = bench.run(engine).tally
    assert bench.ids() == ["line-1", "line-2", "line-4", "line-5", "x"]
    assert (tally.prompts, tally.ok, tally.failed, tally.skipped) == (5, 3, 2, 0)
    assert tally.prompt_tokens == 2 + 3 + 2
    assert tally.computes.mean == 0.25
    assert tally.seconds >= 0
    assert engine.drained
    assert (engine.starts, engine.ended) == (1, 1)
    assert [status.busy for status in bench.ranks] == [0.5]


def test_the_engine_is_not_started_for_nothing(bench: Bench) -> None:
    bench.write({"prompt": ""}, {"prompt": 5})
    engine = FakeEngine()
    assert bench.run(engine).tally.failed == 2
    assert engine.starts == 0


@pytest.mark.parametrize("window", [Window(20), Window(1000, prompts=3)])
def test_what_is_in_flight_is_bounded(bench: Bench, window: Window) -> None:
    bench.write(*[{"prompt": "x" * (1 + n % 7)} for n in range(200)])
    engine = FakeEngine()
    assert bench.run(engine, window).tally.ok == 200
    assert 2 <= engine.most_prompts <= window.prompts
    assert engine.most_tokens <= window.tokens
    assert sorted(bench.ids()) == sorted(f"line-{n}" for n in range(1, 201))


def test_a_prompt_over_the_window_still_runs(bench: Bench) -> None:
    bench.write({"prompt": "x" * 40}, {"prompt": "x" * 40}, {"prompt": "x" * 40})
    engine = FakeEngine()
    assert bench.run(engine, Window(10)).tally.ok == 3
    assert engine.most_prompts == 2


def test_an_id_that_is_another_line_s_stand_in_says_so(bench: Bench) -> None:
    bench.write({"id": "line-2", "prompt": "x"}, {"prompt": "x"}, {"prompt": "x"})
    assert bench.run(FakeEngine()).tally.failed == 1
    (failed,) = [record for record in bench.records() if record["error"]]
    assert "goes by line-N, so give this one an id of its own" in failed["error"]["message"]


def test_the_second_line_of_an_id_fails_and_stays_failed(bench: Bench) -> None:
    bench.write({"id": "a", "prompt": "x"}, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    for skipped in (0, 2):
        tally = bench.run(FakeEngine()).tally
        assert (tally.failed, tally.skipped) == (1, skipped)
        (failed,) = [record for record in bench.records() if record["error"]]
        assert failed["custom_id"] == "a"
        assert 'line 2: the id "a"' in failed["error"]["message"]
        assert bench.ids() == ["a", "a", "b"]


def test_an_id_may_not_take_the_place_of_a_number(bench: Bench) -> None:
    bench.write({"id": "line-2", "prompt": "x"}, {"prompt": "y"})
    assert bench.run(FakeEngine()).tally.failed == 1


def test_a_rerun_does_what_is_missing(bench: Bench) -> None:
    def fail_once(request: PrefillRequest) -> PrefillResult:
        if request.token_ids[-1] == ord("b"):
            return PrefillResult(request.key, error="a rank was busy")
        return FakeEngine.default(request)

    bench.write(*[{"prompt": text} for text in ("a", "b", "c", "")])
    first = bench.run(FakeEngine(fail_once)).tally
    assert (first.ok, first.failed) == (2, 2)
    kept = [record for record in bench.records() if not record["error"]]

    engine = FakeEngine()
    second = bench.run(engine).tally
    assert (second.ok, second.failed, second.skipped) == (1, 1, 2)
    assert [request.token_ids[-1] for request in engine.requests] == [ord("b")]
    assert bench.records()[:2] == kept
    assert bench.ids() == ["line-1", "line-2", "line-3", "line-4"]


def test_a_done_line_that_has_changed_is_refused(bench: Bench) -> None:
    bench.write({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    bench.run(FakeEngine())
    before = bench.path.read_bytes()
    bench.write({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "z"})
    with pytest.raises(UsageError, match=r"line 2: .*'b'.*--overwrite"):
        bench.run(FakeEngine())
    assert bench.path.read_bytes() == before


def test_results_before_a_failure_of_the_engine_are_kept(bench: Bench) -> None:
    def die_at_c(request: PrefillRequest) -> PrefillResult:
        if request.token_ids[-1] == ord("a"):
            raise RunError("expert 1 died")
        return FakeEngine.default(request)

    bench.write(*[{"prompt": text} for text in ("a", "b", "c")])
    engine = FakeEngine(die_at_c, batch=1)
    with pytest.raises(RunError, match="expert 1 died"):
        bench.run(engine)
    assert bench.ids() == ["line-2", "line-3"]
    assert engine.ended == 1
    assert bench.run(FakeEngine()).tally.skipped == 2


def test_results_do_not_wait_for_a_pipe_that_pauses(tmp_path: Path) -> None:
    source, sink = os.pipe()
    path = tmp_path / "out"
    os.write(sink, b'{"prompt": "a"}\n')

    def then_close(tally: Any, snapshot: Any) -> None:
        # The first result must be there while the writer of the pipe still holds it open.
        if tally.ok == 1 and not closed:
            closed.append(path.read_bytes())
            os.close(sink)

    closed: list[bytes] = []
    with open_output(path) as output:
        Runner(
            LineReader(source), parser(), writer(), output, FakeEngine().start, Window(100),
            done=Done(), watch=then_close,
        ).run()  # fmt: skip
    os.close(source)
    assert b"line-1" in closed[0]


def kv_answer(folder: Path) -> Callable[[PrefillRequest], PrefillResult]:
    def answer(request: PrefillRequest) -> PrefillResult:
        assert request.kv_path is not None
        kv = KvFile(request.kv_path, len(request.token_ids), "ff", {"k": [1, 2]}, "float32")
        return PrefillResult(request.key, 120, kv=kv)

    return answer


def test_kv_files_are_listed_before_their_results(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    bench.write({"id": "../a b", "prompt": "x"}, {"id": "../a_b", "prompt": "x"})
    manifest = Manifest(folder, "tiny", "hash")
    bench.run(FakeEngine(kv_answer(folder)), kv=KvOutput(folder, manifest))
    manifest.close()
    entries = read_manifest(folder)
    assert sorted(entries) == ["../a b", "../a_b"]
    assert len({entry.file for entry in entries.values()}) == 2
    for record in bench.records():
        entry = entries[record["custom_id"]]
        assert record["response"]["body"]["kv"]["path"] == str(folder / entry.file)
        assert (entry.tokens, entry.model_hash, entry.dtype) == (2, "hash", "float32")


def test_a_result_whose_kv_file_cannot_be_listed_is_not_written(
    bench: Bench, tmp_path: Path
) -> None:
    class FullManifest:
        def add(self, custom_id: str, kv: KvFile) -> None:
            raise RunError("full")

    bench.write({"prompt": "x"})
    kv = KvOutput(tmp_path, FullManifest())  # type: ignore[arg-type]
    with pytest.raises(RunError, match="full"):
        bench.run(FakeEngine(kv_answer(tmp_path)), kv=kv)
    assert not bench.path.exists()
