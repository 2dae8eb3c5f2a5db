"""The loop: lines in, requests to the engine within a window, records out as results come.

What is in flight is bounded in tokens and in prompts, so memory does not grow with the file; for
each line only the hash of its id is kept, to notice a second one.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import msgspec

from engine.api.ids import id_hash
from engine.api.parse import Parser
from engine.api.types import Origin, Prompt, RequestError
from engine.api.wording import show
from engine.control.messages import PrefillRequest, PrefillResult, RankStatus, Snapshot
from engine.errors import RunError
from engine.kv.manifest import Manifest
from engine.kv.naming import kv_file_name
from engine.offline.forms import read_line, split_form
from engine.offline.lines import Line, LineReader
from engine.offline.output import Output
from engine.offline.records import RecordWriter, numbered
from engine.offline.resume import Done, changed_line
from engine.offline.stats import Tally

_POLL_S = 0.1
_SNAPSHOT_S = 0.5
# Ranks report five times a second: in less, a short run would end without what they did.
_REPORT_LAG_S = 0.25
# One turn reads no more than this before results are looked at again.
_TURN_LINES = 64
_TURN_TOKENS = 16384


class Engine(Protocol):
    """A running instance. Every method raises RunError when it has failed."""

    def submit(self, requests: list[PrefillRequest]) -> None: ...

    def drain(self) -> None: ...

    def receive(self, timeout_s: float) -> list[PrefillResult]: ...

    def request_snapshot(self) -> None: ...

    def snapshot(self) -> Snapshot | None: ...

    def fresh_snapshot(self, timeout_s: float) -> Snapshot | None: ...


class Window(msgspec.Struct, frozen=True):
    """How much may be in flight: `tokens`, but two prompts always, and `prompts` at most."""

    tokens: int
    prompts: int = 1024

    def admits(self, count: int, tokens: int, more: int) -> bool:
        return count < 2 or (count < self.prompts and tokens + more <= self.tokens)


class KvOutput(msgspec.Struct, frozen=True):
    folder: Path
    manifest: Manifest


Watch = Callable[[Tally, "Snapshot | None"], None]


class _Work(msgspec.Struct, frozen=True):
    """A prompt on its way. size: of its line, in bytes. submitted: when, in monotonic seconds."""

    prompt: Prompt
    size: int
    submitted: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.prompt.token_ids)


class Runner:
    """One run over the lines of `reader`."""

    def __init__(
        self,
        reader: LineReader,
        parser: Parser,
        writer: RecordWriter,
        output: Output,
        start_engine: Callable[[], AbstractContextManager[Engine]],
        window: Window,
        *,
        done: Done | None = None,
        kv: KvOutput | None = None,
        bytes_before: int = 0,
        watch: Watch = lambda tally, snapshot: None,
    ) -> None:
        """start_engine is called when the first prompt is ready, so never for nothing.

        bytes_before: of the lines that are `done`, as far as that is known.
        """
        self._reader = reader
        self._parser = parser
        self._writer = writer
        self._output = output
        self._start_engine = start_engine
        self._window = window
        self._done = done or Done()
        self._kv = kv
        self._watch = watch
        self._seen: set[bytes] = set()
        self._engine: Engine | None = None
        self._in_flight: dict[int, _Work] = {}
        self._tokens_in_flight = 0
        self._held: _Work | None = None  # ready, but the window is full
        self._next_key = 0
        self._drained = False
        self._can_read = True
        self._next_snapshot = 0.0
        self.tally = Tally(bytes_before)

    def run(self) -> list[RankStatus]:
        """Do every line; the ranks' closing figures. Raises RunError, or UsageError when a done
        line has changed.
        """
        with ExitStack() as stack:
            while not (self._reader.ended and self._held is None and not self._in_flight):
                ready = self._admit()
                if ready:
                    self._submit(ready, stack)
                self._collect()
                self._report()
            if self._engine is None:
                return []
            self._engine.receive(_REPORT_LAG_S)  # nothing more comes but the ranks' last reports
            snapshot = self._engine.fresh_snapshot(2.0)
            return snapshot.ranks if snapshot is not None else []

    def _admit(self) -> list[_Work]:
        """Read until a turn is over (`_can_read`), the window is full or nothing is there."""
        ready: list[_Work] = []
        count, tokens, new = len(self._in_flight), self._tokens_in_flight, 0
        self._can_read = True
        for _ in range(_TURN_LINES):
            if self._held is None:
                line = self._reader.take()
                if line is None:
                    self._can_read = False
                    break
                self._held = self._prepare(line)
                if self._held is None:
                    continue
            more = self._held.tokens
            if not self._window.admits(count, tokens, more):
                self._can_read = False
                break
            ready.append(self._held)
            self._held = None
            count, tokens, new = count + 1, tokens + more, new + more
            if new >= _TURN_TOKENS:
                break
        return ready

    def _prepare(self, line: Line) -> _Work | None:
        """The line's prompt; None when it is done already or has failed, which is recorded."""
        self.tally.prompts += 1
        origin, document = read_line(line)
        try:
            self._check_new(origin)
            if self._is_done(origin):
                self.tally.skip(line.size)
                return None
            if isinstance(document, RequestError):
                raise document
            (prompt,) = self._parser.parse(origin, *split_form(document))
            return _Work(prompt, line.size)
        except RequestError as failure:
            self._fail(origin, failure, line.size)
            return None

    def _fail(self, origin: Origin, failure: RequestError, size: int) -> None:
        self._output.append(self._writer.failure(origin, failure))
        self.tally.fail(failure.code or "error", numbered(origin, failure), size)

    def _check_new(self, origin: Origin) -> None:
        key = id_hash(origin.custom_id)
        if key in self._seen:
            hint = ""
            if origin.custom_id.startswith("line-"):
                hint = "; a line without an id goes by line-N, so give this one an id of its own"
            raise RequestError(
                f"the id {show(origin.custom_id)} was used by an earlier line{hint}",
                param="custom_id",
                code="duplicate_id",
            )
        self._seen.add(key)

    def _is_done(self, origin: Origin) -> bool:
        state = self._done.holds(origin.custom_id, origin.record)
        if state is False:
            raise changed_line(origin, self._output.name)
        return state is True

    def _submit(self, ready: list[_Work], stack: ExitStack) -> None:
        if self._engine is None:
            started = time.monotonic()
            self._engine = stack.enter_context(self._start_engine())
            self.tally.load_seconds = time.monotonic() - started
        now = time.monotonic()
        if self.tally.first_admission is None:
            self.tally.first_admission = now
        requests = []
        for work in ready:
            requests.append(self._request(work.prompt))
            self._in_flight[self._next_key] = msgspec.structs.replace(work, submitted=now)
            self._tokens_in_flight += work.tokens
            self._next_key += 1
        self._engine.submit(requests)

    def _request(self, prompt: Prompt) -> PrefillRequest:
        kv_path = None
        if self._kv is not None:
            name = kv_file_name(prompt.origin.custom_id, prompt.origin.record)
            kv_path = str(self._kv.folder / name)
        return PrefillRequest(
            key=self._next_key,
            token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            logprobs=prompt.logprobs if prompt.max_tokens else None,
            prompt_logprobs=prompt.prompt_logprobs,
            kv_path=kv_path,
        )

    def _collect(self) -> None:
        """Take results; wait for some only when there is nothing to read."""
        if self._engine is None or not self._in_flight:
            if not self._can_read:
                self._reader.wait(_POLL_S)
            return
        if self._reader.ended and self._held is None and not self._drained:
            self._engine.drain()
            self._drained = True
        for result in self._engine.receive(0.0 if self._can_read else _POLL_S):
            self._finish(result)

    def _finish(self, result: PrefillResult) -> None:
        work = self._in_flight.pop(result.key, None)
        if work is None:
            raise RunError(f"the engine returned a result for an unknown prompt ({result.key})")
        prompt = work.prompt
        self._tokens_in_flight -= work.tokens
        self.tally.last_result = now = time.monotonic()
        if result.error is not None:
            failure = RequestError(result.error, code="prefill_failed", status=500)
            self._fail(prompt.origin, failure, work.size)
            return
        if result.kv is not None and self._kv is not None:
            self._kv.manifest.add(prompt.origin.custom_id, result.kv)
        self._output.append(self._writer.result(prompt, result))
        self.tally.ok += 1
        self.tally.bytes_done += work.size
        self.tally.prompt_tokens += work.tokens
        self.tally.waits.add(now - work.submitted)
        self.tally.computes.add(result.compute_s)

    def _report(self) -> None:
        snapshot = None
        if self._engine is not None:
            now = time.monotonic()
            if now >= self._next_snapshot:
                self._next_snapshot = now + _SNAPSHOT_S
                self._engine.request_snapshot()
            snapshot = self._engine.snapshot()
        self._watch(self.tally, snapshot)
