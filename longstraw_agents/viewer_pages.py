"""What each page of the viewer shows: from the store to the values that a template lays out.

Idea: a page reads what it shows and no more. What is committed never changes, so a step's numbers are read once and kept.

Vocabulary
    stamp    a text that changes when a page's content does; the page asks for it every two seconds while it is live
    folded   an observation or action of which a page shows the beginning and the end alone
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longstraw_agents import viewer_curves as curves
from longstraw_agents import viewer_tokens, viewer_tree
from longstraw_agents.decoding import Decoder, decoder_of
from longstraw_agents.errors import ConfigError, NotStoredError
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig
from longstraw_agents.storage import GroupRow, RunRow, StepRow, Store, TrajectoryRow, browse
from longstraw_agents.store_tree import stored_tree
from longstraw_agents.viewer_search import search

STEPS, GROUPS, TURNS, TOKENS, TABLE = 25, 50, 20, 2048, 256  # rows, or tokens, of one page
FOLD = 320  # tokens of an observation shown whole; of a longer one half as many at each end
FOLD_ACTION = 768
MOST_IN_TREE = 128  # trajectories
LANES = 40  # steps of the time line

Values = dict[str, Any]
Query = Mapping[str, str]


class Site:
    """A store and what was read of it once and for all. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._readings: dict[str, list[curves.Reading]] = {}
        self._decoders: dict[str, Decoder] = {}
        self.receipt = lru_cache(maxsize=16)(self._receipt)
        self.tree = lru_cache(maxsize=32)(self._tree)

    def readings(self, run_id: str) -> list[curves.Reading]:
        """All steps of a run; only those that are new are read."""
        with self._lock:
            known = self._readings.setdefault(run_id, [])
            first = known[-1].step + 1 if known else 0
            known += [curves.Reading.of(row) for row in self.store.steps(run_id, first=first)]
            return list(known)

    def decoder(self, run: RunRow) -> Decoder:
        """The run's tokenizer, loaded once."""
        with self._lock:
            if run.run_id not in self._decoders:
                name = json.dumps(run.config.get("model") if isinstance(run.config, Mapping) else None, sort_keys=True)
                if name not in self._decoders:
                    self._decoders[name] = decoder_of(run.config)
                self._decoders[run.run_id] = self._decoders[name]
            return self._decoders[run.run_id]

    def _tree(self, trajectory_ids: tuple[str, ...], segmenter: SegmenterConfig) -> PrefixTree:
        return stored_tree(self.store, trajectory_ids, segmenter).tree

    def _receipt(self, run_id: str, step: int) -> StepRow:
        found = self.store.steps(run_id, first=step, count=1)
        if not found or found[0].step != step:
            raise NotStoredError(f"run {run_id} has no step {step}")
        return found[0]


@dataclass(frozen=True)
class Paging:
    """One page of a list of `total`: items [first, last). before, behind: where the neighbouring ones begin, if there are any."""

    first: int
    last: int
    total: int
    size: int

    @property
    def before(self) -> int | None:
        """Where the page before begins."""
        return max(self.first - self.size, 0) if self.first else None

    @property
    def behind(self) -> int | None:
        """Where the next page begins."""
        return self.last if self.last < self.total else None

    @classmethod
    def of(cls, first: int, total: int, size: int) -> Paging:
        """The page from `first` on, or the last one where that lies behind the end."""
        first = min(max(first, 0), max(total - 1, 0))
        return cls(first, min(first + size, total), total, size)


def number(query: Query, name: str, default: int = 0) -> int:
    """A whole number of the query. Raises ConfigError for something else."""
    text = query.get(name, "") or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)


def choice(query: Query, name: str, choices: Sequence[str]) -> str:
    """One of `choices`, the first by default. Raises ConfigError."""
    value = query.get(name) or choices[0]
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value[:40]!r}")
    return value


# ---- runs


def runs_page(site: Site, query: Query) -> Values:
    """All runs, newest first."""
    counts = browse.counts(site.store)
    rows = []
    for run in reversed(site.store.runs()):
        readings = site.readings(run.run_id)
        rewards = [r.values["collect/reward"] for r in readings if "collect/reward" in r.values]
        rows.append(
            {
                "run": run,
                "counts": counts.get(run.run_id, browse.RunCounts()),
                "reward": rewards[-1] if rewards else None,
                "success": readings[-1].values.get("collect/success") if readings else None,
                "spark": curves.sparkline(rewards[-200:]),
            }
        )
    return {"rows": rows, "live": "all"}


