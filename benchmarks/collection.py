"""What collection must never do: lose, repeat, or mix up turns when it is killed, or run a session's history twice.

    python benchmarks/collection.py kills --record     100 processes killed at random while 200 groups are collected through them
    python benchmarks/collection.py rerun --record     SmolLM2 for several turns; history tokens that were run again

The kill trial needs no model: a scripted policy puts the number of its process's life into every action, so the store shows
who sampled what. A turn that was committed and sampled again later would carry another life than the last one that asked for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import tokenizers

from longstraw_agents import figures
from longstraw_agents.collection import CollectConfig, collect
from longstraw_agents.policies import SampleRequest
from longstraw_agents.policies.scripted import ScriptedPolicy
from longstraw_agents.rendering import ChatML, DisarmedEncoder
from longstraw_agents.storage import Store
from longstraw_agents.types import Message, Task

GROUPS, MEMBERS, TURNS = 200, 4, 3


class Characters:
    """A byte-level tokenizer without merges, with ChatML's two control tokens: what a renderer needs and no more."""

    def __init__(self) -> None:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        self.backend_tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        self.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend_tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])

    def get_added_vocab(self) -> dict[str, int]:
        """None."""
        return {token.content: index for index, token in self.backend_tokenizer.get_added_tokens_decoder().items()}

    def decode(self, ids: list[int], **options: Any) -> str:
        """The characters."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=False))


class Numbers(gymnasium.Env[str, str]):
    """Says the next number each turn; an action that begins with the last number earns 1."""

    observation_space = gymnasium.spaces.Text(1000)
    action_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation."""
        super().reset(seed=seed)
        self.turn, self.number = 0, int(self.np_random.integers(10_000))
        return "", {"messages": [Message("system", "Answer with one word."), Message("user", f"number {self.number}")]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The next observation."""
        right = action.split(" ")[0] == str(self.number)
        self.turn, self.number = self.turn + 1, self.number + 1
        return "", float(right), self.turn == TURNS, False, {"messages": [Message("tool", f"number {self.number}")]}


TOKENIZER = Characters()
RENDERER = ChatML(TOKENIZER)


def live(path: str, log: str, life: int) -> None:
    """One life of the collecting process: goes on with what the store holds, until it is killed or done."""
    asked = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def answer(request: SampleRequest) -> str:
        text = TOKENIZER.decode(request.tokens.tolist())
        os.write(asked, f"{request.session} {text.count('number') - 1} {life}\n".encode())
        return f"{text.rsplit('number ', 1)[1].split('<')[0]} {life}"

    policy = ScriptedPolicy(answer, DisarmedEncoder(TOKENIZER), min(RENDERER.stop_ids))
    tasks = [Task("Numbers", seed) for seed in range(GROUPS)]
    with Store.open(path) as store:
        run_id = store.runs()[0].run_id
        config = CollectConfig(concurrency=8, max_action_tokens=64)
        asyncio.run(
            collect(store, policy, RENDERER, tasks, config, run_id=run_id, group_size=MEMBERS, make=lambda task: Numbers())
        )


def kill_trial(kills: int, seed: int) -> dict[str, int]:
    """Kill the collecting process `kills` times at random, let the last one finish, and count what is wrong."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path, log = f"{folder}/store.sqlite", f"{folder}/asked"
        with Store.open(path) as store:
            store.create_run("kills", {})
        Path(log).touch()
        killed = 0
        for life in range(10 * kills):
            child = subprocess.Popen([sys.executable, __file__, "live", path, log, str(life)])
            if killed < kills:
                _await_work(log, child)
                time.sleep(rng.uniform(0.0, 0.12))
                child.send_signal(signal.SIGKILL)
            killed += child.wait() == -signal.SIGKILL
            if child.returncode == 0:
                break
        return {"kills": killed, **_faults(path, log)}


def _await_work(log: str, child: subprocess.Popen[bytes]) -> None:
    size = os.path.getsize(log)
    while os.path.getsize(log) == size and child.poll() is None:
        time.sleep(0.002)


def _faults(path: str, log: str) -> dict[str, int]:
    last_asked: dict[tuple[str, int], str] = {}
    asked = Counter[tuple[str, int]]()
    for line in Path(log).read_text().splitlines():
        session, turn, life = line.split(" ")
        last_asked[session, int(turn)] = life
        asked[session, int(turn)] += 1
    counts = Counter[str]()
    with Store.open(path) as store:
        groups = store.groups(store.runs()[0].run_id)
        counts["groups_lost_or_doubled"] = abs(len(groups) - GROUPS) + (GROUPS - len({group.task.seed for group in groups}))
        counts["groups_incomplete"] = sum(not group.complete for group in groups)
        for group in groups:
            rows = store.trajectories(group.group_id)
            counts["members_wrong"] += sorted(row.member for row in rows) != list(range(MEMBERS))
            for row in rows:
                turns = store.turns(row.trajectory_id)
                counts["rewards_wrong"] += row.reward != float(TURNS) or len(turns) != TURNS
                for index, turn in enumerate(turns):
                    life = RENDERER.text(turn.action).split(" ")[1]
                    counts["committed_turns_sampled_again"] += life != last_asked[row.trajectory_id, index]
    counts["uncommitted_turns_sampled_again"] = sum(asked.values()) - len(asked)
    return dict(counts)


def kills(arguments: argparse.Namespace) -> None:
    """The kill trial, printed and recorded."""
    counts = kill_trial(arguments.kills, arguments.seed)
    lost = counts.pop("uncommitted_turns_sampled_again")
    killed = counts.pop("kills")
    faults = sum(counts.values()) + (killed != arguments.kills)
    print(f"{killed} kills, {GROUPS} groups of {MEMBERS}: {faults} faults {json.dumps(counts)}; {lost} turns were lost unsaved")
    if arguments.record:
        figures.record("collect.kill_faults", faults, "faults", trials=killed, extra={**counts, "unsaved_turns_lost": lost})


def rerun(arguments: argparse.Namespace) -> None:
    """SmolLM2 in an environment of several turns: how many history tokens the local policy ran again."""
    from longstraw_agents.policies.local import LocalPolicy
    from longstraw_agents.trainer.models import ModelConfig, load_model

    model, tokenizer = load_model(ModelConfig(adapter=None))
    renderer = ChatML(tokenizer)
    policy = LocalPolicy(model, renderer.stop_ids)
    tasks = [Task("Numbers", seed) for seed in range(3)]
    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/store.sqlite") as store:
        run_id = store.create_run("rerun", {})
        config = CollectConfig(max_action_tokens=48)
        work = collect(store, policy, renderer, tasks, config, run_id=run_id, group_size=4, make=lambda task: Numbers())
        result = asyncio.run(work)
        rows = [row for group_id in result.group_ids if group_id for row in store.trajectories(group_id)]
        history = sum(_history(store.turns(row.trajectory_id)) for row in rows)
    counters = policy.counters
    print(
        f"{result.progress.turns} turns, {sum(row.length for row in rows)} tokens; without states {history} history tokens were "
        f"run again, here {counters.rerun} were; {counters.shared} tokens came from another session's state"
    )
    if arguments.record:
        extra = {"turns": result.progress.turns, "history_tokens": history, "taken_from_others": counters.shared}
        figures.record("collect.history_tokens_rerun", counters.rerun, "tokens", trials=len(rows), extra=extra)


def _history(turns: list[Any]) -> int:
    """Tokens before each turn's observation, summed: what has been run already when the turn begins."""
    total = before = 0
    for turn in turns:
        total += before
        before += len(turn.observation) + len(turn.action)
    return total


def main() -> None:
    """Measure what the command line asks for."""
    if sys.argv[1:2] == ["live"]:
        return live(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kills", "rerun"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    {"kills": kills, "rerun": rerun}[arguments.part](arguments)


if __name__ == "__main__":
    main()
