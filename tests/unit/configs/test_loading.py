"""Files of configuration and overrides: what they mean. Answers to wrong ones: tests/contracts/messages.txt."""

import json
import os
from pathlib import Path

import pytest

from infini_llama import configs
from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config, parse_config
from infini_llama.configs.schema import DeploymentConfig, PipelineConfig

GOOD = {"data": {"source": "python-stdlib"}}


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in Path(configs.__path__[0]).glob("*.yaml"))
)
def test_the_ready_configurations_are_valid_and_name_their_runs(
    name, tmp_path, monkeypatch
):
    # Where there is no configs/ folder, the packaged one is meant.
    monkeypatch.chdir(tmp_path)
    assert load_config(f"configs/{name}.yaml").runtime.name == name


def test_overrides_win(tmp_path):
    path = write(tmp_path, "data: {source: python-stdlib}\ntrain: {max_steps: 200}\n")
    config = load_config(
        path,
        [
            "train.max_steps=300",
            "environment.nproc_per_node=2",
            "data.tokenizer.vocab_size=500",
        ],
    )
    assert (
        config.train.max_steps,
        config.environment.nproc_per_node,
        config.data.tokenizer.vocab_size,
    ) == (
        300,
        2,
        500,
    )


def test_an_override_of_a_text_is_taken_as_written(tmp_path):
    path = write(tmp_path, "data: {source: python-stdlib}\n")
    overrides = [
        "runtime.name=007",
        "train.sample_prompts=['def f(a: int):']",
        "environment.env.N=1",
        "runtime.home='a b'",
    ]
    config = load_config(path, overrides)
    assert (config.runtime.name, config.train.sample_prompts) == (
        "007",
        ["def f(a: int):"],
    )
    assert config.environment.env == {"N": "1"} and str(config.runtime.home) == "a b"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("#end", "#end"),
        ("a # b", "a # b"),
        ("[SEP]", "[SEP]"),
        ("<|end: of|>", "<|end: of|>"),
        ("2022", "2022"),
        ('"#end"', "#end"),
        ('"null"', "null"),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_an_override_of_a_text_or_null_is_taken_as_written_unless_it_is_null(
    tmp_path, written, value
):
    path = write(
        tmp_path, "data: {source: huggingface, dataset: x, tokenizer: {eos: </s>}}\n"
    )
    keys = [
        "data.tokenizer.eos",
        "data.tokenizer.path",
        "data.dataset_config",
        "storage.mirror",
    ]
    config = load_config(path, [f"{key}={written}" for key in keys])
    tokenizer = config.data.tokenizer
    assert [
        tokenizer.eos,
        tokenizer.path,
        config.data.dataset_config,
        config.storage.mirror,
    ] == [value] * 4


def test_an_override_changes_one_place_where_an_alias_shares_it(tmp_path):
    text = "data: {source: python-stdlib, tokenizer: &t {}}\nmodel: *t\ntrain:\nverify: *t\n"
    config = load_config(write(tmp_path, text), ["verify.level=deep"])
    assert config.verify.level == "deep"


def test_a_file_whose_name_cannot_name_a_run_is_read_with_a_name(tmp_path):
    path = write(tmp_path, "data: {source: python-stdlib}\n", "my run.yaml")
    assert load_config(path, ["runtime.name=mine"]).runtime.name == "mine"


def test_a_pipe_and_a_very_large_file_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml"):
        load_config(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"large\.yaml has 1,000,018 bytes"):
        load_config(
            write(tmp_path, f"data: {{files: [{'a,' * 500_000}]}}\n", "large.yaml")
        )


def test_a_list_of_many_problems_is_cut(tmp_path):
    with pytest.raises(ConfigError) as raised:
        parse_config({"data": {"files": [1] * 5000}})
    assert (
        "5000 problems" in str(raised.value)
        and 50 < len(str(raised.value).splitlines()) < 60
    )


def test_a_bare_name_is_the_ready_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        load_config("tiny").model.hidden_size
        == load_config("tiny.yaml").model.hidden_size
        == 192
    )
    write(
        tmp_path,
        "data: {source: python-stdlib}\nmodel: {hidden_size: 64}\n",
        "tiny.yaml",
    )
    assert load_config("tiny.yaml").model.hidden_size == 64, (
        "a file that is here comes first"
    )
    with pytest.raises(ConfigError, match=r"tiny\.yaml"):
        load_config("elsewhere/tiny.yaml")


def test_a_json_configuration_is_read(tmp_path):
    assert (
        load_config(write(tmp_path, json.dumps(GOOD), "mine.json")).runtime.name
        == "mine"
    )
    with pytest.raises(ConfigError, match="line 1"):
        load_config(write(tmp_path, "{", "broken.json"))
    for digits in (str(2**63), "9" * 400, "9" * 5000):
        with pytest.raises(ConfigError, match="line 2: a number has too many digits"):
            load_config(write(tmp_path, f'{{"data":\n{digits}}}', "long.json"))
        with pytest.raises(ConfigError, match="too many digits"):
            load_config("tiny", [f"train.max_steps={digits}"])
    assert load_config("tiny", [f"train.seed={2**63 - 1}"]).train.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.max_tokens", "9" * 400 + "k"),
        ("train.eval_steps", "9" * 400 + "k tokens"),
        ("train.save_steps", "9" * 400 + " hours"),
        ("train.num_epochs", "1e308"),
        ("environment.communication_timeout", "1e308"),
        ("runtime.retry_delay", "1e308"),
    ],
)
def test_numbers_that_would_overflow_are_refused(key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config("tiny", ["train.max_steps=null", f"{key}={value}"])


def test_plain_values_are_what_they_look_like(tmp_path):
    """YAML 1.1 would read a date, the octal 8, `False` and the text '1e-4' here."""
    text = "data: {source: python-stdlib}\ntrain: {seed: 010, learning_rate: 1e-4, max_steps: 1e3}\nruntime: {name: no}\n"
    config = load_config(write(tmp_path, text), ["data.text_column=2024-01-01"])
    assert (config.train.seed, config.train.learning_rate, config.train.max_steps) == (
        10,
        1e-4,
        1000,
    )
    assert (config.runtime.name, config.data.text_column) == ("no", "2024-01-01")


def test_every_key_has_a_sentence_and_its_name_as_title():
    """Prefect's form and the reference show them."""
    schemas = [
        section.model_json_schema() for section in (PipelineConfig, DeploymentConfig)
    ]
    definitions = schemas[0]["$defs"] | schemas[1]["$defs"]
    sections = {"": schemas[0], "deployment": schemas[1], **definitions}
    for section, fields in sections.items():
        for name, field in fields["properties"].items():
            described = (
                field.get("description")
                or sections[field["$ref"].rsplit("/", 1)[-1]]["description"]
            )
            assert field.get("title", name) == name and described.endswith(
                (".", ").")
            ), f"{section}.{name}"


def test_the_form_of_a_run_has_every_section_except_deployment():
    schema = PipelineConfig.model_json_schema()
    assert set(schema["properties"]) == set(PipelineConfig.model_fields) - {
        "deployment"
    }
    assert not {"DeploymentConfig", "ScheduleConfig"} & schema["$defs"].keys()
