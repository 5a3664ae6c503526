"""The program on a model card, whatever the prompt is."""

import ast

import pytest

from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.export.card import model_card
from support.records import make_model_facts


@pytest.mark.parametrize(
    ("sample", "prompt"),
    [
        ("\\begin{document} \\noindent", "\\begin{document} \\noindent"),
        ("see C:\\users\\", "see C:\\users\\"),
        ('a "word" größer\nand more', 'a "word" größer'),
    ],
)
def test_the_program_of_a_card_has_the_prompt_as_it_is(sample, prompt):
    facts = make_model_facts(sample_prompt=sample)
    card = model_card(facts, LlamaConfig(8, 8, 8, 1, 1, 1, 8), "float32", [])
    program = card.split("```python\n")[1].split("```")[0]
    calls = [
        node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)
    ]
    (tokenizer,) = [
        call
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "tokenizer"
    ]
    assert ast.literal_eval(tokenizer.args[0]) == prompt
