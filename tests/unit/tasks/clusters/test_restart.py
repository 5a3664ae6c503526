"""A job before its workers start: whose attempt it is, and where one that starts again takes up."""

import json
import signal
from pathlib import Path

import pytest

from infini_llama.tasks.clusters import node, restart
from infini_llama.tasks.clusters.restart import prepare
from infini_llama.tasks.clusters.slurm import ENDED
from infini_llama.tasks.runs.job_file import read_job, write_job
from infini_llama.tasks.train.launcher import HUNG
from support.records import make_job


@pytest.fixture
def attempt_dir(tmp_path):
    path = tmp_path / "runs" / "big" / "logs" / "attempt-99"
    path.mkdir(parents=True)
    (tmp_path / "runs" / "big" / "checkpoints").mkdir()
    write_job(path, make_job(tmp_path / "runs" / "big", init_from=Path("weights")))
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 9)]
    (tmp_path / "runs" / "big" / "metrics.jsonl").write_text("".join(lines))
    return path


@pytest.fixture
def signals():
    """Puts back the handlers that a node's agent sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_attempt_belongs_to_the_job_that_comes_first(attempt_dir):
    assert prepare(attempt_dir, "17") is None
    assert "is job 17's" in str(prepare(attempt_dir, "18"))
    assert prepare(attempt_dir, "17") is None


def test_a_job_of_an_abandoned_attempt_does_not_start(attempt_dir, signals):
    attempt_dir.with_name("attempt-100").mkdir()  # by number, not by name
    assert "has come too late" in str(prepare(attempt_dir, "17"))
    assert not (attempt_dir / restart.STARTED).exists()
    assert node.main([str(attempt_dir)]) == 70


def test_a_restarted_job_resumes_from_the_newest_checkpoint_and_ignores_old_statuses(attempt_dir, monkeypatch):
    run = attempt_dir.parents[1]
    prepare(attempt_dir, "17")
    (attempt_dir / "status-0.json").write_text("{}")
    (attempt_dir / "heartbeat-0").write_text("old")
    (attempt_dir / HUNG).write_text("rank 0 has sent no heartbeat")  # else its end would be taken for a hang's too
    (attempt_dir / ENDED).write_text("76\n")
    monkeypatch.setattr(restart.checkpoints, "newest_good", lambda folder: folder / "step-00000005")
    monkeypatch.setattr(restart.checkpoints, "read_state", lambda path: restart.checkpoints.TrainState(step=5))
    assert prepare(attempt_dir, "17") is None
    renewed = read_job(attempt_dir)
    assert renewed.resume_from is not None and renewed.resume_from.name == "step-00000005"
    assert renewed.from_step == 5 and renewed.init_from is None
    assert renewed.started.machine != "another" and renewed.started.wall > 1.0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert not (attempt_dir / "status-0.json").exists() and (attempt_dir / "start-1" / "status-0.json").exists()
    assert not (attempt_dir / HUNG).exists() and not (attempt_dir / ENDED).exists()


def test_without_a_checkpoint_it_begins_where_it_began(attempt_dir):
    prepare(attempt_dir, "17")
    prepare(attempt_dir, "17")
    assert read_job(attempt_dir).from_step == 0 and read_job(attempt_dir).init_from == Path("weights")
    assert (attempt_dir.parents[1] / "metrics.jsonl").read_text() == ""
