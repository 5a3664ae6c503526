import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, PipelineError
from infini_llama.tasks.preprocess.sources import texts
from infini_llama.tasks.preprocess.tokenizers.tokenizer import EOS
from infini_llama.tasks.preprocess.tokens.reader import TokenReader, map_list
from infini_llama.tasks.storage.artifacts import check, is_complete
from support.stages import lookup, plan, preprocess


def temporaries(home: Path) -> list[str]:
    return [str(path) for path in home.rglob(".*.tmp")]


def test_the_reference_says_where_the_dataset_is_and_what_it_holds(data, corpus, tmp_path):
    planned = plan(data(), str(tmp_path))
    assert lookup(data(), str(tmp_path)) is None
    reference = preprocess(data(), str(tmp_path))
    assert reference["path"] == f"datasets/files-{planned['key'][:12]}" == f"datasets/{planned['name']}"
    assert reference["chunks"] == planned["chunks_key"][:12] and reference["built"] == ["tokens", "chunks"]
    assert json.loads(json.dumps(reference)) == reference
    assert lookup(data(), str(tmp_path)) == reference | {"built": []}
    texts = [path.read_text(encoding="utf-8") for path in corpus.glob("*.txt")]
    splits = [reference["train"], reference["validation"]]
    assert sum(split["documents"] for split in splits) == planned["documents"] == len(texts)
    assert sum(split["bytes"] for split in splits) == planned["bytes"] == sum(len(text.encode()) for text in texts)
    assert all(split["rows"] == (split["tokens"] - 1) // 16 for split in splits)
    assert reference["vocab_size"] == 300 and 2 < reference["validation"]["unigram_entropy_bits"] < np.log2(300)
    assert (tmp_path / "datasets" / "latest").resolve() == tmp_path / reference["path"]


def test_decoded_documents_are_the_files_each_in_one_split(data, corpus, tmp_path):
    reference = preprocess(data(), str(tmp_path))
    folder = tmp_path / reference["path"]
    tokenizer, lengths = Tokenizer.from_file(str(folder / "tokenizer.json")), np.load(folder / "token_bytes.npy")
    read = []
    for split in ("train", "validation"):
        found = []
        for shard in sorted((folder / split).glob("*.arrow")):
            offsets, values = map_list(shard)
            for start, end in pairwise(offsets):
                assert values[end - 1] == 0 and lengths[values[start:end]].sum() > 0
                found.append(tokenizer.decode(values[start : end - 1].tolist(), skip_special_tokens=False))
                assert lengths[values[start:end]].sum() == len(found[-1].encode())
        read += [found]
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.glob("*.txt"))]
    assert [text for text in texts if text in read[0]] == read[0]  # in the order of their names
    assert [text for text in texts if text in read[1]] == read[1]
    assert sorted(read[0] + read[1]) == sorted(texts)


def test_a_rebuild_elsewhere_gives_the_same_bytes(data, corpus, tmp_path, digests):
    shutil.copytree(corpus, tmp_path / "moved")
    first = preprocess(data(), str(tmp_path / "one"))
    second = preprocess(data(files=[str(tmp_path / "moved" / "*.txt")]), str(tmp_path / "two"))
    assert first == second
    assert digests(tmp_path / "one" / "datasets") == digests(tmp_path / "two" / "datasets")


def test_an_added_file_moves_no_other_document_between_the_splits(data, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "text")
    settings = data(files=[str(tmp_path / "text" / "*.txt")])

    def splits() -> tuple[set[bytes], set[bytes], int]:
        """The texts of both splits, and how many documents there are."""
        reference = preprocess(settings, str(tmp_path / "home"))
        folder = tmp_path / "home" / reference["path"]
        tokenizer, found = Tokenizer.from_file(str(folder / "tokenizer.json")), []
        for split in ("train", "validation"):
            mapped = [map_list(shard) for shard in (folder / split).glob("*.arrow")]
            found.append(
                {
                    tokenizer.decode(values[start : end - 1].tolist(), skip_special_tokens=False).encode()
                    for offsets, values in mapped
                    for start, end in pairwise(offsets)
                }
            )
        return found[0], found[1], sum(reference[split]["documents"] for split in ("train", "validation"))

    training, held_out, count = splits()
    for number in range(20):
        (tmp_path / "text" / f"added-{number}.txt").write_text(f"an added text, the {number}th")
        (tmp_path / "text" / f"text-{number:03d}-more.txt").write_text(f"between the others, the {number}th")
    more_training, more_held_out, more = splits()
    assert more == count + 40
    assert training < more_training and held_out < more_held_out and not more_training & more_held_out


