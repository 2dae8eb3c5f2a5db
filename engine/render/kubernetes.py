"""A manifest for Kubernetes: a LeaderWorkerSet whose leader is node 0, its secrets, and a service.

https://lws.sigs.k8s.io: the set's controller tells each pod its place in LWS_WORKER_INDEX and its
leader's name in LWS_LEADER_ADDRESS; `$(NAME)` in a command is Kubernetes' own substitution.
"""

import secrets
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import UsageError
from engine.files import MIB, read_file
from engine.launch.endpoint import DEFAULT_PORT, endpoint
from engine.render.job import Job
from engine.render.yaml import dump

SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
_RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
_FOLDER = "/etc/asapctl"
_GRACE_S = 60

_HEADER = """\
# `asapctl launch {topology}` on {nnodes} pod{s}: a LeaderWorkerSet, which needs the LWS controller
# (https://lws.sigs.k8s.io).
#   kubectl apply -f FILE
#   kubectl port-forward service/{name}-http {port}
#   kubectl get secret {name} -o jsonpath='{{.data.api-key}}' | base64 -d
# The secrets in it were made for this file: keep it as you keep those.
{claim}"""
_CLAIM = """\
# The model: a PersistentVolumeClaim {name}-model has to be there, and is mounted at
# {path}.
"""


def render_kubernetes(
    job: Job, image: str, *, secret: str | None = None, api_key: str | None = None
) -> str:
    """The text of the manifest. secret, api_key: by default new ones.

    Raises UsageError: the pods could not find the model that the topology names.
    """
    name, port = job.launch.name, job.launch.port or job.topology.serve.port or 8000
    topology, file = job.launch.topology, _own_file(job)
    if file is not None:
        topology = f"{_FOLDER}/{Path(topology).name}"
    launch = msgspec.structs.replace(
        job.launch,
        topology=topology,
        name="default",
        host="0.0.0.0",
        port=port,
        rdzv_endpoint=endpoint("$(LWS_LEADER_ADDRESS)", DEFAULT_PORT),
        secret_file=None,
    )
    model = _model(job)
    command = [
        word.replace("$(", "$$(") if not word.startswith("$(LWS_") else word
        for word in launch.words("$(LWS_WORKER_INDEX)")
    ]
    data = {
        "secret": secret or secrets.token_urlsafe(32),
        "api-key": api_key or secrets.token_urlsafe(32),
    }
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "Opaque",
            "stringData": data,
        }
    ]
    if file is not None:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name},
                "data": {Path(topology).name: file},
            }
        )
    leader = _pod(job, image, command, model, file is not None, port)
    workers = _pod(job, image, command, model, file is not None, None)
    documents += [_set(job, leader, workers), _service(name, port)]
    header = _HEADER.format(
        topology=job.launch.topology.replace("\n", " "),
        nnodes=job.nnodes,
        s="s" if job.nnodes > 1 else "",
        name=name,
        port=port,
        claim=_CLAIM.format(name=name, path=model.replace("\n", " ")) if model else "",
    )
    return header + dump(documents)


def _set(job: Job, leader: dict[str, Any], workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": job.launch.name},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",  # the leader is ready when the workers are
            "leaderWorkerTemplate": {
                "size": job.nnodes,
                "restartPolicy": "RecreateGroupOnPodRestart",  # a launch ends as a whole
                "leaderTemplate": leader,
                "workerTemplate": workers,
            },
        },
    }


def _service(name: str, port: int) -> dict[str, Any]:
    """The set has a headless service of its own name already."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-http"},
        "spec": {
            "selector": {SET_LABEL: name, INDEX_LABEL: "0"},
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        },
    }


def _pod(
    job: Job, image: str, command: list[str], model: str | None, configured: bool, port: int | None
) -> dict[str, Any]:
    """A pod's template. port: of HTTP, on the leader."""
    name = job.launch.name
    container: dict[str, Any] = {
        "name": "asapctl",
        "image": image,
        "command": command,
        "env": [
            _from_secret("ASAPCTL_SECRET", name, "secret"),
            _from_secret("ASAPCTL_API_KEY", name, "api-key"),
        ],
    }
    if port is not None:
        container["ports"] = [{"name": "http", "containerPort": port}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/ready", "port": "http"},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        }
    limits = {_RESOURCES[kind]: count for kind, count in job.devices.items() if kind != "cpu"}
    if limits:
        container["resources"] = {"limits": limits}
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    if limits:  # NCCL and HCCL take shared memory, and a container's default is 64 MiB
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if model is not None:
        mounts.append({"name": "model", "mountPath": model, "readOnly": True})
        claim = {"claimName": f"{name}-model", "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    if configured:
        mounts.append({"name": "topology", "mountPath": _FOLDER, "readOnly": True})
        volumes.append({"name": "topology", "configMap": {"name": name}})
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container | ({"volumeMounts": mounts} if mounts else {})],
    }
    if volumes:
        spec["volumes"] = volumes
    return {"spec": spec}


def _from_secret(variable: str, name: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _own_file(job: Job) -> str | None:
    """The text of a topology that is not in the image; None for a packaged one."""
    if job.topology.folder is None:
        return None
    try:
        return read_file(Path(job.launch.topology), MIB).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{job.launch.topology}: cannot be read: {error.strerror}") from None


def _model(job: Job) -> str | None:
    """Where pods have the model; None for the demo, which each makes for itself."""
    model = job.topology.model.path if job.launch.model is None else job.launch.model
    if model == "demo":
        return None
    if not model.startswith("/"):
        raise UsageError(
            f"model {model}: give --model with the absolute path at which the pods shall have it, "
            "as in --model /models/mine"
        )
    return model
