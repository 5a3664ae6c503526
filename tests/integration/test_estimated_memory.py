"""`infini-llama estimate` against what the workers of a real run hold at most."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from support.laboratory import COMMAND, Laboratory, own_environment, workers_of

FEW = (
    "train.max_steps=12",
    "train.warmup_steps=2",
    "train.eval_steps=6",
    "train.save_steps=4",
    "train.sample_tokens=2",
)


def peaks(marker: str) -> dict[int, int]:
    """Highest resident set so far, in bytes, of each worker that lives now."""
    found = {}
    for pid in workers_of(marker):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[pid] = next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")),
            0,
        )
    return found


def measured(own, name, *overrides):
    started, highest = own.start(name, *overrides), {}
    while started.process.poll() is None:
        try:
            highest |= {
                pid: max(size, highest.get(pid, 0))
                for pid, size in peaks(started.marker).items()
            }
        except OSError:  # a worker that has just ended
            continue
        time.sleep(0.1)
    assert started.process.returncode == 0, started.log.read_text()
    return highest


def estimated(own, *overrides):
    words = [
        COMMAND,
        "estimate",
        str(own.config),
        f"runtime.home={own.home}",
        *overrides,
        "--json",
    ]
    result = subprocess.run(
        words,
        env=own_environment(own.home),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return json.loads(result.stdout)


def assert_near(own, name, workers, *overrides):
    settings = (
        f"environment.nproc_per_node={workers}",
        "environment.threads=1",
        *FEW,
        *overrides,
    )
    record, highest = estimated(own, *settings), measured(own, name, *settings)
    parameters = json.loads((own.run_dir(name) / "summary.json").read_text())[
        "parameters"
    ]
    assert parameters == record["parameters"]["total"]
    assert len(highest) == workers
    for size in highest.values():
        print(
            f"{name}: {size / 1e6:.1f} MB, estimated {record['memory']}: {record['memory']['total'] / size:.3f}"
        )
        assert 0.9 < record["memory"]["total"] / size < 1.1, (size, record["memory"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "workers"), [("tiny", 1), ("tiny", 2), ("tiny_infini", 1)]
)
def test_memory_of_the_tiny_presets(lab, preset, workers):
    own = Laboratory(lab.home, Path(f"configs/{preset}.yaml"))
    assert_near(own, f"estimate-{preset}-{workers}", workers)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
def test_memory_of_segments_that_see_the_one_before(lab, backend):
    own = Laboratory(lab.home, Path("configs/tiny_infini.yaml"))
    settings = (
        "model.attend_previous_segment=true",
        f"environment.attention_backend={backend}",
    )
    assert_near(own, f"estimate-before-{backend}", 1, *settings)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_memory_of_the_small_preset(lab, micro_batch):
    own = Laboratory(lab.home, Path("configs/small.yaml"))
    batch = (f"train.micro_batch_size={micro_batch}", "train.global_batch_size=4")
    # 50,304 are more than that text has.
    data = (
        "data.source=python-stdlib",
        "data.tokenizer.vocab_size=32000",
    )
    less = (
        "environment.device=cpu",
        "train.max_steps=3",
        "train.warmup_steps=1",
        "train.save_steps=2",
        "train.eval_tokens=1000",
    )
    assert_near(own, f"estimate-small-{micro_batch}", 1, *batch, *data, *less)
