"""What a KV file is called and how its prompt is identified."""

import hashlib
import re
from array import array
from collections.abc import Sequence

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def kv_file_name(custom_id: str, record: str) -> str:
    """A name that is safe on any file system and unique for a line: its id, then its hash."""
    readable = _UNSAFE.sub("_", custom_id)[:80].lstrip(".-") or "prompt"
    return f"{readable}-{record.removeprefix('batch_req_')[:16]}.safetensors"


def token_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of the token ids as little-endian 64-bit integers."""
    ids = array("q", token_ids)
    if array("H", [1]).tobytes() != b"\x01\x00":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()
