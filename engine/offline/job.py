"""One `asapctl prefill` run put together: paths, model, plan, output, and the loop between."""

import hashlib
import os
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.api.answers import AnswerWriter
from engine.api.parameters import MAX_LOGPROBS
from engine.api.parse import Limits, Parser
from engine.api.tokenizer import load_tokenizer
from engine.control.messages import Snapshot
from engine.errors import UsageError
from engine.kv.manifest import Manifest
from engine.offline.lines import LineReader
from engine.offline.output import open_output, standard_output
from engine.offline.paths import check_unchanged, choose_output, no_prompts, open_input
from engine.offline.records import RecordWriter
from engine.offline.resume import take_stock
from engine.offline.runner import Engine, KvOutput, Runner, Window
from engine.offline.stats import Summary, Tally, summarize

if TYPE_CHECKING:
    from engine.launch.plan import Plan


class Options(msgspec.Struct, frozen=True):
    """What the user asked for; None where nothing was said."""

    input: str
    output: str | None = None
    model: str | None = None
    topology: str | None = None
    overrides: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kv_dir: str | None = None
    overwrite: bool = False
    results_on_stdout: bool = True  # False: standard output is taken


class Watcher(Protocol):
    """Whoever shows the run to the user."""

    def note(self, text: str) -> None: ...

    def loading(self, snapshot: Snapshot) -> None: ...

    def progress(
        self, tally: Tally, bytes_read: int, size: int | None, snapshot: Snapshot | None
    ) -> None: ...


def run_job(options: Options, watcher: Watcher) -> Summary:
    """Run all of the input. Raises UsageError before anything is written, RunError after."""
    _check_counts(options)
    with ExitStack() as stack:
        source = open_input(options.input)
        stack.callback(os.close, source.fd)
        target = choose_output(source, options.output)
        if target is None and not options.results_on_stdout:
            raise UsageError(
                "--json takes standard output, where the results would go; name a file for them "
                "with -o"
            )
        plan = _make_plan(options, watcher)
        tokenizer = load_tokenizer(plan.model_dir)
        fingerprint = _fingerprint(plan, options)
        output = stack.enter_context(standard_output() if target is None else open_output(target))
        kv = _open_kv(plan, options, stack)
        done = take_stock(output, fingerprint, options.overwrite)
        check_unchanged(source, done, output.name)

        runner = Runner(
            reader := LineReader(source.fd),
            Parser(_limits(plan, options), tokenizer),
            RecordWriter(
                AnswerWriter(
                    tokenizer,
                    model=plan.model_dir.name,
                    eos_token_ids=plan.config.eos_token_ids,
                    fingerprint=fingerprint,
                )
            ),
            output,
            lambda: _start(plan, watcher),
            _window(plan),
            done=done,
            kv=kv,
            watch=lambda tally, reader, snapshot: watcher.progress(
                tally, reader.bytes_read, source.size, snapshot
            ),
        )
        try:
            ranks = runner.run()
        except KeyboardInterrupt:
            watcher.note(
                f"interrupted: the results so far are in {output.name}; run the same command "
                "again to go on"
            )
            raise
        if runner.tally.prompts == 0:
            raise no_prompts(source.name)
        watcher.progress(runner.tally, reader.bytes_read, source.size, None)
        return summarize(
            runner.tally,
            ranks,
            model=str(plan.model_dir),
            dtype=plan.dtype,
            topology=plan.topology.source,
            output=output.name,
        )


def _check_counts(options: Options) -> None:
    for flag, count in (
        ("--logprobs", options.logprobs),
        ("--prompt-logprobs", options.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise UsageError(f"{flag} must be 0 to {MAX_LOGPROBS}, not {count}")


def _make_plan(options: Options, watcher: Watcher) -> "Plan":
    from engine.launch.model_dir import find_model_dir
    from engine.launch.plan import make_plan
    from engine.topology.load import DEFAULT_TOPOLOGY, load_topology

    topology = load_topology(options.topology or DEFAULT_TOPOLOGY, options.overrides)
    model_dir = find_model_dir(topology, options.model, watcher.note)
    plan = make_plan(topology, model_dir, keep_kv=options.kv_dir is not None)
    for note in plan.notes:
        watcher.note(note)
    return plan


def _start(plan: "Plan", watcher: Watcher) -> AbstractContextManager[Engine]:
    from engine.launch.instance import start_instance

    return start_instance(plan, watcher.loading)


def _open_kv(plan: "Plan", options: Options, stack: ExitStack) -> KvOutput | None:
    if options.kv_dir is None:
        return None
    folder = Path(options.kv_dir).absolute()
    manifest = Manifest(folder, plan.model_dir.name, plan.model_hash, options.overwrite)
    stack.callback(manifest.close)
    return KvOutput(folder, manifest)


def _limits(plan: "Plan", options: Options) -> Limits:
    return Limits(
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
    )


def _window(plan: "Plan") -> Window:
    """Enough for every lane to be full four times over, so that no group waits for this side."""
    return Window(4 * plan.groups * plan.lanes * plan.topology.schedule.max_batch_tokens)


def _fingerprint(plan: "Plan", options: Options) -> str:
    """Of all that a result depends on besides its line: the model, and the options in effect."""
    kv_dir = os.path.realpath(options.kv_dir) if options.kv_dir is not None else None
    decisive = (plan.dtype, options.logprobs, options.prompt_logprobs, kv_dir)
    digest = hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()
    return f"fp_{plan.model_hash[:8]}_{digest[:8]}"