def run_page(site: Site, query: Query, run_id: str) -> Values:
    """One run: its curves, evaluations and updates."""
    run = browse.run(site.store, run_id)
    readings = site.readings(run_id)
    evaluations = site.store.evaluations(run_id)
    charts = curves.charts(readings, browse.gathered(site.store, run_id), evaluations)
    newest = list(reversed(readings))
    page = Paging.of(number(query, "from"), len(newest), STEPS)
    return {
        "run": run,
        "counts": browse.counts(site.store, run_id).get(run_id, browse.RunCounts()),
        "figures": [curves.draw(chart) for chart in charts],
        "evaluations": [_evaluation(row.name, row.policy_version, row.metrics) for row in evaluations],
        "updates": newest[page.first : page.last],
        "page": page,
        "config": json.dumps(run.config, indent=1, sort_keys=True, ensure_ascii=False),
        "live": run_id,
    }


def _evaluation(name: str, version: int, metrics: Mapping[str, Any]) -> Values:
    scores = {mode: values["score"] for mode, values in metrics.items() if isinstance(values, Mapping) and "score" in values}
    return {"name": name, "version": version, "scores": scores}


def groups_page(site: Site, query: Query, run_id: str) -> Values:
    """A run's groups, those with the widest spread of reward first."""
    run = browse.run(site.store, run_id)
    order = choice(query, "order", browse.ORDERS)
    purpose = choice(query, "purpose", ("all", "train", "eval"))
    step = number(query, "step", 0) or None
    total = browse.counts(site.store, run_id).get(run_id, browse.RunCounts()).groups
    first = number(query, "from")
    wanted = None if purpose == "all" else purpose
    found = browse.groups(site.store, run_id, order=order, purpose=wanted, step=step, offset=first, count=GROUPS + 1)
    narrowed = wanted is not None or step is not None
    page = Paging(first, first + min(len(found), GROUPS), first + len(found) if narrowed else total, GROUPS)
    return {
        "run": run, "groups": found[:GROUPS], "order": order, "purpose": purpose, "step": step, "page": page, "live": run_id,
    }  # fmt: skip


# ---- a group


def group_page(site: Site, query: Query, group_id: str) -> Values:
    """A group: its task, its trajectories, and its prefix tree as a picture."""
    group = browse.group(site.store, group_id)
    run = browse.run(site.store, group.run_id)
    rows = site.store.trajectories(group_id)
    receipt = {} if group.step is None else site.receipt(run.run_id, group.step).receipt
    return {
        "run": run,
        "group": group,
        "rows": rows,
        "task": json.dumps(dict(group.task.options), indent=1, sort_keys=True, ensure_ascii=False),
        "fate": _fate(group, receipt),
        "tree": _tree(site, run, rows, receipt, trained=group_id in receipt.get("groups", [])),
        "inputs": viewer_tree.inputs_in_words(receipt),
        "live": group_id,
    }


def _fate(group: GroupRow, receipt: Mapping[str, Any]) -> str:
    """What training did with a group, in words."""
    if group.step is None:
        return "not trained on yet" if group.purpose == "train" else "collected for an evaluation"
    for name, reason in receipt.get("skipped", []):
        if name == group.group_id:
            return f"skipped by step {group.step}: {reason}"
    left_out = [f"{name} ({reason})" for of, name, reason in receipt.get("dropped", []) if of == group.group_id]
    return f"trained on by step {group.step}" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _tree(
    site: Site, run: RunRow, rows: Sequence[TrajectoryRow], receipt: Mapping[str, Any], *, trained: bool
) -> Values | None:
    """The picture with its table; None where nothing is finished."""
    finished = [row for row in rows if row.stop_reason is not None and row.length > 1][:MOST_IN_TREE]
    if not finished:
        return None
    gradient, chunk, cut = viewer_tree.settings(run.config)
    tree = site.tree(tuple(row.trajectory_id for row in finished), SegmenterConfig(**cut))
    gradient = str(receipt.get("gradient", gradient)) if trained else gradient
    picture, made = viewer_tree.draw(tree, {row.trajectory_id: row for row in finished}, gradient, chunk)
    return {
        "picture": picture,
        "boxes": made[:500],
        "nodes": len(made),
        "savings": viewer_tree.savings(tree),
        "gradient": gradient,
        "left_out": len(rows) - len(finished),
        "trained": trained,
    }


# ---- a trajectory


