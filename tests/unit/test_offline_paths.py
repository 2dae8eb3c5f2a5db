import gzip
import os
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.offline.forms import read_line
from engine.offline.paths import Input, check_unchanged, choose_output, open_input
from engine.offline.resume import Done
from helpers.offline import line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    return path


def opened(path: Path) -> Input:
    return open_input(str(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("in.jsonl", "in.results.jsonl"),
        ("in", "in.results.jsonl"),
        ("a.b.json", "a.b.json.results.jsonl"),
        ("a.jsonl.gz", "a.jsonl.gz.results.jsonl"),
    ],
)
def test_results_go_beside_the_input(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).write_text("{}")
    assert choose_output(opened(tmp_path / name), None) == tmp_path / expected


def test_results_of_a_pipe_go_to_standard_output(tmp_path: Path) -> None:
    end, _ = os.pipe()
    piped = Input(end, "standard input", None, None)
    assert choose_output(piped, None) is None
    assert choose_output(piped, "out") == Path("out")


def test_a_dash_is_standard_output(source: Path) -> None:
    assert choose_output(opened(source), "-") is None


def test_the_input_is_no_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "soft").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "folder").symlink_to(tmp_path)
    others = [tmp_path / name for name in ("soft", "hard", "folder/in.jsonl", "../x/../in.jsonl")]
    (tmp_path.parent / "x").mkdir(exist_ok=True)
    others[-1] = tmp_path / "folder" / ".." / tmp_path.name / "in.jsonl"
    for same in (source, *others):
        with pytest.raises(UsageError, match="is the input itself"):
            choose_output(opened(source), str(same))
        with pytest.raises(UsageError, match="is the input itself"):
            choose_output(opened(same), str(source))


def test_standard_input_may_be_the_output_too(source: Path) -> None:
    redirected = Input(os.open(source, os.O_RDONLY), "standard input", 9, None)
    with pytest.raises(UsageError, match="is the input itself"):
        choose_output(redirected, str(source))


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, words in (("", "folder"), ("none", "No such file"), ("empty", "is empty")):
        with pytest.raises(UsageError, match=words):
            open_input(str(tmp_path / name))
    with pytest.raises(UsageError, match="File name too long"):
        open_input("x" * 256)
    with pytest.raises(UsageError, match="null"):
        open_input("a\0b")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            gzip.compress(b'{"prompt": "a"}', mtime=0),
            r"compressed with gzip; unpack it first \(gunzip\)",
        ),
        (b"\x28\xb5\x2f\xfdabc", "zstd"),
        (b'[{"prompt": "a"}, {"prompt": "b"}]', "one JSON array; put one object a line"),
        (b'\xef\xbb\xbf\n [\n  {"prompt": "a"}]', "one JSON array"),
        (b'["a", "b"]\n', "one JSON array"),
        (b'{\n  "prompt": "a"\n}\n', "several lines"),
        ("{}".encode("utf-16"), "UTF-16"),
    ],
)
def test_inputs_that_are_plainly_something_else(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"in.jsonl .*{words}"):
        open_input(str(path))


@pytest.mark.parametrize("data", [b"[1]\n", b"nonsense", b"[]\n{}", b'{"a": [\n', b"\n\n"])
def test_inputs_with_a_bad_first_line_are_read_all_the_same(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)
    opened(tmp_path / "in")


def test_the_output_of_another_input_is_not_shared_unless_it_is_named(source: Path) -> None:
    done = Done()
    done.add("b", "batch_req_1")
    assert check_unchanged(opened(source), done, "out") == 0
    with pytest.raises(UsageError, match=r"out holds results, but none of .*in\.jsonl; choose"):
        check_unchanged(opened(source), done, "out", chosen=False)
    first, _ = source.read_bytes().splitlines()
    done.add("a", read_line(line(first))[0].record)
    assert check_unchanged(opened(source), done, "out", chosen=False) == len(first) + 1


def test_done_lines_are_counted_in_bytes(source: Path) -> None:
    lines = source.read_bytes().splitlines()
    done = Done()
    assert check_unchanged(opened(source), done, "out") == 0
    done.add("a", read_line(line(lines[0]))[0].record)
    assert check_unchanged(opened(source), done, "out") == len(lines[0]) + 1


def test_done_lines_are_compared_before_the_run(source: Path) -> None:
    lines = source.read_bytes().splitlines()
    done = Done()
    done.add("a", read_line(line(lines[0]))[0].record)
    check_unchanged(opened(source), done, "out")  # the second line of an id does not count
    done.add("a", read_line(line(lines[1]))[0].record)
    with pytest.raises(UsageError, match="line 1: out holds a result for the id 'a'"):
        check_unchanged(opened(source), done, "out")
