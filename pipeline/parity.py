"""How far two target models are apart on the same rows: one file, two backends or two dtypes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from pipeline.errors import PipelineError
from pipeline.models.base import (
    Geometry,
    PositionedRow,
    RowOutput,
    TargetModel,
    TeacherRows,
)

ROWS_PER_PASS = 8  # both backends' outputs of these rows are in memory at a time
# Tail masses are float32 differences from 1, right to about 1e-7: b's rest below this would make
# log(p / q) noise. Raising it can only lower the KL.
_SMALLEST_REST = 1e-5


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """What `compare` measured, over all tokens of all rows; `a` is the reference.

    relative_l2: column -> ||b - a|| / ||a||, Frobenius norms in float64.
    argmax_agreement: share of tokens whose likeliest next token is the same.
    mean_kl, max_kl: nats, over tokens: KL(a || b) of the two next-token distributions after
        merging every token that is not in both top-k lists into one "rest" class (b's share of
        it taken as at least 1e-5). That needs no guess about the tail, is exact where both lists
        hold all mass, and is never above the KL over the whole vocabulary.
    mean_logprob_gap: nats, mean of |log p_b(x_t) - log p_a(x_t)| over tokens t >= 1.
    """

    a: str
    b: str
    rows: int
    tokens: int
    top_k: int
    relative_l2: Mapping[str, float]
    argmax_agreement: float
    mean_kl: float
    max_kl: float
    mean_logprob_gap: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field under its own name."""
        return asdict(self)

    def violations(self, *, min_argmax_agreement: float, max_mean_kl: float) -> list[str]:
        """One sentence for each limit that is not met."""
        found = []
        if not self.argmax_agreement >= min_argmax_agreement:
            found.append(
                f"the likeliest token agrees on {self.argmax_agreement:.2%} of tokens, "
                f"less than {min_argmax_agreement:.2%}"
            )
        if not self.mean_kl <= max_mean_kl:
            found.append(f"the mean KL is {self.mean_kl:.3g} nats, more than {max_mean_kl:.3g}")
        return found

    def __rich__(self) -> Table:
        table = Table(title=f"{self.b} against {self.a}: {self.rows} rows, {self.tokens} tokens")
        table.add_column("measure")
        table.add_column("value", justify="right")
        for column, error in self.relative_l2.items():
            table.add_row(f"relative L2 of {column}", f"{error:.2e}")
        table.add_section()
        table.add_row("likeliest token agrees", f"{self.argmax_agreement:.2%}")
        table.add_row(f"mean KL (top {self.top_k} and rest), nats", f"{self.mean_kl:.2e}")
        table.add_row(f"max KL (top {self.top_k} and rest), nats", f"{self.max_kl:.2e}")
        table.add_row("mean |log p(x) difference|, nats", f"{self.mean_logprob_gap:.2e}")
        return table


def compare(
    a: TargetModel,
    b: TargetModel,
    rows: Sequence[PositionedRow],
    top_k: int,
    *,
    block_layers: Sequence[int] = (),
) -> ParityReport:
    """Run both models over the same rows; `a` is the reference, such as the engine that serves.

    Raises PipelineError if there are no rows or the two are not of one shape.
    """
    if not rows:
        raise PipelineError("there is nothing to compare: no rows were given")
    _check_same_shape(a.geometry, b.geometry)
    totals = _Totals()
    for start in range(0, len(rows), ROWS_PER_PASS):
        part = rows[start : start + ROWS_PER_PASS]
        outputs = (model.forward(part, top_k=top_k, block_layers=block_layers) for model in (a, b))
        for of_a, of_b in zip(*outputs, strict=True):
            totals.add(of_a, of_b)
    return ParityReport(
        a=f"{a.backend} ({a.geometry.hidden_dtype})",
        b=f"{b.backend} ({b.geometry.hidden_dtype})",
        rows=len(rows),
        tokens=totals.tokens,
        top_k=top_k,
        relative_l2={
            name: (error / norm) ** 0.5 if norm else (0.0 if error == 0 else float("inf"))
            for name, (error, norm) in totals.squares.items()
        },
        argmax_agreement=totals.same_argmax / totals.tokens,
        mean_kl=totals.kl / totals.tokens,
        max_kl=totals.max_kl,
        mean_logprob_gap=totals.logprob_gap / max(1, totals.tokens - len(rows)),
    )


