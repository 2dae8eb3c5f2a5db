"""`kv_transfer_params`: vLLM's convention between a prefill and a decode instance.

A proxy sends {"do_remote_decode": true} to the prefill side, with nulls for the rest, and hands
what it gets back to the decode side.
"""

from typing import Any

from engine.api.types import RequestError
from engine.control.messages import KvFile
from engine.serve.spec import HttpSpec


def wants_kv(given: dict[str, Any] | None) -> bool:
    """Whether the request's kv_transfer_params ask for the cache. Raises RequestError (400)."""
    for name, value in (given or {}).items():
        where = f"kv_transfer_params.{name}"
        if name == "do_remote_decode":
            if not isinstance(value, bool):
                raise RequestError(f"{where} must be a boolean", param=where, code="invalid_type")
        elif value is not None and value is not False:
            raise RequestError(
                f"{where} is refused: this is a prefill instance, which takes no KV cache from "
                "elsewhere; only do_remote_decode is used",
                param=where,
                code="unsupported_parameter",
            )
    return bool(given and given.get("do_remote_decode"))


def transfer_params(spec: HttpSpec, kv_id: str, file: KvFile) -> dict[str, Any]:
    """What the decode side needs: where the file is, on disk and over HTTP, and what is in it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": spec.instance,
        "remote_host": spec.host,
        "remote_port": spec.port,
        "remote_block_ids": None,
        "kv_id": kv_id,
        "url": f"/v1/kv/{kv_id}",
        "path": file.path,
        "format": "safetensors",
        "tokens": file.tokens,
        "token_sha256": file.token_sha256,
        "dtype": file.dtype,
        "shapes": file.shapes,
    }
