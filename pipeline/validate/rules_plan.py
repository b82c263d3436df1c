"""Rules on where the rows come from: the settings, plan/, and the chain of digests from there."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from pipeline.errors import PipelineError
from pipeline.geometry import feature_layout
from pipeline.manifest import Commit
from pipeline.plan import PLAN_SCHEMA, Plan, part_name
from pipeline.semantics import semantics_of
from pipeline.tasks import RowRange, ShardTask
from pipeline.validate.folder import Manifest, RunView, first_error
from pipeline.validate.report import NotChecked, Problem, Rule
from pipeline.validate.rules_records import CHANGED, MANIFEST, need_manifest, plan_rejects

PLAN_FILE = "plan/plan.json"
_RANGES = pydantic.TypeAdapter(dict[str, list[RowRange]])


def need_plan(run: RunView) -> Plan:
    """plan/plan.json. Raises NotChecked where there is no plan/, or the file cannot be read."""
    if not (run.root / "plan").is_dir():
        raise NotChecked("the directory has no plan/")
    try:
        return Plan.model_validate_json((run.root / PLAN_FILE).read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        raise NotChecked(f"{PLAN_FILE} cannot be read") from error


def read_planned(run: RunView, record: Commit, columns: list[str]) -> list[dict[str, Any]]:
    """The planned rows of a rollout file.

    Raises NotChecked where there is no plan/, and what reading a file raises: OSError,
    ArrowException, UnicodeDecodeError.
    """
    if not (run.root / "plan").is_dir():
        raise NotChecked("the directory has no plan/")
    with (run.root / plan_part(record)).open("rb") as file:
        table = pq.read_table(file, columns=columns)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def plan_part(record: Commit) -> str:
    """The path of the plan part that a rollout file answers."""
    return f"plan/part-{record.name.rpartition('-')[2]}.parquet"


def manifest_settings(run: RunView) -> Iterator[Problem]:
    """What the manifest says for readers is what its fingerprint covers."""
    manifest = need_manifest(run)
    fields, told = manifest.fingerprint_fields, manifest.model_extra or {}
    pairs: dict[str, tuple[Any, Any]] = {}
    covered = fields.get("settings")
    for key, value in (covered if isinstance(covered, dict) else {}).items():
        pairs[f"settings.{key}"] = (manifest.settings.get(key), value)
    settings = manifest.settings
    target = told.get("target")
    sha256 = target.get("sha256") if isinstance(target, dict) else None
    pairs["target.sha256"] = (sha256, fields.get("target_sha256"))
    pairs["scored_by"] = (told.get("scored_by"), fields.get("backend"))
    given = settings.get("turns") == "given"
    pairs["generated_by"] = (
        told.get("generated_by"),
        None if given else fields.get("generated_by"),
    )
    sampling = {
        key: settings.get(key) for key in ("max_new_tokens", "temperature", "top_p", "stop")
    }
    pairs["sampling"] = (
        told.get("sampling"),
        {**sampling, "top_k": settings.get("sampling_top_k")},
    )
    pairs["semantics"] = (told.get("semantics"), _semantics(manifest))
    pairs["bytes_per_token"] = (told.get("bytes_per_token"), _bytes_per_token(manifest))
    for key, (found, expected) in pairs.items():
        if found != expected:
            yield Problem(file=MANIFEST, column=key, found=str(found), expected=str(expected))


def _layers(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Of the fingerprint. Raises ValueError where it has none that can be read."""
    layers = manifest.fingerprint_fields.get("layers")
    return pydantic.TypeAdapter(dict[str, tuple[int, ...]]).validate_python(layers)


def _semantics(manifest: Manifest) -> dict[str, Any] | str:
    """What this code writes for a run of these fields."""
    fields, given = manifest.fingerprint_fields, manifest.settings.get("turns") == "given"
    try:
        return semantics_of(
            manifest.geometry,
            layers=_layers(manifest),
            generated_by=None if given else fields.get("generated_by"),
            scored_by=str(fields.get("backend")),
        ).as_dict()
    except ValueError:
        return "what the fingerprint's layers and the geometry give"


