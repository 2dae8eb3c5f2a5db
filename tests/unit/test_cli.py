import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from asapctl.cli import _reported, app
from engine import __version__
from engine.errors import RunError, UsageError

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command; the demo checkpoint is made once for all tests here."""
    cache = tmp_path_factory.getbasetemp() / "cli-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: CliRunner().invoke(app, [str(word) for word in arguments])


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"asapctl {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["prefill"],
        ["launch"],
        ["ps"],
        ["status"],
        ["trace"],
        ["logs"],
        ["stop"],
        ["check"],
        ["render"],
    ],
)
def test_every_help_fits_a_screen_and_has_an_example(invoke: Invoke, command: list[str]) -> None:
    for flag in ("--help", "-h"):
        result = invoke(*command, flag)
        assert result.exit_code == 0
        assert "Example" in result.stdout
        assert "asapctl" in result.stdout
        # A command to copy stays on one line, however long.
        wrapped = [line for line in result.stdout.splitlines() if "  asapctl " not in line]
        assert max(map(len, wrapped)) <= 80
        assert "\x1b" not in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['asapctl', '--help']\n"
        "from asapctl.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'numpy', 'zmq', 'tokenizers', 'transformers', 'rich', 'msgspec',\n"
        "         'fastapi', 'uvicorn', 'psutil'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout


def test_check_prints_ranks_experts_and_memory_in_80_columns(
    invoke: Invoke, tmp_path: Path
) -> None:
    kv = tmp_path / "kv"
    result = invoke("check", "cpu-3a2e", "--kv-dir", kv, "--set", "experts.ranks=3")
    assert result.exit_code == 0, result.output
    assert not kv.exists()
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("model"))
    table = {tuple(line.split()[:2]): line for line in lines}
    for rank in range(3):
        assert "cpu" in table["attention", str(rank)]
        assert "MiB" in table["expert", str(rank)]
    assert "0-1 (2)" in table["expert", "0"]
    assert "5-7 (3)" in table["expert", "2"]
    for word in ("weights", "windows", "working", "KV", "total", "32768 tokens", "free"):
        assert word in result.stdout


def test_the_widest_table_fits_80_columns(invoke: Invoke) -> None:
    from rich.console import Console

    from asapctl.check_view import rank_table
    from engine.launch.budget import RankPlan
    from engine.topology.ranks import RankId

    size = 1023 * 2**20 - 2**25  # "991 MiB", as wide as sizes get
    ranks = [
        RankPlan(RankId(role, 239), range(100, 128), *[size] * 5)
        for role in ("attention", "expert")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rank_table(ranks))
    text = console.export_text()
    assert "\u2026" not in text
    assert text.count("991 MiB") >= 10
    for word in ("attention 239", "100-127 (28)", "process", "total"):
        assert word in text


def test_check_as_json(invoke: Invoke) -> None:
    plan = json.loads(invoke("check", "cpu-2a2e", "--json").stdout)
    assert (plan["topology"], plan["architecture"]) == ("cpu-2a2e.toml", "qwen3_moe")
    assert [rank["rank"] for rank in plan["ranks"]] == [
        "attention 0", "attention 1", "expert 0", "expert 1",
    ]  # fmt: skip
    assert [rank["experts"] for rank in plan["ranks"]] == [0, 0, 4, 4]
    assert plan["ranks"][3]["first_expert"] == 4
    assert sum(rank["total_bytes"] for rank in plan["ranks"]) < plan["memory_needed_bytes"]
    assert any("32768 tokens" in note for note in plan["notes"])


def test_problems_of_keys_do_not_hide_those_of_the_model(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke(
        *("check", "--kv-dir", "/dev/null/kv", "--set", "schedule.lanes=0"),
        *("--set", "experts.ranks=33", "--set", "attention.groups=500"),
    )
    assert result.exit_code == 2
    found = [line.split(":")[1].strip() for line in result.stderr.splitlines()]
    keys = ("attention.groups", "schedule.lanes", "experts.ranks")
    assert found == ["/dev/null/kv", *(f"--set {key}" for key in keys)]
    assert "from 1 to 240" in result.stderr


@pytest.mark.parametrize("more", [[], ["--set", "schedule.lanes=0"], ["no-such-topology"]])
def test_a_name_on_the_hub_is_not_fetched(invoke: Invoke, more: list[str]) -> None:
    result = invoke("check", *more, "--model", "Qwen/Qwen3-30B-A3B")
    assert result.exit_code == 2
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B" in result.stderr


def test_the_list_of_commands_cuts_no_sentence(invoke: Invoke) -> None:
    listed = invoke("--help").stdout.partition("Commands:\n")[2]
    assert "..." not in listed
    sentences = re.split(r"^  (?=\S)", listed, flags=re.MULTILINE)[1:]
    assert len(sentences) == 12
    assert all(sentence.rstrip().endswith(".") for sentence in sentences)


def test_options_that_commands_share_read_the_same(invoke: Invoke) -> None:
    for option in ("  --model DIR", "  --set KEY=VALUE"):
        lines = {
            re.sub(" +", " ", line)
            for command in ("prefill", "launch", "check")
            for line in invoke(command, "--help").stdout.splitlines()
            if line.startswith(option)
        }
        assert len(lines) == 1, lines


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asapctl", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"asapctl {__version__}\n"


def test_check_reports_all_problems_and_exits_2(invoke: Invoke, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[attention]\ngrops = 2\n[schedule]\nlanes = 0\n", encoding="utf-8")
    result = invoke("check", mine, "--model", tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == f'error: {mine}: [attention] grops: unknown key; did you mean "groups"?'
    assert lines[1].startswith(f"error: {mine}: [schedule] lanes: expected a whole number")
    assert lines[2] == f"error: model directory {tmp_path / 'nothing'} does not exist"
    assert len(lines) == 3

    result = invoke("check", "--set", "experts.ranks=9", "--set", "model.max_model_len=99999")
    assert result.exit_code == 2
    assert [line.split(":")[0] for line in result.stderr.splitlines()[-2:]] == ["error"] * 2


def test_check_names_an_unknown_architecture_and_the_known_ones(
    invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    result = invoke("check", "--model", tmp_path)
    assert result.exit_code == 2
    for name in ("gpt2", "qwen3_moe", "mixtral", "deepseek_v3"):
        assert name in result.stderr


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (UsageError("a\nb"), 2, "error: a\nerror: b\n"),
        (RunError("expert 1 was killed"), 1, "error: expert 1 was killed\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
    ],
)
def test_errors_end_a_command_with_their_code(raised: BaseException, code: int, shown: str) -> None:
    small = typer.Typer()

    @small.command()
    @_reported
    def fails() -> None:
        raise raised

    result = CliRunner().invoke(small, [])
    assert (result.exit_code, result.stderr) == (code, shown)


def test_a_defect_keeps_its_traceback() -> None:
    small = typer.Typer(pretty_exceptions_enable=False)
    small.command()(_reported(lambda: 1 // 0))
    assert isinstance(CliRunner().invoke(small, []).exception, ZeroDivisionError)


def test_a_misspelt_command_is_a_usage_error(invoke: Invoke) -> None:
    result = invoke("chekc")
    assert result.exit_code == 2
    assert "check" in result.stderr


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    def asapctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
        gone = tmp_path / "gone"
        script = f'cd "{gone}" && rmdir "{gone}" && exec "$@"'
        gone.mkdir()
        program = [sys.executable, "-m", "asapctl", *arguments]
        return subprocess.run(
            ["sh", "-c", script, "sh", *program], capture_output=True, text=True, check=False
        )

    for arguments in (["check"], ["prefill", "x"], ["launch"]):
        done = asapctl(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: the working folder cannot be used")
        assert len(done.stderr.splitlines()) == 1
    assert asapctl("ps").returncode == 0
