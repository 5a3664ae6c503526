"""Machines are plain facts, so plans for machines that are not here are tested like any other."""

import json

import pytest

from configs.errors import ConfigError
from configs.schema import PipelineConfig
from tasks.patch_environment.plan import judge, resolve
from tasks.patch_environment.probe import probe
from tasks.patch_environment.stage import patch_environment

GPU = {"name": "H100", "capability": [9, 0], "memory": 80 * 1024**3, "free": 79 * 1024**3, "bf16": True}
OLD_GPU = GPU | {"name": "T4", "capability": [7, 5], "bf16": False}


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    facts = probe(tmp_path_factory.mktemp("home"))
    return facts | {"cores": 8, "gpus": [], "nccl": False}


def config(environment=None, train=None) -> dict:
    sections = {"data": {"source": "python-stdlib"}, "environment": environment or {}, "train": train or {}}
    return PipelineConfig.model_validate(sections).model_dump(mode="json")


def test_a_machine_without_gpu_trains_on_all_its_cores(laptop):
    plan = resolve(config(), laptop)
    assert (plan["device"], plan["nproc_per_node"], plan["threads"]) == ("cpu", 1, 8)
    assert (plan["precision"], plan["distributed_backend"], plan["accumulation_steps"]) == ("fp32", "gloo", 4)
    assert plan["env"]["OMP_NUM_THREADS"] == "8"


def test_cores_are_shared_between_workers_and_never_none(laptop):
    assert resolve(config({"nproc_per_node": 2}), laptop)["threads"] == 4
    assert resolve(config({"nproc_per_node": 2}), laptop | {"cores": 1})["threads"] == 1


def test_four_gpus_get_a_worker_each_in_bf16(laptop):
    plan = resolve(config(), laptop | {"gpus": [GPU] * 4, "nccl": True, "flash_attn": False})
    assert (plan["device"], plan["nproc_per_node"], plan["precision"], plan["distributed_backend"]) == (
        "cuda",
        4,
        "bf16",
        "nccl",
    )
    assert plan["accumulation_steps"] == 1


def test_one_old_gpu_among_others_means_fp32(laptop):
    assert resolve(config(), laptop | {"gpus": [GPU, OLD_GPU], "nccl": True})["precision"] == "fp32"


def test_the_users_variables_win_over_the_plans(laptop):
    plan = resolve(config({"env": {"OMP_NUM_THREADS": "3", "MINE": "x"}}), laptop)
    assert plan["env"]["OMP_NUM_THREADS"] == "3" and plan["env"]["MINE"] == "x"


@pytest.mark.parametrize(
    ("environment", "gpus", "words"),
    [
        ({"device": "cuda"}, [], "environment.device=cuda"),
        ({"distributed_backend": "nccl"}, [], "environment.distributed_backend=nccl"),
        ({"precision": "bf16"}, [OLD_GPU], "environment.precision=bf16"),
        ({"nproc_per_node": 4, "device": "cuda"}, [GPU], "there are 1 GPU"),
    ],
)
def test_forced_and_impossible_is_an_error(laptop, environment, gpus, words):
    with pytest.raises(ConfigError, match="this machine cannot") as raised:
        resolve(config(environment), laptop | {"gpus": gpus, "nccl": bool(gpus)})
    assert words in str(raised.value)


def test_every_impossible_wish_is_named_at_once(laptop):
    with pytest.raises(ConfigError) as raised:
        resolve(config({"device": "cuda", "distributed_backend": "nccl"}), laptop)
    assert len(str(raised.value).splitlines()) == 3


def test_a_batch_that_the_workers_cannot_share_is_named(laptop):
    with pytest.raises(ConfigError, match="global_batch_size=8 is not a multiple"):
        resolve(
            config(train={"global_batch_size": 8, "micro_batch_size": 8}), laptop | {"gpus": [GPU] * 2, "nccl": True}
        )


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        ({"gpu_fault": "CUDA driver version is insufficient"}, "GPUs", "error"),
        ({"disk": {"path": "/x", "free": 1, "works": False, "fault": "Read-only file system"}}, "disk", "error"),
        ({"disk": {"path": "/x", "free": 10**9, "works": True}}, "disk", "warning"),
        ({"memory": {"total": 10**9, "available": 10**9}}, "memory available", "warning"),
        ({"shared_memory": 2**20, "gpus": [GPU], "flash_attn": True}, "/dev/shm", "warning"),
        ({"port": False}, "local ports", "error"),
    ],
)
def test_faults_are_found_and_explained(laptop, change, name, severity):
    (finding,) = [finding for finding in judge(laptop | change) if finding["name"] == name]
    assert finding["severity"] == severity and finding["sentence"].endswith((".", "insufficient"))


def test_flash_attention_that_cannot_be_imported_is_told_in_words(laptop):
    facts = laptop | {"gpus": [GPU], "flash_attn": False, "flash_attn_error": "ImportError: GLIBC_2.32 not found"}
    (finding,) = [finding for finding in judge(facts) if finding["name"] == "flash-attn"]
    assert "GLIBC_2.32" in finding["sentence"] and finding["severity"] == "note"


def test_the_plan_is_pinned_and_followed(tmp_path):
    first = patch_environment(config({"threads": 3}), str(tmp_path), "run")
    again = patch_environment(config(), str(tmp_path), "run")  # "auto" now, so the pin decides
    assert again["threads"] == first["threads"] == 3
    stored = json.loads((tmp_path / "runs/run/environment.json").read_text())
    assert stored["plan"]["threads"] == 3 and stored["facts"]["versions"]["torch"]


def test_leaving_the_pin_is_said_aloud(tmp_path, caplog):
    patch_environment(config({"threads": 1}), str(tmp_path), "run")
    caplog.clear()
    assert patch_environment(config({"threads": 2}), str(tmp_path), "run")["threads"] == 2
    assert "threads was 1 when the run began and is 2 now: the result is no longer bitwise the same" in caplog.text


def test_a_machine_that_cannot_follow_the_pin_says_so(tmp_path, caplog):
    patch_environment(config(), str(tmp_path), "run")
    path = tmp_path / "runs/run/environment.json"
    stored = json.loads(path.read_text())
    stored["plan"] |= {"device": "cuda"}
    path.write_text(json.dumps(stored))
    assert patch_environment(config(), str(tmp_path), "run")["device"] == "cpu"
    assert "cannot follow the plan" in caplog.text and "device was cuda" in caplog.text
