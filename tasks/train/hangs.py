"""Detection of hung ranks from outside torchrun, by their heartbeats.

The message names the rank that holds up the others.
"""

import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from infini_llama.tasks.records.status import RankStatus
from infini_llama.tasks.runs.heartbeat import (
    PHASES,
    STACKS,
    UNKNOWN,
    HeartbeatRecord,
    heartbeat_path,
    read_count,
    read_heartbeat,
)
from infini_llama.tasks.runs.status import is_here, read_statuses
from infini_llama.tasks.train.processes import (
    is_alive,
    is_rank,
    is_stopped,
    send,
    waited_for_processor,
)

REMOTE_SECONDS = 1.0  # between two looks at ranks on other machines
# Seconds without a published heartbeat after which a process on another machine is taken for
# stopped.
UNPUBLISHED_SECONDS = 5.0
# Seconds of silence that one look counts: beyond that this process itself was stopped, perhaps with
# all ranks.
LONGEST_GAP = 5.0
# Share of the timeout, for a rank whose process is stopped: that is seen, not guessed from its
# silence.
STOPPED_SHARE = 0.5
# Seconds in which torchrun ends the other ranks after one has died: it gives them half of that.
GONE_SECONDS = 60.0
STACKS_SECONDS = 1.0  # given to the ranks to write their stacks down
# The duration of one visit does not limit the next: start-up is entered for other work each time
# (imports, compilation, reporters), a save waits for a disk, mostly for a copy, and once for all
# that is still written in the background, the model decides how long its texts are (and a profile
# is written in the same phase), and the end is entered for the result and then for the reporters.
NOT_LEARNED = ("start", "compile", "save", "samples", "finish")


class Hung(Exception):
    """A rank does not move; the message names it."""


