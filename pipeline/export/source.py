"""What is exported: the rows of a run, the blocks whose outputs go in, and what else they need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pipeline.errors import PipelineError
from pipeline.layers import choose_layers, default_layers
from pipeline.loading.reading import FeatureIndex, Row
from pipeline.validate.folder import open_run
from pipeline.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an exporter gets.

    features: the set that is exported; layers: its blocks, rising; last: the target's last block.
    vocab: the draft vocabulary to write beside the rows. left_out: sample ids of rows that the
    trainer's reader would refuse, filled while writing.
    """

    index: FeatureIndex
    features: str
    layers: tuple[int, ...]
    last: int
    target: str
    vocab: DraftVocab | None = None
    left_out: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """Every row, in the run's order; one row group in memory."""
        for group in self.index.groups:
            yield from self.index.read(group)

    def wide(self, row: Row) -> torch.Tensor:
        """The blocks' outputs of a row side by side, [T, L * D]."""
        return torch.cat([row[f"block_{i}_hidden"] for i in self.layers], dim=1)


def open_source(
    directory: str,
    features: str,
    *,
    layers: str | None,
    needs: Sequence[str],
    needs_last: bool,
    vocab: DraftVocab | None,
) -> Source:
    """Open a finished run for one exporter.

    layers: blocks with commas; by default the set's, but for the target's last block, which is
    extracted for trainers that apply the final norm themselves. needs: columns beside the blocks
    and tokens; needs_last: whether the last block's own output is one. Raises PipelineError naming
    what the run lacks and how to extract it.
    """
    named = FeatureIndex(directory, ["input_ids"])
    manifest = open_run(directory).manifest
    assert manifest is not None  # FeatureIndex has seen to it
    geometry, there = manifest.geometry, named.settings.get("features")
    last = geometry.num_layers - 1
    if features not in named.semantics.layers:
        raise PipelineError(
            f"{directory}: was extracted with --features {there}, without the blocks of "
            f"{features}: extract with --features {there},{features}"
        )
    if layers is None:
        chosen = tuple(i for i in named.semantics.layers[features] if i != last)
    else:
        chosen = choose_layers(
            [features],
            [layers],
            num_layers=geometry.num_layers,
            architecture=geometry.architecture,
        )[features]
    held = {column.name for column in named.layout.columns}
    blocks = [f"block_{i}_hidden" for i in chosen]
    for name in (*blocks, *needs):
        if name not in held:
            remedy = (
                f"it holds the blocks {_listed(named.layout.block_layers)}"
                if name in blocks
                else f"extract with --features mtp,{features}"
            )
            raise PipelineError(f"{directory}: has no {name}; {remedy}")
    if needs_last and f"block_{last}_hidden" not in held:
        usual = chosen or default_layers(features, geometry.num_layers, geometry.architecture)
        raise PipelineError(
            f"{directory}: has no block_{last}_hidden; the trainer applies the final norm itself, "
            "so it needs the last block's own output: extract with --layers "
            f"{features}={_listed((*usual, last))}"
        )
    if vocab is not None and vocab.vocab_size != geometry.vocab_size:
        raise PipelineError(
            f"--vocab: made for {vocab.vocab_size} tokens, the target model has "
            f"{geometry.vocab_size}"
        )
    wanted = {"sample_id", "input_ids", "loss_mask", *blocks, *needs}
    wanted |= {f"block_{last}_hidden"} if needs_last else set()
    return Source(
        index=FeatureIndex(directory, wanted),
        features=features,
        layers=chosen,
        last=last,
        target=str(named.settings["target"]),
        vocab=vocab,
    )


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
