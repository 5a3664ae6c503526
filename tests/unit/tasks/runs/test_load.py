"""A model read out of a run that goes on training meanwhile."""

import shutil

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.runs import load
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.storage.artifacts import remove
from support.trained_runs import ranks as ranks
from support.trained_runs import run_of as run_of


@pytest.mark.parametrize("part", ["check", "load"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_not_the_answer(run_of, monkeypatch, part):
    run, _ = run_of()
    (older,) = (run / "checkpoints").glob("step-*")
    newer = older.with_name(f"step-{int(older.name.removeprefix('step-')) + 1:08d}")
    shutil.copytree(older, newer)
    module = load if part == "check" else load.tensors_of
    read = getattr(module, part)

    def pruned_before(folder, *rest, **options):
        if newer.is_dir():
            remove(newer)
        return read(folder, *rest, **options)

    monkeypatch.setattr(module, part, pruned_before)
    model, _, chosen = load_run(run)
    assert chosen == older and not newer.exists()
    assert all(
        bool((tensor == right).all())
        for tensor, right in zip(model.parameters(), load_run(run)[0].parameters(), strict=True)
    )
    shutil.copytree(older, newer)
    with pytest.raises(ConfigError, match=f"has no checkpoint '{newer.name}'"):  # one that was named is not replaced
        load_run(run, newer.name)
