"""`pipeline vocab`: count a run's supervised tokens and write a draft vocabulary."""

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save

from pipeline.errors import PipelineError
from pipeline.loading.reading import FeatureIndex
from pipeline.models.load import find_target, load_tokenizer
from pipeline.prompt_rows import source_group
from pipeline.report.collect import NAMES_KEPT as SOURCES_KEPT
from pipeline.report.collect import OTHERS
from pipeline.validate.folder import open_run
from pipeline.vocab.build import VOCAB_FILE, build_vocab, coverage
from pipeline.vocab.transitions import Transitions, count_transitions

TRANSITIONS_FILE = "transitions.safetensors"
IntArray = npt.NDArray[np.int64]


def write_vocab(
    directory: str,
    out: Path,
    *,
    size: int,
    must_include: Collection[str],
    markov: bool,
    target: str | None,
    console: Console,
) -> dict[str, Any]:
    """Write OUT/vocab.safetensors, vocab.json and, with markov, transitions.safetensors.

    target: where the tokenizer comes from, by default what the run was made with. Raises
    PipelineError; also where OUT holds a vocabulary that differs, since a drafter trained with one
    cannot be served with another.
    """
    index = FeatureIndex(directory, ["source", "input_ids", "loss_mask"])
    manifest = open_run(directory).manifest
    assert manifest is not None  # FeatureIndex has read it
    tokenizer = _tokenizer(manifest.settings, manifest.fingerprint_fields, target)
    by_source = _count(index, manifest.geometry.vocab_size)
    total = sum(by_source.values(), np.zeros(manifest.geometry.vocab_size, np.int64))
    vocab = build_vocab(
        total,
        size=size,
        tokenizer=tokenizer,
        eos_ids=set(manifest.fingerprint_fields["eos_ids"]),
        must_include=must_include,
    )
    files = {VOCAB_FILE: vocab.to_bytes()}
    if markov:
        files[TRANSITIONS_FILE] = _transition_bytes(count_transitions(_rows(index)))
    report = {
        "size": size,
        "vocab_size": vocab.vocab_size,
        "must_include": sorted(must_include),
        "run_fingerprint": index.fingerprint,
        "tokenizer_sha256": manifest.fingerprint_fields["tokenizer_sha256"],
        "sha256": hashlib.sha256(files[VOCAB_FILE]).hexdigest(),
        "coverage": coverage(vocab, by_source, tokenizer),
    }
    files["vocab.json"] = (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode()
    unchanged = _write(out, files)
    _print(console, out, report)
    if unchanged:
        console.print(f"{out}: this very vocabulary was there already; nothing was written")
    return report


def _rows(index: FeatureIndex) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
    for group in index.groups:
        for row in index.read(group):
            yield row["input_ids"].numpy(), row["loss_mask"].numpy()


def _count(index: FeatureIndex, vocab_size: int) -> dict[str, IntArray]:
    """Source, without its line number -> supervised occurrences of each token.

    Past SOURCES_KEPT, further sources count as one, so that memory stays bounded.
    """
    counts: dict[str, IntArray] = {}
    for group in index.groups:
        for row in index.read(group):
            source = source_group(row["source"])
            if source not in counts and len(counts) >= SOURCES_KEPT:
                source = OTHERS
            ids = row["input_ids"].numpy()[row["loss_mask"].numpy() == 1]
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise PipelineError(
                    f"{index.out}: a row of {row['source']} has a token id outside the vocabulary "
                    f"of {vocab_size}; `pipeline validate` says more"
                )
            total = counts.setdefault(source, np.zeros(vocab_size, np.int64))
            total += np.bincount(ids, minlength=vocab_size)
    return counts


def _tokenizer(settings: dict[str, Any], fields: dict[str, Any], target: str | None) -> Any:
    tokenizer = load_tokenizer(
        find_target(target or str(settings["target"])),
        None if target else settings.get("tokenizer"),
    )
    text = tokenizer.backend_tokenizer.to_str()
    if hashlib.sha256(text.encode()).hexdigest() != fields.get("tokenizer_sha256"):
        raise PipelineError(
            f"{target or settings['target']}: has another tokenizer than the run; name the target "
            "model it was made with by --target"
        )
    return tokenizer


def _transition_bytes(found: Transitions) -> bytes:
    data: bytes = save(
        {
            "first_counts": found.first.counts,
            "first_keys": found.first.keys,
            "second_counts": found.second.counts,
            "second_keys": found.second.keys,
        }
    )
    return data


def _write(out: Path, files: dict[str, bytes]) -> bool:
    """All files, or none where one is there and differs. Returns whether all were there."""
    there = {name: (out / name).read_bytes() for name in files if (out / name).is_file()}
    differs = [name for name, data in there.items() if data != files[name]]
    if differs:
        raise PipelineError(
            f"{out / differs[0]}: another draft vocabulary is there already, and drafters may "
            "depend on it; name another directory by -o"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in files:  # vocab.json last: it vouches for the others
            if name in there:
                continue
            temporary = out / f".{name}.tmp"
            temporary.write_bytes(files[name])
            temporary.replace(out / name)
    except OSError as error:
        raise PipelineError(f"{out}: cannot write: {error.strerror}") from error
    return len(there) == len(files)


def _print(console: Console, out: Path, report: dict[str, Any]) -> None:
    covered = report["coverage"]
    table = Table(title=f"{report['size']:,} of {report['vocab_size']:,} tokens, in {out}")
    for name in ("", "supervised tokens", "covered"):
        table.add_column(name, justify="left" if not name else "right")
    lines = [("all", covered["all"]), *covered["scripts"].items(), *covered["sources"].items()]
    for name, found in lines:
        share = found["share"]
        table.add_row(name, f"{found['tokens']:,}", "-" if share is None else f"{share:.2%}")
    console.print(table)
