"""A model read out of a run that goes on training meanwhile."""

import json
import re
import shutil
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.flows.naming import find
from infini_llama.tasks.evaluate.stage import evaluate
from infini_llama.tasks.runs import checkpoints, load
from infini_llama.tasks.runs.load import dataset_of, load_run
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.storage.artifacts import commit, remove, staging


def copied(checkpoint: Path, target: Path) -> None:
    """Commit the same tensors as a checkpoint of the step in the name of `target`."""
    staged, step = staging(target), checkpoints.step_of(target)
    shutil.copytree(checkpoint, staged, dirs_exist_ok=True)
    (staged / "manifest.json").unlink()
    state = json.loads((staged / checkpoints.STATE_FILE).read_text())
    (staged / checkpoints.STATE_FILE).write_text(json.dumps(state | {"step": step}))
    commit(staged, target, checkpoints.KIND, {}, content={"step": step})


@pytest.mark.parametrize("part", ["verify", "load_tensors"])
def test_a_checkpoint_pruned_while_read_is_not_returned(run_of, monkeypatch, part):
    run, _ = run_of()
    (older,) = (run / "checkpoints").glob("step-*")
    newer = older.with_name(f"step-{int(older.name.removeprefix('step-')) + 1:08d}")
    copied(older, newer)
    module = checkpoints if part == "verify" else load
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
        for tensor, right in zip(
            model.parameters(), load_run(run)[0].parameters(), strict=True
        )
    )
    copied(older, newer)
    with pytest.raises(
        ConfigError, match=newer.name
    ):  # one that was named is not replaced
        load_run(run, newer.name)


@pytest.mark.parametrize("by_name", [False, True])
def test_checksums_of_a_checkpoint_are_computed_once(run_of, monkeypatch, by_name):
    (chosen,) = (run_of()[0] / "checkpoints").glob("step-*")
    read, checksum = [], artifacts.file_checksum
    monkeypatch.setattr(
        artifacts,
        "file_checksum",
        lambda path: read.append(path.name) or checksum(path),
    )
    load_run(chosen.parents[1], chosen.name if by_name else "latest")
    assert sorted(read) == ["rank-00000.bin", "tensors.json", "train_state.json"]


@pytest.mark.parametrize("moved", [".", "runs", "runs/run"])
def test_a_run_that_was_moved_behind_a_link_is_found_by_both_names(
    run_of, tmp_path, monkeypatch, moved
):
    run, _ = run_of("run")
    home = run.parent.parent
    (home / moved).rename(tmp_path / "moved")
    (home / moved).symlink_to(tmp_path / "moved")
    expected = load_run(run).checkpoint.name
    for folder in (run, run.resolve()):
        assert find(str(folder)) == folder
        assert (
            dataset_of(folder).is_dir() and load_run(folder).checkpoint.name == expected
        )
        monkeypatch.chdir(folder.parent)
        assert load_run(folder.name).checkpoint.name == expected
        assert evaluate(find(folder.name), sequences=1).checkpoint == expected
        assert RunReader(find(folder.name)).dataset is not None


def test_a_pointer_is_followed_to_the_name_of_its_run(run_of, monkeypatch):
    run, _ = run_of("run")
    (run.parent / "newest").symlink_to("run")
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(run.parent.parent))
    assert find("newest", "runs") == find("run", "runs") == run
    monkeypatch.chdir(run / "checkpoints")
    assert find("..") == run


def test_a_run_is_found_by_its_name(run_of, monkeypatch, tmp_path):
    run, _ = run_of("tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(run.parent.parent))
    assert load_run("tiny").checkpoint.parent.parent == run


def test_the_documented_snippet_reads_the_weights_without_this_project(
    run_of, monkeypatch
):
    run, model = run_of("run")
    monkeypatch.chdir(run.parent.parent)
    page = (Path(__file__).parents[4] / "docs/api.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
        if "tensors.json" in block
    )
    assert "infini_llama" not in block
    read = {}
    exec(block.replace("workspace/", ""), read)
    for name, parameter in model.named_parameters():
        assert (read["tensors"][f"model.{name}"] == parameter.detach().numpy()).all()
