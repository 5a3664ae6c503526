"""Copies beyond this machine: whole or not there, on filesystems with and without folders."""

import json
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.preprocess.stage import Preparation
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs import mirror as mirror_module
from infini_llama.tasks.runs.mirror import (
    Mirror,
    mirrored,
    restore_dataset,
    restore_run,
)
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage import artifacts
from infini_llama.tasks.storage.artifacts import (
    MANIFEST,
    Damaged,
    check,
    commit,
    staging,
)
from support.records import make_lineage
from support.remote import s3_server


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path):
    if request.param == "s3":
        yield f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}"
        return
    yield (
        f"memory://{tmp_path.name}"
        if request.param == "memory"
        else str(tmp_path / "mirror")
    )
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as files:
        files.mkdir("mirror")
        yield "mirror"


def checkpoint(
    run: Path, step: int, text: str = "weights", loss: float | None = None
) -> Path:
    target = checkpoints.checkpoint_path(run / "checkpoints", step)
    staged = staging(target)
    (staged / "tensors.bin").write_text(f"{text} {step}")
    (staged / "deeper").mkdir()
    (staged / "deeper" / "state.json").write_text("{}")
    (staged / checkpoints.STATE_FILE).write_text("{}")
    content = {"step": step, "validation_loss": loss}
    commit(staged, target, checkpoints.KIND, {}, content)
    return target


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        file.relative_to(folder): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def settings(home: Path, url: str | None, **sections: object) -> PipelineConfig:
    source = {"data": {"source": "python-stdlib"}} | sections
    return parse_config(
        source
        | {"storage": {"mirror": url}, "runtime": {"home": str(home), "name": "one"}}
    )


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def run(home) -> Path:
    return home / "runs" / "one"


@pytest.fixture
def reference(built) -> DatasetRef:
    return built[1]


def copy_all(config: PipelineConfig, reference: DatasetRef) -> None:
    """Copy a run, as it is now, and its dataset into the mirror."""
    with mirrored(config, reference):
        pass


def test_an_artifact_comes_back_byte_for_byte(url, home, tmp_path, run):
    path = checkpoint(run, 10)
    mirror = Mirror(url, home)
    assert mirror.keep(path, checkpoints.KIND) > 0 and mirror.has(path)
    before = contents(path)
    shutil.rmtree(home)
    assert mirror.restore(path, checkpoints.KIND)
    assert contents(path) == before
    check(path, checkpoints.KIND, checksums=True)


def test_a_partial_copy_does_not_exist(url, home, monkeypatch, run):
    path = checkpoint(run, 10)
    mirror = Mirror(url, home)
    whole = mirror.keep_file
    monkeypatch.setattr(
        mirror, "keep_file", lambda file: None if file.name == MANIFEST else whole(file)
    )
    mirror.keep(path, checkpoints.KIND)
    assert mirror.kept(path.parent) == [] and not mirror.has(path)
    shutil.rmtree(path)
    assert not mirror.restore(path, checkpoints.KIND) and not path.exists()


def test_a_record_whose_copying_is_cut_off_keeps_its_copy(tmp_path, home):
    record = home / "runs" / "one" / "lineage.json"
    record.parent.mkdir(parents=True)
    mirror = Mirror(str(tmp_path / "mirror"), home)
    record.write_text("before")
    mirror.keep_file(record)

    def cut(source: str, to: str) -> None:
        Path(to).write_text("cu")
        raise OSError("no space")

    mirror.files = Mock(wraps=mirror.files, put_file=cut)
    record.write_text("after")
    with pytest.raises(OSError, match="no space"):
        mirror.keep_file(record)
    assert mirror.read(record) == b"before"


def test_a_damaged_copy_is_not_used(url, home, caplog, run):
    path = checkpoint(run, 10)
    mirror = Mirror(url, home)
    mirror.keep(path, checkpoints.KIND)
    mirror.files.pipe_file(f"{mirror.place(path)}/tensors.bin", b"weightz 10")
    shutil.rmtree(path)
    assert not mirror.restore(path, checkpoints.KIND)
    assert not list(path.parent.iterdir()) and "step-00000010" in caplog.text


