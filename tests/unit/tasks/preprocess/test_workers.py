"""How many workers prepare a text, by rule: nothing of the dataset depends on it."""

import json
import threading
from pathlib import Path

import pytest

from infini_llama.configs.errors import DataError
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import units
from infini_llama.tasks.preprocess.tokens.parts import Part, parts_of
from infini_llama.tasks.preprocess.workers import (
    WORKER_MEMORY,
    WORTH_A_PROCESS,
    choose_workers,
)
from infini_llama.tasks.storage.artifacts import read_dataset
from support.counting import calls_of
from support.machines import FILES
from support.texts import write_files
from support.tokenizer_kinds import train_bpe

MB = 10**6


@pytest.fixture
def machine(tmp_path):
    """A machine of so many cores by affinity and quota, and so many bytes of free memory."""

    def lay_out(cores: int, quota: float = 0, memory: int = 2**40) -> Machine:
        files = FILES | {
            "proc/self/status": f"Cpus_allowed_list:\t0-{cores - 1}\n",
            "proc/meminfo": f"MemTotal: {memory // 1024} kB\nMemAvailable: {memory // 1024} kB\n",
            "sys/fs/cgroup/cpu.max": f"{int(quota * 100_000)} 100000\n"
            if quota
            else "max 100000\n",
        }
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return Machine(root=tmp_path)

    return lay_out


def parts(count: int, size: int, name: str = "text.jsonl") -> list[Part]:
    return [
        Part([File(Path(name), name, "text")], None, 0.0, size, (None,))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("cores", "limits", "text", "expected", "reason"),
    [
        (2, {}, parts(4, 30 * MB), "2 threads", "2 usable core(s)"),
        (64, {"quota": 2.5}, parts(4, 30 * MB), "2 threads", "2 usable core(s)"),
        (64, {}, parts(3, 30 * MB), "3 threads", "3 part(s)"),
        (64, {}, parts(30, 1000), "4 threads", "too little text"),
        (64, {}, parts(100, WORTH_A_PROCESS), "64 processes", "64 usable core(s)"),
        (64, {}, parts(10, WORTH_A_PROCESS), "10 processes", "10 part(s)"),
        (
            64,
            {"memory": 6 * WORKER_MEMORY},
            parts(100, WORTH_A_PROCESS),
            "6 processes",
            "free memory",
        ),
        (
            64,
            {"memory": WORKER_MEMORY // 2},
            parts(100, WORTH_A_PROCESS),
            "1 thread",
            "free memory",
        ),
        (2, {}, parts(100, WORTH_A_PROCESS), "2 threads", "2 usable core(s)"),
        (
            2,
            {},
            parts(8, WORTH_A_PROCESS, "text.csv"),
            "2 processes",
            "2 usable core(s)",
        ),
        (2, {}, parts(8, 1000, "text.tsv.gz"), "1 thread", "of text"),
    ],
)
def test_auto_is_what_cores_memory_and_text_allow(
    data, machine, cores, limits, text, expected, reason
):
    workers = choose_workers(data(), text, machine(cores, **limits))
    assert workers.choice and workers.choice.setting == "data.num_workers"
    assert workers.choice.value == expected and reason in workers.choice.reason
    assert workers.choice.value.startswith(
        f"{workers.count} "
    ) and workers.are_threads == ("thread" in expected)


@pytest.mark.parametrize(
    ("count", "name", "expected"),
    [
        (1, "x.csv", (1, True)),
        (4, "x.txt", (4, True)),
        (5, "x.txt", (5, False)),
        (2, "x.json", (2, False)),
        (99, "x", (8, False)),
    ],
)
def test_a_number_is_used_as_it_is(data, machine, count, name, expected):
    workers = choose_workers(data(num_workers=count), parts(8, MB, name), machine(1))
    assert (workers.count, workers.are_threads) == expected and workers.choice is None


@pytest.mark.parametrize(
    ("engine", "variable"), [("dask", "DASK_SCHEDULER_ADDRESS"), ("ray", "RAY_ADDRESS")]
)
def test_a_cluster_has_its_own_workers_and_a_temporary_one_as_many_as_here(
    data, machine, monkeypatch, engine, variable
):
    here = choose_workers(data(engine=engine), parts(9, WORTH_A_PROCESS), machine(8))
    assert (here.count, here.are_threads) == (8, False)
    monkeypatch.setenv(variable, "somewhere:1")
    there = choose_workers(data(engine=engine), parts(9, WORTH_A_PROCESS), machine(8))
    assert (
        there.choice and there.choice.value == "all" and variable in there.choice.reason
    )


def test_the_choice_is_in_the_log_and_the_manifest_and_not_in_the_digest(
    data, tmp_path, caplog, small_parts
):
    with caplog.at_level("INFO", logger="infini_llama.preprocess"):
        chosen = preprocess(data(), tmp_path / "chosen")
    choice = read_dataset(tmp_path / "chosen" / chosen.path).meta.workers
    assert (
        choice and f"data.num_workers: {choice.value} ({choice.reason})" in caplog.text
    )
    given = preprocess(data(num_workers=1), tmp_path / "given")
    assert (
        given == chosen
        and read_dataset(tmp_path / "given" / given.path).meta.workers is None
    )
    manifest = json.loads(
        (tmp_path / "given" / given.path / "manifest.json").read_text()
    )
    assert "workers" not in manifest["meta"]


def test_a_fault_in_one_thread_stops_the_others(
    data, tmp_path, monkeypatch, small_parts
):
    """They end at their next batch of text, with no unit of theirs."""
    write_files(tmp_path / "text", ["text " * 400] * 9)
    (tmp_path / "text" / "2.txt").write_bytes(b"\xff")  # of the thread that starts last
    is_stopping, waited = threading.Event(), list[bool]()
    write = units.write_unit

    def slow(recipe, documents, should_stop):
        while not should_stop():
            is_stopping.wait(0.01)
        waited.append(True)
        return write(recipe, documents, should_stop)

    monkeypatch.setattr("infini_llama.tasks.preprocess.workers.write_unit", slow)
    tokenizer = str(tmp_path / "tokenizer.json")
    train_bpe([], 257).save(tokenizer)
    settings = data(
        files=[str(tmp_path / "text")], num_workers=3, tokenizer={"path": tokenizer}
    )
    with pytest.raises(DataError, match=r"2\.txt is not UTF-8"):
        preprocess(settings, tmp_path / "home")
    assert waited and not list((tmp_path / "home").glob("units/*/*/manifest.json"))


def test_the_parts_of_a_text_without_sizes_are_as_large_as_units(
    data, tmp_path, machine
):
    """As those of a Hugging Face dataset."""
    corpus = Corpus(data(source="passkey", files=[]), tmp_path)
    assert choose_workers(data(), corpus.parts, machine(64)).count == 1
    ranges = [
        Part([corpus.parts[0].files[0]], (start, start + 1), 0.0, 0, (None,))
        for start in range(6)
    ]
    assert choose_workers(data(), ranges, machine(64)).count >= 3


def test_the_time_of_listing_does_not_grow_with_the_files_of_a_part(tmp_path):
    files = list[File]()
    for number in range(1500):  # of which a few runs of small files are made
        path = tmp_path / f"{number}.txt"
        path.write_text("a")
        files.append(File(path, path.name, "text"))
    assert len(parts_of(files, 0.1)) < 5
    assert calls_of(lambda: parts_of(files, 0.1)) < 200 * len(files)
