"""Several collectors, one PostgreSQL store.

    python examples/postgresql_collectors.py postgresql+psycopg://USER@HOST/NAME [COLLECTORS]

Each collector is a process of its own (here, or on another machine) with its own policy; they share nothing but the store. What
they collect is what `longstraw train` with the same store uses. The policy here is scripted, so that the example needs no model;
see docs/collect.md for real ones. Any store URL will do, a SQLite path too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys

import longstraw_agents.envs  # noqa: F401  registers the environments
from longstraw_agents.collection import CollectConfig, collect
from longstraw_agents.policies.scripted import ScriptedPolicy
from longstraw_agents.rendering import ChatML
from longstraw_agents.storage import Store
from longstraw_agents.types import Task


def collector(url: str, run_id: str, number: int, groups: int) -> None:
    """Collect some groups of the run; the tasks follow from the collector's number, so none is collected twice."""
    from transformers import AutoTokenizer

    from longstraw_agents.trainer.models import smollm2_folder

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    renderer = ChatML(tokenizer)
    policy = ScriptedPolicy(lambda request: 'stock("egg")', lambda text: tokenizer(text)["input_ids"], renderer.end_id)
    tasks = [Task("longstraw/Lookup-v0", seed=1000 * number + index) for index in range(groups)]
    with Store.open(url) as store:
        config = CollectConfig(max_action_tokens=32)
        result = asyncio.run(collect(store, policy, renderer, tasks, config, run_id=run_id, group_size=4))
    print(f"collector {number}: {result.progress.episodes} episodes, {result.progress.action_tokens} tokens sampled", flush=True)


def main() -> None:
    """Begin a run, start the collectors, and count what they left."""
    url = sys.argv[1]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with Store.open(url) as store:
        run_id = store.create_run("collectors", {})
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=collector, args=(url, run_id, number, 3)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with Store.open(url) as store:
        groups = store.groups(run_id, complete=True)
        print(f"{len(groups)} complete groups in {url.rpartition('/')[2]}")
        assert len(groups) == 3 * count


if __name__ == "__main__":
    main()
