"""Every attempt stays on record, whatever cut a line short."""

import json

import pytest

from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.status import AttemptRecord
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt, attempts, cut_metrics, read_metrics
from infini_llama.tasks.train.curriculum import in_samples
from infini_llama.tasks.train.lineage import claim
from support.records import make_dataset

MODEL = LlamaConfig.from_dict(
    {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
)
DATASET = make_dataset()


@pytest.mark.parametrize(
    ("now", "message"), [(False, ""), (True, "train.document_masking: False before, True now")], ids=["off", "on"]
)
def test_switching_on_what_an_older_version_did_not_have_is_a_change(tmp_path, caplog, now, message):
    run, train = RunFolder(tmp_path), TrainingConfig().model_dump(mode="json")
    older = {name: value for name, value in train.items() if name != "document_masking"}
    config = PipelineConfig.model_validate({"data": {"source": "python-stdlib"}})
    claim(run, config, older, MODEL, DATASET)
    claim(run, config, train | {"document_masking": now}, MODEL, DATASET)
    assert message in caplog.text and bool(caplog.text) == now


def test_more_steps_do_not_send_a_run_back_to_shorter_rows(tmp_path):
    """Of 100 steps the first 50 are of short rows; stopped at 60 and resumed with 200, step 61 stays one of long rows."""
    run, stage = RunFolder(tmp_path), {"sequence_length": 8, "until_fraction": 0.5}
    given = {"data": {"source": "python-stdlib", "sequence_length": 16, "curriculum": [stage]}}
    config = PipelineConfig.model_validate(given | {"train": {"max_steps": 100, "warmup_steps": 5}})
    train = config.train.model_dump(mode="json")
    table = {"chunks": "short", "chunks_digest": "same", "sequence_length": 8, "rows": 9}
    dataset = make_dataset(curriculum=[table])
    longer = train | {"max_steps": 200}
    begun, resumed = (claim(run, config, each, MODEL, dataset) for each in (train, longer))
    assert begun.curriculum_ends == resumed.curriculum_ends == (50,) and resumed.max_steps == 200
    (stage,) = in_samples(config, dataset, resumed.curriculum_ends, 200)
    assert (stage.chunks, stage.until) == ("short", 50 * config.train.global_batch_size)
    run.lineage.write_text(json.dumps(begun.model_dump(mode="json", exclude={"curriculum_ends"})))
    assert claim(run, config, longer, MODEL, dataset).curriculum_ends == (50,)


def test_a_line_cut_short_costs_only_itself(tmp_path):
    run = RunFolder(tmp_path)
    append_attempt(run, AttemptRecord(attempt=1, kind="failed", code=70))
    with run.attempts.open("a") as file:
        file.write('{"attempt": 2, "mess')
    append_attempt(run, AttemptRecord(attempt=3, kind="failed", code=70))
    append_attempt(run, AttemptRecord(attempt=4, kind="failed", code=70))
    assert [record.attempt for record in attempts(run)] == [1, 3, 4]


def train_line(step: int) -> str:
    return json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n"


DAMAGE = [
    b'{"step": 3, "lo\n',
    b"\0\0\0\0\n",
    b"\xff\xfe\n",
    b"[1,2]\n",
    b"3\n",
    b'{"kind": "train", "step": "3"}\n',
    b'{"kind": "train", "step": 3, "step_time": []}\n',
    b'{"kind": [], "step": 3}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_of_metrics_is_named_and_skipped(tmp_path, caplog, damage):
    run = RunFolder(tmp_path)
    before, after = "".join(map(train_line, (1, 2))).encode(), "".join(map(train_line, (4, 5, 6))).encode()
    run.metrics.write_bytes(before + damage + after)
    assert [line.step for line in read_metrics(run)] == [1, 2, 4, 5, 6]
    cut_metrics(run, 5)
    assert run.metrics.read_text() == "".join(map(train_line, (1, 2, 4, 5)))
    assert f"{run.metrics}: line 3" in caplog.text


def test_the_line_that_a_kill_cut_short_is_removed_in_silence(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.metrics.write_text(train_line(1) + '{"step": 2, "lo')
    cut_metrics(run, 10)
    assert run.metrics.read_text() == train_line(1) and not caplog.text