def test_a_copy_of_another_version_does_not_begin_the_run_again(
    url, home, monkeypatch, run
):
    monkeypatch.setitem(artifacts.FORMAT_VERSIONS, checkpoints.KIND, 99)
    path = checkpoint(run, 10)
    Mirror(url, home).keep(path, checkpoints.KIND)
    monkeypatch.undo()
    shutil.rmtree(path)
    with pytest.raises(Damaged, match="version 99"):
        restore_run(settings(home, url))


def test_a_rebuilt_artifact_replaces_its_copy(url, home, run):
    path = checkpoint(run, 10)
    mirror = Mirror(url, home)
    mirror.keep(path, checkpoints.KIND)
    shutil.rmtree(path)
    checkpoint(run, 10, "others")
    assert not mirror.has(path) and mirror.keep(path, checkpoints.KIND) > 0
    shutil.rmtree(path)
    assert (
        mirror.restore(path, checkpoints.KIND)
        and (path / "tensors.bin").read_text() == "others 10"
    )


def test_a_damaged_artifact_is_not_copied(url, home, run):
    path = checkpoint(run, 10)
    (path / "tensors.bin").write_text("short")
    with pytest.raises(Damaged):
        Mirror(url, home).keep(path, checkpoints.KIND)


@pytest.mark.parametrize("wrong", ["nowhere://x", "s3://"])
def test_a_location_that_is_none_is_named(home, wrong):
    with pytest.raises(ConfigError, match=f"storage\\.mirror={wrong}"):
        Mirror(wrong, home)


