"""What files say their columns mean: read strictly, and refused where it is not known."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corruptions_rows import CORRUPTIONS, edit_footer
from tampering import Tampered

from pipeline.errors import PipelineError
from pipeline.inspect_run import inspect_run
from pipeline.loading.reading import FeatureIndex
from pipeline.semantics import Semantics, read_semantics
from pipeline.validate import validate


def test_unknown_semantics_are_refused(every_set_run: Path) -> None:
    raw = json.loads((every_set_run / "manifest.json").read_text())["semantics"]
    known = read_semantics(raw, "manifest.json")
    assert isinstance(known, Semantics) and known.as_dict() == raw
    assert known.embedding_scale == 16.0  # sqrt(256)
    assert known.rope["sliding"].theta == 1e4 and known.rope["sliding"].scaling == {}
    assert known.rope["full"].type == "proportional" and known.rope["full"].theta == 1e6
    assert known.rope["full"].scaling == {"partial_rotary_factor": 0.25}
    assert (known.generated_by, known.scored_by) == ("transformers", "transformers")
    for change in (
        {"pairing": "embed(x_n) with final_hidden[n]"},
        {"version": 2},
        {"norm": "before"},
        {"layers": None},
        {"scored_by": "guess"},
    ):
        with pytest.raises(PipelineError, match=f"{next(iter(change))} is .*does not know"):
            read_semantics({**raw, **change}, "x.parquet")
    for name in raw:
        less = {key: value for key, value in raw.items() if key != name}
        with pytest.raises(PipelineError, match=rf"semantics\.{name} is missing"):
            read_semantics(less, "x.parquet")
    with pytest.raises(PipelineError, match=r"x\.parquet: semantics is None"):
        read_semantics(None, "x.parquet")


def test_reader_and_validator_refuse_shards_with_another_pairing(
    every_set_run: Path, tmp_path: Path
) -> None:
    tampered = Tampered(every_set_run, tmp_path / "out")
    CORRUPTIONS["semantics.known"](tampered)
    assert tampered.fired() == {"semantics.known"}
    with pytest.raises(PipelineError, match=r"semantics\.pairing is 'h_n with x_n', which this"):
        FeatureIndex(tampered.out)
    with pytest.raises(PipelineError, match=r"semantics\.pairing is 'h_n with x_n'"):
        inspect_run(tampered.out)


def test_a_column_that_says_it_is_its_neighbour_is_found(
    every_set_run: Path, tmp_path: Path
) -> None:
    tampered = Tampered(every_set_run, tmp_path / "out")
    table = pq.read_table(tampered.path("train-00000"))
    at = table.schema.get_field_index("block_3_hidden")
    field = table.schema.field(at)
    other = field.with_metadata({**field.metadata, b"block": b"4"})
    tampered.write_table("train-00000", table.cast(table.schema.set(at, other)))
    (finding,) = validate(tampered.out).findings
    assert (finding.rule, finding.column) == ("semantics.layers", "block_3_hidden metadata block")
    assert (finding.found, finding.expected) == ("4", "3")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"dspark": [1, 2, 3, 4, 5], "eagle3": [1, 3, 8]}, "blocks from 0 to 7, rising"),
        ({"dspark": [1, 2, 3, 4, 5], "eagle3": [3, 1, 4]}, "blocks from 0 to 7, rising"),
        ({"dspark": [1, 2, 3, 4, 5]}, "of dspark, eagle3, its feature sets that hold blocks"),
    ],
)
def test_blocks_in_the_footer_are_the_target_models(
    every_set_run: Path, tmp_path: Path, layers: dict[str, list[int]], expected: str
) -> None:
    tampered = Tampered(every_set_run, tmp_path / "out")
    footer = tampered.footer("train-00000")
    semantics = {**footer["semantics"], "layers": layers}
    edit_footer(tampered, "train-00000", semantics=semantics)
    found = [f for f in validate(tampered.out).findings if f.rule == "semantics.layers"]
    assert expected in {f.expected for f in found}
