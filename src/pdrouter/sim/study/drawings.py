"""The study's pictures, as small SVG files. Needs matplotlib."""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdrouter.sim.study.found import Found
from pdrouter.sim.study.scenes import AGES, AGES_S, LOADS, OVERLOAD, POLICIES, Scene
from pdrouter.sim.virtual.pictures import draw_line, styles_of, svg_of, using_style

_PANEL_IN = (4.0, 2.9)


def pictures_of(found: Found) -> Iterator[tuple[str, str]]:
    """Return each picture's file name and SVG."""
    with using_style():
        yield "loads.svg", svg_of(_loads(found))
        yield "overload.svg", svg_of(_overload(found))
        yield "ages.svg", svg_of(_ages(found))


def _loads(found: Found) -> Figure:
    width, height = _PANEL_IN
    figure = Figure(figsize=(2 * width, 2 * height), layout="constrained")
    for axes, scene in zip(figure.subplots(2, 2).flat, LOADS, strict=True):
        _by_load(axes, found, scene, "ttft_p90_s")
        axes.set(title=scene.title, yscale="log", ylabel="TTFT p90, s")
    figure.axes[0].legend(fontsize=7)
    return figure


def _overload(found: Found) -> Figure:
    width, height = _PANEL_IN
    figure = Figure(figsize=(2 * width, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_load(left, found, OVERLOAD, "goodput_per_s")
    _by_load(right, found, OVERLOAD, "ttft_p50_s")
    left.set(ylabel="good answers/s")
    right.set(ylabel="TTFT p50, s", yscale="log")
    left.legend(fontsize=7)
    return figure


def _by_load(axes: Axes, found: Found, scene: Scene, figure: str) -> None:
    styles = styles_of(list(POLICIES))
    for name in scene.typed():
        values = [found.median(scene, load, name, figure) for load in scene.utilisation]
        draw_line(axes, [100 * load for load in scene.utilisation], values, name, styles[name])
    axes.set(xlabel="utilisation, %")


def _ages(found: Found) -> Figure:
    figure = Figure(figsize=_PANEL_IN, layout="constrained")
    axes = figure.subplots()
    readers: dict[str, list[float]] = {}
    for name in AGES.typed():
        value = found.median(AGES, AGES.utilisation[0], name, "ttft_p90_s")
        readers.setdefault(name.partition(",")[0], []).append(value)
    styles = styles_of(list(readers))
    for reader, values in readers.items():
        draw_line(axes, AGES_S, values, reader, styles[reader])
    axes.set(xlabel="age of reports, s", ylabel="TTFT p90, s", yscale="log")
    axes.legend(fontsize=7)
    return figure