@pytest.mark.parametrize("size", [1, 5000])
def test_in_however_many_batches_the_text_is_tokenized_the_bytes_and_facts_are_the_same(
    data, built, tmp_path, monkeypatch, digests, size
):
    home, reference = built
    monkeypatch.setattr(texts, "BATCH_BYTES", size)
    assert preprocess(data(), str(tmp_path / "batches")) == reference
    assert digests(tmp_path / "batches" / "datasets") == digests(home / "datasets")


def test_the_entropy_is_that_of_the_tokens_that_were_written(built):
    home, reference = built
    for split in ("train", "validation"):
        values = [map_list(shard)[1].tolist() for shard in (home / reference["path"] / split).glob("*.arrow")]
        counts = Counter(itertools.chain.from_iterable(values))
        assert counts.total() == reference[split]["tokens"]
        bits = sum(count / counts.total() * math.log2(counts.total() / count) for count in counts.values())
        assert reference[split]["unigram_entropy_bits"] == pytest.approx(bits, rel=1e-12)


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


def test_the_bytes_are_the_same_with_any_number_of_threads_and_no_torch_is_imported(data, tmp_path, digests):
    references = []
    for threads in ("1", "3"):
        child = build(data(), tmp_path / threads, RAYON_NUM_THREADS=threads, PYTHONHASHSEED=threads)
        reference, loaded = json.loads(child.stdout)
        assert loaded == []
        references.append(reference)
    assert references[0] == references[1]
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / "3" / "datasets")


def test_a_second_call_builds_nothing_and_another_length_only_rows(data, tmp_path):
    first = preprocess(data(), str(tmp_path))
    folder = tmp_path / first["path"]

    def touched() -> dict:
        return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.*") if "chunks" not in path.parts}

    before = touched()
    assert preprocess(data(), str(tmp_path)) == first | {"built": []}
    other = preprocess(data(sequence_length=33), str(tmp_path))
    assert other["built"] == ["chunks"] and other["digest"] == first["digest"] and touched() == before
    assert other["sequence_length"] == 33 and other["train"]["rows"] == (first["train"]["tokens"] - 1) // 33
    assert len(list((folder / "chunks").iterdir())) == 2
    assert lookup(data(), str(tmp_path)) == first | {"built": []}
    assert preprocess(data(tokenizer={"vocab_size": 290}), str(tmp_path))["built"] == ["tokens", "chunks"]


