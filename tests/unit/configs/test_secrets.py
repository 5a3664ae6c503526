"""Values of environment.env are masked unless the variable is known to hold no secret."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.secrets import (
    masked,
    refuse_secrets,
    stored_settings,
    without_secrets,
)

# Fmt: skip.
SECRETS = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "aws_secret_access_key",
    "PGPASSWORD",
    "DBPASSWORD",
    "OPENAI_APIKEY",
    "ACCESSTOKEN",
    "DATABASE_URL",
    "CREDENTIALS",
    "SENTRY_DSN",
    "HTTPS_PROXY",
    "NVIDIA_API_KEY",
    "NCCL_AUTH_KEY",
    "TORCH_HUB_TOKEN",
    "CUDA_PASSWORD",
    "MYSQL_PWD",
    "MINE",
    "omp_num_threads",
]
# Fmt: skip.
SHOWN = [
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "LD_PRELOAD",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_LOGS",
    "PYTORCH_ALLOC_CONF",
    "WANDB_MODE",
    "HF_HUB_OFFLINE",
    "GLIBC_TUNABLES",
    "TMPDIR",
]


@pytest.mark.parametrize("name", SECRETS)
def test_variables_outside_the_allow_list_are_masked(name):
    assert masked({name: "hunter2"}) == {name: "***"}
    config = parse_config(
        {"data": {"source": "python-stdlib"}, "environment": {"env": {name: "hunter2"}}}
    )
    assert "hunter2" not in str(without_secrets(config))


@pytest.mark.parametrize("name", SHOWN)
def test_settings_of_libraries_and_paths_are_kept(name):
    assert masked({name: "1"}) == {name: "1"}


ENV = {"DBPASSWORD": "hunter2", "NCCL_DEBUG": "INFO"}


def test_stored_settings_have_no_secrets_and_keep_references_to_blocks():
    reference = "{{ prefect.blocks.secret.hf-token }}"
    settings = {
        "data": {"source": "python-stdlib"},
        "environment": {"env": {**ENV, "HF_TOKEN": reference}, "device": "cpu"},
    }
    shown = {"NCCL_DEBUG": "INFO", "HF_TOKEN": reference}
    assert stored_settings(settings) == settings | {
        "environment": {"env": shown, "device": "cpu"}
    }


@pytest.mark.parametrize(
    "settings",
    [None, "text", {}, {"environment": None}, {"environment": {"env": ["text"]}}],
)
def test_settings_of_another_kind_are_stored_as_they_are(settings):
    """The flow checks them later, and names what is wrong."""
    assert stored_settings(settings) == settings


def test_a_run_without_its_secrets_is_refused_in_another_process():
    config = parse_config(
        {"data": {"source": "python-stdlib"}, "environment": {"env": ENV}}
    )
    with pytest.raises(ConfigError) as refused:
        refuse_secrets(config)
    assert "environment.env.DBPASSWORD" in str(refused.value) and "hunter2" not in str(
        refused.value
    )
    refuse_secrets(
        parse_config(
            {
                "data": {"source": "python-stdlib"},
                "environment": {"env": {"NCCL_DEBUG": "INFO"}},
            }
        )
    )


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("data.files", {"data": {"files": ["a/*.txt", "ftp://me:hunter2@host/*.txt"]}}),
        (
            "data.sources",
            {
                "data": {
                    "sources": [{"name": "a", "files": ["sftp://me:hunter2@host:22/x"]}]
                }
            },
        ),
        (
            "storage.mirror",
            {"data": {"files": ["x"]}, "storage": {"mirror": "ftp://:hunter2@host/x"}},
        ),
    ],
)
def test_passwords_in_urls_are_refused_where_prefect_would_store_them(key, sections):
    with pytest.raises(ConfigError, match=f"^{key}: ") as refused:
        refuse_secrets(parse_config(sections))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://me@host/x.txt", "https://host:8080/a@b.txt?sig=x", "s3://bucket/x:y@z.txt"],
)
def test_urls_without_a_password_are_not_refused(url):
    refuse_secrets(parse_config({"data": {"files": [url]}}))