@dataclass
class HangDetector:
    """Learns how long each phase takes from heartbeats, and reports when one takes too long.

    A rank's silence is counted from when its newest heartbeat was first read here: ranks may be on
    other machines, whose clocks have nothing to do with this one's. Only two heartbeats of one rank
    are compared by the times in them. Time in which a rank of this machine waited for a processor
    that others used does not count, for no rank: they may wait for it.

    Args:
        attempt_dir: where the ranks write.
        world_size: how many there are.
        timeout: `runtime.hang_timeout`. A rank may be silent in a phase for 2 × the longest time
            that phase has taken + timeout; in one that was not measured yet, and in those of
            NOT_LEARNED, for 30 × timeout; if its process is stopped (SIGSTOP), for timeout / 2.
        after_rendezvous: the nodes find each other before any rank starts, which has no limit.
        stage_ends: last step of each stage of data.curriculum. The next one has longer sequences,
            for which its first step may compile the model again: it is measured anew.

    Attributes:
        statuses: of each rank, at the last look.
        longest: seconds that each phase has taken at most.
        newest, silent_since: each rank's newest heartbeat, and when it was first read.
        waited: seconds that each process of this machine had waited for a processor at the last
            look.
        published: the newest count that each rank of another machine has published, and when it was
            first read.
        ended_at: when all ranks were first seen to have ended.
        gone_at: when a rank of this machine was first seen to have died without a status.
    """

    attempt_dir: Path
    world_size: int
    timeout: float
    after_rendezvous: bool = False
    stage_ends: tuple[int, ...] = ()
    clock: Callable[[], float] = time.monotonic
    statuses: list[RankStatus | None] = field(default_factory=list[RankStatus | None])
    longest: dict[str, float] = field(default_factory=dict[str, float])
    newest: dict[int, HeartbeatRecord] = field(
        default_factory=dict[int, HeartbeatRecord]
    )
    silent_since: dict[int, float] = field(default_factory=dict[int, float])
    published: dict[int, tuple[int, float]] = field(
        default_factory=dict[int, tuple[int, float]]
    )
    waited: dict[int, float] = field(default_factory=dict[int, float])
    polled_at: float = float("-inf")
    ended_at: float | None = None
    gone_at: float | None = None

    def limit(self, phase: str, stopped: bool = False) -> float:
        """Seconds after which a rank in `phase` is taken for hung."""
        if stopped:
            return STOPPED_SHARE * self.timeout
        longest = None if phase in NOT_LEARNED else self.longest.get(phase)
        return UNKNOWN * self.timeout if longest is None else self.timeout + 2 * longest

    def poll(self) -> None:
        """Look at the ranks; at most once per second if some are on other machines.

        Raises:
            Hung: `hung` has a sentence.
        """
        if self.published and self.clock() - self.polled_at < REMOTE_SECONDS:
            return
        sentence = self.hung()
        if sentence:
            raise Hung(sentence)

    def hung(self) -> str | None:
        """A sentence naming the rank that holds up the others, None while all of them move."""
        try:
            return self._look(self.clock())
        finally:
            # A look may itself take seconds, at many ranks on a network filesystem.
            self.polled_at = self.clock()

    def _look(self, now: float) -> str | None:
        """Read the statuses and heartbeats of all ranks, and return a sentence if one is hung.

        `gap` is the time in which this process was stopped, `starved` the time in which a rank
        waited for a processor. Neither counts as silence.
        """
        gap = max(0.0, now - self.polled_at - LONGEST_GAP) if self.silent_since else 0.0
        starved = self._starved()
        self.silent_since = {
            rank: min(since + gap + starved, now)
            for rank, since in self.silent_since.items()
        }
        heartbeats: dict[int, HeartbeatRecord] = {}
        overdue = False
        ended = 0
        self.statuses = read_statuses(self.attempt_dir, self.world_size)
        for rank, status in enumerate(self.statuses):
            if status is None:
                if self.newest or not self.after_rendezvous:
                    since = self.silent_since.setdefault(rank, now)
                    overdue |= now - since > self.limit("start")
                continue
            if status.state != "running":
                ended += 1
                continue
            path = heartbeat_path(self.attempt_dir, rank)
            heartbeat = read_heartbeat(path)
            if is_here(status):
                self.waited.setdefault(status.pid, waited_for_processor(status.pid))
            else:
                count = read_count(path)
                if count != self.published.get(rank, (None, 0.0))[0]:
                    self.published[rank] = count, now
            if heartbeat is None:
                continue
            heartbeats[rank] = heartbeat
            if self.newest.get(rank) != heartbeat:
                self._record_heartbeat(rank, heartbeat, is_measured=not gap)
                self.silent_since[rank] = now
            silence = now - self.silent_since[rank]
            # Only a rank that has been silent long enough for that is looked up.
            is_late_if_stopped = silence > self.limit(heartbeat.phase, stopped=True)
            stopped = is_late_if_stopped and is_stopped(self._pid(rank))
            overdue |= silence > self.limit(heartbeat.phase, stopped)
        if ended == self.world_size:
            self.ended_at = now if self.ended_at is None else self.ended_at + gap
            late = now - self.ended_at > self.limit("finish")
            return (
                "torchrun has not ended although all its ranks have" if late else None
            )
        if overdue and self._has_lost_rank(heartbeats):
            # The others wait for one that was killed: torchrun's end shows how the attempt ended.
            self.gone_at = now if self.gone_at is None else self.gone_at + gap
            overdue = now - self.gone_at > GONE_SECONDS
        return self._describe(heartbeats, now) if overdue else None

    def _record_heartbeat(
        self, rank: int, heartbeat: HeartbeatRecord, is_measured: bool
    ) -> None:
        """Keep the newest heartbeat of a rank, and learn how long the phase before it took.

        Args:
            is_measured: False: the rank may have been stopped meanwhile, so nothing is learned.
        """
        before = self.newest.get(rank)
        if before is not None and is_measured:
            seconds = heartbeat.time - before.time
            self.longest[before.phase] = max(
                self.longest.get(before.phase, 0.0), seconds
            )
        if before is not None and self._stage(before) != self._stage(heartbeat):
            self.longest.pop("compute", None)
        self.newest[rank] = heartbeat

    def _stage(self, heartbeat: HeartbeatRecord) -> int:
        return bisect_right(self.stage_ends, heartbeat.step)

    def _starved(self) -> float:
        """Seconds since the last look in which a rank of this machine waited for a processor."""
        before = self.waited
        self.waited = {pid: waited_for_processor(pid) for pid in before}
        return max(
            (0.0, *(seconds - before[pid] for pid, seconds in self.waited.items()))
        )

    def _has_lost_rank(self, heartbeats: Iterable[int]) -> bool:
        """Whether the process of one of these ranks was on this machine and is gone.

        By their statuses, all of them run.
        """
        statuses = (self.statuses[rank] for rank in heartbeats)
        return not all(
            is_alive(status.pid) for status in statuses if status and is_here(status)
        )

    def _describe(self, heartbeats: dict[int, HeartbeatRecord], now: float) -> str:
        """A sentence about the rank that holds up the others."""
        silent = [rank for rank in range(self.world_size) if rank not in self.newest]
        if silent:
            return (
                f"rank {', '.join(map(str, silent))} has sent no heartbeat "
                "since the attempt started"
            )

        def progress(rank: int) -> tuple[int, int, bool, float]:
            step, phase, _ = heartbeats[rank]
            return (
                step,
                PHASES.index(phase),
                not self._is_stopped(rank),
                self.silent_since[rank],
            )

        # In the earliest step and phase; of several, one whose process is stopped, else the longest
        # silent one.
        rank = min(heartbeats, key=progress)
        step, phase, _ = heartbeats[rank]
        status = self.statuses[rank]
        host = (
            f" on {status.host} (node {status.node})"
            if status and not is_here(status)
            else ""
        )
        stopped = " (the process is stopped)" if self._is_stopped(rank) else ""
        silence = now - self.silent_since[rank]
        return (
            f"rank {rank}{host}{stopped} has sent no heartbeat for {silence:.0f} s "
            f"in phase '{phase}' after step {step}"
        )

    def _pid(self, rank: int) -> int:
        """Process ID of the rank; 0 if it has none on this machine, or has ended.

        The number of an ended process may be another one's by now.
        """
        status = self.statuses[rank]
        is_local = (
            status is not None
            and is_here(status)
            and is_rank(status.pid, self.attempt_dir)
        )
        return status.pid if status and is_local else 0

    def _is_stopped(self, rank: int) -> bool:
        if rank in self.published:
            return self.clock() - self.published[rank][1] > UNPUBLISHED_SECONDS
        return is_stopped(self._pid(rank))

    def dump_stacks(self) -> None:
        """Have every rank write its stacks into its log.

        Ranks on this machine get a signal; those on others look for a file.
        """
        if self.published:
            (self.attempt_dir / STACKS).touch()
        self.statuses = read_statuses(self.attempt_dir, self.world_size)
        for rank in range(self.world_size):
            pid = self._pid(rank)
            if pid:
                send(pid, signal.SIGUSR2)
        time.sleep(STACKS_SECONDS + (REMOTE_SECONDS if self.published else 0))
