"""The command line: a thin shell, which imports what a command needs only when it runs.

Exit codes: 0 fine, 1 findings, 2 cannot run (one red line says why), 130 interrupted.
"""

import dataclasses
import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pipeline import cli_sharing
from pipeline.cli_shared import Directory, DirectoryOrUrl, Json, new_console, print_json
from pipeline.errors import PipelineError, run_program
from pipeline.prompt_settings import PromptSettings
from pipeline.settings import Settings, with_options, with_settings

FINDINGS = 1  # exit code of validate and doctor

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Check and describe the features that train speculative drafters.",
    epilog="Example: pipeline validate /data/run",
)


@app.command(epilog="Example: pipeline prompts p.jsonl --target smollm2-135m --show 2")
@with_options(PromptSettings, arguments={"prompts": "FILE…"})
def prompts(
    settings: PromptSettings,
    show: Annotated[int, typer.Option(min=0, help="Print so many rows token by token.")] = 0,
    as_json: Json = False,
) -> None:
    """Check prompts: accepted and rejected by reason; rendered ids with the answers in colour."""
    from pipeline.prompts_command import print_prompts

    told = print_prompts(settings, show=show, console=new_console(quiet=as_json))
    if as_json:
        print_json(told)


@app.command(
    epilog="Example: pipeline rollout --target m.gguf --prompts p.jsonl --out /data/run "
    "--rollout-endpoint http://127.0.0.1:8080"
)
@with_settings
def rollout(settings: Settings) -> None:
    """Stage 1 alone: let the target model, or a server of it, answer the prompts."""
    from pipeline.stage_command import run_stage

    raise typer.Exit(run_stage(settings, "rollouts"))


@app.command(epilog="Example: pipeline extract --target m.gguf --prompts p.jsonl --out /data/run")
@with_settings
def extract(settings: Settings) -> None:
    """Stage 2 alone: the features of the rollouts that are in OUT; same options as stage 1."""
    from pipeline.stage_command import run_stage

    raise typer.Exit(run_stage(settings, "features"))


@app.command(epilog="Example: pipeline validate /data/run --json > report.json")
def validate(
    directory: DirectoryOrUrl,
    as_json: Json = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="List every finding, not the first 20 of a rule.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Records, footers and hashes only; no row is read.")
    ] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="A copy that lacks some files is fine.")
    ] = False,
    replay: Annotated[
        int, typer.Option(min=0, help="Take so many random rows through --target again.")
    ] = 0,
    target: Annotated[
        str | None, typer.Option(help="With --replay: the target model of the run.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --replay: draws the rows.")] = 0,
) -> None:
    """Check every byte and rule of a run; exit 0 if clean, 1 with findings, 2 if it cannot run."""
    from pipeline.console import print_report, progress_bar
    from pipeline.validate import Replay
    from pipeline.validate import validate as check

    if replay and target is None:
        raise PipelineError("--replay needs --target, the target model of the run")
    wanted = Replay(replay, target, seed) if replay and target else None
    with progress_bar("validating") as on_progress:
        report = check(
            directory,
            on_progress=on_progress,
            replay=wanted,
            quick=quick,
            allow_missing=allow_missing,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(new_console(), report, show_all=show_all)
    raise typer.Exit(0 if report.ok else FINDINGS)


@app.command(epilog="Example: pipeline inspect /data/run")
def inspect(directory: Directory, as_json: Json = False) -> None:
    """Describe a run: sizes, lengths, position offsets, teacher entropy, rejects, columns."""
    from pipeline.console import print_inspection
    from pipeline.inspect_run import inspect_run

    found = inspect_run(directory)
    if as_json:
        print_json(found.as_dict())
    else:
        print_inspection(new_console(), found)


@app.command(epilog="Example: pipeline report /data/run -o report.html --compare /data/other")
def report(
    directory: Directory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR2", help="Another run, shown side by side.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Validate as `validate --quick` does; all else is read.")
    ] = False,
) -> None:
    """Write one self-contained HTML page: what the run holds, in tables, charts and ten rows."""
    from pipeline.report.command import write_report

    write_report([directory, *([compare] if compare else [])], output, quick=quick)
    typer.echo(f"wrote {output}")


