"""Rules on a run's own records: manifest, commits, rejects, card."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pydantic

from pipeline.card import split_card
from pipeline.errors import PipelineError
from pipeline.manifest import Commit, Reject
from pipeline.validate.folder import BadRecord, Manifest, RunView
from pipeline.validate.report import NotChecked, Problem, Rule

MANIFEST = "manifest.json"
# seconds differ in nothing but time, and the manifest keeps rejects in rejects.jsonl.
_NOT_COMPARED = {"rejects", "seconds"}


def need_run(run: RunView) -> None:
    if not run.has_records:
        raise NotChecked("the directory has no commits/ and no manifest.json")


def need_manifest(run: RunView) -> Manifest:
    need_run(run)
    if run.manifest is None:
        raise NotChecked("manifest.json cannot be read")
    return run.manifest


def _need_commits(run: RunView) -> dict[str, Commit]:
    need_run(run)
    if run.commits is None:
        raise NotChecked("the directory has no commits/")
    return run.commits


def manifest_readable(run: RunView) -> Iterator[Problem]:
    need_run(run)
    if run.manifest_error is not None:
        yield Problem(file=MANIFEST, found=run.manifest_error, expected="a manifest of version 1")


def manifest_complete(run: RunView) -> Iterator[Problem]:
    if not need_manifest(run).complete:
        yield Problem(file=MANIFEST, column="complete", found="false", expected="true")


def manifest_fingerprint(run: RunView) -> Iterator[Problem]:
    """The fingerprint is the digest of its fields, and the one of plan/plan.json."""
    manifest = need_manifest(run)
    text = json.dumps(manifest.fingerprint_fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if manifest.fingerprint != digest:
        yield Problem(
            file=MANIFEST,
            column="fingerprint",
            found=manifest.fingerprint,
            expected=f"{digest}, the digest of fingerprint_fields",
        )


def manifest_commits(run: RunView) -> Iterator[Problem]:
    """The tables of the manifest are the commit records."""
    manifest, commits = need_manifest(run), _need_commits(run)
    for bad in run.bad_listed:
        if not bad.outside:
            yield Problem(file=bad.source, found=bad.reason, expected="a record")
    listed = {**(run.listed or {})}
    for name in sorted(listed.keys() | commits.keys()):
        there, record = _compared(listed.get(name)), _compared(commits.get(name))
        for key in sorted(there.keys() | record.keys()):
            if there.get(key) != record.get(key):
                yield Problem(
                    file=MANIFEST,
                    column=f"{name}.{key}",
                    found=str(there.get(key, "nothing")),
                    expected=f"{record.get(key, 'nothing')}, as in commits/",
                )
    names = Counter(str(raw.get("name")) for raw in [*manifest.shards, *manifest.rollouts])
    for name, count in names.items():
        if count > 1:
            yield Problem(file=MANIFEST, column=name, found=f"{count} entries", expected="1")


def _compared(record: Commit | None) -> dict[str, Any]:
    return {} if record is None else record.model_dump(exclude=_NOT_COMPARED)


def manifest_counts(run: RunView) -> Iterator[Problem]:
    """rows in = rows out + rows rejected; rows out and tokens are those of the records."""
    manifest = need_manifest(run)
    shards = run.of_kind("shard")
    rejected = sum(manifest.rejected.values())
    sums = {
        "rows_out": (manifest.rows_out, sum(c.rows for c in shards), "the sum of the shards"),
        "tokens": (manifest.tokens, sum(c.tokens for c in shards), "the sum of the shards"),
    }
    if manifest.complete:
        total = manifest.rows_out + rejected
        sums["rows_in"] = (manifest.rows_in, total, "rows_out plus rejected")
    for key, (found, expected, why) in sums.items():
        if found != expected:
            yield Problem(
                file=MANIFEST, column=key, found=str(found), expected=f"{expected}, {why}"
            )


def rejects_agree(run: RunView) -> Iterator[Problem]:
    """rejects.jsonl has a line for each rejected row, those of the commits among them."""
    manifest = need_manifest(run)
    file = "rejects.jsonl"
    try:
        lines = (run.root / file).read_bytes().splitlines()
    except OSError as error:
        yield Problem(file=file, found=str(error.strerror), expected="a line a rejected row")
        return
    rejects: Counter[Reject] = Counter()
    for number, line in enumerate(lines, 1):
        try:
            rejects[Reject.model_validate_json(line)] += 1
        except pydantic.ValidationError:
            yield Problem(file=f"{file}:{number}", found="no such object", expected="a reject")
    counts = Counter(reject.reason for reject in rejects.elements())
    for reason in sorted(counts.keys() | manifest.rejected.keys()):
        if counts[reason] != manifest.rejected.get(reason, 0):
            yield Problem(
                file=file,
                column=reason,
                found=f"{counts[reason]} rows",
                expected=f"{manifest.rejected.get(reason, 0)}, as in {MANIFEST}",
            )
    told = Counter(reject for record in run.records.values() for reject in record.rejects)
    planned = (run.root / "plan").is_dir() and manifest.complete
    told += Counter(plan_rejects(run) if planned else ())
    extra = rejects - told if planned else Counter[Reject]()
    for what, differing in (("missing", told - rejects), ("of no record", extra)):
        for reject, count in differing.items():
            yield Problem(
                file=file,
                row=reject.sample_id,
                found=f"{count} rejects {what}",
                expected="exactly those of commits/ and plan/rejects.jsonl",
            )


def plan_rejects(run: RunView) -> list[Reject]:
    """The rows that were rejected before anything ran; what is no reject is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run.root / "plan" / "rejects.jsonl").read_bytes().splitlines():
            with contextlib.suppress(pydantic.ValidationError):
                found.append(Reject.model_validate_json(line))
    return found


