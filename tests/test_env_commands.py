"""`longstraw init`, `envs list`, `envs check` and `play`."""

import json
import sys

import gymnasium
import pytest
from click.testing import CliRunner

import longstraw_agents.envs  # noqa: F401  (registered before a test forgets what it has added)
from longstraw_agents.cli import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known, modules = set(gymnasium.registry), set(sys.modules)
    yield lambda *arguments, **more: CliRunner().invoke(main, arguments, **more)
    for name in set(gymnasium.registry) - known:
        del gymnasium.registry[name]
    for name in {"environment"} & (set(sys.modules) - modules):
        del sys.modules[name]


def test_what_init_writes_passes_the_check_and_loads(run, tmp_path):
    assert run("init").exit_code == 0
    checked = run("envs", "check", "environment.py", "--tasks", "3", "--json", "report.json")
    assert checked.exit_code == 0, checked.output
    findings = json.loads((tmp_path / "report.json").read_text())["Sums-v0"]
    assert len(findings) == 8 and all(finding["holds"] for finding in findings)


def test_the_configuration_that_init_writes_loads(run, tmp_path):
    pytest.importorskip("torch")
    from longstraw_agents import config
    from longstraw_agents.loop import RunConfig

    run("init")
    loaded = config.load(tmp_path / "longstraw.toml", RunConfig)
    assert loaded.tasks.env == "environment:Sums-v0" and loaded.model.adapter.rank == 8


def test_init_keeps_what_exists(run, tmp_path):
    (tmp_path / "environment.py").write_text("mine")
    assert "kept" in run("init").output
    assert (tmp_path / "environment.py").read_text() == "mine" and (tmp_path / "longstraw.toml").exists()


def test_the_check_finds_what_is_wrong(run, tmp_path):
    run("init")
    path = tmp_path / "environment.py"
    path.write_text(path.read_text().replace("if in_split(", "if True or in_split(").replace("str(self.a + self.b)", '"0"')
                    .replace("rng.integers(10, 1000, 2)", "rng.integers(0, 2, 2) * 0 + __import__('random').randrange(10**6)"))
    checked = run("envs", "check", "environment.py", "--tasks", "4")
    assert checked.exit_code == 1
    failed = [line for line in checked.output.splitlines() if "FAIL" in line]
    assert any("seed" in line for line in failed) and any("solver" in line for line in failed)


def test_list_names_every_built_in(run):
    listed = run("envs", "list", "--json", "list.json").output
    for name in ("Lookup", "DocumentSearch", "Workspace", "SQLAnalyst", "Ledger", "Reasoning"):
        assert f"longstraw/{name}-v0" in listed


def test_a_person_plays(run):
    shown = run("play", "longstraw/Ledger-v0", "--option", "sessions=1", input="<answer>no</answer>\n.\n")
    assert shown.exit_code == 0 and "Question:" in shown.output and "success False" in shown.output


def test_the_solver_plays(run):
    shown = run("play", "longstraw/Lookup-v0", "--solve", "--split", "heldout")
    assert "ended: answered; success True; reward 1.4" in shown.output


def test_unknown_names_say_what_to_do(run):
    assert "envs list" in run("play", "longstraw/Nothing-v0").output
    assert "no file" in run("envs", "check", "missing.py").output


def test_files_that_can_not_be_loaded_are_told_with_their_line(run, tmp_path):
    (tmp_path / "environment.py").write_text("import gymnasium\nimport nothing_such\n")
    assert "No module named 'nothing_such' (line 2)" in run("envs", "check", "environment.py").output
    (tmp_path / "environment.py").write_text("def x(:\n")
    assert "SyntaxError: invalid syntax" in run("play", "environment.py").output
    assert "'nothing_such' of" in run("envs", "check", "nothing_such:X-v0").output


def test_what_an_environment_need_not_have_is_not_checked(run, tmp_path):
    (tmp_path / "environment.py").write_text(
        "import gymnasium\nfrom longstraw_agents.envs.adapters import GymnasiumText\n"
        "def make(**more): return GymnasiumText(gymnasium.make('Blackjack-v1'), **more)\n"
        "gymnasium.register('Cards-v0', entry_point=make)\n"
    )
    shown = run("envs", "check", "environment.py", "--tasks", "1").output
    assert "--   the solver succeeds: not checked" in shown and "--   round trip" in shown


def test_the_check_finds_what_depends_on_the_process(run, tmp_path):
    run("init")
    path = tmp_path / "environment.py"
    path.write_text(path.read_text().replace("self.a, self.b = (int(number)", "self.a, self.b = (int(number) + hash('x') % 90"))
    failed = [line for line in run("envs", "check", "environment.py", "--tasks", "2").output.splitlines() if "FAIL" in line]
    assert len(failed) == 1 and "another process" in failed[0]


def test_a_document_can_not_command_the_terminal(run):
    from longstraw_agents.commands.play import visible

    assert visible("a\x1b]0;owned\x07\x9b2J\u202e\ud800\n\té漢🦙") == "a\\x1b]0;owned\\x07\\x9b2J\\u202e\\ud800\n\té漢🦙"
