"""Texts by a finished model: each begins with its prompt, and is the same whatever stands beside it."""

import json
import re
import time

import pytest
import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import held_out_prompt
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.storage.dataset_files import read_tokenizer
from infini_llama.tasks.train.worker.callbacks.samples import sample_texts


@pytest.fixture
def model(built) -> Llama:
    size = built[1].vocab_size
    return Llama(
        LlamaConfig(size, 16, 24, 1, 2, 1, 64, attention="infini", segment_length=8)
    )


def test_prompts_are_continued_independently(model, dataset):
    model.double()
    prompts = ["the cat", "self.value = the cat sat the cat sat the cat sat", "日本語"]

    def texts_for(prompts: list[str], seed: int) -> list[str]:
        train = TrainingConfig(sample_prompts=prompts, sample_tokens=20, seed=seed)
        return [
            sample.text
            for sample in sample_texts(model, dataset, train, Conversation())
        ]

    texts = texts_for(prompts, 3)
    assert (
        all(
            text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)
        )
        and texts[0] != prompts[0]
    )
    assert texts == [texts_for([prompt], 3)[0] for prompt in prompts]
    assert texts != texts_for(prompts, 4)


def test_layers_below_the_memory_that_are_compiled_for_training_write_texts_without(
    built, dataset
):
    """A prompt of several segments goes through their `forward`, in a shape of its own."""
    config = LlamaConfig(
        built[1].vocab_size,
        16,
        24,
        2,
        2,
        1,
        64,
        attention="infini",
        segment_length=8,
        memory_layers=(1,),
    )
    model, compiled = Llama(config), []

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    train = TrainingConfig(sample_prompts=["the cat sat " * 20], sample_tokens=3)
    sample_texts(model, dataset, train, Conversation())
    assert not compiled
    model(torch.zeros(1, 16, dtype=torch.long))
    assert compiled


def test_a_sample_continues_the_first_words_of_a_held_out_text_within_its_time(
    model, dataset, corpus
):
    (sample,) = sample_texts(
        model, dataset, TrainingConfig(sample_tokens=5), Conversation()
    )
    texts = [path.read_text() for path in corpus.glob("*.txt")]
    assert (
        0 < len(sample.prompt) <= 60
        and not sample.prompt[-1].isspace()
        and sample.text != sample.prompt
    )
    assert any(
        text.startswith(sample.prompt) and text[len(sample.prompt)].isspace()
        for text in texts
    )
    until = time.monotonic() + 0.2
    (cut,) = sample_texts(
        model,
        dataset,
        TrainingConfig(sample_tokens=10**9),
        Conversation(),
        lambda: time.monotonic() > until,
    )
    assert cut.text.startswith(cut.prompt) and len(cut.text) > len(cut.prompt)


def test_where_only_answers_are_learned_a_sample_answers_a_held_out_prompt(
    data, tmp_path
):
    lines = [
        {"text": f"What is {number} plus one? Answer: {number + 1}"}
        for number in range(100, 160)
    ]
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    given = {
        "files": [f"{tmp_path}/sums.jsonl"],
        "loss_on": "answer",
        "answer_after": "Answer:",
    }
    reference = preprocess(data(**given), tmp_path / "home")
    dataset = tmp_path / "home" / reference.path
    tokenizer = read_tokenizer(dataset)
    prompt = tokenizer.decode(held_out_prompt(dataset, tokenizer))
    assert re.fullmatch(r"What is \d+ plus one\? Answer:", prompt)
