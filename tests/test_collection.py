"""Collection against a real store: what is sampled, what is found again, what is recorded of failures."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longstraw_agents.collection import CollectConfig, CollectResult, Progress, collect
from longstraw_agents.envs import Grade, ToolEnv, tool
from longstraw_agents.episodes import make_registered
from longstraw_agents.errors import ConfigError, PolicyError, StoreError
from longstraw_agents.policies import Sample, SampleRequest
from longstraw_agents.policies.scripted import ScriptedPolicy
from longstraw_agents.rendering import ChatML, DisarmedEncoder
from longstraw_agents.storage import Store
from longstraw_agents.types import StopReason, Task
from tests.chat import Countdown, countdown, make_countdown, small_tokenizer

TOKENIZER = small_tokenizer()
RENDERER = ChatML(TOKENIZER)
ENCODE = DisarmedEncoder(TOKENIZER)
END = TOKENIZER.get_added_vocab()["<|im_end|>"]


class Repeater(ScriptedPolicy):
    """Repeats the last number with probability depending on the request's seed, so that seeds can be seen in the tokens."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(self.reply, ENCODE, END, version=version)
        self.requests: list[SampleRequest] = []
        self.fail_once: set[int] = set()

    def reply(self, request: SampleRequest) -> str:
        last = TOKENIZER.decode(request.tokens).rsplit("number ", 1)[1].split("<")[0]
        return f"number {last}" if request.seed % 3 else f"no {request.seed % 1000}"

    async def sample(self, request: SampleRequest) -> Sample:
        await asyncio.sleep(0.001)
        self.requests.append(request)
        if len(self.requests) in self.fail_once:
            raise PolicyError("the engine is away")
        return await super().sample(request)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        yield store


def run(store: Store, run_id: str, tasks: list[Task], policy: Repeater | None = None, **options) -> CollectResult:
    config = CollectConfig(**{"concurrency": 6, "max_action_tokens": 40, **options.pop("config", {})})
    return asyncio.run(
        collect(
            store,
            policy or Repeater(),
            RENDERER,
            tasks,
            config,
            run_id=run_id,
            **{"group_size": 4, "make": make_countdown, **options},
        )
    )


def contents(store: Store, result: CollectResult) -> list[list[tuple[list[int], float | None]]]:
    groups = [store.load_group(group_id) for group_id in result.group_ids]
    return [[(t.tokens.tolist(), t.reward) for t in group.trajectories] for group in groups]


def test_each_task_gets_its_group_and_tokens_are_those_of_the_conversation(store: Store) -> None:
    run_id = store.create_run("r", {})
    tasks = [countdown(1), countdown(2, turns=2), countdown(1)]
    seen: list[tuple[int, int]] = []
    result = run(store, run_id, tasks, progress=lambda p: seen.append((p.episodes, p.turns)))
    assert result.complete and len(set(result.group_ids)) == 3
    assert seen[-1] == (12, 4 * (3 + 2 + 3))
    for group_id, task in zip(result.group_ids, tasks, strict=True):
        group = store.load_group(group_id)
        assert group.task == task and len(group.trajectories) == 4
        for trajectory in group.trajectories:
            text = TOKENIZER.decode(trajectory.tokens)
            assert text.startswith("<|im_start|>system\nRepeat.<|im_end|>\n<|im_start|>user\nnumber ")
            assert text.count("<|im_end|>\n<|im_start|>tool\nnumber ") == task.options.get("turns", 3) - 1
            # only what the policy wrote is marked
            marked = TOKENIZER.decode(trajectory.tokens[trajectory.action_mask])
            assert marked.count("<|im_end|>") == len(trajectory.turn_ends) and "tool" not in marked and "system" not in marked
            assert trajectory.reward == sum(trajectory.turn_rewards)
            assert trajectory.stop_reason is StopReason.ANSWERED
    turns = store.turns(store.trajectories(result.group_ids[0])[0].trajectory_id)
    assert turns[0].tool_calls[0].name == "count" and set(turns[0].reward_parts) == {"right"}
    first, _, third = contents(store, result)
    assert first != third  # the same task twice is sampled with other seeds


