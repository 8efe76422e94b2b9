"""The plots and the table of measured curves: every run is in them, where it belongs, and the same numbers give the same file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_plot

pytest.importorskip("matplotlib", reason="plots need matplotlib")

LENGTHS = (32768, 65536, 131072)
CONVENTIONAL = "conventional, same kernel"


def run(prompt: int, group: int, side: str, kind: str, seconds: float) -> dict[str, Any]:
    ours = side == "ours"
    return {
        "prompt": prompt, "group": group, "side": side, "gradient": kind if ours else None, "attention": None if ours else kind,
        "seconds": seconds, "peak_gib": 2.0 + seconds, "by_kind": {"capture": seconds / 4, "reverse": seconds * 3 / 4},
        "tokens_per_second": prompt * group / seconds, "fraction_of_kernel_rate": 0.9 if ours else None,
    }  # fmt: skip


def curves() -> dict[str, Any]:
    runs = [run(n, 8, "ours", kind, cost * n / 1e5) for n in LENGTHS for kind, cost in (("exact", 4), ("detached", 1))]
    runs += [run(n, 8, "conventional", "same kernel", 160 * n / 1e5) for n in LENGTHS[:2]]
    runs += [run(65536, size, "ours", "exact", 2.0 + size / 10) for size in (2, 32)]
    return {"runs": runs[::-1]}


def points(image: str, name: str) -> list[tuple[float, float]]:
    """Where a series' markers lie, in the order in which they were drawn."""
    group = image[image.index(f'<g id="{name}">') :]
    marks = re.findall(r'<use [^>]*x="([0-9.]+)" y="([0-9.]+)"', group[: group.index("</g>\n  ")])
    return [(float(x), float(y)) for x, y in marks]


def test_every_run_is_drawn_in_its_series_and_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        long_plot.draw(curves(), folder)
    names = ["long_context_by_group.svg", "long_context_by_length.svg"]
    assert sorted(path.name for path in first.iterdir()) == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).stat().st_size < 40_000
    image = (first / names[1]).read_text()
    for measure in long_plot.MEASURES:
        assert len(points(image, f"{measure}: ours, exact")) == len(points(image, f"{measure}: ours, detached")) == 3
        assert len(points(image, f"{measure}: {CONVENTIONAL}")) == 2
    for name in ("ours, exact", CONVENTIONAL, "G = 8"):
        assert name in image
    exact, other = (points(image, f"seconds: {name}") for name in ("ours, exact", CONVENTIONAL))
    assert [x for x, _ in exact[:2]] == [x for x, _ in other] and all(a > b for (_, a), (_, b) in zip(exact, other, strict=False))
    steps = [b - a for (a, _), (b, _) in zip(exact, exact[1:], strict=False)]
    assert steps[0] == pytest.approx(steps[1]) and steps[0] > 0  # lengths double, so on a logarithmic axis steps are equal
    by_group = (first / names[0]).read_text()
    assert len(points(by_group, "peak_gib: ours, exact")) == 3 and "65,536 tokens" in by_group


def test_the_table_has_every_run_in_order(tmp_path: Path) -> None:
    lines = long_plot.draw(curves(), tmp_path).splitlines()
    assert len(lines) == 2 + len(curves()["runs"]) and {line.count("|") for line in lines} == {9}
    assert lines[2] == "| 32,768 | 8 | conventional, same kernel | 52.4 | capture 13.1, reverse 39.3 | 54.43 | 5,000 |  |"
    assert lines[4] == "| 32,768 | 8 | ours, exact | 1.31 | capture 0.328, reverse 0.983 | 3.31 | 200,000 | 90 % |"
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 65,536")] == ["2", "8", "8", "8", "32"]


def test_without_memory_or_sizes_what_there_is_is_drawn(tmp_path: Path) -> None:
    runs = [run(n, 8, "ours", "exact", 1.0) | {"peak_gib": 0.0} for n in LENGTHS]  # as on a machine without a GPU
    long_plot.draw({"runs": runs}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["long_context_by_length.svg"]
    assert len(points((tmp_path / "long_context_by_length.svg").read_text(), "seconds: ours, exact")) == 3
