"""Preparing data in real processes: killed anywhere, asked to stop, on a full disk, and with several workers."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infini_llama.tasks.storage.artifacts import check
from support.stages import lookup, preprocess
from support.waiting import wait_until


def temporaries(home: Path) -> list[str]:
    return [str(path) for path in home.rglob(".*.tmp")]


BUILD = """
import json, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
reference = preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])).to_json()
loaded = [name for name in ("torch", "datasets", "transformers", "prefect", "pandas") if name in sys.modules]
print(json.dumps([reference, loaded]))
"""


def build(data: dict, home: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", BUILD, json.dumps(data), str(home)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_a_script_without_a_main_guard_ends_with_the_reason(data, tmp_path):
    """A spawned worker imports the script once more: without the guard it would wait for its parent's lock."""
    script = tmp_path / "script.py"
    script.write_text(BUILD)
    command = [sys.executable, str(script), json.dumps(data(num_workers=2, shard_size=4096)), str(tmp_path / "home")]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and "__main__" in ended.stderr


def test_the_bytes_are_the_same_with_any_number_of_threads_and_no_torch_is_imported(data, tmp_path, digests):
    references = []
    for threads in ("1", "3"):
        child = build(data(), tmp_path / threads, RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
        reference, loaded = json.loads(child.stdout)
        assert loaded == []
        references.append(reference)
    assert references[0] == references[1]
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / "3" / "datasets")


# The parent forks one child for each step and kills it there, for real; another finishes the build. Nothing is threaded before.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
data, home, stride = DataConfig.model_validate(json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])
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
            child(f"{home}/{step}", last)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(step, *codes, flush=True)
    if codes[0] == 0:
        break
"""


def test_killed_anywhere_the_same_call_gives_the_same_bytes_and_leaves_nothing(data, tmp_path, digests):
    settings = data(shard_size=4096)
    expected = preprocess(settings, str(tmp_path / "whole"))
    command = [sys.executable, "-c", KILLED, json.dumps(settings), str(tmp_path / "killed"), "17"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240)
    steps = [line.split() for line in child.stdout.splitlines()]
    assert len(steps) > 10, child.stderr
    assert [ended for _, ended, _ in steps] == ["-9"] * (len(steps) - 1) + ["0"]
    assert {again for _, _, again in steps} == {"0"}
    whole = digests(tmp_path / "whole" / "datasets")
    for step, _, _ in steps:
        home = tmp_path / "killed" / step
        assert digests(home / "datasets") == whole
        assert temporaries(home) == [] and not list(home.rglob("*.damaged-*"))
        check(home / expected["path"], "dataset", checksums=True)
        assert lookup(settings, str(home)) == expected | {"built": []}


@pytest.mark.parametrize("several", [False, True])
def test_any_number_of_worker_processes_gives_the_same_bytes(data, corpus, tmp_path, digests, several):
    sources = [{"name": f"s{digit}", "files": [f"{corpus}/text-0{digit}*.txt"]} for digit in range(3)]
    given = {"files": [], "sources": sources} if several else {}
    references = [preprocess(data(**given, num_workers=n), str(tmp_path / str(n))) for n in (1, 3)]
    assert references[0] == references[1]
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / "3" / "datasets")


def test_killed_between_units_only_what_is_unfinished_is_done_again(data, tmp_path, digests, monkeypatch, caplog):
    from infini_llama.tasks.preprocess.tokens import build as work

    whole = preprocess(data(), str(tmp_path / "whole"))
    script = BUILD.replace("reference =", "import os, signal\n"
        "from infini_llama.tasks.preprocess.tokens import build as work\nwrite = work.write_shard\n"
        "def dying(path, *rest):\n    'data-00003' in path.name and os.kill(os.getpid(), signal.SIGKILL)\n    write(path, *rest)\n"
        "work.write_shard = dying\nreference =")  # fmt: skip
    home = tmp_path / "killed"
    child = subprocess.run([sys.executable, "-c", script, json.dumps(data()), str(home)], capture_output=True)
    assert child.returncode == -9
    shard = next(home.rglob(".*.work/train/data-00001.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1])  # and the disk lost one of those that were finished
    written, learned = [], []
    write, train = work.write_shard, work_stage().train
    monkeypatch.setattr(work, "write_shard", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    monkeypatch.setattr(work_stage(), "train", lambda *given, **named: (learned.append(1), train(*given, **named))[1])
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        assert preprocess(data(), str(home)) == whole
    assert learned == [] and written[:2] == ["data-00001.arrow", "data-00003.arrow"]
    assert " 2 of" in caplog.text
    assert digests(home / "datasets") == digests(tmp_path / "whole" / "datasets")
    assert not list(home.rglob(".*.work")) and not list(home.rglob(".*.journal"))


def work_stage():
    from infini_llama.tasks.preprocess import stage

    return stage


def test_worker_processes_die_with_their_parent_and_the_next_build_resumes(data, tmp_path, digests):
    settings = data(num_workers=3, shard_size=1024)
    whole = preprocess(settings, str(tmp_path / "whole"))
    home = tmp_path / "killed"
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", BUILD, json.dumps(settings), str(home)], stdout=subprocess.DEVNULL
        )
        wait_until(lambda child=child: child.poll() is not None or list(home.rglob(".*.work/train/*.arrow")))
        child.kill()
        child.wait()
    assert preprocess(settings, str(home)) | {"built": []} == whole | {"built": []}
    assert digests(home / "datasets") == digests(tmp_path / "whole" / "datasets")


ASKED_TO_STOP = """
import json, signal, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def test_a_stop_request_does_not_wait_for_queued_work(data, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(str(number * step) for step in range(9000)))
    settings = data(files=[str(tmp_path / "text" / "*")], shard_size=200_000, num_workers=2)
    settings["tokenizer"]["vocab_size"] = 257
    script = tmp_path / "script.py"
    script.write_text(ASKED_TO_STOP)
    command = [sys.executable, str(script), json.dumps(settings), str(tmp_path / "home")]
    child = subprocess.Popen(command, start_new_session=True)
    wait_until(lambda: child.poll() is not None or list(tmp_path.glob("home/datasets/.*.work/train/data-*.arrow")))
    child.terminate()
    assert child.wait(timeout=100) == 3
    done = len(list(tmp_path.glob("home/datasets/.*.work/*/data-*.arrow")))
    whole = tmp_path / "home" / preprocess(settings, str(tmp_path / "home"))["path"]
    assert done < len(list(whole.glob("*/data-*.arrow")))


