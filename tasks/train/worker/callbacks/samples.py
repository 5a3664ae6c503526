"""Texts by the model, as a first look at what it learned."""

from pathlib import Path

from infini_llama.model.generate import Sampling
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.resolved_run import ResolvedRun
from infini_llama.tasks.records.train_state import TrainState
from infini_llama.tasks.runs.generation import Writer
from infini_llama.tasks.storage.dataset_files import read_tokenizer, verified_manifest
from infini_llama.tasks.train.worker.callbacks.callback import Callback, StepResult
from infini_llama.tasks.train.worker.callbacks.evaluation import Evaluation
from infini_llama.tasks.train.worker.callbacks.step_metrics import StepMetrics
from infini_llama.tasks.train.worker.strategies.ranks import Ranks
from infini_llama.tasks.train.worker.strategies.strategy import Strategy


class Samples(Callback):
    """Continuations of train.sample_prompts, into samples.jsonl and the reporters after each evaluation but the last one.

    Those of the finished run are in result.json.
    """

    def __init__(
        self, resolved: ResolvedRun, strategy: Strategy, ranks: Ranks, evaluation: Evaluation, metrics: StepMetrics
    ) -> None:
        self.resolved, self.strategy, self.ranks = resolved, strategy, ranks
        self.evaluation, self.metrics = evaluation, metrics

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        train = self.resolved.config.train
        if not train.sample_prompts or self.evaluation.last_step != state.step:
            return
        if state.is_finished(self.resolved.max_steps, train.early_stopping_patience):
            return
        model = self.strategy.to_plain_model()
        if model is not None and self.metrics.writer:
            self.metrics.writer.samples(state.step, list(train.sample_prompts), texts_of(self.resolved, model))
        self.strategy.model.train()
        self.ranks.barrier()


def texts_of(resolved: ResolvedRun, model: Llama) -> list[str]:
    """The texts for train.sample_prompts; none without prompts."""
    train = resolved.config.train
    if not train.sample_prompts:
        return []
    return sample_texts(model, resolved.dataset_path, list(train.sample_prompts), train.sample_tokens, train.seed)


def sample_texts(model: Llama, dataset: Path, prompts: list[str], max_new_tokens: int, seed: int) -> list[str]:
    """Each prompt with its continuation at temperature 0.8 and top-k 50; the tokenizer is the dataset's.

    The same seed gives the same texts; each is what its prompt alone would give.
    """
    end_of_text = verified_manifest(dataset).content.eos_id
    writer = Writer(model.eval(), read_tokenizer(dataset), prompts, end_of_text)
    for _ in writer.write(max_new_tokens, Sampling(temperature=0.8, top_k=50, seed=seed)):
        pass
    return [prompt + text for prompt, text in zip(prompts, writer.texts, strict=True)]
