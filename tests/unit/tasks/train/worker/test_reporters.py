"""What the reporters leave in the run's folder."""

import json
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest

from infini_llama.tasks.records.metrics import TrainLine
from infini_llama.tasks.train.worker.callbacks.metrics_writer import MetricsWriter, WeightsAndBiases


def test_the_id_of_a_wandb_run_is_saved_before_wandb_creates_the_run(tmp_path, monkeypatch):
    """An attempt that is ended inside init leaves a run on the server, which the next attempt must resume."""
    ids = []

    class Ended(BaseException):
        pass

    def init(id: str, **settings: object) -> None:
        ids.append((id, json.loads((tmp_path / "wandb.json").read_text())["id"]))
        raise Ended

    module = SimpleNamespace(init=init, Settings=lambda **settings: None, Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        with pytest.raises(Ended):
            WeightsAndBiases(tmp_path, {})
    assert len(ids) == 2 and len({name for pair in ids for name in pair}) == 1


def test_the_copy_of_a_run_has_a_wandb_run_of_its_own_and_a_moved_run_keeps_its(
    tmp_path, monkeypatch
):
    ids = []

    def init(id: str, **settings: object) -> SimpleNamespace:
        ids.append(id)
        return SimpleNamespace(log=lambda *_, **__: None)

    module = SimpleNamespace(init=init, Settings=lambda **settings: None, Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", module)
    trunk = tmp_path / "trunk"
    trunk.mkdir()
    reporter = WeightsAndBiases(trunk, {})
    reporter.scalars({"train/loss": 1.0}, 5)
    reporter.send()
    shutil.copytree(trunk, tmp_path / "branch")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(trunk, tmp_path / "elsewhere" / "trunk")
    branch = WeightsAndBiases(tmp_path / "branch", {})
    moved = WeightsAndBiases(tmp_path / "elsewhere" / "trunk", {})
    again = WeightsAndBiases(tmp_path / "branch", {})
    assert ids[0] == ids[2] and ids[1] == ids[3] != ids[0]
    assert (branch.sent.step, moved.sent.step, again.sent.step) == (-1, 5, -1)


def test_a_save_syncs_the_reporters_while_a_step_is_reported(tmp_path):
    syncing, reporting, synced = threading.Event(), threading.Event(), threading.Event()

    def report(*_: object) -> None:
        reporting.set()
        assert synced.wait(10)

    first = SimpleNamespace(
        scalars=lambda *_: None, sync=lambda: (syncing.set(), reporting.wait(10))
    )
    second = SimpleNamespace(scalars=report, sync=synced.set)
    writer = MetricsWriter(tmp_path, logging_steps=1, reporters=[first, second])
    save = threading.Thread(target=writer.sync)
    save.start()
    assert syncing.wait(10)
    writer.train(TrainLine(step=1))
    save.join()
    assert writer.reporters == [first, second]