class _Totals:
    """Sums over the rows seen so far; squares: column -> (of differences, of the reference)."""

    def __init__(self) -> None:
        self.squares: dict[str, tuple[float, float]] = {}
        self.tokens = self.same_argmax = 0
        self.kl = self.max_kl = self.logprob_gap = 0.0

    def add(self, a: RowOutput, b: RowOutput) -> None:
        columns_b = _columns(b)
        for name, tensor in _columns(a).items():
            reference, other = tensor.double(), columns_b[name].double()
            error, norm = self.squares.get(name, (0.0, 0.0))
            self.squares[name] = (
                error + float((other - reference).square().sum()),
                norm + float(reference.square().sum()),
            )
        self.tokens += len(a.final_hidden)
        same = a.teacher.top_ids[:, 0] == b.teacher.top_ids[:, 0]
        self.same_argmax += int(same.sum())
        divergence = top_k_kl(a.teacher, b.teacher)
        self.kl += float(divergence.sum())
        self.max_kl = max(self.max_kl, float(divergence.max()))
        gap = b.teacher.token_logprobs.double() - a.teacher.token_logprobs.double()
        self.logprob_gap += float(gap.abs().sum())  # token 0 has 0 on both sides


def top_k_kl(a: TeacherRows, b: TeacherRows) -> torch.Tensor:
    """float64 [T], nats: KL(a || b) over the tokens in both top-k lists and one "rest" class."""
    sorted_b, order = b.top_ids.long().sort(dim=-1)  # [T, K]
    place = torch.searchsorted(sorted_b, a.top_ids.long()).clamp(max=sorted_b.shape[-1] - 1)
    common = sorted_b.gather(1, place) == a.top_ids  # [T, K], of a's list
    log_p = a.top_logprobs.double()
    log_q = b.top_logprobs.double().gather(1, order).gather(1, place)
    p, q = log_p.exp(), log_q.exp()
    each = torch.where(common, p * (log_p - log_q), 0.0).sum(dim=-1)
    common_in_b = torch.where(common, q, 0.0).sum(dim=-1)
    rest_p = a.tail_mass.double() + torch.where(common, 0.0, p).sum(dim=-1)
    only_in_b = b.top_logprobs.double().exp().sum(dim=-1) - common_in_b
    rest_q = b.tail_mass.double() + only_in_b.clamp(min=0)
    rest = torch.xlogy(rest_p, rest_p / rest_q.clamp(min=_SMALLEST_REST))
    return (each + rest).clamp(min=0)


def _columns(output: RowOutput) -> dict[str, torch.Tensor]:
    columns = {"final_hidden": output.final_hidden}
    for kind, (key, value) in output.shared_kv.items():
        columns |= {f"{kind}_key": key, f"{kind}_value": value}
    return columns | {f"block_{i}_hidden": block for i, block in output.block_hidden.items()}


def _check_same_shape(a: Geometry, b: Geometry) -> None:
    def shape(geometry: Geometry) -> dict[str, object]:
        kv = {
            f"{kind} KV (layer, heads, head size)": (kv.layer, kv.kv_heads, kv.head_dim)
            for kind, kv in sorted(geometry.shared_kv.items())
        }
        sizes = {name: getattr(geometry, name) for name in ("num_layers", "hidden_size")}
        return {**sizes, "vocab_size": geometry.vocab_size, **kv}

    of_a, of_b = shape(a), shape(b)
    for name in of_a | of_b:
        if of_a.get(name) != of_b.get(name):
            raise PipelineError(
                f"these are not two forms of one target model: {name} is {of_a.get(name)} in the "
                f"first and {of_b.get(name)} in the second"
            )
