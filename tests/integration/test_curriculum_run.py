"""Rows that grow longer on the way: killed on either side of the boundary, the run ends as the one that nobody disturbed."""

import pytest

STAGES = (
    "data.sequence_length=64",
    "data.curriculum=[{sequence_length: 16, until: 13}, {sequence_length: 32, until: 30}]",
    "environment.nproc_per_node=2",
    "model.attention=infini",
    "model.segment_length=8",
    "train.max_steps=44",
    "train.document_masking=true",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_on_either_side_of_a_boundary_the_run_ends_bitwise_equal(lab):
    lab.finish("calm-curriculum", *STAGES)
    lines = lab.metrics("calm-curriculum")
    lengths = [line["sequence_length"] for line in lines if line["kind"] == "train"]
    assert lengths == [16] * 13 + [32] * 17 + [64] * 14
    for step in (
        11,
        33,
    ):  # so the first boundaries are crossed after one resume, and the next begins at a boundary
        lab.kill_at(step, "curriculum", *STAGES)
    lab.finish("curriculum", *STAGES)
    assert lab.assert_same("curriculum", "calm-curriculum")["attempts"] == 3
