"""A run's files in object storage (s3://bucket/path), through fsspec."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from pipeline.errors import PipelineError, StorageError
from pipeline.storage import LOCK_NAME, held_by, holder

LOCK_BEAT_SECONDS = 10.0  # how often the holder of a lock renews it
_READ_BYTES = 2**20
_SCRATCH = "drafter-features"  # in the local temporary directory; one folder a process below


class RemoteStorage:
    """Object storage through fsspec. An object appears whole or not at all.

    `create` is exclusive where the store has conditional writes (S3 has).
    """

    def __init__(self, url: str) -> None:
        if "@" in urlsplit(url).netloc:
            raise PipelineError(
                "--out: a URL with credentials in it would end up in logs and manifests; "
                "give them by environment variables or profile, and the URL without"
            )
        self.url = url.rstrip("/")
        try:
            # Other processes write here too: a cached listing would be a lie.
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise PipelineError(f"--out {url}: {error}") from error
        self._scratch: Path | None = None

    def list(self, folder: str) -> dict[str, int]:
        try:
            entries = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        found = {e["name"].rsplit("/", 1)[-1]: int(e["size"]) for e in entries if _is_file(e)}
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    def read_all(self, folder: str, suffix: str) -> dict[str, bytes]:
        names = [name for name in self.list(folder) if name.endswith(suffix)]
        paths = {self._path(f"{folder}/{name}"): name for name in names}
        found: Mapping[str, bytes] = self._fs.cat(list(paths)) if paths else {}
        return {paths[path]: data for path, data in sorted(found.items())}

    def open(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self._fs.open(self._path(name), "rb")
        return file

    def replace(self, name: str, data: bytes) -> None:
        with self._failing_as("writing", name):
            self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        with self._failing_as("writing", name):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # S3's answer to a conditional write that lost, as s3fs passes it on.
                if "PreconditionFailed" in str(error) or "pre-condition" in str(error).lower():
                    return False
                raise
        return True

    def put(self, local: Path, name: str, sha256: str) -> None:
        with self._failing_as("uploading", name):
            self._fs.put_file(str(local), self._path(name))
            arrived = hashlib.sha256()
            with self.open(name) as file:
                while block := file.read(_READ_BYTES):
                    arrived.update(block)
        if arrived.hexdigest() != sha256:
            self.remove(name)
            raise StorageError(f"{self.url}/{name}: what arrived is not what was sent")
        local.unlink()

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def scratch(self) -> Path:
        if self._scratch is None:
            top = Path(tempfile.gettempdir()) / _SCRATCH
            self._scratch = top / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.sweep_scratch()
        self._scratch.mkdir(parents=True, exist_ok=True)
        return self._scratch

    def sweep_scratch(self) -> None:
        for path in (Path(tempfile.gettempdir()) / _SCRATCH).glob("*-*"):
            process = path.name.split("-")[0]
            if path != self._scratch and not Path("/proc", process).exists():
                shutil.rmtree(path, ignore_errors=True)

    def free_bytes(self) -> int | None:
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A small object renewed every LOCK_BEAT_SECONDS; one that stays the same is dead.

        Whether it is renewed is watched by this process's own clock, so skew between machines
        does not matter.
        """
        mine = uuid.uuid4().hex
        try:
            free = self.create(LOCK_NAME, _lock_text(mine, 0))
        except StorageError as error:  # the first write: nothing has begun yet
            raise PipelineError(f"--out {self.url}: cannot be written to: {error}") from error
        if not free:
            there = self._read_lock()
            deadline = time.monotonic() + 3 * LOCK_BEAT_SECONDS
            while there is not None and time.monotonic() < deadline:
                time.sleep(LOCK_BEAT_SECONDS / 10)
                now = self._read_lock()
                if now is not None and now != there:
                    raise held_by(self.url, str(json.loads(now).get("holder")))
                there = now
            self.replace(LOCK_NAME, _lock_text(mine, 0))
        ended = threading.Event()
        beat = threading.Thread(target=self._renew, args=(mine, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            self.remove(LOCK_NAME)

    def _renew(self, mine: str, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(LOCK_BEAT_SECONDS):
            count += 1
            # A store out of reach for a while ends nothing here: uploads will say so.
            with contextlib.suppress(StorageError):
                self.replace(LOCK_NAME, _lock_text(mine, count))

    def _read_lock(self) -> bytes | None:
        try:
            return self.read(LOCK_NAME)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _failing_as(self, what: str, name: str) -> Iterator[None]:
        """Stores raise what their client libraries like; one kind for all of it."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise StorageError(f"{self.url}/{name}: {what} failed ({text})") from error


def _is_file(entry: Mapping[str, Any]) -> bool:
    return bool(entry["type"] == "file") and not entry["name"].endswith("/")


def _lock_text(mine: str, count: int) -> bytes:
    return json.dumps({"holder": holder(), "id": mine, "beat": count}).encode()
