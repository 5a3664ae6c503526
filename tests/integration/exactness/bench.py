"""Runs of a few steps for the exactness tests, prepared by the program's own functions and grouped into few processes."""

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from integration.exactness.cover import Cell

from infini_llama.configs.loading import parse_config
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.records.dataset import DatasetRef
from infini_llama.tasks.records.summary import TrainingResult
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.run_folder import (
    RunFolder,
    cut_metrics,
    remove_staging,
    write_attempt_plan,
)
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.planning import plan_attempt
from support.laboratory import exact_metrics, torchrun
from support.preloaded import Server

RANKS = Path(__file__).with_name("ranks.py")
STEPS, SAVE_EVERY, BATCH = 10, 3, 16
# Of 800 characters; ten steps of 16 rows leave the first epoch of the smaller corpus.
DOCUMENTS = {
    "across": 20,
    "within": 60,
}


def configuration(home: Path, name: str, cell: Cell) -> dict:
    """Of one run of a cell. `batch` and `micro` of a cell replace what its other settings imply."""
    batch, context = cell.get("batch", BATCH), cell.get("context", 1)
    text = {"files": [str(home / cell["epoch"] / "*.txt")]}
    if "loss_weights" in cell:
        text = {"sources": sources(home, cell["loss_weights"])}
    return {
        "data": text
        | {
            "validation_fraction": 0.2,
            "curriculum": cell.get("curriculum", []),
            "packing": "best_fit" if "loss_weights" in cell else "concat",
            "sequence_length": 32,
            "tokenizer": {"vocab_size": 300},
        },
        "model": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": cell.get("kv_heads", 2),
            "segment_length": 8,
            "attention": cell["attention"],
            "pad_vocab_to_multiple_of": cell.get("padding", 1),
            "memory_update": cell.get("update", "linear"),
            "attend_previous_segment": cell.get("before", False),
            "hidden_dropout": cell.get("dropout", 0.0),
            "attention_dropout": cell.get("dropout", 0.0),
        },
        "train": {
            "max_steps": STEPS,
            "global_batch_size": batch,
            "micro_batch_size": cell.get("micro")
            or batch * context // (cell["world"] * cell["accumulation"]),
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "eval_steps": 4,
            "eval_tokens": 130,
            "save_steps": SAVE_EVERY,
            "sample_tokens": 4,
            "parallel": cell["parallel"],
            "zero_stage": cell.get("stage"),
            "context_parallel": context,
            "document_masking": cell.get("isolation", False),
            "optimizer": cell.get("optimizer", "adamw"),
            "compile": cell["compile"],
            "loss_chunk": cell.get("chunk", "auto"),
            "async_save": cell["save"] == "async",
        },
        "environment": {
            "device": "cpu",
            "threads": 1,
            "precision": cell["precision"],
            "nproc_per_node": cell["world"],
            "attention_backend": cell.get("backend", "auto"),
        },
        "runtime": {"name": name, "home": str(home)},
    }


def sources(home: Path, loss_weights: tuple[float, float]) -> list[dict]:
    """Numbers whose answers alone count, and text, in the shares 3 and 1."""
    numbers = {
        "name": "numbers",
        "source": "passkey",
        "passkey": {"documents": 60, "repetitions": 1},
        "loss_on": "answer",
        "answer_after": " The pass key is",
        "weight": 3,
    }
    text = {"name": "text", "files": [str(home / "within" / "*.txt")], "weight": 1}
    return [
        source | {"loss_weight": weight}
        for source, weight in zip((numbers, text), loss_weights, strict=True)
    ]


def write_texts(home: Path) -> None:
    """Documents cut from a module of Python's library, in one folder a corpus."""
    text = Path(textwrap.__file__).read_text() * 3
    for corpus, count in DOCUMENTS.items():
        (home / corpus).mkdir()
        for number in range(count):
            (home / corpus / f"{number:03}.txt").write_text(
                text[number * 800 : (number + 1) * 800]
            )


def outcomes(items: list[dict]) -> list[tuple[Path, str]]:
    return [
        (path, path.read_text())
        for item in items
        for path in Path(item["attempt_dir"]).glob("outcome-*")
    ]


