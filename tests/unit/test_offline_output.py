import json
import os
import resource
from pathlib import Path

import pytest

from engine.api.types import Origin, Prompt, RequestError
from engine.control.messages import KvFile, PrefillResult, Sampling
from engine.errors import RunError, UsageError
from engine.offline.output import Output, check_output, open_output
from engine.offline.resume import Done, take_stock
from helpers.offline import FINGERPRINT, writer


def origin(name: str, line: str = "00") -> Origin:
    return Origin(1, name, "batch_req_" + line * 16)


def good(name: str, line: str = "00") -> bytes:
    prompt = Prompt(origin(name, line), "completion", [65], Sampling(), 1, None, None, None)
    return writer().result(prompt, PrefillResult(0, 120))


def bad(name: str) -> bytes:
    return writer().failure(origin(name), RequestError("no"))


def stock(path: Path, fingerprint: str = FINGERPRINT, overwrite: bool = False) -> Done:
    with open_output(path) as output:
        return take_stock(output, fingerprint, overwrite)


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"a\n")
    with open_output(path) as output:
        output.append(b"b\n")
        output.append(b"c\n")
    assert path.read_bytes() == b"a\nb\nc\n"


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_output(path) as output:
        output.append(b"x" * 999 + b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
        try:
            with pytest.raises(RunError, match=r"out: cannot write: .*; the results so far"):
                output.append(b"y" * 999 + b"\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"x" * 999 + b"\n"


def test_a_device_that_is_full() -> None:
    with (
        open_output(Path("/dev/full")) as output,
        pytest.raises(RunError, match="/dev/full: cannot write: No space left"),
    ):
        output.append(b"x\n")


def test_a_reader_that_has_gone(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.close(source)
    with Output(sink, "standard output") as output, pytest.raises(RunError, match="closed it"):
        output.append(b"x\n")


def test_what_is_open_already_is_written_by_its_name() -> None:
    source, sink = os.pipe()
    name = Path(f"/dev/fd/{sink}")  # a link to "pipe:[123]", which is in no folder
    check_output(name)
    with open_output(name) as output:
        assert len(take_stock(output, FINGERPRINT, overwrite=False)) == 0
        output.append(b"x\n")
    assert os.read(source, 10) == b"x\n"
    os.close(source)
    os.close(sink)


def test_a_file_that_was_removed_is_written_by_its_name(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as file:
        (tmp_path / "out").unlink()
        with open_output(Path(f"/dev/fd/{file.fileno()}")) as output:
            output.append(b"x\n")
        assert file.read() == b"x\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["o" * 248, "o" * 255, "\udcff"])
def test_failed_lines_are_dropped_whatever_the_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bad("x") + good("a"))
    assert len(stock(path)) == 1
    assert path.read_bytes() == good("a")
    assert list(tmp_path.iterdir()) == [path]


def test_outputs_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, words in (
        (tmp_path, "directory"),
        (tmp_path / "no" / "out", "there is no folder"),
        (tmp_path / ("o" * 256), "File name too long"),
        (tmp_path / "loop", "symbolic links"),
    ):
        for attempt in (open_output, check_output):
            with pytest.raises(UsageError, match=words):
                attempt(path)


def test_an_output_below_a_folder_that_nobody_may_enter(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0)
    if os.access(closed, os.X_OK):
        pytest.skip("root may look everywhere")
    for attempt in (open_output, check_output):
        with pytest.raises(UsageError, match="Permission denied"):
            attempt(closed / "out")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open_output(path), pytest.raises(UsageError, match="another run"):
        open_output(path)
    with open_output(path):
        pass


def test_the_lock_follows_the_file_that_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(good("a") + bad("b"))
    with open_output(path) as output:
        take_stock(output, FINGERPRINT, overwrite=False)
        with pytest.raises(UsageError, match="another run"):
            open_output(path)
        output.append(good("b"))
    assert path.read_bytes() == good("a") + good("b")


def test_an_output_that_stays_empty_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open_output(path):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with open_output(path):
        pass
    assert path.exists()  # it was there before


def test_done_lines_stay_and_failed_and_torn_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(bad("x") + good("a") + bad("y") + good("b\u2028", "11") + good("c")[:-1])
    path.chmod(0o640)
    done = stock(path)
    assert path.read_bytes() == good("a") + good("b\u2028", "11")
    assert len(done) == 2
    assert path.stat().st_mode & 0o777 == 0o640
    assert done.holds("a", origin("a").record) is True
    assert done.holds("b\u2028", origin("b", "22").record) is False
    assert done.holds("c", origin("c").record) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("size", [1, 10, 200])
def test_a_torn_line_is_cut_wherever_it_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(good("a") + good("b")[:size])
    assert len(stock(path)) == 1
    assert path.read_bytes() == good("a")


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(bad("x") + good("a"))
    link = tmp_path / "out"
    link.symlink_to("real")
    stock(link)
    assert link.is_symlink()
    assert (tmp_path / "real").read_bytes() == good("a")


@pytest.mark.parametrize(
    "content",
    [b"notes", b"notes\n", b"{}\n", b'{"id":"batch_req_x"}\n', good("a") + b"\xff\n", b"\n"],
)
def test_a_file_that_is_no_output_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"out, line \d: not a result"):
        stock(path)
    assert path.read_bytes() == content
    assert len(stock(path, overwrite=True)) == 0
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ("fp_cccccccc_bbbbbbbb", "of another model than this one; run it"),
        ("fp_cccccccc_dddddddd", "of another model than this one; run it"),
        (
            "fp_aaaaaaaa_cccccccc",
            r"of other options \(--logprobs, --prompt-logprobs, --kv-dir or the dtype differs\)",
        ),
    ],
)
def test_a_change_of_model_or_options_is_refused(tmp_path: Path, now: str, what: str) -> None:
    path = tmp_path / "out"
    content = good("a") + bad("b") + good("c")[:50]
    path.write_bytes(content)
    with pytest.raises(UsageError, match=what):
        stock(path, fingerprint=now)
    assert path.read_bytes() == content


