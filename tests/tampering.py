"""Change one thing in a finished run and record everything around it anew.

A rule's test must not pass because some other rule, such as the file's hash, would notice.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.features import k_step_targets
from pipeline.plan import part_name, write_part
from pipeline.schema import FOOTER_KEY, Layout
from pipeline.shards import ShardWriter, file_sha256, ids_sha256, read_rows
from pipeline.tasks import RowRange, ShardTask
from pipeline.validate import validate
from pipeline.validate.shard import Footer

Row = dict[str, Any]


class Tampered:
    """A copy of a run; files are named by their record, such as train-00000."""

    def __init__(self, run: Path, out: Path) -> None:
        shutil.copytree(run, out)
        self.out = out

    def fired(self) -> set[str]:
        return {finding.rule for finding in validate(self.out).findings}

    def drop_records(self) -> None:
        """Leave the data files alone, as in a directory with just shards."""
        shutil.rmtree(self.out / "commits")
        (self.out / "manifest.json").unlink()

    def path(self, name: str) -> Path:
        return self.out / str(self.commit(name)["file"])

    def commit(self, name: str) -> dict[str, Any]:
        return self.json(f"commits/{name}.json")

    def json(self, file: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.out / file).read_text())
        return value

    def edit_json(self, file: str, /, **changes: Any) -> None:
        (self.out / file).write_text(json.dumps({**self.json(file), **changes}))

    def record(self, name: str, /, **changes: Any) -> None:
        """Change a commit record, and all that repeats it."""
        old = self.commit(name)
        self.edit_json(f"commits/{name}.json", **changes)
        manifest = self.json("manifest.json")
        entries = [e for table in ("shards", "rollouts") for e in manifest[table]]
        next(e for e in entries if e["name"] == name).update(changes)
        manifest["rows_out"] = sum(e["rows"] for e in manifest["shards"])
        manifest["tokens"] = sum(e["tokens"] for e in manifest["shards"])
        self.edit_json("manifest.json", **manifest)
        card = self.out / "README.md"
        card.write_text(card.read_text().replace(old["file"], changes.get("file", old["file"])))

    def replace_file(self, name: str, staged: Path, /, **changes: Any) -> None:
        """Put a file in place of a recorded one, under the name its content gives."""
        old = self.path(name)
        sha256 = file_sha256(staged)
        new = old.with_name(old.name[: -len("0123456789ab.parquet")] + sha256[:12] + ".parquet")
        old.unlink(missing_ok=True)
        shutil.move(staged, new)
        file = new.relative_to(self.out).as_posix()
        before = old.relative_to(self.out).as_posix()
        self.record(name, file=file, bytes=new.stat().st_size, sha256=sha256, **changes)
        if name.startswith("rollout"):
            self._mend_ranges(before, file)

    def _mend_ranges(self, before: str, after: str) -> None:
        """Let the shards be made from a rollout file under its new name."""
        ranges = self.json("plan/shards.json")
        (self.out / "plan/shards.json").write_text(json.dumps(ranges).replace(before, after))
        for index, (name, rows) in enumerate(sorted(self.json("plan/shards.json").items())):
            task = ShardTask(
                index=index, total=len(ranges), ranges=tuple(RowRange(*row) for row in rows)
            )
            self.record(name, inputs_sha256=task.inputs_sha256)

    def plan_rows(self, index: int) -> list[Row]:
        """The planned prompts of a rollout part."""
        rows: list[Row] = pq.read_table(self.out / "plan" / part_name(index)).to_pylist()
        return rows

    def write_plan(self, index: int, rows: list[Row]) -> None:
        """Plan other prompts for a rollout part, which then was made from these."""
        part = write_part(self.out / "plan" / part_name(index), rows)
        parts = self.json("plan/plan.json")["parts"]
        parts[index] = part.model_dump()
        self.edit_json("plan/plan.json", parts=parts)
        self.record(f"rollout-{index:05d}", inputs_sha256=part.sha256)

    def footer(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(pq.read_schema(self.path(name)).metadata[FOOTER_KEY])
        return value

    def layout(self, name: str) -> Layout:
        return Footer.model_validate_json(json.dumps(self.footer(name))).layout()

    def rows(self, name: str) -> list[Row]:
        rows = read_rows(self.path(name), self.layout(name).columns)
        return [
            {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in row.items()}
            for row in rows
        ]

    def write(self, name: str, rows: Sequence[Row], footer: dict[str, Any] | None = None) -> None:
        """Write rows as the only row group of a recorded file, as the pipeline does."""
        staged = self.out / ".staging" / "tampered.parquet"
        footer = footer or self.footer(name)
        with ShardWriter(staged, self.layout(name), footer) as writer:
            writer.write(rows)
        self.replace_file(
            name,
            staged,
            rows=len(rows),
            tokens=sum(len(row["input_ids"]) for row in rows),
            supervised_tokens=int(sum(row["loss_mask"].sum() for row in rows)),
            ids_sha256=ids_sha256([row["sample_id"] for row in rows]),
        )

    def edit_row(
        self, change: Callable[[Row], None], *, row: str = "row-0", rollout: bool = False
    ) -> None:
        """Apply a change to one row of a shard; rollout: and to the same row of the rollouts."""
        for name in sorted(p.stem for p in (self.out / "commits").glob("*.json")):
            if name.startswith("rollout") and not rollout:
                continue
            rows = self.rows(name)
            for candidate in rows:
                if candidate["sample_id"] == row:
                    change(candidate)
                    self.write(name, rows)

    def write_table(self, name: str, table: pa.Table, **options: Any) -> None:
        """Write an Arrow table in place of a recorded file, in the pipeline's form but for
        `options`."""
        layout = self.layout(name)
        staged = self.out / ".staging" / "tampered.parquet"
        scalars = [c.name for c in layout.columns if not c.shape]
        floats = layout.leaf_paths(floats=True)
        pq.write_table(
            table,
            staged,
            **{
                "compression": "zstd",
                "use_dictionary": ["sample_id", "source", "finish_reason"],
                "use_byte_stream_split": floats,
                "write_statistics": scalars,
                "write_page_checksum": True,
                **options,
            },
        )
        self.replace_file(name, staged)

    def edit_column(self, name: str, column: str, change: Callable[[list[Any]], None]) -> None:
        """Change a column's rows as Python lists, so that it may take any shape."""
        table = pq.read_table(self.path(name))
        at = table.schema.get_field_index(column)
        field = table.schema.field(at)
        array = table[column].combine_chunks()
        extension = isinstance(array, pa.ExtensionArray)
        values = (array.storage if extension else array).to_pylist()
        change(values)
        storage = field.type.storage_type if extension else field.type
        changed = pa.array(values, storage)
        if extension:
            changed = pa.ExtensionArray.from_storage(field.type, changed)
        self.write_table(name, table.set_column(at, field, changed))


def retarget(row: Row) -> None:
    """Make a shard's row agree with its ids and mask again."""
    if "target_ids" in row:
        depth = row["target_ids"].shape[1]
        row["target_ids"], row["target_mask"] = k_step_targets(
            row["input_ids"], row["loss_mask"], depth
        )
