"""What the nodes of one attempt tell each other: small files in its folder, which all of them see.

`node-R.json` is node R's own word about itself; `word.json` is the first node's to all others: open (come to this address), go
(start), refused (with the reasons) or over (end what still runs).
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.storage.lease import this_machine

WORD = "word.json"
JOB = "job.json"  # which job of a cluster the attempt is; written before the job is submitted


def node_path(attempt_dir: Path, node: int) -> Path:
    return attempt_dir / f"node-{node}.json"


def read(path: Path) -> dict[str, Any]:
    """What is in such a file; {} where there is none yet, or where the filesystem does not answer just now."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def update(attempt_dir: Path, node: int, **words: Any) -> None:
    """Add to the record of node `node`."""
    path = node_path(attempt_dir, node)
    write_atomic(path, json.dumps(read(path) | words, indent=1))


def say(attempt_dir: Path, state: str, **words: Any) -> None:
    """The first node's word; what is over stays over."""
    path = attempt_dir / WORD
    before = read(path)
    if before.get("state") not in ("over", "refused"):
        write_atomic(path, json.dumps(before | words | {"state": state}, indent=1))


def word(attempt_dir: Path) -> dict[str, Any]:
    return read(attempt_dir / WORD)


def has_ended(path: Path) -> bool:
    """Whether the node that this is the file of says that it has ended, or is seen to be dead."""
    record = read(path)
    return not record or record["state"] in ("ended", "refused") or _is_dead(record)


def _is_dead(record: dict[str, Any]) -> bool:
    """Whether the process that wrote it, on this machine, is no more."""
    return record["machine"] == this_machine() and not Path(f"/proc/{record['pid']}").exists()


def claim(attempt_dir: Path, wished: int | None, nnodes: int) -> int:
    """Takes the place of a node in this attempt, the lowest free one behind the first where none is wished; returns it.

    Creating a file that must not exist is atomic on shared filesystems too (NFS since version 3).

    Raises:
        ConfigError: it is taken, by a process that may still live.
    """
    mine = {"host": socket.gethostname(), "machine": this_machine(), "pid": os.getpid(), "state": "here"}
    for node in range(1, nnodes) if wished is None else (wished,):
        path = node_path(attempt_dir, node)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            owner = read(path)
            if not owner or not _is_dead(owner):
                continue
        write_atomic(path, json.dumps(mine | {"node": node}, indent=1))
        return node
    if wished is None:
        raise ConfigError(
            f"all {nnodes} nodes of {attempt_dir} have already joined; environment.nnodes sets their number."
        )
    owner = read(node_path(attempt_dir, wished))
    raise ConfigError(
        f"node {wished} of {attempt_dir} is process {owner.get('pid')} on {owner.get('host')} already; give each "
        "machine a unique rank (--node-rank, NODE_RANK or environment.node_rank), or leave it out to use a free one."
    )


def write_job(attempt_dir: Path, **fields: str | int | None) -> None:
    """Add to the record of the attempt's job."""
    write_atomic(attempt_dir / JOB, json.dumps(read_job(attempt_dir) | fields, indent=1))


def read_job(attempt_dir: Path) -> dict[str, Any]:
    """The record of the attempt's job; {} if it has none."""
    path = attempt_dir / JOB
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
