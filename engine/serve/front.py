"""What the routes work with, and how one prefill request goes through it."""

import asyncio
import functools
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.api.answers import AnswerWriter
from engine.api.parse import Limits, Parser
from engine.api.tokenizer import Tokenizer
from engine.api.types import Kind, Origin, Prompt, RequestError
from engine.control.messages import PrefillRequest, PrefillResult, Snapshot
from engine.serve.body import left, read_body
from engine.serve.budget import Budget, Share
from engine.serve.fleet import Fleet
from engine.serve.kv_store import KvStore
from engine.serve.kv_transfer import transfer_params
from engine.serve.metrics import Metrics
from engine.serve.notices import listening
from engine.serve.reply import json_response
from engine.serve.requests import Asked, parse_request
from engine.serve.spec import HttpSpec
from engine.serve.streaming import events

T = TypeVar("T")

log = logging.getLogger(__name__)

# Parsing and tokenising so many bytes takes less time than handing them to a thread and back.
_INLINE_BYTES = 4096
_THREADS = 2
# Bodies that are here at a time, in bodies of the largest size.
_BODIES = 8
_SNAPSHOT_S = 2.0
_SWEEP_S = 10.0


class Front:
    """The state of the HTTP process."""

    def __init__(
        self, spec: HttpSpec, tokenizer: Tokenizer, link: socket.socket | None = None
    ) -> None:
        """link: brings the supervisor's notices. Raises OSError: the KV folder cannot be made."""
        self.spec = spec
        self.tokenizer = tokenizer
        self.metrics = Metrics(spec.max_queue, instances=len(spec.controllers))
        self.kv = KvStore(spec.kv) if spec.kv is not None else None
        self.fleet = Fleet(spec.controllers, spec.cost)
        self._link = link
        self._places = Budget(spec.max_queue, "prompts")
        self._bytes = Budget(_BODIES * spec.max_body_bytes, "bytes of requests")
        self._pool = ThreadPoolExecutor(_THREADS, "work")
        limits = Limits(spec.vocab_size, spec.max_model_len, most_prompts=spec.max_queue)
        self._parser = Parser(limits, tokenizer)
        self._answers = AnswerWriter(
            tokenizer,
            model=spec.model,
            eos_token_ids=spec.eos_token_ids,
            fingerprint=spec.fingerprint,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.fleet:
            janitor = asyncio.create_task(self._sweep())
            try:
                with listening(self._link, self.fleet.notice):
                    yield
            finally:
                janitor.cancel()
                self._pool.shutdown(wait=False)

    async def work(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """`function(*arguments)`, in a thread when `size` (bytes, roughly) says that it is long.

        tokenizers lets other threads run meanwhile, and Python switches between them.
        """
        if size <= _INLINE_BYTES:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def snapshots(self) -> list[Snapshot | None]:
        """How each instance stands; None for those that do not say so."""
        return await self.fleet.snapshots(_SNAPSHOT_S)

    async def read(self, request: Request, room: Share) -> bytes:
        return await read_body(request, self.spec.max_body_bytes, self.spec.body_timeout_s, room)

    def room(self) -> Share:
        """For the bytes of one request's body."""
        return self._bytes.share()

    async def metrics_text(self) -> bytes:
        self.metrics.queue.set(self._places.taken)
        if self.kv is not None:
            files = await self.in_thread(self.kv.files)
            self.metrics.kv_files.set(len(files))
            self.metrics.kv_bytes.set(sum(file.bytes for file in files))
        work = [member.work for member in self.fleet.members]
        return self.metrics.text(await self.snapshots(), work)

    async def answer(self, request: Request, kind: Kind) -> Response:
        """One prefill request, from its body to its answer. Raises RequestError, ClientDisconnect.

        A place is taken before the prompt is tokenised and given back with the answer, or when the
        client leaves.
        """
        begun = time.monotonic()
        id_ = uuid.uuid4().hex
        with self.room() as room, self._places.share() as places:
            raw = await self.read(request, room)
            places.grow(1)
            origin = Origin(0, id_, id_)
            asked = await self.work(
                len(raw), parse_request, raw, kind, origin, self.spec.model, self._parser
            )
            places.grow(len(asked.prompts) - 1)
            response = await self._prefill(request, asked)
        response.headers["X-Request-Id"] = f"req_{id_}"
        self.metrics.latency.observe(time.monotonic() - begun)
        return response

    async def _prefill(self, request: Request, asked: Asked) -> Response:
        if not asked.keep_kv:
            return await self._compute(request, asked)
        if self.kv is None:
            raise RequestError(
                "this instance keeps no KV caches; start it with [serve] kv_dir",
                param="kv_transfer_params",
                code="unsupported_parameter",
            )
        tokens = len(asked.prompts[0].token_ids)
        kv_id, path = await self.in_thread(self.kv.reserve, tokens, time.time())
        discard = functools.partial(self._pool.submit, self.kv.discard, kv_id)
        try:
            response = await self._compute(request, asked, kv_id, str(path), discard)
        except (ClientDisconnect, asyncio.CancelledError):
            raise  # the room is kept until nobody can write the file any more; see `discard`
        except BaseException:
            self.kv.release(kv_id)
            raise
        self.kv.release(kv_id)
        return response

    async def _compute(
        self,
        request: Request,
        asked: Asked,
        kv_id: str = "",
        kv_path: str | None = None,
        abandoned: Callable[[], object] | None = None,
    ) -> Response:
        """abandoned: called when the client left and nobody works for it any more."""
        wanted = [_engine_request(prompt, kv_path) for prompt in asked.prompts]
        results = await _unless_left(request, self.fleet.prefill(wanted, abandoned))
        for result in results:
            if result.refused:
                raise RequestError("the instance is stopping", code="stopping", status=503)
            if result.error is None:
                self.metrics.ttft.observe(result.queue_s + result.compute_s)
        return await self.work(_size(results), self._response, asked, results, kv_id)

    def _response(self, asked: Asked, results: Sequence[PrefillResult], kv_id: str) -> Response:
        body = self._answers.body(asked.prompts, results)
        if (file := results[0].kv) is not None:
            body["kv_transfer_params"] = transfer_params(self.spec, kv_id, file)
        if asked.stream is None:
            return json_response(body)
        return Response(events(body, asked.stream), media_type="text/event-stream")

    async def _sweep(self) -> None:
        while self.kv is not None:
            try:
                await self.in_thread(self.kv.sweep, time.time())
            except OSError as error:
                log.warning("cannot look after the KV folder: %s", error)
            await asyncio.sleep(_SWEEP_S)


def _engine_request(prompt: Prompt, kv_path: str | None) -> PrefillRequest:
    return PrefillRequest(
        key=0,
        token_ids=prompt.token_ids,
        sampling=prompt.sampling,
        logprobs=prompt.logprobs if prompt.max_tokens else None,
        prompt_logprobs=prompt.prompt_logprobs,
        kv_path=kv_path,
    )


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result. When the client leaves first, `work` is cancelled: ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


def _size(results: Sequence[PrefillResult]) -> int:
    """Of the answer, in bytes, roughly."""
    entries = sum(
        len(position)
        for result in results
        for position in result.prompt_logprobs or ()
        if position is not None
    )
    return 64 * entries
