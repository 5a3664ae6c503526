"""From a run's weights to another run: exported, imported with Infini-attention in their place, killed and carried on."""

import json

import pytest
import yaml

from support.laboratory import COMMAND, Laboratory, own_environment


def command(lab, log, *words):
    environment = own_environment(lab.home)
    assert lab.server.run([COMMAND, *words, "--json"], environment, log) == 0, (
        log.read_text()
    )
    assert json.loads(log.read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def starting(lab, calm_softmax_2, tmp_path_factory):
    """A laboratory whose configuration starts from an exported run; that run's summary."""
    summary = lab.summary(calm_softmax_2)
    folder = tmp_path_factory.mktemp("hf")
    command(
        lab, folder / "log", "export", summary["run"], "--output", str(folder / "model")
    )
    written = folder / "start.yaml"
    command(
        lab,
        folder / "log",
        "import",
        str(folder / "model"),
        "--output",
        str(written),
        "--attention",
        "infini",
        "--segment-length",
        "8",
    )
    config, first = (
        yaml.safe_load(written.read_text()),
        yaml.safe_load(lab.config.read_text()),
    )
    first["model"] = config["model"]
    first["train"] |= {
        "init_from": config["train"]["init_from"],
        "max_steps": 24,
        "learning_rate": 1e-4,
        "save_steps": 8,
    }
    written.write_text(yaml.safe_dump(first))
    return Laboratory(lab.home, written, lab.server), summary


RETROFIT = (
    "model.memory_layers=[1]",
    "model.memory_maps=true",
    "model.attend_previous_segment=true",
    "train.init_gate=[[1, -9, 0, 2]]",
    "train.frozen_layers=1",
)
MEMORY = (
    *RETROFIT[:4],
    "train.frozen_layers=all_but_memory",
    "train.optimizer=muon",
    "environment.nproc_per_node=2",
)
SHARDED = (
    *RETROFIT,
    "train.parallel=fsdp",
    "environment.nproc_per_node=2",
    "train.micro_batch_size=1",
)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            "started", ("environment.nproc_per_node=1",), marks=pytest.mark.slow
        ),
        ("retrofit", (*RETROFIT, "environment.nproc_per_node=1")),
        ("memory", (*MEMORY, "train.micro_batch_size=1")),
        pytest.param("sharded", SHARDED, marks=pytest.mark.slow),
        pytest.param(
            "sharded-memory",
            (*SHARDED[:4], *SHARDED[5:], MEMORY[4]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_and_resumed_from_imported_weights_is_bitwise(starting, name, settings):
    own, before = starting
    own.finish(name, *settings)
    own.kill_at(11, f"{name}-killed", *settings)  # past the first checkpoint
    own.finish(f"{name}-killed", *settings)
    own.assert_same(f"{name}-killed", name)
    assert own.lineage(name)["init_from"]["digest"].startswith("blake3:")
    assert (
        "started from"
        in next(own.run_dir(name).glob("logs/attempt-01/rank-0.log")).read_text()
    )
    first_loss = own.metrics(name)[0]["loss"]
    assert first_loss < before["train_loss"] + 1.0, (
        "a fresh model of this vocabulary begins at 6.2 nats"
    )
