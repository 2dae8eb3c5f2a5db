"""Lengths of prompts: distributions in a few words, and files."""

import random
import statistics
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.traffic.lengths import parse_lengths


def _drawn(text: str, count: int = 4000) -> list[int]:
    return parse_lengths(text).sample(random.Random(1), count)


def test_distributions() -> None:
    assert set(_drawn("fixed:512")) == {512}
    assert set(_drawn("uniform:10-12")) == {10, 11, 12}
    lengths = _drawn("lognormal:mean=512,sigma=1.0,max=100000")
    assert statistics.fmean(lengths) == pytest.approx(512, rel=0.1)
    assert statistics.median(lengths) == pytest.approx(512 / 2.718281828**0.5, rel=0.1)


def test_what_is_out_of_bounds_is_left_out_and_not_moved_there() -> None:
    lengths = _drawn("lognormal:mean=512,sigma=1.0,max=1000,min=100")
    assert (min(lengths) >= 100, max(lengths) <= 1000) == (True, True)
    assert lengths.count(1000) < 40


def test_draws_are_the_seeds() -> None:
    text = "lognormal:mean=50,sigma=2,max=4096"
    assert _drawn(text, 20) == _drawn(text, 20)
    assert parse_lengths(text).sample(random.Random(2), 20) != _drawn(text, 20)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("7\n\n 9\n7\n")
    lengths = _drawn(str(path))
    assert set(lengths) == {7, 9}
    assert lengths.count(7) / len(lengths) == pytest.approx(2 / 3, abs=0.05)
    path.write_text("7\nx9\n")
    with pytest.raises(UsageError, match="line 2: 'x9' is no number of tokens"):
        parse_lengths(str(path))
    path.write_text("\n")
    with pytest.raises(UsageError, match="there are none in it"):
        parse_lengths(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no text"):
        parse_lengths(str(path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fixed:0", "'0' is no number of tokens from 1"),
        ("fixed:1e3", "'1e3'"),
        ("uniform:10", "wants LOW-HIGH"),
        ("uniform:20-10", "20 is more than 10"),
        ("lognormal:mean=512", "lacks sigma and max"),
        ("lognormal:mean=512,sigma=1,max=9,mode=3", "not 'mode=3'"),
        ("lognormal:mean=512,sigma=1,max=9,max=9", "each once"),
        ("lognormal:mean=nan,sigma=1,max=9", "'nan' is no number above 0"),
        ("lognormal:mean=512,sigma=0,max=9", "'0' is no number above 0"),
        ("lognormal:mean=512,sigma=0.01,max=9", "next to nothing of it"),
        ("normal:512", "No such file"),
        ("", "Is a directory"),
        ("/dev/zero", "not a regular file"),
    ],
)
def test_what_is_wrong_is_told(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_lengths(text)
    assert why in str(caught.value)
    assert "fixed:512" in str(caught.value)