def test_text_that_spells_the_end_of_text_token_does_not_end_a_document(data, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{EOS} number {number} {EOS}{EOS} ends {EOS}")
    reference = preprocess(data(files=[str(tmp_path / "text/*.txt")]), str(tmp_path))
    for shard in (tmp_path / reference["path"]).rglob("*.arrow"):
        offsets, values = map_list(shard)
        assert np.flatnonzero(values == 0).tolist() == (offsets[1:] - 1).tolist()


def test_a_damaged_level_is_moved_aside_with_a_line_and_built_anew(data, tmp_path, caplog, digests):
    reference = preprocess(data(), str(tmp_path))
    folder, before = tmp_path / reference["path"], digests(tmp_path / reference["path"])
    (folder / "chunks" / reference["chunks"] / "train.rows.npy").unlink()
    assert lookup(data(), str(tmp_path)) is None
    with caplog.at_level(logging.WARNING):
        assert preprocess(data(), str(tmp_path)) == reference | {"built": ["chunks"]}
    assert f"{reference['chunks']} is not complete; it was moved to" in caplog.text
    os.truncate(next((folder / "train").glob("*.arrow")), 100)
    assert preprocess(data(), str(tmp_path)) == reference | {"built": ["tokens"]}
    assert digests(folder) == before
    assert (tmp_path / "datasets" / f"{folder.name}.damaged-1" / "manifest.json").exists()


def test_a_dataset_under_the_name_of_another_is_not_used(built, data, tmp_path, digests):
    home, reference = built
    other = preprocess(data(tokenizer={"vocab_size": 299}), str(home))
    one, two = home / reference["path"], home / other["path"]
    before = digests(one)
    one.rename(tmp_path / "kept")
    shutil.copytree(two, one)
    assert lookup(data(), str(home)) is None
    assert preprocess(data(), str(home)) == reference | {"built": ["tokens", "chunks"]}
    assert digests(one) == before and lookup(data(tokenizer={"vocab_size": 299}), str(home)) == other | {"built": []}


def test_a_row_table_under_the_name_of_another_is_not_used(built, data):
    home, reference = built
    other = preprocess(data(sequence_length=8), str(home))
    chunks = home / reference["path"] / "chunks"
    shutil.rmtree(chunks / reference["chunks"])
    (chunks / other["chunks"]).rename(chunks / reference["chunks"])
    assert lookup(data(), str(home)) is None
    assert preprocess(data(), str(home)) == reference | {"built": ["chunks"]}


def test_a_hidden_file_that_others_leave_in_a_dataset_does_not_damage_it(built, data):
    home, reference = built
    (home / reference["path"] / "train" / ".DS_Store").touch()
    (home / reference["path"] / "train" / ".ipynb_checkpoints").mkdir()
    (home / reference["path"] / "train" / ".ipynb_checkpoints" / "x").touch()
    assert lookup(data(), str(home)) == preprocess(data(), str(home)) == reference | {"built": []}


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


def test_killed_at_a_random_moment_of_real_work_the_same_call_gives_the_same_bytes(data, tmp_path, digests):
    standard_library = Path(json.__file__).parent.parent
    settings = data(files=[f"{standard_library}/[a-h]*/*.py"], tokenizer={"vocab_size": 600}, shard_size=100_000)
    started = time.monotonic()
    whole = build(settings, tmp_path / "whole")
    seconds = time.monotonic() - started
    ends = []
    for share in (0.4, 0.7, 0.9):
        command = [sys.executable, "-c", BUILD, json.dumps(settings), str(tmp_path / "killed")]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(seconds * share)
        child.kill()
        ends.append(child.wait())
    assert -9 in ends
    assert json.loads(build(settings, tmp_path / "killed").stdout)[0] | {"built": []} == json.loads(whole.stdout)[0] | {
        "built": []
    }
    assert digests(tmp_path / "killed" / "datasets") == digests(tmp_path / "whole" / "datasets")
    assert temporaries(tmp_path / "killed") == []


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_worker_processes_gives_the_same_bytes(data, tmp_path, digests, workers):
    references = [preprocess(data(num_workers=n), str(tmp_path / str(n))) for n in (1, workers)]
    assert references[0] == references[1]
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / str(workers) / "datasets")


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
    assert "carrying on: 2 of" in caplog.text
    assert digests(home / "datasets") == digests(tmp_path / "whole" / "datasets")
    assert not list(home.rglob(".*.work")) and not list(home.rglob(".*.journal"))


def work_stage():
    from infini_llama.tasks.preprocess import stage

    return stage


def test_worker_processes_die_with_the_one_that_started_them_and_the_next_build_carries_on(data, tmp_path, digests):
    settings = data(num_workers=3, shard_size=1024)
    whole = preprocess(settings, str(tmp_path / "whole"))
    home = tmp_path / "killed"
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", BUILD, json.dumps(settings), str(home)], stdout=subprocess.DEVNULL
        )
        while child.poll() is None and not list(home.rglob(".*.work/train/*.arrow")):
            time.sleep(0.01)
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


def test_asked_to_stop_it_does_not_wait_for_what_its_worker_processes_have_before_them(data, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(str(number * step) for step in range(9000)))
    settings = data(files=[str(tmp_path / "text" / "*")], shard_size=200_000, num_workers=2)
    settings["tokenizer"]["vocab_size"] = 257
    script = tmp_path / "script.py"
    script.write_text(ASKED_TO_STOP)
    command = [sys.executable, str(script), json.dumps(settings), str(tmp_path / "home")]
    child = subprocess.Popen(command, start_new_session=True)
    while not list(tmp_path.glob("home/datasets/.*.work/train/data-*.arrow")):
        assert child.poll() is None
        time.sleep(0.02)
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