def trajectory_page(site: Site, query: Query, trajectory_id: str) -> Values:
    """A trajectory by turns, some of them; long observations are folded."""
    row = site.store.trajectory(trajectory_id)
    group, run = _home(site.store, row)
    colour = choice(query, "colour", viewer_tokens.COLOURS)
    if query.get("position"):
        first = browse.turn_at(site.store, trajectory_id, number(query, "position"))
    else:
        first = number(query, "turn")
    page = Paging.of(first, row.turns, TURNS)
    receipt = {} if group.step is None else site.receipt(run.run_id, group.step).receipt
    rows = browse.turns(site.store, trajectory_id, page.first, TURNS)
    folds = [_fold(*part) for turn in rows for part in ((turn.start, turn.border, FOLD), (turn.border, turn.stop, FOLD_ACTION))]
    parts = iter(_shown(site, run, trajectory_id, receipt, colour, folds))
    turns = [{"turn": turn, "observation": next(parts), "action": next(parts)} for turn in rows]
    return {
        "run": run, "group": group, "row": row, "turns": turns, "page": page, "colour": colour,
        "colours": viewer_tokens.COLOURS, "legend": viewer_tokens.legend(colour), "missing": _missing(colour, receipt, row),
        "live": trajectory_id if row.stop_reason is None else "",
    }  # fmt: skip


def _home(store: Store, row: TrajectoryRow) -> tuple[GroupRow, RunRow]:
    group = browse.group(store, row.group_id)
    return group, browse.run(store, group.run_id)


def _missing(colour: str, receipt: Mapping[str, Any], row: TrajectoryRow) -> str:
    """Why a colour has nothing to show."""
    kept = {"advantage": "credit", "ratio": "log_ratio"}.get(colour)
    if kept is None or row.trajectory_id in receipt.get(kept, {}):
        return ""
    return f"No {colour} is recorded: no step has trained on this trajectory, or its receipt does not hold it."


