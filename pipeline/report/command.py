"""`pipeline report`: gather what a page needs of each run, and write the page."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.inspect_run import inspect_run
from pipeline.report.collect import collect
from pipeline.report.page import render
from pipeline.report.samples import token_decoder
from pipeline.report.view import RunData, look_up, manifest_of
from pipeline.validate import validate
from pipeline.validate.folder import open_run
from pipeline.validate.shard import Footer, files_of


def write_report(paths: Sequence[Path], output: Path, *, quick: bool = False) -> None:
    """Write the page of one run, or of two side by side.

    quick: of the validator, only what reads no rows. Raises PipelineError where a run cannot be
    read or the page cannot be written.
    """
    page = render([gather(path, quick=quick) for path in paths])
    try:
        # A token may be half of a character pair, which UTF-8 cannot write.
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise PipelineError(f"--output {output}: {error.strerror or error}") from error


def gather(path: Path, *, quick: bool) -> RunData:
    """Read a run three times: its small columns, all of them, and as the validator does."""
    run = open_run(path)
    inspection = inspect_run(path)
    manifest = manifest_of(run)
    target = look_up(manifest, "target", "name")
    tokenizer = look_up(manifest, "settings", "tokenizer")
    decode, unread = token_decoder(
        target if isinstance(target, str) else None,
        tokenizer if isinstance(tokenizer, str) else None,
    )
    return RunData(
        run=run,
        inspection=inspection,
        found=collect(path),
        validation=validate(path, quick=quick),
        footer=_footer(path),
        decode=decode,
        unread=unread,
    )


def _footer(path: Path) -> Footer:
    """Of the first shard; the validator tells where another one differs."""
    for file in files_of(open_run(path)):
        file.open()
        file.close()
        if file.kind == "shard" and file.footer is not None:
            return file.footer
    raise PipelineError(f"{path}: no shard has a readable footer")
