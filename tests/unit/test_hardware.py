"""Cost tables: what steps cost by them, and what is said of those that are wrong."""

from pathlib import Path

import msgspec
import pytest
import tomli

from engine.errors import UsageError
from engine.hardware.load import load_hardware, packaged_hardware
from engine.hardware.table import Hardware
from engine.model.spans import Span

CLOUD = load_hardware("cloudmatrix384")


def written(path: Path, *changes: tuple[str, str]) -> Path:
    packaged = Path(__file__).parents[2] / "topologies/hardware/cloudmatrix384.toml"
    text = packaged.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return path


def test_the_packaged_table_has_the_figures_it_is_fitted_to() -> None:
    """The paper's: 43 to 44 ms for one prompt of 32k tokens, 3.59 times less for 32 of 1k."""
    long, short = CLOUD.attention_s([Span(0, 32768)]), CLOUD.attention_s([Span(0, 1024)] * 32)
    assert 0.043 < long < 0.044
    assert long / short == pytest.approx(3.59, rel=0.01)
    assert CLOUD.experts_s(10_000) - CLOUD.experts_s(9_000) == pytest.approx(1.15e-4)
    assert CLOUD.links.dispatch.seconds(512) < 1e-4
    assert packaged_hardware() == ("cloudmatrix384",)


def test_chunks_of_a_prompt_cost_as_much_as_the_whole() -> None:
    whole = CLOUD.attention_s([Span(0, 10_000)])
    parts = CLOUD.attention_s([Span(0, 4_000)]) + CLOUD.attention_s([Span(4_000, 6_000)])
    assert parts == pytest.approx(whole)


def test_experts_cost_the_same_up_to_the_inflection_and_share_what_there_is() -> None:
    assert CLOUD.experts_s(1) == CLOUD.experts_s(2000) < CLOUD.experts_s(2001)
    assert CLOUD.experts_s(8000, ranks=8) == pytest.approx(CLOUD.experts_s(8000) / 2)


def test_nothing_costs_nothing() -> None:
    assert CLOUD.attention_s([]) == CLOUD.experts_s(0) == CLOUD.links.combine.seconds(0) == 0


def test_scaling_multiplies_times_and_nothing_else() -> None:
    """Every number of seconds of the file, whatever it is called, and none of the others."""
    packaged = Path(__file__).parents[2] / "topologies/hardware/cloudmatrix384.toml"
    expected = tomli.loads(packaged.read_text())

    def scale(table: dict[str, object]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                scale(value)
            elif isinstance(value, float):
                table[key] = value * 10

    scale(expected)
    assert msgspec.to_builtins(CLOUD.scaled(10)) == expected


def test_in_lockstep_links_are_slower() -> None:
    lockstep = CLOUD.in_lockstep()
    assert lockstep.links == CLOUD.sync_links
    assert lockstep.links.dispatch.seconds(1000) > CLOUD.links.dispatch.seconds(1000)
    assert lockstep.attention == CLOUD.attention


def test_a_file_goes_before_a_name(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.toml", ("layers = 61", "layers = 7"))
    assert load_hardware(str(path)).layers == 7
    assert load_hardware("cloudmatrix384", path).layers == 7
    assert isinstance(load_hardware("cloudmatrix384", tmp_path / "none"), Hardware)


def test_every_problem_is_named(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.toml",
        ("layers = 61", "layers = 0\nlayer = 3"),
        ("pair_s = 3.02e-11", "pair_s = -1.0"),
        ("bubble_s = 0.0\n", ""),
        ("[links.combine]", "[links.combined]"),
        ("flat_s = 2.3e-4", "flat_s = nan"),
    )
    with pytest.raises(UsageError) as caught:
        load_hardware(str(path))
    assert str(caught.value).splitlines() == [
        f"{path}: {problem}"
        for problem in (
            "[attention] pair_s: expected seconds from 0 to 3600, got -1.0",
            "[experts] bubble_s is missing; set it",
            "[experts] flat_s: expected seconds from 0 to 3600, got nan",
            '[links] combined: unknown key; did you mean "combine"?',
            'layer: unknown key; did you mean "layers"?',
            "layers: expected a whole number from 1 to 1e+09, got 0",
            "section [links.combine] is missing; set it",
        )
    ]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for name, text in (
        ("cloudmatrix", 'no such table of hardware; did you mean "cloudmatrix384"?'),
        ("zzz", "no such table of hardware; there are cloudmatrix384"),
        (str(tmp_path), "cannot be read: Is a directory"),
    ):
        with pytest.raises(UsageError, match=text):
            load_hardware(name)
    path = tmp_path / "broken.toml"
    path.write_text("a = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_hardware(str(path))
    path.write_text("attention = 3")
    with pytest.raises(UsageError, match=r"\[attention\]: expected a section, got 3"):
        load_hardware(str(path))