def test_a_second_call_samples_nothing(store: Store) -> None:
    run_id = store.create_run("r", {})
    tasks = [countdown(1), countdown(2)]
    first = run(store, run_id, tasks)
    policy = Repeater()
    again = run(store, run_id, tasks, policy)
    assert again.group_ids == first.group_ids and again.complete and not policy.requests
    assert run(store, run_id, [countdown(2)], Repeater()).group_ids == first.group_ids[1:]


@pytest.mark.parametrize("turns_before_stop", [1, 7, 20])
def test_after_a_stop_the_rest_is_what_it_would_have_been(store: Store, turns_before_stop: int) -> None:
    tasks = [countdown(1), countdown(2), countdown(3)]
    whole = run(store, store.create_run("whole", {}), tasks)
    run_id = store.create_run("stopped", {})

    async def interrupted() -> CollectResult:
        stop = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.turns >= turns_before_stop:
                stop.set()

        config = CollectConfig(concurrency=6, max_action_tokens=40)
        return await collect(
            store,
            Repeater(),
            RENDERER,
            tasks,
            config,
            run_id=run_id,
            group_size=4,
            progress=watch,
            stop=stop,
            make=make_countdown,
        )

    partial = asyncio.run(interrupted())
    assert not partial.complete and partial.progress.turns < 36
    policy = Repeater()
    rest = run(store, run_id, tasks, policy)
    assert rest.complete
    assert contents(store, rest) == contents(store, whole)
    assert len(policy.requests) == 36 - partial.progress.turns
    assert not store.open_trajectories(run_id)


def test_groups_that_do_not_count_are_left_alone(store: Store) -> None:
    run_id = store.create_run("r", {})
    tasks = [countdown(1)]
    first = run(store, run_id, tasks).group_ids[0]
    assert run(store, run_id, tasks, Repeater(version=1)).group_ids[0] != first  # stale
    assert run(store, run_id, tasks, Repeater(version=1), config={"max_staleness": 1}).group_ids[0] == first
    assert run(store, run_id, tasks, purpose="eval").group_ids[0] != first
    assert run(store, run_id, tasks, group_size=2).group_ids[0] != first
    store.commit_step(run_id, step=1, first_version=0, last_version=1, group_ids=[first], files={}, receipt={})
    assert run(store, run_id, tasks).group_ids[0] != first  # used


def test_a_broken_member_is_recorded_and_its_siblings_kept(store: Store) -> None:
    class BreaksInOne(Countdown):
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            self.broken = type(self).made % 4 == 2

        def step(self, action: str):
            if self.broken:
                raise RuntimeError("the tool broke")
            return super().step(action)

    result = run(
        store, store.create_run("r", {}), [countdown(5)], make=lambda task: BreaksInOne(), config={"retries": 0, "concurrency": 1}
    )
    rows = store.trajectories(result.group_ids[0])
    reasons = [row.stop_reason for row in rows]
    assert reasons.count(StopReason.ENVIRONMENT_ERROR) == 1 and reasons.count(StopReason.ANSWERED) == 3
    assert [row.reward is None for row in rows] == [reason is StopReason.ENVIRONMENT_ERROR for reason in reasons]
    assert result.complete and result.progress.failures == {"environment_error": 1} and result.progress.rewarded == 3


@pytest.mark.parametrize("options", [{"raise_at": 2}, {"not_finite": True}])
def test_retries_are_limited_and_repeat_no_committed_turn(store: Store, options: dict) -> None:
    policy = Repeater()
    result = run(store, store.create_run("r", {}), [countdown(5, **options)], policy, group_size=1, config={"retries": 2})
    (row,) = store.trajectories(result.group_ids[0])
    assert row.stop_reason is StopReason.ENVIRONMENT_ERROR and row.reward is None
    committed = {"raise_at": 1, "not_finite": 2}[next(iter(options))]
    assert row.turns == committed
    assert len(policy.requests) == committed + 3  # the failing turn once per attempt
    assert result.progress.retried == 2


