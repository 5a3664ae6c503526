"""Weights & Biases, offline: one run over all attempts, and no step twice."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("wandb")

from wandb.proto import wandb_internal_pb2

from infini_llama.tasks.train.worker.callbacks.metrics_writer import WeightsAndBiases
from support.waiting import wait_until

# Of LevelDB's log format: checksum, length, type before each fragment.
BLOCK, FILE_HEADER, HEADER = (
    32768,
    7,
    7,
)
FULL, LAST = 1, 4


def records(data: bytes) -> Iterator[wandb_internal_pb2.Record]:
    """What a .wandb file holds."""
    place, whole = FILE_HEADER, b""
    while place + HEADER <= len(data):
        if (left := BLOCK - place % BLOCK) < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def whole(file: Path) -> list[wandb_internal_pb2.Record]:
    """The records of a run that has ended; W&B's own process closes the file a moment after `finish`."""

    def ended() -> list[wandb_internal_pb2.Record]:
        found = list(records(file.read_bytes()))
        return found if found and found[-1].HasField("exit") else []

    return wait_until(ended, what=f"{file} has no end")


def logged(run_dir) -> tuple[set[str], list[tuple[int, dict]]]:
    """(ids of the runs, (step, numbers) of each line of history) in the offline files, in their order."""
    ids, lines = set(), []
    for file in sorted(
        run_dir.glob("wandb/offline-run-*/*.wandb"),
        key=lambda path: path.stat().st_mtime_ns,
    ):
        for record in whole(file):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): item.value_json
                    for item in record.history.item
                }
                lines.append((record.history.step.num, items))
    return ids, lines


def test_a_resumed_run_continues_its_wandb_run_without_repeated_steps(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first, last in ((0, 6), (4, 8)):
        reporter = WeightsAndBiases(tmp_path, {"train": {"seed": 1}})
        for step in range(first + 1, last + 1):
            reporter.scalars({"train/loss": 1.0 / step}, step)
            reporter.sync()  # before a checkpoint; what follows is of the same step
            reporter.scalars({"validation/loss": float(step)}, step)
        reporter.close({"validation/loss": 8.0})
    ids, lines = logged(tmp_path)
    assert ids == {json.loads((tmp_path / "wandb.json").read_text())["id"]}
    assert [step for step, _ in lines] == list(range(1, 9))
    assert all({"train/loss", "validation/loss"} <= set(items) for _, items in lines)