def test_an_empty_machine_resumes_from_the_mirror(
    url, home, data, caplog, reference, run
):
    checkpoint(run, 10)
    (run / "lineage.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 10}\n')
    with mirrored(settings(home, url), reference):
        checkpoint(run, 20)
    checkpoint(run, 30)  # the machine died with it
    shutil.rmtree(home)
    wanted = settings(home, url)
    preparation = Preparation(data(), home)
    restore_dataset(wanted, preparation.plan)
    restore_run(wanted)
    found = preparation.lookup()
    assert found is not None and found.digest == reference.digest
    assert [
        checkpoint.step for checkpoint in checkpoints.committed(run / "checkpoints")
    ] == [20]
    assert (run / "metrics.jsonl").read_text() == '{"step": 10}\n' and (
        run / "lineage.json"
    ).exists()
    for committed in checkpoints.committed(run / "checkpoints"):
        shutil.rmtree(committed.path)
    restore_run(wanted)
    copy_all(wanted, reference)
    assert "step 0" in caplog.text and not checkpoints.committed(run / "checkpoints")


def prune(run: Path, config: PipelineConfig) -> None:
    train = config.train
    checkpoints.point_and_prune(
        run / "checkpoints", train.save_total_limit, train.save_permanent_every
    )


def test_after_a_restore_the_mirror_keeps_the_best_and_the_permanent_checkpoints(
    url, home, reference, run
):
    """The machine that is lost had them, the one that goes on has fetched the newest alone."""
    train = {"save_total_limit": 2, "save_permanent_every": 50, "save_steps": 10}
    wanted = settings(home, url, train=train)
    for step, loss in ((20, 2.0), (30, 1.5), (50, 1.9), (60, 1.8), (70, 1.7)):
        checkpoint(run, step, loss=loss)
    (run / "lineage.json").write_text("{}")
    prune(run, wanted)
    copy_all(wanted, reference)
    assert steps_kept(url, run) == [30, 50, 60, 70]
    shutil.rmtree(run)
    restore_run(wanted)
    copy_all(wanted, reference)
    assert steps_kept(url, run) == [30, 50, 60, 70]
    for step in (80, 90):
        checkpoint(run, step, loss=1.6)
        prune(run, wanted)
        copy_all(wanted, reference)
    assert steps_kept(url, run) == [30, 50, 80, 90]


def test_a_checkpoint_that_is_pruned_while_it_is_copied_leaves_no_part(
    url, home, monkeypatch, caplog, reference, run
):
    wanted = settings(home, url, train={"save_total_limit": 2})
    keep_file = Mirror.keep_file

    def slowly(mirror: Mirror, path: Path) -> None:
        keep_file(mirror, path)
        if path.parent.name == "step-00000010":  # training goes on
            for step in (20, 30):
                if not checkpoints.checkpoint_path(run / "checkpoints", step).exists():
                    checkpoint(run, step)
            prune(run, wanted)

    monkeypatch.setattr(Mirror, "keep_file", slowly)
    checkpoint(run, 10)
    copy_all(wanted, reference)
    monkeypatch.undo()
    copy_all(wanted, reference)
    copies = Mirror(url, home).copies(run / "checkpoints")
    assert [checkpoints.step_of(path) for path in copies] == [20, 30]
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_a_run_that_saved_nothing_does_not_keep_the_next_one_from_the_mirror(
    url, home, caplog, reference, run
):
    wanted = settings(home, url)
    for steps in ((), (10,)):
        run.mkdir(parents=True, exist_ok=True)
        RunFolder(run).write(run / "lineage.json", make_lineage())
        for step in steps:
            checkpoint(run, step)
        copy_all(wanted, reference)
        first = run.rename(home / f"lost-{len(steps)}")
        restore_run(wanted)
    assert steps_kept(url, run) == [10] and "another run" not in caplog.text
    assert RunFolder(first).read_id() == RunFolder(run).read_id()


def test_of_two_commands_that_restore_a_run_the_second_leaves_it_to_the_first(
    url, home, monkeypatch, reference, run
):
    checkpoint(run, 10)
    (run / "lineage.json").write_text("{}")
    wanted = settings(home, url)
    copy_all(wanted, reference)
    shutil.rmtree(run)
    others = []

    def restore_while_another_begins(*arguments):
        if not others:
            others.append(commands.submit(restore_run, wanted))
            time.sleep(0.3)
        return restore(*arguments)

    restore, restore_file, files = Mirror.restore, Mirror.restore_file, list[Path]()
    monkeypatch.setattr(Mirror, "restore", restore_while_another_begins)
    monkeypatch.setattr(
        Mirror,
        "restore_file",
        lambda mirror, path: files.append(path) or restore_file(mirror, path),
    )
    with ThreadPoolExecutor(1) as commands:
        restore_run(wanted)
        others[0].result()
    assert (run / "lineage.json").exists() and len(files) == len(set(files)), (
        "the first one may train by then"
    )


def steps_kept(url: str, run: Path) -> list[int]:
    return [
        checkpoints.step_of(path)
        for path in Mirror(url, run.parents[1]).kept(run / "checkpoints")
    ]


def test_a_run_whose_lineage_is_lost_keeps_what_it_has(url, home, reference, run):
    wanted = settings(home, url)
    checkpoint(run, 10)
    for record in RunFolder(run).records:
        record.write_text("old")
    copy_all(wanted, reference)
    (run / "logs" / "attempt-01").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("new")
    (run / "lineage.json").unlink()
    restore_run(wanted)
    assert (run / "metrics.jsonl").read_text() == "new"


def test_a_dataset_of_two_machines_is_copied_once(
    url, home, tmp_path, built, reference, caplog
):
    """It has the same content, and another time at which it was made."""
    caplog.set_level(logging.INFO)
    other = shutil.copytree(home, tmp_path / "other", symlinks=True)
    manifest = other / reference.path / MANIFEST
    written = json.loads(manifest.read_text())
    written["created"] = "2020-01-01T00:00:00+00:00"
    del written["self_checksum"]
    written["self_checksum"] = artifacts.checksum_of(written)
    manifest.write_text(json.dumps(written))
    for place in (home, other, home):
        copy_all(settings(place, url), reference)
    copied = [line for line in caplog.messages if f"{reference.path[9:]} was" in line]
    assert len(copied) == 1


def test_a_dataset_elsewhere_is_left_out_with_a_warning(
    url, home, tmp_path, built, reference, run, caplog
):
    elsewhere = shutil.move(home / reference.path, tmp_path / "elsewhere")
    checkpoint(run, 10)
    copy_all(settings(home, url), changed(reference, path=str(elsewhere)))
    assert steps_kept(url, run) == [10]
    (warning,) = [line for line in caplog.records if line.levelno == logging.WARNING]
    assert str(elsewhere) in warning.getMessage()


def test_another_machines_newer_checkpoint_is_kept_until_overtaken(
    url, tmp_path, caplog, reference
):
    """Machine b has an older copy of a run that machine a took further before it was lost."""
    first, second = (tmp_path / name / "runs" / "one" for name in ("a", "b"))
    for run in (first, second):
        checkpoint(run, 100, run.parents[1].name)
        (run / "lineage.json").write_text(f'"{run.parents[1].name}"')
    with mirrored(settings(first.parents[1], url), reference):
        checkpoint(first, 200, "a")
    wanted = settings(second.parents[1], url)
    restore_run(wanted)
    with mirrored(wanted, reference):
        checkpoint(second, 150, "b")
    assert "step 200 of run one" in caplog.text and "step 100" in caplog.text
    assert steps_kept(url, second) == [100, 200], (
        "and with the records that belong to it"
    )
    shutil.rmtree(tmp_path / "a")
    restore_run(settings(first.parents[1], url))
    assert (
        checkpoints.latest_step(first / "checkpoints") == 200
        and (first / "lineage.json").read_text() == '"a"'
    )
    with mirrored(wanted, reference):
        checkpoint(second, 200, "b")
    assert steps_kept(url, second) == [100, 150, 200] and Mirror(
        url, tmp_path / "b"
    ).has(second / "checkpoints" / "step-00000200")


def test_a_run_of_the_same_name_from_another_home_is_left_whole(
    url, tmp_path, caplog, reference
):
    first, second = (tmp_path / name / "runs" / "one" for name in ("a", "b"))
    for run, step in ((first, 100), (second, 200)):
        checkpoint(run, step)
        RunFolder(run).write(run / "lineage.json", make_lineage())
    for run in (first, second):
        copy_all(settings(run.parents[1], url), reference)
    assert "the mirror has another run of the name one" in caplog.text
    assert steps_kept(url, second) == [100]
    shutil.rmtree(tmp_path / "a")
    restore_run(settings(first.parents[1], url))
    assert RunFolder(first).read_id() != RunFolder(second).read_id()


def test_an_interrupted_restore_is_resumed(url, home, monkeypatch, reference, run):
    wanted = settings(home, url)
    checkpoint(run, 10)
    for record in RunFolder(run).records:
        record.write_text(record.name)
    copy_all(wanted, reference)
    before = contents(run)
    fetch, left = Mirror._fetch, [0]

    def cut_off(self: Mirror, path: Path, to: Path) -> None:
        if not left[0]:
            raise RuntimeError("cut off")
        left[0] -= 1
        fetch(self, path, to)

    monkeypatch.setattr(Mirror, "_fetch", cut_off)
    for transfers in range(len(before)):
        shutil.rmtree(run)
        left[0] = transfers
        with pytest.raises(PipelineError, match="cut off"):
            restore_run(wanted)
        left[0] = -1  # no more cuts
        (run / "environment.json").write_text("pinned here meanwhile")
        restore_run(wanted)
        (run / "lock").unlink()
        assert contents(run) == before


@pytest.mark.parametrize("back_to", [10, 0])
def test_a_rollback_is_followed(url, home, back_to, reference, run):
    wanted = settings(home, url)
    for step in (10, 20, 30):
        checkpoint(run, step)
    copy_all(wanted, reference)
    assert steps_kept(url, run) == [10, 20, 30]
    with mirrored(wanted, reference):
        checkpoints.abandon_newer(run / "checkpoints", back_to)
    assert steps_kept(url, run) == [step for step in (10, 20, 30) if step <= back_to]


def test_a_mirror_that_does_not_answer_does_not_stop_training(
    home, caplog, monkeypatch, reference, run
):
    tries, context = [], ContextVar("context", default="another run")

    def fail(*_: object) -> bool:
        tries.append(context.get())
        raise OSError("no route to host")

    monkeypatch.setattr(Mirror, "has", fail)
    monkeypatch.setattr("infini_llama.tasks.runs.mirror.LOOK_EVERY", 0.001)
    context.set("this run")
    with mirrored(settings(home, "memory://gone"), reference):
        checkpoint(run, 10)
        while len(tries) < 3:
            time.sleep(0.001)
    first, last = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert "no route to host" in first and "will be retried" in first
    assert all(
        name in last
        for name in (
            reference.path,
            "runs/one/checkpoints/step-00000010",
            "records of run one",
        )
    )
    assert set(tries) == {"this run"}, (
        "a flow of Prefect shows the lines of its own context"
    )


def test_the_mirror_is_asked_once_for_each_checkpoint(
    home, monkeypatch, reference, run
):
    looks, asked = [], []
    committed, exists = mirror_module._committed, Mirror._exists
    monkeypatch.setattr(mirror_module, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(
        mirror_module, "_committed", lambda run: (looks.append(run), committed(run))[1]
    )
    monkeypatch.setattr(
        Mirror,
        "_exists",
        lambda self, place: (asked.append(place), exists(self, place))[1],
    )

    def look(times: int) -> None:
        until = len(looks) + times
        while len(looks) < until:
            time.sleep(0.001)

    with mirrored(settings(home, "memory://asked"), reference):
        for step in (10, 20):
            checkpoint(run, step)
            while step not in steps_kept("memory://asked", run):
                time.sleep(0.001)
            look(3)  # the copy has ended
            before = len(asked)
            look(20)
            assert len(asked) == before


@pytest.fixture(params=["refused", "below-a-file"])
def failing(request, tmp_path) -> tuple[str, type[PipelineError]]:
    """The URL of a mirror that cannot be read, and the class of the error."""
    (tmp_path / "file").touch()
    if request.param == "refused":
        return "ftp://me:hunter2@127.0.0.1:1/x", PipelineError
    return str(tmp_path / "file" / "x"), ConfigError


def test_a_run_that_may_be_in_a_mirror_that_fails_does_not_begin(failing, home, data):
    """It would be another run of the same name."""
    url, kind = failing
    wanted = settings(home, url)
    for restore in (
        lambda: restore_run(wanted),
        lambda: restore_dataset(wanted, Preparation(data(), home).plan),
    ):
        with pytest.raises(
            PipelineError, match=r"storage\.mirror=.*Run one is not on this machine"
        ) as raised:
            restore()
        assert type(raised.value) is kind and "hunter2" not in str(raised.value)


def test_a_run_that_is_here_continues_while_the_mirror_fails(
    failing, home, data, caplog, reference, run
):
    wanted = settings(home, failing[0])
    checkpoint(run, 10)
    (run / "lineage.json").write_text("{}")
    plan = Preparation(data(), home).plan
    restore_dataset(wanted, plan)
    restore_run(wanted)
    assert not caplog.records
    shutil.rmtree(home / reference.path)
    restore_dataset(wanted, plan)
    assert "run one continues with what is on this machine" in caplog.text
    copy_all(wanted, reference)
    assert (
        "not copied: " in caplog.text
        and "step-00000010" in caplog.text
        and "hunter2" not in caplog.text
    )


def test_a_wrong_protocol_is_refused_before_training(home, reference):
    with (
        pytest.raises(ConfigError, match=r"storage\.mirror=nowhere://x"),
        mirrored(settings(home, "nowhere://x"), reference),
    ):
        pass


def test_a_mirror_that_hangs_holds_nothing_up_after_a_stop(
    home, caplog, monkeypatch, reference, run
):
    released = threading.Event()
    monkeypatch.setattr(Mirror, "has", lambda *_: released.wait(60))
    config = settings(home, "memory://hangs")
    config = changed(config, runtime=changed(config.runtime, grace_period=0.2))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), mirrored(config, reference):
        checkpoint(run, 10)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
    assert "does not answer; not copied: " in caplog.text
    assert "runs/one/checkpoints/step-00000010" in caplog.text
    released.set()


def test_the_last_copy_is_waited_for_after_a_failure(home, monkeypatch, reference, run):
    """Unlike after a stop, nothing will end this process."""
    config = settings(home, "memory://slow")
    config = changed(config, runtime=changed(config.runtime, grace_period=0.1))
    has = Mirror.has
    monkeypatch.setattr(Mirror, "has", lambda *given: time.sleep(0.5) or has(*given))
    with pytest.raises(PipelineError, match="diverged"), mirrored(config, reference):
        path = checkpoint(run, 10)
        raise PipelineError("diverged")
    assert Mirror("memory://slow", home).is_whole(path)
