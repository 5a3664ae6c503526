"""Batches that are built in the device's memory have the bytes of those that are built on the host."""

import numpy as np
import pytest
import torch

from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import parts
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.train.worker.data import resident
from infini_llama.tasks.train.worker.data.loader import TrainBatches, stages_of
from support.reads import reads

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[300, 70_000])
def text(request, tmp_path_factory):
    """A home folder, and settings of a dataset of several shards whose tokens are uint16 or uint32."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    for number in range(60):
        words = generator.integers(0, 400, int(generator.integers(1, 150)))
        (folder / f"{number}.txt").write_text(" ".join(f"w{word}" for word in words))
    settings = {"files": [f"{folder}/*.txt"], "validation_fraction": 0.1, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RUN_BYTES": 1500, "PER_FILE": 0}.items():  # several parts, and so several shards
            patch.setattr(parts, name, value)
        yield folder / "home", settings | {"tokenizer": {"vocab_size": request.param}}


def readers(text, **settings):
    home, shared = text
    given = DataConfig.model_validate(shared | settings)
    reference = preprocess(given, home)
    found = TokenReader(home / reference.path, reference.chunks, "train")
    if shared["tokenizer"]["vocab_size"] > 65_536:  # a tokenizer of so many is not learned here: the tokens are widened
        wide = [tokens.astype(np.uint32) + 65_536 for tokens in found.shards()]
        found.mapped = {number: (found.mapped[number][0], tokens) for number, tokens in enumerate(wide)}
        found.dtype = np.dtype(np.uint32)
    return found


strategies = pytest.mark.parametrize(
    "settings",
    [
        {"packing": "concat"},
        {"packing": "window", "stride": 5},
        {"packing": "greedy"},
        {"packing": "best_fit"},
        {"packing": "padded"},
    ],
    ids=lambda settings: settings["packing"],
)


@strategies
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_strategy_has_the_bytes_of_the_host(text, settings, isolate, device):
    reader = readers(text, sequence_length=24, **settings)
    assert len(reader.paths) > 1
    count = len(reader)
    on_host, on_device = (TrainBatches(stages_of(reader), 3, count, 4, 0, 1, isolate) for _ in range(2))
    on_device.keep_on(torch.device(device))
    expected = list(on_host.micro_batches(0, CPU))  # every row once
    found = list(on_device.micro_batches(0, torch.device(device)))
    assert len(found) == len(expected) == -(-count // 4)
    for batch, other in zip(found, expected, strict=True):
        assert [part.dtype for part in batch] == [part.dtype for part in other] and len(batch) == 2 + isolate
        assert all(torch.equal(part.cpu(), host) for part, host in zip(batch, other, strict=True))


@strategies
@pytest.mark.parametrize("answers", [False, True])
def test_no_value_is_read_to_build_a_batch(text, settings, answers):
    settings = settings | ({"loss_on": "answer", "answer_after": "w"} if answers else {})
    batches = TrainBatches(stages_of(readers(text, sequence_length=24, **settings)), 3, 8, 4, 0, 1, True)
    batches.keep_on(CPU)
    with reads() as found:
        assert len(list(batches.micro_batches(0, CPU))) == 2
    assert found == []


@strategies
def test_the_most_documents_of_a_row(text, settings):
    reader = readers(text, sequence_length=24, **settings)
    assert reader.most_documents() == reader.documents(np.arange(len(reader))).max() + 1


def test_a_curriculum_shares_one_stream(text):
    reader, short = (readers(text, sequence_length=length) for length in (24, 8))
    on_host, on_device = (TrainBatches(stages_of(reader, shorter=[(short, 8)]), 3, 4, 2, 0, 1, True) for _ in range(2))
    on_device.keep_on(CPU)
    first, last = (stage.resident for stage in on_device.stages)
    assert first.tokens is last.tokens
    for samples in (0, 4, 8, 12):
        pairs = zip(on_device.micro_batches(samples, CPU), on_host.micro_batches(samples, CPU), strict=True)
        for batch, other in pairs:
            assert all(torch.equal(part, host) for part, host in zip(batch, other, strict=True))


def test_location_of_the_token_cache(text, monkeypatch):
    reader = readers(text, sequence_length=24)
    need = sum(reader.tokens) * reader.dtype.itemsize + reader.starts.nbytes
    gpu = torch.device("cuda", 0)
    assert not resident.is_resident([reader], CPU)
    for total, expected in ((10 * need, True), (10 * need - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, total=total: (total, total))
        assert resident.is_resident([reader], gpu) is expected
