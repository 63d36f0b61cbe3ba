"""What a matplotlib figure shows, as data, in E2B's format for charts.

Only what the figure holds is read; nothing is drawn anew. A figure that is too
large for a client to want as data has none, and one that cannot be understood
is "unknown". rich.py loads this with the first figure that is shown.
"""

import math
import re

from matplotlib import dates, rcParams
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle, Wedge
from matplotlib.text import Text
from matplotlib.ticker import ScalarFormatter

MAX_POINTS = 100_000  # of all series of a figure
MAX_AXES = 100
MAX_TICKS = 1000
MAX_TEXT = 10_000  # characters of a label
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


class TooLarge(Exception):
    pass


def of(figure):
    """Returns the chart of a figure; {} if nothing was drawn, None if it is too large to be data."""
    axes = figure.get_axes()
    if not any(ax.has_data() for ax in axes):
        return {}
    try:
        if len(axes) > MAX_AXES:
            raise TooLarge
        budget = Budget()
        if len(axes) == 1:
            return chart(axes[0], budget)
        title = getattr(figure, "_suptitle", None)
        return {"type": "superchart", "title": text(title and title.get_text()), "elements": [chart(ax, budget) for ax in axes]}
    except TooLarge:
        return None


class Budget:
    def __init__(self):
        self.left = MAX_POINTS

    def take(self, n):
        self.left -= n
        if self.left < 0:
            raise TooLarge


def chart(ax, budget):
    kind = kind_of(ax)
    out = {"type": kind, "title": text(ax.get_title())}
    if kind in PLANAR:
        out["x_label"], out["y_label"] = text(ax.get_xlabel()), text(ax.get_ylabel())
        out["x_unit"], out["y_unit"] = unit(out["x_label"]), unit(out["y_label"])
    read = READ.get(kind)
    if read is None:
        out["elements"] = []
    else:
        read(ax, out, budget)
    return out


def kind_of(ax):
    if getattr(ax, "name", "") == "3d":
        return "unknown"
    things = [t for t in ax._children if not isinstance(t, Text)]
    if all(isinstance(t, Line2D) for t in things):
        return "line"
    if all(isinstance(t, (PathPatch, Line2D)) for t in things):
        return "box_and_whisker"
    things = [t for t in things if not (isinstance(t, Line2D) and is_grid(t))]
    for kind, of_it in (("scatter", PathCollection), ("pie", Wedge), ("bar", Rectangle)):
        if all(isinstance(t, of_it) for t in things):
            return kind
    return "unknown"


