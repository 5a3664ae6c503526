"""The manifests of a job: valid by Kubernetes' own schema, with all that the nodes need to meet and to end in time."""

import os
from pathlib import Path

import kubernetes_validate
import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema import KubernetesConfig
from infini_llama.tasks.clusters.manifests import manifest, name_of
from infini_llama.tasks.records.plan import EnvironmentPlan
from support.records import make_plan

PLAN = make_plan(
    **{
        "env": {"OMP_NUM_THREADS": "1"},
        "nnodes": 2,
        "nproc_per_node": 8,
        "threads": 4,
        "device": "cuda",
        "port": 29500,
    }
)
ATTEMPT = Path("/state/runs/My_run.1/logs/attempt-07")
WISHES = {"image": "registry.example/infini-llama:1", "claim": "state", "memory": "64Gi", "service_account": "trainer"}


def made(plan: EnvironmentPlan = PLAN, attempt: Path = ATTEMPT, **changed) -> dict:
    settings = KubernetesConfig(**(WISHES | changed))
    return manifest(attempt, settings, "team", plan, 42.5)


def pod(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(container: dict) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


@pytest.mark.parametrize(
    "changed",
    [{}, {"env_from": ["wandb"], "node_selector": {"gpu": "h100"}}, {"memory": None, "service_account": None}],
)
def test_the_job_in_a_jobset_passes_kubernetes_own_schema(changed):
    jobset = made(**changed)
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}} | job
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_every_pod_is_told_where_the_first_one_is_and_has_time_for_its_checkpoint():
    spec, name = pod(made()), name_of(ATTEMPT)
    environment = variables(spec["containers"][0])
    assert (
        environment["MASTER_ADDR"] == f"{name}-node-0-0.{name}"
        and environment["NNODES"] == "2"
        and environment["MASTER_PORT"] == "29500"
    )
    assert spec["terminationGracePeriodSeconds"] >= 42.5 + 10
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert spec["containers"][0]["resources"]["requests"]["cpu"] == "32"
    assert spec["securityContext"]["runAsUser"] == os.getuid()


def test_names_are_short_and_of_one_place_only():
    long = Path("/state/runs") / ("A" * 100) / "logs" / "attempt-123"
    assert len(f"{name_of(long)}-node-0-65535-xxxxx") <= 63
    assert name_of(ATTEMPT) != name_of(Path("/other/runs/My_run.1/logs/attempt-07"))
    assert name_of(ATTEMPT).startswith("il-my-run-1-07-")


@pytest.mark.parametrize(
    ("plan", "changed", "words"),
    [
        (PLAN, {"mount_path": "/data"}, "is not inside environment.kubernetes.mount_path=/data"),
        (
            PLAN.model_copy(update={"env": {"WANDB_API_KEY": "abc", "NCCL_DEBUG": "INFO"}}),
            {},
            "environment.env.WANDB_API_KEY may be a secret",
        ),
    ],
)
def test_secrets_and_unusable_settings_of_pods_are_refused(plan, changed, words):
    with pytest.raises(ConfigError) as refused:
        made(plan, **changed)
    assert words in str(refused.value) and "abc" not in str(refused.value)