def with_kv(name: str, file: Path) -> bytes:
    prompt = Prompt(origin(name), "completion", [65], Sampling(), 1, None, None, None)
    kv = KvFile(str(file), 1, "ff", {}, "float32")
    return writer().result(prompt, PrefillResult(0, 120, kv=kv))


def test_results_whose_kv_file_is_gone_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (tmp_path / "here").touch()
    kept = with_kv("a", tmp_path / "here") + with_kv("c", tmp_path / "here")
    gone = with_kv("b", tmp_path / "gone")
    content = with_kv("a", tmp_path / "here") + gone + bad("a") + with_kv("c", tmp_path / "here")
    path.write_bytes(content)
    with open_output(path) as output:
        done = take_stock(output, FINGERPRINT, overwrite=False, needs_kv=True)
    assert path.read_bytes() == kept
    assert (len(done), done.lost) == (2, 1)
    assert done.holds("b", origin("b").record) is None
    path.write_bytes(content)
    assert len(stock(path)) == 3  # nobody asks for the files


def test_an_output_is_checked_without_a_trace(tmp_path: Path) -> None:
    check_output(tmp_path / "out")
    check_output(Path("/dev/full"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "directory"),
        (tmp_path / "no" / "out", "there is no folder"),
        (tmp_path / "file" / "out", "Not a directory"),
    ):
        with pytest.raises(UsageError, match=words):
            check_output(path)


def test_only_failed_lines_bind_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(bad("a"))
    assert len(stock(path, fingerprint="fp_x_y")) == 0
    assert path.read_bytes() == b""


def test_a_full_disk_while_failed_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out"
    content = bad("x") + good("a") * 3
    path.write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good("a")) + 5, before[1]))
    try:
        with pytest.raises(RunError, match="cannot write"):
            stock(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_records_are_what_resume_reads(tmp_path: Path) -> None:
    assert json.loads(good("a"))["id"] == origin("a").record
