"""longstraw/Reasoning-v0: the procedural tasks of the `reasoning-gym` package, one question and one answer each.

Idea: the option `dataset` names the generator (`reasoning_gym.factory.DATASETS`), `config` its settings; its own scorer, between
0 and 1, is the reward. Several of those scorers evaluate the answer as Python or as a formula, so an answer must not be code: it
goes to such a scorer only if it is made of numbers, texts, lists, arithmetic and a few functions. An answer that a scorer fails
on, or works on for too long, earns nothing: else an agent could make its bad episodes invalid.

Install the package with `pip install reasoning-gym`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.envs.tools import ToolLimits, bounded_call
from longstraw_agents.errors import ConfigError

#: Generators that iterate over sets of strings (found in 0.1.25): their tasks differ from process to process.
UNSTEADY = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
MAX_DRAWS = 200
SCORING = ToolLimits(seconds=20.0)

_EVALUATES = re.compile(r"\b(eval|exec|sympify)\(|\b(sp|sympy)\.parse_expr\(")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
)
_POWERS = (ast.Pow, ast.BitXor)  # sympy reads ^ as a power
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, *_POWERS)


class ReasoningEnv(ToolEnv):
    """One generated question; success is the full score."""

    option_defaults: ClassVar[Mapping[str, Any]] = {"dataset": "chain_sum", "config": None}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("score"),)
    max_turns: ClassVar[int] = 4

    def system_message(self) -> str:
        return "Solve the task. Give the answer as <answer>...</answer>."

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError("this environment needs a package: pip install reasoning-gym") from error
        name = self.options["dataset"]
        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS)[:8])} and more")
        if name in UNSTEADY and sys.flags.hash_randomization:
            raise ConfigError(f"tasks of {name} depend on Python's hashes; start Python with PYTHONHASHSEED=0 to use it")
        for _ in range(MAX_DRAWS):
            seed = int(rng.integers(2**31))
            try:
                self._dataset = reasoning_gym.create_dataset(name, size=1, seed=seed, **(self.options["config"] or {}))
            except (AssertionError, TypeError, ValueError) as error:
                raise ConfigError(f"reasoning-gym can't make {name} with config {self.options['config']}: {error}") from error
            self._entry = self._dataset[0]
            if in_split(self._entry["question"], split):
                return str(self._entry["question"])
        raise ConfigError(f"{name} gave no question of split {split} in {MAX_DRAWS} draws: it has too few; choose another")

    def grade(self, episode: Episode) -> Grade:
        score = 0.0 if episode.answer is None else self._score(episode.answer.strip())
        return Grade(score >= 1.0, {"score": score})

    def _score(self, answer: str) -> float:
        if answer != self._entry["answer"] and not may_be_scored(answer, _evaluates(type(self._dataset))):
            return 0.0
        try:
            call = partial(self._dataset.score_answer, answer=answer, entry=self._entry)
            return float(bounded_call(call, "the scorer", SCORING))
        except Exception:  # the answer made the scorer fail: it is wrong, whatever the failure
            return 0.0

    def solver(self) -> Generator[str, str, None]:
        if self._entry["answer"] is None:
            raise NotImplementedError(f"{self.options['dataset']} gives no answer to its questions")
        yield f"<answer>{self._entry['answer']}</answer>"


def _evaluates(kind: type[Any]) -> str | None:
    """How a dataset's module evaluates text: "python", "formula" (sympy, which reads more than Python), or None."""
    module = sys.modules[kind.__module__]
    found = _EVALUATES.search(inspect.getsource(module))
    if (found and not found[1]) or getattr(vars(module).get("parse_expr"), "__module__", "").startswith("sympy"):
        return "formula"
    return "python" if found else None


def may_be_scored(answer: str, evaluated: str | None) -> bool:
    """Whether an answer may go to a scorer that evaluates it in this way: True for whatever can do no harm.

    Python may be given literals and arithmetic on numbers; sympy numbers, symbols and a few functions, but no text: it would
    evaluate that in its turn.
    """
    if evaluated is None:
        return True
    if len(answer) > 4000:
        return False
    try:
        nodes = list(ast.walk(ast.parse(answer, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return evaluated == "python"  # what Python can't parse it can't run; sympy would first make something else of it
    towers = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, _POWERS) and not _symbolic(node)]
    harmless = _harmless_formula if evaluated == "formula" else _harmless_python
    return all(map(harmless, nodes)) and len(towers) <= 3 and all(_small(node.right) for node in towers)


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (float, type(None))) or (isinstance(node.value, int) and abs(node.value) < 10**30)
    if isinstance(node, ast.BinOp):  # a list or a text times a number may become very long
        return not any(isinstance(side, (ast.List, ast.Tuple)) or _is_text(side) for side in (node.left, node.right))
    return isinstance(node, (ast.Expression, ast.Tuple, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load, *_ARITHMETIC))


def _harmless_python(node: ast.AST) -> bool:
    return _harmless(node) or isinstance(node, ast.List) or _is_text(node)


def _harmless_formula(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    return _harmless(node) or (isinstance(node, ast.Name) and "_" not in node.id)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _symbolic(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) for each in ast.walk(node))


def _small(exponent: ast.AST) -> bool:
    if any(isinstance(each, _POWERS) for each in ast.walk(exponent)):
        return False
    numbers = [each.value for each in ast.walk(exponent) if isinstance(each, ast.Constant)]
    return len(numbers) <= 2 and all(isinstance(number, (int, float)) and abs(number) <= 64 for number in numbers)
