"""`asapctl prefill`: a file of prompts in, a file of results out."""

from typing import Annotated

import typer

from asapctl.options import Model, Overrides

_EXAMPLES = """
Prefill a JSONL file of prompts; one line of results for each.

Examples:

\b
  asapctl prefill examples/prompts.jsonl
  asapctl prefill in.jsonl -o out.jsonl --model ~/models/Qwen3-30B-A3B --logprobs 5
  asapctl prefill in.jsonl --topology cpu-2a2e --set schedule.lanes=3 --kv-dir kv/
  cat in.jsonl | asapctl prefill - > out.jsonl

Running the same command again does what is missing.

Exit codes: 0 all done, 3 some lines failed, 1 the run failed, 2 usage, 130 interrupted.
"""


def prefill(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSONL file of prompts; - is standard input.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where results go; - is standard output. Default: beside INPUT, as "
            "INPUT.results.jsonl.",
        ),
    ] = None,
    model: Model = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Topology file, or the name of one that is packaged."),
    ] = None,
    overrides: Overrides = None,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="Report the K likeliest first tokens (0 to 20)."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="Report each prompt token and the K likeliest (0 to 20)."),
    ] = None,
    kv_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write each prompt's KV cache to this folder.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew instead of resuming an output.")
    ] = False,
    json_summary: Annotated[
        bool, typer.Option("--json", help="Print the closing summary as one JSON object.")
    ] = False,
) -> None:
    from asapctl.prefill_view import PrefillView, may_draw, print_json
    from engine.offline.job import Options, run_job

    options = Options(
        input=source,
        output=output,
        model=model,
        topology=topology,
        overrides=tuple(overrides or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        kv_dir=kv_dir,
        overwrite=overwrite,
        results_on_stdout=not json_summary,
    )
    with PrefillView(may_draw(source, output)) as view:
        summary = run_job(options, view)
    if json_summary:
        print_json(summary)
    else:
        view.print_summary(summary)
    raise typer.Exit(summary.exit_code)


prefill.__doc__ = _EXAMPLES
