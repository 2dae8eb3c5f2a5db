"""The program where torch-npu is installed and CANN is not, which breaks `import torch` itself."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import broken_plugin
from helpers.checkpoints import checkpoint
from helpers.program import environment, records, run


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    plugin = broken_plugin.install(tmp_path / "plugin")
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as home:
        yield {
            **environment(Path(home)),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(plugin),
            # Even who asks for plug-ins gets none in asapctl's own processes.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        }


def test_prompts_are_prefilled_all_the_same(tmp_path: Path, env: dict[str, str]) -> None:
    code = [sys.executable, "-c", "import torch"]
    plain = subprocess.run(code, env=env, capture_output=True, text=True, check=False)
    assert plain.returncode != 0  # or this test would show nothing
    assert "torch_npu" in plain.stderr

    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt_token_ids": [1, 2, 3]}\n')
    done = run(
        *("prefill", str(source), "--model", str(checkpoint("qwen3_moe"))),
        *("--topology", "cpu-2a2e"),
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "in.results.jsonl")["a"]["error"] is None


def test_doctor_names_the_missing_library(env: dict[str, str]) -> None:
    done = run("doctor", "--json", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (about,) = [entry for entry in found["remedies"] if entry["about"] == "torch-npu"]
    assert f"{broken_plugin.MISSING} comes with CANN" in about["remedy"]
    runs = {topology["name"]: topology["runs"] for topology in found["topologies"]}
    assert runs["cpu"]
    assert not runs["atlas-a3"]
