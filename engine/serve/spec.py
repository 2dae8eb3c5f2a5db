"""What the HTTP process is told at its start."""

from typing import TYPE_CHECKING

import msgspec

from engine.echo import is_utf8
from engine.errors import UsageError
from engine.schedule.cost import PromptCost

if TYPE_CHECKING:
    from engine.launch.plan import Plan
    from engine.model.architecture import ModelConfig


class KvFolder(msgspec.Struct, frozen=True):
    """Where KV caches lie until somebody fetches them, and when they go, oldest first."""

    path: str
    max_bytes: int
    max_age_s: float
    bytes_per_token: int


class HttpSpec(msgspec.Struct, frozen=True):
    """model: the name that clients use. controllers: the address of each
    instance's, known once they start. cost: what prompts are weighed by.

    host, port: where the listening socket is bound. max_queue: most prompts at a time, waiting or
    running. body_timeout_s: how long a client may take to send the headers, and then the body.
    paced: as in engine.control.messages.Snapshot.
    """

    model: str
    model_dir: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    fingerprint: str
    instance: str = ""
    controllers: list[str] = []
    cost: PromptCost = PromptCost()
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    max_queue: int = 2048
    max_body_bytes: int = 32_000_000
    body_timeout_s: float = 30.0
    kv: KvFolder | None = None
    paced: str | None = None


def http_spec(plan: "Plan", *, host: str, port: int, api_key: str | None) -> HttpSpec:
    """The specification for `plan`, by its topology's [serve] section.

    Where KV caches can be asked for, the plan must be one with `keep_kv`. `instance` and
    `controllers` stay empty for whoever starts the instances.
    """
    serve = plan.topology.serve
    return HttpSpec(
        model=serve.model_name or plan.model_dir.name,
        model_dir=str(plan.model_dir),
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=list(plan.config.eos_token_ids),
        fingerprint=f"fp_{plan.model_hash[:8]}_{plan.dtype}",
        cost=prompt_cost(plan.config),
        host=host,
        port=port,
        api_key=api_key,
        max_queue=serve.max_queue,
        max_body_bytes=round(serve.max_body_mb * 1e6),
        body_timeout_s=serve.body_timeout_s,
        kv=_kv_folder(plan),
        paced=plan.paced,
    )


def prompt_cost(config: "ModelConfig") -> PromptCost:
    """By the operations that the model's sizes say."""
    from engine.model.work import prefill_flops

    token, pair = prefill_flops(config)
    return PromptCost(pair / token, config.window)


def _kv_folder(plan: "Plan") -> KvFolder | None:
    serve = plan.topology.serve
    if serve.kv_dir is None:
        return None
    from engine.model.sizes import kv_bytes_per_token

    width = 4 if plan.dtype == "float32" else 2
    folder = plan.topology.resolve("serve", "kv_dir", serve.kv_dir)
    if not is_utf8(folder):
        where = plan.topology.where("serve", "kv_dir")
        raise UsageError(f"{where}: {folder}: answers name its files, so it must be UTF-8")
    return KvFolder(
        path=str(folder),
        max_bytes=round(serve.kv_max_gb * 1e9),
        max_age_s=serve.kv_max_age_s,
        bytes_per_token=kv_bytes_per_token(plan.config, width),
    )
