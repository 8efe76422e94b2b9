"""Checks of an environment before anybody trains on it: gymnasium's checker, seeds, splits, solver, round trip.

Vocabulary
    finding     one check: its name, whether it holds, and what was seen where it does not
    round trip  the episode played again from its snapshot says the same at every turn
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from longstraw_agents.errors import ConfigError, EnvironmentFault

MAX_STEPS = 10_000


@dataclass(frozen=True)
class Finding:
    """One check and its outcome."""

    check: str
    holds: bool
    detail: str = ""


def find_environments(name: str) -> list[str]:
    """Ids that a file registers, or the id in "MODULE:ID" or "ID". Raises ConfigError where there is none."""
    import longstraw_agents.envs  # noqa: F401  (registers the built-in ones)

    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; give a Python file that registers environments, or an id")
        before = set(gymnasium.registry)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        added = [env_id for env_id in gymnasium.registry if env_id not in before]
        if not added:
            raise ConfigError(f'{name} registers no environment; add gymnasium.register("Name-v0", entry_point=YourEnv)')
        return added
    module_name, colon, env_id = name.rpartition(":")
    if colon:
        importlib.import_module(module_name)
    if env_id not in gymnasium.registry:
        raise ConfigError(f"there is no environment {env_id!r}; `longstraw envs list` shows the built-in ones")
    return [env_id]


def check_environment(env_id: str, tasks: int = 8) -> list[Finding]:
    """All findings for one environment; a check that raises is a finding too."""
    checks: list[tuple[str, Callable[[Any, int], str]]] = [
        ("gymnasium's checker", _accepted),
        ("text in, text out, with messages", _speaks),
        ("a seed means one task", _seeded),
        ("no task in both splits", _disjoint),
        ("random text earns no success", _resists),
        ("the solver succeeds", _solved),
        ("round trip from a snapshot", _returns),
    ]
    findings = []
    for name, check in checks:
        env = gymnasium.make(env_id, disable_env_checker=True)
        try:
            detail = check(env, tasks)
        except Exception as error:  # the environment is under test: whatever it raises is the finding
            detail = f"{type(error).__name__}: {error}"
        finally:
            env.close()
        findings.append(Finding(name, not detail, detail))
    return findings


def _accepted(env: Any, tasks: int) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env.unwrapped)
    return "; ".join(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))


def _speaks(env: Any, tasks: int) -> str:
    observation, info = env.reset(seed=0)
    if not isinstance(observation, str):
        return f"the observation is {type(observation).__name__}, not a string"
    messages = info.get("messages")
    if not messages:
        return 'info["messages"] is missing at reset'
    joined = "\n".join(message.content for message in messages)
    return "" if joined == observation else "the observation is not the messages' contents joined by newlines"


def _seeded(env: Any, tasks: int) -> str:
    for split in ("train", "heldout"):
        firsts = [env.reset(seed=seed, options={"split": split})[0] for seed in range(tasks)]
        again = [env.reset(seed=seed, options={"split": split})[0] for seed in range(tasks)]
        if firsts != again:
            return f"the same seed gave another task in split {split}"
    return ""


def _disjoint(env: Any, tasks: int) -> str:
    seen = {split: {_identity(env, seed, split) for seed in range(tasks)} for split in ("train", "heldout")}
    shared = seen["train"] & seen["heldout"]
    return f"a task is in both splits: {sorted(shared)[0][:200]!r}" if shared else ""


def _identity(env: Any, seed: int, split: str) -> str:
    """The first observation and the first action that solves it: what tells one task from another."""
    observation, _ = env.reset(seed=seed, options={"split": split})
    try:
        return f"{observation}\n{''.join(_script(env))}"
    except (NotImplementedError, AttributeError):
        return str(observation)


def _script(env: Any) -> list[str]:
    """All actions of the solver on the current task."""
    solver = env.unwrapped.solver()
    actions = [next(solver)]
    for _ in range(MAX_STEPS):
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            return actions
        actions.append(solver.send(observation))
    raise EnvironmentFault(f"the episode did not end within {MAX_STEPS} steps")


def _resists(env: Any, tasks: int) -> str:
    rng = random.Random(0)
    for seed in range(tasks):
        env.reset(seed=seed)
        for _ in range(MAX_STEPS):
            text = "".join(chr(rng.randrange(32, 127)) for _ in range(40))
            _, _, terminated, truncated, info = env.step(rng.choice([text, f"<answer>{text}</answer>"]))
            if terminated or truncated:
                break
        else:
            return f"an episode of random text did not end within {MAX_STEPS} steps"
        if info.get("success"):
            return f"random text solved seed {seed}"
    return ""


def _solved(env: Any, tasks: int) -> str:
    for split in ("train", "heldout"):
        for seed in range(tasks):
            env.reset(seed=seed, options={"split": split})
            solver = env.unwrapped.solver()
            action = next(solver)
            for _ in range(MAX_STEPS):
                observation, _, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    break
                action = solver.send(observation)
            if not info.get("success"):
                return f"the solver failed on seed {seed} of split {split}: {info.get('stop_reason')}"
    return ""


def _returns(env: Any, tasks: int) -> str:
    env.reset(seed=1)
    _script(env)
    snapshot = env.unwrapped.snapshot()
    env.reset(seed=2)
    env.unwrapped.restore(snapshot)
    return "" if env.unwrapped.snapshot() == snapshot else "the restored episode differs"
