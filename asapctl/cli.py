"""The program `asapctl`: its commands, and how each of its errors ends it.

Exit codes: 0 all done, 1 the run failed, 2 usage, 3 some prompts failed or no such instance, 130
interrupted, 143 terminated.
"""

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from asapctl import bench
from asapctl.check import check
from asapctl.doctor import doctor
from asapctl.launch import launch
from asapctl.logs import logs
from asapctl.prefill import prefill
from asapctl.ps import ps
from asapctl.render import render
from asapctl.selftest import selftest
from asapctl.status import status
from asapctl.stop import stop
from asapctl.trace import trace
from engine import __version__
from engine.errors import AsapError, UsageError

app = typer.Typer(
    name="asapctl",
    help="""Asynchronous, disaggregated prefill for Mixture-of-Experts language models.

    Example: asapctl prefill prompts.jsonl -o results.jsonl""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asapctl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns what a user can act on into one line an error, and everything into an exit code."""

    @functools.wraps(command)
    def reported(*args: Any, **kwargs: Any) -> Any:
        try:
            if command in (prefill, launch, check, selftest, render, *bench.COMMANDS):
                _check_working_folder()
            return command(*args, **kwargs)
        except AsapError as error:
            _show(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None

    return reported


def _check_working_folder() -> None:
    """Paths count from there, and torch's libraries do not load without one."""
    try:
        os.getcwd()  # noqa: PTH109 - it is the system's answer that counts
    except OSError as error:
        raise UsageError(
            f"the working folder cannot be used ({error.strerror}): it may have been removed; "
            "change to another one (cd)"
        ) from None


def _show(error: AsapError) -> None:
    for line in str(error).splitlines():
        typer.echo(f"error: {line}", err=True)


def _summary(command: Callable[..., Any]) -> str:
    """The first sentence of the help: whole, where typer would cut it to fit on a line."""
    first = inspect.cleandoc(command.__doc__ or "").partition("\n\n")[0]
    return " ".join(first.split())


# In the order of the help. These modules import what they need when they run.
for command in (prefill, launch, ps, status, trace, logs, stop, check, render, doctor, selftest):
    app.command(command.__name__, short_help=_summary(command))(_reported(command))
for measure in bench.COMMANDS:
    bench.app.command(measure.__name__, short_help=_summary(measure))(_reported(measure))
app.add_typer(bench.app)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # unwinds, so that everything started is ended


def run() -> None:
    # Accelerator plug-ins of torch load with their rank alone: a broken one does no harm here.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except AsapError as error:  # of typer's own output: the help
        _show(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
