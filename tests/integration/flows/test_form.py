"""What a form changes of a deployed configuration, and the limits in its schema."""

import inspect

import jsonschema
import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import parse_config
from infini_llama.flows.form import SHORT, form, with_changes
from infini_llama.flows.pretrain import pretrain

CONFIG = parse_config(
    {"data": {"source": "python-stdlib"}, "train": {"max_steps": 60, "warmup_steps": 5}}
)
UNTOUCHED = {
    "name": "run",
    "files": [],
    "max_steps": 60,
    "attention": "softmax",
    "data": None,
    "train": None,
}


def test_a_form_that_is_sent_untouched_changes_nothing():
    assert with_changes(CONFIG, UNTOUCHED) == CONFIG


def test_the_first_section_and_an_opened_one_are_applied():
    settings = with_changes(
        CONFIG,
        UNTOUCHED | {"name": "mine", "learning_rate": 0.01, "train": {"save_steps": 7}},
    )
    assert (
        settings.runtime.name,
        settings.train.learning_rate,
        settings.train.save_steps,
    ) == (
        "mine",
        0.01,
        7,
    )
    assert settings.train.max_steps == 60, "keys that are not sent stay as deployed"


def test_keys_of_a_section_within_a_section_that_are_not_sent_stay_as_deployed():
    tokenizer, passkey = (
        {"vocab_size": 9000, "special_tokens": ["<x>"]},
        {"documents": 7},
    )
    deployed = parse_config(
        {"data": {"source": "passkey", "tokenizer": tokenizer, "passkey": passkey}}
    )
    data = with_changes(
        deployed,
        {"data": {"tokenizer": {"kind": "unigram"}, "passkey": {"form": "facts"}}},
    ).data
    assert (
        data.tokenizer.kind,
        data.tokenizer.vocab_size,
        data.tokenizer.special_tokens,
    ) == (
        "unigram",
        9000,
        ["<x>"],
    )
    assert (data.passkey.form, data.passkey.documents) == ("facts", 7)
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        with_changes(deployed, {"data": {"tokenizer": {"nope": 1}}})


def test_values_that_a_form_sends_untouched_leave_the_overrides_of_a_schedule():
    """Of the first section, of an opened one, and of a section within it."""
    base = parse_config(
        {"data": {"source": "passkey"}, "train": {"num_epochs": 2, "save_steps": 7}}
    )
    scheduled = with_changes(
        base,
        {
            "name": "nightly-{date}",
            "max_steps": 20_000,
            "train": {"save_steps": 100},
            "data": {"tokenizer": {"vocab_size": 300}},
        },
    )
    sent = base.model_dump(mode="json", exclude={"deployment"})
    for name, (section, key) in SHORT.items():
        sent[name] = sent[section].pop(key)
    assert with_changes(scheduled, sent, base) == scheduled
    sent["learning_rate"] = 0.01
    sent["data"]["tokenizer"]["kind"] = "unigram"
    settings = with_changes(scheduled, sent, base)
    assert settings.train.learning_rate == 0.01
    assert settings.data.tokenizer.kind == "unigram"
    assert settings.data.tokenizer.vocab_size == 300
    assert settings.train.max_steps == 20_000


def test_other_filler_from_files_is_still_filler():
    data = {"source": "passkey", "files": ["a/*.txt"], "passkey": {"filler": "files"}}
    hidden = parse_config({"data": data | {"sequence_length": 512}})
    for changes in ({"files": ["b/*.txt"]}, {"data": {"files": ["b/*.txt"]}}):
        changed = with_changes(hidden, changes).data
        assert (changed.source, changed.files) == ("passkey", ["b/*.txt"])


def test_a_length_in_another_unit_and_files_replace_what_is_deployed():
    epochs = with_changes(CONFIG, UNTOUCHED | {"train": {"num_epochs": 2.0}})
    assert (epochs.train.max_steps, epochs.train.num_epochs) == (None, 2.0)
    steps = with_changes(epochs, {"max_steps": 40})
    assert (steps.train.max_steps, steps.train.num_epochs) == (40, None)
    assert with_changes(CONFIG, {"files": ["*.txt"]}).data.source == "files"
    hub = parse_config(
        {"data": {"source": "huggingface", "dataset": "x", "validation_split": "test"}}
    )
    assert with_changes(hub, {"files": ["*.txt"]}).data.validation_split is None


