"""Traces of requests: what their lines mean, and which are refused. The lines are shaped as those
of the public traces.
"""

import gzip
import os
import threading
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.traffic import traces
from engine.traffic.arrivals import Arrival
from engine.traffic.lengths import TRACES
from engine.traffic.traces import read_lengths, read_trace

MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47]}\n'
    '{"timestamp": 30535, "input_length": 4022, "output_length": 8, "hash_ids": []}\n'
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-17 00:00:00.0000000,879,55\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
    "2024-05-10T02:00:02.5+0130,76,15\n"
    "2024-05-09T23:00:02.5-01:30,77,15\n"
    "2024-05-10 00:00:31Z,78,15\n"
)
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.25,ChatGPT,1087,230,1317,Conversation log\n"
    '118.0,"GPT-4, new",417,276,693,Conversation log\n'
)
BURST_GPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "2630000.5,,1.5,ChatGPT,472,18,490,API log\n"
)
REQUESTS = {
    "mooncake": (MOONCAKE, [(0.0, 6955), (3.053, 6472), (3.053, 4022)]),
    "azure 2023": (AZURE_2023, [(0.0, 374), (4.314579, 396), (20653.31941, 879)]),
    "azure 2024": (
        AZURE_2024,
        [(0.0, 2162), (0.99007, 2399), (30.99007, 78), (1802.49007, 76), (1802.49007, 77)],
    ),
    "burstgpt": (BURST_GPT, [(0.0, 472), (40.25, 1087), (113.0, 417)]),
    "burstgpt 3": (BURST_GPT_3, [(0.0, 472)]),
}
FORMATS = ("mooncake", "azure 2023", "burstgpt")


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def problem(path: Path, content: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        read_trace(written(path, content))
    return str(caught.value).replace(str(path), "TRACE")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def check(found: list[Arrival], expected: list[tuple[float, int]]) -> None:
    assert [arrival.tokens for arrival in found] == [tokens for _, tokens in expected]
    times = [at for at, _ in expected]
    assert [arrival.at_s for arrival in found] == pytest.approx(times, abs=1e-6)


@pytest.mark.parametrize("name", list(REQUESTS))
def test_formats(name: str, path: Path) -> None:
    content, expected = REQUESTS[name]
    check(read_trace(written(path, content)), expected)
    assert sorted(read_lengths(path, "")) == sorted(tokens for _, tokens in expected)


@pytest.mark.parametrize("name", FORMATS)
def test_what_windows_and_editors_do_to_files(name: str, path: Path) -> None:
    content, expected = REQUESTS[name]
    strange = "\ufeff" + content.replace("\n", "\r\n\r\n").rstrip("\r\n")
    check(read_trace(written(path, strange)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_unsorted_times_begin_at_the_first_one(name: str, path: Path) -> None:
    content, expected = REQUESTS[name]
    lines = content.splitlines(keepends=True)
    header = lines[:1] if name != "mooncake" else []
    backwards = [*header, *reversed(lines[len(header) :])]
    if name == "mooncake":  # of two of one moment, the one that the file has first
        expected = [expected[0], expected[2], expected[1]]
    check(read_trace(written(path, "".join(backwards))), expected)


def test_columns_may_stand_anywhere(path: Path) -> None:
    content = "ContextTokens, note, TIMESTAMP \n 7 ,, 2023-11-16 18:15:46 \n"
    assert read_trace(written(path, content)) == [(0.0, 7)]


def test_a_pipe(path: Path) -> None:
    os.mkfifo(path)
    writer = threading.Thread(target=written, args=(path, MOONCAKE))
    writer.start()
    found = read_trace(path)
    writer.join()
    check(found, REQUESTS["mooncake"][1])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ('{"timestamp": 1}', "input_length is missing"),
        ('{"input_length": 1}', "timestamp is missing"),
        ('{"timestamp": 1, "input_length": 0}', "input_length: 0 is not from 1 to 10,000,000"),
        ('{"timestamp": 1, "input_length": -5}', "input_length: -5 is not from 1"),
        ('{"timestamp": 1, "input_length": 10000001}', "10000001 is not from 1 to 10,000,000"),
        ('{"timestamp": 1, "input_length": 1.5}', "expected a whole number, got 1.5"),
        ('{"timestamp": 1, "input_length": true}', "expected a whole number, got True"),
        ('{"timestamp": 1, "input_length": "7"}', "expected a whole number, got '7'"),
        ('{"timestamp": 1, "input_length": ' + "9" * 300 + "}", "999... is not from 1"),
        ('{"timestamp": 1, "input_length": ' + "9" * 9000 + "}", "not JSON: "),
        ('{"timestamp": "now", "input_length": 1}', "expected milliseconds, got 'now'"),
        ('{"timestamp": null, "input_length": 1}', "expected milliseconds, got None"),
        ('{"timestamp": true, "input_length": 1}', "expected milliseconds, got True"),
        ('{"timestamp": -1, "input_length": 1}', "expected milliseconds, got -1"),
        ('{"timestamp": 1e30, "input_length": 1}', "expected milliseconds, got 1e+30"),
        ('{"timestamp": 1e999, "input_length": 1}', "not JSON: "),
        ('{"timestamp": NaN, "input_length": 1}', "not JSON: "),
        ('{"timestamp": 1', "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[1, 2]", "expected an object, got [1, 2]"),
    ],
    ids=lambda text: text[:50],
)
def test_broken_lines_of_mooncake(record: str, why: str, path: Path) -> None:
    told = problem(path, f"{MOONCAKE}\n{record}\n{MOONCAKE}").splitlines()
    assert told[0].startswith("TRACE: line 5: ")
    assert why in told[0]
    assert told[1:] == [f"TRACE: correct these lines, or take them out; or give {TRACES}"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2023-11-16 18:15:46,0,1", "ContextTokens: 0 is not from 1 to 10,000,000 tokens"),
        ("2023-11-16 18:15:46,,1", "ContextTokens: expected a whole number, got "),
        ("2023-11-16 18:15:46,7.0,1", "ContextTokens: expected a whole number, got 7.0"),
        ("2023-11-16 18:15:46,\u0667,1", "ContextTokens: expected a whole number, got \u0667"),
        ("2023-11-16 18:15:46," + "9" * 9000 + ",1", "expected a whole number, got 999"),
        ("2023-11-16 18:15:46,7", "2 columns, where the first line has 3"),
        ("2023-11-16 18:15:46,7,1,", "4 columns, where the first line has 3"),
        ('2023-11-16 18:15:46,"7,1', "not CSV: unexpected end of data"),
        ("2023-11-31 18:15:46,7,1", "TIMESTAMP: expected a time like 2023-11-16 18:15:46.6805900"),
        ("2023-11-16 18:15:61,7,1", "expected a time like"),
        ("0000-11-16 18:15:46,7,1", "expected a time like"),
        (
            "1700158546.68,7,1",
            "expected a time like 2023-11-16 18:15:46.6805900, got 1700158546.68",
        ),
        ("nan,7,1", "expected a time like"),
    ],
    ids=lambda text: ascii(text)[1:50],
)
def test_broken_lines_of_azure(line: str, why: str, path: Path) -> None:
    told = problem(path, f"{AZURE_2023}{line}\n").splitlines()
    assert told[0].startswith("TRACE: line 5: ")
    assert why in told[0]
    assert len(told) == 2


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e300", "", "soon", "1_0 s"])
def test_broken_times_of_burstgpt(seconds: str, path: Path) -> None:
    told = problem(path, f"{BURST_GPT}{seconds},GPT-4,1,1,2,API log\n")
    assert told.startswith(f"TRACE: line 5: Timestamp: expected seconds, got {seconds}\n")


