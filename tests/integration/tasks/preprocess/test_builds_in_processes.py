"""Preparing data in real processes: killed anywhere, asked to stop, on a full disk, and with several workers."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.reading import changed
from infini_llama.tasks.preprocess import learning, workers
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.preprocess.stage import Preparation, preprocess
from infini_llama.tasks.preprocess.tokens import parts, units
from infini_llama.tasks.preprocess.workers import MOST_THREADS
from infini_llama.tasks.storage.artifacts import check
from support.laboratory import inject
from support.stages import finish_build, start_build
from support.texts import write_files
from support.waiting import wait_until


def temporaries(home: Path) -> list[str]:
    return [str(path) for path in home.rglob(".*.tmp")]


# Small files are several parts, as in support/build.py.
SMALL_PARTS = """
from infini_llama.tasks.preprocess.tokens import parts
parts.RUN_BYTES, parts.PER_FILE = 1500, 0
"""
UNGUARDED = f"""
import sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
{SMALL_PARTS}
preprocess(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_script_without_a_main_guard_ends_with_the_reason(data, tmp_path):
    """A spawned worker imports the script once more: without the guard it would wait for its parent's lock."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [
        sys.executable,
        str(script),
        data(num_workers=MOST_THREADS + 1).model_dump_json(),
        str(tmp_path / "home"),
    ]
    ended = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode != 0 and "__main__" in ended.stderr


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_bytes_are_the_same_with_any_number_of_threads(
    data, tmp_path, digests, kind
):
    settings, references = data(tokenizer={"kind": kind, "vocab_size": 400}), []
    for threads in ("1", "3"):
        build = start_build(
            settings,
            tmp_path / threads,
            RAYON_NUM_THREADS=threads,
            PYTHONHASHSEED=threads,
        )
        references.append(finish_build(build))
    assert references[0] == references[1]
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / "3" / "datasets")


# The parent forks one child for each step and kills it there, for real; another finishes the build. Nothing is threaded before.
KILLED = f"""
import os, signal, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
{SMALL_PARTS}
data, home, stride = DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])
BEGUN = ("open", "os.", "shutil.")

def child(folder, step):
    count = 0
    def kill(event, arguments):
        nonlocal count
        if event.startswith(BEGUN) and not str(arguments[0]).endswith(".txt"):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    preprocess(data, Path(folder))

for step in range(1, 100_000, stride):
    codes = []
    for last in (step, 0):
        pid = os.fork()
        if pid == 0:
            child(f"{{home}}/{{step}}", last)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(step, *codes, flush=True)
    if codes[0] == 0:
        break
"""


def test_killed_anywhere_the_same_call_gives_the_same_bytes(
    data, tmp_path, digests, small_parts
):
    settings = data(num_workers=2)
    expected = preprocess(settings, tmp_path / "whole")
    command = [
        sys.executable,
        "-c",
        KILLED,
        settings.model_dump_json(),
        str(tmp_path / "killed"),
        "17",
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240)
    steps = [line.split() for line in child.stdout.splitlines()]
    assert len(steps) > 10, child.stderr
    assert [ended for _, ended, _ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert {again for _, _, again in steps} == {"0"}
    whole = digests(tmp_path / "whole" / "datasets")
    for step, _, _ in steps:
        home = tmp_path / "killed" / step
        assert digests(home / "datasets") == whole
        assert temporaries(home / "datasets") == [] and not list(
            home.rglob("*.damaged-*")
        )
        # Of two units and a note that were being written; `gc` deletes them.
        assert len(temporaries(home / "units")) <= 3
        check(home / expected.path, "dataset", checksums=True)
        assert Preparation(settings, home).lookup() == changed(expected, built=[])


@pytest.mark.parametrize("several", [False, True])
def test_any_number_of_workers_gives_the_same_bytes(
    data, corpus, tmp_path, digests, several, small_parts, monkeypatch
):
    sources = [
        {"name": f"s{digit}", "files": [f"{corpus}/text-0{digit}*.txt"]}
        for digit in range(3)
    ]
    given = {"files": [], "sources": sources} if several else {}
    expected = preprocess(data(**given, num_workers=1), tmp_path / "1")
    for kind, most_threads in (("threads", 3), ("processes", 1)):
        monkeypatch.setattr(workers, "MOST_THREADS", most_threads)
        assert preprocess(data(**given, num_workers=3), tmp_path / kind) == expected
        assert digests(tmp_path / kind / "datasets") == digests(
            tmp_path / "1" / "datasets"
        )


KILLED_AT_THE_FOURTH_UNIT = """
def change(module):
    import signal
    commit, calls = module.commit, []
    def dying(*arguments):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(*arguments)
    module.commit = dying
