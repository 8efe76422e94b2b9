"""Checks of an environment before anybody trains on it: gymnasium's checker, seeds, splits, solver, round trip.

Vocabulary
    finding     one check: its name, whether it holds, and what was seen where it does not, or why it could not be checked
    round trip  the episode played again from its snapshot says the same at every turn
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    checked: bool = True


class _Unchecked(Exception):
    """The environment lacks what a check needs, and need not have it."""


def find_environments(name: str) -> list[str]:
    """Ids that a file registers, or the id in "MODULE:ID" or "ID". Raises ConfigError where there is none."""
    import longstraw_agents.envs  # noqa: F401  (registers the built-in ones)

    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; give a Python file that registers environments, or an id")
        before = set(gymnasium.registry)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # the user's file: whatever it raises is told with its line
            del sys.modules[path.stem]
            raise ConfigError(f"{name} can't be loaded: {_where(error, str(path))}") from error
        added = [env_id for env_id in gymnasium.registry if env_id not in before]
        if not added:
            raise ConfigError(f'{name} registers no environment; add gymnasium.register("Name-v0", entry_point=YourEnv)')
        return added
    module_name, colon, env_id = name.rpartition(":")
    if colon:
        try:
            importlib.import_module(module_name)
        except ImportError as error:
            raise ConfigError(f"module {module_name!r} of {name!r} can't be imported: {error}") from error
    if env_id not in gymnasium.registry:
        raise ConfigError(f"there is no environment {env_id!r}; `longstraw envs list` shows the built-in ones")
    return [env_id]


def _where(error: Exception, path: str) -> str:
    """The error, and the last line of the file that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else (lines[-1] if lines else None)
    return f"{type(error).__name__}: {error}" + (f" (line {line})" if line and not isinstance(error, SyntaxError) else "")


def check_environment(env_id: str, tasks: int = 8, source: str | None = None) -> list[Finding]:
    """All findings for one environment; a check that raises is a finding too.

    source: what `find_environments` was given, so that another process finds the environment too; None for the id.
    """
    checks: list[tuple[str, Callable[[Any, int], str]]] = [
        ("gymnasium's checker", _accepted),
        ("text in, text out, with messages", _speaks),
        ("a seed means one task", _seeded),
        ("in another process too", partial(_elsewhere, source or env_id)),
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
        except _Unchecked as reason:
            findings.append(Finding(name, True, f"not checked: {reason}", checked=False))
            continue
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


def first_observations(source: str, env_id: str, tasks: int) -> list[str]:
    """Digests of what the environment says first, for the first seeds of both splits."""
    find_environments(source)
    env = gymnasium.make(env_id, disable_env_checker=True)
    try:
        return [
            hashlib.blake2b(_identity(env, seed, split).encode("utf-8", "surrogatepass")).hexdigest()
            for split in ("train", "heldout")
            for seed in range(tasks)
        ]
    finally:
        env.close()


def _elsewhere(source: str, env: Any, tasks: int) -> str:
    """Two more processes, in which Python's hashes differ."""
    call = f"first_observations(*{(source, env.spec.id, tasks)!r})"
    path = [os.path.abspath(entry) for entry in ("", *sys.path)]
    code = f"import sys; sys.path[:] = {path!r}; from {__name__} import first_observations; print({call})"
    said = []
    for number in ("1", "2"):
        variables = {**os.environ, "PYTHONHASHSEED": number}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"another process could not make it: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        said.append(done.stdout.splitlines()[-1])
    return "" if said[0] == said[1] else "the same seed gave another task in another process"


def _disjoint(env: Any, tasks: int) -> str:
    seen = {split: {_identity(env, seed, split) for seed in range(tasks)} for split in ("train", "heldout")}
    shared = seen["train"] & seen["heldout"]
    return f"a task is in both splits: {sorted(shared)[0][:200]!r}" if shared else ""


def _identity(env: Any, seed: int, split: str) -> str:
    """The first observation and the actions that solve it: what tells one task from another."""
    observation, _ = env.reset(seed=seed, options={"split": split})
    try:
        return f"{observation}\n{''.join(_script(env)[0])}"
    except _Unchecked:
        return str(observation)


def _solver(env: Any) -> Any:
    try:
        return env.unwrapped.solver()
    except (NotImplementedError, AttributeError):
        raise _Unchecked("the environment has no solver") from None


def _script(env: Any) -> tuple[list[str], dict[str, Any]]:
    """All actions of the solver on the current task, and the last step's info."""
    solver = _solver(env)
    try:
        actions = [next(solver)]
    except NotImplementedError:
        raise _Unchecked("the environment has no solver") from None
    for _ in range(MAX_STEPS):
        observation, _, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            return actions, info
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
            info = _script(env)[1]
            if not info.get("success"):
                return f"the solver failed on seed {seed} of split {split}: {info.get('stop_reason')}"
    return ""


def _returns(env: Any, tasks: int) -> str:
    if not hasattr(env.unwrapped, "snapshot"):
        raise _Unchecked("the environment has no snapshots")
    env.reset(seed=1)
    try:
        _script(env)
    except _Unchecked:
        env.step("without a solver, any text")
    snapshot = env.unwrapped.snapshot()
    env.reset(seed=2)
    env.unwrapped.restore(snapshot)
    return "" if env.unwrapped.snapshot() == snapshot else "the restored episode differs"