@app.command(epilog="Example: pipeline schema mtp")
def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A schema, as mtp or mtp/v1; none: all.")
    ] = None,
) -> None:
    """Show the columns of a schema: dtype, shape, meaning, where they come from."""
    from pipeline.console import print_schema
    from pipeline.schema import load_schema, schema_refs

    if name is None:
        for ref in schema_refs():
            typer.echo(f"{ref}: {load_schema(ref).summary}")
    else:
        print_schema(new_console(), load_schema(name))


@app.command(epilog="Example: pipeline show /data/run --row 3")
def show(
    directory: Directory,
    row: Annotated[int, typer.Option(min=0, help="Which row to decode.")] = 0,
) -> None:
    """Print what datasets.load_dataset returns for a run, and one row token by token."""
    from pipeline.show import show as print_rows

    print_rows(directory, row, new_console())


@app.command(epilog="Example: pipeline parity --target model-Q4_K_M.gguf --rows 8")
def parity(
    target: Annotated[str, typer.Option(help="A .gguf file, or smollm2-135m.")],
    prompts: Annotated[
        str | None, typer.Option(help="Prompts whose text is compared; none: our demo's.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row, at most.")] = 256,
    topk: Annotated[int, typer.Option(min=1, help="Likeliest tokens the KL is made of.")] = 64,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="llama.cpp's KV cache: float32 or float16.")
    ] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    as_json: Json = False,
) -> None:
    """Compare transformers (float32) with llama.cpp on the same ids of the same GGUF file."""
    from pipeline.parity_command import compare_backends

    report = compare_backends(
        target,
        prompts=prompts,
        rows=rows,
        length=length,
        topk=topk,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
    )
    if as_json:
        print_json(report.as_dict())
    else:
        new_console().print(report)


@app.command(epilog="Example: pipeline doctor --out /data/run")
def doctor(
    out: Annotated[
        str, typer.Option(help="Where a run would write, also s3://…; a file is tried there.")
    ] = ".",
    as_json: Json = False,
) -> None:
    """Check this machine (GPU, llama.cpp, Ray, disk, Hub), say what to do; exit 1 on a failure."""
    from pipeline.console import print_check
    from pipeline.doctor import examine

    console, checks = new_console(quiet=as_json), []
    for check in examine(out):
        checks.append(check)
        print_check(console, check)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(c) for c in checks]})
    raise typer.Exit(FINDINGS if failed else 0)


@app.command(epilog="Example: pipeline tiny-target gemma4 TINY --layers 42")
def tiny_target(
    name: Annotated[
        str, typer.Argument(help="gemma4 (random, every feature on) or gemma4-nano (trained).")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    layers: Annotated[int, typer.Option(help="Blocks, a multiple of 6.")] = 12,
    hidden: Annotated[int, typer.Option(help="Hidden size; 256 and multiples quantise.")] = 256,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 2,
    window: Annotated[int, typer.Option(help="Sliding window, in tokens.")] = 32,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 512,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    quantise: Annotated[
        str | None, typer.Option(help="gemma4-nano: also this type, by llama.cpp; as Q4_K_M.")
    ] = None,
) -> None:
    """Write a tiny target: gemma4 as a Hugging Face directory and GGUF, gemma4-nano as GGUF.

    The sizes are for gemma4; gemma4-nano comes as it was trained.
    """
    from pipeline.models.nano import write_nano_gguf
    from pipeline.models.tiny import write_tiny_gemma4

    if name == "gemma4-nano":
        for path in write_nano_gguf(out, quantise):
            typer.echo(f"wrote {path}")
        return
    if name != "gemma4":
        raise PipelineError(f"no tiny target {name!r}; there are: gemma4, gemma4-nano")
    if quantise is not None:
        raise PipelineError("--quantise is for gemma4-nano; random weights tell nothing quantised")
    write_tiny_gemma4(
        out,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        window=window,
        vocab_size=vocab_size,
        seed=seed,
    )
    typer.echo(f"wrote {out} and {out}/model-F16.gguf")


app.add_typer(cli_sharing.app)


def main() -> NoReturn:
    """The console script."""
    if hasattr(signal, "SIGPIPE"):
        # A reader that stops early (`| head`) ends us without a word, as it does other tools.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    run_program(app)


if __name__ == "__main__":
    main()
