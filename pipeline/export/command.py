"""`pipeline export`: choose the format, write it as a whole, and say how the trainer counts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.export.deepspec import to_deepspec
from pipeline.export.source import Source, open_source
from pipeline.export.specforge import to_specforge
from pipeline.export.speculators import to_speculators
from pipeline.new_folder import new_folder
from pipeline.vocab import read_vocab

RECORD_NAME = "export.json"


class Format(NamedTuple):
    """One trainer's. features: the set exported by default; needs, needs_last: see open_source.

    layer_shift: what it adds to our block numbers (0-based outputs); layer_option: where it wants
    the numbers.
    """

    write: Callable[[Source, Path], int]
    features: str
    needs: tuple[str, ...]
    needs_last: bool
    layer_shift: int
    layer_option: str


FORMATS = {
    "speculators": Format(to_speculators, "eagle3", (), True, 1, "--target-layer-ids"),
    "specforge": Format(
        to_specforge, "eagle3", ("final_hidden",), False, 0, "the draft config's layer ids"
    ),
    "deepspec": Format(
        to_deepspec, "dspark", ("final_hidden",), False, 0, "model.target_layer_ids"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. left_out: sample ids that the trainer's reader would refuse.

    blocks: ours, 0-based outputs; layer_ids: the same as the trainer counts them, for
    layer_option.
    """

    rows: int
    left_out: Sequence[str]
    blocks: Sequence[int]
    layer_ids: Sequence[int]
    layer_option: str


def export_run(
    directory: str,
    out: Path,
    to: str,
    features: str | None = None,
    *,
    layers: str | None = None,
    vocab: Path | None = None,
) -> Exported:
    """Write all rows of a run to the new directory `out`, with export.json, which says what is in.

    to: speculators, specforge or deepspec. features: the set whose blocks are exported, by default
    dspark for deepspec and eagle3 for the others; layers: its blocks, see open_source. vocab: what
    `pipeline vocab` wrote. Raises PipelineError; then `out` does not exist.
    """
    chosen = FORMATS[to]
    source = open_source(
        directory,
        features or chosen.features,
        layers=layers,
        needs=chosen.needs,
        needs_last=chosen.needs_last,
        vocab=None if vocab is None else read_vocab(vocab),
    )
    with new_folder(out) as staged:
        rows = chosen.write(source, staged)
        exported = Exported(
            rows=rows,
            left_out=source.left_out,
            blocks=source.layers,
            layer_ids=[i + chosen.layer_shift for i in source.layers],
            layer_option=chosen.layer_option,
        )
        record = {
            "format": to,
            "features": source.features,
            "rows": rows,
            "left_out": exported.left_out,
            "blocks": exported.blocks,
            "layer_ids": exported.layer_ids,
            "run_fingerprint": source.index.fingerprint,
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        (staged / RECORD_NAME).write_text(text, encoding="utf-8")
    return exported
