"""What the reporters leave in the run's folder."""

import json
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.train.worker.callbacks.metrics_writer import (
    MetricsWriter,
    WeightsAndBiases,
)
from infini_llama.tasks.train.worker.callbacks.reporting import (
    MOST_WAITING,
    ReporterThread,
)
from support.waiting import wait_until

ERRORS = SimpleNamespace(UsageError=OSError, AuthenticationError=OSError)


def test_the_id_of_a_wandb_run_is_saved_before_wandb_creates_the_run(
    tmp_path, monkeypatch
):
    """An attempt that is ended inside init leaves a run on the server, which the next attempt must resume."""
    ids = []

    class Ended(BaseException):
        pass

    def init(id: str, **settings: object) -> None:
        ids.append((id, json.loads((tmp_path / "wandb.json").read_text())["id"]))
        raise Ended

    module = SimpleNamespace(init=init, Settings=lambda **settings: None, errors=ERRORS)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        with pytest.raises(Ended):
            WeightsAndBiases(tmp_path, {})
    assert len(ids) == 2 and len({name for pair in ids for name in pair}) == 1


@pytest.fixture
def ids(monkeypatch) -> list[str]:
    """Of the W&B runs that were begun or resumed, in their order."""
    ids = []

    def init(id: str, **settings: object) -> SimpleNamespace:
        ids.append(id)
        return SimpleNamespace(log=lambda *_, **__: None)

    module = SimpleNamespace(init=init, Settings=lambda **settings: None, errors=ERRORS)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return ids


def test_the_copy_of_a_run_has_a_wandb_run_of_its_own_and_a_moved_run_keeps_its(
    tmp_path, ids
):
    trunk = tmp_path / "trunk"
    trunk.mkdir()
    reporter = WeightsAndBiases(trunk, {})
    reporter.scalars({"train/loss": 1.0}, 5)
    reporter.send()
    shutil.copytree(trunk, tmp_path / "branch")
    in_copied_home = shutil.copytree(trunk, tmp_path / "copied" / "trunk")
    WeightsAndBiases(in_copied_home, {})
    (tmp_path / "linked").symlink_to(tmp_path)
    WeightsAndBiases(tmp_path / "linked" / "trunk", {})
    assert ids[0] == ids[2] != ids[1]
    del ids[1:]
    (tmp_path / "elsewhere").mkdir()
    shutil.move(trunk, tmp_path / "elsewhere" / "trunk")
    branch = WeightsAndBiases(tmp_path / "branch", {})
    moved = WeightsAndBiases(tmp_path / "elsewhere" / "trunk", {})
    again = WeightsAndBiases(tmp_path / "branch", {})
    assert ids[0] == ids[2] and ids[1] == ids[3] != ids[0]
    assert (branch.sent.step, moved.sent.step, again.sent.step) == (-1, 5, -1)


@pytest.mark.parametrize("content", ["", '{"id": "abc', "[]", '{"id": "abc"}'])
def test_a_damaged_record_of_the_wandb_run_is_named_and_another_run_begins(
    tmp_path, ids, caplog, content
):
    (tmp_path / "wandb.json").write_text(content)
    for _ in range(2):
        WeightsAndBiases(tmp_path, {})
    assert ids[0] == ids[1] != "abc"
    assert str(tmp_path / "wandb.json") in caplog.text


class Stuck:
    """A reporter of which nothing comes back until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.steps: list[int] = []

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.released.wait()
        self.steps.append(step)

    def sync(self) -> None: ...

    def close(self, final: dict[str, float]) -> None:
        self.steps.append(-1)


def test_training_waits_for_a_reporter_no_longer_than_its_limit(tmp_path, caplog):
    stuck = Stuck()
    reporter = ReporterThread("Weights & Biases", lambda: stuck, longest_wait=0.3)
    assert reporter.has_started()
    writer = MetricsWriter(tmp_path, 1, [reporter])
    began = time.monotonic()
    for step in range(1, MOST_WAITING + 200):
        writer.train(TrainLine(step=step))
        if step % 100 == 0:
            writer.sync()
    writer.close()
    writer.close_reporters(finished=True)
    assert time.monotonic() - began < 5, "it waits at the first sync, and at the end"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "reporting to Weights & Biases: it does not respond" in warning
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == MOST_WAITING + 199
    stuck.released.set()
    wait_until(lambda: reporter.waiting.empty(), 10)
    assert MOST_WAITING <= len(stuck.steps) < len(lines), "the rest was dropped"
    assert stuck.steps == sorted(stuck.steps)


def test_a_reporter_that_does_not_start_is_not_used(caplog):
    never = threading.Event()

    def create() -> Stuck:
        never.wait()
        return Stuck()

    assert not ReporterThread(
        "Weights & Biases", create, longest_wait=0.1
    ).has_started()
    assert "has not started within 0.1 s and is not used" in caplog.text
    never.set()