@pytest.mark.parametrize(
    "file", ["lock", "tokenizer.json", "token_bytes.npy", "train/data-00000.arrow", "manifest.json"]
)
def test_no_space_is_a_sentence_and_nothing_half_written_stays(data, tmp_path, file):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(str(number * step) for step in range(500)))
    settings = data(files=[str(tmp_path / "text" / "*")], shard_size=10**6, tokenizer={"vocab_size": 257})
    whole = tmp_path / "whole" / preprocess(settings, str(tmp_path / "whole"))["path"]
    limit = 10 if file == "lock" else (whole / file).stat().st_size - 1
    home = tmp_path / "home"
    command = [sys.executable, "-c", FULL_DISK, json.dumps(settings), str(home), str(limit)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert re.fullmatch(
        rf"70 no space to write the dataset in {home}/datasets \(File too large\); free space and run the same command again\.\n",
        child.stdout,
    ), child.stdout + child.stderr
    assert temporaries(home) == [] and lookup(settings, str(home)) is None
    assert preprocess(settings, str(home))["built"] == ["tokens", "chunks"]


def test_each_unusable_text_has_its_sentence(data, tmp_path, corpus):
    (tmp_path / "text").mkdir()
    pattern = {"files": [str(tmp_path / "text" / "*.txt")]}
    (tmp_path / "text" / "empty.txt").touch()
    with pytest.raises(DataError, match=r"every file that data\.files matches is empty"):
        preprocess(data(**pattern), str(tmp_path))
    (tmp_path / "text" / "only.txt").write_text("one document " * 50)
    with pytest.raises(
        DataError,
        match=r"1 document\(s\) leave none for (training|validation) at data\.validation_fraction=0\.2; add files",
    ):
        preprocess(data(**pattern), str(tmp_path))
    with pytest.raises(
        DataError,
        match=r"the validation text has \d+ tokens, fewer than one row of data\.sequence_length=5000 .* shorten the rows",
    ) as caught:
        preprocess(data(sequence_length=5000, validation_fraction=0.05), str(tmp_path))
    assert caught.value.exit_code == 65
    with pytest.raises(DataError, match=r"the train text has \d+ tokens, fewer than one row"):
        preprocess(data(sequence_length=100_000), str(tmp_path))
    assert temporaries(tmp_path) == []


def test_a_row_as_long_as_the_text_fits_and_one_token_longer_does_not(data, tmp_path):
    tokens = preprocess(data(), str(tmp_path))["validation"]["tokens"]
    longest = preprocess(data(sequence_length=tokens - 1), str(tmp_path))
    assert longest["validation"]["rows"] == 1
    folder = tmp_path / longest["path"]
    row = TokenReader(folder, longest["chunks"], "validation").gather(np.array([0]))
    assert row.shape == (1, tokens) and row[0, -1] == 0
    with pytest.raises(DataError, match="fewer than one row"):
        preprocess(data(sequence_length=tokens), str(tmp_path))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="here the GPU works")
def test_a_device_that_is_not_there_is_refused_before_the_work(data, tmp_path):
    with pytest.raises(PipelineError, match=r"data\.device=cuda") as caught:
        preprocess(data(device="cuda"), str(tmp_path))
    assert caught.value.exit_code == 64 and not list((tmp_path / "datasets").glob("*"))


def test_progress_is_told_in_megabytes_and_ends_at_the_total(data, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="infini_llama.preprocess"):
        preprocess(data(), str(tmp_path))
    told = [record for record in caplog.records if hasattr(record, "progress")]
    assert {record.getMessage() for record in told} == {
        "reading text for the tokenizer",
        "tokenizing training text",
        "tokenizing validation text",
    }
    last = {record.getMessage(): record.__dict__["progress"] for record in told}
    assert all(progress["unit"] == "MB" and progress["done"] == progress["total"] for progress in last.values())
    assert "built tokens and chunks" in caplog.text


def test_what_is_not_committed_is_not_believed(data, tmp_path):
    reference = preprocess(data(), str(tmp_path))
    (tmp_path / reference["path"] / "manifest.json").unlink()
    assert not is_complete(tmp_path / reference["path"], "dataset") and lookup(data(), str(tmp_path)) is None
