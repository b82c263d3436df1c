"""GGUF files as the rest of the package sees them: metadata, and tensors read row by row."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pipeline.errors import PipelineError
from pipeline.gguf.header import Header, TensorInfo, read_header

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_MAX_PARTS = 1024


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A GGUF model, of one file or of several parts, with only the headers in memory.

    metadata: exact key -> int, float, bool, str or list, from the first part.
    tensors: exact name -> where its data is; shapes in torch's order.
    """

    paths: tuple[Path, ...]
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def path(self) -> Path:
        """The first (usually only) file, for messages."""
        return self.paths[0]

    @property
    def quantisation(self) -> dict[str, int]:
        """ggml type -> number of tensors stored in it, most frequent first."""
        return dict(Counter(t.ggml_type.name for t in self.tensors.values()).most_common())

    def read_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) of a tensor seen as [numel / shape[-1], shape[-1]], as float32.

        The rows are dequantised (copied out of the file); nothing else of it is read.
        Raises PipelineError for a missing tensor or a type that cannot be dequantised.
        """
        info = self._info(name)
        width = info.shape[-1]
        block, block_bytes = GGML_QUANT_SIZES[info.ggml_type]
        row_bytes = width // block * block_bytes
        raw = np.fromfile(
            info.file,
            dtype=np.uint8,
            count=(stop - start) * row_bytes,
            offset=info.offset + start * row_bytes,
        )
        if raw.nbytes != (stop - start) * row_bytes:
            raise PipelineError(f"{info.file}: tensor {name} ends early; the file changed")
        return _dequantise(raw.reshape(stop - start, row_bytes), info).reshape(stop - start, width)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One whole tensor, dequantised to float32, in its torch shape."""
        info = self._info(name)
        return self.read_rows(name, 0, info.numel // info.shape[-1]).reshape(info.shape)

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise PipelineError(f"{self.path}: the tensor {name} is missing")
        return info


def _dequantise(rows: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.float32]:
    if info.ggml_type == GGMLQuantizationType.F64:
        return rows.view(np.float64).astype(np.float32)
    try:
        return np.asarray(gguf.dequantize(rows, info.ggml_type), dtype=np.float32)
    except NotImplementedError:
        raise PipelineError(
            f"{info.file}: tensor {info.name} is stored as {info.ggml_type.name}, which the gguf "
            "package cannot dequantise; use a file of another quantisation"
        ) from None


def read_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF model; `path` may be any part of a split model.

    Raises PipelineError for a damaged or hostile file, and for a split model with missing or
    mixed parts.
    """
    path = Path(path)
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        header = read_header(path)
        count = header.metadata.get("split.count", 1)
        if count not in (0, 1):
            raise PipelineError(
                f"{path}: this is one of {count} parts but its name does not end in "
                "-0000N-of-0000M.gguf, so the others cannot be found; give it its original name"
            )
        return _assemble((path,), [header])
    count = int(match["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise PipelineError(
            f"{path}: the name claims {count} parts, at most {_MAX_PARTS} are allowed"
        )
    paths = tuple(
        path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")
        for number in range(1, count + 1)
    )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise PipelineError(
            f"{path}: the model has {count} parts and {', '.join(missing[:3])} "
            f"({len(missing)} in all) cannot be found; put all parts in one folder"
        )
    headers = [read_header(part) for part in paths]
    for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
        found = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if found != (number, count):
            raise PipelineError(
                f"{part}: split.no and split.count are {found}, the file name says "
                f"{(number, count)}; parts of different models are mixed"
            )
    return _assemble(paths, headers)


def _assemble(paths: tuple[Path, ...], headers: list[Header]) -> GGUFFile:
    metadata = headers[0].metadata
    tensors: dict[str, TensorInfo] = {}
    for path, header in zip(paths, headers, strict=True):
        for name, info in header.tensors.items():
            if name in tensors:
                raise PipelineError(f"{path}: the tensor {name} is also in {tensors[name].file}")
            tensors[name] = info
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and expected != len(tensors):
        raise PipelineError(
            f"{paths[0]}: split.tensors.count is {expected} but the parts hold {len(tensors)}"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise PipelineError(
            f"{paths[0]}: the key general.architecture is missing; this is not a model file"
        )
    return GGUFFile(paths=paths, architecture=architecture, metadata=metadata, tensors=tensors)
