"""Two environments, and whether a run that goes from one to the other stays bitwise the same."""

from typing import Literal

from infini_llama.configs.reading import JsonValue
from infini_llama.tasks.records.machine import MachineFacts
from infini_llama.tasks.records.plan import EnvironmentPlan, PinnedSettings
from infini_llama.tasks.records.record import Record

# Versions that determine how numbers are computed; the others only read data and report.
NUMERIC = ("torch", "numpy", "flash-attn", "triton")
Exactness = Literal["lost", "doubtful", "kept"]
Pair = tuple[str, JsonValue, JsonValue]
ORDER: tuple[Exactness, ...] = ("lost", "doubtful", "kept")


class Difference(Record):
    """What differs between two environments. exactness: whether the result stays bitwise the same."""

    name: str
    then: JsonValue
    now: JsonValue
    exactness: Exactness
    sentence: str


def differences(
    pinned: PinnedSettings, facts_then: MachineFacts, plan: EnvironmentPlan | None, facts: MachineFacts
) -> list[Difference]:
    """What differs between an earlier environment and this one, most harmful first.

    Args:
        plan: None compares the machines alone.
    """
    found = [] if plan is None else _of_settings(pinned, plan)
    for pair in _decisive(facts_then, facts):
        found.append(_difference(pair, "doubtful", "the result may no longer be bitwise the same"))
    for pair in _harmless(facts_then, facts):
        found.append(_difference(pair, "kept", "this does not touch the result"))
    return [one for one in found if one.then != one.now]


def _difference(pair: Pair, exactness: Exactness, sentence: str) -> Difference:
    return Difference(name=pair[0], then=pair[1], now=pair[2], exactness=exactness, sentence=sentence)


def _of_settings(pinned: PinnedSettings, plan: EnvironmentPlan) -> list[Difference]:
    then, now = pinned.to_json(), plan.to_json()
    same_ranks = pinned.world_size == plan.world_size  # only spread over machines otherwise
    return [
        _difference(
            (name, then[name], now[name]), "lost", f"the result is no longer bitwise the same ({field.description})"
        )
        for name, field in PinnedSettings.model_fields.items()
        if not (same_ranks and name in ("nproc_per_node", "nnodes"))
    ]


def _decisive(then: MachineFacts, now: MachineFacts) -> list[Pair]:
    return [
        ("python", then.python, now.python),
        ("the processor", then.cpu.model, now.cpu.model),
        ("the list of GPUs", _gpus(then), _gpus(now)),
        ("the driver", then.driver and then.driver.version, now.driver and now.driver.version),
        *((name, then.versions.get(name), now.versions.get(name)) for name in NUMERIC),
    ]


def _gpus(facts: MachineFacts) -> JsonValue:
    return [gpu.name for gpu in facts.gpus]


def _harmless(then: MachineFacts, now: MachineFacts) -> list[Pair]:
    others = sorted((set(then.versions) | set(now.versions)) - set(NUMERIC))
    return [
        ("host", then.host, now.host),
        ("platform", then.platform, now.platform),
        ("cores", then.cores, now.cores),
        ("memory in GiB", round(then.memory.total / 1024**3), round(now.memory.total / 1024**3)),
        *((name, then.versions.get(name), now.versions.get(name)) for name in others),
    ]