def test_several_broken_lines_are_told_at_once_up_to_a_limit(path: Path) -> None:
    told = problem(path, MOONCAKE + "{}\n" * 3 + MOONCAKE + "{}\n").splitlines()
    lines = [f"TRACE: line {number}: timestamp is missing" for number in (4, 5, 6, 10)]
    assert told == [*lines, f"TRACE: correct these lines, or take them out; or give {TRACES}"]
    told = problem(path, MOONCAKE + "{}\n" * 1000).splitlines()
    assert [line.split(": ")[1] for line in told[:-1]] == [f"line {n}" for n in range(4, 9)]
    assert told[-1].startswith(
        "TRACE: correct these lines, and perhaps more behind them, or take them out; or give "
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "TRACE: there is no request in it; give "),
        (b"\xef\xbb\xbf", "TRACE: there is no request in it; give "),
        (b"\r\n \n", "TRACE: there is no request in it; give "),
        (AZURE_2023.splitlines()[0], "TRACE: there is no request in it; give "),
        (gzip.compress(MOONCAKE.encode()), "TRACE is compressed with gzip; unpack it first"),
        (b"PAR1\0\0", "TRACE is a Parquet file; "),
        (AZURE_2023.encode("utf-16"), "TRACE is UTF-16; save it as UTF-8"),
        (f"[\n{MOONCAKE}]", "TRACE is one JSON array; put one object a line"),
        ('{\n"timestamp": 1,\n"input_length": 1}', "TRACE spreads an object over several lines"),
        (b"\x7fELF\x02\xff\n\xfe\n", "TRACE: line 1: not UTF-8 text; save it as UTF-8; give "),
        (
            b"\0\0\0\0",
            "TRACE: line 1: \\x00\\x00\\x00\\x00 begins none of the known formats; give ",
        ),
        (AZURE_2023.replace("\n", "\r"), "TRACE: line 1: a carriage return alone ends no line; "),
        ("time,tokens\n1,2\n", "TRACE: line 1: time,tokens begins none of the known formats; "),
        ("TIMESTAMP,Request tokens\n1,2\n", "TRACE: line 1: TIMESTAMP,Request tokens begins none"),
        ("7\n8\n", "TRACE: line 1: 7 begins none of the known formats; give "),
        ('"TIMESTAMP,ContextTokens\n1,2\n', "TRACE: line 1: not CSV: unexpected end of data; "),
    ],
    ids=lambda content: ascii(content)[:40],
)
def test_files_that_are_no_trace(content: bytes | str, why: str, path: Path) -> None:
    told = problem(path, content)
    assert told.startswith(why)
    assert len(told.splitlines()) == 1
    assert told.endswith(TRACES) == why.startswith("TRACE:")


def test_text_that_breaks_off_into_bytes(path: Path) -> None:
    told = problem(path, MOONCAKE.encode() + b"\xff\n" + AZURE_2023.encode("utf-16"))
    assert told.startswith("TRACE: line 4: not UTF-8 text; save it as UTF-8\nTRACE: line 5: ")


def test_limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_REQUESTS", 2)
    assert problem(path, MOONCAKE) == "TRACE: more than 2 requests; give a part of it"
    monkeypatch.setattr(traces, "_MOST_LINE_BYTES", 1 << 20)
    long = MOONCAKE.replace("[]", "[" + "1," * (1 << 20) + "1]")
    assert problem(path, long).startswith("TRACE: line 3: longer than 1 MiB\n")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for name, why in (
        (tmp_path, "is a folder; give "),
        (Path("/dev/zero"), "is neither a file nor a pipe; give "),
        (tmp_path / "none", ": cannot be read: No such file or directory; give "),
        (tmp_path / "a\0b", ": cannot be read: not a name of a file; give "),
    ):
        with pytest.raises(UsageError) as caught:
            read_trace(name)
        assert str(caught.value) == f"{name}{'' if why.startswith(':') else ' '}{why}{TRACES}"
