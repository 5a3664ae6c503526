"""The last stage of a run measures what is asked for, once."""

import json

from infini_llama.configs.schema import EvaluationConfig
from infini_llama.tasks.evaluate.stage import evaluate, evaluate_trained
from infini_llama.tasks.records.evaluation import Evaluations

RESULTS = "evaluations.jsonl"
INFINI = {"attention": "infini", "segment_length": 8}


def settings(**keys) -> EvaluationConfig:
    return EvaluationConfig.model_validate(keys)


def test_each_measurement_is_taken_once_for_its_settings(run_of):
    folder, _ = run_of("measured", **INFINI)
    assert evaluate_trained(folder, settings()) == Evaluations()
    wanted = settings(
        after_training=["perplexity", "passkey"],
        sequences=3,
        passkey_lengths=[300, 400],
    )
    first = evaluate_trained(folder, wanted)
    assert first.perplexity.memory == evaluate(folder, sequences=3).memory
    assert {result.tokens for result in first.passkey.memory} <= set(range(167, 401))
    before = (folder / RESULTS).read_text()
    again = evaluate_trained(folder, wanted)
    assert (folder / RESULTS).read_text() == before, "measured again"
    assert again.perplexity == first.perplexity
    evaluate_trained(folder, wanted.model_copy(update={"sequences": 4}))
    assert (folder / RESULTS).read_text() != before
    # A kill in the middle of a line.
    (folder / RESULTS).write_text(before + '{"kind": "eval')
    assert evaluate_trained(folder, wanted) == again
    evaluate(folder, sequences=3)
    assert (
        json.loads((folder / RESULTS).read_text().splitlines()[-1])["kind"]
        == "evaluate"
    ), "a line of its own"
    assert [json.loads(line)["kind"] for line in before.splitlines()] == [
        "evaluate",
        "passkey",
        "evaluate",
    ]
