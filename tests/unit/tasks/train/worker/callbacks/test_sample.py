"""Texts by a finished model: each begins with its prompt, and is the same whatever stands beside it."""

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.callbacks.samples import sample_texts


def test_prompts_are_continued_independently(built, dataset):
    _, reference = built
    torch.manual_seed(0)
    model = Llama(LlamaConfig(reference.vocab_size, 16, 24, 1, 2, 1, 64, attention="infini", segment_length=8)).double()
    prompts = ["the cat", "self.value = the cat sat the cat sat the cat sat", "日本語"]

    def texts_for(prompts: list[str], seed: int) -> list[str]:
        return sample_texts(model, dataset, TrainingConfig(sample_prompts=prompts, sample_tokens=20, seed=seed))

    texts = texts_for(prompts, 3)
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)) and texts[0] != prompts[0]
    assert texts == [texts_for([prompt], 3)[0] for prompt in prompts]
    assert texts != texts_for(prompts, 4)
