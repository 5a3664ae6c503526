"""What computes is there for each entry of a table in configs, and the other way round."""

from pkgutil import resolve_name
from typing import get_args

import pytest

from infini_llama.configs.attention_backends import ATTENTION_BACKENDS
from infini_llama.configs.keys import words
from infini_llama.configs.parallel import STRATEGIES
from infini_llama.configs.schema import TrainingConfig
from infini_llama.configs.schema.sources import Form
from infini_llama.flows.cli.commands import COMMANDS
from infini_llama.model.backends import BACKENDS
from infini_llama.tasks.preprocess.sources.passkey import FORMS
from infini_llama.tasks.train.worker.strategies.strategy import Strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_the_methods_of_one(name):
    strategy = resolve_name(STRATEGIES[name].maker)
    methods = {method for method in vars(Strategy) if not method.startswith("_")}
    assert len(methods) > 5 and all(hasattr(strategy, method) for method in methods)


def test_a_key_names_the_entries_of_its_table():
    field = TrainingConfig.model_fields["parallel"]
    assert words(field.annotation or str, tuple(field.metadata)) == (
        f"one of {', '.join(STRATEGIES)}"
    )


def test_every_attention_backend_is_a_function_of_the_model():
    assert [*ATTENTION_BACKENDS] == [*BACKENDS]


def test_a_form_of_hidden_facts_can_be_trained_on_and_asked_for():
    asked = next(
        settings["choices"]
        for names, settings in COMMANDS["evaluate"].arguments
        if "--form" in names
    )
    assert [*FORMS] == asked == [*get_args(Form)]
