"""Where a run's files lie: a local directory, or a URL that fsspec knows (s3://bucket/path).

Names are relative, with `/`. Two operations carry all guarantees: `put` makes a finished local
file appear whole and verified or not at all, and `create` makes a small file at most once, however
many processes try.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from pipeline.errors import PipelineError

LOCK_NAME = ".lock"


class Storage(Protocol):
    """A tree of files. Folders need no making; a missing file to read is FileNotFoundError."""

    url: str

    def list(self, folder: str) -> dict[str, int]:
        """Name (without the folder) and size of each file directly in `folder`."""
        ...

    def read(self, name: str) -> bytes: ...

    def read_all(self, folder: str, suffix: str) -> dict[str, bytes]:
        """Content of each file directly in `folder` whose name ends so."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """A seekable file to read from."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file whole or not at all, over what is there."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file whole unless it is there already: then False."""
        ...

    def put(self, local: Path, name: str, sha256: str) -> None:
        """Move a finished local file to `name`. Raises StorageError if it did not arrive whole."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; none there is fine."""
        ...

    def scratch(self) -> Path:
        """A local directory for unfinished files, on the same disk where storage is local."""
        ...

    def sweep_scratch(self) -> None:
        """Remove what earlier processes left in scratch."""
        ...

    def free_bytes(self) -> int | None:
        """Free space, None where there is no such number."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the tree for one driver. Raises PipelineError naming a living holder."""
        ...


def open_storage(out: str | Path) -> Storage:
    """Storage of a path or URL. Raises PipelineError for a URL that cannot be used."""
    from pipeline.remote_storage import RemoteStorage

    text = str(out)
    return RemoteStorage(text) if "://" in text else LocalStorage(Path(text))


class LocalStorage:
    """A directory on a local disk; finished files are synced before they appear."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def list(self, folder: str) -> dict[str, int]:
        path = self.root / folder
        if not path.is_dir():
            return {}
        return {p.name: p.stat().st_size for p in sorted(path.iterdir()) if p.is_file()}

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def read_all(self, folder: str, suffix: str) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted((self.root / folder).glob(f"*{suffix}"))}

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")

    def replace(self, name: str, data: bytes) -> None:
        part = self._write_part(data)
        self._parent(name)
        part.replace(self.root / name)

    def create(self, name: str, data: bytes) -> bool:
        part = self._write_part(data)
        try:
            # Unlike a rename, a link never replaces what is already there.
            os.link(part, self._parent(name) / Path(name).name)
        except FileExistsError:
            return False
        finally:
            part.unlink(missing_ok=True)
        _fsync(self._parent(name))
        return True

    def put(self, local: Path, name: str, sha256: str) -> None:
        _fsync(local)
        local.replace(self._parent(name) / Path(name).name)
        _fsync(self._parent(name))

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def scratch(self) -> Path:
        path = self.root / ".staging"  # dot-prefixed: no loader takes it for data
        path.mkdir(parents=True, exist_ok=True)
        return path

    def sweep_scratch(self) -> None:
        for path in self.scratch().iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def free_bytes(self) -> int | None:
        path = self.root.absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The lock is the kernel's, so it dies with its process."""
        with (self.root / LOCK_NAME).open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise held_by(self.url, file.read().strip()) from None
            file.truncate(0)
            file.write(f"{holder()}\n")
            file.flush()
            yield

    def _parent(self, name: str) -> Path:
        parent = (self.root / name).parent
        parent.mkdir(parents=True, exist_ok=True)
        return parent

    def _write_part(self, data: bytes) -> Path:
        part = self.scratch() / f"{uuid.uuid4().hex}.tmp"
        part.write_bytes(data)
        _fsync(part)
        return part


def holder() -> str:
    """This process, in words for whoever finds its lock."""
    return f"process {os.getpid()} on {os.uname().nodename}"


def held_by(url: str, who: str) -> PipelineError:
    """The error for a folder that another run holds."""
    return PipelineError(f"--out {url}: another run is writing here ({who})")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
