"""What Kubernetes is given for one attempt: a JobSet of one pod per node."""

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.schema.launchers import KubernetesConfig
from infini_llama.configs.secrets import MASK, masked
from infini_llama.tasks.records.plan import EnvironmentPlan

ENDING = 15  # seconds that a pod gets beyond the grace period, to end after its workers
ATTEMPT = "infini-llama/attempt"  # annotation: the folder of the attempt
NODE = "node"  # the job's name inside the JobSet, and the container's


def name_of(attempt_dir: Path) -> str:
    """The object's name: of run and attempt for people, and of their place, since others may have a run of that name.

    Short enough for a pod's name, which appends "-node-0-INDEX-xxxxx", and a service's, which begins with a letter.
    """
    run = re.sub(r"[^a-z0-9]+", "-", attempt_dir.parents[1].name.lower()).strip("-")[:20].strip("-")
    place = hashlib.sha256(str(attempt_dir.resolve()).encode()).hexdigest()[:8]
    return f"il-{run}-{attempt_dir.name.removeprefix('attempt-')}-{place}"


def manifest(
    attempt_dir: Path, section: KubernetesConfig, namespace: str, plan: EnvironmentPlan, grace_period: float
) -> dict[str, Any]:
    """The JobSet to create for an attempt: one indexed Job of as many pods as nodes.

    Args:
        section: environment.kubernetes.
        grace_period: seconds that workers may take to commit a checkpoint.

    Raises:
        ConfigError: the pods would not see the run, or everybody would see a secret.
    """
    _refuse(attempt_dir, section, plan)
    pod, nodes = pod_spec(attempt_dir, section, plan, grace_period), plan.nnodes
    annotations = {ATTEMPT: str(attempt_dir)}
    # A pod that fails ends the whole job: the training stage decides what follows.
    job = {"backoffLimit": 0, "completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    template = {"metadata": {"annotations": annotations}, "spec": pod}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name_of(attempt_dir),
            "namespace": namespace,
            "labels": section.labels | {"app.kubernetes.io/name": "infini-llama"},
            "annotations": annotations,
        },
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            # The first pod is found by its name before it is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "ttlSecondsAfterFinished": section.keep,
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job | {"template": template}}}],
        },
    }


def pod_spec(
    attempt_dir: Path, section: KubernetesConfig, plan: EnvironmentPlan, grace_period: float
) -> dict[str, Any]:
    """A node's pod. It runs as the user that this process runs as, since both write into the same folders."""
    name, user = name_of(attempt_dir), os.getuid()
    variables = plan.env | {
        "HOME": "/tmp",
        "PYTHONSAFEPATH": "1",
        "NNODES": str(plan.nnodes),
        "MASTER_ADDR": f"{name}-{NODE}-0-0.{name}",
    }
    if plan.port != "auto":
        variables["MASTER_PORT"] = str(plan.port)
    workers = plan.nproc_per_node
    requests = {"cpu": section.cpu or str(workers * plan.threads)}
    limits = {}
    if section.memory:
        requests["memory"] = limits["memory"] = section.memory
    if plan.device == "cuda":
        limits[section.gpu_resource] = str(workers)
    container = {
        "name": NODE,
        "image": section.image,
        "command": ["python", "-m", "infini_llama.tasks.clusters.node", str(attempt_dir)],
        "env": [{"name": key, "value": value} for key, value in sorted(variables.items())],
        "resources": {"requests": requests} | ({"limits": limits} if limits else {}),
        "volumeMounts": [
            {"name": "home", "mountPath": section.mount_path},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if section.env_from:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in section.env_from]
    spec = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(grace_period) + ENDING,
        "securityContext": {
            "runAsUser": user,
            "runAsGroup": os.getgid(),
            "fsGroup": os.getgid(),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "home", "persistentVolumeClaim": {"claimName": section.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": section.shared_memory}},
        ],
    }
    if section.service_account:
        spec["serviceAccountName"] = section.service_account
    return spec | ({"nodeSelector": section.node_selector} if section.node_selector else {})


def _refuse(attempt_dir: Path, section: KubernetesConfig, plan: EnvironmentPlan) -> None:
    if not attempt_dir.is_relative_to(section.mount_path):
        home = attempt_dir.parents[3]
        raise ConfigError(
            f"runtime.home={home} is not inside environment.kubernetes.mount_path={section.mount_path}, so the pods "
            "cannot access the run; mount the volume at the same path here and in the pods, and use a home folder "
            "inside it."
        )
    if secrets := [name for name, value in masked(plan.env).items() if value == MASK]:
        raise ConfigError(
            f"environment.env.{secrets[0]} may be a secret, and the JobSet would expose it; put it into a Secret and "
            "list that in environment.kubernetes.env_from."
        )
