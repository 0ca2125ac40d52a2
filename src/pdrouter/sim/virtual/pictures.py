"""Pictures of runs as SVG, readable in print: lines differ by dash as well as by colour. Needs matplotlib."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdrouter.sim.virtual.plan import Plan
from pdrouter.sim.virtual.report import Row
from pdrouter.sim.virtual.sweep import BOUNDS, Result

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart by colour-blind readers. Source: Okabe and Ito 2008."""

_DASHES = ("-", "--", "-.", ":")
_WIDTH_IN, _HEIGHT_IN = 8.0, 3.2


def draw(rows: Sequence[Row], results: Sequence[Result], plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Return pictures, each with its title."""
    with using_style():
        if plan is not None:
            yield "Good answers by numbers of endpoints", svg_of(_plan(plan))
            return
        loads = list(dict.fromkeys(row.title for row in rows))
        if len(loads) > 1:
            yield "Good answers over load", svg_of(_over_load(rows, results))
        for load in loads:
            first = [result for result in results if result.title == load and result.curves is not None]
            yield f"Times, {load}", svg_of(_distributions(first))
        routed = [r for r in first if r.policy not in BOUNDS and r.curves is not None and r.curves.prefill_work]
        if routed:
            yield f"Prompt tokens computed, by prefill rank and time of arrival, {load}", svg_of(_heat(routed))
            yield f"Imbalance over time, {load}", svg_of(_imbalance(routed))


def using_style() -> AbstractContextManager[None]:
    """Let what is drawn meanwhile look alike."""
    style = {"svg.fonttype": "none", "svg.hashsalt": "pdrouter", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    return mpl.rc_context(style)  # type: ignore[arg-type]  # its keys are literals


def svg_of(figure: Figure) -> str:
    """Return a figure as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def styles_of(policies: Sequence[str]) -> Mapping[str, tuple[str, str]]:
    """Return a colour and a dash for each."""
    colours, dashes = cycle(_COLOURS), cycle(_DASHES)
    return {policy: (next(colours), next(dashes)) for policy in dict.fromkeys(policies)}


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, style: tuple[str, str]) -> None:
    """Draw one policy's line."""
    axes.plot(x, y, label=label, color=style[0], linestyle=style[1], linewidth=1.4)


def _over_load(rows: Sequence[Row], results: Sequence[Result]) -> Figure:
    rate = {result.title: result.rate_per_s for result in results}
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, style in styles_of([row.policy for row in rows]).items():
        mine = [row for row in rows if row.policy == policy]
        x = [rate[row.title] for row in mine]
        for axes, name, scale in ((left, "attainment", 100.0), (right, "goodput_per_s", 1.0)):
            values = [row.figures[name] for row in mine]
            draw_line(axes, x, [value.mean * scale for value in values], policy, style)
            low = [(value.mean - (value.half_width or 0.0)) * scale for value in values]
            high = [(value.mean + (value.half_width or 0.0)) * scale for value in values]
            axes.fill_between(x, low, high, color=style[0], alpha=0.15, linewidth=0)
    left.set(xlabel="arrivals/s", ylabel="good answers, %")
    right.set(xlabel="arrivals/s", ylabel="good answers/s")
    left.legend(fontsize=7)
    return figure


def _distributions(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = list(range(101))
    styles = styles_of([result.policy for result in results])
    for result in results:
        if result.curves is not None:
            draw_line(left, result.curves.ttft_s, shares, result.policy, styles[result.policy])
            draw_line(right, [1000 * s for s in result.curves.token_s], shares, result.policy, styles[result.policy])
    left.set(xscale="log", xlabel="time to first token, s", ylabel="answers, %")
    right.set(xlabel="time per token, ms")
    left.legend(fontsize=7)
    return figure


def _heat(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, 1.3 * len(results) + 0.5), layout="constrained")
    all_axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    most = max(max(map(max, r.curves.prefill_work), default=0) for r in results if r.curves is not None)
    image = None
    for axes, result in zip(all_axes, results, strict=True):
        curves = result.curves
        if curves is not None:
            end_s, ranks = curves.slot_s * len(curves.prefill_work[0]), len(curves.prefill_work)
            image = axes.imshow(
                curves.prefill_work, aspect="auto", cmap="cividis", vmin=0, vmax=most, extent=(0, end_s, ranks, 0)
            )
        axes.set(ylabel="rank")
        axes.set_title(result.policy, fontsize=8, loc="left")
        axes.grid(visible=False)
    all_axes[-1].set(xlabel="s")
    if image is not None:
        figure.colorbar(image, ax=list(all_axes), label="tokens")
    return figure


def _imbalance(results: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    styles = styles_of([result.policy for result in results])
    for result in results:
        if result.curves is not None:
            slots = list(zip(*result.curves.prefill_work, strict=True))
            values = [max(slot) * len(slot) / sum(slot) if sum(slot) else 1.0 for slot in slots]
            moments = [(number + 0.5) * result.curves.slot_s for number in range(len(slots))]
            draw_line(axes, moments, values, result.policy, styles[result.policy])
    axes.set(xlabel="s", ylabel="busiest rank / mean rank")
    axes.legend(fontsize=7)
    return figure


def _plan(plan: Plan) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, 4.5), layout="constrained")
    axes = figure.subplots()
    pairs = list(plan.attainment)
    image = axes.scatter(
        [pair.decodes for pair in pairs],
        [pair.prefills for pair in pairs],
        c=[100 * plan.attainment[pair] for pair in pairs],
        cmap="cividis",
        marker="s",
        s=160,
        vmin=0,
        vmax=100,
    )
    for pair in pairs:
        if plan.attainment[pair] >= plan.target:
            is_best = pair == plan.best
            axes.annotate(
                "best" if is_best else "ok", (pair.decodes, pair.prefills), ha="center", va="center", fontsize=6
            )
    axes.set(xlabel="decode endpoints", ylabel="prefill endpoints", xscale="log", yscale="log")
    figure.colorbar(image, ax=axes, label="good answers, %")
    return figure
