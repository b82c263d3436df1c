"""One corruption a rule: what that rule, and no other, must find. Here: records and files.

Edits that a shard shares with its rollout are made in both, and every record is made to agree
(tampering.py), so that only the rule itself can notice.
"""

import json
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
from tampering import Tampered

from pipeline.schema import FOOTER_KEY

FILES = ("rollout-00000", "rollout-00001", "train-00000", "train-00001")  # of the tests' run
CORRUPTIONS: dict[str, Callable[[Tampered], None]] = {}


def corrupts(rule: str) -> Callable[[Callable[[Tampered], None]], Callable[[Tampered], None]]:
    """Register the corruption that this rule, and no other, must find."""

    def register(corrupt: Callable[[Tampered], None]) -> Callable[[Tampered], None]:
        assert rule not in CORRUPTIONS
        CORRUPTIONS[rule] = corrupt
        return corrupt

    return register


# Records.


@corrupts("manifest.readable")
def _(run: Tampered) -> None:
    manifest = run.out / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])


@corrupts("manifest.complete")
def _(run: Tampered) -> None:
    run.edit_json("manifest.json", complete=False)


@corrupts("manifest.fingerprint")
def _(run: Tampered) -> None:
    fields = {**run.json("manifest.json")["fingerprint_fields"], "code": "9.9"}
    run.edit_json("manifest.json", fingerprint_fields=fields)
    run.edit_json("plan/plan.json", fields=fields)


@corrupts("manifest.commits")
def _(run: Tampered) -> None:
    shards = run.json("manifest.json")["shards"]
    run.edit_json("manifest.json", shards=[{**shards[0], "rows": 1}, *shards[1:]])


@corrupts("manifest.counts")
def _(run: Tampered) -> None:
    run.edit_json("manifest.json", rows_in=10)


@corrupts("manifest.rejects")
def _(run: Tampered) -> None:
    rejects = run.out / "rejects.jsonl"
    rejects.write_text("".join(rejects.read_text().splitlines(keepends=True)[1:]))


@corrupts("manifest.settings")
def _(run: Tampered) -> None:
    run.edit_json("manifest.json", scored_by="llamacpp")


@corrupts("plan.files")
def _(run: Tampered) -> None:
    fields = run.json("plan/plan.json")["fields"]
    run.edit_json("plan/plan.json", fields={**fields, "eos_ids": [0]})


@corrupts("plan.inputs")
def _(run: Tampered) -> None:
    run.record("train-00001", inputs_sha256="0" * 64)


@corrupts("card.files")
def _(run: Tampered) -> None:
    card = run.out / "README.md"
    card.write_text(card.read_text().replace("data/train-00001", "data/train-00007"))


@corrupts("commits.readable")
def _(run: Tampered) -> None:
    (run.out / "commits" / "train-00009.json").write_text("{}")


@corrupts("commits.fingerprint")
def _(run: Tampered) -> None:
    run.edit_json("plan/plan.json", fingerprint="0" * 64)


@corrupts("files.inside")
def _(run: Tampered) -> None:
    stranger = {**run.commit("train-00000"), "name": "train-00009", "file": "../x.parquet"}
    (run.out / "commits" / "train-00009.json").write_text(json.dumps(stranger))
    manifest = run.json("manifest.json")
    run.edit_json("manifest.json", shards=[*manifest["shards"], {**stranger, "file": "/etc/x"}])


@corrupts("files.name")
def _(run: Tampered) -> None:
    path = run.path("train-00000")
    new = path.rename(path.with_name("train-00000-of-00002-0123456789ab.parquet"))
    run.record("train-00000", file=f"data/{new.name}")


@corrupts("files.unreferenced")
def _(run: Tampered) -> None:
    path = run.path("train-00000")
    (path.parent / "train-00000-of-00002-late.parquet").write_bytes(path.read_bytes())
    (path.parent / "x.parquet.tmp").write_bytes(b"x")


@corrupts("files.missing")
def _(run: Tampered) -> None:
    run.path("train-00001").unlink()


# Files.


@corrupts("files.size")
def _(run: Tampered) -> None:
    run.record("train-00000", bytes=run.commit("train-00000")["bytes"] + 1)


@corrupts("files.sha256")
def _(run: Tampered) -> None:
    run.record("train-00000", sha256=run.commit("train-00000")["sha256"][:-4] + "0000")


