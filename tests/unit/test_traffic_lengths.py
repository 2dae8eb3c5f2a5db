"""Lengths of prompts: distributions in a few words, and files."""

import os
import random
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.traffic.lengths import FORMS, Lengths, parse_lengths

BOUNDS = {
    "fixed:512": (512, 512),
    "uniform:10-20": (10, 20),
    " uniform: 1 - 2": (1, 2),
    "lognormal:mean=512,sigma=1.0,max=4096": (1, 4096),
    "lognormal:sigma=1,min=100,max=1000,mean=512": (100, 1000),
    # Short ones, where rounding counts, and bounds that lie far out or next to each other.
    "lognormal:mean=3,sigma=1,max=10": (1, 10),
    "lognormal:mean=0.5,sigma=1,max=1": (1, 1),
    "lognormal:mean=1,sigma=2,max=100": (1, 100),
    "lognormal:mean=5000,sigma=2,max=4096,min=4000": (4000, 4096),
    "lognormal:mean=90,sigma=0.3,max=300,min=80": (80, 300),
    "lognormal:mean=200,sigma=1,max=100,min=99": (99, 100),
}


def drawn(lengths: Lengths, count: int, seed: int = 1) -> list[int]:
    return lengths.sample(random.Random(seed), count)


@pytest.mark.parametrize("text", [text for text in BOUNDS if not text.startswith(" ")])
def test_the_mean_is_of_what_is_drawn(text: str) -> None:
    lengths = parse_lengths(text)
    least, most = BOUNDS[text]
    sample = drawn(lengths, 20_000)
    assert (min(sample) >= least, max(sample) <= most) == (True, True)
    assert lengths.longest == most
    deviation = (fmean((each - lengths.mean) ** 2 for each in sample) / len(sample)) ** 0.5
    assert abs(fmean(sample) - lengths.mean) <= 4 * deviation + 1e-9


def test_the_shape_is_that_of_the_words() -> None:
    assert set(drawn(parse_lengths("uniform:10-12"), 100)) == {10, 11, 12}
    sample = drawn(parse_lengths("lognormal:mean=512,sigma=1.0,max=1000000"), 20_000)
    assert median(sample) == pytest.approx(512 / 2.718281828**0.5, rel=0.05)


def test_what_is_out_of_bounds_is_left_out_and_not_moved_there() -> None:
    sample = drawn(parse_lengths("lognormal:mean=512,sigma=1.0,max=1000,min=100"), 4000)
    assert sample.count(1000) < 40
    assert sample.count(100) < 40


@given(st.sampled_from(sorted(BOUNDS)[1:]), st.integers(0, 9), st.integers(0, 50))
def test_the_first_ones_are_the_same_however_many_follow(text: str, seed: int, count: int) -> None:
    lengths = parse_lengths(text)
    sample = drawn(lengths, count, seed)
    assert len(sample) == count
    assert drawn(lengths, 50, seed)[:count] == sample


def test_seeds_differ() -> None:
    lengths = parse_lengths("lognormal:mean=50,sigma=2,max=4096")
    assert drawn(lengths, 20, 1) != drawn(lengths, 20, 2)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(b"\xef\xbb\xbf7\r\n\r\n 9 \r\n+7")
    lengths = parse_lengths(str(path))
    assert (lengths.mean, lengths.longest) == (pytest.approx(23 / 3), 9)
    sample = drawn(lengths, 3000)
    assert set(sample) == {7, 9}
    assert fmean(sample) == pytest.approx(lengths.mean, rel=0.02)
    assert drawn(lengths, 50) == sample[:50]


def test_the_lengths_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n")
    assert drawn(parse_lengths(str(path)), 3) == [374, 374, 374]


def test_a_file_goes_before_a_distribution_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fixed:3").write_text("5\n")
    assert drawn(parse_lengths("fixed:3"), 1) == [5]
    assert drawn(parse_lengths("fixed:4"), 1) == [4]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fixed:0", "'0' is not a length from 1 to 10,000,000"),
        ("fixed:", "'' is not a length"),
        ("fixed:1e3", "'1e3' is not a length"),
        ("fixed:\u00b2", "is not a length"),
        ("fixed:10000001", "10000001 is not a length from 1 to 10,000,000"),
        ("fixed:" + 200 * "9", "9...' is not a length"),
        ("uniform:10", "two lengths with a dash between them are needed"),
        ("uniform:20-10", "20 is more than 10"),
        ("uniform:-3-10", "'' is not a length"),
        ("lognormal:", "mean, sigma, max and min are set once each"),
        ("lognormal:mean=512", "sigma and max must be set"),
        ("lognormal:mean=512,sigma=1,max=9,mode=3", "are set once each"),
        ("lognormal:mean=512,sigma=1,max=9,max=9", "are set once each"),
        ("lognormal:mean=nan,sigma=1,max=9", "mean=nan is not a number above 0, up to 1e+07"),
        ("lognormal:mean=512,sigma=0,max=9", "sigma=0 is not a number above 0, up to 5"),
        ("lognormal:mean=512,sigma=inf,max=9", "sigma=inf is not a number above 0"),
        ("lognormal:mean=512,sigma=1,max=9,min=10", "min=10 is more than max=9"),
        ("lognormal:mean=512,sigma=0.01,max=9", "next to nothing of it lies between"),
        ("normal:512", "no such file or distribution"),
        ("512", "no such file or distribution"),
        ("", "--lengths is empty"),
        (" ", "--lengths is empty"),
        ("/", "/ is a folder"),
        ("/dev/zero", "/dev/zero is neither a file nor a pipe"),
        ("/dev/null/x", "no such file or distribution"),
        ("x\0y", "cannot be read: not a name of a file"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
    ids=lambda text: ascii(text)[1:25],
)
def test_what_is_wrong_is_told_with_what_there_is(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_lengths(text)
    assert why in str(caught.value)
    assert str(caught.value).endswith(f"; give {FORMS}")
    assert str(caught.value).count("fixed:512") == 1
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", ["{path}: there is no request in it; give {forms}"]),
        (b" \n\n", ["{path}: there is no request in it; give {forms}"]),
        (b"7.5\n", ["{path}: line 1: 7.5 begins none of the known formats; give {forms}"]),
        (b"7\r8\r9\r", ["{path}: line 1: a carriage return alone ends no line; save it with line "
                        "feeds; give {forms}"]),
        (
            b"7\n\n x9\n0\n+-5\n99999999999999999999\n",
            [
                "{path}: line 3: the length: expected a whole number, got x9",
                "{path}: line 4: the length: 0 is not from 1 to 10,000,000 tokens",
                "{path}: line 5: the length: expected a whole number, got +-5",
                "{path}: line 6: the length: 99999999999999999999 is not from 1 to 10,000,000 "
                "tokens",
                "{path}: correct these lines, or take them out; or give {forms}",
            ],
        ),
    ],
    ids=["empty", "blank", "fraction", "carriage returns", "lines"],
)  # fmt: skip
def test_files_that_cannot_be(content: bytes, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        parse_lengths(str(path))
    assert str(caught.value).splitlines() == [line.format(path=path, forms=FORMS) for line in lines]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.touch(mode=0)
    with pytest.raises(UsageError, match="cannot be read: Permission denied; give fixed:512"):
        parse_lengths(str(path))