"""


def test_killed_between_units_only_what_is_unfinished_is_done_again(
    data, tmp_path, digests, monkeypatch, small_parts
):
    whole = preprocess(data(), tmp_path / "whole")
    inject(
        tmp_path,
        "infini_llama.tasks.preprocess.tokens.units",
        KILLED_AT_THE_FOURTH_UNIT,
    )
    home = tmp_path / "killed"
    child = start_build(
        data(num_workers=1),
        home,
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    )
    child.communicate(timeout=120)
    assert child.returncode == -9
    finished = sorted(home.glob("units/*/*/manifest.json"))
    lost = next(finished[1].parent.glob("*.arrow"))
    # And the disk lost a part of one of those that were finished.
    lost.write_bytes(lost.read_bytes()[:-1])
    written, learned = [], []
    write, learn = units.commit, learning.learn
    monkeypatch.setattr(
        units, "commit", lambda *given: (written.append(given[1].name), write(*given))
    )
    monkeypatch.setattr(
        learning, "learn", lambda *given: (learned.append(1), learn(*given))[1]
    )
    assert preprocess(data(), home) == whole
    every = {path.parent.name for path in home.glob("units/*/*/manifest.json")}
    assert learned == [] and len(finished) == 3 and len(every) > 5
    assert set(written) == every - {path.parent.name for path in finished} | {
        lost.parent.name
    }
    assert digests(home / "datasets") == digests(tmp_path / "whole" / "datasets")


def test_workers_die_with_their_parent_and_the_next_build_resumes(
    data, tmp_path, digests, small_parts
):
    settings = data(num_workers=3)
    whole = preprocess(settings, tmp_path / "whole")
    home = tmp_path / "killed"
    for _ in range(2):
        child = start_build(settings, home)
        before = len(list(home.glob("units/*/*/manifest.json")))
        wait_until(
            lambda child=child, before=before: (
                child.poll() is not None
                or len(list(home.glob("units/*/*/manifest.json"))) > before
            )
        )
        child.kill()
        child.communicate()
    assert changed(preprocess(settings, home), built=[]) == changed(whole, built=[])
    assert digests(home / "datasets") == digests(tmp_path / "whole" / "datasets")


def test_a_worker_that_is_killed_between_two_parts_is_named(
    data, tmp_path, small_parts, monkeypatch
):
    """Parts that were ready by then are used, and no other one can be started."""
    remember = Corpus._remember

    def remember_and_kill(*arguments):
        remember(*arguments)
        started = multiprocessing.active_children()
        time.sleep(1 if started else 0)  # the other parts that were started are ready
        for worker in started:
            worker.kill()
            worker.join()

    monkeypatch.setattr(parts, "RUN_BYTES", 1)  # each file is a part
    monkeypatch.setattr(workers, "MOST_THREADS", 1)
    monkeypatch.setattr(Corpus, "_remember", remember_and_kill)
    with pytest.raises(PipelineError) as raised:
        preprocess(data(num_workers=2), tmp_path)
    assert raised.value.exit_code == 70


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_stop_request_does_not_wait_for_queued_work(
    data, tmp_path, small_parts, threads
):
    texts = (
        " ".join(str(number * step) for step in range(9000)) for number in range(120)
    )
    settings = data(
        files=[write_files(tmp_path / "text", texts)],
        num_workers=2,
        tokenizer={"vocab_size": 257},
    )
    child = start_build(settings, tmp_path / "home", MOST_THREADS=threads)
    wait_until(
        lambda: (
            child.poll() is not None
            or list(tmp_path.glob("home/units/*/*/manifest.json"))
        )
    )
    child.terminate()
    child.communicate(timeout=100)
    assert child.returncode == 3
    assert len(list(tmp_path.glob("home/units/*/*/manifest.json"))) < 120, (
        "one for each file"
    )


def test_of_two_builders_one_builds_and_the_other_waits_and_uses_it(data, tmp_path):
    both = [start_build(data(), tmp_path) for _ in range(2)]
    references = [finish_build(process) for process in both]
    assert sorted(reference.built for reference in references) == [
        (),
        ("tokens", "row tables"),
    ]
    assert changed(references[0], built=[]) == changed(references[1], built=[])


FULL_DISK = """
import resource, sys
from infini_llama.configs.errors import PipelineError
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    preprocess(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
except PipelineError as error:
    print(error.exit_code, error)
"""


@pytest.fixture(scope="module")
def one_shard(data, tmp_path_factory):
    """Settings and folder of a dataset whose files are of very different sizes."""
    folder = tmp_path_factory.mktemp("one-shard")
    texts = (
        " ".join(str(number * step) for step in range(500)) for number in range(20)
    )
    settings = data(files=[write_files(folder, texts)], tokenizer={"vocab_size": 257})
    return settings, folder / "whole" / preprocess(settings, folder / "whole").path


@pytest.mark.parametrize(
    "file",
    [
        "lock",
        "tokenizer.json",
        "token_bytes.npy",
        "train/data-00000.arrow",
        "manifest.json",
    ],
)
def test_no_space_ends_with_code_70_and_leaves_no_partial_files(
    one_shard, tmp_path, file
):
    settings, whole = one_shard
    limit = 10 if file == "lock" else (whole / file).stat().st_size - 1
    home = tmp_path / "home"
    command = [
        sys.executable,
        "-c",
        FULL_DISK,
        settings.model_dump_json(),
        str(home),
        str(limit),
    ]
    # Under a limit, Python would leave half a .pyc behind.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (
        child.stdout.startswith("70 no space ")
        and str(home / "datasets") in child.stdout
    ), child.stdout + child.stderr
    assert (
        temporaries(home / "datasets") == []
        and Preparation(settings, home).lookup() is None
    )
    assert preprocess(settings, home).built == ("tokens", "row tables")
