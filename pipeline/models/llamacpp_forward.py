"""The teacher-forced pass of the llama.cpp backend: from captured tensors to `RowOutput`s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.features import TORCH_DTYPES, teacher_rows
from pipeline.models.base import Geometry, PositionedRow, RowOutput, TeacherRows
from pipeline.models.llamacpp_native import Capture, Context


@dataclass(frozen=True, kw_only=True)
class GraphNames:
    """Tensor names in one architecture's graph; `{}` is the 0-based block.

    interleaved_rope: the file's Q/K rows, and so K in the graph, pair dimensions (2i, 2i+1)
        instead of transformers' (i, i + head_dim/2); the columns hold transformers' order.
    """

    key: str
    value: str
    final_hidden: str
    block: str = "l_out-{}"
    interleaved_rope: bool = False


_QWEN = GraphNames(key="Kcur-{}", value="Vcur-{}", final_hidden="result_norm")
# GGUF architecture -> names.
GRAPH_NAMES = {
    "gemma4": GraphNames(key="Kcur_pos-{}", value="Vcur_normed-{}", final_hidden="h_nextn"),
    "llama": GraphNames(
        key="Kcur-{}", value="Vcur-{}", final_hidden="result_norm", interleaved_rope=True
    ),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}


def group_rows(
    rows: Sequence[PositionedRow], *, tokens: int, sequences: int
) -> list[list[PositionedRow]]:
    """Consecutive rows that fit one decode call; a longer row stands alone.

    More rows per group would save nothing: the call is full, and every token's attention runs
    over the (masked) cells of all the rows in the context.
    """
    groups: list[list[PositionedRow]] = []
    used = 0
    for row in rows:
        if not groups or len(groups[-1]) == sequences or used + len(row.ids) > tokens:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += len(row.ids)
    return groups


class ForwardPass:
    """Runs groups of rows through one capturing context."""

    def __init__(
        self,
        context: Context,
        capture: Capture,
        geometry: Geometry,
        names: GraphNames,
        *,
        top_k: int,
        block_layers: Sequence[int],
    ) -> None:
        """context: made with this capture. block_layers: checked by the caller."""
        self._context, self._capture = context, capture
        self._geometry, self._names, self._top_k = geometry, names, top_k
        hidden: tuple[int, ...] = (geometry.hidden_size,)
        self._blocks = {i: names.block.format(i).encode() for i in block_layers}
        self._hidden = names.final_hidden.encode()
        self._kv = {
            kind: (names.key.format(kv.layer).encode(), names.value.format(kv.layer).encode())
            for kind, kv in geometry.shared_kv.items()
        }
        wanted = {self._hidden: hidden} | dict.fromkeys(self._blocks.values(), hidden)
        for kind, kv in geometry.shared_kv.items():
            wanted |= dict.fromkeys(self._kv[kind], (kv.kv_heads, kv.head_dim))
        capture.wanted = wanted

    def run(self, rows: Sequence[PositionedRow]) -> list[RowOutput]:
        """One output per row of a group.

        The rows lie end to end: token n of the group is row n of every buffer, and each decode
        call fills the next `batch_tokens` of them. Logits exist for one call at a time.
        """
        self._context.clear()
        lengths = [len(row.ids) for row in rows]
        ids = np.concatenate([row.ids for row in rows]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(row.offset, row.offset + len(row.ids), dtype=np.int32) for row in rows]
        )
        sequence_ids = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        # The last token of a row has no next one; what stands here for it is not read.
        next_ids = torch.from_numpy(np.append(ids[1:], ids[:1]).astype(np.int64))
        buffers = self._buffers(len(ids))
        parts = []
        for start in range(0, len(ids), self._context.batch_tokens):
            part = slice(start, min(start + self._context.batch_tokens, len(ids)))
            count = part.stop - part.start
            self._context.decode(
                ids[part], positions[part], sequence_ids[part], np.ones(count, dtype=np.bool_)
            )
            for name, tensor in self._capture.take(count).items():
                buffers[name][part] = tensor
            logits = torch.from_numpy(self._context.logits(count))
            parts.append(teacher_rows(logits, next_ids[part], self._top_k))
        teacher = [torch.cat(column) for column in zip(*parts, strict=True)]
        ends = np.cumsum(lengths).tolist()
        return [
            self._output(slice(end - length, end), buffers, teacher)
            for length, end in zip(lengths, ends, strict=True)
        ]

    def _buffers(self, tokens: int) -> dict[bytes, torch.Tensor]:
        """Hidden states in the hidden dtype; K and V in the KV cache's, which rounds them so."""
        kv_names = {name for pair in self._kv.values() for name in pair}
        hidden, kv = self._geometry.hidden_dtype, self._geometry.kv_dtype
        return {
            name: torch.empty(
                (tokens, *shape), dtype=TORCH_DTYPES[kv if name in kv_names else hidden]
            )
            for name, shape in self._capture.wanted.items()
        }

    def _output(
        self, part: slice, buffers: Mapping[bytes, torch.Tensor], teacher: Sequence[torch.Tensor]
    ) -> RowOutput:
        shared_kv = {}
        for kind, (key_name, value_name) in self._kv.items():
            key = buffers[key_name][part]
            if self._names.interleaved_rope:
                key = torch.cat([key[..., 0::2], key[..., 1::2]], dim=-1)
            shared_kv[kind] = (key, buffers[value_name][part])
        top_ids, top_logprobs, tail_mass, next_logprobs = (column[part] for column in teacher)
        return RowOutput(
            final_hidden=buffers[self._hidden][part],
            shared_kv=shared_kv,
            teacher=TeacherRows(
                top_ids=top_ids,
                top_logprobs=top_logprobs,
                tail_mass=tail_mass,
                token_logprobs=torch.cat([torch.zeros(1), next_logprobs[:-1]]),
            ),
            block_hidden={i: buffers[name][part] for i, name in self._blocks.items()},
        )
