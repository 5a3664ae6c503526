"""The heartbeats of a machine's ranks in one file, which other machines read instead of a file for each rank.

A rank overwrites its sign in place, several times a step: on its own machine that is seen at once, on another one of a network
filesystem only when its cache is written back. This file is replaced as a whole, which is seen everywhere, and once a second.
"""

import json
import time
from pathlib import Path

from infini_llama.tasks.records.status import RankStatus
from infini_llama.tasks.runs.heartbeat import HeartbeatRecord, heartbeat_path, read_heartbeat
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.train.launch import is_stopped

SECONDS = 1.0


def relay_path(attempt_dir: Path, node: int) -> Path:
    return attempt_dir / f"beats-{node}.json"


class Relay:
    """Written by a node's agent."""

    def __init__(self, attempt_dir: Path, node: int) -> None:
        self.attempt_dir, self.path = attempt_dir, relay_path(attempt_dir, node)
        self.written, self.at = "", float("-inf")

    def write(self, statuses: list[RankStatus]) -> None:
        """Write the heartbeats of these ranks, at most once per second and only if they have changed."""
        if time.monotonic() - self.at < SECONDS:
            return
        self.at = time.monotonic()
        newest = {}
        for status in statuses:
            beat = read_heartbeat(heartbeat_path(self.attempt_dir, status.rank))
            if beat is not None:
                newest[str(status.rank)] = [*beat, is_stopped(status.pid)]
        text = json.dumps(newest)
        if text != self.written:
            write_atomic(self.path, text)
            self.written = text


def relayed(attempt_dir: Path, node: int) -> dict[int, tuple[HeartbeatRecord, bool]]:
    """The last signs of a node's ranks, by rank, as its agent has passed them on, and whether the process is stopped."""
    try:
        found = json.loads(relay_path(attempt_dir, node).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not yet, or the filesystem does not answer just now
        return {}
    return {
        int(rank): (HeartbeatRecord(step, phase, moment), stopped)
        for rank, (step, phase, moment, stopped) in found.items()
    }
