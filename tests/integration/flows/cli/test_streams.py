"""A command whose caller has closed the standard streams or removed the current folder, or whose output cannot be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.laboratory import COMMAND, own_environment


def test_a_command_works_without_streams(tmp_path):
    ended = subprocess.run(
        [COMMAND, "runs"],
        env=own_environment(tmp_path),
        preexec_fn=lambda: os.closerange(0, 3),
    )
    assert ended.returncode == 0


@pytest.fixture(params=["a full disk", "a reader that has left"])
def unwritable(request):
    """A descriptor to which nothing can be written."""
    if request.param == "a full disk":
        number = os.open("/dev/full", os.O_WRONLY)
    else:
        reading_end, number = os.pipe()
        os.close(reading_end)
    yield number
    os.close(number)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a file that is always full"
)
def test_the_exit_code_is_right_where_messages_cannot_be_written(tmp_path, unwritable):
    def run(*arguments: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [COMMAND, *arguments], env=own_environment(tmp_path), **streams
        )

    assert (
        run(
            "train", str(tmp_path / "missing.yaml"), "--verbose", stderr=unwritable
        ).returncode
        == 64
    )
    refused = run(
        "report", "nothing", "--json", stderr=unwritable, stdout=subprocess.PIPE
    )
    assert (refused.returncode, json.loads(refused.stdout)["exit_code"]) == (64, 64)
    assert (
        run(
            "report", "nothing", "--json", stderr=subprocess.PIPE, stdout=unwritable
        ).returncode
        == 64
    )
    listed = run("runs", "--json", stderr=unwritable, stdout=subprocess.PIPE)
    assert (listed.returncode, json.loads(listed.stdout)["runs"]) == (0, [])


def test_a_folder_that_was_removed_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    command = f"cd {tmp_path / 'gone'} && rmdir ../gone && exec {COMMAND} runs"
    ended = subprocess.run(
        ["sh", "-c", command],
        env=own_environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert (
        ended.returncode == 64
        and "folder" in ended.stderr
        and "Traceback" not in ended.stderr
    )


@pytest.mark.parametrize(
    ("backend", "kept"), [("nonsense", "None"), ("tkagg", "tkagg")]
)
def test_charts_are_drawn_whatever_the_backend_for_windows(backend, kept):
    check = (
        "import os, sys; from infini_llama.tasks.document import Chart, Curve; from infini_llama.tasks.report.charts import svg; "
        "svg(Chart('loss', [Curve('a', [1, 2], [3.0, 1.0])])); import matplotlib; "
        "print(os.environ['MPLBACKEND'], matplotlib.rcParams._get_backend_or_none())"
    )
    environment = os.environ | {"MPLBACKEND": backend}
    drawn = subprocess.run(
        [sys.executable, "-c", check],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert drawn.stdout.split() == [backend, kept]
