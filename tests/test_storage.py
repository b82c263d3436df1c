"""Local directories and a real S3 server: whole files or none, records once, one driver."""

import hashlib
import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from run_files import data_files, settings_of

from pipeline import remote_storage
from pipeline.errors import PipelineError, StorageError
from pipeline.execute import LocalWorker, execute
from pipeline.loading import FeatureDataset, FeatureStream
from pipeline.manifest import RunFolder
from pipeline.storage import Storage, open_storage
from pipeline.validate import validate

s3fs = pytest.importorskip("s3fs", reason="S3 tests: pip install 'drafter-features[s3]'")


@pytest.fixture
def bucket(s3: str) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/runs/a"


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "out")
    return open_storage(request.getfixturevalue("bucket"))


def test_files_come_back_and_are_listed(storage: Storage) -> None:
    assert storage.list("data") == {}
    storage.replace("data/b.json", b"first")
    storage.replace("data/b.json", b"second")
    storage.replace("data/a.txt", b"")
    storage.replace("data/deeper/c.json", b"x")
    assert storage.list("data") == {"a.txt": 0, "b.json": 6}
    assert storage.read("data/b.json") == b"second"
    assert storage.read_all("data", ".json") == {"b.json": b"second"}
    with storage.open("data/b.json") as file:
        file.seek(3)
        assert file.read() == b"ond"
    storage.remove("data/b.json")
    storage.remove("data/b.json")
    with pytest.raises(FileNotFoundError):
        storage.read("data/b.json")


def test_of_many_creators_exactly_one_succeeds(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda i: storage.create("commits/x.json", b"%d" % i), range(16)))
    assert sum(won) == 1
    assert storage.read("commits/x.json") == b"%d" % won.index(True)
    assert storage.list("commits") == {"x.json": len(str(won.index(True)))}


def test_a_finished_file_moves_out_of_scratch(storage: Storage) -> None:
    staged = storage.scratch() / "x.parquet"
    staged.write_bytes(b"abc")
    storage.put(staged, "data/x.parquet", _sha256(b"abc"))
    assert storage.read("data/x.parquet") == b"abc" and not staged.exists()


def test_an_upload_that_arrives_otherwise_is_no_file(bucket: str) -> None:
    storage = open_storage(bucket)
    staged = storage.scratch() / "x.parquet"
    staged.write_bytes(b"abc")
    with pytest.raises(StorageError, match=r"data/x\.parquet: what arrived is not what was sent"):
        storage.put(staged, "data/x.parquet", _sha256(b"other"))
    assert storage.list("data") == {}


def test_an_upload_that_fails_halfway_leaves_nothing(s3: str, bucket: str) -> None:
    storage = open_storage(bucket)
    staged = storage.scratch() / "x.parquet"
    content = os.urandom(1000) * 120_000  # 120 MB: several parts
    staged.write_bytes(content)
    urlopen(f"{s3}/-/fail-parts?after=1").read()
    try:
        with pytest.raises(StorageError, match=r"data/x\.parquet: uploading failed"):
            storage.put(staged, "data/x.parquet", _sha256(content))
    finally:
        urlopen(f"{s3}/-/heal").read()
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    assert fs.call_s3("list_multipart_uploads", Bucket=bucket.split("/")[2]).get("Uploads") is None
    assert storage.list("data") == {}
    storage.put(staged, "data/x.parquet", _sha256(content))
    assert storage.list("data") == {"x.parquet": len(content)}


def test_two_drivers_on_one_folder(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_storage, "LOCK_BEAT_SECONDS", 0.2)
    storage.replace("README.md", b"")
    with (
        storage.locked(),
        pytest.raises(PipelineError, match=f"another run is writing here .process {os.getpid()} "),
        open_storage(storage.url).locked(),
    ):
        pass
    with open_storage(storage.url).locked():
        pass


