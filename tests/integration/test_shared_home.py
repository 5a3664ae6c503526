"""A home with runs of another user: what may not be read or written is named, and the rest works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infini_llama.tasks.runs.gc import Collected
from infini_llama.tasks.storage.artifacts import staging
from support.laboratory import Laboratory

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="as root alone, files of two users can be made",
)
UNPRIVILEGED = [
    "setpriv",
    "--bounding-set",
    "-dac_override,-dac_read_search,-fowner,-chown",
]
PROGRAM = "import sys; from infini_llama.flows.cli.main import main; sys.exit(main(sys.argv[1:]))"


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of a user who may not read or write all."""
    called = [*UNPRIVILEGED, sys.executable, "-c", PROGRAM, *arguments]
    settings = os.environ | {"INFINI_LLAMA_HOME": str(home)}
    return subprocess.run(
        called, env=settings, check=False, capture_output=True, text=True, timeout=300
    )


def give_away(*paths: Path, readable: bool = True) -> None:
    """Make them another user's, for others readable or not."""
    for path in paths:
        os.chown(path, 1000, 1000)
        path.chmod((0o755 if path.is_dir() else 0o644) & (0o777 if readable else 0o700))


@pytest.mark.parametrize("readable", [True, False])
def test_gc_removes_what_it_may(built, make_run, readable):
    """With a umask that lets others read, and without."""
    home, mine, theirs = built[0], make_run() / "checkpoints", make_run("theirs")
    # The copy of the home has none that a dataset links to.
    shutil.rmtree(home / "units")
    removed, kept, note = (
        staging(mine / "step-00000120"),
        staging(theirs / "step-00000120"),
        home / "units/parts/1.json",
    )
    note.parent.mkdir(parents=True)
    for file in (
        note,
        theirs / "lock",
        home / "locks" / "units.lock",
        home / "locks" / "prepare-0123456789ab.lock",
    ):
        file.touch()
    give_away(
        theirs / "lock",
        kept,
        theirs / "checkpoints",
        theirs,
        *(home / "locks").iterdir(),
        readable=readable,
    )
    listed = Collected.model_validate_json(
        command(home, "gc", "--older-than", "0", "--json").stdout
    )
    done = command(home, "gc", "--older-than", "0", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    record = Collected.model_validate_json(done.stdout)
    assert record.files == listed.files and record.in_use == listed.in_use
    assert [file.path for file in record.files] == [
        removed.relative_to(home).as_posix()
    ] and not removed.exists()
    expected = [note, *([kept] if readable else [])]
    assert [file.path for file in record.in_use] == [
        path.relative_to(home).as_posix() for path in expected
    ]
    assert all("cannot be written" in file.by for file in record.in_use) and all(
        path.exists() for path in expected
    )


def test_checkpoints_that_cannot_be_written_are_named_before_training(tmp_path):
    lab = Laboratory.create(tmp_path / "home")
    checkpoints = lab.run_dir("begun") / "checkpoints"
    checkpoints.mkdir(parents=True)
    give_away(checkpoints)
    done = command(
        lab.home,
        "run",
        str(lab.config),
        "--no-prefect",
        f"runtime.home={lab.home}",
        "runtime.name=begun",
    )
    assert done.returncode == 64 and f"{checkpoints} cannot be written" in done.stderr
    assert not (lab.run_dir("begun") / "logs").exists()


def test_runs_that_may_not_be_listed_are_not_taken_for_none(built, make_run):
    """gc would delete their datasets."""
    home, mine, theirs = built[0], make_run(), make_run("theirs")
    give_away(home / "runs", readable=False)
    for called in (["runs"], ["gc", "--unused-datasets", "--older-than", "0", "--yes"]):
        done = command(home, *called)
        assert (
            done.returncode == 64
            and f"{home / 'runs'} cannot be used (Permission denied)" in done.stderr
        )
    assert [*home.glob("datasets/*/manifest.json")]
    give_away(home / "runs")
    give_away(theirs, readable=False)
    done = command(home, "runs", "--json")
    assert [run["run"] for run in json.loads(done.stdout)["runs"]] == [mine.name]
    assert "run theirs is skipped" in done.stderr
