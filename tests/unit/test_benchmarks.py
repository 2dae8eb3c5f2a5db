"""The benchmarks can be imported and asked for help; what their tables are made of."""

import importlib
import pkgutil
from itertools import count

import pytest

import benchmarks
from benchmarks import growth, models, report
from benchmarks.plain import PlainProcesses, engine_batches
from engine.errors import RunError
from engine.topology.schema import Schedule, Topology
from helpers.checkpoints import checkpoint, reference_logits, token_ids

_PARTS = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]


@pytest.mark.parametrize("name", _PARTS)
def test_every_part_can_be_imported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__doc__
    if name in ("models", "reference", "growth", "footprint"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr("sys.argv", [name, "--help"])
            module.main()
        assert ended.value.code == 0
        assert "--cache" in capsys.readouterr().out


def test_a_table_has_the_columns_of_its_first_row() -> None:
    text = report.table([{"a": 1, "b": "x"}, {"b": "y", "c": 3}])
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| 1 | x |", "|  | y |"]
    assert report.table([]) == "(no rows)\n"


def test_the_header_says_what_was_measured_with() -> None:
    text = report.header("Title", packages=("not-there",))
    assert text.startswith("## Title\n\n- date: 20")
    assert "torch 2." in text
    assert "not-there (not installed)" in text
    assert "cores usable" in text


def test_medians_and_ratios() -> None:
    assert report.median_range([1500.0, 1563.0, 1400.4]) == "1,500 (1,400 to 1,563)"
    assert report.median_range([]) == "n/a"
    assert report.ratio_range([2.0, 3.0, 1.0], [1.0, 2.0, 2.0]) == "1.50 (0.50 to 2.00)"


def test_measures_take_turns_and_nobody_is_always_first() -> None:
    clock = count()
    found = report.alternate({name: lambda: next(clock) for name in "abc"}, 3)
    assert found == {"a": [0, 5, 7], "b": [1, 3, 8], "c": [2, 4, 6]}


def test_the_recipes_are_those_of_the_table() -> None:
    assert set(models.NAMES) == set(models._RECIPES)
    prompts = models.workload()
    assert sum(map(len, prompts)) == 33_929
    assert max(map(max, prompts)) < 4096


def test_plain_processes_run_the_engines_batches() -> None:
    lengths = [9, 30, 4, 4, 60, 5]
    prompts = [token_ids(length, seed) for seed, length in enumerate(lengths)]
    topology = Topology(schedule=Schedule(min_batch_tokens=32, max_batch_tokens=64))
    batches = engine_batches(topology, 2, 32, lengths)
    assert batches == [[0, 1], [2, 3], [4], [5]]
    model = checkpoint("qwen3_moe")
    with PlainProcesses(model, 2) as plain:
        ran = plain.run(prompts, batches)
        assert ran.tokens == [int(reference_logits(model, ids)[-1].argmax()) for ids in prompts]
        assert ran.seconds > 0
        assert plain.run(prompts, batches, attention_alone=True).tokens == [0] * 6
        plain._processes[0].kill()
        plain._processes[0].join()
        with pytest.raises(RunError, match="plain process ended"):
            plain.run(prompts, batches)


def test_the_curve_is_attention_and_a_constant_a_token() -> None:
    def measured(length: int, engine: float) -> dict[str, list[float]]:
        return {"engine": [engine], "attention": [length**2 * 1e-6]}

    found = {n: measured(n, n**2 * 1e-6 + n * 1e-3) for n in (100, 200, 400)}
    rows = growth._curve(found).splitlines()[2:]
    assert [row.split("|")[-2].strip() for row in rows] == ["+0%"] * 3
    found[400]["engine"] = [3 * (400**2 * 1e-6 + 400 * 1e-3)]
    rows = growth._curve(found).splitlines()[2:]
    assert rows[-1].split("|")[-2].strip() not in ("+0%", "-0%")
