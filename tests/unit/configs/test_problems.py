"""No wrong value is let through, none hides another, and each sentence names a key."""

import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.keys import PATTERNS, all_keys, place, words
from infini_llama.configs.loading import load_config, parse_config
from infini_llama.configs.problems import shown
from infini_llama.configs.schema import DeploymentConfig, PipelineConfig
from infini_llama.configs.schema.section import readers_of
from infini_llama.configs.schema.sources import (
    PASSKEY_IN_FILES,
    TextConfig,
    keys_read_by,
)

GOOD = {"data": {"source": "python-stdlib"}}


def message(mapping: dict) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(mapping)
    return str(raised.value)


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("train", {"seed": 10**5000}),
        ("train", {"global_batch_size": 2**62, "micro_batch_size": 1}),
        ("environment", {"threads": 2**31}),
        ("runtime", {"home": 3}),
        ("runtime", {"name": "a" + "{date}" * 10}),
        ("verify", {"level": {"a": 1}}),
    ],
)
def test_a_wrong_value_is_named(section, wrong):
    assert message(GOOD | {section: GOOD.get(section, {}) | wrong}).startswith(
        f"the configuration: {section}.{next(iter(wrong))}"
    )


def test_a_misspelt_key_does_not_hide_other_rules():
    train = {"global_batch_size": 9, "micro_batch_size": 2}
    lines = message({"data": {"file": ["a"]}, "train": train}).splitlines()[1:]
    assert [line.split(":")[0].split("=")[0].strip() for line in lines] == [
        "data.file",
        "train.global_batch_size",
    ]


def test_no_rule_is_reported_about_a_value_that_was_not_given():
    # The default of a key that is wrong would break these rules; the user never wrote it.
    assert (
        len(
            message(
                GOOD | {"model": {"num_attention_heads": 0, "hidden_size": 190}}
            ).splitlines()
        )
        == 1
    )
    assert (
        len(
            message(
                GOOD | {"train": {"micro_batch_size": "x", "global_batch_size": 9}}
            ).splitlines()
        )
        == 1
    )
    assert len(message({"data": {"source": "nowhere"}}).splitlines()) == 1
    assert len(message({"data": {"file": ["a.txt"]}}).splitlines()) == 1, (
        "data.file meant data.files"
    )


@pytest.mark.parametrize(
    ("attention", "memory_layers", "frozen", "named"),
    [
        ("softmax", None, "all_but_memory", True),
        ("local", None, "all_but_memory", True),
        ("infini", None, "all_but_memory", False),
        ("softmax", None, 4, True),
        ("softmax", None, 3, False),
        ("infini", None, 3, False),
        ("infini", [0, 1], 2, True),
        ("infini", [0, 1], 1, False),
    ],
)
def test_what_is_frozen_leaves_something_to_train(
    attention, memory_layers, frozen, named
):
    model = {
        "attention": attention,
        "num_hidden_layers": 4,
        "segment_length": 32,
        "memory_layers": memory_layers,
    }
    mapping = GOOD | {
        "model": model,
        "train": {"init_from": "folder", "frozen_layers": frozen},
    }
    if named:
        assert (
            "train.frozen_layers" in message(mapping)
            and len(message(mapping).splitlines()) == 1
        )
    else:
        parse_config(mapping)


@pytest.mark.parametrize("attention", ["softmax", "local"])
def test_gates_are_not_counted_without_a_memory(attention):
    """As in the baseline of a model with a memory in its third layer alone."""
    model, train = (
        {"attention": attention, "num_hidden_layers": 3},
        {"init_gate": [[1.0, -5.0]]},
    )
    assert parse_config(GOOD | {"model": model, "train": train}).train.init_gate == [
        [1.0, -5.0]
    ]


