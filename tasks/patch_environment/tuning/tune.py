"""Settings found by trying them: attention believed by running it, the rest by timing steps, for a small part of the run's time."""

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from infini_llama.configs.durations import planned_steps
from infini_llama.configs.ranks import groups_of
from infini_llama.model.flops import flops_per_token
from infini_llama.tasks.patch_environment.estimate import model_of
from infini_llama.tasks.patch_environment.pin import asking, wish
from infini_llama.tasks.patch_environment.plan import resolve
from infini_llama.tasks.patch_environment.speed import HALF_ONLY, can_compile
from infini_llama.tasks.patch_environment.tuning import trials
from infini_llama.tasks.patch_environment.tuning.trials import TrialFailed
from infini_llama.tasks.storage.artifacts import write_atomic

log = logging.getLogger("infini_llama.environment")
VERSION = 1
SHARE = 0.05  # of the time that the run is estimated to take
WORTH = 1.05  # times the speed that a setting must bring to be taken
START = {"cpu": 8.0, "cuda": 20.0}  # seconds of a trial before its first step: importing torch, starting CUDA
COMPILING = 90.0  # seconds that are set aside for a cold compilation
# Floating-point operations a second that are taken for granted before anything is measured, a core or a GPU.
SPEED = {"cpu": 5e10, "cuda": 1e14}


def tune(config: dict, facts: dict, home: Path) -> dict[str, Any]:
    """What `environment.tune` finds for this run, on top of the plan that the facts alone give.

    Returns:
        {"settings": for `pin.asking`, "reasons": a sentence a setting, "trials": what was measured, "seconds", "cached"}.
    """
    plan = resolve(config, facts)
    path = home / "tune-cache" / f"{_key(config, facts, plan)}.json"
    if path.exists():
        try:
            return json.loads(path.read_text(encoding="utf-8")) | {"cached": True}
        except ValueError:
            log.warning("%s cannot be read; what it held is measured again", path)
    began = time.monotonic()
    budget = SHARE * _seconds_of(config, plan, facts)
    found = _Search(config, facts, began + budget)
    found.attention()
    if config["environment"]["tune"] == "full":
        found.steps()
    result = {"settings": found.settings, "reasons": found.reasons, "trials": found.trials}
    result |= {"seconds": round(time.monotonic() - began, 1), "budget": round(budget, 1), "cached": False}
    if not found.cut_short:  # a longer run of the same shapes may have time for what was left out
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result, indent=1))
    return result