@corrupts("parquet.readable")
def _(run: Tampered) -> None:
    staged = run.out / ".staging" / "short"
    staged.write_bytes(run.path("train-00000").read_bytes()[:-1])
    run.replace_file("train-00000", staged)


@corrupts("footer.readable")
def _(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    metadata = {k: v for k, v in table.schema.metadata.items() if k != FOOTER_KEY}
    run.write_table("train-00000", table.replace_schema_metadata(metadata))


def edit_footer(run: Tampered, name: str, **changes: Any) -> None:
    run.write(name, run.rows(name), {**run.footer(name), **changes})


@corrupts("footer.fingerprint")
def _(run: Tampered) -> None:
    edit_footer(run, "train-00000", fingerprint="0" * 64)


@corrupts("footer.settings")
def _(run: Tampered) -> None:
    geometry = run.footer("train-00000")["geometry"]
    edit_footer(run, "train-00000", geometry={**geometry, "num_layers": 3})


@corrupts("schema.digest")
def _(run: Tampered) -> None:
    schemas = run.footer("train-00000")["schemas"]
    edit_footer(run, "train-00000", schemas={**schemas, "mtp/v1": "0" * 64})


@corrupts("schema.arrow")
def _(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    at = table.schema.get_field_index("full_key")
    field = table.schema.field(at)
    other = field.with_metadata({**field.metadata, b"rope_type": b"linear"})
    run.write_table("train-00000", table.cast(table.schema.set(at, other)))


@corrupts("semantics.known")
def _(run: Tampered) -> None:
    for name in ("rollout-00000", "train-00000"):
        semantics = {**run.footer(name)["semantics"], "pairing": "h_n with x_n"}
        table = pq.read_table(run.path(name))
        footer = json.dumps({**run.footer(name), "semantics": semantics}).encode()
        metadata = {**table.schema.metadata, FOOTER_KEY: footer}
        run.write_table(name, table.replace_schema_metadata(metadata))


@corrupts("semantics.model")
def _(run: Tampered) -> None:
    for name in FILES:
        semantics = {**run.footer(name)["semantics"], "embedding_scale": 2.0}
        edit_footer(run, name, semantics=semantics)
    run.drop_records()


@corrupts("semantics.same")
def _(run: Tampered) -> None:
    semantics = {**run.footer("train-00001")["semantics"], "generated_by": "endpoint"}
    edit_footer(run, "train-00001", semantics=semantics)
    run.drop_records()


@corrupts("semantics.layers")
def _(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    at = table.schema.get_field_index("full_key")
    field = table.schema.field(at)
    other = field.with_metadata({**field.metadata, b"layer": b"0"})
    run.write_table("train-00000", table.cast(table.schema.set(at, other)))


@corrupts("encoding.compression")
def _(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    run.write_table("train-00000", table, compression={"input_ids.list.element": "snappy"})


@corrupts("encoding.floats")
def _(run: Tampered) -> None:
    floats = run.layout("train-00000").leaf_paths(floats=True)
    table = pq.read_table(run.path("train-00000"))
    run.write_table("train-00000", table, use_byte_stream_split=floats[:-1])


@corrupts("encoding.statistics")
def _(run: Tampered) -> None:
    run.write_table(
        "train-00000",
        pq.read_table(run.path("train-00000")),
        write_statistics=["input_ids.list.element"],
    )


@corrupts("encoding.footer")
def _(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    staged = run.out / ".staging" / "groups"
    layout = run.layout("train-00000")
    options = {
        "compression": "zstd",
        "use_dictionary": False,
        "use_byte_stream_split": layout.leaf_paths(floats=True),
        "write_statistics": False,
        "write_page_checksum": True,
    }
    with pq.ParquetWriter(staged, table.schema, **options) as writer:
        writer.write_table(table)
        for _ in range(300):
            writer.write_table(table.slice(0, 0))
    run.replace_file("train-00000", staged)


@corrupts("parquet.pages")
def _(run: Tampered) -> None:
    flip_a_byte(run, "train-00000", "full_value.list.element.list.element.list.element")


def flip_a_byte(run: Tampered, name: str, leaf: str) -> None:
    path = run.path(name)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    column = next(c for c in columns if c.path_in_schema == leaf)
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    staged = run.out / ".staging" / "flipped"
    staged.write_bytes(raw)
    run.replace_file(name, staged)
