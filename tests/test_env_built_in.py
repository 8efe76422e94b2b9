"""Every built-in environment: gymnasium's checker, seeds, splits, the solver and a random policy."""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from longstraw_agents.envs import BUILT_IN
from longstraw_agents.envs.sandbox import available
from longstraw_agents.errors import ConfigError
from longstraw_agents.types import StopReason

FULL = {"Lookup": 1.4, "DocumentSearch": 1.2, "Workspace": 1.0, "SQLAnalyst": 1.1, "Ledger": 1.5, "Reasoning": 1.0}


def make(env_id, **options):
    if "Workspace" in env_id and not available():
        pytest.skip("bubblewrap is missing")
    if "Reasoning" in env_id and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("the package reasoning-gym is missing")
    return gymnasium.make(env_id, **options)


@pytest.fixture(params=list(BUILT_IN))
def env(request):
    made = make(request.param)
    yield made
    made.close()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextlib.contextmanager
def peak():
    """MB by which memory grew at most inside, as the kernel counts it."""
    def most():
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # begin to count anew
    before, grown = most(), []
    yield grown
    grown.append(most() - before)


def solve(env, **reset):
    observation, info = env.reset(**reset)
    solver, total = env.unwrapped.solver(), 0.0
    action = next(solver)
    for _ in range(200):
        observation, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return total, info
        action = solver.send(observation)
    raise AssertionError("the solver did not end the episode")


@pytest.mark.filterwarnings("error::UserWarning")
def test_gymnasium_accepts_it(env):
    check_env(env.unwrapped)


def test_the_solver_earns_everything(env):
    for seed in range(3):
        for split in ("train", "heldout"):
            total, info = solve(env, seed=seed, options={"split": split})
            assert info["success"] and info["stop_reason"] is StopReason.ANSWERED, env.unwrapped.transcript()
            assert total == pytest.approx(FULL[env.spec.id.split("/")[1].removesuffix("-v0")])


def test_a_random_policy_does_not(env):
    rng = np.random.default_rng(0)
    for seed in range(3):
        env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            noise = "".join(map(chr, rng.integers(32, 127, 30)))
            action = f"<answer>{rng.integers(10_000)}</answer>" if rng.random() < 0.3 else noise
            _, reward, terminated, truncated, info = env.step(action)
            total, ended = total + reward, terminated or truncated
        assert not info["success"] and total < 0.6


def test_a_seed_means_one_task(env):
    first, _ = env.reset(seed=5)
    other, _ = env.reset(seed=6)
    again, _ = env.reset(seed=5)
    assert first == again and (first != other or "Workspace" in env.spec.id)
    heldout, _ = env.reset(seed=5, options={"split": "heldout"})
    assert heldout != first or "Workspace" in env.spec.id


def test_seeds_agree_across_processes():
    ids = [name for name in BUILT_IN if "Reasoning" not in name or importlib.util.find_spec("reasoning_gym")]
    ids = [name for name in ids if "Workspace" not in name or available()]
    script = "from longstraw_agents.envs.checking import first_observations\n"
    script += f"print([first_observations(name, name, 2) for name in {ids}])"
    runs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".",
                       "PYTHONHASHSEED": seed, "PATH": "/usr/bin"}).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1 and len(set(eval(runs.pop())[0])) == 4


def test_splits_of_generated_tasks_share_nothing():
    env = make("longstraw/Workspace-v0", operations=1)  # 64 tasks in all
    seen = {"train": set(), "heldout": set()}
    for split, tasks in seen.items():
        for seed in range(100):
            env.reset(seed=seed, options={"split": split})
            tasks.add(tuple(env.unwrapped.steps))
    env.close()
    assert len(seen["train"]) > 30 and len(seen["heldout"]) > 5 and not seen["train"] & seen["heldout"]


