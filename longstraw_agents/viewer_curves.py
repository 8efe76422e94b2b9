"""Curves and the time line of a run, as SVG in the page: no script, no library.

Idea: a picture is made of what the receipts say, and says in words what it shows: its title holds every series' first and last
value, so that it can be read without being seen. Series differ by dashes too, not by colour alone.

Vocabulary
    reading   the numbers of one step that curves are made of, flat: collect/reward, train/kl_old, phases/replay/peak_mib
    series    (step, value) pairs under one name
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from longstraw_agents.decoding import printable
from longstraw_agents.metrics import flatten
from longstraw_agents.receipts import metrics_of
from longstraw_agents.storage import EvaluationRow, StepRow
from longstraw_agents.storage.browse import Gathered
from longstraw_agents.terminal import cell

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 170, 52, 20, 10, 8
MOST_POINTS = 400  # of one series; more are thinned out to each stretch's lowest and highest
STYLES = 8  # classes s0 to s7

PHASES = ("segment", "reference", "score", "replay", "step")  # in the order in which an update runs them; JSON keeps none

Scale = Callable[[float], float]  # a value to pixels


@dataclass(frozen=True)
class Reading:
    """A step without the bulk of its receipt. `values` as in the module's head; seconds: of its phases together."""

    step: int
    created: float
    first_version: int
    last_version: int
    groups: int
    gradient: str
    values: Mapping[str, float]
    phases: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """What the update took."""
        return sum(self.phases.values())

    @classmethod
    def of(cls, row: StepRow) -> Reading:
        """Of a receipt by whomever: what it lacks is left out."""
        receipt = {"collected": {}, "tokens": {}, "phases": {}, "steps": []} | dict(row.receipt)
        ran = sorted(receipt["phases"].items(), key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else len(PHASES))
        phases = {name: float(phase["seconds"]) for name, phase in ran}
        values = {name: value for name, value in flatten(metrics_of(receipt)) if math.isfinite(value)}
        gradient = str(receipt.get("gradient", "unknown"))
        return cls(
            row.step, row.created, row.first_version, row.last_version, len(row.group_ids), gradient, values, phases
        )


@dataclass(frozen=True)
class Series:
    """(step, value) pairs, ascending."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """Series that share their axes."""

    title: str
    unit: str = ""
    series: tuple[Series, ...] = field(default_factory=tuple)


#: Title, unit, and the readings' names that begin so.
_CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "", ("collect/reward",)),
    ("Reward parts", "", ("collect/reward_parts/",)),
    ("Success", "", ("collect/success",)),
    ("KL", "nats", ("train/kl_old", "train/kl_reference")),
    ("Clip fraction", "", ("train/clip_fraction", "train/clip_low_fraction", "train/clip_high_fraction")),
    ("Entropy", "nats", ("train/entropy", "collect/entropy")),
    ("Mismatch of sampler and trainer", "nats", ("train/mismatch_kl",)),
    ("Gradient norm", "", ("train/gradient_norm",)),
    ("Tokens", "", ("collect/tokens", "tokens/loss", "tokens/tree_targets")),
)


def charts(readings: Sequence[Reading], gathered: Sequence[Gathered], evaluations: Sequence[EvaluationRow]) -> list[Chart]:
    """The curves of one run. Evaluations stand at the step whose weights they are of."""
    made = []
    for title, unit, wanted in _CHARTS:
        names = sorted({name for r in readings for name in r.values if _belongs(name, wanted)})
        series = [Series(_short(name), _points(readings, name)) for name in names]
        if title == "Success":
            series += _evaluated(readings, evaluations)
        made.append(Chart(title, unit, tuple(series)))
    trained = [(float(r.step), r.values["tokens/trajectories"] / r.seconds) for r in readings if _was_timed(r)]
    collected = [(float(g.step), g.tokens / (g.ended - g.began)) for g in gathered if g.ended > g.began]
    made.append(Chart("Tokens per second", "", (Series("collected", tuple(collected)), Series("trained", tuple(trained)))))
    phases = sorted({name for r in readings for name in r.values if name.endswith(("/peak_mib", "/gpu_peak_mib"))})
    made.append(Chart("Memory by phase", "MiB", tuple(Series(_phase(name), _points(readings, name)) for name in phases)))
    return made


def beside(left: Sequence[Chart], right: Sequence[Chart], names: tuple[str, str]) -> list[Chart]:
    """The charts of two runs, each with both runs' series."""
    both = []
    for a, b in zip(left, right, strict=True):
        series = [Series(f"{name}: {s.name}", s.points) for name, chart in zip(names, (a, b), strict=True) for s in chart.series]
        both.append(Chart(a.title, a.unit, tuple(series)))
    return both


