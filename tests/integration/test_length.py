"""How long a run is: epochs, tokens, and a validation loss that no longer falls."""

import pytest

SHORT = (
    "train.max_steps=null",
    "train.warmup_steps=1",
    "train.eval_steps=2",
    "train.save_steps=1000",
)


def test_epochs_and_tokens_become_steps(lab):
    summary = lab.finish("epochs", *SHORT, "train.num_epochs=0.015")
    assert summary["steps"] == lab.lineage("epochs")["max_steps"] > 1
    tokens = summary["tokens"]
    same = lab.finish("tokens", *SHORT, f"train.max_tokens={tokens}")
    assert (
        same["steps"] == summary["steps"]
        and same["weights_sha256"] == summary["weights_sha256"]
    )
    # Nothing was left to do.
    assert lab.finish("tokens", *SHORT, f"train.max_tokens={tokens}") == same


@pytest.mark.slow
def test_a_run_stops_early_and_resumes_with_more_patience(lab):
    early = (
        "train.eval_steps=2",
        "train.learning_rate=1e-30",
        "train.save_steps='900 tokens'",
    )
    summary = lab.finish("early", *early, "train.early_stopping_patience=2")
    # The first is a gain, the next two are none.
    assert summary["steps"] == 6 and summary["stopped_early"] == 2
    # Nothing was left to do.
    assert lab.finish("early", *early, "train.early_stopping_patience=2") == summary
    longer = lab.finish("early", *early, "train.early_stopping_patience=3")
    assert longer["steps"] == 8
    lab.finish("whole", *early, "train.early_stopping_patience=3")
    for part in ("weights_sha256", "optimizer_sha256"):
        assert longer[part] == lab.summary("whole")[part]
