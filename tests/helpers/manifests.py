"""What Kubernetes would say to a manifest: the part of the published schemas that ours touch.

LeaderWorkerSet v1 (https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/) and the core types
below it. Fields that are left out here are ones that no manifest of ours has.
"""

import re
from collections.abc import Iterator
from typing import Any

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
FLAG = {"type": "boolean"}
QUANTITIES = {"type": "object", "values": {"type": "quantity"}}


def _struct(required: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "object", "fields": fields, "required": required.split()}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _enum(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": words}


TEXTS = {"type": "object", "values": TEXT}
METADATA = _struct("name", name={"type": "string", "pattern": r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"})
PORT_OR_NAME = {"type": "quantity"}
CONTAINER = _struct(
    "name image",
    name=TEXT,
    image=TEXT,
    command=_list(TEXT),
    args=_list(TEXT),
    env=_list(
        _struct(
            "name",
            name={"type": "string", "pattern": "[A-Z_]+"},
            value=TEXT,
            valueFrom=_struct(secretKeyRef=_struct("key", name=TEXT, key=TEXT)),
        )
    ),
    ports=_list(_struct("containerPort", name=TEXT, containerPort=NUMBER)),
    readinessProbe=_struct(
        httpGet=_struct("port", path=TEXT, port=PORT_OR_NAME),
        periodSeconds=NUMBER,
        timeoutSeconds=NUMBER,
    ),
    resources=_struct(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=_list(_struct("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
POD = _struct(
    metadata=_struct(labels=TEXTS, annotations=TEXTS),
    spec=_struct(
        "containers",
        terminationGracePeriodSeconds=NUMBER,
        containers=_list(CONTAINER),
        volumes=_list(
            _struct(
                "name",
                name=TEXT,
                emptyDir=_struct(medium=_enum("", "Memory")),
                persistentVolumeClaim=_struct("claimName", claimName=TEXT, readOnly=FLAG),
                configMap=_struct(name=TEXT),
            )
        ),
    ),
)
KINDS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "spec": _struct(
            "leaderWorkerTemplate",
            replicas=NUMBER,
            startupPolicy=_enum("LeaderCreated", "LeaderReady"),
            leaderWorkerTemplate=_struct(
                "workerTemplate",
                size=NUMBER,
                restartPolicy=_enum(
                    "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
                ),
                leaderTemplate=POD,
                workerTemplate=POD,
            ),
        )
    },
    ("v1", "Secret"): {"type": TEXT, "stringData": TEXTS},
    ("v1", "ConfigMap"): {"data": TEXTS},
    ("v1", "Service"): {
        "spec": _struct(
            selector=TEXTS,
            ports=_list(_struct("port", name=TEXT, port=NUMBER, targetPort=PORT_OR_NAME)),
        )
    },
}
_PYTHON = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def manifest_problems(document: Any) -> list[str]:
    """Everything that is not as the schema of the document's kind has it."""
    kind = document.get("apiVersion"), document.get("kind")
    if kind not in KINDS:
        return [f"no such kind: {kind}"]
    fields = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, **KINDS[kind]}
    return list(_problems(_struct("metadata", **fields), document, str(kind[1])))


def _problems(schema: dict[str, Any], value: Any, where: str) -> Iterator[str]:
    kind = schema["type"]
    if kind == "quantity":
        if type(value) not in (int, str):
            yield f"{where}: {value!r} is neither a number nor a string"
        return
    if type(value) is not _PYTHON[kind]:
        yield f"{where}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        yield f"{where}: {value!r} does not match"
    if kind == "array":
        for place, item in enumerate(value):
            yield from _problems(schema["items"], item, f"{where}[{place}]")
    if kind == "object":
        fields = schema.get("fields")
        yield from (
            f"{where}: needs {key}" for key in schema.get("required", ()) if key not in value
        )
        for key, item in value.items():
            if fields is not None and key not in fields:
                yield f"{where}: unknown {key}"
                continue
            yield from _problems(
                fields[key] if fields else schema["values"], item, f"{where}.{key}"
            )