def test_the_lock_of_a_dead_driver_is_taken_over(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever time it says: what counts is that it is no longer renewed."""
    monkeypatch.setattr(remote_storage, "LOCK_BEAT_SECONDS", 0.2)
    storage = open_storage(bucket)
    storage.replace(".lock", json.dumps({"holder": "process 1 on gone", "beat": 9}).encode())
    with storage.locked():
        assert b"process 1 on gone" not in storage.read(".lock")
        with pytest.raises(PipelineError, match="another run is writing here"):
            open_storage(bucket).locked().__enter__()
    assert ".lock" not in storage.list("")


def test_a_whole_run_on_s3_has_the_same_bytes(tiny_run: Path, bucket: str, tmp_path: Path) -> None:
    """And the same command again finds everything there."""
    manifest = execute(settings_of(tiny_run, out=bucket), LocalWorker)
    assert _remote_files(bucket) == data_files(tiny_run)
    storage = open_storage(bucket)
    before = {name: storage.read(f"commits/{name}") for name in storage.list("commits")}
    assert execute(settings_of(tiny_run, out=bucket), LocalWorker) == manifest
    assert before == {name: storage.read(f"commits/{name}") for name in storage.list("commits")}
    stored = b"".join(storage.read(name) for name in ("manifest.json", "README.md"))
    assert b"secret-of-the-test" not in stored and b"key-of-the-test" not in stored


def test_on_s3_what_is_missing_or_cut_is_made_again(tiny_run: Path, bucket: str) -> None:
    execute(settings_of(tiny_run, out=bucket), LocalWorker)
    storage = open_storage(bucket)
    first, second = (f"data/{name}" for name in storage.list("data"))
    storage.replace(first, storage.read(first)[:-1])
    storage.remove(second)
    storage.replace("data/train-00000-of-00002-stranger.parquet", b"left over")
    execute(settings_of(tiny_run, out=bucket), LocalWorker)
    assert _remote_files(bucket) == data_files(tiny_run)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("s3://KEY:SECRET@bucket/x", "credentials in it would end up in logs"),
        ("nonsense://x/y", "--out nonsense://x/y: Protocol not known"),
    ],
)
def test_urls_that_cannot_be_used(out: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message) as raised:
        RunFolder(out)
    assert "SECRET" not in str(raised.value)


def test_a_bucket_that_is_not_there_is_told_at_once(tiny_run: Path, s3: str) -> None:
    with pytest.raises(PipelineError, match="s3://no-such-bucket-here/x: cannot be written") as it:
        execute(settings_of(tiny_run, out="s3://no-such-bucket-here/x"), LocalWorker)
    assert it.value.exit_code == 2


def _remote_files(url: str) -> dict[str, bytes]:
    storage = open_storage(url)
    return {
        f"{folder}/{name}": storage.read(f"{folder}/{name}")
        for folder in ("data", "rollouts")
        for name in storage.list(folder)
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_validate_reads_a_run_on_s3(tiny_run: Path, bucket: str) -> None:
    """The same report as of the local copy, and the same findings."""
    storage = open_storage(bucket)
    for path in tiny_run.rglob("*"):
        if path.is_file() and ".staging" not in path.parts:
            storage.replace(path.relative_to(tiny_run).as_posix(), path.read_bytes())
    here, there = FeatureDataset(tiny_run), FeatureDataset(bucket, verify_sha256=True)
    assert len(here) == len(there) == 7
    for row, other in zip(
        (here[i] for i in range(7)), FeatureStream(bucket, shuffle=False), strict=True
    ):
        assert row["sample_id"] == other["sample_id"]
        assert torch.equal(row["full_key"], other["full_key"])
    local, remote = validate(tiny_run).as_dict(), validate(bucket).as_dict()
    assert {**local, "path": "", "seconds": 0} == {**remote, "path": "", "seconds": 0}
    first = next(iter(storage.list("data")))
    content = bytearray(storage.read(f"data/{first}"))
    content[500] ^= 1
    storage.replace(f"data/{first}", bytes(content))
    found = {(f.rule, f.file) for f in validate(bucket, quick=True).findings}
    assert found == {("files.sha256", f"data/{first}")}
