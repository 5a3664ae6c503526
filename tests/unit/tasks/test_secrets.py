"""What looks like a secret is masked; what does not is kept."""

import pytest

from tasks.secrets import masked, without_secrets


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PGPASSWORD_FILE_PASS", "DB_PASSWORD", "CREDENTIALS"]
)
def test_secrets_are_masked(name):
    assert masked({name: "hunter2"}) == {name: "***"}
    assert "hunter2" not in str(without_secrets({"environment": {"env": {name: "hunter2"}, "threads": 1}, "data": {}}))


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD", "PATH"])
def test_ordinary_variables_are_kept(name):
    assert masked({name: "1"}) == {name: "1"}
