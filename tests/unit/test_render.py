"""Files for Slurm and Kubernetes: that they are well formed, and run the commands they should."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from asapctl.cli import app
from engine.launch.secret import read_secret
from engine.render.yaml import dump
from engine.topology.load import load_topology
from helpers.manifests import manifest_problems

ODD = '/models/it\'s $HOME "x" `y`'


def render(*words: str) -> str:
    result = CliRunner().invoke(app, ["render", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["render", *words])
    assert result.exit_code == 2
    return result.stderr


def understood(words: list[str]) -> dict[str, Any]:
    """What the command line makes of a command: parsed as when it is run, and not run."""
    assert words[:2] == ["asapctl", "launch"]
    group = typer.main.get_command(app)
    command = group.commands["launch"]
    given = command.make_context("launch", list(words[2:])).params
    return {name: value for name, value in given.items() if value or name == "node_rank"}


class Cluster:
    """Stand-ins for Slurm's programs on the PATH. `srun` runs the command once a node, one after
    another; `asapctl` writes down its arguments.
    """

    SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
if [ -n "${HANG-}" ]; then
    sleep 60 >/dev/null &
    trap "kill $!; echo got TERM; exit 143" TERM
    echo up
    wait
fi
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" || exit; done
exit "${EXIT-0}"
"""
    ASAPCTL = f"""#!{sys.executable}
import json, sys
print(json.dumps(["asapctl", *sys.argv[1:]]))
"""

    def __init__(self, folder: Path, nnodes: int) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        nodes = "\\n".join(f"n{node}" for node in range(nnodes))
        for name, text in (
            ("srun", self.SRUN),
            ("asapctl", self.ASAPCTL),
            (
                "scontrol",
                f'#!/bin/bash\n[ "$*" = "show hostnames n[0-9]" ] && printf "{nodes}\\n"\n',
            ),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environ = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "n[0-9]",
            "SLURM_JOB_NUM_NODES": str(nnodes),
            "SLURM_JOB_ID": "7",
        }

    def start(self, script: str, **environ: str) -> "subprocess.Popen[str]":
        path = self.folder / "job.sbatch"
        path.write_text(script)
        return subprocess.Popen(
            ["bash", str(path)],
            cwd=self.folder,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )

    def commands(self, script: str) -> list[list[str]]:
        with self.start(script) as job:
            output = job.communicate(timeout=30)[0]
        assert job.returncode == 0
        return [json.loads(line) for line in output.splitlines()]


def check_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_script_runs_the_command_of_each_node(tmp_path: Path) -> None:
    script = render(
        *("slurm", "d4-t4-e16", "--nnodes", "2", "--model", ODD, "--name", "mine"),
        *("--set", "serve.model_name=a b"),
    )
    check_bash(script)
    commands = Cluster(tmp_path, 2).commands(script)
    secret = tmp_path / ".asapctl-secret"
    assert [understood(command) for command in commands] == [
        {
            "topology": "d4-t4-e16",
            "model": ODD,
            "overrides": ["serve.model_name=a b"],
            "name": "default",
            "nnodes": "2",
            "node_rank": node,
            "rdzv_endpoint": "n0:29400",
            "secret_file": str(secret),
        }
        for node in range(2)
    ]
    assert len(read_secret(secret, {})) >= 32
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_secret_that_is_there_is_kept(tmp_path: Path) -> None:
    secret = tmp_path / ".asapctl-secret"
    secret.write_text("old")
    Cluster(tmp_path, 2).commands(render("slurm", "cpu-2a2e", "--nnodes", "2"))
    assert secret.read_text() == "old"


def test_what_slurm_is_asked_for() -> None:
    script = render("slurm", "gpu-8")
    for line in ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=8", "--job-name=asapctl"):
        assert f"#SBATCH {line}\n" in script
    assert "secret" not in script
    assert "#SBATCH --gres=npu:16\n" in render("slurm", "cloudmatrix384")
    assert "#SBATCH --nodes=24\n" in render("slurm", "cloudmatrix384")
    assert "npu" not in render("slurm", "cpu-2a2e")


def test_one_node_needs_nothing_but_the_topology(tmp_path: Path) -> None:
    script = render("slurm")
    check_bash(script)
    assert Cluster(tmp_path, 1).commands(script) == [["asapctl", "launch", "cpu"]]


def test_sigterm_reaches_the_nodes_and_their_exit_code_comes_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    script = render("slurm", "cpu-2a2e", "--nnodes", "2")
    with cluster.start(script, HANG="1") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=30)[0] == "got TERM\n"
    assert job.returncode == 143
    with cluster.start(script, EXIT="3") as job:
        job.communicate(timeout=30)
    assert job.returncode == 3


def manifest(*words: str) -> dict[str, Any]:
    """The documents by their kinds, each as Kubernetes would take it."""
    documents = list(yaml.safe_load_all(render("kubernetes", *words)))
    for document in documents:
        assert manifest_problems(document) == []
    return {document["kind"]: document for document in documents}


