"""Training speed under `environment.tune: off`, under the plan of `quick`, and with each part of that plan alone.

    .venv/bin/python benchmarks/environment.py [--rounds 5]

Each case is a trial as tuning makes them (a process with the environment that a worker would have; forward, backward, clip, AdamW);
the cases take turns, and every ratio is the median over rounds of that round's own ratio to `tune: off`, so that what else the machine
does at the time touches both sides. The raw figures go to benchmarks/results/environment.json.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from infini_llama.configs.schema import PipelineConfig
from infini_llama.tasks.patch_environment.planning.pin import with_settings
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.tuning import trials
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan

VOCABULARIES = (8192, 32000)
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LIMIT = 600.0  # seconds of one trial


def cases(config: PipelineConfig, facts: MachineFacts) -> dict[str, EnvironmentPlan]:
    """The plan of each case."""
    tuned = config.model_copy(update={"environment": config.environment.model_copy(update={"tune": "quick"})})
    plan = resolve(tuned, facts)
    found = {"tune: off": resolve(config, facts), "plan of tune: quick": plan}
    found[f"precision={plan.precision} alone"] = resolve(with_settings(config, {"precision": plan.precision}), facts)
    for name in facts.allocators:
        found[f"allocator={name} alone"] = resolve(with_settings(config, {"allocator": name}), facts)
    found["GLIBC_TUNABLES alone"] = resolve(with_settings(tuned, {"allocator": "system", "precision": "fp32"}), facts)
    found["attention_backend=blocked alone"] = resolve(with_settings(config, {"attention_backend": "blocked"}), facts)
    found["plan, attention_backend=blocked"] = resolve(with_settings(tuned, {"attention_backend": "blocked"}), facts)
    if facts.compilers.cxx:
        for what in ("block", "whole"):
            found[f"plan, compile={what}"] = resolve(with_settings(tuned, {"compile": what}), facts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    target = Path(__file__).with_name("results") / "environment.json"
    facts = probe(Path.cwd()).model_copy(
        update={"load": 0.0}
    )  # workers stay threads of one, so that each part is seen alone
    machine = facts.model_dump(include={"cpu", "cores", "platform", "allocators", "glibc", "versions"})
    result: dict = {"machine": machine, "load": [os.getloadavg()], "tokens_per_second": {}}
    for vocab_size in VOCABULARIES:
        data = {"source": "python-stdlib", "sequence_length": 512, "tokenizer": {"vocab_size": vocab_size}}
        config = PipelineConfig.model_validate({"data": data, "model": MODEL, "environment": {"device": "cpu"}})
        plans = cases(config, facts)
        speeds: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(arguments.rounds):
            for name, plan in plans.items():
                speeds[name].append(trials.steps(config, plan, seconds=10.0, limit=LIMIT).tokens_per_second)
            result["load"].append(os.getloadavg())
            result["tokens_per_second"][str(vocab_size)] = speeds
            target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for name, values in speeds.items():
            ratios = [value / base for value, base in zip(values, speeds["tune: off"], strict=True)]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(
                f"{vocab_size:>6}  {name:<34} {statistics.median(values):8.0f} tokens/s  {middle:.2f}x ({low:.2f} – {high:.2f})"
            )


if __name__ == "__main__":
    main()
