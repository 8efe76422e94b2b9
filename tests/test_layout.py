"""The layout's guards: links kept in git, the way imports go, no bare imports, sizes of files and functions."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("envs", "storage", "trainer")
HEAVY = {"torch", "transformers", "peft", "triton", "accelerate"}
#: Files outside trainer/ that may import the heavy libraries at their top: the local policies and what composes the trainer.
LOCAL = {"longstraw_agents/loop.py", "longstraw_agents/evaluation.py"}


def files(folder: str) -> list[Path]:
    """The folder's own files; not those that are seen a second time through the links."""
    found = (ROOT / folder).rglob("*.py")
    return sorted(path for path in found if not set(PARTS) & set(path.relative_to(ROOT).parts[1:]))


def imports(path: Path, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_are_relative_links_kept_in_git(part: str) -> None:
    link = ROOT / "longstraw_agents" / part
    assert os.readlink(link) == f"../{part}"
    if (ROOT / ".git").exists():
        mode = subprocess.run(["git", "ls-files", "-s", str(link)], cwd=ROOT, capture_output=True, text=True).stdout
        assert mode.startswith("120000")


@pytest.mark.parametrize("part", ["envs", "storage"])
def test_envs_and_storage_import_only_the_leaf_modules(part: str) -> None:
    allowed = {f"longstraw_agents.{name}" for name in (part, "types", "errors", "figures", "redaction", "__version__")}
    for path in files(part):
        for name in imports(path):
            if name.startswith("longstraw_agents."):
                own = any(f"{name}.".startswith(f"{leaf}.") for leaf in allowed)
                assert own, f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in HEAVY, f"{path.relative_to(ROOT)} imports {name}"


def test_the_trainer_does_not_import_storage_envs_or_what_composes_it() -> None:
    for path in files("trainer"):
        for name in imports(path):
            for above in ("envs", "storage", "loop", "collection", "policies", "commands", "cli"):
                assert not (name + ".").startswith(f"longstraw_agents.{above}."), f"{path.relative_to(ROOT)} imports {name}"


def test_heavy_libraries_stay_in_the_trainer_and_the_local_policies() -> None:
    for path in files("longstraw_agents"):
        relative = str(path.relative_to(ROOT))
        if relative in LOCAL or relative.startswith("longstraw_agents/policies/"):
            continue
        heavy = {name for name in imports(path, top_only=True) if name.split(".")[0] in HEAVY}
        assert not heavy, f"{relative} imports {heavy} at its top"


def test_the_leaf_module_imports_nothing_of_ours_but_errors() -> None:
    ours = {name for name in imports(ROOT / "longstraw_agents" / "types.py") if name.startswith("longstraw_agents")}
    assert {name.split(".")[1] for name in ours if "." in name} == {"errors"}


def test_store_and_environments_load_without_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft'): sys.modules[name] = None\n"
        "import longstraw_agents, longstraw_agents.storage, longstraw_agents.envs, longstraw_agents.types, longstraw_agents.cli\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr


def test_files_and_functions_stay_short() -> None:
    for folder in ("longstraw_agents", *PARTS):
        for path in files(folder):
            text = path.read_text(encoding="utf-8")
            assert len(text.splitlines()) <= 600, f"{path.relative_to(ROOT)} is too long"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    assert length <= 80, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


def test_no_unsafe_loading() -> None:
    for folder in ("longstraw_agents", *PARTS):
        for path in files(folder):
            assert not {"pickle", "cloudpickle", "dill"} & imports(path), f"{path.relative_to(ROOT)} imports pickle"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    safe = "weights_only=True" in [f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords]
                    assert safe, f"{path.relative_to(ROOT)}:{node.lineno}: torch.load without weights_only=True"
