"""The measure that reads a text once finds what is found in texts that are read whole."""

from pathlib import Path

import pytest

from infini_llama.tasks.evaluate.passkey import HiddenFacts
from infini_llama.tasks.evaluate.stage import find_passkeys, find_passkeys_after
from infini_llama.tasks.preprocess.sources.passkey import FILLER
from support.laboratory import Laboratory

CONFIG = Path(__file__).parents[4] / "configs" / "passkey.yaml"


@pytest.mark.slow
def test_numbers_after_a_text_are_found_as_before_it(lab, tmp_path):
    """A trained model: the number at the end of a text that is read once, and at the beginning of texts that are read whole."""
    name = "passkey"
    Laboratory(lab.home, CONFIG, lab.server).finish(
        name, "environment.nproc_per_node=1", "train.micro_batch_size=32"
    )
    (tmp_path / "book.txt").write_text(FILLER * 600)
    run = lab.run_dir(name)
    once = find_passkeys_after(
        run,
        [str(tmp_path / "book.txt")],
        "latest",
        None,
        [256, 8192],
        HiddenFacts("passkey", 40, 0),
    )
    whole = find_passkeys(run, "latest", [256, 8192], [0.0], samples=40)
    for mine, theirs in zip(once.memory, whole.memory, strict=True):
        assert abs(mine.found - theirs.found) <= 0.1 and mine.found >= 0.8
        assert mine.controls.swapped_other >= 0.7 and mine.controls.filler_alone == 0
    assert all(cell.found == 0 for cell in once.no_memory)
