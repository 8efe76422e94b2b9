"""Tasks of reasoning-gym: what its scorers may be given, and what they make of it."""

import sys

import gymnasium
import pytest

import longstraw_agents.envs  # noqa: F401
from longstraw_agents.envs.reasoning import UNSTEADY, may_be_scored
from longstraw_agents.errors import ConfigError

CODE = [
    "__import__('os').system('id')", "open('/etc/passwd').read()", "().__class__.__base__.__subclasses__()", "[x for x in '1']",
    "(lambda: 1)()", "f'{1}'", "[0] * 9**9", "'a' * 9**9", "9**9**9**9", "((((9**64)**64)**64)**64)", "2**99999999", "exec('1')",
    "answer * 99", "[1][0]", "1 if 2 else 3", "{1: 2}", "-(-(9**9**9))", "True.real", "print(1)", "1\n+1; 2",
]  # fmt: skip


@pytest.mark.parametrize("answer", CODE)
def test_code_is_not_scored(answer):
    assert not may_be_scored(answer, "formula") or answer == "answer * 99"  # a symbol there
    assert not may_be_scored(answer, "python") or ";" in answer  # what Python can't parse
    assert may_be_scored(answer, None)


@pytest.mark.parametrize("answer", ["sin('__import__')", "'x' + 5", "__import__('os') + 5!", "x.y", "Symbol('x')", "x__y", "5!"])
def test_texts_and_names_of_python_are_no_formulas(answer):
    assert not may_be_scored(answer, "formula")


@pytest.mark.parametrize("answer", ["3*x**2/2 + C", "x*sin(x) - exp(-2*x)/4", "(5 - 3)*12", "-7", "2**x", "log(x)^2", "x**(1/2)"])
def test_formulas_are_scored(answer):
    assert may_be_scored(answer, "formula")


@pytest.mark.parametrize("answer", ["[1, 2, 3]", "['a', 'b']", "1 2 3", "[[0, 1], [1, 0]]", "a b c", "Q _ _\n_ Q _", "-1.5"])
def test_lists_and_plain_text_are_scored(answer):
    assert may_be_scored(answer, "python")


class TestPackage:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is missing")

    @pytest.mark.parametrize(
        "dataset",
        ["spiral_matrix", "binary_matrix", "string_insertion", "n_queens", "countdown", "puzzle24", "simple_integration"],
    )
    def test_an_answer_is_never_run(self, dataset, tmp_path):
        env = gymnasium.make("longstraw/Reasoning-v0", dataset=dataset)
        proof = tmp_path / "proof"
        for answer in (f"open({str(proof)!r}, 'w')", f"__import__('pathlib').Path({str(proof)!r}).touch() + 5!"):
            env.reset(seed=1)
            _, reward, *_, info = env.step(f"<answer>{answer}</answer>")
            assert reward < 0.1 and not info["success"] and not proof.exists()
        env.reset(seed=1)
        assert env.step(next(env.unwrapped.solver()))[4]["success"]

    def test_an_answer_that_breaks_the_scorer_is_wrong(self):
        env = gymnasium.make("longstraw/Reasoning-v0", dataset="prime_factorization")
        env.reset(seed=1)
        *_, info = env.step("<answer>7 kittens</answer>")
        assert info["success"] is False and info["reward_parts"] == {"score": 0.0}

    def test_what_depends_on_hashes_is_refused(self):
        for dataset in UNSTEADY:
            if sys.flags.hash_randomization:
                with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
                    gymnasium.make("longstraw/Reasoning-v0", dataset=dataset).reset(seed=1)

    def test_settings_are_passed_on_and_checked(self):
        env = gymnasium.make("longstraw/Reasoning-v0", config={"min_terms": 7, "max_terms": 7})
        assert env.reset(seed=1)[0].count(" + ") + env.reset(seed=1)[0].count(" - ") >= 6
        for wrong in ({"nothing": 1}, {"min_terms": -1}):
            with pytest.raises(ConfigError, match="can't make chain_sum"):
                gymnasium.make("longstraw/Reasoning-v0", config=wrong).reset(seed=1)
