"""Every wrong configuration gets sentences that name the key, the value and what is allowed; all at once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.loading import load_config, parse_config
from configs.schema import PipelineConfig

GOOD = {"data": {"source": "python-stdlib"}}


def problems(mapping: dict) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse_config(mapping)
    assert raised.value.exit_code == 64
    return [line.strip() for line in str(raised.value).splitlines()[1:]]


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("name", ["tiny", "tiny_infini", "cpu", "gpu"])
def test_the_ready_configurations_are_valid_and_name_their_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no configs/ folder, the packaged one is meant
    assert load_config(f"configs/{name}.yaml").runtime.name == name


def test_three_bad_values_give_three_lines():
    lines = problems(GOOD | {"train": {"max_steps": "many", "learning_rate": -1}, "environment": {"nproc_per_node": 0}})
    assert lines == [
        'train.max_steps: must be a whole number, not "many"',
        "train.learning_rate: must be more than 0.0, not -1",
        "environment.nproc_per_node: must be at least 1, or 'auto', not 0",
    ]


@pytest.mark.parametrize(
    ("mapping", "hint"),
    [
        ({"train": {"max_step": 3}}, "train.max_step: unknown key; did you mean train.max_steps?"),
        ({"learning_rate": 3}, "learning_rate: unknown key; did you mean train.learning_rate?"),
        ({"data": {"tokenzier": {}}}, "data.tokenzier: unknown key; did you mean data.tokenizer?"),
        ({"verify": {"qqqqqq": 1}}, "verify.qqqqqq: unknown key; known here: verify.level, verify.full_below."),
    ],
)
def test_an_unknown_key_gets_the_nearest_name(mapping, hint):
    assert hint in problems(GOOD | mapping)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, ["data.files", "python-stdlib"]),
        ({"model": {"hidden_size": 100, "num_attention_heads": 3}}, ["num_attention_heads=3", "hidden_size=100"]),
        ({"model": {"num_attention_heads": 4, "num_key_value_heads": 3}}, ["num_key_value_heads=3"]),
        ({"train": {"global_batch_size": 10, "micro_batch_size": 4}}, ["global_batch_size=10", "micro_batch_size=4"]),
        (
            {
                "model": {"attention": "infini", "segment_length": 64},
                "data": {"source": "python-stdlib", "sequence_length": 64},
            },
            ["sequence_length=64", "segment_length=64"],
        ),
        ({"train": {"max_steps": 10, "warmup_steps": 10}}, ["warmup_steps=10", "max_steps=10"]),
        ({"data": {"source": "python-stdlib", "tokenizer": {"vocab_size": 256}}}, ["vocab_size", "at least 257"]),
        ({"environment": {"env": {"A B": "x"}}}, ["environment.env"]),
        ({"runtime": {"name": "../elsewhere"}}, ["runtime.name", "../elsewhere"]),
    ],
)
def test_rules_between_keys_and_limits(mapping, words):
    text = " ".join(problems((GOOD if mapping else {}) | mapping))
    assert all(word in text for word in words), text


def test_overrides_win_and_wrong_ones_are_named(tmp_path):
    path = write(tmp_path, "data: {source: python-stdlib}\ntrain: {max_steps: 200}\n")
    config = load_config(path, ["train.max_steps=300", "environment.nproc_per_node=2", "data.tokenizer.vocab_size=500"])
    assert (config.train.max_steps, config.environment.nproc_per_node, config.data.tokenizer.vocab_size) == (
        300,
        2,
        500,
    )
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["train.max_steps", "train.seed=[1", "train.max_steps.x=1"])
    assert "write section.key=value" in str(raised.value)
    assert "train.seed: the value '[1' is not valid YAML" in str(raised.value)
    assert "'max_steps' is a value, not a section" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ("- a\n- b\n", ["holds a list"]),
        ("data: {source: python-stdlib\n", ["line"]),
        ("train:\n  seed: 1\n  seed: 2\n", ["line 3", "'seed' stands twice"]),
        ("data: !!python/object/apply:os.system [ls]\n", ["line 1"]),
        (b"data: \xff\n", ["not UTF-8", "byte 6"]),
        ("? [a, b]\n: 1\n", ["line 1"]),
    ],
)
def test_what_is_no_configuration_file(tmp_path, text, words):
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text))
    assert all(word in str(raised.value) for word in words), raised.value


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist.*tiny\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def test_json_is_read_too(tmp_path):
    assert load_config(write(tmp_path, json.dumps(GOOD), "mine.json")).runtime.name == "mine"
    with pytest.raises(ConfigError, match="line 1"):
        load_config(write(tmp_path, "{", "broken.json"))


def test_every_key_has_a_title_and_a_sentence():
    """Prefect's form and the reference show them."""

    schema = PipelineConfig.model_json_schema()
    sections = {"": schema, **schema["$defs"]}
    for section, fields in sections.items():
        for name, field in fields["properties"].items():
            described = field.get("description") or sections[field["$ref"].rsplit("/", 1)[-1]]["description"]
            assert field["title"] and described.endswith((".", ").")), f"{section}.{name}"


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({"a": [1]})
)
known = st.sampled_from(
    ["max_steps", "seed", "learning_rate", "name", "home", "files", "env", "tokenizer", "nproc_per_node", "resume"]
)
section = st.one_of(values, st.dictionaries(known, values, max_size=3))
sections = st.dictionaries(
    st.sampled_from(["data", "model", "train", "environment", "runtime", "verify", "oops"]), section, max_size=4
)


@given(mapping=sections)
def test_any_mapping_is_a_configuration_or_a_list_of_sentences(mapping):
    try:
        assert isinstance(parse_config(mapping), PipelineConfig)
    except ConfigError as error:
        first, *lines = str(error).splitlines()
        assert first.startswith("the configuration has ") and lines