def test_a_changed_source_drops_the_keys_that_its_former_one_read(caplog):
    files = parse_config(
        {"data": {"files": ["*.txt"], "text_column": "body", "min_length": 3}}
    )
    sent = files.model_dump(mode="json")["data"] | {
        "source": "huggingface",
        "dataset": "x",
    }
    for changes in ({"data": sent}, {"files": ["*.txt"], "data": sent}):
        data = with_changes(files, changes).data
        assert (data.files, data.text_column, data.min_length) == ([], "body", 3)
    assert "not read with data.source=huggingface: data.files" in caplog.text
    with pytest.raises(
        ConfigError, match=r"data\.format='csv' is not read with data\.source=hugg"
    ):
        with_changes(
            files, {"data": {"source": "huggingface", "dataset": "x", "format": "csv"}}
        )


def test_a_key_of_the_first_section_can_be_named_in_its_own_section():
    """As in a file: the server takes it, and it means the same."""
    files = {
        "data": {"files": ["*.txt"]},
        "train": {"max_steps": 40, "save_steps": 7},
        "runtime": {"name": "mine"},
    }
    first = {
        "files": ["*.txt"],
        "max_steps": 40,
        "train": {"save_steps": 7},
        "name": "mine",
    }
    assert with_changes(CONFIG, files) == with_changes(CONFIG, first)
    assert with_changes(CONFIG, UNTOUCHED | files) == with_changes(CONFIG, first)
    validator = jsonschema.Draft202012Validator(form(CONFIG).model_dump())
    assert validator.is_valid({"changes": files}) and not validator.is_valid(
        {"changes": {"data": {"fils": []}}}
    )
    with pytest.raises(
        ConfigError, match=r"changes\.max_steps=30 and changes\.train\.max_steps=40"
    ):
        with_changes(CONFIG, files | {"max_steps": 30})


@pytest.mark.parametrize(
    ("parameters", "is_valid"),
    [
        ({"unknown": 1}, False),
        ({"config_": {}}, False),
        ({"changes": {"max_steps": 40}}, True),
        ({"config": {}, "schedules": {}, "not_text": {}, "changes": {}}, True),
    ],
)
def test_the_server_refuses_a_parameter_that_the_flow_lacks(parameters, is_valid):
    schema = form(CONFIG).model_dump(exclude_unset=True)  # as Prefect's client sends it
    assert [*schema["properties"]] == ["changes"], "the form shows no other parameter"
    if is_valid:
        validate(parameters, schema, raise_on_error=True)
    else:
        with pytest.raises(ValidationError, match=next(iter(parameters))):
            validate(parameters, schema, raise_on_error=True)


def test_the_schema_allows_each_parameter_of_the_flow():
    parameters = {name: {} for name in inspect.signature(pretrain.fn).parameters}
    validate(
        parameters, form(CONFIG).model_dump(exclude_unset=True), raise_on_error=True
    )


@pytest.mark.parametrize(
    "changes", [{"tran": {}}, {"max_steps": 0}, {"train": {"nope": 1}}]
)
def test_values_outside_the_allowed_range_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        with_changes(CONFIG, changes)


def test_the_deployed_values_are_the_defaults_of_the_form():
    schema = form(CONFIG).model_dump()
    properties = schema["properties"]["changes"]["properties"]
    assert [*properties][: len(SHORT)] == [*SHORT] and properties["max_steps"][
        "default"
    ] == 60
    training = schema["definitions"]["TrainingConfig"]["properties"]
    assert training["warmup_steps"]["default"] == 5 and "max_steps" not in training
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["definitions"].values():
        for field in definition.get("properties", {}).values():
            if "default" in field:
                own = field | {"definitions": schema["definitions"]}
                jsonschema.Draft202012Validator(own).validate(field["default"])


def test_prefects_own_deploy_command_has_the_same_form_without_values():
    ours, prefects = form(CONFIG).model_dump(), parameter_schema(pretrain).model_dump()
    properties = prefects["properties"]["changes"]["properties"]
    assert [*prefects["properties"]] == ["changes"] and not prefects["required"]
    assert [*properties] == [*ours["properties"]["changes"]["properties"]]
    sections = [
        prefects["definitions"][name]
        for name in ("TrainingConfig", "DataConfig", "TokenizerConfig")
    ]
    fields = [field for one in sections for field in one["properties"].values()] + [
        *properties.values()
    ]
    assert not [field for field in fields if "default" in field], (
        "they would be sent, and replace what is deployed"
    )
