"""longstraw/Workspace-v0: write a small program in a sandboxed folder; hidden tests decide the reward.

Idea: a task is a chain of list operations with numbers of its own, described in README.md; solution.py holds a function that
does the first of them only. After the episode the function runs in a fresh sandbox on inputs that the agent never saw, with
the folder read-only; what it returns is compared here, outside. The expected values never enter the sandbox, so there is no
file or process from which a reward could be read, and none that could be changed.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.sandbox import Sandbox, SandboxConfig, obstacle, remove, require
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.envs.tools import ToolLimits, clip, tool
from longstraw_agents.errors import EnvironmentFault, SandboxError, ToolFault

#: name -> (what the task says, the Python line that does it, what it does); {k} is a number of the task
OPERATIONS: dict[str, tuple[str, str, Callable[[list[int], int], list[int]]]] = {
    "multiply": ("multiply every number by {k}", "values = [v * {k} for v in values]", lambda v, k: [x * k for x in v]),
    "add": ("add {k} to every number", "values = [v + {k} for v in values]", lambda v, k: [x + k for x in v]),
    "keep": (
        "keep only the numbers divisible by {k}",
        "values = [v for v in values if v % {k} == 0]",
        lambda v, k: [x for x in v if x % k == 0],
    ),
    "drop": (
        "drop the numbers greater than {k}",
        "values = [v for v in values if v <= {k}]",
        lambda v, k: [x for x in v if x <= k],
    ),
    "rotate": (
        "move the first {k} numbers to the end",
        "values = values[{k}:] + values[:{k}]",
        lambda v, k: v[k:] + v[:k],
    ),
    "every": ("keep every {k}th number, beginning with the first", "values = values[::{k}]", lambda v, k: v[::k]),
    "remainder": (
        "replace every number by its remainder after division by {k}",
        "values = [v % {k} for v in values]",
        lambda v, k: [x % k for x in v],
    ),
    "sort": (
        "sort by the distance from {k}, equal distances in their present order",
        "values = sorted(values, key=lambda v: abs(v - {k}))",
        lambda v, k: sorted(v, key=lambda x: abs(x - k)),
    ),
}

_RUNNER = """
import json, sys
sys.path.insert(0, "/agent" if __import__("os").path.isdir("/agent") else ".")
inputs = json.load(sys.stdin)
from solution import transform
for values in inputs:
    try:
        result = transform(list(values))
        print(json.dumps({"value": result if type(result) is list else None}), flush=True)
    except Exception as error:
        print(json.dumps({"value": None}), flush=True)