def _belongs(name: str, wanted: Iterable[str]) -> bool:
    return any(name == prefix or (prefix.endswith("/") and name.startswith(prefix)) for prefix in wanted)


def _short(name: str) -> str:
    return name.split("/", 1)[1].removeprefix("reward_parts/").replace("_", " ")


def _phase(name: str) -> str:
    _, phase, kind = name.rsplit("/", 2)
    return f"{phase}, GPU" if kind.startswith("gpu") else phase


def _points(readings: Sequence[Reading], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((float(r.step), r.values[name]) for r in readings if name in r.values)


def _was_timed(reading: Reading) -> bool:
    return reading.seconds > 0 and "tokens/trajectories" in reading.values


def _evaluated(readings: Sequence[Reading], evaluations: Sequence[EvaluationRow]) -> list[Series]:
    step_of = {r.last_version: r.step for r in readings}
    points: dict[str, dict[int, float]] = {}
    own = [row for row in evaluations if row.name in ("before", "after") or row.name.startswith("update ")]
    for row in own:  # and no controls
        for mode, values in row.metrics.items():
            success = values.get("score", {}).get("success") if isinstance(values, Mapping) else None
            if isinstance(success, (int, float)):
                points.setdefault(mode, {})[step_of.get(row.policy_version, 0)] = float(success)
    return [Series(f"held-out, {mode}", tuple((float(s), v) for s, v in sorted(of.items()))) for mode, of in points.items()]


def draw(chart: Chart) -> Markup:
    """The chart as a figure with a legend; a line of text where there is nothing to draw."""
    shown = [series for series in chart.series if series.points]
    caption = Markup("<figcaption>{}{}</figcaption>").format(chart.title, f" ({chart.unit})" if chart.unit else "")
    if not shown:
        return Markup('<figure class="chart empty">{}<p>nothing recorded</p></figure>').format(caption)
    xs, ys = zip(*(point for series in shown for point in series.points), strict=True)
    low, high, left, right = min(ys), max(ys), min(xs), max(xs)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    right = right if right > left else left + 1
    x: Scale = lambda value: LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)
    y: Scale = lambda value: HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
    parts = [_axis(x, y, (left, max(xs)), (low, (low + high) / 2, high))]
    for index, series in enumerate(shown):
        points = thinned(series.points)
        line = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)
        parts.append(Markup('<polyline class="s{}" points="{}"/>').format(index % STYLES, line))
        if len(points) <= 60:
            dot = Markup('<circle class="s{}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}, step {:g}: {}</title></circle>')
            parts += [dot.format(index % STYLES, x(px), y(py), printable(series.name), px, cell(py)) for px, py in points]
    svg = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    picture = svg.format(WIDTH, HEIGHT, printable(_in_words(chart.title, shown)), Markup("").join(parts))
    return Markup('<figure class="chart">{}{}{}</figure>').format(caption, picture, _legend([s.name for s in shown]))


