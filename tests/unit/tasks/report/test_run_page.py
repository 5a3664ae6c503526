"""A run's page: complete at any time, nothing fetched, nothing from the run's texts taken for HTML."""

import json
import re
import resource
import shlex
import shutil
from collections.abc import Iterator

from infini_llama.configs.reading import changed
from infini_llama.flows.cli.main import main
from infini_llama.tasks.document import markdown
from infini_llama.tasks.records.evaluation import PasskeyResult, TextLoss
from infini_llama.tasks.records.metrics import PasskeyLine, PerplexityLine, SampleLine
from infini_llama.tasks.report.run import _newest_first, run_document, write_report
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.storage.locks import Lock
from infini_llama.tasks.storage.record_files import append_line


def test_a_command_on_the_page_can_be_pasted_into_a_shell(make_run, tmp_path):
    folder = make_run().rename(tmp_path / "my runs; $HOME")
    assert "tensorboard" not in markdown(run_document(RunReader(folder)))
    (folder / "tensorboard").mkdir()
    text = markdown(run_document(RunReader(folder)))
    (command,) = re.findall("`(tensorboard .*)`", text)
    assert shlex.split(command) == [
        "tensorboard",
        "--logdir",
        str(folder / "tensorboard"),
    ]


def test_a_report_is_printed_where_its_page_cannot_be_written(make_run, capsys):
    folder = make_run()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a full disk, or in the folder of another user.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        code = main(["report", str(folder), "--json"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr()
    assert (
        code == 0 and json.loads(printed.out)["step"] == 60 and "--html" in printed.err
    )
    assert not (folder / "report.html").exists()


def test_a_folder_is_no_place_for_a_page(make_run, tmp_path, capsys):
    code = main(["report", str(make_run()), "--html", str(tmp_path)])
    assert code == 64 and f"--html: {tmp_path} is a folder" in capsys.readouterr().err


def test_a_finished_run(make_run, read_page):
    folder = make_run(gates=[[0.2, 0.3], [0.5]])
    # A killed report of an earlier version left a part.
    (folder / "loss.png").write_bytes(b"\x89PNG\r\n")
    paths = write_report(folder)
    written = (folder / "report.html").read_text()
    assert (
        'http-equiv="refresh"' not in written and "<title>step 60\ntraining " in written
    ), "values under the pointer"
    page = read_page(written)
    for words in (
        "finished; step 60 of 60",
        "training loss, nats per token 5.4000",
        "validation loss, nats per token 5.5000",
        "parameters 1,234",
        "Mean gate: fraction of memory in Infini-attention's output",
        "def f(): </pre><script>",
        "a second text",
        "rank 1 ended without an error report",
        "step-00000060",
        "latest best",
        "ab12",
    ):
        assert words in page.text, words
    # Loss, bits a byte, rate, norm, speed, seconds, gates.
    assert page.elements.count("svg") == 7
    assert paths == (folder / "loss.png", folder / "report.html")
    picture = (folder / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and b"IEND" in picture[-12:]


def test_a_running_run(make_run, read_page):
    folder = make_run(steps=33, finished=False)
    with Lock(folder / "lock"):
        write_report(folder)
    page = read_page((folder / "report.html").read_text())
    assert "running; step 33 of 60" in page.text
    assert 'http-equiv="refresh"' in (folder / "report.html").read_text()
    assert page.elements.count("svg") == 6
    assert RunReader(folder).state == "stopped"


def test_a_run_without_steps(make_run, read_page):
    folder = make_run(steps=0, finished=False)
    shutil.rmtree(folder.parent.parent / "datasets")
    (folder / "attempts.jsonl").unlink()
    write_report(folder)
    page = read_page((folder / "report.html").read_text())
    assert "not begun; step 0 of 60" in page.text
    assert "the dataset was moved or removed" in page.text


def test_optional_metrics_samples_memory_and_distances_are_shown(make_run, read_page):
    folder = make_run()
    run, step_fields = (
        RunFolder(folder),
        {"mfu": 0.25, "param_norm": 30.0, "gates": [[0.25, 0.75], [0.5, 0.125]]},
    )
    fields = {"train": step_fields, "validation": {"memory_reads": [0.5, 2.0]}}
    lines = [changed(line, **fields[line.kind]) for line in read_metrics(run)]
    # A long step, and at the end one whose MFU is not known, and a short one: of all steps together it is 20 %.
    for place, share, seconds in ((0, 0.05, 10.0), (-3, None, 0.5), (-2, 0.9, 0.1)):
        lines[place] = changed(lines[place], mfu=share, step_time=seconds)
    run.metrics.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    run.samples.write_text(
        json.dumps({"step": 20, "text": "early words"}) + '\n{"step": 40, "te'
    )
    cell = {
        "length": 90,
        "tokens": 90,
        "distance": 60,
        "right_tokens": 0.75,
        "right_by_token": (0.5, 1.0),
    }
    cells = tuple(
        PasskeyResult(**cell, boundaries=ends, found=found)
        for ends, found in ((2, 1.0), (8, 0.5))
    )
    about = {"run": "run", "checkpoint": "step-00000060", "step": 60, "device": "cpu"}
    passkey = PasskeyLine(
        **about,
        kind="passkey",
        samples=2,
        seed=0,
        trained_length=64,
        memory=cells,
        no_memory=cells,
    )
    loss = TextLoss(
        loss=1.0,
        perplexity=2.7,
        bits_per_byte=1.5,
        tokens=9,
        bytes=9,
        part=4,
        bits_per_byte_by_part=(1.6, 1.4),
    )
    for line in (
        passkey,
        PerplexityLine(**about, kind="evaluate", text="rows", stream=False, model=loss),
    ):
        append_line(run.evaluations, line, run.read_id())
    write_report(folder)
    written = (folder / "report.html").read_text()
    page = read_page(written)
    assert (
        "What is read from memory" in page.text
        and "Norm of the memory" not in page.text
    )
    assert (
        "segment boundaries 8\nwith memory 0.5" in written and "part 2\n1.4" in written
    )
    # Eight curves, gates, reads, distances, parts.
    assert page.elements.count("svg") == 12
    assert (
        "MFU 20.0%" in page.text
        and "Parameter norm" in page.text
        and "layer 1" in page.text
    )
    assert (
        page.text.index("Step 60")
        < page.text.index("Step 20")
        < page.text.index("early words")
    )


def test_a_row_table_of_another_run_is_not_described(make_run):
    folder = make_run()
    assert RunReader(folder).dataset is not None
    run = RunFolder(folder)
    lineage = run.require_lineage()
    run.write(
        run.lineage,
        changed(
            lineage,
            dataset=changed(lineage.dataset, row_table_digest="blake3:" + "0" * 64),
        ),
    )
    assert RunReader(folder).dataset is None


class _Counted(list[SampleLine]):
    """A list that counts how often all of it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[SampleLine]:
        self.times += 1
        return super().__iter__()


def test_samples_are_gone_through_once():
    samples = _Counted(
        SampleLine(step=step, prompt=prompt, text="")
        for step in range(20)
        for prompt in "ab"
    )
    newest_first = [(sample.step, sample.prompt) for sample in _newest_first(samples)]
    assert newest_first == [
        (step, prompt) for step in reversed(range(20)) for prompt in "ab"
    ]
    assert samples.times <= 1
