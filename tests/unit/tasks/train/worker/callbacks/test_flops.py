"""FLOPs per second and MFU of a run against what PyTorch counts in its steps."""

import json

import pytest

from infini_llama.configs.loading import parse_config
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.planning import plan_attempt
from infini_llama.tasks.train.worker.callbacks.callback import Callback
from infini_llama.tasks.train.worker.trainer import StopRequest, Trainer
from support.flops import counted, flop_counter
from support.records import make_plan

HEADS, SIZE, LAYERS, LENGTH, ROWS = 2, 8, 2, 16, 4
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "attention": "softmax",
}
TRAIN = {
    "max_steps": 3,
    "warmup_steps": 1,
    "global_batch_size": ROWS,
    "micro_batch_size": 2,
    "sample_prompts": [],
    "eval_steps": 9,
    "save_steps": 9,
    "report_to": [],
    "compile": "off",
}
SDPA = 3 * LAYERS * ROWS * 4 * HEADS * SIZE * LENGTH * (LENGTH + 1) / 2


class Count(Callback):
    """Counts the FLOPs of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_start(self, state: object) -> None:
        self.counter = flop_counter()
        self.counter.__enter__()

    def on_step_end(self, state: object, result: object) -> None:
        self.counter.__exit__(None, None, None)
        self.steps.append(SDPA + counted(self.counter))


class NeverStop(StopRequest):
    def __init__(self) -> None:
        self.requested = False


@pytest.mark.parametrize("chunk", [0, 4])
def test_flops_of_steps_with_the_loss_on_answers_are_those_that_are_executed(
    chunk, data, ranks, tmp_path
):
    texts = [
        {"text": f"{number} is a number and its answer is: {number % 7}"}
        for number in range(90)
    ]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in texts)
    )
    answers = {
        "files": [f"{tmp_path}/texts.jsonl"],
        "loss_on": "answer",
        "answer_after": ":",
    }
    given = {"data": data(**answers), "model": MODEL, "train": TRAIN}
    config = parse_config(given | {"runtime": {"name": "run", "home": str(tmp_path)}})
    dataset, plan = preprocess(config.data, tmp_path), make_plan(loss_chunk=chunk)
    run = RunFolder(tmp_path / "runs/run")
    lineage = bind_run(config, dataset, plan)
    attempt = plan_attempt(
        config, dataset, plan, lineage, invocation="", verify_on_read=False
    )
    (run.path / "logs/attempt-01").mkdir(parents=True)
    trainer = Trainer(
        attempt, ranks, NeverStop(), Heartbeat(run.path / "logs/attempt-01", 0)
    )
    trainer.callbacks.insert(0, count := Count())
    trainer.fit()
    lines = RunReader(run.path).trained
    flops = [line.flops_per_second * line.step_time for line in lines]
    assert flops == pytest.approx(count.steps, rel=1e-6) and len(flops) == 3
    assert all(0 < line.targets < line.input_tokens / 2 for line in lines)
