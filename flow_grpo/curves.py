"""Draw curves as inline SVG in the page's own colours, readable in light and in dark mode."""

import io
import itertools
import math
import re
from typing import NamedTuple

# matplotlib draws in #00fe00 + i, which then becomes the i-th of these CSS variables of the page.
VARIABLES = (
    "ink",
    "rule",
    "train",
    "held-out",
    "phase-0",
    "phase-1",
    "phase-2",
    "phase-3",
    "phase-4",
    "phase-5",
)
COLOURS = {name: f"#00fe{i:02x}" for i, name in enumerate(VARIABLES)}
NUM_PHASES = 6
FEW_POINTS = 40  # up to so many, each point is marked

_salts = itertools.count()


class Series(NamedTuple):
    """A curve: x in epochs, y with NaN where there is no value."""

    x: list[float]
    y: list[float]

    @property
    def drawable(self) -> bool:
        """Whether any value is there."""
        return any(not math.isnan(value) for value in self.y)


def _axes():
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.0, 2.3), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS["rule"])
    axes.tick_params(colors=COLOURS["ink"], labelsize=9, length=3, color=COLOURS["rule"])
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
    axes.yaxis.get_offset_text().set_color(COLOURS["ink"])
    axes.yaxis.get_offset_text().set_fontsize(9)
    axes.set_xlabel("epoch", fontsize=9, color=COLOURS["ink"])
    return figure, axes


def _svg(figure) -> str:
    """Return the figure as an <svg> element without a size, metadata or addresses of its own."""
    import matplotlib

    buffer = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": f"figure-{next(_salts)}"}
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg role="img" \1>', text, count=1)
    text = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick)_?\d*"', "", text
    )
    text = text.replace("xlink:href", "href")
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def _set_limits(axes, values: list[float], epochs: tuple[float, float]) -> None:
    """Leave room around a flat or single-point curve, and let one that reaches 0 stand on it."""
    low, high = axes.get_ylim()
    if min(values) == max(values):
        room = 0.1 * (abs(values[0]) or 1.0)
        low, high = values[0] - room, values[0] + room
    if min(values) >= 0:
        low = max(low, 0.0) if min(values) > 0 else -0.02 * high
    axes.set_ylim(low, high)
    room = 0.03 * (epochs[1] - epochs[0]) or 0.5
    axes.set_xlim(epochs[0] - room, epochs[1] + room)
    if epochs[0] == epochs[1]:
        axes.set_xticks([epochs[0]], [f"{epochs[0]:.0f}"])


def draw_curves(
    train: Series,
    held_out: Series | None = None,
    errors: list[float] | None = None,
    *,
    epochs: tuple[float, float],
) -> str:
    """Return an SVG of a curve and of held-out points with error bars; "" without any value.

    errors: a held-out point's standard error, NaN where unknown. epochs: the axis' first and last.
    """
    held_out = held_out or Series([], [])
    if not (train.drawable or held_out.drawable):
        return ""
    figure, axes = _axes()
    if train.drawable:
        few = len(train.x) <= FEW_POINTS
        marker, style = "." if few else "", {"linewidth": 1.3 if few else 0.8}
        style |= {"color": COLOURS["train"], "marker": marker, "markersize": 6}
        axes.plot(train.x, train.y, **style)
    if held_out.drawable:
        bars = [0.0 if math.isnan(e) else e for e in errors] if errors else None
        style = {"color": COLOURS["held-out"], "linewidth": 1.8, "marker": "o", "markersize": 4}
        axes.errorbar(held_out.x, held_out.y, yerr=bars, elinewidth=1.2, capsize=2.5, **style)
    values = [value for value in train.y + held_out.y if not math.isnan(value)]
    _set_limits(axes, values, epochs)
    return _svg(figure)


def draw_areas(parts: dict[str, Series]) -> tuple[str, list[str]]:
    """Return an SVG that stacks the parts over the epochs, and the names drawn, bottom first.

    The SVG is "" where no part has a value. A part without a value in an epoch has height 0 there.
    """
    drawn = [name for name, series in parts.items() if series.drawable][:NUM_PHASES]
    if not drawn:
        return "", []
    epochs = sorted({x for name in drawn for x in parts[name].x})
    columns = []
    for name in drawn:
        sums = dict.fromkeys(epochs, 0.0)
        for x, y in zip(*parts[name], strict=True):
            sums[x] += 0.0 if math.isnan(y) else y
        columns.append([sums[x] for x in epochs])
    figure, axes = _axes()
    edges = [*epochs, epochs[-1] + 1]
    colours = [COLOURS[f"phase-{i}"] for i in range(len(drawn))]
    heights = [[*column, column[-1]] for column in columns]
    axes.stackplot(edges, heights, colors=colours, step="post", linewidth=0)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    return _svg(figure), drawn