def _bytes_per_token(manifest: Manifest) -> int | str:
    settings = manifest.settings
    try:
        layout = feature_layout(
            manifest.geometry,
            str(settings["features"]).split(","),
            top_k=int(settings["topk"]),
            depth=int(settings["depth"]),
            layers=_layers(manifest),
        )
        return layout.bytes_per_token
    except (PipelineError, LookupError, TypeError, ValueError):
        return "a number that known features, topk and depth give"


def plan_whole(run: RunView) -> Iterator[Problem]:
    """plan.json is readable, its fields are the manifest's, and its parts have their digests."""
    manifest = need_manifest(run)
    if not (run.root / "plan").is_dir():
        raise NotChecked("the directory has no plan/")
    try:
        plan = Plan.model_validate_json((run.root / PLAN_FILE).read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        reason = first_error(error) if isinstance(error, ValueError) else str(error)
        yield Problem(file=PLAN_FILE, found=f"unreadable ({reason})", expected="the plan")
        return
    if plan.fields != manifest.fingerprint_fields:
        found = "other fields than the manifest's fingerprint_fields"
        yield Problem(file=PLAN_FILE, column="fields", found=found, expected="the same")
    for index, part in enumerate(plan.parts):
        name = f"plan/{part_name(index)}"
        try:
            content = (run.root / name).read_bytes()
            digest, rows = hashlib.sha256(content).hexdigest(), _part_rows(content)
        except (OSError, pa.ArrowException) as error:
            yield Problem(file=name, found=f"unreadable ({error})", expected="planned prompts")
            continue
        if (digest, rows, len(content)) != (part.sha256, part.rows, part.bytes):
            yield Problem(
                file=name,
                found=f"sha256 {digest}, {rows} rows, {len(content)} bytes",
                expected=f"{part.sha256}, {part.rows} and {part.bytes}, as in {PLAN_FILE}",
            )
    counts = Counter(reject.reason for reject in plan_rejects(run))
    if counts != plan.rejected:
        yield Problem(
            file="plan/rejects.jsonl",
            found=str(dict(counts)),
            expected=f"{plan.rejected}, as in {PLAN_FILE}",
        )


def _part_rows(content: bytes) -> int:
    file = pq.ParquetFile(pa.BufferReader(content))
    if not file.schema_arrow.equals(PLAN_SCHEMA):
        raise pa.ArrowInvalid("other columns than a plan's")
    rows: int = file.metadata.num_rows
    return rows


def made_from(run: RunView) -> Iterator[Problem]:
    """A record's inputs_sha256 is the digest of what the plan gives for its file."""
    manifest, plan = need_manifest(run), need_plan(run)
    wanted = {f"rollout-{i:05d}": part.sha256 for i, part in enumerate(plan.parts)}
    kinds = ["rollout"]
    if manifest.complete:
        try:
            raw = (run.root / "plan" / "shards.json").read_bytes()
            ranges = _RANGES.validate_json(raw)
        except (OSError, pydantic.ValidationError) as error:
            reason = first_error(error) if isinstance(error, ValueError) else str(error)
            found = f"unreadable ({reason})"
            yield Problem(file="plan/shards.json", found=found, expected="the rows of each shard")
            return
        for index, (name, rows) in enumerate(sorted(ranges.items())):
            task = ShardTask(index=index, total=len(ranges), ranges=tuple(rows))
            wanted[name] = task.inputs_sha256
        kinds.append("shard")
    records = {r.name: r.inputs_sha256 for r in run.records.values() if r.kind in kinds}
    for name in sorted(records.keys() | wanted.keys() if manifest.complete else records.keys()):
        found, expected = records.get(name, "no record"), wanted.get(name, "no such file")
        if found != expected:
            yield Problem(
                file=f"commits/{name}.json",
                column="inputs_sha256",
                found=found,
                expected=f"{expected}, as in plan/",
            )


PLAN_RULES: tuple[Rule[RunView], ...] = (
    Rule(
        id="manifest.settings",
        requires="settings, target model, backends and semantics are what the fingerprint covers",
        remedy=CHANGED,
        check=manifest_settings,
    ),
    Rule(
        id="plan.files",
        requires="plan/ is whole: readable, the manifest's fields, every part with its sha256",
        remedy=CHANGED,
        check=plan_whole,
    ),
    Rule(
        id="plan.inputs",
        requires="each record's inputs_sha256 is the digest of what plan/ gives for its file",
        remedy=CHANGED,
        check=made_from,
    ),
)
