"""KV caches that wait to be fetched: which go, where they lie, and how they are asked for."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.types import RequestError
from engine.control.messages import KvFile, PrefillRequest, PrefillResult
from engine.serve.kv_store import KvStore, Stored, to_remove
from engine.serve.spec import KvFolder
from helpers.serving import Server, chunks, served, wait_until

PER_TOKEN = 10
HEADER = 1 << 16
LIMIT = 10 * HEADER


def stored(number: int, size: int, written: float, fetched: bool = False) -> Stored:
    return Stored(str(number), f"/kv/{number}", size, written, fetched)


files = st.lists(st.tuples(st.integers(0, 100), st.floats(0, 100), st.booleans()), max_size=12).map(
    lambda given: [stored(number, *values) for number, values in enumerate(given)]
)


@given(files, st.floats(0, 100), st.floats(1, 100), st.integers(0, 300))
def test_what_stays_fits_and_is_young(
    files: list[Stored], now: float, age: float, limit: int
) -> None:
    gone = to_remove(files, now, age, limit)
    assert len(set(gone)) == len(gone)
    stays = [file for file in files if file not in gone]
    assert sum(file.bytes for file in stays) <= limit
    assert all(now - file.written <= age for file in stays)
    # Nothing goes for nothing: of those that are not too old, the last to go did not fit.
    for_room = [file for file in gone if now - file.written <= age]
    if for_room:
        assert sum(file.bytes for file in stays) + for_room[-1].bytes > limit


def test_the_order() -> None:
    files = [stored(0, 5, 1.0), stored(1, 5, 3.0, True), stored(2, 5, 2.0), stored(3, 5, 4.0, True)]
    order = [int(file.id) for file in to_remove(files, 5.0, 100.0, 0)]
    assert order == [1, 3, 0, 2]
    assert [file.id for file in to_remove(files, 5.0, 3.5, 10)] == ["0", "1"]


# --- the folder -------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> KvStore:
    return KvStore(KvFolder(str(tmp_path / "kv"), LIMIT, 100.0, PER_TOKEN))


def write(store: KvStore, size: int, now: float) -> str:
    """A cache of `size` bytes, as if the engine had written it."""
    id_, path = store.reserve(1, now)
    path.write_bytes(bytes(size))
    os.utime(path, (now, now))
    store.release(id_)
    return id_


def ids(store: KvStore) -> set[str]:
    return {file.id for file in store.files()}


def test_a_new_cache_pushes_the_oldest_out(store: KvStore) -> None:
    first, second, third = (write(store, 3 * HEADER, now) for now in (1.0, 2.0, 3.0))
    assert ids(store) == {first, second, third}
    store.reserve(1, 4.0)  # takes one header and ten bytes; nine headers are taken
    assert ids(store) == {second, third}


def test_what_was_fetched_goes_first(store: KvStore) -> None:
    first, second, third = (write(store, 3 * HEADER, now) for now in (1.0, 2.0, 3.0))
    store.fetch(second).close()
    store.reserve(1, 4.0)
    assert ids(store) == {first, third}


def test_age(store: KvStore) -> None:
    first, second = write(store, 1, 10.0), write(store, 1, 50.0)
    store.sweep(110.0)
    assert ids(store) == {first, second}
    store.sweep(111.0)
    assert ids(store) == {second}


def test_what_is_being_written_stays(store: KvStore) -> None:
    id_, path = store.reserve(1, 0.0)
    path.write_bytes(b"x")
    os.utime(path, (0, 0))
    store.sweep(1000.0)
    assert path.exists()
    store.release(id_)
    store.sweep(1000.0)
    assert not path.exists()


def test_a_cache_that_can_never_fit(store: KvStore) -> None:
    kept = write(store, 1, 1.0)
    with pytest.raises(RequestError) as caught:
        store.reserve(LIMIT, 2.0)
    assert (caught.value.status, caught.value.code) == (400, "kv_too_large")
    assert ids(store) == {kept}


def test_caches_in_the_making_leave_no_room(store: KvStore) -> None:
    tokens = (6 * HEADER) // PER_TOKEN
    id_, _ = store.reserve(tokens, 0.0)
    with pytest.raises(RequestError) as caught:
        store.reserve(tokens, 0.0)
    assert caught.value.status == 429
    store.release(id_)
    store.reserve(tokens, 0.0)


def test_a_restart_finds_the_files_and_leaves_others_alone(store: KvStore, tmp_path: Path) -> None:
    id_ = write(store, 1, 1.0)
    folder = tmp_path / "kv"
    theirs = folder / "kv-mine.safetensors"
    theirs.write_bytes(b"x")
    half = folder / f".kv-{'a' * 32}.safetensors.tmp"
    half.write_bytes(b"x")
    for path in (theirs, half):
        os.utime(path, (1, 1))
    again = KvStore(KvFolder(str(folder), LIMIT, 100.0, PER_TOKEN))
    assert ids(again) == {id_}
    again.sweep(1000.0)
    assert list(folder.iterdir()) == [theirs]


def test_what_was_fetched_can_be_read_on(store: KvStore) -> None:
    id_ = write(store, 5, 1.0)
    with store.fetch(id_) as file:
        store.delete(id_)
        assert file.read() == bytes(5)
    for again in (store.fetch, store.delete):
        with pytest.raises(RequestError) as caught:
            again(id_)
        assert caught.value.status == 404


def test_what_is_being_written_cannot_be_fetched(store: KvStore) -> None:
    id_, path = store.reserve(1, 0.0)
    path.write_bytes(b"x")
    with pytest.raises(RequestError) as caught:
        store.fetch(id_)
    assert caught.value.status == 404


def test_the_folder_is_private(store: KvStore, tmp_path: Path) -> None:
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


# --- over HTTP --------------------------------------------------------------------------------


def keeps(request: PrefillRequest) -> PrefillResult:
    """Writes the prompt's token ids where the cache should go."""
    if request.kv_path is None:
        return PrefillResult(request.key, 120)
    Path(request.kv_path).write_bytes(bytes(request.token_ids))
    kv = KvFile(request.kv_path, len(request.token_ids), "ab", {"layers.0.key": [2, 1]}, "float32")
    return PrefillResult(request.key, 120, kv=kv)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = KvFolder(str(tmp_path / "kv"), LIMIT, 3600.0, PER_TOKEN)
    with served(tmp_path, kv=folder) as server:
        server.controller.answer = keeps
        yield server


ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
       "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip


