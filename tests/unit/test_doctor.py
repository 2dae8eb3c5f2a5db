import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from asapctl.cli import app
from engine.doctor import devices, examine, host, needs, software
from engine.doctor.facts import Fact, Report, Section, Verdict
from engine.doctor.probe import Imported
from engine.errors import UsageError
from helpers import broken_plugin

TORCH = {"version": "2.13.0", "cuda": None, "gloo": True}
GOOD = {
    "torch": "2.13.0",
    "gloo": "yes",
    "CUDA": "13.0",
    "NCCL": "2.30",
    "torch-npu": "2.13",
    "CANN": "9.1",
    "HCCL": "yes",
}


@pytest.fixture
def torch_found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the import of torch tells, without one; the test may change it."""
    found: dict[str, Any] = dict(TORCH)
    monkeypatch.setattr(
        software, "probe_torch", lambda environ: Imported(found, found.pop("error", None))
    )
    return found


def facts(section: Section) -> dict[str, Fact]:
    return {fact.name: fact for fact in section.facts}


def look(root: Path, **environ: str) -> dict[str, Fact]:
    return facts(software.read_software(environ, root))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_torch_for_cpus(torch_found: dict[str, Any], tmp_path: Path) -> None:
    found = look(tmp_path)
    assert (found["torch"].state, found["torch"].text) == ("ok", "2.13.0")
    assert found["gloo"].state == "ok"
    assert {found[name].state for name in ("CUDA", "NCCL", "CANN", "HCCL")} == {"absent"}


def test_a_compiler(torch_found: dict[str, Any], tmp_path: Path) -> None:
    absent = look(tmp_path, PATH=str(tmp_path))["C++ compiler"]
    assert absent.state == "absent"
    assert absent.remedy == "install one of c++, g++, clang++: ranks on CPUs are slower without"
    (tmp_path / "g++").touch(0o755)
    found = look(tmp_path, PATH=str(tmp_path))["C++ compiler"]
    assert (found.state, found.text) == ("ok", str(tmp_path / "g++"))


def test_a_torch_for_gpus(torch_found: dict[str, Any], tmp_path: Path) -> None:
    torch_found.update(cuda="13.0", nccl="2.30.3")
    found = look(tmp_path)
    assert (found["CUDA"].value, found["NCCL"].value) == ("13.0", "2.30.3")


def test_a_torch_that_cannot_be_imported(torch_found: dict[str, Any], tmp_path: Path) -> None:
    torch_found["error"] = "libtorch.so: cannot open shared object file"
    found = look(tmp_path)
    assert found["torch"].state == "problem"
    assert "libtorch.so" in found["torch"].text
    assert "gloo" not in found


def with_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, **plugin: Any) -> dict[str, str]:
    """An environment, and this process, with a torch-npu installed."""
    broken_plugin.install(folder, **plugin)
    monkeypatch.syspath_prepend(str(folder))
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}


def test_torch_npu_without_cann_names_the_library(
    torch_found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = with_plugin(tmp_path / "plugin", monkeypatch)
    fact = look(tmp_path, **environ)["torch-npu"]
    assert fact.state == "problem"
    assert fact.value["missing_library"] == "libhccl.so"
    assert fact.remedy is not None
    assert "libhccl.so comes with CANN" in fact.remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in fact.remedy
    assert "torch_npu" not in sys.modules


def test_torch_npu_without_a_driver_names_the_driver(
    torch_found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "libascend_hal.so: cannot open shared object file: No such file or directory"
    environ = with_plugin(tmp_path / "plugin", monkeypatch, error=error)
    remedy = look(tmp_path, **environ)["torch-npu"].remedy
    assert remedy is not None
    assert "libascend_hal.so comes with the Ascend driver" in remedy


def test_torch_npu_that_works(
    torch_found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = with_plugin(tmp_path / "plugin", monkeypatch, error=None)
    assert look(tmp_path, **environ)["torch-npu"].state == "ok"


def test_torch_npu_of_another_release(
    torch_found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = with_plugin(tmp_path / "plugin", monkeypatch, version="1.11.0")
    fact = look(tmp_path, **environ)["torch-npu"]
    assert fact.state == "problem"
    assert "1.11.0 does not belong to torch" in fact.text
    assert fact.remedy and "pip install 'torch-npu==2." in fact.remedy


def test_cann_is_found_with_its_version_and_hccl(
    torch_found: dict[str, Any], tmp_path: Path
) -> None:
    root = write(
        tmp_path,
        {
            "opt/cann/x86_64-linux/ascend_toolkit_install.info": "package=toolkit\nversion=9.1.0\n",
            "opt/cann/lib64/libhccl.so": "",
        },
    )
    found = look(root, ASCEND_HOME_PATH="/opt/cann")
    assert (found["CANN"].state, found["CANN"].value) == ("ok", "9.1.0")
    assert found["HCCL"].state == "ok"
    assert look(root, ASCEND_HOME_PATH="/opt/other")["CANN"].state == "problem"


def test_cann_that_is_installed_and_not_set_up(torch_found: dict[str, Any], tmp_path: Path) -> None:
    place = "usr/local/Ascend/ascend-toolkit/latest"
    root = write(tmp_path, {f"{place}/version.cfg": "runtime_running_version=[7.7.0.1:8.3.RC1]\n"})
    found = look(root)
    assert (found["CANN"].state, found["CANN"].value) == ("problem", "8.3.RC1")
    assert found["CANN"].remedy and "set_env.sh" in found["CANN"].remedy
    assert found["HCCL"].state == "problem"


def test_drivers(torch_found: dict[str, Any], tmp_path: Path) -> None:
    nvidia = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 7 2025\n"
    root = write(
        tmp_path,
        {
            "proc/driver/nvidia/version": nvidia,
            "usr/local/Ascend/driver/version.info": "Version=25.2.0\nascendhal_version=7.35.23\n",
        },
    )
    found = look(root)
    assert found["NVIDIA driver"].value == "570.86.15"
    assert found["Ascend driver"].value == "25.2.0"
    lacking = write(tmp_path / "other", {"dev/davinci0": ""})
    assert look(lacking)["Ascend driver"].state == "problem"


def test_devices_and_masks(tmp_path: Path) -> None:
    root = write(tmp_path, {f"dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidiactl")})
    (root / "dev/nvidia-uvm").touch()
    environ = {"PATH": "", "CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO", "HOME": "/"}
    found = facts(devices.read_devices(environ, root))
    assert found["NVIDIA GPUs"].value["visible"] == ["1"]
    assert "visible: 1 (CUDA_VISIBLE_DEVICES=1)" in found["NVIDIA GPUs"].text
    assert (found["Ascend NPUs"].state, found["Ascend NPUs"].text) == ("absent", "none")
    assert found["NCCL_DEBUG"].value == "INFO"
    assert "HOME" not in found


def test_a_mask_that_cannot_be_is_a_problem_and_not_the_end(tmp_path: Path) -> None:
    root = write(tmp_path, {"dev/davinci0": "", "dev/davinci1": ""})
    found = facts(devices.read_devices({"ASCEND_RT_VISIBLE_DEVICES": "1,0", "PATH": ""}, root))
    assert found["Ascend NPUs"].state == "problem"
    remedy = found["Ascend NPUs"].remedy
    assert remedy and remedy.startswith("correct ASCEND_RT_VISIBLE_DEVICES: ")
    assert found["NVIDIA GPUs"].state == "absent"


def test_devices_without_what_controls_them_are_a_problem(tmp_path: Path) -> None:
    root = write(tmp_path, {"dev/davinci0": "", "dev/davinci_manager": "", "dev/hisi_hdc": ""})
    fact = facts(devices.read_devices({"PATH": ""}, root))["Ascend NPUs"]
    assert fact.state == "problem"
    assert "/dev/devmm_svm" in fact.text
    assert "/dev/hisi_hdc" not in fact.text


def test_the_host_is_described() -> None:
    found = facts(host.read_host({}))
    assert found["cores"].value >= 1
    assert found["memory"].value["free_bytes"] > 0
    assert {"open files", "processes", "interfaces", "ports", "HCCL ports"} <= set(found)
    assert found["memfd"].state == "ok"


def test_what_cannot_be_read_is_said_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: Path) -> None:
        raise PermissionError(13, "Permission denied", "/proc/x")

    monkeypatch.setattr(host, "read_machine", fail)
    found = facts(host.read_host({}))
    assert found["cores"].state == "problem"
    assert "Permission denied" in found["cores"].text
    assert found["ports"].state == "ok"


def test_few_open_files_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda limit: (256, 4096))
    fact = facts(host.read_host({}))["open files"]
    assert (fact.state, fact.value) == ("problem", {"soft": 256, "hard": 4096})
    assert fact.remedy == "raise the limit: ulimit -n 65536"


def test_a_port_setting_that_hccl_would_refuse_is_a_problem() -> None:
    fact = facts(host.read_host({"HCCL_IF_BASE_PORT": "65530"}))["HCCL ports"]
    assert fact.state == "problem"
    assert "HCCL_IF_BASE_PORT=65530" in fact.text


def section(states: dict[str, str]) -> Section:
    return Section("software", tuple(Fact(name, "ok", text) for name, text in states.items()))


class _Rank:
    device = None


class _Plan:
    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.ranks = (_Rank(),)
        self.memory_needed = 1 << 30
        self.model_dir = Path("some-model")


def verdicts(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, str], here: Any
) -> dict[str, Verdict]:
    def plan(name: str, model: str | None, assume_devices: bool = False) -> _Plan:
        found: _Plan = _Plan("hccl") if assume_devices else here(name, model)
        return found

    monkeypatch.setattr(needs, "_plan", plan)
    return {verdict.topology: verdict for verdict in needs.judge_all(section(states))}


def test_topologies_on_a_machine_that_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {}

    def here(name: str, model: str | None) -> _Plan:
        models[name] = model
        return _Plan("shm" if name.startswith("cpu") else "hccl")

    found = verdicts(monkeypatch, GOOD, here)
    assert all(verdict.runs for verdict in found.values())
    assert {name for name, verdict in found.items() if verdict.on_cpu} == {
        name for name in found if name.startswith(("cpu", "paced"))
    }
    assert models["cpu"] is None  # the demo
    assert models["atlas-a3"] == "qwen3-235b-a22b"  # a demo says nothing about devices


def test_gaps_are_those_of_the_plan_and_of_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name: str, model: str | None) -> _Plan:
        if name.startswith("cpu"):
            return _Plan("shm")
        raise UsageError(f"{name}.toml: too little memory\n{name}.toml: 16 npu devices are wanted")

    states = {name: text for name, text in GOOD.items() if name not in ("CANN", "HCCL")}
    found = verdicts(monkeypatch, states, here)
    assert found["cpu"].runs
    gaps = found["atlas-a3"].gaps
    assert gaps[:2] == ("too little memory", "16 npu devices are wanted")
    assert gaps[2].startswith("no CANN and no HCCL; install CANN")
    assert len(gaps) == 3


def test_without_torch_no_topology_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, {}, lambda name, model: _Plan("shm"))
    assert {verdict.gaps for verdict in found.values()} == {("torch cannot be imported",)}


def invoke(monkeypatch: pytest.MonkeyPatch, report: Report, *arguments: str) -> Result:
    monkeypatch.setattr(examine, "examine", lambda: report)
    return CliRunner().invoke(app, ["doctor", *arguments])


def report(verdict: Verdict, *found: Fact) -> Report:
    return Report((Section("software", tuple(found)),), (verdict,))


BAD = Fact("torch-npu", "problem", "[bold] libhccl.so", {"a": 1}, "install CANN [now]")
HINT = Fact("gloo", "absent", "none", remedy="install gloo")


def test_json_is_all_there_is_on_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict("cpu", "2 ranks", (), on_cpu=True)
    result = invoke(monkeypatch, report(verdict, HINT, BAD), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["cpu_ready"] is True
    assert found["sections"]["software"][1] == {
        "name": "torch-npu",
        "state": "problem",
        "text": "[bold] libhccl.so",
        "value": {"a": 1},
        "remedy": "install CANN [now]",
    }
    assert found["topologies"] == [{"name": "cpu", "runs": True, "needs": "2 ranks", "gaps": []}]
    # Problems go first.
    assert [entry["about"] for entry in found["remedies"]] == ["torch-npu", "gloo"]


def test_people_get_remedies_last_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verdict = Verdict("cpu", "2 ranks", (), on_cpu=True)
    result = invoke(monkeypatch, report(verdict, BAD))
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "  !! torch-npu [bold] libhccl.so" in lines
    assert "  1  torch-npu install CANN [now]" in lines
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict("cpu", "", ("no memory",), on_cpu=True), 1),
        (Verdict("gpu-8", "", ()), 1),
        (Verdict("cpu", "", (), on_cpu=True), 0),
    ],
)
def test_the_exit_code_is_about_topologies_without_accelerators(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int
) -> None:
    for arguments in ((), ("--json",)):
        assert invoke(monkeypatch, report(verdict), *arguments).exit_code == code


def test_the_help_fits_and_has_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "Example: asapctl doctor --json" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