class _Search:
    """The best settings so far, and the trials that led to them."""

    def __init__(self, config: dict, facts: dict, until: float) -> None:
        self.config, self.facts, self.until = config, facts, until
        self.settings: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.trials: list[dict[str, Any]] = []
        self.cut_short = False

    def left(self) -> float:
        return self.until - time.monotonic()

    def plan(self, **changes: Any) -> dict[str, Any]:
        return resolve(asking(self.config, self.settings | changes), self.facts)

    def attention(self) -> None:
        """The fastest function that computes rightly at these shapes."""
        if wish(self.config, "attention_backend") != "auto":
            return
        plan = self.plan()
        candidates = ["sdpa", "blocked"]
        if plan["device"] == "cuda" and plan["precision"] == "bf16":
            candidates += [name for name in HALF_ONLY if not self.facts["attention"].get(name)]
        if self.config["model"].get("attention_dropout"):
            candidates = ["sdpa"]
        if len(candidates) < 2 or not self._affords(START[plan["device"]] + 4, "attention functions"):
            return
        try:
            results = trials.attention(self.config, plan, candidates, max(60.0, self.left()))
        except TrialFailed as failed:
            self.trials.append({"tried": "attention functions", "error": str(failed)})
            return
        self.trials += [{"tried": f"attention_backend={name}"} | result for name, result in results.items()]
        timed = {name: result["seconds"] for name, result in results.items() if "seconds" in result}
        if "sdpa" not in timed:
            return
        best = min(timed, key=lambda name: timed[name])
        gain = timed["sdpa"] / timed[best]
        if gain < WORTH:
            best, gain = "sdpa", 1.0
        self.settings["attention_backend"] = best
        self.reasons["attention_backend"] = f"computes rightly, and {gain:.2f}x as fast as torch's at these shapes"

    def steps(self) -> None:
        """Threads or workers, precision, allocator and compilation, one after the other, each kept where it pays."""
        plan = self.plan()
        if not self._affords(START[plan["device"]] * 2, "steps"):
            return
        base = self._measure({}, plan)
        if base is None:
            return
        for name, changes in self._candidates(plan):
            if not self._affords(START[plan["device"]] + 6 * base["step"], name):
                continue
            measured = self._measure(changes, self.plan(**changes))
            if measured is None:
                continue
            gain = measured["tokens_per_second"] / base["tokens_per_second"]
            if gain >= WORTH:
                self.settings |= changes
                self.reasons |= dict.fromkeys(changes, f"measured: {gain:.2f}x the speed without")
                base = measured
        self._compile(base)

    def _candidates(self, plan: dict) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        if plan["device"] != "cpu":
            return found
        cores, train = self.facts["cores"], self.config["train"]
        both = wish(self.config, "nproc_per_node") == wish(self.config, "threads") == "auto"
        for workers, threads in ((cores, 1), (1, cores)):
            shares = workers % train["context_parallel"] == 0
            shares = shares and train["global_batch_size"] % (plan["micro_batch_size"] * groups_of(train, workers)) == 0
            if both and cores > 1 and shares and workers != plan["nproc_per_node"]:
                found.append((f"{workers} worker(s)", {"nproc_per_node": workers, "threads": threads}))
        if wish(self.config, "precision") == "auto" and self.facts["cpu"]["bf16"]:
            other = "fp32" if plan["precision"] == "bf16" else "bf16"
            found.append((f"precision={other}", {"precision": other}))
        if wish(self.config, "allocator") == "auto":
            others = [name for name in ("system", *self.facts["allocators"]) if name != plan["allocator"]]
            found += [(f"allocator={name}", {"allocator": name}) for name in others]
        return found

    def _compile(self, base: dict[str, float]) -> None:
        plan, train = self.plan(), self.config["train"]
        if wish(self.config, "compile") != "auto" or can_compile(plan["device"], self.facts):
            return
        if train["parallel"] == "deepspeed":
            return
        for what in ("block", "whole"):
            if what == "whole" and train["parallel"] != "ddp":
                continue
            if not self._affords(START[plan["device"]] + COMPILING, f"compile={what}"):
                continue
            measured = self._measure({"compile": what}, self.plan(compile=what))
            if measured is None:
                continue
            steps = planned_steps(train, self.config["data"]["sequence_length"])
            saved = (base["step"] - measured["step"]) * steps * plan["accumulation_steps"]
            gain = measured["tokens_per_second"] / base["tokens_per_second"]
            if gain >= WORTH and saved > measured["first"]:
                self.settings["compile"] = what
                self.reasons["compile"] = (
                    f"measured: {gain:.2f}x the speed without, and the {measured['first']:.0f} s of compiling come back"
                )
                base = measured

    def _measure(self, changes: dict[str, Any], plan: dict) -> dict[str, float] | None:
        tried = ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plan"
        log.info("trying %s", tried)
        try:
            measured = trials.steps(self.config, plan, seconds=max(2.0, self.left() / 8), limit=max(60.0, self.left()))
        except TrialFailed as failed:
            self.trials.append({"tried": tried, "error": str(failed)})
            return None
        self.trials.append({"tried": tried, **measured})
        return measured

    def _affords(self, seconds: float, what: str) -> bool:
        if seconds <= self.left():
            return True
        self.cut_short = True
        self.trials.append({"tried": what, "error": "left out: it would take more than 5 % of the run's time"})
        return False


def _seconds_of(config: dict, plan: dict, facts: dict) -> float:
    """About how long the run takes, before anything is measured."""
    length = config["data"]["sequence_length"]
    tokens = planned_steps(config["train"], length) * config["train"]["global_batch_size"] * length
    units = facts["cores"] if plan["device"] == "cpu" else plan["nproc_per_node"]
    return flops_per_token(model_of(config), length) * tokens / (SPEED[plan["device"]] * units)


def _key(config: dict, facts: dict, plan: dict) -> str:
    """Of machine, versions and shapes; another of any is measured anew."""
    environment, train = config["environment"], config["train"]
    content = {
        "version": VERSION,
        "machine": [facts["cpu"]["model"], facts["cores"], [gpu["name"] for gpu in facts["gpus"]], facts["allocators"]],
        "versions": facts["versions"],
        "compilers": facts["compilers"],
        "model": config["model"],
        "data": [config["data"]["sequence_length"], config["data"]["tokenizer"]["vocab_size"]],
        "train": {
            name: train[name]
            for name in (
                "global_batch_size",
                "compile",
                "parallel",
                "context_parallel",
                "loss_chunk",
                "activation_checkpointing",
            )
        },
        "steps": len(str(planned_steps(train, config["data"]["sequence_length"]))),  # compiling pays in long runs only
        "environment": {name: value for name, value in environment.items() if name not in ("env", "port")},
        "plan": [plan["micro_batch_size"], plan["nproc_per_node"], plan["precision"]],
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