def test_the_way_of_a_cache(server: Server, tmp_path: Path) -> None:
    answer = server.post("/v1/completions", prompt=[5, 6], kv_transfer_params=ASK).json()
    given = answer["kv_transfer_params"]
    path = Path(given["path"])
    assert path.parent == tmp_path / "kv"
    assert given == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "test",
        "remote_host": "127.0.0.1", "remote_port": server.port, "remote_block_ids": None,
        "kv_id": given["kv_id"], "url": f"/v1/kv/{given['kv_id']}", "path": str(path),
        "format": "safetensors", "tokens": 2, "token_sha256": "ab", "dtype": "float32",
        "shapes": {"layers.0.key": [2, 1]},
    }  # fmt: skip
    text = server.client.get("/metrics").text
    assert "asapctl_kv_files 1.0" in text
    assert "asapctl_kv_bytes 2.0" in text
    fetched = server.client.get(given["url"])
    assert fetched.content == path.read_bytes() == bytes([5, 6])
    gone = server.client.delete(given["url"])
    assert gone.json() == {"id": given["kv_id"], "object": "kv", "deleted": True}
    assert not path.exists()
    for again in (server.client.get(given["url"]), server.client.delete(given["url"])):
        assert (again.status_code, again.json()["error"]["code"]) == (404, "kv_not_found")


def test_in_a_stream(server: Server) -> None:
    chat = [{"role": "user", "content": "a"}]
    response = server.post(
        "/v1/chat/completions", messages=chat, stream=True, kv_transfer_params=ASK
    )
    (chunk,) = chunks(response)
    assert chunk["kv_transfer_params"]["tokens"] == len(b"user:a\nassistant:")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
def test_nobody_asked(server: Server, params: Any) -> None:
    answer = server.post("/v1/completions", prompt="a", kv_transfer_params=params).json()
    assert "kv_transfer_params" not in answer
    assert server.controller.requests[0].kv_path is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"params": {"do_remote_prefill": True}}, ".do_remote_prefill"),
        ({"params": {"remote_host": "x"}}, ".remote_host"),
        ({"params": {"do_remote_decode": 1}}, ".do_remote_decode"),
        ({"params": [1]}, ""),
        ({"params": ASK, "prompt": ["a", "b"]}, ""),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], param: str) -> None:
    params = body.pop("params")
    refused = server.post("/v1/completions", kv_transfer_params=params, **({"prompt": "a"} | body))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"kv_transfer_params{param}"
    assert server.controller.requests == []


@pytest.mark.parametrize("id_", ["a", "..%2f..%2fetc%2fpasswd", "a" * 32])
def test_no_other_file_can_be_fetched(server: Server, id_: str) -> None:
    assert server.client.get(f"/v1/kv/{id_}").status_code == 404


def kept(server: Server, content: bytes) -> tuple[str, Path]:
    """A cache of `content`: its URL and its file."""
    given = server.post("/v1/completions", prompt=[*content], kv_transfer_params=ASK).json()
    params = given["kv_transfer_params"]
    return params["url"], Path(params["path"])


