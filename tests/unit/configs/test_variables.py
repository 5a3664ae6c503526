"""Environment variables in paths: the values of the executing machine, for every key that holds a path."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.configs.variables import without_variables

TEXT = {"files": ["text/*.txt"]}


def filled(sections: dict) -> dict:
    return without_variables(parse_config(sections)).model_dump(mode="json")


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/big")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("MISSING", raising=False)


def test_every_path_of_a_configuration_has_its_variables_replaced():
    config = filled(
        {
            "data": {
                "files": ["$SCRATCH/a/*.txt", "${SCRATCH}b", "s3://bucket/$SCRATCH"],
                "validation_files": ["$SCRATCH/held-out.txt"],
                "tokenizer": {"path": "$SCRATCH/tokenizer.json"},
            },
            "train": {
                "init_from": "$SCRATCH/weights",
                "parallel": "deepspeed",
                "deepspeed_config": "$SCRATCH/ds.json",
            },
            "runtime": {"home": "${SCRATCH}/ws", "resume": "$SCRATCH/checkpoint"},
            "storage": {"mirror": "$SCRATCH/mirror"},
        }
    )
    assert config["data"]["files"] == ["/big/a/*.txt", "/bigb", "s3://bucket/$SCRATCH"]
    assert config["data"]["validation_files"] == ["/big/held-out.txt"]
    assert config["data"]["tokenizer"]["path"] == "/big/tokenizer.json"
    assert config["train"]["init_from"] == "/big/weights"
    assert config["train"]["deepspeed_config"] == "/big/ds.json"
    assert (config["runtime"]["home"], config["runtime"]["resume"]) == (
        "/big/ws",
        "/big/checkpoint",
    )
    assert config["storage"]["mirror"] == "/big/mirror"


def test_the_paths_of_each_source_have_their_variables_replaced():
    sources = [
        {"name": "a", "files": ["$SCRATCH/a.txt"]},
        {"name": "b", "source": "huggingface", "dataset": "$SCRATCH/saved"},
    ]
    config = filled({"data": {"sources": sources}})["data"]["sources"]
    assert config[0]["files"] == ["/big/a.txt"] and config[1]["dataset"] == "/big/saved"


def test_the_value_of_a_mirror_is_left_out_of_the_text():
    config = parse_config({"data": TEXT, "storage": {"mirror": "$SCRATCH/mirror"}})
    config.data.leave_out("/here/my.yaml", "the configuration")
    left_out = without_variables(config).data.not_text
    assert left_out["/big/mirror"] == "storage.mirror"
    assert left_out["/here/my.yaml"] == "the configuration"


def test_two_dollars_are_one_and_a_dollar_before_a_digit_is_itself():
    assert filled({"data": {"files": ["cost $$SCRATCH $5.txt"]}})["data"]["files"] == [
        "cost $SCRATCH $5.txt"
    ]


@pytest.mark.parametrize(
    "path", ["$MISSING/ws", "${MISSING}", "$EMPTY/ws", "${SCRATCH:-/tmp}", "${}"]
)
def test_a_variable_that_does_not_exist_is_refused_by_the_name_of_its_key(path):
    for section in ({"runtime": {"home": path}}, {"train": {"init_from": path}}):
        (name,) = section
        (key,) = section[name]
        with pytest.raises(ConfigError, match=rf"^{name}\.{key}="):
            filled({"data": TEXT} | section)
    with pytest.raises(ConfigError, match=r"^data\.sources\.1\.files="):
        filled(
            {
                "data": {
                    "sources": [
                        {"name": "a", "files": ["a"]},
                        {"name": "b", "files": [path]},
                    ]
                }
            }
        )


def test_a_variable_with_a_url_is_refused(monkeypatch):
    monkeypatch.setenv("SCRATCH", "s3://key:secret@bucket")
    with pytest.raises(ConfigError, match=r"storage\.mirror") as refused:
        filled({"data": TEXT, "storage": {"mirror": "$SCRATCH/mirror"}})
    assert "secret" not in str(refused.value)


def test_a_default_is_no_path_of_the_configuration(monkeypatch):
    monkeypatch.setenv("INFINI_LLAMA_HOME", "/home/$MISSING")
    assert filled({"data": TEXT})["runtime"]["home"] == "/home/$MISSING"
