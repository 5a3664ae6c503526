"""The trainer in one process: the best model is kept, also after a resume, and what a finished run leaves."""

from collections.abc import Callable

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infini_llama.configs.loading import parse_config
from infini_llama.tasks.export.exporting import export
from infini_llama.tasks.records.metrics import TrainLine, ValidationLine
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.report.run import headline
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.heartbeat import Heartbeat
from infini_llama.tasks.runs.run_folder import RunFolder, cut_metrics, read_metrics
from infini_llama.tasks.runs.run_reader import RunReader
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.planning import plan_attempt
from infini_llama.tasks.train.worker.callbacks.evaluation import ValidationSet
from infini_llama.tasks.train.worker.callbacks.metrics_writer import (
    MetricsWriter,
    Sample,
    TensorBoard,
)
from infini_llama.tasks.train.worker.callbacks.reporting import Reporter, ReporterThread
from infini_llama.tasks.train.worker.trainer import StopRequest, Trainer
from support.records import make_plan

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "attention": "softmax",
}
SHORT = {
    "max_steps": 12,
    "warmup_steps": 1,
    "global_batch_size": 2,
    "micro_batch_size": 2,
    "sample_tokens": 1,
    "eval_steps": 3,
    "save_steps": 5,
    "save_total_limit": 2,
    "report_to": [],
    "compile": "off",
}


@pytest.fixture
def train(built, data, ranks, monkeypatch) -> Callable[..., RunFolder]:
    """train(name, losses, stop_after): one attempt from the newest checkpoint, whose validations measure `losses` by step."""
    home, reference = built

    def attempt(
        name: str,
        losses: dict[int, float],
        stop_after: int | None = None,
        model: dict = SIZES,
        resume: str = "auto",
        **changes: object,
    ) -> RunFolder:
        given = {"data": data(), "model": model, "train": SHORT | changes}
        config = parse_config(
            given | {"runtime": {"name": name, "home": str(home), "resume": resume}}
        )
        run = RunFolder(home / "runs" / name)
        dataset, plan = reference, make_plan()
        attempt = plan_attempt(
            config,
            dataset,
            plan,
            bind_run(config, dataset, plan),
            invocation="",
            verify_on_read=False,
        )
        attempt_dir = run.path / "logs" / "attempt-01"
        attempt_dir.mkdir(parents=True, exist_ok=True)
        heartbeat = Heartbeat(attempt_dir, 0)

        def measure(*arguments: object) -> ValidationLine:
            step = heartbeat.step
            return ValidationLine(
                kind="validation",
                step=step,
                loss=losses[step],
                bits_per_byte=1.0,
                tokens=10,
            )

        class Stop(StopRequest):
            def __init__(self) -> None:
                pass

            @property
            def requested(self) -> bool:
                return heartbeat.phase == "compute" and heartbeat.step + 1 == stop_after

        monkeypatch.setattr(ValidationSet, "measure", measure)
        Trainer(attempt, ranks, Stop(), heartbeat).fit()
        return run

    return attempt


def kept(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.committed(run.checkpoints)]


def pointed(run: RunFolder) -> str:
    return (run.checkpoints / "best").readlink().name


@pytest.mark.parametrize(
    ("losses", "settings", "steps", "best"),
    [
        pytest.param(
            {3: 7.04, 6: 20.0, 9: 7.1, 12: 78.0},
            {},
            [12, 10, 3],
            (3, 7.04),
            id="a new lowest loss is saved between saves and stays",
        ),
        pytest.param(
            {3: 7.0, 6: 6.0, 9: 5.0, 12: 9.0},
            {},
            [12, 10, 9],
            (9, 5.0),
            id="the limit holds where each loss is the lowest",
        ),
        pytest.param(
            {3: 7.0, 6: 7.0, 9: float("nan"), 12: 8.0},
            {"save_total_limit": 9},
            [12, 10, 5, 3],
            (3, 7.0),
            id="a loss that is not lower or not finite is not saved",
        ),
        pytest.param(
            {3: 7.0, 6: 8.0, 9: 8.0, 12: 8.0},
            {"save_permanent_every": 4},
            [12, 10, 8, 5, 4, 3],
            (3, 7.0),
            id="multiples of save_permanent_every are saved and stay",
        ),
    ],
)
def test_saved_checkpoints_and_the_best_one(train, losses, settings, steps, best):
    run = train("one", losses, **settings)
    assert kept(run) == steps
    state = checkpoints.read_state(run.checkpoints / "best")
    assert (state.step, state.validation_loss) == best