def test_a_cache_that_is_removed_while_it_is_fetched(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after it was found, and before a byte of it was sent."""
    url, path = kept(server, b"abc")
    in_thread = server.front.in_thread

    async def then_remove(*arguments: Any) -> Any:
        found = await in_thread(*arguments)
        path.unlink()
        return found

    monkeypatch.setattr(server.front, "in_thread", then_remove)
    response = server.client.get(url)
    assert (response.status_code, response.content) == (200, b"abc")
    again = server.client.get(url)
    assert again.status_code == 404


def open_files() -> int:
    return sum(path.name.endswith(".safetensors") for path in map(_target, _descriptors()))


def _descriptors() -> list[Path]:
    return list(Path("/proc/self/fd").iterdir())


def _target(descriptor: Path) -> Path:
    try:
        return descriptor.readlink()
    except FileNotFoundError:  # closed meanwhile
        return Path()


@pytest.mark.parametrize(
    ("given", "status", "content"),
    [
        ("bytes=1-2", 206, b"bc"),
        ("bytes=1-", 206, b"bcdef"),
        ("bytes=-2", 206, b"ef"),
        ("bytes=4-99", 206, b"ef"),
        ("bytes=0-0", 206, b"a"),
        ("bytes=0-1,3-4", 200, b"abcdef"),
        ("bytes=" + ",".join(["0-0"] * 1000), 200, b"abcdef"),
        ("bytes=2-1", 200, b"abcdef"),
        ("bytes=-", 200, b"abcdef"),
        ("bytes=" + "9" * 5000 + "-", 200, b"abcdef"),
        ("bytes", 200, b"abcdef"),
        ("lines=1-2", 200, b"abcdef"),
    ],
)
def test_ranges(server: Server, given: str, status: int, content: bytes) -> None:
    url, _ = kept(server, b"abcdef")
    response = server.client.get(url, headers={"range": given})
    assert (response.status_code, response.content) == (status, content)
    wait_until(lambda: open_files() == 0, "the file is closed")


@pytest.mark.parametrize("given", ["bytes=6-", "bytes=-0"])
def test_a_range_behind_the_end(server: Server, given: str) -> None:
    url, _ = kept(server, b"abcdef")
    response = server.client.get(url, headers={"range": given})
    assert (response.status_code, response.headers["content-range"]) == (416, "bytes */6")
    assert response.json()["error"]["code"] == "range_not_satisfiable"
    other = server.client.get(url, headers={"range": given, "if-range": '"x"'})
    assert (other.status_code, other.content) == (200, b"abcdef")


def leave(server: Server) -> KvStore:
    """A client asks for a cache and leaves once its prompt is at the controller."""
    server.controller.holds = True
    body = b'{"prompt": "a", "kv_transfer_params": {"do_remote_decode": true}}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection = server.raw(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: len(server.controller.requests) == 1, "it is submitted")
    store = server.front.kv
    assert store is not None
    assert len(store._reserved) == 1
    connection.close()
    return store


def test_a_client_that_left_gives_its_room_back(server: Server) -> None:
    store = leave(server)
    wait_until(lambda: not store._reserved, "the room is free")


def test_a_prompt_that_runs_on_keeps_its_room(server: Server, tmp_path: Path) -> None:
    """Its client has left, but its cache is written all the same, and then nobody wants it."""
    server.controller.runs = True
    store = leave(server)
    wait_until(lambda: len(server.controller.cancelled) == 1, "it is withdrawn")
    assert server.client.get("/health").status_code == 200
    assert len(store._reserved) == 1
    server.controller.release()
    wait_until(lambda: not store._reserved, "the room is free")
    assert list((tmp_path / "kv").iterdir()) == []
    assert server.post("/v1/completions", prompt="a", kv_transfer_params=ASK).status_code == 200


def test_a_prompt_that_fails_gives_its_room_back(server: Server) -> None:
    server.controller.answer = lambda request: PrefillResult(request.key, error="it was too much")
    failed = server.post("/v1/completions", prompt="a", kv_transfer_params=ASK)
    assert failed.status_code == 500
    store = server.front.kv
    assert store is not None
    wait_until(lambda: not store._reserved, "the room is free")


def test_what_is_discarded_leaves_nothing(store: KvStore, tmp_path: Path) -> None:
    id_, path = store.reserve(1, 0.0)
    path.write_bytes(b"x")
    path.with_name(f".{path.name}.tmp").write_bytes(b"x")
    store.discard(id_)
    assert list((tmp_path / "kv").iterdir()) == []
    store.reserve((LIMIT - HEADER) // PER_TOKEN, 0.0)