def test_a_policy_that_comes_back_costs_nothing(store: Store) -> None:
    tasks = [countdown(1)]
    whole = run(store, store.create_run("a", {}), tasks)
    policy = Repeater()
    policy.fail_once = {2, 5}
    result = run(store, store.create_run("b", {}), tasks, policy)
    assert contents(store, result) == contents(store, whole) and result.progress.retried == 2
    assert not result.progress.failures


def test_an_environment_that_does_not_repeat_itself_is_found_out(store: Store) -> None:
    policy = Repeater()
    policy.fail_once = {3}
    result = run(store, store.create_run("r", {}), [countdown(1, noisy=True)], policy, group_size=1)
    assert result.progress.failures == {"environment_error": 1}


def test_an_action_that_was_cut_ends_the_episode_unread(store: Store) -> None:
    Countdown.calls = 0
    result = run(store, store.create_run("r", {}), [countdown(1)], config={"max_action_tokens": 4})
    rows = store.trajectories(result.group_ids[0])
    assert {row.stop_reason for row in rows} == {StopReason.ACTION_CUT} and {row.turns for row in rows} == {1}
    assert Countdown.calls == 0 and {row.reward for row in rows} == {0.0}


def test_the_trajectory_never_grows_past_its_limit(store: Store) -> None:
    whole = run(store, store.create_run("a", {}), [countdown(1)])
    lengths = [len(t.tokens) for t in store.load_group(whole.group_ids[0]).trajectories]
    for limit in (30, 60, max(lengths) - 3, max(lengths)):
        result = run(store, store.create_run("b", {}), [countdown(1)], config={"max_trajectory_tokens": limit})
        for row, length in zip(store.trajectories(result.group_ids[0]), lengths, strict=True):
            assert row.length <= limit
            assert row.stop_reason is (StopReason.ANSWERED if length <= limit else StopReason.TOKEN_LIMIT)


def test_a_slow_environment_fails_its_episode_only(store: Store) -> None:
    import time

    class Slow(Countdown):
        def step(self, action: str):
            time.sleep(0.4)
            return super().step(action)

    result = run(
        store,
        store.create_run("r", {}),
        [countdown(1)],
        make=lambda task: Slow(),
        group_size=1,
        config={"environment_seconds": 0.05, "retries": 0},
    )
    assert result.progress.failures == {"environment_error": 1}


def test_episodes_of_outdated_groups_are_given_up(store: Store) -> None:
    class Advancing(Repeater):
        async def sample(self, request: SampleRequest) -> Sample:
            got = await super().sample(request)
            self.version = 2 if len(self.requests) > 5 else 0
            return got

    run_id = store.create_run("r", {})
    result = run(store, run_id, [countdown(1)], Advancing(), config={"max_staleness": 1})
    assert result.progress.failures["cancelled"] > 0


def test_store_errors_end_the_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise StoreError("no room")

    run_id = store.create_run("r", {})
    monkeypatch.setattr(store, "append_turn", full)
    with pytest.raises(StoreError, match="no room"):
        run(store, run_id, [countdown(1)])
    monkeypatch.undo()
    assert run(store, run_id, [countdown(1)]).complete


def test_settings_out_of_range_are_refused(store: Store) -> None:
    for options in (
        {"concurrency": 0},
        {"retries": -1},
        {"max_staleness": -1},
        {"max_trajectory_tokens": 1},
        {"environment_seconds": 0},
    ):
        with pytest.raises(ConfigError):
            CollectConfig(**options)
    with pytest.raises(ConfigError, match="group_size"):
        run(store, store.create_run("r", {}), [], group_size=0)
    with pytest.raises(ConfigError, match="unknown environment 'Nowhere-v0'"):
        run(store, store.create_run("r", {}), [Task("Nowhere-v0", 0)], make=make_registered)


