"""The templates of one run on a cluster: valid by the schemas of their kinds, and starting what a node understands."""

import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from infini_llama.configs.errors import ENDINGS
from infini_llama.configs.loading import parse_config

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
SCHEMAS = ROOT / "tests" / "support" / "schemas"
DOCUMENTS = {
    document["kind"]: document
    for path in K8S.glob("train-*.yaml")
    for document in yaml.safe_load_all(path.read_text())
}
VALUES = {
    "image": "infini-llama:1",
    "cpu": "8",
    "memory": "1Gi",
    "gpus": "1",
    "claim": "state",
}


def job_of(document: dict) -> dict:
    """The Job of the nodes that a JobSet, or a runtime of TrainJobs, contains."""
    spec = (
        document["spec"]["template"]["spec"]
        if document["kind"] == "TrainingRuntime"
        else document["spec"]
    )
    (job,) = spec["replicatedJobs"]
    return job["template"]["spec"]


def pods() -> dict[str, dict]:
    found = {
        kind: job_of(DOCUMENTS[kind])["template"]["spec"]
        for kind in ("JobSet", "TrainingRuntime")
    }
    template = (K8S / "work-pool.json").read_text()
    for name, value in VALUES.items():
        template = template.replace(f"{{{{ {name} }}}}", value)
    manifest = json.loads(template)["job_configuration"]["job_manifest"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    assert (container["args"], container["env"]) == ("{{ command }}", "{{ env }}")
    container |= {"args": ["true"], "env": []}
    return found | {"work pool": manifest["spec"]["template"]["spec"]}


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime"])
def test_pods_start_again_after_every_code_but_final_ones(kind):
    final = {int(code) for code, ending in ENDINGS.items() if not ending.should_requeue}
    job = job_of(DOCUMENTS[kind])
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule["action"] == "FailJob" and codes["operator"] == "In"
    assert codes["containerName"] == container["name"] and set(
        codes["values"]
    ) == final - {0}


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "TrainingRuntime"])
def test_a_template_is_valid_by_the_schema_of_its_kind(kind):
    schema = json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())
    jsonschema.validate(DOCUMENTS[kind], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            DOCUMENTS[kind] | {"spec": DOCUMENTS[kind]["spec"] | {"nodes": 2}}, schema
        )


def test_the_pods_of_all_templates_are_valid_and_keep_a_checkpoint_s_time():
    for pod in pods().values():
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "one"},
            "spec": {"template": {"spec": pod}},
        }
        kubernetes_validate.validate(
            job, kubernetes_validate.latest_version(), strict=True
        )
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] >= 180
        assert any(
            mount["mountPath"] == "/dev/shm"
            for mount in pod["containers"][0]["volumeMounts"]
        )


def test_the_nodes_of_a_jobset_know_their_number():
    """And their rank by their index: test_schedulers.py."""
    job = job_of(DOCUMENTS["JobSet"])
    command = job["template"]["spec"]["containers"][0]["command"]
    nodes = int(
        next(
            word for word in command if word.startswith("environment.nnodes=")
        ).partition("=")[2]
    )
    assert (
        job["completionMode"] == "Indexed"
        and job["completions"] == job["parallelism"] == nodes
    )


def test_commands_of_the_templates_are_those_of_this_version():
    for kind in ("JobSet", "TrainingRuntime"):
        command = job_of(DOCUMENTS[kind])["template"]["spec"]["containers"][0][
            "command"
        ]
        settings = {
            word.partition("=")[0].split(".")[1]: word.partition("=")[2]
            for word in command
            if "runtime." in word
        }
        parse_config({"data": {"source": "python-stdlib"}, "runtime": settings})
        assert command[:2] == ["infini-llama", "run"]


def test_every_variable_of_the_work_pool_is_used_and_defined():
    text = (K8S / "work-pool.json").read_text()
    used = set(re.findall(r"\{\{ (\w+) \}\}", text))
    assert used == set(json.loads(text)["variables"]["properties"])