def test_of_two_builders_one_builds_and_the_other_waits_and_uses_it(data, tmp_path):
    command = [sys.executable, "-c", BUILD, json.dumps(data()), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    references = [json.loads(process.communicate(timeout=120)[0])[0] for process in both]
    assert sorted(len(reference["built"]) for reference in references) == [0, 2]
    assert references[0] | {"built": []} == references[1] | {"built": []}


FULL_DISK = """
import json, resource, sys
from infini_llama.configs.errors import PipelineError
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]))
except PipelineError as error:
    print(error.exit_code, error)
"""


@pytest.fixture(scope="module")
def one_shard(data, tmp_path_factory):
    """Settings and folder of a dataset whose files are of very different sizes."""
    folder = tmp_path_factory.mktemp("one-shard")
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(str(number * step) for step in range(500)))
    settings = data(files=[f"{folder}/*.txt"], shard_size=10**6, tokenizer={"vocab_size": 257})
    return settings, folder / "whole" / preprocess(settings, str(folder / "whole"))["path"]


@pytest.mark.parametrize(
    "file", ["lock", "tokenizer.json", "token_bytes.npy", "train/data-00000.arrow", "manifest.json"]
)
def test_no_space_ends_with_code_70_and_leaves_no_partial_files(one_shard, tmp_path, file):
    settings, whole = one_shard
    limit = 10 if file == "lock" else (whole / file).stat().st_size - 1
    home = tmp_path / "home"
    command = [sys.executable, "-c", FULL_DISK, json.dumps(settings), str(home), str(limit)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # under a limit, Python would leave half a .pyc behind
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    full = home / ("surveys" if file == "lock" else "datasets")  # the survey comes first, and needs more than 10 bytes
    assert child.stdout.startswith("70 no space ") and str(full) in child.stdout, child.stdout + child.stderr
    assert temporaries(home) == [] and lookup(settings, str(home)) is None
    assert preprocess(settings, str(home))["built"] == ["tokens", "chunks"]
