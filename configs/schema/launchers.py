"""What a cluster is asked for, where the workers run as a job of one."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field, field_validator

from infini_llama.configs.schema.section import Section

# Slurm's own word for a partition, an account: https://slurm.schedmd.com/sbatch.html
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.,@-]*$"
SLURM_TIME = r"^(\d+-\d+(:\d\d){0,2}|\d+(:\d\d){0,2})$"
SBATCH_OPTION = r"^--[a-z][a-z0-9-]*(=[^\n\r]*)?$"
# An object's name (RFC 1123 label), and an amount (https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity).
LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
CAPABILITY = r"^\d{1,2}\.\d$"
LABEL_KEY = r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
# Decided by the launcher, because it relies on them.
OF_THE_LAUNCHER = {
    "array",
    "chdir",
    "comment",
    "error",
    "export",
    "job-name",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
}


class NodeConfig(Section):
    """Resources of a cluster node, if it differs from the machine that starts the run. null: as on this machine."""

    cores: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        title="Cores",
        description="CPU cores of a node that workers can use. null: as on this machine.",
    )
    memory: ByteSize | None = Field(
        default=None,
        title="Memory",
        description="Memory of a node, for example 512GiB. null: the free memory of this machine.",
    )
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None, title="GPUs", description="Number of GPUs per node, all of one model. null: as on this machine."
    )
    gpu_memory: ByteSize = Field(default=ByteSize(80 * 1024**3), title="GPU memory", description="Memory of each GPU.")
    gpu_capability: Annotated[str, Field(pattern=CAPABILITY)] = Field(
        default="9.0",
        title="GPU capability",
        description="CUDA compute capability of the GPUs: 8.0 for A100, 9.0 for H100. bf16 needs 8.0.",
    )


class SlurmConfig(Section):
    """Job settings for `environment.launcher: slurm`. Keys that are left out have the cluster's default."""

    partition: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, title="Partition", description="Partition of the job. null: the cluster's default."
    )
    account: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, title="Account", description="Account that the job is charged to. null: the user's default."
    )
    time_limit: Annotated[str, Field(pattern=SLURM_TIME)] | None = Field(
        default=None,
        title="Time limit",
        description="Time limit in sbatch's format (minutes, hours:minutes:seconds, days-hours). Before it is "
        "reached, a checkpoint is committed and the job is requeued. null: the partition's limit.",
    )
    options: list[Annotated[str, Field(pattern=SBATCH_OPTION)]] = Field(
        default_factory=list,
        title="Other options",
        description="Further sbatch options, each as --name=value, for example --constraint=h100 or --exclusive.",
    )

    @field_validator("options")
    @classmethod
    def _leaves_the_launcher_its_own(cls, options: list[str]) -> list[str]:
        taken = [option for option in options if option.removeprefix("--").split("=")[0] in OF_THE_LAUNCHER]
        if taken:
            raise ValueError(
                f"environment.slurm.options contains {', '.join(taken)}, which the launcher sets itself; remove it"
            )
        return options


class KubernetesConfig(Section):
    """Job settings for `environment.launcher: kubernetes`: one pod per node, with the home folder on a shared volume."""

    context: str | None = Field(
        default=None,
        min_length=1,
        title="Context",
        description="Context in the kubeconfig. null: the current context; in a pod, the pod's own cluster.",
    )
    namespace: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None, title="Namespace", description="Namespace of the job. null: the namespace of the context or pod."
    )
    image: Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]*$")] | None = Field(
        default=None,
        title="Image",
        description="Container image of the workers, with the same version of infini-llama as this command. Required.",
    )
    service_account: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None, title="Service account", description="Service account of the pods. null: the namespace's default."
    )
    claim: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None,
        title="Volume claim",
        description="PersistentVolumeClaim (ReadWriteMany) with the home folder. Required.",
    )
    mount_path: Annotated[str, Field(pattern=r"^/[^\n\r:]*$")] = Field(
        default="/state",
        title="Mount path",
        description="Mount path of the volume. runtime.home must be inside it, at the same path here and in the pods.",
    )
    cpu: Annotated[str, Field(pattern=QUANTITY)] | None = Field(
        default=None,
        title="CPUs",
        description="CPU request per pod, for example 8. null: one per worker thread.",
    )
    memory: Annotated[str, Field(pattern=QUANTITY)] | None = Field(
        default=None,
        title="Memory",
        description="Memory request and limit per pod, for example 64Gi. null: neither.",
    )
    shared_memory: Annotated[str, Field(pattern=QUANTITY)] = Field(
        default="8Gi",
        title="Shared memory",
        description="Size of /dev/shm, which NCCL uses. It counts towards the pod's memory.",
    )
    gpu_resource: Annotated[str, Field(pattern=LABEL_KEY)] = Field(
        default="nvidia.com/gpu",
        title="GPU resource",
        description="Resource name of a GPU. For training on GPUs, each pod requests one per worker.",
    )
    node_selector: dict[Annotated[str, Field(pattern=LABEL_KEY)], str] = Field(
        default_factory=dict, title="Node selector", description="Labels that a cluster node must have to run the pods."
    )
    labels: dict[Annotated[str, Field(pattern=LABEL_KEY)], str] = Field(
        default_factory=dict,
        title="Labels",
        description="Labels of the job, for example Kueue's kueue.x-k8s.io/queue-name.",
    )
    env_from: list[Annotated[str, Field(pattern=LABEL)]] = Field(
        default_factory=list,
        title="Secrets",
        description="Names of Secrets whose entries become environment variables of the workers.",
    )
    keep: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        default=86400,
        title="Keep",
        description="Seconds that a finished JobSet is kept.",
    )
