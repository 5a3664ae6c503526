"""Texts by the model, as a first look at what it learned."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.generate import Sampling
from infini_llama.model.llama import Llama
from infini_llama.tasks.best_effort import best_effort
from infini_llama.tasks.preprocess.tokens.reader import held_out_prompt
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.runs.generation import Writer
from infini_llama.tasks.storage.dataset_files import verified_manifest
from infini_llama.tasks.tokenizers.encoder import encoder_of_dataset
from infini_llama.tasks.train.worker.callbacks.callback import Training, longest_silence
from infini_llama.tasks.train.worker.callbacks.metrics_writer import (
    MetricsWriter,
    Sample,
)

WHAT = "sampling from the model"
ADVICE = "Correct train.sample_prompts, or set it to [], which writes no samples."


def write_samples(
    training: Training, writer: MetricsWriter | None, step: int, stop_requested: bool
) -> None:
    """Write continuations of train.sample_prompts into samples.jsonl and to the reporters.

    That is done after each evaluation but the last one, once what the step needs saved is saved;
    the texts of the finished run are in result.json. After a request to stop, it is recorded that
    there are none. A collective call.

    Args:
        writer: on the first rank.
        stop_requested: on any rank, before.
    """
    if training.attempt.config.train.sample_prompts == []:
        return
    training.heartbeat.beat("samples", step)
    if stop_requested:
        if writer:
            writer.give_up_samples(step)
        return
    model = training.strategy.to_plain_model()
    if model is not None and writer:
        with best_effort(WHAT, ADVICE, repeated=True):
            samples = samples_in_time(model, training)
            if samples is None:
                writer.give_up_samples(step)
            else:
                writer.samples(step, samples)
    training.strategy.model.train()
    training.ranks.barrier()  # which the other ranks wait at, whether there are samples or not


def samples_in_time(model: Llama, training: Training) -> list[Sample] | None:
    """`sample_texts`, in less time than the other ranks wait, and than a rank may be silent.

    Returns:
        None: they were given up for a request to stop.
    """
    attempt = training.attempt
    until = time.monotonic() + longest_silence(attempt)
    samples = sample_texts(
        model.to(training.ranks.device),
        attempt.dataset_path,
        attempt.config.train,
        attempt.lineage.conversation,
        lambda: training.stop_requested() or time.monotonic() > until,
    )
    return None if training.stop_requested() else samples


def sample_texts(
    model: Llama,
    dataset: Path,
    train: TrainingConfig,
    conversation: Conversation,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Sample]:
    """Each prompt and its continuation at temperature 0.8 and top-k 50.

    The tokenizer is the dataset's. The same train.seed gives the same texts; each is what its
    prompt alone would give.

    Args:
        train: its sample_prompts; None: the beginning of a text that is held out.
        conversation: of the model that the run started from; its tokens end a text, too.
        is_over: once it is true, the texts end.
    """
    if train.sample_prompts == []:
        return []
    encoder = encoder_of_dataset(dataset)
    tokenizer = encoder.tokenizer
    end_of_text = verified_manifest(dataset).content.eos_id
    if train.sample_prompts is None:
        encoded = [held_out_prompt(dataset, tokenizer)]
        prompts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded]
    else:
        prompts = train.sample_prompts
        encoded = [encoder.encode(prompt) for prompt in prompts]
    ends = conversation.ends_with(end_of_text)
    writer = Writer(model.eval(), tokenizer, encoded, ends)
    sampling = Sampling(temperature=0.8, top_k=50, seed=train.seed)
    # Each prompt has shapes of its own, too rare to pay for compiled code.
    with torch.compiler.set_stance("force_eager"):
        for _ in writer.write(train.sample_tokens, sampling, is_over):
            pass
    return [
        Sample(prompt, prompt + text)
        for prompt, text in zip(prompts, writer.texts, strict=True)
    ]
