import os
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.offline.lines import Line, LineReader


def read_all(data: bytes, limit: int = 1 << 20) -> list[Line]:
    """Through a pipe, fed by a thread."""
    source, sink = os.pipe()

    def feed() -> None:
        with os.fdopen(sink, "wb") as pipe:
            pipe.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    reader = LineReader(source, limit)
    lines = []
    while not reader.ended:
        line = reader.take()
        if line is None:
            reader.wait(5)
        else:
            lines.append(line)
    feeder.join()
    os.close(source)
    assert sum(line.size for line in lines) <= len(data)
    return [msgspec.structs.replace(line, size=0) for line in lines]


def test_bom_crlf_and_a_missing_last_newline() -> None:
    lines = read_all(b'\xef\xbb\xbf{"a":1}\r\n{"b":2}\r\n{"c":3}')
    assert lines == [Line(1, b'{"a":1}'), Line(2, b'{"b":2}'), Line(3, b'{"c":3}')]


def test_unicode_separators_do_not_end_a_line() -> None:
    text = '{"a":"x\u2028y\u2029z\x85"}'.encode()
    assert read_all(text + b"\n" + text) == [Line(1, text), Line(2, text)]


def test_blank_lines_are_counted_but_not_given() -> None:
    assert read_all(b"\n \t\r\na\n\n\nb\n\n") == [Line(3, b"a"), Line(6, b"b")]
    assert read_all(b"") == []
    assert read_all(b"\xef\xbb\xbf") == []


def test_a_line_over_the_limit_is_skipped_without_being_held() -> None:
    long = b"x" * 700_000
    assert read_all(b"a\n" + long + b"\nb\n", limit=100) == [
        Line(1, b"a"),
        Line(2, None),
        Line(3, b"b"),
    ]
    assert read_all(b"a\n" + long, limit=100) == [Line(1, b"a"), Line(2, None)]
    assert read_all(b"x" * 100 + b"\n", limit=100) == [Line(1, b"x" * 100)]


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (b"ab\n\ncd\r\nef", [3, 5, 2]),
        (b"\xef\xbb\xbfab\n", [6]),
        (b"a\n" + b"x" * 700_000 + b"\nb\n", [2, 700_001, 2]),
        (b"a\n\n \n", [2]),
    ],
)
def test_a_line_knows_its_size_with_its_end_and_the_blank_lines_before_it(
    data: bytes, sizes: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.write_bytes(data)
    with path.open("rb") as file:
        reader = LineReader(file.fileno(), limit=100)
        lines = []
        while (line := reader.take()) is not None:
            lines.append(line.size)
    assert lines == sizes


def test_take_does_not_wait_for_a_pipe_that_pauses() -> None:
    source, sink = os.pipe()
    reader = LineReader(source)
    os.write(sink, b"one\ntw")
    assert reader.take() == Line(1, b"one", 4)
    assert reader.take() is None
    assert not reader.ended
    os.write(sink, b"o\n")
    assert reader.take() == Line(2, b"two", 4)
    os.close(sink)
    assert reader.take() is None
    assert reader.ended
    os.close(source)


@given(st.lists(st.text(alphabet="ab\u2028 \r", max_size=8), max_size=8))
def test_lines_come_back_as_they_were(texts: list[str]) -> None:
    stripped = [(n, text.encode().strip(b" \t\r")) for n, text in enumerate(texts, start=1)]
    expected = [Line(n, data) for n, data in stripped if data]
    assert read_all("\n".join(texts).encode()) == expected
