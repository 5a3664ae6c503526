"""What a rollback needs is there when it comes: retention keeps it."""

from infini_llama.tasks.runs import checkpoints
from support.laboratory import inject

SETTINGS = (
    "model.attention=softmax",
    "environment.nproc_per_node=1",
    "train.save_steps=2",
    "train.save_total_limit=2",
    "train.eval_steps=100",
    "train.max_skips=4",
)
# The updates of every fifth step from 12 to 32 are skipped, in the first attempt alone.
RARE_SKIPS = """
def change(module):
    from dataclasses import replace
    step, calls = module.optimizer_step, []
    first = once()
    def poisoned(strategy, batch, scale, is_spike, *rest):
        calls.append(1)
        if not first or len(calls) < 12 or len(calls) % 5 != 2:
            return step(strategy, batch, scale, is_spike, *rest)
        update = step(strategy, batch, scale, lambda loss: True, *rest)
        return replace(update, loss=float("nan"))
    module.optimizer_step = poisoned
"""


def test_a_rollback_goes_to_the_last_checkpoint_before_the_first_skip(lab, tmp_path):
    """Two checkpoints are kept, one every second step; the run diverges twenty steps after its first skip."""
    skips = inject(tmp_path, "infini_llama.tasks.train.worker.trainer", RARE_SKIPS)
    summary = lab.finish("needs", *SETTINGS, skips)
    first, second = lab.attempts("needs")
    assert (first.code, first.step, second.from_step) == (72, 31, 10)
    assert summary["steps"] == 60
    text = next(lab.home.glob("needs-*.log")).read_text()
    assert "rolling back to step-00000010, from before step 12" in text
    kept = checkpoints.committed(lab.run_dir("needs") / "checkpoints")
    assert [found.step for found in kept] == [60, 58]
