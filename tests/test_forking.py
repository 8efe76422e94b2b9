"""Episodes that branch late, and episodes whose context is rewritten: what is shared, what is sampled, what is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from longstraw_agents.collection import CollectConfig, CollectResult, Progress, collect
from longstraw_agents.episodes import KeepRecent
from longstraw_agents.errors import ConfigError
from longstraw_agents.forking import TreeConfig, least_certain, within_budget
from longstraw_agents.policies.local import LocalPolicy
from longstraw_agents.storage import Store
from longstraw_agents.types import Message, StopReason, Task, Trajectory, Turn
from tests.chat import countdown, make_countdown
from tests.test_collection import RENDERER, TOKENIZER, Repeater


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        yield store


def run(
    store: Store, run_id: str, tasks: Sequence[Task], policy: Any, stop_after: int | None = None, **options: Any
) -> CollectResult:
    config = CollectConfig(concurrency=5, max_action_tokens=40, tree=options.pop("tree", None))

    async def go() -> CollectResult:
        stop = asyncio.Event()

        def watch(progress: Progress) -> None:
            if stop_after is not None and progress.turns >= stop_after:
                stop.set()

        settings = {"group_size": 5, "make": make_countdown, **options}
        return await collect(store, policy, RENDERER, tasks, config, run_id=run_id, progress=watch, stop=stop, **settings)

    return asyncio.run(go())


def turn(tokens: int, surprisal: float) -> Turn:
    return Turn(np.array([1], np.int32), np.ones(tokens, np.int32), np.full(tokens, -surprisal, np.float32), 0)


def test_choosers_by_hand() -> None:
    turns = [turn(4, 0.5), turn(10, 2.0), turn(3, 1.0)]
    assert [least_certain(turns, number) for number in range(4)] == [1, 2, 0, 1]
    assert [within_budget(turns, budget) for budget in (17, 16, 13, 12, 3, 2)] == [0, 1, 1, 2, 2, 2]
    with pytest.raises(ConfigError):
        TreeConfig(trunks=0)
    with pytest.raises(ConfigError, match="pass a function"):
        TreeConfig(by="luck")  # type: ignore[arg-type]


def test_branches_share_the_trunks_rows_and_sample_only_what_follows(store: Store) -> None:
    run_id = store.create_run("r", {})
    policy = Repeater()
    result = run(store, run_id, [countdown(3, turns=4)], policy, fork=lambda turns, number: number)
    rows = store.trajectories(result.group_ids[0])
    trunk = rows[0].trajectory_id
    assert [row.parent for row in rows] == [None, trunk, trunk, trunk, trunk] and result.complete
    asked = {row.trajectory_id: sum(r.session == row.trajectory_id for r in policy.requests) for row in rows}
    assert list(asked.values()) == [4, 4, 3, 2, 1]
    group = store.load_group(result.group_ids[0])
    base = group.trajectories[0]
    for number, branch in enumerate(group.trajectories[1:]):
        end = base.turn_ends[number - 1] if number else 0
        np.testing.assert_array_equal(branch.tokens[:end], base.tokens[:end])
        assert len(branch.turn_ends) == 4 and branch.reward == sum(branch.turn_rewards)
    assert len({t.tokens.tobytes() for t in group.trajectories}) > 1


@pytest.mark.parametrize("stop_after", [1, 6, 11])
def test_a_stopped_tree_goes_on_as_it_would_have(store: Store, stop_after: int) -> None:
    tasks = [countdown(3), countdown(4)]
    tree = TreeConfig(trunks=2, by="budget", budget=30)
    whole = run(store, store.create_run("whole", {}), tasks, Repeater(), tree=tree)
    run_id = store.create_run("stopped", {})
    assert not run(store, run_id, tasks, Repeater(), stop_after, tree=tree).complete
    rest = run(store, run_id, tasks, Repeater(), tree=tree)
    assert rest.complete
    for a, b in zip(whole.group_ids, rest.group_ids, strict=True):
        pairs = zip(store.load_group(a).trajectories, store.load_group(b).trajectories, strict=True)
        assert all(np.array_equal(x.tokens, y.tokens) for x, y in pairs)


def test_the_local_policy_runs_nothing_of_the_trunk_again(store: Store) -> None:
    torch.manual_seed(0)
    size = dict(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2)).eval()
    model.lm_head.weight.data[min(RENDERER.stop_ids)] *= 40  # so that most actions end by themselves
    policy = LocalPolicy(model, RENDERER.stop_ids)
    result = run(store, store.create_run("r", {}), [countdown(3, turns=4)], policy, fork=lambda turns, number: len(turns) - 1)
    group = store.load_group(result.group_ids[0])
    observed = [int((~t.action_mask).sum()) for t in group.trajectories]
    base = group.trajectories[0]
    assert len(base.turn_ends) == 4
    # of the trunk its observations and the ends of three actions are input; of each branch only the token before its action
    assert policy.counters.input == observed[0] + 3 + len(group.trajectories) - 1
    assert policy.counters.rerun == 0
    for trajectory in group.trajectories:
        check_logprobs(model, trajectory)


def check_logprobs(model: Any, trajectory: Trajectory) -> None:
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    mask = trajectory.action_mask[1:]
    np.testing.assert_allclose(logp[mask], trajectory.behaviour[1:][mask], atol=1e-4)


def rewrite_every_two(context: Sequence[Message], tokens: int) -> Sequence[Message] | None:
    """After two actions go on with the opening and the last thing said."""
    actions = sum(message.role == "assistant" for message in context)
    return [context[0], Message("user", f"earlier: {actions} turns"), context[-1]] if actions == 2 else None


def test_a_rewritten_context_goes_on_in_linked_parts(store: Store) -> None:
    run_id = store.create_run("r", {})
    result = run(store, run_id, [countdown(3, turns=5)], Repeater(), rewrite=rewrite_every_two, group_size=2)
    rows = store.trajectories(result.group_ids[0])
    assert [(row.member, row.part, row.turns) for row in rows] == [(m, p, n) for m in (0, 1) for p, n in enumerate((2, 2, 1))]
    assert [row.parent for row in rows[:3]] == [None, rows[0].trajectory_id, rows[1].trajectory_id]
    assert all(row.weight == pytest.approx(1 / 3) and row.stop_reason is StopReason.ANSWERED for row in rows)
    assert len({row.reward for row in rows[:3]}) == 1  # each part carries the episode's reward
    group = store.load_group(result.group_ids[0])
    assert "earlier: 2 turns" in TOKENIZER.decode(group.trajectories[1].tokens)
    assert result.progress.episodes == 2 and result.progress.turns == 10


@pytest.mark.parametrize("stop_after", [1, 3, 6, 9])
def test_a_stopped_episode_of_several_parts_goes_on(store: Store, stop_after: int) -> None:
    tasks = [countdown(3, turns=5)]
    whole = run(store, store.create_run("whole", {}), tasks, Repeater(), rewrite=rewrite_every_two, group_size=3)
    run_id = store.create_run("stopped", {})
    run(store, run_id, tasks, Repeater(), stop_after, rewrite=rewrite_every_two, group_size=3)
    policy = Repeater()
    policy.fail_once = {2}
    rest = run(store, run_id, tasks, policy, rewrite=rewrite_every_two, group_size=3)
    first, second = (store.load_group(result.group_ids[0]).trajectories for result in (whole, rest))
    assert [t.tokens.tolist() for t in first] == [t.tokens.tolist() for t in second]


def test_keeping_recent_messages() -> None:
    opening = [Message("system", "s"), Message("user", "u")]
    later = [Message("assistant" if index % 2 == 0 else "tool", str(index)) for index in range(6)]
    keep = KeepRecent(tokens=100, messages=2)
    assert keep([*opening, *later], 100) is None
    assert keep([*opening, *later], 101) == [*opening, *later[-2:]]
    assert keep([*opening, *later[:2]], 101) is None  # nothing to leave out
    with pytest.raises(ConfigError):
        KeepRecent(tokens=0)


def test_a_tree_of_rewritten_episodes_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="one or the other"):
        run(store, store.create_run("r", {}), [countdown(3)], Repeater(), tree=TreeConfig(), rewrite=rewrite_every_two)
