"""Rows that grow longer on the way: killed on either side of the boundary, the run ends as the one that nobody disturbed."""

import pytest

from support.laboratory import exact_metrics, kill

STAGES = (
    "data.curriculum=[{sequence_length: 16, until: 13}, {sequence_length: 32, until: 30}]",
    "environment.nproc_per_node=2",
    "model.attention=infini",
    "model.segment_length=8",
    "train.max_steps=44",
    "train.document_masking=true",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_on_either_side_of_a_boundary_the_run_is_bitwise_the_uninterrupted_one(lab):
    expected = lab.finish("calm-curriculum", *STAGES)
    metrics = exact_metrics(lab.run_dir("calm-curriculum"))
    lengths = [line["sequence_length"] for line in metrics if line["kind"] == "train"]
    assert lengths == [16] * 13 + [32] * 17 + [64] * 14
    for step in (11, 33):  # so the first boundaries are crossed after one resume, and the next begins at a boundary
        started = lab.start("curriculum", *STAGES)
        lab.wait_for_step("curriculum", step, started)
        kill(started.process.pid)
        started.wait()
    summary = lab.finish("curriculum", *STAGES)
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert summary["optimizer_sha256"] == expected["optimizer_sha256"]
    assert exact_metrics(lab.run_dir("curriculum")) == metrics and summary["attempts"] == 3
    refused = lab.start("curriculum", *STAGES, "data.curriculum=[]")
    assert refused.wait() == 64 and "dataset.curriculum: [{" in refused.log.read_text()
