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
from engine.api.tokenizer import Tokenizer, load_tokenizer
from engine.control.messages import Snapshot
from engine.errors import UsageError
from engine.kv.folder import check_folder
from engine.kv.manifest import Manifest
from engine.offline.lines import LineReader
from engine.offline.output import (
    Output,
    check_output,
    check_standard_output,
    open_output,
    standard_output,
)
from engine.offline.paths import (
    Input,
    check_start,
    check_unchanged,
    choose_output,
    named_output,
    no_prompts,
    open_input,
)
from engine.offline.records import RecordWriter
from engine.offline.resume import take_stock
from engine.offline.runner import Engine, KvOutput, Runner, Window
from engine.offline.stats import Summary, Tally, plural, summarize
from engine.topology.load import DEFAULT_TOPOLOGY

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

    def progress(self, tally: Tally, size: int | None, snapshot: Snapshot | None) -> None:
        """size: of the input, in bytes; None where that cannot be known."""


def run_job(options: Options, watcher: Watcher) -> Summary:
    """Run all of the input. Raises UsageError before anything is written, RunError after."""
    with ExitStack() as stack:
        source, target, plan, tokenizer = _prepare(options, watcher, stack)
        fingerprint = _fingerprint(plan, options)
        output = stack.enter_context(standard_output() if target is None else open_output(target))
        kv = _open_kv(plan, options, stack)
        done = take_stock(output, fingerprint, options.overwrite, needs_kv=kv is not None)
        bytes_before = check_unchanged(source, done, output.name, chosen=options.output is not None)
        if done.lost:
            watcher.note(f"{plural(done.lost, 'KV file')} gone: their prompts are computed again")

        runner = Runner(
            LineReader(
                source.fd,
                check_start=lambda data: check_start(data, source.name),
                name=source.name,
            ),
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
            window_of(plan),
            done=done,
            kv=kv,
            bytes_before=bytes_before,
            watch=lambda tally, snapshot: watcher.progress(tally, source.size, snapshot),
        )
        try:
            ranks = runner.run()
        except KeyboardInterrupt:
            watcher.note(_interrupted(output))
            raise
        if runner.tally.prompts == 0:
            raise no_prompts(source.name)
        watcher.progress(runner.tally, source.size, None)
        return summarize(
            runner.tally,
            ranks,
            model=str(plan.model_dir),
            dtype=plan.dtype,
            topology=plan.topology.source,
            output=output.name,
            paced=plan.paced,
        )


def _prepare(
    options: Options, watcher: Watcher, stack: ExitStack
) -> tuple[Input, Path | None, "Plan", Tokenizer]:
    """Input, output, plan and tokenizer; nothing is written yet.

    Raises UsageError with every problem at once. Notes are given only when there is none.
    """
    from engine.launch.checks import Problems, plan_of

    problems = Problems()
    notes: list[str] = []
    source = target = plan = tokenizer = None
    for flag, count in (
        ("--logprobs", options.logprobs),
        ("--prompt-logprobs", options.prompt_logprobs),
    ):
        with problems.gathered():
            _check_count(flag, count)
    with problems.gathered():
        source = open_input(options.input)
        stack.callback(os.close, source.fd)
    with problems.gathered():
        target = _check_target(options, source)
    with problems.gathered():
        if options.kv_dir is not None:
            check_folder(Path(options.kv_dir))
    with problems.gathered():
        plan = plan_of(
            options.topology or DEFAULT_TOPOLOGY,
            [*options.overrides, "instances.count=1"],  # several are for what comes over HTTP
            options.model,
            keep_kv=options.kv_dir is not None,
            on_note=notes.append,
        )
        tokenizer = load_tokenizer(plan.model_dir)
    problems.raise_all()
    assert source is not None
    assert plan is not None
    assert tokenizer is not None
    for note in (*notes, *plan.notes):
        watcher.note(note)
    return source, target, plan, tokenizer


def _check_count(flag: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise UsageError(f"{flag} must be 0 to {MAX_LOGPROBS}, not {count}")


def _check_target(options: Options, source: Input | None) -> Path | None:
    """Where results go. source: None when the input cannot be read."""
    if source is not None:
        target = choose_output(source, options.output)
    elif options.output is not None:
        target = named_output(None, options.output)
    else:
        return None
    if target is not None:
        check_output(target)
    elif not options.results_on_stdout:
        raise UsageError(
            "--json takes standard output, where the results would go; name a file for them with -o"
        )
    if target is None or not options.results_on_stdout:
        check_standard_output()
    return target


def _interrupted(output: Output) -> str:
    where = f"the results so far are in {output.name}"
    if output.regular and output.path is not None:
        return f"interrupted: {where}; run the same command again to go on"
    return "interrupted: the results so far were written"


def _start(plan: "Plan", watcher: Watcher) -> AbstractContextManager[Engine]:
    from engine.launch.running import start_instance

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


def window_of(plan: "Plan") -> Window:
    """Enough for every lane to be full four times over, so that no group waits for this side."""
    return Window(4 * plan.groups * plan.lanes * plan.topology.schedule.batch_limit)


def _fingerprint(plan: "Plan", options: Options) -> str:
    """Of all that a result depends on besides its line: the model, and the options in effect."""
    kv_dir = os.fsencode(os.path.realpath(options.kv_dir)) if options.kv_dir is not None else None
    decisive = (plan.dtype, options.logprobs, options.prompt_logprobs, kv_dir)
    digest = hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()
    return f"fp_{plan.model_hash[:8]}_{digest[:8]}"
