"""Environments of others, unchanged, as text environments of ours: any Gymnasium environment, TextArena games, OpenEnv servers.

Idea: each adapter is a `gymnasium.Env` with text in and text out that adds what collection reads: `info["messages"]`, stop
reason, success and reward parts. What can't be read as an action is answered with an explanation and does not step the
environment. `adapters_verifiers` has those of the `verifiers` package.

Vocabulary
    show   makes text of an observation that is none
    read   makes an action of the policy's text; raises ValueError with an explanation where it can't
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from longstraw_agents.envs.parsing import parse_action
from longstraw_agents.envs.tool_env import SPLITS, AnyText
from longstraw_agents.errors import ConfigError, EnvironmentFault
from longstraw_agents.types import Message, StopReason, Task

#: Seeds of held-out tasks begin here, so that both splits never share one.
HELDOUT_SEEDS = 2**31


def answer_of(action: str) -> str:
    """The text of an action: what stands in its answer tags where there are some, else all of it without thinking."""
    parsed = parse_action(action)
    return parsed.text.strip() if parsed.answer is None else parsed.answer


class Adapter(gymnasium.Env[str, str]):
    """The common part: `begin` and `advance` are an adapter's own; seeds, splits, budgets and messages are here."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        instructions: str = "",
        max_turns: int = 100,
        bounds: tuple[float, float] = (-1e6, 1e6),
    ) -> None:
        if not all(math.isfinite(bound) for bound in bounds) or bounds[0] > bounds[1]:
            raise ConfigError(f"bounds of the reward must be two finite numbers, the lower one first, got {bounds}")
        self.bounds = bounds
        self.render_mode = render_mode
        self.observation_space, self.action_space = AnyText(), AnyText()
        self.instructions, self.max_turns = instructions, max_turns
        self._turns, self._ended, self._log = 0, True, [""]

    def begin(self, seed: int, split: str) -> str:
        """Start the task of this seed and give its first text."""
        raise NotImplementedError

    def advance(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Take an action: text, reward, whether it ended, info. Raises ValueError for what can't be read as an action."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the task of a seed. Options: "split" and "max_turns"."""
        super().reset(seed=seed)
        given = {"split": "train", "max_turns": self.max_turns, **(options or {})}
        if set(given) != {"split", "max_turns"} or given["split"] not in SPLITS:
            raise ConfigError(f"options are split (train or heldout) and max_turns, got {options}")
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        self._limit, self._turns, self._ended = given["max_turns"], 0, False
        first = self.begin(seed + (HELDOUT_SEEDS if given["split"] == "heldout" else 0), given["split"])
        messages = [Message("system", self.instructions)] if self.instructions else []
        messages.append(Message("user", first))
        observation = "\n".join(message.content for message in messages)
        self._log = [observation]
        env_id = self.spec.id if self.spec is not None else type(self).__name__
        return observation, {"messages": messages, "task": Task(env_id, seed, given["split"])}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the policy's text. Raises EnvironmentFault outside an episode and for a reward not finite or out of bounds."""
        if self._ended:
            raise EnvironmentFault("there is no open episode; call reset before step")
        self._turns += 1
        try:
            observation, reward, terminated, info = self.advance(action)
        except ValueError as fault:
            observation, reward, terminated, info = str(fault), 0.0, False, {}
        reward = float(reward)
        if not math.isfinite(reward) or not self.bounds[0] <= reward <= self.bounds[1]:
            raise EnvironmentFault(f"the adapted environment gave the reward {reward}, not a finite number within {self.bounds}")
        truncated = not terminated and (bool(info.get("truncated")) or self._turns >= self._limit)
        self._ended = terminated or truncated
        self._log += [action, observation]
        told: dict[str, Any] = {
            "messages": [] if terminated or not observation else [Message("user", observation)],
            "tool_calls": [], "reward_parts": {"reward": reward},
        }  # fmt: skip
        if self._ended:
            told["stop_reason"] = StopReason.ANSWERED if terminated else StopReason.TURN_LIMIT
            told["success"] = bool(info.get("success", info.get("is_success", terminated and reward > 0)))
        return "\n".join(m.content for m in told["messages"]), reward, terminated, truncated, told

    def render(self) -> str | None:  # type: ignore[override]
        """The transcript, in render mode "ansi"."""
        return "\n".join(self._log) if self.render_mode == "ansi" else None


class GymnasiumText(Adapter):
    """Any Gymnasium environment. Text observations and actions need no help; discrete actions are read as their number."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        show: Callable[[Any], str] | None = None,
        read: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.env = env
        if show is None and not isinstance(env.observation_space, gymnasium.spaces.Text):
            show = lambda observation: json.dumps(observation, default=lambda value: np.asarray(value).tolist())
        if read is None and isinstance(env.action_space, gymnasium.spaces.Discrete):
            read = self._number
        elif read is None and not isinstance(env.action_space, gymnasium.spaces.Text):
            raise ConfigError(f"actions of {env.action_space} are no text; pass read=, a function from text to an action")
        self._show, self._read = show or str, read or answer_of

    def _number(self, action: str) -> int:
        found = re.findall(r"-?\d+", answer_of(action)[-1000:])
        space: Any = self.env.action_space
        number = int(found[-1]) if found else None  # of at most 1,000 digits
        if number is None or not space.start <= number < space.start + space.n:
            raise ValueError(f"Answer with one number from {space.start} to {space.start + space.n - 1}.")
        return number

    def begin(self, seed: int, split: str) -> str:
        """Reset the environment and show what it says."""
        observation, _ = self.env.reset(seed=seed)
        return self._show(observation)

    def advance(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Read the action, step, and show what the environment says."""
        observation, reward, terminated, truncated, info = self.env.step(self._read(action))
        return self._show(observation), float(reward), terminated, {**info, "truncated": truncated}

    def close(self) -> None:
        """Close the adapted environment."""
        self.env.close()


class TextArena(Adapter):
    """A game of the `textarena` package (`pip install textarena`). The policy is player 0; `opponent` plays the others."""

    def __init__(
        self, game: str, *, players: int = 1, opponent: Callable[[str], str] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        try:
            import textarena
        except ImportError as error:
            raise ConfigError("TextArena games need a package: pip install textarena") from error
        if players > 1 and opponent is None:
            raise ConfigError(f"{game} with {players} players needs opponent=, a function from an observation to an action")
        # "-raw": only what is new since a player's last turn; the default wrappers repeat the whole history each time
        name = game if game.endswith("-raw") else f"{game}-raw"
        self._make: Callable[[], Any] = lambda: textarena.make(env_id=name)
        self._game: Any = self._make()
        self._players, self._opponent = players, opponent

    def begin(self, seed: int, split: str) -> str:
        """A new game, played up to the policy's first turn."""
        self._game = self._make()
        self._game.reset(num_players=self._players, seed=seed)
        return self._until_our_turn()[0]

    def advance(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """The policy's move, and the others' up to its next turn."""
        ended, _ = self._game.step(action=answer_of(action))
        text = ""
        if not ended:
            text, ended = self._until_our_turn()
        if not ended:
            return text, 0.0, False, {}
        rewards, _ = self._game.close()
        reward = float((rewards or {}).get(0, 0.0))
        return "", reward, True, {"success": reward > 0 and reward >= max(rewards.values())}

    def _until_our_turn(self) -> tuple[str, bool]:
        while True:
            player, observation = self._game.get_observation()
            told = [text for sender, text, kind in observation if (sender, kind.name) != (player, "PLAYER_ACTION")]
            text = "\n".join(told)
            if player == 0:
                return text, False
            assert self._opponent is not None
            ended, _ = self._game.step(action=self._opponent(text))
            if ended:
                return "", True


class OpenEnv(Adapter):
    """An OpenEnv server (`pip install openenv`), by its URL, through its generic client.

    `field` is the action's field that takes the text; without it the text is read as the whole action in JSON. Observations
    are shown as JSON, or as the one field that `shown` names.
    """

    def __init__(self, url: str, *, field: str | None = None, shown: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ConfigError("OpenEnv servers need a package: pip install openenv") from error
        self._client = GenericEnvClient(base_url=url).sync()
        self._client.connect()
        self._field, self._shown = field, shown

    def begin(self, seed: int, split: str) -> str:
        """Reset the server's environment."""
        return self._text(self._client.reset(seed=seed).observation)

    def advance(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Send the action to the server."""
        result = self._client.step(self._action(answer_of(action)))
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done), {}

    def _action(self, text: str) -> dict[str, Any]:
        if self._field is not None:
            return {self._field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The action is not valid JSON: {error}. Write one JSON object.") from None
        if not isinstance(action, dict):
            raise ValueError("The action must be one JSON object.")
        return action

    def _text(self, observation: Any) -> str:
        if self._shown is not None and isinstance(observation, Mapping):
            return str(observation.get(self._shown, ""))
        return json.dumps(observation, ensure_ascii=False, default=str)

    def close(self) -> None:
        """End the session on the server."""
        self._client.close()
