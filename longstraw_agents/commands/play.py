"""Act as the policy in an environment, from the terminal."""

from __future__ import annotations

import json
import os
import unicodedata

import click


@click.command()
@click.argument("environment", metavar="ID|MODULE:ID|PATH")
@click.option("--seed", default=0, show_default=True)
@click.option("--split", type=click.Choice(["train", "heldout"]), default="train", show_default=True)
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of reset, the value as JSON.")
@click.option("--solve", is_flag=True, help="Let the environment's own solver play.")
@click.option("--unsafe-no-sandbox", is_flag=True, help="Run commands of the environment with your own rights.")
def play(environment: str, seed: int, split: str, options: tuple[str, ...], solve: bool, unsafe_no_sandbox: bool) -> None:
    """Read what the environment says, type an action, end it with a line that holds only a dot."""
    import gymnasium

    from longstraw_agents.envs.checking import find_environments
    from longstraw_agents.envs.sandbox import UNSAFE_VARIABLE

    if unsafe_no_sandbox:
        os.environ[UNSAFE_VARIABLE] = "1"
    env = gymnasium.make(find_environments(environment)[0])
    try:
        observation, info = env.reset(seed=seed, options={"split": split, **dict(map(_option, options))})
        solver = env.unwrapped.solver() if solve else None  # type: ignore[attr-defined]
        total, ended = 0.0, False
        show(observation, info)
        action = next(solver) if solver else ask()
        while not ended:
            if solver:
                click.secho(visible(action), fg="green")
            observation, reward, terminated, truncated, info = env.step(action)
            total, ended = total + float(reward), terminated or truncated
            show(observation, info)
            parts = ", ".join(f"{name} {value:g}" for name, value in info.get("reward_parts", {}).items())
            click.secho(f"reward {reward:g}" + (f" ({parts})" if parts else ""), dim=True)
            if not ended:
                action = solver.send(observation) if solver else ask()
        click.secho(f"ended: {info.get('stop_reason', 'over')}; success {info.get('success')}; reward {total:g}", bold=True)
    finally:
        env.close()


def show(observation: str, info: dict[str, object]) -> None:
    """Print what the environment said, message by message where it says so."""
    messages = info.get("messages")
    if not isinstance(messages, list):
        click.echo(visible(observation))
        return
    for message in messages:
        click.secho(f"[{message.role}]", fg="cyan")
        click.echo(visible(message.content))


def visible(text: str) -> str:
    """The text with control characters and lone surrogates spelled out: a document must not command the terminal."""
    return "".join(
        each if each in "\n\t" or not unicodedata.category(each).startswith("C") else each.encode("unicode_escape").decode()
        for each in text
    )


def ask() -> str:
    """Lines from the terminal up to a lone dot; the end of input ends the action too, and an empty one aborts."""
    lines: list[str] = []
    while True:
        try:
            line = click.prompt(">", prompt_suffix=" ", default="", show_default=False)
        except click.Abort:
            if not lines:
                raise
            break
        if line == ".":
            break
        lines.append(line)
    return "\n".join(lines)


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"--option takes KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