def card_files(run: RunView) -> Iterator[Problem]:
    """The card's YAML pins exactly the recorded files, which is what load_dataset reads."""
    manifest = need_manifest(run)
    if not manifest.complete:
        raise NotChecked("the run is not finished")
    card = "README.md"
    try:
        text = (run.root / card).read_text(encoding="utf-8")
        head, _ = split_card(text, card)
        pinned = {c["config_name"]: c["data_files"][0]["path"] for c in head["configs"]}
        found = {name: sorted(map(str, paths)) for name, paths in pinned.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, PipelineError) as error:
        yield Problem(file=card, found=f"no data files ({error})", expected="YAML with data_files")
        return
    for config, kind in (("default", "shard"), ("rollouts", "rollout")):
        files = {c.file for c in run.records.values() if c.kind == kind}
        named = set(found.get(config, []))
        for file in sorted(files ^ named):
            yield Problem(
                file=card,
                column=config,
                found=f"{file} {'missing' if file in files else 'named'}",
                expected="exactly the files with a record",
            )


def commits_readable(run: RunView) -> Iterator[Problem]:
    _need_commits(run)
    yield from (_bad(bad) for bad in run.bad_commits if not bad.outside)


def _bad(bad: BadRecord) -> Problem:
    return Problem(file=bad.source, found=bad.reason, expected="a commit record")


def one_fingerprint(run: RunView) -> Iterator[Problem]:
    """Every record, and the plan, is of the manifest's run."""
    manifest = need_manifest(run)
    found = {f"the record of {c.name}": c.fingerprint for c in run.records.values()}
    plan = run.root / "plan" / "plan.json"
    if plan.is_file():
        try:
            found["plan/plan.json"] = str(json.loads(plan.read_bytes())["fingerprint"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            found["plan/plan.json"] = f"unreadable ({error})"
    for source, fingerprint in found.items():
        if fingerprint != manifest.fingerprint:
            yield Problem(
                file=source,
                column="fingerprint",
                found=fingerprint,
                expected=f"{manifest.fingerprint}, the manifest's",
            )


_AGAIN = "run the extraction again to finish or rewrite the folder"
CHANGED = "something changed the folder after the run; restore it or extract again"
RECORD_RULES: tuple[Rule[RunView], ...] = (
    Rule(
        id="manifest.readable",
        requires="manifest.json is there, of a known version, with all its fields",
        remedy=_AGAIN,
        check=manifest_readable,
    ),
    Rule(
        id="manifest.complete",
        requires="the run is finished",
        remedy="run the same command again: it resumes",
        check=manifest_complete,
    ),
    Rule(
        id="manifest.fingerprint",
        requires="the manifest's fingerprint is the digest of its fingerprint_fields",
        remedy=CHANGED,
        check=manifest_fingerprint,
    ),
    Rule(
        id="manifest.commits",
        requires="the manifest's tables are the commit records",
        remedy=CHANGED,
        check=manifest_commits,
    ),
    Rule(
        id="manifest.counts",
        requires="rows in = rows out + rejected; rows out and tokens are those of the shards",
        remedy=CHANGED,
        check=manifest_counts,
    ),
    Rule(
        id="manifest.rejects",
        requires="rejects.jsonl has the rows that manifest and commits count as rejected",
        remedy=CHANGED,
        check=rejects_agree,
    ),
    Rule(
        id="card.files",
        requires="README.md pins exactly the recorded files, for load_dataset",
        remedy=_AGAIN,
        check=card_files,
    ),
    Rule(
        id="commits.readable",
        requires="every file in commits/ is a record, under its own name",
        remedy=CHANGED,
        check=commits_readable,
    ),
    Rule(
        id="commits.fingerprint",
        requires="records and plan have the manifest's fingerprint",
        remedy="files of two runs are mixed; extract again into a new directory",
        check=one_fingerprint,
    ),
)
