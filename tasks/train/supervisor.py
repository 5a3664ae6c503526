"""Watches the ranks from outside torchrun: whether each still moves, and which one holds up the others."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infini_llama.tasks.runs.heartbeat import (
    PHASES,
    STACKS,
    HeartbeatRecord,
    heartbeat_path,
    read_count,
    read_heartbeat,
)
from infini_llama.tasks.runs.status import is_here, read_status
from infini_llama.tasks.train.launch import is_rank, is_stopped, send

FAR_SECONDS = 1.0
UNPUBLISHED_SECONDS = (
    5.0  # without a published heartbeat, after which a process on another machine is taken for stopped
)
# Of silence that one look counts: beyond that this process itself was stopped, perhaps with all ranks.
AWAY_SECONDS = 5.0
STOPPED_SHARE = 0.5  # of the patience, for a rank whose process is stopped: that is seen, not guessed from its silence
STACKS_SECONDS = 1.0  # given to the ranks to write their stacks down
# The duration of one visit does not limit the next: start-up is entered for other work each time (imports, compilation, reporters),
# and a save waits for a disk, mostly for a copy, and once for all that is still written in the background.
NOT_LEARNED = ("start", "compile", "save")


class Hung(Exception):
    """A rank does not move; the message names it."""


@dataclass
class Watch:
    """Learns how long each phase takes from the ranks' heartbeats, and reports when one takes too long.

    How long a rank has been silent is counted from when its last sign was seen here: ranks may be on other machines, whose clocks
    have nothing to do with this one's. Only two signs of one rank are compared by the times in them.

    Args:
        attempt_dir: where the ranks write.
        processes: how many there are.
        patience: seconds beyond twice the longest time a phase has taken; a phase never seen yet has thirty times that, and so
            have start-up and saves. A rank whose process is stopped (SIGSTOP) has half of it.
    """

    attempt_dir: Path
    processes: int
    patience: float
    longest: dict[str, float] = field(default_factory=dict[str, float])
    seen: dict[int, HeartbeatRecord] = field(default_factory=dict[int, HeartbeatRecord])
    since: dict[int, float] = field(default_factory=dict[int, float])  # when that was, by the clock of this process
    clock: Callable[[], float] = time.monotonic
    polled_at: float = float("-inf")
    far: bool = False  # whether ranks are on other machines
    published: dict[int, tuple[int, float]] = field(
        default_factory=dict[int, tuple[int, float]]
    )  # count, and when it was new
    nodes_meet: bool = False  # whether several nodes meet, in their own time, before any rank starts
    ended: float | None = None  # when all ranks were first seen to have ended

    def limit(self, phase: str, stopped: bool = False) -> float:
        """Seconds after which a rank in `phase` is taken for hung."""
        if stopped:
            return STOPPED_SHARE * self.patience
        known = None if phase in NOT_LEARNED else self.longest.get(phase)
        return 30 * self.patience if known is None else self.patience + 2 * known

    def poll(self) -> None:
        """Raises Hung where `hung` has a sentence; once a second where ranks are on other machines."""
        if self.far and self.clock() - self.polled_at < FAR_SECONDS:
            return
        if sentence := self.hung():
            raise Hung(sentence)

    def hung(self) -> str | None:
        """A sentence naming the rank that holds up the others, None while all of them move."""
        try:
            return self._look(self.clock())
        finally:
            self.polled_at = self.clock()  # a look may itself take seconds, at many ranks on a network filesystem

    def _look(self, now: float) -> str | None:
        overdue = False
        away = max(0.0, now - self.polled_at - AWAY_SECONDS) if self.since else 0.0
        self.since = {rank: since + away for rank, since in self.since.items()}
        beats: dict[int, HeartbeatRecord] = {}
        ended = 0
        for rank in range(self.processes):
            status = read_status(self.attempt_dir, rank)
            if status is None:
                if self.seen or not self.nodes_meet:
                    overdue |= now - self.since.setdefault(rank, now) > self.limit("start")
                continue
            if status.state != "running":
                ended += 1
                continue
            path = heartbeat_path(self.attempt_dir, rank)
            beat = read_heartbeat(path)
            if not is_here(status):
                self.far, count = True, read_count(path)
                if count != self.published.get(rank, (None, 0.0))[0]:
                    self.published[rank] = count, now
            if beat is None:
                continue
            beats[rank] = beat
            before = self.seen.get(rank)
            if before is not None and before != beat and not away:  # else it may have been stopped, too
                self.longest[before.phase] = max(self.longest.get(before.phase, 0.0), beat.time - before.time)
            if before != beat:
                self.seen[rank], self.since[rank] = beat, now
            silent_for = now - self.since[rank]
            # Whether it is stopped is only asked of one that has been silent as long as that would matter.
            stopped = silent_for > self.limit(beat.phase, stopped=True) and is_stopped(self._pid(rank))
            overdue |= silent_for > self.limit(beat.phase, stopped)
        if ended == self.processes:
            self.ended = now if self.ended is None else self.ended + away
            late = now - self.ended > self.limit("finish")
            return "torchrun has not ended although all its ranks have" if late else None
        if not overdue:
            return None
        if silent := [rank for rank in range(self.processes) if rank not in self.seen]:
            return f"rank {', '.join(map(str, silent))} has sent no heartbeat since the attempt started"
        behind = self._behind(beats)
        step, phase, _ = beats[behind]
        stopped = " (the process is stopped)" if self._is_stopped(behind) else ""
        where = self._where(behind)
        silent_for = now - self.since[behind]
        return (
            f"rank {behind}{where}{stopped} has sent no heartbeat for {silent_for:.0f} s in phase '{phase}' after "
            f"step {step}"
        )

    def _behind(self, beats: dict[int, HeartbeatRecord]) -> int:
        """The rank in the earliest step and phase; of several, one whose process is stopped, else the longest silent one."""

        def place(rank: int) -> tuple[int, int, bool, float]:
            step, phase, _ = beats[rank]
            return step, PHASES.index(phase), not self._is_stopped(rank), self.since[rank]

        return min(beats, key=place)

    def _pid(self, rank: int) -> int:
        """0 where it has none on this machine, or has ended: its number may be another process's by now."""
        status = read_status(self.attempt_dir, rank)
        here = status is not None and is_here(status) and is_rank(status.pid, self.attempt_dir)
        return status.pid if status and here else 0

    def _is_stopped(self, rank: int) -> bool:
        if rank in self.published:
            return self.clock() - self.published[rank][1] > UNPUBLISHED_SECONDS
        return is_stopped(self._pid(rank))

    def _where(self, rank: int) -> str:
        """Which host a rank is on, where that is not this one."""
        status = read_status(self.attempt_dir, rank)
        return f" on {status.host} (node {status.node})" if status and not is_here(status) else ""

    def dump_stacks(self) -> None:
        """Have every rank write its stacks into its log: by a signal on this machine, by a file that ranks on others look for."""
        if self.far:
            (self.attempt_dir / STACKS).touch()
        for rank in range(self.processes):
            if pid := self._pid(rank):
                send(pid, signal.SIGUSR2)
        time.sleep(STACKS_SECONDS + (FAR_SECONDS if self.far else 0))