def test_every_item_of_a_list_or_table_is_named():
    text = message(
        {"data": {"files": ["a", 3, 4]}, "environment": {"env": {"9x": "b", "A": 1}}}
    )
    assert "data.files.1: 3" in text and "data.files.2: 4" in text
    assert "environment.env.9x: " in text and "environment.env.A:" in text


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("model", "head_dim", 7, "model.head_dim: 7 is not an even integer from 2"),
        (
            "model",
            "memory_layers",
            [],
            "model.memory_layers: [] is not a non-empty list",
        ),
        (
            "model",
            "memory_layers",
            [0, -1],
            "model.memory_layers.1: -1 is not an integer",
        ),
        ("environment", "gpus", [0, "x"], "environment.gpus.1: 'x' is not an integer"),
        ("train", "init_from", "", "train.init_from: '' is not a non-empty string"),
        ("runtime", "home", "", "runtime.home: it is empty; name a folder"),
    ],
)
def test_the_rule_that_a_value_breaks_is_named(section, key, value, sentence):
    text = message(GOOD | {section: {key: value}})
    assert sentence in text and "\n" not in text


def test_a_section_without_keys_is_no_problem():
    assert parse_config(GOOD | {"train": None, "model": {}}).train.max_steps == 1000
    assert "train: 5 " in message(GOOD | {"train": 5})


@pytest.mark.parametrize(
    "key", [float("nan"), None, "", " ", "=", "\ud800", b"x", ("a", "b")]
)
def test_a_key_of_any_kind_is_unknown(key):
    for mapping in ({key: None}, {"verify": {key: None}}):
        text = message(GOOD | mapping)
        assert "unknown key" in text and text.isprintable()


def test_yaml_that_is_not_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="mapping"):
        parse_config([1])  # pyright: ignore[reportArgumentType]


def test_every_key_can_be_explained():
    for key in all_keys():
        steps, fields, allowed = place(tuple(key.split(".")))
        assert ".".join(steps) == key and steps == fields
        assert re.match(r"(a|an|one|true|text|whole|auto|concat)\b", words(allowed)), (
            f"{key}: {words(allowed)}"
        )
    schema = (
        f"{PipelineConfig.model_json_schema()} {DeploymentConfig.model_json_schema()}"
    )
    assert all(
        repr(pattern)[1:-1] in schema or pattern.startswith("^[A-Za-z_]")
        for pattern in PATTERNS
    )


def test_a_value_is_shown_short_and_on_one_line():
    bomb = ["x"] * 9
    for _ in range(30):
        bomb = [bomb] * 9  # pyright: ignore[reportAssignmentType]
    assert all(
        len(shown(value)) < 200 and "\n" not in shown(value)
        for value in (bomb, "a\nb" * 500, {"a": bomb}, 10**5000)
    )
    loop: list = []
    loop.append(loop)
    assert shown(loop)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.text(alphabet=st.characters(categories=["Cs", "Cc"]), max_size=3),
    st.binary(max_size=3),
    st.dates(),
)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(leaves.filter(bool), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = (
    st.sampled_from([key.rpartition(".")[2] for key in all_keys()])
    | st.text(max_size=4)
    | st.integers()
)
section = st.one_of(
    anything,
    st.dictionaries(
        KEYS,
        st.one_of(anything, st.dictionaries(KEYS, anything, max_size=2)),
        max_size=4,
    ),
)
SECTIONS = [key for key in all_keys() if "." not in key]


@settings(max_examples=60)
@given(
    mapping=st.dictionaries(
        st.sampled_from([*SECTIONS, "oops"]) | KEYS, section, max_size=4
    )
)
def test_any_mapping_is_valid_or_its_errors_name_a_key(mapping):
    try:
        assert isinstance(parse_config(mapping), PipelineConfig)
    except ConfigError as error:
        str(error).encode()  # a terminal can print it
        first, *lines = str(error).splitlines()
        assert first.startswith("the configuration")
        for line in lines or [first.removeprefix("the configuration: ")]:
            key = re.split(r": |=| is empty", line.strip(), maxsplit=1)[0]
            assert key and not key.startswith("the configuration"), line
            assert "Input should" not in line and "valid dictionary" not in line, line


@pytest.mark.parametrize(
    "value",
    [
        {"DBPASSWORD": "hunter2\0"},
        {"DBPASSWORD": ["hunter2"]},
        {"9": "hunter2", "A": 1},
    ],
)
def test_a_problem_of_an_environment_variable_does_not_show_its_value(value):
    text = message(GOOD | {"environment": {"env": value}})
    assert "environment.env." in text and "hunter2" not in text


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"data": {"files": ["a", "b\0"]}}, "data.files.1"),
        ({"data": {"sources": [{"name": "a", "files": ["x", "y\0"]}]}}, "data.sources.0.files.1"),
        ({"data": {"sources": [{"name": "a", "files": ["x"], "license": "y\0"}]}}, "data.sources.0.license"),
        (GOOD | {"deployment": {"schedules": [{"name": "a", "cron": "0 0 * * *", "overrides": ["a=b\0"]}]}}, "deployment"),
        (GOOD | {"environment": {"env": {"A\0": "x"}}}, "environment.env"),
    ],
)  # fmt: skip
def test_a_nul_character_is_named_wherever_it_is(mapping, key):
    assert f"{key}" in message(mapping)


