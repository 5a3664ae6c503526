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
    """What a node of the cluster has, where it is another kind of machine than the one that starts the run. null: as that one."""

    cores: Annotated[int, Field(ge=1)] | None = Field(
        default=None, title="Cores", description="CPU cores that the workers of a node may use; null: as many as here."
    )
    memory: ByteSize | None = Field(
        default=None, title="Memory", description="Memory of a node, such as 512GiB; null: what is free here."
    )
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None, title="GPUs", description="GPUs of a node, all of one kind; null: those that are found here."
    )
    gpu_memory: ByteSize = Field(
        default=ByteSize(80 * 1024**3), title="GPU memory", description="Memory of each of environment.node.gpus."
    )
    gpu_capability: Annotated[str, Field(pattern=CAPABILITY)] = Field(
        default="9.0",
        title="GPU capability",
        description="CUDA's compute capability of environment.node.gpus: 8.0 for A100, 9.0 for H100; bf16 from 8.0 on.",
    )


class SlurmConfig(Section):
    """The job of environment.launcher=slurm. What is left out is the cluster's own default."""

    partition: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, title="Partition", description="Partition of the job; null: the cluster's default."
    )
    account: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, title="Account", description="Whom the job is charged to; null: the user's default account."
    )
    time_limit: Annotated[str, Field(pattern=SLURM_TIME)] | None = Field(
        default=None,
        title="Time limit",
        description="As sbatch takes it (minutes, hours:minutes:seconds, days-hours); before its end a checkpoint is committed and the job "
        "put back into the queue. null: the partition's.",
    )
    options: list[Annotated[str, Field(pattern=SBATCH_OPTION)]] = Field(
        default_factory=list,
        title="Other options",
        description="More options of sbatch, each written --name=value, such as --constraint=h100 or --exclusive.",
    )

    @field_validator("options")
    @classmethod
    def _leaves_the_launcher_its_own(cls, options: list[str]) -> list[str]:
        taken = [option for option in options if option.removeprefix("--").split("=")[0] in OF_THE_LAUNCHER]
        if taken:
            raise ValueError(
                f"environment.slurm.options holds {', '.join(taken)}, which the launcher sets itself; leave it out"
            )
        return options


class KubernetesConfig(Section):
    """The job of environment.launcher=kubernetes: a pod a node, which see the home folder on a shared volume."""

    context: str | None = Field(
        default=None,
        min_length=1,
        title="Context",
        description="Context of the kubeconfig; null: the current one, or inside a pod its own cluster.",
    )
    namespace: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None, title="Namespace", description="Where the job is created; null: the context's, or the pod's own."
    )
    image: Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]*$")] | None = Field(
        default=None,
        title="Image",
        description="Image of the workers, with the same infini-llama as here; needed for this launcher.",
    )
    service_account: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None, title="Service account", description="Of the pods; null: the namespace's default."
    )
    claim: Annotated[str, Field(pattern=LABEL)] | None = Field(
        default=None,
        title="Volume claim",
        description="PersistentVolumeClaim with the home folder, which many pods may write; needed for this launcher.",
    )
    mount_path: Annotated[str, Field(pattern=r"^/[^\n\r:]*$")] = Field(
        default="/state",
        title="Mount path",
        description="Where the volume is in the pods; runtime.home lies in it, under the same path here and there.",
    )
    cpu: Annotated[str, Field(pattern=QUANTITY)] | None = Field(
        default=None,
        title="CPUs",
        description="CPUs that each pod asks for, such as 8; null: one a thread of a worker.",
    )
    memory: Annotated[str, Field(pattern=QUANTITY)] | None = Field(
        default=None,
        title="Memory",
        description="Memory that each pod asks for and is limited to, such as 64Gi; null: no word about it.",
    )
    shared_memory: Annotated[str, Field(pattern=QUANTITY)] = Field(
        default="8Gi",
        title="Shared memory",
        description="Size of /dev/shm, which NCCL exchanges through; counts as memory.",
    )
    gpu_resource: Annotated[str, Field(pattern=LABEL_KEY)] = Field(
        default="nvidia.com/gpu",
        title="GPU resource",
        description="What a GPU is called there; each pod asks for one a worker where the run trains on GPUs.",
    )
    node_selector: dict[Annotated[str, Field(pattern=LABEL_KEY)], str] = Field(
        default_factory=dict, title="Node selector", description="Labels that a node must have to get a pod."
    )
    labels: dict[Annotated[str, Field(pattern=LABEL_KEY)], str] = Field(
        default_factory=dict,
        title="Labels",
        description="Labels of the job, such as Kueue's kueue.x-k8s.io/queue-name.",
    )
    env_from: list[Annotated[str, Field(pattern=LABEL)]] = Field(
        default_factory=list,
        title="Secrets",
        description="Names of Secrets whose entries become environment variables of the workers.",
    )
    keep: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        default=86400,
        title="Keep",
        description="Seconds for which a finished JobSet is kept.",
    )