def _fold(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """What is shown of [start, stop): all, nothing where it is empty, or both ends where it has more than `most` tokens."""
    if stop - start <= most:
        return [(start, stop)] if stop > start else [(start, start)]
    return [(start, start + most // 2), (stop - most // 2, stop)]


def _shown(
    site: Site, run: RunRow, trajectory_id: str, receipt: Mapping[str, Any], colour: str, folds: Sequence[list[tuple[int, int]]]
) -> list[Values]:
    """The parts of turns as text, each folded as `folds` has it."""
    decoder = site.decoder(run)
    read = iter(browse.read_ranges(site.store, trajectory_id, [cut for fold in folds for cut in fold]))
    shown = []
    for fold in folds:
        texts = []
        for start, _ in fold:
            ids, logp = next(read)
            numbers = viewer_tokens.token_numbers(start, logp, receipt, trajectory_id)
            texts.append(viewer_tokens.in_colour(decoder, ids.tolist(), numbers, colour))
        (start, half), stop = fold[0], fold[-1][1]
        folded = fold[1][0] - half if len(fold) > 1 else 0
        shown.append({"start": start, "tokens": stop - start, "parts": texts, "folded": folded, "half": half - start})
    return shown


def tokens_page(site: Site, query: Query, trajectory_id: str) -> Values:
    """A range of a trajectory's tokens, as text or as a table of their numbers."""
    row = site.store.trajectory(trajectory_id)
    group, run = _home(site.store, row)
    colour, form = choice(query, "colour", viewer_tokens.COLOURS), choice(query, "form", ("text", "table"))
    page = Paging.of(number(query, "start"), row.length, TOKENS if form == "text" else TABLE)
    receipt = {} if group.step is None else site.receipt(run.run_id, group.step).receipt
    ((read, logp),) = browse.read_ranges(site.store, trajectory_id, [(page.first, page.last)])
    ids, numbers = read.tolist(), viewer_tokens.token_numbers(page.first, logp, receipt, trajectory_id)
    decoder = site.decoder(run)
    rows = []
    if form == "table":
        given = zip(ids, decoder.pieces(ids), numbers.logp, numbers.advantage, numbers.ratio, strict=True)
        rows = [(page.first + i, *values) for i, values in enumerate(given)]
    return {
        "run": run, "group": group, "row": row, "page": page, "colour": colour, "colours": viewer_tokens.COLOURS, "form": form,
        "legend": viewer_tokens.legend(colour), "missing": _missing(colour, receipt, row), "table": rows,
        "text": _by_author(decoder, ids, numbers, colour) if form == "text" else [], "live": "",
        "turn": browse.turn_at(site.store, trajectory_id, page.first) if row.turns else 0,
    }  # fmt: skip


def _by_author(decoder: Decoder, ids: list[int], numbers: viewer_tokens.TokenNumbers, colour: str) -> list[Any]:
    """A range's text, cut where the environment's words and the policy's meet."""
    authors = viewer_tokens.classes(numbers, "mask")
    parts, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or authors[stop] != authors[start]:
            cut = numbers.slice(numbers.start + start, numbers.start + stop)
            parts.append(viewer_tokens.in_colour(decoder, ids[start:stop], cut, colour))
            start = stop
    return parts


# ---- receipts, comparison, search


def receipts_page(site: Site, query: Query, run_id: str) -> Values:
    """A run's receipts on a time line: the newest, or those before a step."""
    run = browse.run(site.store, run_id)
    newest = list(reversed(site.readings(run_id)))
    page = Paging.of(number(query, "from"), len(newest), LANES)
    shown = list(reversed(newest[page.first : page.last]))
    gathered = browse.gathered(site.store, run_id, shown[0].step) if shown else []
    line = curves.time_line(shown, gathered, f"/runs/{run_id}/receipts/")
    by_step = {g.step: g for g in gathered}
    rows = [(reading, by_step.get(reading.step)) for reading in reversed(shown)]
    return {"run": run, "line": line, "rows": rows, "page": page, "live": run_id}


def receipt_page(site: Site, query: Query, run_id: str, step: int) -> Values:
    """One receipt, whole."""
    run, row = browse.run(site.store, run_id), site.receipt(run_id, step)
    receipt = dict(row.receipt)
    bulky = {name: receipt.pop(name, None) for name in ("credit", "log_ratio", "borders")}
    return {
        "run": run, "row": row, "receipt": receipt, "skipped": receipt.get("skipped", []), "dropped": receipt.get("dropped", []),
        "masked": receipt.get("masked", []), "evidence": receipt.get("evidence", {}), "phases": receipt.get("phases", {}),
        "text": json.dumps(receipt, indent=1, sort_keys=True, ensure_ascii=False), "files": dict(row.files),
        "left_out": [name for name, value in bulky.items() if value], "live": "",
    }  # fmt: skip


def compare_page(site: Site, query: Query, run_ids: Sequence[str]) -> Values:
    """Two runs side by side: their curves in common axes, their last values, and where their settings differ."""
    if len(run_ids) != 2:
        raise ConfigError(f"choose two runs to compare, got {len(run_ids)}")
    runs = [browse.run(site.store, run_id) for run_id in run_ids]
    made, last = [], []
    for run in runs:
        readings = site.readings(run.run_id)
        evaluations = site.store.evaluations(run.run_id)
        made.append(curves.charts(readings, browse.gathered(site.store, run.run_id), evaluations))
        last.append(readings[-1].values if readings else {})
    both = curves.beside(made[0], made[1], (runs[0].run_id, runs[1].run_id))
    flat = [_flat(run.config) for run in runs]
    keys = sorted(key for key in flat[0].keys() | flat[1].keys() if flat[0].get(key) != flat[1].get(key))
    names = sorted(set(last[0]) | set(last[1]))
    return {
        "runs": runs,
        "figures": [curves.draw(chart) for chart in both],
        "values": [(name, last[0].get(name), last[1].get(name)) for name in names],
        "differences": [(key, flat[0].get(key), flat[1].get(key)) for key in keys],
        "live": "all",
    }


def _flat(value: Any, where: str = "") -> dict[str, str]:
    """A configuration as dotted keys with JSON values."""
    if isinstance(value, Mapping) and value:
        return {k: v for name, of in value.items() for k, v in _flat(of, f"{where}.{name}" if where else str(name)).items()}
    return {where: json.dumps(value, ensure_ascii=False)}


def search_page(site: Site, query: Query) -> Values:
    """Turns that hold a text; without a text only the form."""
    runs = list(reversed(site.store.runs()))
    text, scope = query.get("q", ""), query.get("in") or (runs[0].run_id if runs else "")
    searched = number(query, "searched")
    values: Values = {"runs": runs, "text": text, "scope": scope, "found": None, "live": "", "searched": searched}
    if not text.strip() or not scope:
        return values
    trajectory_id = scope if scope.startswith("t") else None
    if trajectory_id is None:
        run = browse.run(site.store, scope)
    else:
        _, run = _home(site.store, site.store.trajectory(trajectory_id))
    found = search(
        site.store, run.run_id, site.decoder(run), text, trajectory_id=trajectory_id, after=query.get("after") or None
    )
    return values | {"run": run, "found": found, "searched": searched + found.tokens}


def stamp(site: Site, of: str) -> str:
    """The stamp of what a page shows: "all", a run, a group or a trajectory."""
    if of == "all":
        return repr(browse.counts(site.store))
    if of.startswith("r"):
        browse.run(site.store, of)
        return repr((browse.counts(site.store, of), len(site.store.evaluations(of))))
    if of.startswith("g"):
        rows = site.store.trajectories(of)
        return repr((browse.group(site.store, of).step, [(row.turns, row.stop_reason) for row in rows]))
    row = site.store.trajectory(of)
    return repr((row.turns, row.stop_reason))
