"""What the commands share: their arguments' types, a console, JSON on stdout."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="OUT of a run, OUT/data, or a directory with shards.")
]
DirectoryOrUrl = Annotated[
    str, typer.Argument(metavar="DIR", help="OUT of a run (also s3://…), or shards.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def new_console(*, quiet: bool = False) -> Any:
    """A rich console that colours nothing by itself; rich is imported only here."""
    from rich.console import Console

    return Console(highlight=False, quiet=quiet)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    # ASCII with escapes: ids and file names may hold what the terminal's encoding does not.
    typer.echo(json.dumps(value, indent=1, allow_nan=False))
