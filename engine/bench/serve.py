"""`asapctl bench serve`: open-loop load on an OpenAI-compatible endpoint, and its highest rate."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.bench.endpoint import Endpoint, find_endpoint
from engine.bench.find_rate import Search
from engine.bench.http_client import HttpClient, parse_url
from engine.bench.http_target import HttpTarget, settled, vocabulary_of
from engine.bench.load import Outcome, offer
from engine.bench.offered import Offered
from engine.bench.recorder import Recorder
from engine.bench.serve_report import Highest, Measurement, Prompts, Report, Result, measured
from engine.bench.slo import JUDGES
from engine.errors import UsageError
from engine.offline.stats import plural
from engine.open_files import raise_file_limit
from engine.traffic.arrivals import Arrival, mean_rate
from engine.traffic.lengths import MOST_TOKENS

TRIAL_S = 30.0
_PATIENCE_S = 60.0  # after the last prompt was sent
_REPORT_S = 0.5


class Options(msgspec.Struct, frozen=True):
    """slo_s: of the TTFT. find_rate: search the highest rate; needs slo_s. trial_s: how long each
    trial of it lasts. max_length: longer prompts are left out.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    slo_s: float | None = None
    find_rate: bool = False
    trial_s: float = TRIAL_S
    max_length: int | None = None
    seed: int = 0


class Watcher(Protocol):
    """Whoever shows the run to the user."""

    def step(self, text: str) -> None: ...

    def progress(self, duration_s: float, recorder: Recorder) -> None: ...

    def endpoint(self, endpoint: Endpoint, prompts: Prompts) -> None: ...

    def trial(self, measurement: Measurement) -> None: ...


def run_serve(options: Options, offered: Offered, watcher: Watcher) -> Result:
    """Raises UsageError, and RunError where the endpoint does not answer even one short prompt.

    SIGINT ends it with what was measured until then.
    """
    if options.find_rate and options.slo_s is None:
        raise UsageError("--find-rate needs --slo, as --slo ttft=0.5: what the rate is to meet")
    if options.find_rate and offered.rate == 0:
        raise UsageError("--find-rate: all prompts of the trace come at once: there is no rate")
    raise_file_limit()
    return asyncio.run(_Run(options, offered, watcher).run())


class _Run:
    def __init__(self, options: Options, offered: Offered, watcher: Watcher) -> None:
        self._options = options
        self._offered = offered
        self._watcher = watcher
        self._trials: list[Measurement] = []
        self._outcomes: list[Outcome] = []
        self._highest: list[Highest] = []

    async def run(self) -> Result:
        options = self._options
        address = parse_url(options.url)
        self._client = HttpClient(address, _authorization(options.api_key))
        try:
            self._watcher.step(f"asking {address.url}")
            self._endpoint = await find_endpoint(self._client, options.model)
            seed = [options.seed, 0]
            self._vocab_size = await vocabulary_of(self._client, self._endpoint, seed)
            prompts: Prompts = "text" if self._vocab_size is None else "token ids"
            self._watcher.endpoint(self._endpoint, prompts)
            interrupted = await _unless_interrupted(
                self._search() if options.find_rate else self._measure_once()
            )
        finally:
            self._client.close()
        report = Report(
            address.url,
            self._endpoint.model,
            self._endpoint.paced,
            prompts,
            options.slo_s,
            options.find_rate,
            self._trials,
            self._highest,
            interrupted,
        )
        return Result(report, self._outcomes)

    async def _measure_once(self) -> None:
        arrivals = self._offered.own()
        await self._measure(arrivals, mean_rate(arrivals) or self._offered.rate, _PATIENCE_S)

    async def _search(self) -> None:
        """Both judges' searches; what one has tried the other need not."""
        assert self._options.slo_s is not None
        patience = min(_PATIENCE_S, 2 * self._options.slo_s + 2.0)
        trial_s = self._options.trial_s
        tried: dict[float, Measurement] = {}
        for judge in JUDGES:
            search = Search(self._offered.rate)
            while (rate := search.next_rate) is not None and rate * trial_s >= 1:
                if rate not in tried:
                    arrivals = self._offered.at(rate, trial_s)
                    tried[rate] = await self._measure(arrivals, rate, patience)
                    self._watcher.trial(tried[rate])
                    # What was given up may still be computed: let the next trial find it done.
                    await settled(self._target(0))
                search.tell(judge in tried[rate].meets)
            found = search.found
            self._highest.append(Highest(judge, found.rate, found.too_high))

    async def _measure(
        self, arrivals: Sequence[Arrival], rate: float, patience_s: float
    ) -> Measurement:
        """Also when it is cancelled, what was measured is kept."""
        limits = (self._options.max_length, self._endpoint.longest, MOST_TOKENS)
        longest = min(limit for limit in limits if limit is not None)
        taken = [each for each in arrivals if each.tokens <= longest]
        if not taken:
            raise UsageError(
                f"{plural(len(arrivals), 'prompt')}, all longer than {longest:,} tokens; give "
                "--scale-lengths below 1"
            )
        self._outcomes = []
        # Other prompts in each trial: a cache of prefixes may know those that it has seen.
        recorder = Recorder(self._target(1 + len(self._trials)), taken)
        showing = asyncio.create_task(self._show(taken[-1].at_s, recorder))
        load = asyncio.create_task(offer(taken, recorder, patience_s=patience_s))
        try:
            self._outcomes = await load
        except asyncio.CancelledError:
            while len(recorder.outcomes) < recorder.sent:  # they are being cancelled
                await asyncio.sleep(0)
            self._outcomes = recorder.outcomes
            raise
        finally:
            showing.cancel()
            if self._outcomes:
                too_long = len(arrivals) - len(taken)
                self._trials.append(measured(self._outcomes, rate, too_long, self._options.slo_s))
        return self._trials[-1]

    def _target(self, trial: int) -> HttpTarget:
        seed = [self._options.seed, trial]
        return HttpTarget(self._client, self._endpoint.model, self._vocab_size, seed)

    async def _show(self, duration_s: float, recorder: Recorder) -> None:
        while True:
            self._watcher.progress(duration_s, recorder)
            await asyncio.sleep(_REPORT_S)


async def _unless_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Whether SIGINT ended it."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False


def _authorization(key: str | None) -> Mapping[str, str]:
    if key is None:
        return {}
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError("--api-key: holds what no key can; give it without spaces")
    return {"Authorization": f"Bearer {key}"}