def test_an_empty_pattern_is_refused_and_not_the_working_directory():
    assert "data.files.0" in message({"data": {"files": [""]}})
    assert "data.validation_files.1" in message(
        GOOD | {"data": {"files": ["a"], "validation_files": ["b", ""]}}
    )


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (
            {"source": "huggingface", "dataset": "x", "validation_files": ["held.txt"]},
            "or use validation_split",
        ),
        ({"source": "passkey", "validation_files": ["held.txt"]}, "remove it"),
        ({"source": "passkey", "validation_split": "test"}, "remove it"),
        ({"files": ["a.txt"], "validation_split": "test"}, "or use validation_files"),
    ],
)
def test_held_out_text_that_the_source_does_not_read_is_refused(text, other):
    (key,) = set(text) & {"validation_files", "validation_split"}
    source = text.get("source", "files")
    for data in (text, {"sources": [text | {"name": "one"}]}):
        line = message({"data": data})
        assert (
            f"{key}=" in line
            and f"is not read with {'data.' if data is text else ''}source={source}; "
            in line
        )
        assert line.endswith(other)


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("files", {"dataset": "x", "streaming": True, "passkey": {"documents": 5}}),
        ("python-stdlib", {"files": ["a.txt"], "dataset_config": "en"}),
        ("huggingface", {"files": ["a.txt"], "format": "csv"}),
        ("passkey", {"files": ["a.txt"], "text_column": "body", "revision": "v1"}),
    ],
)
def test_a_key_of_another_source_is_refused_by_name(source, keys):
    given = {"files": {"files": ["a.txt"]}, "huggingface": {"dataset": "x"}}.get(
        source, {}
    )
    for key, value in keys.items():
        line = message({"data": given | {"source": source, key: value}})
        assert (
            f"data.{key}={value!r} is not read with data.source={source}; remove it"
            in line
        )


def test_every_source_reads_a_key_and_every_reader_is_a_source():
    choices = get_args(TextConfig.model_fields["source"].annotation)
    named = {
        reader for readers in readers_of(TextConfig).values() for reader in readers
    }
    assert named - {PASSKEY_IN_FILES} == set(choices)
    assert keys_read_by("passkey", "files") - keys_read_by("passkey") == {
        "files",
        "text_column",
        "format",
    }


def test_an_override_of_the_source_drops_the_keys_of_the_former_one(tmp_path, caplog):
    file = tmp_path / "run.yaml"
    file.write_text("data: {files: [a.txt], text_column: body, min_length: 3}")
    data = load_config(file, ["data.source=passkey"]).data
    assert (data.files, data.text_column, data.min_length) == ([], "text", 3)
    assert (
        "not read with data.source=passkey: data.files, data.text_column" in caplog.text
    )
    caplog.clear()
    filler = ["data.source=passkey", "data.passkey.filler=files"]
    assert load_config(file, filler).data.files == ["a.txt"] and not caplog.text
    with pytest.raises(ConfigError, match=r"data\.format='csv' is not read"):
        load_config(file, ["data.source=passkey", "data.format=csv"])
    with pytest.raises(ConfigError, match=r"data\.source"):
        load_config(file, ["data.source=nowhere"])