def test_a_resumed_run_saves_what_the_uninterrupted_run_does(train):
    losses = {3: 7.0, 6: 9.0, 9: 6.0, 12: 8.0}
    whole = train("whole", losses, save_total_limit=9)
    train("cut", losses, stop_after=7, save_total_limit=9)
    cut = train("cut", losses, save_total_limit=9)
    assert kept(whole) == [12, 10, 9, 5, 3] and kept(cut) == [12, 10, 9, 7, 5, 3]
    results = [run.read(TrainingResult, run.result) for run in (whole, cut)]
    assert results[0] == results[1]


def test_a_run_from_another_ones_checkpoint_has_validations_of_its_own(train):
    one = train("one", {3: 1.0, 6: 2.0}, early_stopping_patience=1)
    assert one.read(TrainingResult, one.result).stopped_early == 1
    losses = {9: 5.0, 12: 4.0, 15: 4.5}
    two = train(
        "two",
        losses,
        resume=str(one.checkpoints / "latest"),
        max_steps=20,
        early_stopping_patience=1,
    )
    assert (
        two.read(TrainingResult, two.result).steps == 15
        and pointed(two) == "step-00000012"
    )
    results = RunReader(two.path).results
    assert results.tokens == results.input_tokens > 0, "those of its own steps"


def test_a_run_that_early_stopping_has_ended_can_be_taken_back(train):
    patience = {"early_stopping_patience": 1}
    one = train("one", {3: 1.0, 6: 2.0}, **patience)
    assert one.read(TrainingResult, one.result).stopped_early == 1
    train("one", {9: 0.5, 12: 0.4}, resume=str(one.checkpoints / "latest"), **patience)
    assert one.read(TrainingResult, one.result).steps == 12


def test_weights_of_a_model_are_evaluated_once_before_the_first_step(train, tmp_path):
    export(
        train("one", {3: 7.0, 6: 7.0, 9: 7.0, 12: 7.0}).path,
        tmp_path / "model",
        "latest",
        "float32",
        "5GB",
    )
    given = {
        "init_from": str(tmp_path / "model"),
        "early_stopping_patience": 2,
        "save_total_limit": 9,
    }
    losses = {0: 1.0, 3: 6.0, 6: 6.5, 9: 7.0}
    run = train("two", losses, stop_after=2, **given)
    checkpoints.remove(checkpoints.checkpoint_path(run.checkpoints, 2))
    cut_metrics(
        run, 0, is_evaluation_due=False
    )  # as after a kill before the first checkpoint
    train("two", {step: loss for step, loss in losses.items() if step}, **given)
    assert [(line.step, line.loss) for line in RunReader(run.path).validated] == [
        *losses.items()
    ]
    assert kept(run) == [9, 5, 3] and pointed(run) == "step-00000003"
    assert RunReader(run.path).results.best_validation_loss == 6.0
    assert next(iter(headline(RunReader(run.path)).items())) == (
        "validation loss before the first step",
        "1.0000",
    )
    assert all(line.step for line in RunReader(run.path.with_name("one")).validated)


