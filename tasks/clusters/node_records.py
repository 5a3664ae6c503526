"""Small files in an attempt's folder, which all its nodes see: who is there, where they meet, and that the attempt is over."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.records.cluster import NodeRecord, SubmittedJob
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.storage.lease import this_machine

OVER = "over"  # every node ends what still runs
SUBMITTED = "submitted.json"


def node_path(attempt_dir: Path, node: int) -> Path:
    return attempt_dir / f"node-{node}.json"


def read_node(attempt_dir: Path, node: int) -> NodeRecord | None:
    """The record of a node; None where there is none yet, or where the filesystem does not answer just now."""
    try:
        return NodeRecord.from_json(json.loads(node_path(attempt_dir, node).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def update_node(attempt_dir: Path, node: int, **changes: Any) -> None:
    """Change fields of a node's own record, where its agent has claimed one."""
    if record := read_node(attempt_dir, node):
        changed = record.model_copy(update=changes)
        write_atomic(node_path(attempt_dir, node), changed.model_dump_json(indent=1))


def is_over(attempt_dir: Path) -> bool:
    """Whether the leader, or node 0, has ended the attempt."""
    return (attempt_dir / OVER).exists()


def end_attempt(attempt_dir: Path) -> None:
    """Have every node end what still runs."""
    (attempt_dir / OVER).touch()


def _is_dead(record: NodeRecord) -> bool:
    """Whether the process that wrote it, on this machine, is no more."""
    return record.machine == this_machine() and not Path(f"/proc/{record.pid}").exists()


def claim(attempt_dir: Path, requested: int | None, nnodes: int) -> int:
    """Take the place of a node in this attempt; returns its number.

    Creating a file that must not exist is atomic on shared filesystems too (NFS since version 3).

    Args:
        requested: None: the lowest free one behind the first.

    Raises:
        ConfigError: it is taken, by a process that may still live.
    """
    for node in range(1, nnodes) if requested is None else (requested,):
        path = node_path(attempt_dir, node)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            owner = read_node(attempt_dir, node)
            if not owner or not _is_dead(owner):
                continue
        mine = NodeRecord(node=node, host=socket.gethostname(), machine=this_machine(), pid=os.getpid())
        write_atomic(path, mine.model_dump_json(indent=1))
        return node
    if requested is None:
        raise ConfigError(
            f"all {nnodes} nodes of {attempt_dir} have already joined; environment.nnodes sets their number."
        )
    owner = read_node(attempt_dir, requested)
    by = f"process {owner.pid} on {owner.host}" if owner else "another process"
    raise ConfigError(
        f"node {requested} of {attempt_dir} is {by} already; give each machine a unique rank (--node-rank, NODE_RANK or "
        "environment.node_rank), or leave it out to use a free one."
    )


def write_submitted(attempt_dir: Path, job: SubmittedJob) -> None:
    """Record the job of a cluster that the attempt is."""
    write_atomic(attempt_dir / SUBMITTED, job.model_dump_json(indent=1))


def read_submitted(attempt_dir: Path) -> SubmittedJob | None:
    """The job of a cluster that the attempt is; None if it is none."""
    path = attempt_dir / SUBMITTED
    return SubmittedJob.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