class TestSQL:
    @pytest.mark.parametrize(
        "statement",
        [
            "DELETE FROM orders", "UPDATE products SET price = 0", "INSERT INTO customers VALUES (99, 'x', 'y')",
            "DROP TABLE orders", "CREATE TABLE t (x)", "CREATE TEMP TABLE t (x)", "ATTACH 'x.db' AS x",
            "PRAGMA query_only = 0", "VACUUM INTO '/tmp/x'", "SELECT load_extension('x')", "ANALYZE", "BEGIN", "SAVEPOINT s",
            "ALTER TABLE orders ADD COLUMN c", "DETACH main", "WITH x AS (SELECT 1) DELETE FROM orders",
            "REPLACE INTO customers VALUES (0, 'x', 'y')", "SELECT 1; DELETE FROM orders",
        ],
    )  # fmt: skip
    def test_nothing_writes(self, statement):
        env = make("longstraw/SQLAnalyst-v0")
        env.reset(seed=1)
        database = env.unwrapped._database
        before = database.total_changes, database.execute("SELECT COUNT(*), SUM(quantity) FROM orders").fetchone()
        *_, info = env.step(f'<tool_call>{json.dumps({"name": "query", "arguments": {"sql": statement}})}</tool_call>')
        assert info["tool_calls"][0].error
        assert (database.total_changes, database.execute("SELECT COUNT(*), SUM(quantity) FROM orders").fetchone()) == before

    def test_a_query_without_end_is_stopped(self):
        env = make("longstraw/SQLAnalyst-v0")
        env.reset(seed=1)
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
        observation, *_, info = env.step(f'<tool_call>{json.dumps({"name": "query", "arguments": {"sql": endless}})}</tool_call>')
        assert "too long" in observation and info["tool_calls"][0].seconds < 3.5


    @pytest.mark.parametrize(
        "column",
        [
            "hex(zeroblob(2000))", "hex(randomblob(99999999))", "printf('%.*c', 2000000000, 'x')", "trim(a.id, a.id)",
            "replace(hex(zeroblob(2000)), '0', '00')", "hex(zeroblob(2000)) LIKE '%0%0%0%0%0%0%0%0%0%0%0%1'",
            "instr(hex(zeroblob(2000)), hex(zeroblob(1000)) || '1')",
        ],
    )  # fmt: skip
    def test_a_wide_result_is_not_kept(self, column):
        env = make("longstraw/SQLAnalyst-v0")
        env.reset(seed=1)
        for count in (50, 800):
            sql = f"SELECT {', '.join([column] * count)} FROM orders a, orders b"
            with peak() as grown:
                observation, *_, info = env.step(call("query", sql=sql))
            assert len(observation) < 6000 and grown[0] < 40 and info["tool_calls"][0].seconds < 3


class TestLedger:
    @pytest.mark.parametrize("count", [len, lambda text: len(text.split()), lambda text: len(text.encode()) // 3])
    def test_the_length_is_exact(self, count):
        env = make("longstraw/Ledger-v0", count_tokens=count, length_tokens=5000, sessions=6)
        for seed in range(3):
            observation, _ = env.reset(seed=seed)
            total, solver, ended = count(observation), env.unwrapped.solver(), False
            action = next(solver)
            while not ended:
                observation, _, terminated, truncated, info = env.step(action)
                total, ended = total + count(observation), terminated or truncated
                action = None if ended else solver.send(observation)
            assert total == 5000 and info["success"]

    def test_too_short_a_length_is_refused(self):
        with pytest.raises(ConfigError, match="fewer sessions"):
            make("longstraw/Ledger-v0", length_tokens=50).reset(seed=1)

    def test_questions_reach_far_back(self):
        env = make("longstraw/Ledger-v0", sessions=40)
        env.reset(seed=1)
        assert max(env.unwrapped.reach) > 20


class TestDocuments:
    def test_a_folder_of_ones_own(self, tmp_path):
        for number in range(5):
            (tmp_path / f"note{number}.txt").write_text(f"Note {number}.\n\n" + "lorem ipsum\n\n" * 50)
        env = make("longstraw/DocumentSearch-v0", corpus=str(tmp_path), documents=5, hops=3)
        total, info = solve(env, seed=2)
        assert info["success"] and "note" in env.unwrapped.transcript()

    def test_a_folder_without_text_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="holds no"):
            make("longstraw/DocumentSearch-v0", corpus=str(tmp_path)).reset(seed=1)

    @pytest.mark.parametrize("size", [0, 5_000, 4_000_000])
    def test_the_first_observation_can_be_any_size(self, size):
        observation, _ = make("longstraw/DocumentSearch-v0", preload_chars=size).reset(seed=1)
        assert 0 <= len(observation) - size < 3_000