"""


class WorkspaceEnv(ToolEnv):
    """Shell and file tools in /agent. Parts: `tests`, the share of hidden tests passed, and `solved`, all of them."""

    instructions: ClassVar[str] = (
        "You work in the folder /agent. Read README.md, change solution.py as it asks, try it, then answer with the word done."
    )
    option_defaults: ClassVar[Mapping[str, Any]] = {"operations": 3, "hidden_tests": 8}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("tests", weight=0.3), RewardPart("solved", weight=0.7))
    max_turns: ClassVar[int] = 20
    limits: ClassVar[SandboxConfig] = SandboxConfig()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder: Path | None = None

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        require()
        while True:
            names = [str(name) for name in rng.choice(list(OPERATIONS), self.options["operations"])]
            self.steps = [(name, int(rng.integers(2, 10))) for name in names]
            if in_split(json.dumps(self.steps), split):
                break
        self.hidden = [[int(v) for v in rng.integers(-40, 100, rng.integers(0, 20))] for _ in range(self.options["hidden_tests"])]
        example = [int(v) for v in rng.integers(-40, 100, 8)]
        wanted = "\n".join(f"{i + 1}. {OPERATIONS[name][0].format(k=k)}" for i, (name, k) in enumerate(self.steps))
        self._open_folder()
        readme = f"transform(values) takes a list of whole numbers and returns a new list. In this order:\n{wanted}\n\n"
        self._write("README.md", f"{readme}Example: transform({example}) == {self.expected(example)}\n")
        self._write("solution.py", self.program(1))
        self.sandbox.own()
        return "Make solution.py do what README.md asks for."

    def expected(self, values: list[int]) -> list[int]:
        """What the task's operations make of `values`."""
        for name, k in self.steps:
            values = OPERATIONS[name][2](values, k)
        return values

    def program(self, count: int) -> str:
        """A solution.py with the first `count` operations."""
        body = [f"    {OPERATIONS[name][1].format(k=k)}" for name, k in self.steps[:count]]
        return "\n".join(["def transform(values):", *body, "    return values", ""])

    @tool(limits=ToolLimits(seconds=30))
    def shell(self, command: str) -> str:
        """Run a shell command in /agent and show its output and exit status.

        Args:
            command: a command line for /bin/sh
        """
        done = self.sandbox.run(["/bin/sh", "-c", command])
        ending = f"[stopped: it passed its limit on {done.stopped}]" if done.stopped else f"[exit status {done.status}]"
        return f"{clip(done.output, 8000)}\n{ending}".lstrip("\n")

    @tool(limits=ToolLimits(seconds=30))
    def read_file(self, path: str) -> str:
        """Show a text file.

        Args:
            path: relative to /agent
        """
        done = self.sandbox.run(["/usr/bin/head", "-c", "20000", "--", path])
        if done.status != 0:
            raise ToolFault(done.output.strip() or f"{path} could not be read")
        return done.output

    @tool(limits=ToolLimits(seconds=30))
    def write_file(self, path: str, content: str) -> str:
        """Write a text file, replacing what was there.

        Args:
            path: relative to /agent
            content: the whole new content
        """
        # inside the sandbox, so that a link in the folder can't lead the write anywhere else
        command = ["/bin/sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"', "write", path]
        done = self.sandbox.run(command, stdin=content.encode("utf-8", "replace"))
        if done.status != 0:
            raise ToolFault(done.output.strip() or f"{path} could not be written")
        return f"{len(content)} characters written to {path}"

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        results = self._run_hidden_tests()
        passed = sum(result == self.expected(values) for result, values in zip(results, self.hidden, strict=True))
        solved = passed == len(self.hidden)
        return Grade(solved, {"tests": passed / len(self.hidden), "solved": float(solved)})

    def get_state(self) -> str:
        """The folder as a tar file in base64, packed inside the sandbox."""
        pack = "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf /tmp/folder . && base64 -w0 /tmp/folder"
        done = self._large().run(["/bin/sh", "-c", pack], write=False)
        if done.status != 0 or done.stopped:
            raise EnvironmentFault(f"the folder could not be saved: {done.output.strip()[:200] or done.stopped}")
        return done.output

    def set_state(self, state: str) -> None:
        """Replace the folder's files; unpacked inside the sandbox, where no name in it can lead outside."""
        command = ["/bin/sh", "-c", "find . -mindepth 1 -delete; base64 -d | tar -xf - --no-same-owner"]
        done = self._large().run(command, stdin=state.encode())
        if done.status != 0 or done.stopped:
            raise EnvironmentFault(f"the saved folder could not be unpacked: {done.output.strip()[:200] or done.stopped}")

    def _large(self) -> Sandbox:
        """The same folder and user with room for an archive of it."""
        size = 4 * self.limits.disk_mb
        limits = SandboxConfig(seconds=60, disk_mb=size, files=2 * self.limits.files, output_bytes=size * 2**20)
        return dataclasses.replace(self.sandbox, config=limits)

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        yield '<tool_call>{"name": "read_file", "arguments": {"path": "README.md"}}</tool_call>'
        arguments = {"path": "solution.py", "content": self.program(len(self.steps))}
        yield f"<tool_call>{json.dumps({'name': 'write_file', 'arguments': arguments})}</tool_call>"
        yield "<answer>done</answer>"

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            remove(self._folder.parent)
            self._folder = None

    def _open_folder(self) -> None:
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="longstraw-workspace-")) / "agent"
        self._folder.mkdir()
        self.sandbox = Sandbox(self._folder, self.limits)

    def _write(self, name: str, content: str) -> None:
        assert self._folder is not None
        (self._folder / name).write_text(content, encoding="utf-8")

    def _run_hidden_tests(self) -> list[Any]:
        """What the agent's function returns for each hidden input; None where it raised, gave no list, or never came back."""
        command = ["/usr/bin/python3", "-I", "-B", "-c", _RUNNER]
        try:
            done = self.sandbox.run(command, stdin=json.dumps(self.hidden).encode(), write=False)
        except SandboxError:
            if obstacle.__wrapped__() is not None:
                raise  # this machine's fault
            return [None] * len(self.hidden)  # no sandbox can be built on what the agent left: its own fault, and no way out
        results: list[Any] = []
        for line in done.output.splitlines():
            try:
                results.append(json.loads(line)["value"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # something the agent's code printed
        return [*results, *[None] * len(self.hidden)][: len(self.hidden)]