def _axis(x: Scale, y: Scale, ends: tuple[float, float], levels: Sequence[float]) -> Markup:
    lines = []
    for level in levels:
        rule = Markup('<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = Markup('<text x="{}" y="{:.1f}" class="tick y">{}</text>')
        lines += [rule.format(LEFT, WIDTH - RIGHT, y=y(level)), text.format(LEFT - 5, y(level) + 3, f"{level:.3g}")]
    for at, anchor in zip(dict.fromkeys(ends), ("start", "end"), strict=False):
        text = Markup('<text x="{:.1f}" y="{}" class="tick" text-anchor="{}">{:g}</text>')
        lines.append(text.format(x(at), HEIGHT - 5, anchor, at))
    return Markup("").join(lines)


def _in_words(title: str, series: Sequence[Series]) -> str:
    """What a chart shows, for those who do not see it."""
    told = [
        f"{s.name}: {cell(s.points[0][1])} at step {s.points[0][0]:g}, {cell(s.points[-1][1])} at step {s.points[-1][0]:g}"
        for s in series
    ]
    return f"{title}. " + "; ".join(told)


def _legend(names: Sequence[str]) -> Markup:
    swatch = '<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><line class="s{}" x1="0" x2="24" y1="4" y2="4"/></svg>'
    items = [Markup("<li>" + swatch + "<bdi>{}</bdi></li>").format(i % STYLES, printable(name)) for i, name in enumerate(names)]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most MOST_POINTS of them: the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST_POINTS:
        return points
    kept, size = [], math.ceil(2 * len(points) / MOST_POINTS)
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        value = lambda point: point[1]
        kept += sorted({min(stretch, key=value), max(stretch, key=value)})
    return kept


def sparkline(points: Sequence[float]) -> Markup:
    """A curve without axes, for a line of a table."""
    if len(points) < 2:
        return Markup("")
    low, span = min(points), (max(points) - min(points)) or 1.0
    line = " ".join(f"{60 * i / (len(points) - 1):.1f},{14 - 12 * (v - low) / span:.1f}" for i, v in enumerate(points))
    svg = Markup('<svg class="spark" viewBox="0 0 60 16" aria-hidden="true"><polyline class="s0" points="{}"/></svg>')
    return svg.format(line)


def time_line(readings: Sequence[Reading], gathered: Sequence[Gathered], link: str) -> Markup:
    """When these steps' groups were collected, and when their phases ran: a row each, from left to right.

    link: the address that a step's number is appended to.
    """
    if not readings:
        return Markup("<p>No step is committed yet.</p>")
    by_step = {g.step: g for g in gathered}
    begins = [r.created - r.seconds for r in readings] + [by_step[r.step].began for r in readings if r.step in by_step]
    first, last = min(begins), max(r.created for r in readings)
    width, row = 960, 18
    x: Scale = lambda time: 60 + (time - first) / ((last - first) or 1.0) * (width - 70)
    names = list(dict.fromkeys(name for r in readings for name in r.phases))
    parts = []
    for index, reading in enumerate(readings):
        parts.append(_step_row(reading, by_step.get(reading.step), names, x, index * row, link))
    height = len(readings) * row + 22
    text = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{:,.0f} s</text>')
    parts += [text.format(60, height - 5, "start", 0), text.format(width - 10, height - 5, "end", last - first)]
    label = f"Time line of {len(readings)} steps over {last - first:,.0f} seconds; the table below has the same numbers."
    svg = Markup('<svg class="time-line" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>')
    return svg.format(width, height, label, Markup("").join(parts)) + _phase_legend(names)


def _step_row(reading: Reading, of: Gathered | None, names: Sequence[str], x: Scale, y: int, link: str) -> Markup:
    bar = Markup('<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="12"><title>{}</title></rect>')
    rects = []
    if of is not None:
        seconds = of.ended - of.began
        rects.append(bar.format("collect", x(of.began), y + 3, max(x(of.ended) - x(of.began), 1), f"collected: {seconds:,.1f} s"))
    at = reading.created - reading.seconds
    for name, seconds in reading.phases.items():
        size = max(x(at + seconds) - x(at), 0.5)
        rects.append(bar.format(f"p{names.index(name) % STYLES}", x(at), y + 3, size, f"{printable(name)}: {seconds:,.2f} s"))
        at += seconds
    told = f"step {reading.step}: {reading.seconds:,.1f} s of training"
    text = Markup('<a href="{}{}" aria-label="{}"><text x="54" y="{}" class="tick y">{}</text></a>')
    return text.format(link, reading.step, told, y + 13, reading.step) + Markup("").join(rects)


def _phase_legend(names: Sequence[str]) -> Markup:
    items = [("collect", "collected")] + [(f"p{i % STYLES}", printable(name)) for i, name in enumerate(names)]
    swatch = '<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><rect class="{}" width="24" height="8"/></svg>'
    shown = [Markup("<li>" + swatch + "{}</li>").format(kind, escape(name)) for kind, name in items]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(shown))