def test_gymnasium_environments_without_messages_speak_as_the_user(store: Store) -> None:
    class Plain(Countdown):
        def reset(self, **options):
            super().reset(**options)
            return "number 1", {}

        def step(self, action: str):
            return "number 2", 1.0, True, False, {}

    result = run(store, store.create_run("r", {}), [countdown(1)], make=lambda task: Plain(), group_size=1)
    trajectory = store.load_group(result.group_ids[0]).trajectories[0]
    assert TOKENIZER.decode(trajectory.tokens).startswith("<|im_start|>user\nnumber 1<|im_end|>\n")
    assert trajectory.reward == 1.0 and np.isfinite(trajectory.behaviour[trajectory.action_mask]).all()


def test_an_episode_that_ended_but_was_not_finished_is_finished_without_sampling(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: object, **options: object) -> None:
        raise StoreError("the power went")

    run_id = store.create_run("r", {})
    monkeypatch.setattr(store, "finish_trajectory", away)
    with pytest.raises(StoreError):
        run(store, run_id, [countdown(1)], group_size=1)
    monkeypatch.undo()
    policy = Repeater()
    result = run(store, run_id, [countdown(1)], policy, group_size=1)
    assert result.complete and not policy.requests
    assert store.trajectories(result.group_ids[0])[0].reward is not None


class Dice(ToolEnv):
    """Roll twice, then say both numbers."""

    def new_task(self, rng, split):
        return "Roll twice."

    @tool
    def roll(self) -> int:
        """Roll the dice."""
        return random.SystemRandom().randrange(10**9)

    def grade(self, episode):
        rolled = [call.result for calls in episode.calls for call in calls]
        return Grade(episode.answer == " ".join(rolled))


def make_dice(task: Task) -> Dice:
    env = Dice()
    env.tools["roll"] = dataclasses.replace(env.tools["roll"], repeatable=False)
    return env


def test_an_episode_is_rebuilt_with_the_results_that_its_tools_gave_then(store: Store) -> None:
    class Roller(Repeater):
        def reply(self, request: SampleRequest) -> str:
            said = [part.split("<")[0].strip() for part in TOKENIZER.decode(request.tokens).split("<|im_start|>tool\n")[1:]]
            numbers = [part for part in said if part.isdigit()]
            answer = f"<answer>{' '.join(numbers)}</answer>"
            return answer if len(numbers) == 2 else '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'

    policy = Roller()
    policy.fail_once = {3}  # after two rolls
    run_id = store.create_run("r", {})
    config = {"max_action_tokens": 200, "max_trajectory_tokens": 4000, "retries": 1}
    result = run(store, run_id, [Task("dice", 1)], policy, make=make_dice, group_size=1, config=config)
    (row,) = store.trajectories(result.group_ids[0])
    assert result.progress.retried == 1 and row.stop_reason is StopReason.ANSWERED and row.success


@pytest.mark.parametrize("name", ["Lookup", "DocumentSearch", "SQLAnalyst", "Ledger"])
def test_all_members_of_a_group_face_the_same_task(store: Store, name: str) -> None:
    policy = ScriptedPolicy(lambda request: f"<answer>{request.seed}</answer>", ENCODE, END)
    tasks = [Task(f"longstraw/{name}-v0", 5), Task(f"longstraw/{name}-v0", 5, "heldout")]
    config = {"max_trajectory_tokens": 20_000, "max_action_tokens": 40}
    result = run(store, store.create_run("r", {}), tasks, policy, make=make_registered, config=config)
    first = [
        {store.turns(row.trajectory_id)[0].observation.tobytes() for row in store.trajectories(group_id)}
        for group_id in result.group_ids
    ]
    assert [len(each) for each in first] == [1, 1] and first[0] != first[1]
