"""What looks like a secret is masked; what does not is kept."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.secrets import apart, masked, refuse_secrets, without_secrets


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "PGPASSWORD_FILE_PASS", "DB_PASSWORD", "CREDENTIALS"]
)
def test_secrets_are_masked(name):
    assert masked({name: "hunter2"}) == {name: "***"}
    assert "hunter2" not in str(without_secrets({"environment": {"env": {name: "hunter2"}, "threads": 1}, "data": {}}))


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD", "PATH"])
def test_ordinary_variables_are_kept(name):
    assert masked({name: "1"}) == {name: "1"}


ENV = {"HF_TOKEN": "hunter2", "NCCL_DEBUG": "INFO"}


def test_secrets_are_kept_apart_from_what_prefect_is_told():
    config = parse_config({"data": {"source": "python-stdlib"}, "environment": {"env": ENV}})
    told, secrets = apart(config)
    assert told.environment.env == {"NCCL_DEBUG": "INFO"} and secrets == {"HF_TOKEN": "hunter2"}
    assert told.model_copy(update={"environment": config.environment}) == config, "nothing else is changed"
    refuse_secrets(told)
    with pytest.raises(ConfigError, match="HF_TOKEN: that is secret"):
        refuse_secrets(config)
