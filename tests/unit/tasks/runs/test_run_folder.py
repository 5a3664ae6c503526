"""Every attempt stays on record, whatever cut a line short."""

import json

import pytest

from infini_llama.configs.schema import PipelineConfig, TrainingConfig
from infini_llama.tasks.runs.run_folder import RunFolder, append_attempt, attempts, claim, cut_metrics, read_metrics
from infini_llama.tasks.train.curriculum import in_samples

MODEL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
DATASET = dict.fromkeys(("path", "digest", "chunks", "chunks_digest", "sequence_length"), "same")


@pytest.mark.parametrize(
    ("now", "said"), [(False, ""), (True, "train.document_isolation: False before, True now")], ids=["off", "on"]
)
def test_switching_on_what_an_older_version_did_not_have_is_a_change(tmp_path, caplog, now, said):
    run, train = RunFolder(tmp_path), TrainingConfig().model_dump(mode="json")
    older = {name: value for name, value in train.items() if name != "document_isolation"}
    config = PipelineConfig.model_validate({"data": {"source": "python-stdlib"}}).model_dump(mode="json")
    claim(run, config | {"train": older}, MODEL, DATASET)
    claim(run, config | {"train": train | {"document_isolation": now}}, MODEL, DATASET)
    assert said in caplog.text and bool(caplog.text) == now


def test_more_steps_do_not_send_a_run_back_to_shorter_rows(tmp_path):
    """Of 100 steps the first 50 are of short rows; stopped at 60 and resumed with 200, step 61 stays one of long rows."""
    run, stage = RunFolder(tmp_path), {"sequence_length": 8, "until_fraction": 0.5}
    given = {"data": {"source": "python-stdlib", "sequence_length": 16, "curriculum": [stage]}}
    config = PipelineConfig.model_validate(given | {"train": {"max_steps": 100, "warmup_steps": 5}}).model_dump(
        mode="json"
    )
    reference = DATASET | {"curriculum": [{"chunks": "short", "chunks_digest": "same"}]}
    longer = config | {"train": config["train"] | {"max_steps": 200}}
    begun, resumed = (claim(run, each, MODEL, reference) for each in (config, longer))
    assert begun["curriculum_ends"] == resumed["curriculum_ends"] == [50] and resumed["train"]["max_steps"] == 200
    batch = config["train"]["global_batch_size"]
    assert in_samples(longer, reference, resumed["curriculum_ends"]) == [{"chunks": "short", "until": 50 * batch}]
    older = {name: value for name, value in begun.items() if name != "curriculum_ends"}
    run.lineage.write_text(json.dumps(older))
    assert claim(run, longer, MODEL, reference)["curriculum_ends"] == [50]


def test_a_line_cut_short_costs_only_itself(tmp_path):
    run = RunFolder(tmp_path)
    append_attempt(run, {"attempt": 1})
    with run.attempts.open("a") as file:
        file.write('{"attempt": 2, "mess')
    append_attempt(run, {"attempt": 3})
    append_attempt(run, {"attempt": 4})
    assert [record["attempt"] for record in attempts(run)] == [1, 3, 4]


@pytest.mark.parametrize("damage", [b'{"step": 3, "lo', b'{"step": 3, "lo\n', b"\0\0\0\0\n", b"\xff\xfe\n"])
def test_metrics_are_read_up_to_the_line_at_which_they_are_cut(tmp_path, damage):
    run = RunFolder(tmp_path)
    whole = b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n'
    run.metrics.write_bytes(whole + damage + b'{"kind": "train", "step": 4}\n' * damage.endswith(b"\n"))
    assert [record["step"] for record in read_metrics(run)] == [1, 2]
    cut_metrics(run, 10)
    assert run.metrics.read_bytes() == whole
