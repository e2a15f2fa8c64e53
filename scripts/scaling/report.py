"""Results of scaling_test.py as text, as JSON, as a plot and as an HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from scaling.models import Link, Prediction
from scaling.results import Results
from scaling.runs import PHASES, Row
from trainer.files import write_atomically

TEMPLATE = Path(__file__).resolve().with_name("page.html")
_RUN_HEAD = ("shape", "strategy", "scaling", "batch", "samples/s", "min-max", "epoch s", "speed-up", "efficiency")
_STEP_HEAD = ("shape", "strategy", "scaling", "step ms", *PHASES, "hidden beside compute", "input share")
_PREDICTION_HEAD = (
    "shape",
    "strategy",
    "scaling",
    "model",
    "exchange ms",
    "waiting ms",
    "predicted samples/s",
    "measured",
    "error",
)


def render_text(results: Results) -> str:
    """Return all results as text for a terminal; the tables are Markdown."""
    parts = ["\n".join(f"{name}: {fact}" for name, fact in results.facts().items())]
    for title, head, body in tables(results):
        if body:
            parts.append(f"{title}\n\n{markdown_table(head, body)}")
    parts += [text for _, _, text in results.advice()]
    parts += trial_lines(results)
    if results.problems():
        parts.append("\n".join(["Failures:", *results.problems()]))
    if not results.larger():
        parts.append("No link between hosts was measured, so larger numbers of hosts are not predicted.")
    if results.interrupted:
        parts.append("Interrupted: this is what was measured until then.")
    return "\n\n".join(parts)


def tables(results: Results) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Return title, column names and rows of each table."""
    rows = results.rows()
    return [
        ("Measured (medians)", _RUN_HEAD, [_run_cells(row) for row in rows]),
        ("Phases of a step (ms, mean over ranks)", _STEP_HEAD, [_step_cells(row) for row in rows]),
        (
            "Network (measured with an all-reduce between two ranks)",
            ("ranks", "strategy", "small message ms", "Gbit/s each way"),
            [
                _link_cells(where, name, link)
                for name, network in results.networks.items()
                for where, link in (
                    ("on one host", network.local),
                    ("on two hosts", network.remote),
                    ("in a ring", network.one_way),
                )
                if link is not None
            ],
        ),
        (
            "Predictions, compared with the measurement",
            _PREDICTION_HEAD,
            [_prediction_cells(row) for row in rows if row.predicted],
        ),
        (
            "Predicted for more hosts of the same kind",
            ("ranks", "shape", "model", "over the links of", "exchange ms", "waiting ms", "step ms", "efficiency"),
            [_larger_cells(*prediction) for prediction in results.larger()],
        ),
    ]


def trial_lines(results: Results) -> list[str]:
    """Return a line for each advice that was tried, with its predicted and its measured gain."""
    lines = []
    for run, trial in results.tried:
        if not run.timing:  # listed as a failure
            continue
        gain = run.samples_per_s / trial.base
        lines.append(
            f"Tried on {run.shape} under {run.strategy}: {' '.join(run.options)}; predicted {trial.advice.gain:.2f} ×, "
            f"measured {gain:.2f} × ({trial.base:,.0f} to {run.samples_per_s:,.0f} samples/s); "
            f"prediction off by {trial.advice.gain / gain - 1:+.0%}"
        )
    return lines


def write_json(path: Path, results: Results) -> None:
    """Write all runs with their timings, and everything computed from them."""
    content = {
        "where": results.facts(),
        "unit": "seconds, bytes, samples/s",
        "interrupted": results.interrupted,
        "networks": {name: asdict(network) for name, network in results.networks.items()},
        "beside_compute": [
            {"shape": str(shape), "strategy": strategy, "batch": batch, "seconds": seconds}
            for (shape, strategy, batch), seconds in results.beside_compute.items()
        ],
        "low_rank": asdict(results.low_rank) if results.low_rank else None,
        "alone": [_entry(run) for run in results.baselines.single_rank_runs()],
        "side_by_side": [_entry(run) for run in results.baselines.side_by_side_runs()],
        "runs": [_entry(run) for run in results.runs],
        "rows": [{**asdict(row), "error": row.error} for row in results.rows()],
        "larger": [
            {"strategy": strategy, **asdict(prediction), "efficiency": efficiency}
            for strategy, prediction, efficiency in results.larger()
        ],
        "advice": [{"text": text, "found": [asdict(item) for item in items]} for _, items, text in results.advice()],
        "tried": [{**_entry(run), "promised": asdict(trial)} for run, trial in results.tried],
        "problems": results.problems(),
    }
    write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")


