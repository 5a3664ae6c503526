"""Texts by the model, as a first look at what it learned."""

from pathlib import Path

from infini_llama.configs.schema import TrainingConfig
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
            texts = sample_texts(model, self.resolved.dataset_path, train)
            self.metrics.writer.samples(state.step, list(train.sample_prompts), texts)
        self.strategy.model.train()
        self.ranks.barrier()


def sample_texts(model: Llama, dataset: Path, train: TrainingConfig) -> list[str]:
    """Each of train.sample_prompts with its continuation at temperature 0.8 and top-k 50; the tokenizer is the dataset's.

    The same train.seed gives the same texts; each is what its prompt alone would give.
    """
    if not train.sample_prompts:
        return []
    end_of_text = verified_manifest(dataset).content.eos_id
    writer = Writer(model.eval(), read_tokenizer(dataset), list(train.sample_prompts), end_of_text)
    for _ in writer.write(train.sample_tokens, Sampling(temperature=0.8, top_k=50, seed=train.seed)):
        pass
    return [prompt + text for prompt, text in zip(train.sample_prompts, writer.texts, strict=True)]
