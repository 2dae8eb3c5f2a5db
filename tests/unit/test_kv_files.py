import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.control.messages import KvFile
from engine.errors import RunError, UsageError
from engine.kv.export import write_kv
from engine.kv.manifest import MANIFEST, Manifest, read_manifest
from engine.kv.naming import kv_file_name, token_sha256

TENSORS = {"layers.0.key": torch.randn(3, 2, 4), "layers.0.value": torch.randn(3, 2, 5)}


def kv(path: Path) -> KvFile:
    return KvFile(str(path), 3, "ff", {"layers.0.key": [3, 2, 4]}, "float32")


def test_a_file_holds_its_tensors_and_says_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    strided = TENSORS | {"layers.0.value": torch.randn(2, 3, 5).transpose(0, 1)}
    file = write_kv(path, strided, [5, 6, 7], {"model": "tiny"})
    assert file.path == str(path)
    assert (file.tokens, file.dtype, file.token_sha256) == (3, "float32", token_sha256([5, 6, 7]))
    assert file.shapes == {"layers.0.key": [3, 2, 4], "layers.0.value": [3, 2, 5]}
    with safe_open(path, framework="pt") as stored:
        assert stored.metadata() == {
            "format": "pt", "model": "tiny", "tokens": "3", "token_sha256": file.token_sha256,
        }  # fmt: skip
        for name, tensor in strided.items():
            assert torch.equal(stored.get_tensor(name), tensor)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_it_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    synced: list[tuple[bool, bool]] = []  # (a folder, the file has its name)
    fsync = os.fsync

    def spy(fd: int) -> None:
        folder = Path(f"/proc/self/fd/{fd}").resolve().is_dir()
        synced.append((folder, path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    write_kv(path, TENSORS, [5, 6, 7])
    assert synced == [(False, False), (True, True)]


def test_a_file_system_that_wants_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_CREAT)  # which it refuses
    for _ in range(2):
        write_kv(tmp_path / "a.safetensors", TENSORS, [5, 6, 7])
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_kv(tmp_path / "a.safetensors", TENSORS, [5, 6, 7])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RunError, match="cannot write the KV cache: File too large"):
            write_kv(tmp_path / "a.safetensors", {"k": torch.zeros(3, 1000)}, [5, 6, 7])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_of_another_length_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 rows for 2 tokens"):
        write_kv(tmp_path / "a", TENSORS, [5, 6])


def test_names_are_safe_and_tell_lines_apart() -> None:
    record = "batch_req_" + "ab" * 16
    assert kv_file_name("line-1", record) == "line-1-abababababababab.safetensors"
    assert kv_file_name("../../etc/é", record).startswith("_.._etc_-abab")
    assert kv_file_name("...", record).startswith("prompt-abab")
    assert len(kv_file_name("x" * 5000, record)) < 120
    assert kv_file_name("a", record) != kv_file_name("a", "batch_req_" + "cd" * 16)


def test_the_hash_of_token_ids() -> None:
    # printf '\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0' | sha256sum
    assert token_sha256([5, 6]) == (
        "493630ab4b4b7f42305ac0ec0a28cc67967dc24e9fba10b1c7b058f028a35b45"
    )


def test_a_manifest_lists_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "kv"
    manifest = Manifest(folder, "tiny", "hash")
    manifest.add("a\u2028", kv(folder / "f"))
    manifest.close()
    again = Manifest(folder, "tiny", "hash")
    again.add("b", kv(folder / "g"))
    again.add("a\u2028", kv(folder / "h"))
    again.close()
    entries = read_manifest(folder)
    assert {name: entry.file for name, entry in entries.items()} == {"a\u2028": "h", "b": "g"}
    assert entries["b"].shapes == {"layers.0.key": [3, 2, 4]}
    assert (entries["b"].model, entries["b"].model_hash) == ("tiny", "hash")


def test_a_torn_line_of_a_manifest_is_cut(tmp_path: Path) -> None:
    Manifest(tmp_path, "tiny", "hash").add("a", kv(tmp_path / "f"))
    file = tmp_path / MANIFEST
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:-1])
    assert list(read_manifest(tmp_path)) == ["a"]
    Manifest(tmp_path, "tiny", "hash").close()
    assert file.read_bytes() == whole


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    Manifest(tmp_path, "tiny", "hash").add("a", kv(tmp_path / "f"))
    with pytest.raises(UsageError, match=r"another model \(tiny\)"):
        Manifest(tmp_path, "other", "other hash")
    Manifest(tmp_path, "other", "other hash", overwrite=True).close()
    assert read_manifest(tmp_path) == {}
    (tmp_path / MANIFEST).write_text("notes\n")
    with pytest.raises(UsageError, match="line 1: not a manifest entry"):
        Manifest(tmp_path, "tiny", "hash")


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write KV files here"):
        Manifest(tmp_path / "file", "tiny", "hash")