def write_page(path: Path, results: Results) -> None:
    """Write a self-contained HTML page, without scripts and without external resources."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(TEMPLATE.read_text()).render(
        facts=results.facts(),
        tables=[table for table in tables(results) if table[2]],
        advice=[text for _, _, text in results.advice()],
        trials=trial_lines(results),
        problems=results.problems(),
        interrupted=results.interrupted,
        plot=Markup(_svg(_curves(results))),  # noqa: S704 (our own SVG)
    )
    write_atomically(path, page)


def draw(path: Path, results: Results) -> None:
    """Draw samples/s and efficiency against ranks, with the ideal line."""
    write_atomically(path, _svg(_curves(results)))


def _curves(results: Results) -> Any:
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    rows = results.rows()
    ranks = sorted({row.shape.ranks for row in rows})
    alone = [row for row in rows if row.shape.ranks == 1]
    if alone:
        ideal = [alone[0].measured.samples_per_s * count for count in ranks]
        left.plot(ranks, ideal, color="grey", linestyle=":", label="ideal")
    right.axhline(100, color="grey", linestyle=":")
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.shape.ranks > 1:
            lines.setdefault((row.strategy, row.scaling), []).append(row)
    for (strategy, scaling), line_rows in lines.items():
        # Of shapes with the same number of ranks, the one on fewer hosts comes first.
        line = sorted([*alone, *line_rows], key=lambda row: (row.shape.ranks, row.shape.hosts))
        points, style = [row.shape.ranks for row in line], "-" if scaling == "weak" else "--"
        rates = [row.measured.samples_per_s for row in line]
        (drawn,) = left.plot(points, rates, style, marker="o", label=f"{strategy}, {scaling}")
        right.plot(points, [_percent(row) for row in line], style, marker="o", color=drawn.get_color())
    for row in next(iter(lines.values()), []):  # one annotation serves all lines
        for axes, value in ((left, row.measured.samples_per_s), (right, _percent(row))):
            axes.annotate(str(row.shape), (row.shape.ranks, value), xytext=(5, 5), textcoords="offset points")
    left.set(title="Throughput (higher is better)", ylabel="samples/s", xlabel="ranks", ylim=(0, None))
    right.set(title="Efficiency (relative to as many single ranks)", ylabel="%", xlabel="ranks", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(ranks)
        axes.grid(alpha=0.3)
    left.legend()
    return figure


def _percent(row: Row) -> float:
    return math.nan if row.measured.efficiency is None else 100 * row.measured.efficiency


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scaling"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def _svg(figure: Any) -> str:
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    _pyplot().close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded for a terminal; the first three columns are left-aligned."""
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    align: list[Callable[[str, int], str]] = [str.ljust, str.ljust, str.ljust, *[str.rjust] * (len(head) - 3)]
    lines = [
        "| " + " | ".join(put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)) + " |"
        for line in (head, *body)
    ]
    rule = (
        "|"
        + "|".join(
            "-" * (width + 1) + ("-" if put is str.ljust else ":") for put, width in zip(align, widths, strict=True)
        )
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def _run_cells(row: Row) -> Sequence[str]:
    return (
        str(row.shape),
        row.strategy,
        row.scaling,
        str(row.batch),
        f"{row.measured.samples_per_s:,.0f}",
        f"{row.least:,.0f}-{row.most:,.0f}",
        f"{row.epoch_s:.2f}",
        f"{row.speedup:.2f}" if row.speedup else "",
        "" if row.measured.efficiency is None else f"{row.measured.efficiency:.0%}",
    )


def _step_cells(row: Row) -> Sequence[str]:
    measured = row.measured
    milliseconds = (f"{getattr(measured, name) * 1e3:.2f}" for name in ("step", *PHASES, "hidden"))
    return (str(row.shape), row.strategy, row.scaling, *milliseconds, f"{measured.input / measured.step:.0%}")


def _larger_cells(strategy: str, prediction: Prediction, efficiency: float) -> tuple[str, ...]:
    milliseconds = (f"{seconds * 1e3:.3g}" for seconds in (prediction.exchange, prediction.waiting, prediction.step))
    return (
        str(prediction.shape.ranks),
        str(prediction.shape),
        prediction.model,
        strategy,
        *milliseconds,
        f"{efficiency:.0%}",
    )


def _prediction_cells(row: Row) -> Sequence[str]:
    assert row.predicted is not None  # noqa: S101 (the caller has checked)
    return (
        str(row.shape),
        row.strategy,
        row.scaling,
        row.predicted.model,
        f"{row.predicted.exchange * 1e3:.3g}",
        f"{row.predicted.waiting * 1e3:.3g}",
        f"{row.predicted_samples_per_s:,.0f}",
        f"{row.measured.samples_per_s:,.0f}",
        f"{row.error:+.0%}",
    )


def _link_cells(where: str, strategy: str, link: Link) -> Sequence[str]:
    return (where, strategy, f"{link.latency_s * 1e3:.3g}", f"{link.gbit_per_s:.3g}")


def _entry(run: Any) -> dict[str, Any]:
    return {**asdict(run), "shape": str(run.shape), "samples_per_s": run.samples_per_s}