def test_the_manifest_runs_the_command_of_each_pod() -> None:
    found = manifest(
        "d4-t4-e16", "--nnodes", "2", "--model", "/models/$(LWS_WORKER_INDEX)", "--name", "mine"
    )
    spec = found["LeaderWorkerSet"]["spec"]
    template = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"]) == (1, 2)
    for role, node in (("leader", 0), ("worker", 1)):
        (container,) = template[f"{role}Template"]["spec"]["containers"]
        environ = {"LWS_WORKER_INDEX": str(node), "LWS_LEADER_ADDRESS": "mine-0.mine.default"}
        assert understood([substituted(word, environ) for word in container["command"]]) == {
            "topology": "d4-t4-e16",
            "model": "/models/$(LWS_WORKER_INDEX)",
            "host": "0.0.0.0",
            "port": 8000,
            "name": "default",
            "nnodes": "2",
            "node_rank": node,
            "rdzv_endpoint": "mine-0.mine.default:29400",
        }
        assert container["resources"] == {"limits": {"huawei.com/Ascend910": 16}}
        assert ("readinessProbe" in container) == (role == "leader")


def substituted(word: str, environ: dict[str, str]) -> str:
    """As Kubernetes has it: $(NAME) where there is such a variable, and $$( for $(."""
    return re.sub(
        r"\$\$(?=\()|\$\(([A-Z_]+)\)",
        lambda match: "$" if match[0] == "$$" else environ.get(match[1], match[0]),
        word,
    )


def test_pods_have_the_secrets_and_clients_find_the_leader() -> None:
    found = manifest("cpu-2a2e", "--name", "mine", "--set", "serve.port=9000")
    (leader,) = (
        found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    )["containers"]
    given = {
        entry["name"]: found["Secret"]["stringData"][entry["valueFrom"]["secretKeyRef"]["key"]]
        for entry in leader["env"]
    }
    assert given.keys() == {"ASAPCTL_SECRET", "ASAPCTL_API_KEY"}
    assert len(read_secret(None, given)) >= 32
    assert found["Secret"]["stringData"] != manifest("cpu-2a2e")["Secret"]["stringData"]
    service = found["Service"]
    assert service["metadata"]["name"] != "mine"  # which is the set's own headless service
    assert service["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": "mine",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    assert service["spec"]["ports"][0]["port"] == 9000
    assert leader["ports"] == [{"name": "http", "containerPort": 9000}]
    assert "volumes" not in found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]


def test_a_topology_of_ones_own_travels_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '# mine: "x"\n[attention]\ngroups = 1\n\n[experts]\nranks = 2\n[[nodes]]\n' + (
        "attention = [0]\n[[nodes]]\nexperts = [0, 1]\n\n"
    )
    Path("my.toml").write_text(text)
    found = manifest("my.toml")
    assert found["ConfigMap"]["data"] == {"my.toml": text}
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2  # as many as [[nodes]]
    pod = template["workerTemplate"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["command"][2] == f"{mount['mountPath']}/my.toml"
    assert pod["volumes"] == [{"name": "topology", "configMap": {"name": "asapctl"}}]
    assert load_topology("my.toml").nodes


def test_what_cannot_be_rendered_is_explained() -> None:
    assert "2 instances cannot be divided over 3 nodes" in refused(
        "slurm", "cpu-2a2e", "--nnodes", "3", "--set", "instances.count=2"
    )
    assert '[attention] groups: "auto" divides what one node has' in refused(
        "slurm", "cpu", "--nnodes", "2"
    )
    assert "--name Mine: take up to 52 letters a to z" in refused("slurm", "--name", "Mine")
    assert "model models/x: give --model with the absolute path" in refused(
        "kubernetes", "cpu-2a2e", "--model", "models/x"
    )
    assert "no such topology file" in refused("slurm", "nope")


@pytest.mark.parametrize(
    "value",
    ["", "no", "1", "1.0", "0x1", "~", "a: b", "- a", "a #b", "é\n\tx", "a\nb\nc", " a\nb\nc",
     "a\n\nb\n", "*x", "{}", "null", "a\rb\nc\nd", "2001-01-01", "/a/b-c.d", True, None, 3, [], {},
     [{"a": "b", "c": [1]}], {"on": {"y": "n"}}],
)  # fmt: skip
def test_yaml_says_what_was_meant(value: Any) -> None:
    assert list(yaml.safe_load_all(dump([{"key": value, "next": 1}]))) == [
        {"key": value, "next": 1}
    ]


def test_the_schema_refuses() -> None:
    found = manifest("cpu-2a2e", "--nnodes", "2")["LeaderWorkerSet"]
    template = found["spec"]["leaderWorkerTemplate"]
    template["sise"] = template.pop("size")
    template["restartPolicy"] = "Always"
    del template["workerTemplate"]["spec"]["containers"][0]["name"]
    template["leaderTemplate"]["spec"]["containers"][0]["command"].append(2)
    assert len(manifest_problems(found)) == 4