def is_grid(line):
    """Reports whether a line is straight along an axis, as those that guide the eye are."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == len(y) == 2 and bool(x[0] == x[1] or y[0] == y[1])


# --- series of points ----------------------------------------------------------


def points_of(ax, out):
    for name, axis, scale in (("x", ax.xaxis, ax.get_xscale()), ("y", ax.yaxis, ax.get_yscale())):
        ticks = list(axis.get_ticklocs())[:MAX_TICKS]
        labels = [text(t.get_text()) or "" for t in axis.get_ticklabels()[:MAX_TICKS]]
        if is_date(axis):
            out[f"{name}_ticks"] = [date(t) for t in ticks]
            scale = "datetime"
        else:
            out[f"{name}_ticks"] = [value(t) for t in ticks]
            # One label for each of 0, 1, 2 …, and none of them the number itself.
            if scale == "linear" and ticks and len(ticks) == len(labels) and all(t == i and s != str(i) for i, (t, s) in enumerate(zip(ticks, labels))):
                scale = "categorical"
        out[f"{name}_tick_labels"] = labels
        out[f"{name}_scale"] = scale


def is_date(axis):
    return isinstance(converter(axis), (dates.DateConverter, dates._SwitchableDateConverter))


def converter(axis):
    # A method from matplotlib 3.10 on.
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def line(ax, out, budget):
    points_of(ax, out)
    out["elements"] = []
    for one in ax.get_lines():
        if is_grid(one):
            continue
        x, y = one.get_xdata(), one.get_ydata()
        budget.take(len(x))
        out["elements"].append({"label": label(one, "Line"), "points": [[value(a), value(b)] for a, b in zip(x, y)]})


def scatter(ax, out, budget):
    points_of(ax, out)
    x, y = (date if is_date(axis) else value for axis in (ax.xaxis, ax.yaxis))
    out["elements"] = []
    for one in ax.collections:
        points = one.get_offsets()
        budget.take(len(points))
        out["elements"].append({"label": label(one, "Group"), "points": [[x(a), y(b)] for a, b in points]})


def label(artist, kind):
    """Returns a series' label; matplotlib's own of those that have none begin with an underscore."""
    s = text(artist.get_label()) or ""
    m = re.fullmatch(r"_(?:child|container)(\d+)", s)
    return f"{kind} {m.group(1)}" if m else s


# --- bars, boxes and pieces ------------------------------------------------------


def bar(ax, out, budget):
    out["elements"] = []
    groups = [c for c in ax.containers if isinstance(c, BarContainer)]
    flat = bool(groups) and all(g.orientation == "horizontal" for g in groups)
    if flat:
        turn(out)
    for group in groups:
        budget.take(len(group))
        lies = group.orientation == "horizontal"
        name = namer(ax.yaxis if lies else ax.xaxis)
        for r in group:
            at = r.get_y() + r.get_height() / 2 if lies else r.get_x() + r.get_width() / 2
            out["elements"].append({"label": name(at), "group": label(group, "Group"), "value": value(r.get_width() if lies else r.get_height())})


def turn(out):
    """Exchanges what belongs to the axes: of bars that lie, x is what they name."""
    for what in ("label", "unit"):
        out["x_" + what], out["y_" + what] = out["y_" + what], out["x_" + what]


def namer(axis):
    """Returns a function from a place on an axis to the name that it has there."""
    ticks = list(zip(axis.get_ticklocs(), axis.get_ticklabels()))[:MAX_TICKS]
    names = [(float(t), text(s.get_text()) or "") for t, s in ticks]
    if is_date(axis):
        return date
    named = not isinstance(axis.get_major_formatter(), ScalarFormatter)
    apart = min((abs(b[0] - a[0]) for a, b in zip(names, names[1:])), default=1)

    def name(at):
        # Bars of several groups stand beside their tick.
        if named and names:
            tick, s = min(names, key=lambda n: abs(n[0] - at))
            if abs(tick - at) <= apart / 2:
                return s
        return f"{rounded(at):g}"

    return name


def box_and_whisker(ax, out, budget):
    boxes = []
    lies = None
    lines = [(list(map(float, one.get_xdata())), list(map(float, one.get_ydata()))) for one in ax.get_lines() if numbers(one) and not is_mean(one)]
    budget.take(sum(len(x) for x, _ in lines))
    for patch in ax.patches:
        v = patch.get_path().vertices
        x, y = sorted(map(float, v[:, 0])), sorted(map(float, v[:, 1]))
        if lies is None:
            # The median crosses the box from one side to the other.
            lies = not any(len(a) == 2 and near(b[0], b[1]) and near(min(a), x[0]) and near(max(a), x[-1]) and y[0] <= b[0] <= y[-1] for a, b in lines)
        if lies:
            x, y = y, x
        boxes.append({"from": x[0], "to": x[-1], "low": y[0], "high": y[-1]})
    name = namer(ax.yaxis if lies else ax.xaxis)
    if lies:
        turn(out)
    out["elements"] = []
    for b in boxes:
        median = lower = upper = None
        outliers = []
        middle = (b["from"] + b["to"]) / 2
        for a, c in lines:
            if lies:
                a, c = c, a
            if len(a) == 2 and near(c[0], c[1]):  # across: the median, or the end of a whisker
                if near(min(a), b["from"]) and near(max(a), b["to"]) and b["low"] <= c[0] <= b["high"]:
                    median = c[0] if median is None else median
            elif len(a) == 2 and near(a[0], a[1]) and near(a[0], middle):  # along: a whisker
                if near(max(c), b["low"]):
                    lower = min(c)
                elif near(min(c), b["high"]):
                    upper = max(c)
        ends = [p for p in (lower, upper, b["low"], b["high"]) if p is not None]
        for a, c in lines:
            if lies:
                a, c = c, a
            # What is beyond the whiskers is an outlier; what is not may be the mean.
            if a and all(near(p, middle) for p in a) and not any(min(ends) <= p <= max(ends) or any(near(p, e) for e in ends) for p in c):
                outliers += c
        out["elements"].append({
            "label": name(middle), "min": value(rounded(b["low"] if lower is None else lower)), "first_quartile": value(rounded(b["low"])),
            "median": None if median is None else value(rounded(median)), "third_quartile": value(rounded(b["high"])),
            "max": value(rounded(b["high"] if upper is None else upper)), "outliers": [value(rounded(p)) for p in outliers],
        })  # fmt: skip


def is_mean(one):
    """Reports whether a line is the mark of a mean, which boxplot(showmeans=True) puts beside the outliers."""
    mean, outlier = rcParams["boxplot.meanprops.marker"], rcParams["boxplot.flierprops.marker"]
    return mean != outlier and one.get_marker() == mean


def numbers(one):
    try:
        return all(isinstance(float(v), float) for data in (one.get_xdata(), one.get_ydata()) for v in data[:1])
    except (TypeError, ValueError):
        return False


def near(a, b):
    return math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-9)


def pie(ax, out, budget):
    budget.take(len(ax.patches))
    # matplotlib computes the angles in single precision.
    out["elements"] = [{"label": text(w.get_label()) or "", "angle": abs(rounded(float(w.theta2) - float(w.theta1))), "radius": value(w.r)} for w in ax.patches]


PLANAR = {"line", "scatter", "bar", "box_and_whisker"}
READ = {"line": line, "scatter": scatter, "bar": bar, "box_and_whisker": box_and_whisker, "pie": pie}

# --- values --------------------------------------------------------------------


def text(s):
    """Returns a text, or None if it is empty."""
    if not s:
        return None
    s = str(s)
    if len(s) > MAX_TEXT:
        raise TooLarge
    return s


def unit(s):
    m = UNIT.search(s or "")
    return (m.group(1) or m.group(2)) if m else None


def value(v):
    """Returns a number or a text for JSON; dates in ISO 8601, null for what is no number."""
    if type(v).__module__ == "numpy" and type(v).__name__ == "datetime64":
        return str(v.astype("datetime64[s]")) if str(v) != "NaT" else None
    if hasattr(v, "to_timestamp"):  # a period of pandas'
        v = v.to_timestamp()
    if hasattr(v, "isoformat"):
        return v.isoformat()
    if hasattr(v, "item"):
        v = v.item()
    if isinstance(v, (bool, int)):
        return v
    if isinstance(v, float):
        return v if math.isfinite(v) else None
    if isinstance(v, str):
        return text(v) or ""
    try:
        v = float(v)
    except (TypeError, ValueError):
        return None
    return v if math.isfinite(v) else None


def date(v):
    try:
        return dates.num2date(v).isoformat()
    except (ValueError, OverflowError, TypeError):
        return None


def rounded(v):
    """Returns v without the noise of its computation: eight digits after the first, fewer of large numbers."""
    v = float(v)
    if not math.isfinite(v) or v == 0:
        return v
    return float(f"{v:.{max(1, 8 - math.floor(math.log10(abs(v))))}g}")
