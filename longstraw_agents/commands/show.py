"""Show a store's runs, one run, one group, or one trajectory turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from longstraw_agents.terminal import Terminal, cell, json_option, sparkline, write_json

if TYPE_CHECKING:
    from longstraw_agents.storage import Store

FOLD = 2000  # characters of an observation or action that are shown


@click.command()
@click.argument("url")
@click.argument("what", required=False)
@click.option("--full", is_flag=True, help="Show observations and actions whole.")
@json_option
def show(url: str, what: str | None, full: bool, json_path: Path | None) -> None:
    """Show what the store at URL holds: its runs, or WHAT: a run (r1), a group (g1), or a trajectory (t1)."""
    from longstraw_agents.errors import ConfigError
    from longstraw_agents.storage import Store

    views: Mapping[str, Callable[[Store, str, Terminal, bool], dict[str, Any]]] = {
        "r": _show_run, "g": _show_group, "t": _show_trajectory,
    }  # fmt: skip
    terminal = Terminal()
    with Store.open(url, create=False) as store:
        if what is None:
            report = _show_runs(store, terminal)
        elif what[:1] in views and what[1:].isdigit():
            report = views[what[0]](store, what, terminal, full)
        else:
            raise ConfigError(f"{what!r} is no run, group or trajectory; write r1, g1 or t1")
    write_json(json_path, report)


def _show_runs(store: Store, terminal: Terminal) -> dict[str, Any]:
    rows = []
    for run in store.runs():
        step = store.latest_step(run.run_id)
        groups = store.groups(run.run_id)
        rows.append(
            {
                "run": run.run_id,
                "name": run.name,
                "updates": step.step if step else 0,
                "groups": len(groups),
                "unused": sum(group.step is None and group.purpose == "train" for group in groups),
            }
        )
        terminal.row(rows[-1])
    if not rows:
        terminal.say("the store holds no run")
    return {"runs": rows}


def _show_run(store: Store, run_id: str, terminal: Terminal, full: bool) -> dict[str, Any]:
    from longstraw_agents.receipts import update_row

    rows = [update_row(step.step, step.receipt) for step in store.steps(run_id) if "collected" in step.receipt]
    for row in rows:
        terminal.row(row)
    if rows:
        terminal.say(f"reward  {sparkline([row['reward'] for row in rows])}")
    evaluations = {}
    for evaluation in store.evaluations(run_id):
        evaluations[evaluation.name] = evaluation.metrics
        for mode, values in evaluation.metrics.items():
            score = values["score"]
            low, high = score["success_interval"]
            terminal.say(f"{evaluation.name:<12} {mode:<8} success {score['success']:6.1%}  [{low:.1%}, {high:.1%}]")
    open_rows = store.open_trajectories(run_id)
    terminal.say(f"{len(open_rows)} trajectories are open")
    return {"run": run_id, "updates": rows, "evaluations": evaluations, "open": len(open_rows)}


def _show_group(store: Store, group_id: str, terminal: Terminal, full: bool) -> dict[str, Any]:
    rows = []
    for row in store.trajectories(group_id):
        rows.append(
            {
                "trajectory": row.trajectory_id,
                "member": row.member,
                "turns": row.turns,
                "tokens": row.length,
                "reward": row.reward,
                "success": "-" if row.success is None else str(row.success).lower(),
                "stop_reason": row.stop_reason.value if row.stop_reason else "open",
            }
        )
        terminal.row(rows[-1])
    return {"group": group_id, "trajectories": rows}


def _show_trajectory(store: Store, trajectory_id: str, terminal: Terminal, full: bool) -> dict[str, Any]:
    from longstraw_agents.decoding import decoder_of, printable
    from longstraw_agents.storage import browse

    row = store.trajectory(trajectory_id)
    decoder = decoder_of(browse.run(store, browse.group(store, row.group_id).run_id).config)
    reason = row.stop_reason.value if row.stop_reason else "open"
    terminal.say(f"{trajectory_id}: {row.turns} turns, {row.length:,} tokens, {reason}, reward {cell(row.reward)}")
    turns = []
    for index, turn in enumerate(store.turns(trajectory_id)):
        observation, action = (_fold(printable(decoder.text(ids)), full) for ids in (turn.observation, turn.action))
        calls = [{"name": call.name, "arguments": dict(call.arguments), "error": call.error} for call in turn.tool_calls]
        turns.append({"observation": observation, "action": action, "calls": calls, "reward": turn.reward})
        terminal.say(click.style(f"-- turn {index}, observation, {len(turn.observation):,} tokens", dim=True))
        terminal.say(observation)
        if len(turn.action):
            mean = float(turn.behaviour.mean())
            terminal.say(click.style(f"-- action, {len(turn.action):,} tokens, mean log-probability {mean:.3f}", dim=True))
            terminal.say(action)
        for call in calls:
            terminal.say(click.style(f"   call {call['name']} {call['arguments']}  {call['error'] or 'went well'}", dim=True))
        terminal.say(click.style(f"   reward {turn.reward:g}", dim=True))
    return {"trajectory": trajectory_id, "stop_reason": reason, "reward": row.reward, "turns": turns}


def _fold(text: str, full: bool) -> str:
    if full or len(text) <= FOLD:
        return text
    half = FOLD // 2
    return f"{text[:half]}\n... {len(text) - FOLD:,} characters more (--full shows them) ...\n{text[-half:]}"
