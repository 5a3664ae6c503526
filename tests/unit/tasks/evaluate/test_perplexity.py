"""Losses of text, against what training itself measures and against one forward pass over everything."""

import math

import numpy as np
import pytest
import torch

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.schema import EvaluationConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate import perplexity
from infini_llama.tasks.evaluate.stage import evaluate, evaluate_files, evaluate_trained
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.records.machine import Cpu, MachineFacts
from infini_llama.tasks.records.plan import EnvironmentRecord
from infini_llama.tasks.report.run import write_report
from infini_llama.tasks.runs.load import dataset_of, end_of_text_of
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.train.worker.callbacks.evaluation import ValidationSet
from infini_llama.tasks.train.worker.strategies.native import LossModule
from support.records import make_plan

INFINI = {"attention": "infini", "segment_length": 4}


def test_rows_have_the_losses_of_training(run_of, ranks):
    folder, model = run_of()
    dataset, table = (
        dataset_of(folder),
        RunFolder(folder).require_lineage().dataset.row_table,
    )
    reader = TokenReader(dataset, table, "validation")
    found = evaluate(folder, sequences=5).model
    measured = ValidationSet(reader, 5, 2).measure(LossModule(model), ranks, step=7)
    assert found.tokens == measured.tokens == 5 * 16 and measured.step == 7
    assert found.loss == pytest.approx(measured.loss, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(measured.bits_per_byte, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert evaluate(folder).model.tokens == len(reader) * 16


def test_memory_is_read_after_the_first_segment_only(run_of):
    folder, _ = run_of(**INFINI)
    found = evaluate(folder, sequences=6)
    with_it, without = (
        getattr(found, name).loss_by_part for name in ("memory", "no_memory")
    )
    assert found.memory.part == 4 and len(with_it) == 4
    assert with_it[0] == pytest.approx(without[0], rel=1e-6)
    assert all(abs(a - b) > 1e-4 for a, b in zip(with_it[1:], without[1:], strict=True))
    assert np.mean(with_it) == pytest.approx(found.memory.loss)
    bits = found.memory.bits_per_byte_by_part
    assert len(bits) == 4 and min(bits) < found.memory.bits_per_byte < max(bits)


def test_bits_per_byte_of_a_part_are_those_of_its_own_bytes():
    by_place = np.array([[1.0, 3.0, 2.0, 2.0], [1, 1, 1, 1], [1, 2, 4, 4]])
    found = perplexity.Measured(
        nats=8.0, targets=4, text_bytes=11, by_place=by_place
    ).results(part=2)
    assert found.bits_per_byte_by_part == pytest.approx(
        (4 / 3 / math.log(2), 0.5 / math.log(2))
    )
    assert found.bits_per_byte == pytest.approx(8 / 11 / math.log(2))


def test_files_as_a_stream(run_of, tmp_path, monkeypatch):
    folder, model = run_of(**INFINI)
    text = tmp_path / "a.txt"
    text.write_text(
        "the cat<|endoftext|> sat on «größer» things, and then the cat sat again. " * 3
    )
    end = end_of_text_of(folder)
    ids = [end, *reading_of(folder).encoder.encode(text.read_text()), end]
    assert len(ids) > 40 and ids.count(end) == 2, (
        "a special token that is spelled is text"
    )
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(
            model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:])
        )
    monkeypatch.setattr(perplexity, "PIECE", 7)
    streamed = evaluate_files(folder, [str(text)], stream=True).memory
    assert streamed.loss == pytest.approx(whole.item(), rel=1e-4)
    assert streamed.tokens == len(ids) - 1 and streamed.bytes == len(text.read_bytes())
    assert streamed.bits_per_byte == pytest.approx(
        whole.item() * (len(ids) - 1) / math.log(2) / streamed.bytes, rel=1e-4
    )


def test_logits_of_few_tokens_are_in_memory_at_the_same_time(run_of, monkeypatch):
    """Training, too, never has those of a whole batch."""
    folder, _ = run_of()
    whole = evaluate(folder, sequences=6).model
    tokens = list[int]()
    logits = Llama.logits

    def recording(model: Llama, hidden: torch.Tensor) -> torch.Tensor:
        tokens.append(hidden.shape[:-1].numel())
        return logits(model, hidden)

    monkeypatch.setattr(perplexity, "CHUNK", 7)
    monkeypatch.setattr(Llama, "logits", recording)
    found = evaluate(folder, sequences=6).model
    assert max(tokens) == 7 and found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.loss_by_part == pytest.approx(whole.loss_by_part, rel=1e-6)


@pytest.mark.parametrize(
    ("device", "gpus", "used"), [("cpu", (), "cpu"), ("cuda", (2, 3), "cuda:2")]
)
def test_a_stage_of_a_run_takes_no_other_gpu_than_its_training(
    run_of, monkeypatch, device, gpus, used
):
    folder, _ = run_of()
    plan = make_plan(device=device, gpus=gpus)
    facts = MachineFacts(python="3.11", cpu=Cpu(model="x"), versions={}, gpus=())
    record = EnvironmentRecord(
        pinned=plan.pinned(), pinned_at="", plan=plan, facts=facts
    )
    RunFolder(folder).write(RunFolder(folder).environment, record)
    devices = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        Llama, "to", lambda model, device: devices.append(str(device)) or model
    )
    wanted = EvaluationConfig.model_validate({"after_training": ["perplexity"]})
    evaluate_trained(folder, wanted)
    assert devices == [used]


def test_unreadable_files_are_named(run_of, tmp_path):
    folder, _ = run_of()
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    with pytest.raises(ConfigError, match=r"model\.attention=softmax"):
        evaluate_files(folder, [__file__], stream=True)
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        evaluate_files(folder, [str(tmp_path / "bad.jsonl")])
    with pytest.raises(DataError, match=r"--files: .*nothing\.txt"):
        evaluate_files(folder, [str(tmp_path / "nothing.txt")])


def test_measured_values_are_on_the_page_of_the_run(run_of, read_page):
    folder, _ = run_of(**INFINI)
    record = evaluate(folder, sequences=2)
    (line,) = RunReader(folder).evaluations
    assert line.kind == "evaluate" and line.memory == record.memory
    write_report(folder)
    assert (
        f"{record.no_memory.perplexity:,.4g}"
        in read_page((folder / "report.html").read_text()).text
    )
