"""The commands that hand a finished run on: vocabularies, other formats, shard sets, the Hub."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli_shared import Directory, DirectoryOrUrl, Json, new_console, print_json

app = typer.Typer()


@app.command(epilog="Example: pipeline vocab /data/run --size 65536 -o /data/vocab --markov")
def vocab(
    directory: DirectoryOrUrl,
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens of the draft vocabulary.")] = 65536,
    must_include: Annotated[
        str, typer.Option(help="Whole groups of tokens: japanese,math,symbols,code.")
    ] = "",
    markov: Annotated[
        bool, typer.Option("--markov", help="Also count which tokens follow which.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="Where the tokenizer is, if not where the run had it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose a drafter's vocabulary from a run's answers: t2d, d2t and what they cover."""
    from pipeline.vocab.command import write_vocab

    report = write_vocab(
        directory,
        output,
        size=size,
        must_include=[name.strip() for name in must_include.split(",") if name.strip()],
        markov=markov,
        target=target,
        console=new_console(quiet=as_json),
    )
    if as_json:
        print_json(report)


@app.command(epilog="Example: pipeline export /data/run --to specforge -o /data/specforge")
def export(
    directory: DirectoryOrUrl,
    to: Annotated[
        Literal["speculators", "specforge", "deepspec"], typer.Option(help="Whose format.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new directory to write.")],
    features: Annotated[
        Literal["dspark", "eagle3"] | None,
        typer.Option(help="Whose blocks; by format if absent."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Blocks to export, as 1,14,26; if absent, the set's but the last block."),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help="A draft vocabulary to write too (`pipeline vocab`).")
    ] = None,
) -> None:
    """Write a run's rows in the format that another trainer reads."""
    from pipeline.export import export_run

    done = export_run(directory, output, to, features, layers=layers, vocab=vocab)
    typer.echo(f"wrote {done.rows:,} rows for {to} to {output}")
    if done.left_out:
        typer.echo(f"left out {len(done.left_out):,} rows that its reader refuses (export.json)")
    ids = " ".join(map(str, done.layer_ids))
    typer.echo(f"block outputs {list(done.blocks)}; for {to}, {done.layer_option}: {ids}")


@app.command(epilog="Example: pipeline split /data/run --parts 4 -o /data/sets")
def split(
    directory: Directory,
    parts: Annotated[int, typer.Option(min=1, help="How many shard sets.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new directory of the sets.")],
) -> None:
    """Deal a run's files to shard sets, each with all records; `merge` puts them together."""
    from pipeline.shard_sets import split_run

    for folder in split_run(directory, parts, output):
        typer.echo(f"wrote {folder}")


@app.command(epilog="Example: pipeline merge /data/sets/set-* -o /data/run")
def merge(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Shard sets with equal fingerprints.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new directory to write.")],
) -> None:
    """Put shard sets of one run together; every file is checked against its record."""
    from pipeline.shard_sets import merge_sets

    typer.echo(f"merged {merge_sets(directories, output):,} files into {output}")


@app.command(epilog="Example: pipeline push /data/run me/drafter-features --license apache-2.0")
def push(
    directory: Directory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Dataset repository: owner/name.")],
    license_id: Annotated[
        str | None,
        typer.Option("--license", help="License of the dataset, by the Hub's id: apache-2.0."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new one is private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent; no network.")
    ] = False,
) -> None:
    """Send a finished run to the Hub: shards, records, plan and card; again: what is missing."""
    from pipeline.push_command import push_run

    push_run(
        directory,
        repo,
        license_id=license_id,
        private=private,
        dry_run=dry_run,
        console=new_console(),
    )
