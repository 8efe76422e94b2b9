"""README and docs: blocks run or parse, links lead somewhere, every page is in the site's index."""

from __future__ import annotations

import re
from pathlib import Path

import docs_blocks
import pytest

ROOT = docs_blocks.ROOT
PAGES = docs_blocks.pages()
BLOCKS = [block for page in PAGES for block in docs_blocks.blocks(page)]
SHELL = [block for block in BLOCKS if block.kind == "sh" and block.reason is None]
TOML = [block for block in BLOCKS if block.kind == "toml" and block.reason is None]
SQL = [block for block in BLOCKS if block.kind == "sql" and block.reason is None]
PROGRAMS = [page for page in PAGES if docs_blocks.python_program(page)]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_parse(block: docs_blocks.Block) -> None:
    assert docs_blocks.check_shell(block) == []


@pytest.mark.parametrize("block", TOML, ids=str)
def test_configurations_load(block: docs_blocks.Block) -> None:
    assert docs_blocks.check_toml(block) == ""


@pytest.mark.parametrize("block", SQL, ids=str)
def test_queries_run(block: docs_blocks.Block) -> None:
    assert docs_blocks.check_sql(block) == ""


@pytest.mark.smollm2
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    assert docs_blocks.run_python(page, tmp_path) == ""


def test_blocks_left_out_say_why() -> None:
    for block in BLOCKS:
        assert block.reason is None or len(block.reason.split()) >= 2, f"{block}: say why it is not run"


def test_the_checker_sees_faults() -> None:
    def shell(text: str) -> list[str]:
        return docs_blocks.check_shell(docs_blocks.Block(ROOT / "README.md", 1, "sh", text, None))

    assert shell("longstraw figures --json figures.json\nmake test\n") == []
    assert shell("longstraw figurez\n") and shell("longstraw figures --yaml x\n") and shell("make nothing\n")
    assert shell("python benchmarks/none.py --record\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{page.relative_to(ROOT)} links to {target}, which is not there"


def test_the_demo_s_table_is_what_was_recorded() -> None:
    """Every trial stands in the docs as it was measured; a new recording must be copied there."""
    import json

    recorded = {entry["figure"]: entry for entry in json.loads((ROOT / "docs" / "figures.json").read_text())}
    trials = {f"seed {seed}": trial for seed, trial in recorded["main.demo_gain_points"]["extra"].items()}
    trials["rewards shuffled"] = recorded["main.demo_shuffled_reward_gain_points"]["extra"]
    rows = {
        line.split("|")[1].strip(): [item.strip() for item in line.split("|")[2:-1]]
        for line in (ROOT / "docs" / "quickstart.md").read_text().splitlines()
        if line.startswith(("| seed", "| rewards"))
    }
    assert set(rows) == set(trials)
    for name, trial in trials.items():
        success = trial["success"]
        assert rows[name][:2] == [f"{success[when]['sampled']:.1%}" for when in ("before", "after")]
        assert rows[name][2] == f"{trial['gain']:+.1f} [{trial['interval'][0]:+.1f}, {trial['interval'][1]:+.1f}]"
        assert rows[name][3:5] == [f"{success[when]['greedy']:.1%}" for when in ("before", "after")]
