"""Short hashes that stand for an id or for a line, so that memory holds nothing longer."""

import hashlib


def id_hash(custom_id: str) -> bytes:
    """16 bytes that stand for `custom_id`."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def record_id(custom_id: str, line: bytes) -> str:
    """The `id` of the record of this line: it changes when the id or a byte of the line does."""
    digest = hashlib.blake2b(line, digest_size=16, key=id_hash(custom_id))
    return "batch_req_" + digest.hexdigest()


def seed_of(record: str) -> int:
    """A sampling seed (63 bits) of its own for each line, the same whenever it is run again."""
    return int.from_bytes(hashlib.blake2b(record.encode(), digest_size=8).digest(), "big") >> 1
