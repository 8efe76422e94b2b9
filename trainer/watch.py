"""Who is still there: every process of a run tells the others that it lives and how far it is, and ends the run if one does not.

Idea: exchanges wait for all processes, so one that died or hangs stops the others without a word. A thread in each process
writes a beat into the store that the processes met through: a count, the exchanges it has begun, whether it waits in one, and
its phase. A process whose beats stop for `DEAD_AFTER` seconds is dead (or its machine is); one that works, does not wait for
others, and begins no exchange for the layout's `timeout` hangs. Either is named, and every process ends.

The store is torch's TCPStore, under torchrun as well.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from torch.distributed.distributed_c10d import Store

from longstraw_agents.launch import FOLLOWED, HUNG

#: Seconds between beats, and seconds without one after which a process counts as dead. A kernel's compiler may keep the
#: interpreter's lock, and with it this thread, for several seconds; a process that dies on this machine is seen by the launcher.
BEAT, DEAD_AFTER = 0.5, 30.0


class Watch(threading.Thread):
    """The thread of one process; see the module's head."""

    def __init__(self, store: Store, number: int, count: int, timeout: float) -> None:
        super().__init__(name="longstraw-watch", daemon=True)
        self._store, self._number, self._count, self._timeout = store, number, count, timeout
        self._left = threading.Event()
        self._seen: dict[int, tuple[Any, float]] = {}  # process -> its last beat and when it changed
        self._moved: dict[int, tuple[Any, float]] = {}  # process -> how far it was and when that changed
        self._hung = False  # whether the verdict names this process
        self.entered, self.waiting, self.phase = 0, False, ""

    def run(self) -> None:
        """Beat and look at the others until the run is left."""
        beat, last = 0, time.monotonic()
        while not self._left.is_set():
            beat += 1
            if time.monotonic() - last > DEAD_AFTER / 2:  # this process itself was stopped: the others get their time again
                self._seen.clear()
                self._moved.clear()
            last = time.monotonic()
            try:
                self._say({"beat": beat, "entered": self.entered, "waiting": self.waiting, "phase": self.phase})
                verdict = self._verdict()
            except (RuntimeError, OSError) as error:  # torch raises RuntimeError, and subclasses, where the store is gone
                if self._left.is_set():
                    return
                verdict = f"the process that holds the run's store is gone ({str(error).splitlines()[0]})"
            if verdict is not None:
                self._end(verdict)
            self._left.wait(BEAT)

    def leave(self) -> None:
        """The process ends in good order: the others are not to miss it. Process 0, which holds the store, leaves last."""
        self._left.set()
        self.join(5 * BEAT)
        deadline = time.monotonic() + DEAD_AFTER
        try:
            self._say({"beat": "left"})
            while self._number == 0 and not self._others_left() and time.monotonic() < deadline:
                time.sleep(BEAT / 10)
        except (RuntimeError, OSError):
            return  # the store's own process is gone

    def _others_left(self) -> bool:
        beats = (self._store.get(f"beat/{other}") for other in range(1, self._count))
        return all(json.loads(beat)["beat"] == "left" for beat in beats)

    def blame(self) -> str:
        """Who is gone, once that is clear; for an exchange that failed."""
        deadline = time.monotonic() + DEAD_AFTER + 4 * BEAT
        while time.monotonic() < deadline:
            gone = self._gone()
            if gone:
                return gone
            time.sleep(BEAT)
        return "no process stopped giving signs of life"

    def _say(self, value: dict[str, Any]) -> None:
        self._store.set(f"beat/{self._number}", json.dumps(value))

    def _verdict(self) -> str | None:
        now = time.monotonic()
        for other in range(self._count):
            if not self._store.check([f"beat/{other}"]):
                continue
            state = json.loads(self._store.get(f"beat/{other}"))
            if state != self._seen.get(other, (None, 0))[0]:
                self._seen[other] = (state, now)
            how_far = (state.get("entered"), state.get("phase"), state.get("waiting"))
            if how_far != self._moved.get(other, (None, 0))[0]:
                self._moved[other] = (how_far, now)
        return self._gone() or self._hanging(now)

    def _gone(self) -> str | None:
        now = time.monotonic()
        gone = [(r, state) for r, (state, since) in self._seen.items() if state["beat"] != "left" and now - since > DEAD_AFTER]
        if not gone:
            return None
        names = ", ".join(f"{number} (last seen in phase {state['phase'] or 'idle'!r})" for number, state in gone)
        return f"process {names} of {self._count} gave no sign of life for {DEAD_AFTER:.0f} s: it died or its machine is gone"

    def _hanging(self, now: float) -> str | None:
        late = {r: far for r, (far, since) in self._moved.items() if far[1] and now - since > self._timeout}
        not_waiting = {r: far for r, far in late.items() if not far[2]}
        if not not_waiting:
            return None
        least = min(far[0] for far in not_waiting.values())
        last = [(r, far) for r, far in not_waiting.items() if far[0] == least]
        self._hung = self._number in {number for number, _ in last}
        names = ", ".join(f"{number} (phase {far[1]!r}, {far[0]} exchanges begun)" for number, far in last)
        return f"process {names} of {self._count} hangs: it did not go on for {self._timeout:.0f} s while others wait for it"

    def _end(self, verdict: str) -> None:
        """End this process at once: its main thread may wait in an exchange that never completes."""
        again = "nothing of the unfinished step was kept; run the command again to go on from the last checkpoint"
        print(f"process {self._number}: {verdict}; {again}", file=sys.stderr, flush=True)
        os._exit(HUNG if self._hung else FOLLOWED)