def test_weights_with_a_memory_are_trained_with_the_whole_jitter_from_the_first_step(
    train, tmp_path
):
    def first_losses(name: str, **changes: object) -> list[float]:
        lines = read_metrics(train(name, {0: 7.0, 3: 7.0}, max_steps=3, **changes))
        return [line.loss for line in lines if isinstance(line, TrainLine)]

    losses = {}
    with_memory = SIZES | {"attention": "infini", "segment_length": 4}
    for attention, model in {"softmax": SIZES, "infini": with_memory}.items():
        export(
            train(
                f"from-{attention}", {3: 7.0, 6: 7.0, 9: 7.0, 12: 7.0}, model=model
            ).path,
            tmp_path / attention,
            "latest",
            "float32",
            "5GB",
        )
        given = {"init_from": str(tmp_path / attention), "init_gate": 0}
        for jitter in (1, 2**20):
            losses[attention, jitter] = first_losses(
                f"{attention}-{jitter}",
                model=with_memory | {"memory_write_jitter": jitter},
                **given,
            )
    assert losses["softmax", 1][0] == losses["softmax", 2**20][0]
    assert losses["infini", 1][0] != losses["infini", 2**20][0]


@pytest.mark.parametrize("lost", ["removed", "damaged"])
def test_where_the_best_one_is_gone_the_next_lowest_is_saved(train, lost):
    run = train("one", {3: 7.0}, stop_after=4)
    best = checkpoints.checkpoint_path(run.checkpoints, 3)
    if lost == "removed":
        checkpoints.remove(best)
    else:
        (best / "train_state.json").write_text("{}")
    train("one", {6: 7.5, 9: 7.6, 12: 7.7})
    assert kept(run) == [12, 10, 6] and pointed(run) == "step-00000006"


def test_what_is_only_for_people_ends_no_training(
    train, dataset, tmp_path, monkeypatch, caplog
):
    losses = {3: 7.0, 6: 6.0, 9: 5.0, 12: 4.0}
    calm = train("calm", losses, sample_prompts=[])
    train("broken", losses, stop_after=4)
    run = RunFolder(calm.path.with_name("broken"))
    for file in (run.path / "tensorboard", run.path / "profile"):
        file.write_text("a file where a folder is to be made")
    (dataset / "tokenizer.json").unlink()
    (tmp_path / "dividing.py").write_text(
        "def hook(model, record):\n    return {'quotient': 1 / 0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reporting = {
        "report_to": ["tensorboard"],
        "profile_steps": [6, 7],
        "metrics_hook": "dividing:hook",
        "logging_steps": 1,
    }
    train("broken", losses, **reporting)
    results = [one.read(TrainingResult, one.result) for one in (calm, run)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].samples == results[1].samples == ()
    assert not (calm.path / "samples.jsonl").read_text()
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    for part in (
        "sampling",
        "TensorBoard",
        "the profile",
        "train.metrics_hook=dividing:hook",
    ):
        assert len([words for words in warnings if part in words]) == 1, part


class Broken:
    """A reporter that fails at whatever it is called for."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise OSError(f"{name} cannot be reached")


def test_a_reporter_that_fails_is_not_used_again_and_others_are(tmp_path, caplog):
    makers: list[Callable[[], Reporter]] = [
        Broken,
        lambda: TensorBoard(tmp_path, 0, {}),
        Broken,
    ]  # type: ignore[list-item]
    reporters = [
        ReporterThread(f"number {each}", make, 60) for each, make in enumerate(makers)
    ]
    metrics = MetricsWriter(tmp_path, 1, reporters)
    for number in (1, 2):
        metrics.samples(number, [Sample("a", "a text")])
        metrics.sync()
    metrics.close()
    metrics.close_reporters(finished=True)
    assert caplog.text.count("texts cannot be reached") == 2
    assert caplog.text.count("cannot be reached") == 2, "it is not called again"
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["tensors"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_other_steps_are_announced_with_what_they_do_to_the_learning_rate(
    train, caplog
):
    losses = dict.fromkeys(range(3, 60, 3), 7.0)
    caplog.set_level("WARNING", "infini_llama.train")
    train("one", losses)
    train("one", losses)  # nothing is to be done
    assert "learning rate" not in caplog.text
    run = train("one", losses, stop_after=14, max_steps=60)
    rates = {
        line.step: line.learning_rate
        for line in read_metrics(run)
        if isinstance(line, TrainLine)
    }
    assert rates[13] > 5 * rates[12]
    assert all(f"{number:.3g}" in caplog.text for number in (rates[13], 1e-4)), (
        "the lowest rate would be that of step 13"
    )