@dataclass
class Bench:
    """A home folder; runs are queued by `attempt` and executed together by `execute`."""

    home: Path
    server: Server
    references: dict[str, DatasetRef] = field(default_factory=dict)
    queue: dict[int, list[dict]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_texts(self.home)
        self.facts = probe(self.home)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.home / "runs" / name)

    def attempt(
        self,
        name: str,
        cell: Cell,
        stop_after: int | None = None,
        lose_newest: bool = False,
    ) -> None:
        """Queues the next attempt at a run, from its newest checkpoint; a request to stop comes in its `stop_after`-th step.

        Args:
            lose_newest: as if the process had died before the last checkpoint: resume from the one before.
        """
        config = parse_config(configuration(self.home, name, cell))
        run = self.run(name)
        run.path.mkdir(parents=True, exist_ok=True)
        text = str((cell["epoch"], "loss_weights" in cell, cell.get("curriculum")))
        if text not in self.references:
            self.references[text] = preprocess(config.data, self.home)
        plan = plan_environment(config, self.facts)
        dataset = self.references[text]
        lineage = bind_run(config, dataset, plan)
        remove_staging(run)
        if lose_newest:
            shutil.rmtree(checkpoints.committed(run.checkpoints)[0].path)
        attempt = plan_attempt(
            config, dataset, plan, lineage, invocation="", verify_on_read=False
        )
        cut_metrics(run, attempt.from_step, is_evaluation_due=False)
        attempt_dir = (
            run.path
            / "logs"
            / f"attempt-{len(list((run.path / 'logs').glob('*'))) + 1:02}"
        )
        attempt_dir.mkdir(parents=True)
        write_attempt_plan(attempt_dir, attempt)
        item = {"attempt_dir": str(attempt_dir), "stop_after": stop_after}
        self.queue.setdefault(cell["world"], []).append(item)

    def execute(self) -> None:
        """Runs everything that is queued, one torchrun a world size; every rank must end well."""
        for world, items in sorted(self.queue.items()):
            orders = self.home / "orders.json"
            orders.write_text(json.dumps(items))
            try:
                torchrun(
                    self.server, world, self.home / "torchrun.log", RANKS, str(orders)
                )
            except AssertionError as error:
                bad = [
                    f"{path}: {text}"
                    for path, text in outcomes(items)
                    if not text.startswith(("done", "preempted"))
                ]
                raise AssertionError("\n".join([*bad, str(error)])) from None
            assert len(outcomes(items)) == world * len(items)
        self.queue.clear()

    def result(self, name: str) -> dict:
        """What two runs of the same cell must have in common to the bit."""
        run = self.run(name)
        result = run.read(TrainingResult, run.result)
        return result.model_dump(include={"weights_sha256", "optimizer_sha256"}) | {
            "metrics": exact_metrics(run.path)
        }

    def rows(self, name: str) -> dict[int, list[int]]:
        """Rows of each global batch by the number of its first sample, joined over the ranks and attempts that trained on it.

        Of a step that was trained on more than once, the last time counts.
        """
        found: dict[int, list[int]] = {}
        for attempt in sorted((self.run(name).path / "logs").iterdir()):
            parts: dict[int, dict[int, list[int]]] = {}
            for file in attempt.glob("rows-*.jsonl"):
                for first, rank, rows in map(json.loads, file.read_text().splitlines()):
                    parts.setdefault(first, {})[rank] = rows
            for first, by_rank in parts.items():
                found[first] = [
                    row for rank in sorted(by_rank) for row in by_rank[rank]
                ]
        return found


def interrupted_equals_uninterrupted(
    bench: Bench, cells: Iterable[tuple[str, Cell]]
) -> dict[str, list[str]]:
    """For each named cell what differs between a run that nobody disturbed and one stopped once or twice, in fresh processes.

    The first interruption is a stop in step 5, whose checkpoint is then lost for every other cell, so that the one that training
    wrote on its way is used; the second a stop three steps later.
    """
    cells = list(cells)
    for name, cell in cells:
        bench.attempt(f"{name}-calm", cell)
        bench.attempt(f"{name}-cut", cell, stop_after=5)
    bench.execute()
    for index, (name, cell) in enumerate(cells):
        bench.attempt(
            f"{name}-cut",
            cell,
            stop_after=3 if cell["resumed"] == 2 else None,
            lose_newest=bool(index % 2),
        )
    bench.execute()
    for name, cell in cells:
        if cell["resumed"] == 2:
            bench.attempt(f"{name}-cut", cell)
    bench.execute()
    differing = {}
    for name, _ in cells:
        calm, cut = bench.result(f"{name}-calm"), bench.result(f"{name}-cut")
        differing[name] = [key for key in calm if calm[key] != cut[key]]
    return differing
