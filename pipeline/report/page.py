"""The page itself: one HTML file that needs nothing else, and that may load nothing else."""

import base64
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from pipeline.report import plots, sample_view, svg, view
from pipeline.report.plots import Scale
from pipeline.report.shares import DEPTHS
from pipeline.report.vectors import VectorStats
from pipeline.report.view import RunData

_HERE = Path(__file__).parent


def render(runs: Sequence[RunData]) -> str:
    """The page of one run, or of two side by side."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(_HERE),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["share"] = svg.share_bar
    environment.filters["visible"] = sample_view.visible
    shown = [_run(data, runs) for data in runs]
    return environment.get_template("page.html").render(
        style=Markup(style),  # ours, with nothing of a run in it
        # The only style that the page's policy lets the browser apply.
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        runs=shown,
        depths=DEPTHS,
        depth_names=[f">k = {k}" for k in range(1, DEPTHS + 1)],
        compared=_compared(shown) if len(shown) > 1 else [],
    )


def _run(data: RunData, runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything that the template asks of one run."""
    found, scale = data.found, Scale.of([run.found for run in runs])
    manifest = view.manifest_of(data.run)
    target = view.look_up(manifest, "target", "name")
    return {
        "name": PurePath(str(target or data.inspection.path)).name,
        "path": data.inspection.path,
        "figures": view.figures(data),
        "facts": view.facts(data),
        "semantics": _items(view.look_up(manifest, "semantics")),
        "settings": _items(view.look_up(manifest, "settings")),
        "sources": view.share_rows(found.sources, data.footer.depth),
        "scripts": view.share_rows(found.scripts, data.footer.depth),
        "finish": view.count_rows(data.inspection.finish_reasons),
        "policy": data.inspection.on_policy,
        "rejects": view.count_rows(data.inspection.rejects or {}),
        "rejects_known": data.inspection.rejects is not None,
        "rows_in": view.look_up(manifest, "rows_in"),
        "spreads": view.spread_rows(found),
        "degenerate": found.degenerate,
        "agreement": found.agreement,
        "agreement_tokens": view.percent(found.agreement.token_share, 2),
        "agreement_answers": view.percent(found.agreement.answer_share),
        "greedy": view.look_up(manifest, "sampling", "temperature") == 0,
        "acceptance": view.acceptance_rows(found),
        "norms": view.norm_rows(found),
        "channels": view.channel_rows(found),
        "columns": view.column_rows(data),
        "ratio": view.decimal(data.inspection.ratio),
        "cost": view.cost_rows(data),
        "verdict": view.verdict(data.validation),
        "samples": [sample_view.sample_view(sample, data.decode) for sample in found.samples],
        "unread": data.unread,
        "depth": data.footer.depth,
        "context_length": f"{data.footer.geometry.context_length:,}",
        "top_k": data.footer.top_k,
        "plots": {
            "lengths": plots.lengths(found, scale),
            "offsets": plots.offsets(found, scale),
            "context": plots.context(found, data.footer.geometry.context_length),
            "entropy_answer": plots.entropy(found, scale, in_answer=True),
            "entropy_row": plots.entropy(found, scale, in_answer=False),
            "masses_answer": plots.masses(found, in_answer=True),
            "masses_row": plots.masses(found, in_answer=False),
            "acceptance": plots.acceptance(found),
            "drafted": plots.drafted(found, scale),
            "norms": plots.norms(found.vectors),
            "channels": _channel_plots(found.vectors),
        },
    }


def _channel_plots(vectors: Sequence[VectorStats]) -> list[tuple[str, Markup]]:
    """A chart a head; the heads of a column share their scale."""
    peaks: dict[str, float] = {}
    for v in vectors:
        peak = float(np.maximum(np.abs(v.low), np.abs(v.high)).max())
        peaks[v.column] = max(peak, peaks.get(v.column, 0.0))
    return [(plots.vector_name(v), plots.channels(v, peaks[v.column])) for v in vectors]


def _items(value: Any) -> list[tuple[str, str]]:
    return [(str(k), str(v)) for k, v in value.items()] if isinstance(value, dict) else []


def _compared(shown: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """(name, a cell a run, whether they differ) of figures and facts."""
    tables = [
        {
            "Validator": "no findings" if run["verdict"]["ok"] else "findings",
            **{name: value for name, value, _ in run["figures"]},
            **dict(run["facts"]),
        }
        for run in shown
    ]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        cells = list(map(partial(_cell, name), tables))
        rows.append((name, cells, len(set(cells)) > 1))
    return rows


def _cell(name: str, table: dict[str, str]) -> str:
    return table.get(name, view.NOTHING)
