"""An sbatch script that runs a launch: one task a node, ended by SIGTERM as by Ctrl-C."""

import msgspec

from engine.launch.command import join
from engine.launch.endpoint import DEFAULT_PORT
from engine.render.job import Job

# What Slurm has to expand where the script runs.
_RANK, _ENDPOINT, _SECRET = "$SLURM_NODEID", f"$first:{DEFAULT_PORT}", "$secret"

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{devices}#SBATCH --signal=B:TERM@60
#SBATCH --output=%x-%j.log
#
# Runs `asapctl launch {topology}` on {nnodes} node{s}. Submit it (sbatch FILE) in a folder that all
# nodes have, and end it with scancel. Further options of your cluster's (partition, account, time)
# go above, or on sbatch's command line.
set -euo pipefail
{secret}
# SIGTERM, which Slurm sends a minute before the time is up, is passed on to every node.
step=
trap 'if [ -n "$step" ]; then kill -TERM "$step"; fi' TERM

# Each task has all of its node's cores; its node's rank is known there alone.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=60 --label \\
    bash -c 'exec {command}'{arguments} &
step=$!

status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # the trap cut the wait short
    status=0
    wait "$step" || status=$?
done
exit "$status"
"""

_SECRET_PART = """
# What the nodes know each other by, readable by its owner alone. Made once, and kept.
secret=${ASAPCTL_SECRET_FILE:-$PWD/.asapctl-secret}
if [ ! -e "$secret" ]; then
    (umask 077 && head -c 32 /dev/urandom | base64 >"$secret.$SLURM_JOB_ID")
    mv -n "$secret.$SLURM_JOB_ID" "$secret"
fi

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""


def render_slurm(job: Job) -> str:
    """The text of the script."""
    launch = msgspec.structs.replace(
        job.launch, rdzv_endpoint=_ENDPOINT, secret_file=_SECRET, name="default"
    )
    several = job.nnodes > 1
    words = launch.words(_RANK)
    # The task's own shell expands the rank; what this script knows goes to it as an argument.
    given = [word for word in (_ENDPOINT, _SECRET) if word in words]
    places = {word: f"${number}" for number, word in enumerate(given, 1)}
    inner = join([places.get(word, word) for word in words], [_RANK, *places.values()])
    return _SCRIPT.format(
        name=job.launch.name,
        nnodes=job.nnodes,
        s="s" if several else "",
        topology=job.launch.topology.replace("\n", " "),
        devices=_devices(job),
        secret=_SECRET_PART if several else "",
        command=inner.replace("'", "'\\''"),
        arguments=f" {job.launch.name} {join(given, given)}" if given else "",
    )


def _devices(job: Job) -> str:
    lines = {"cuda": "#SBATCH --gpus-per-node={}\n", "npu": "#SBATCH --gres=npu:{}\n"}
    return "".join(
        lines[kind].format(count) for kind, count in job.devices.items() if kind in lines
    )
