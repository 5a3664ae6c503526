"""The nodes of an attempt, and the cluster's job that it may be."""

from typing import Literal

from infini_llama.tasks.records.record import Record


class NodeRecord(Record):
    """node-R.json of an attempt, written by the agent of node R.

    Attributes:
        pid: of the agent, on `machine`.
        address, port: of the rendezvous; only node 0 has them.
        waiting_for: what node 0 waits for, in sentences.
        fault: why this node does not reach node 0.
    """

    node: int
    host: str
    machine: str
    pid: int
    address: str = ""
    port: int = 0
    waiting_for: tuple[str, ...] = ()
    fault: str = ""


class SubmittedJob(Record):
    """submitted.json of an attempt: written before the job is submitted, so that no attempt has two.

    Attributes:
        job: Slurm's number; None: not known yet.
        context: of the kubeconfig; None: the current one.
        uid: of the JobSet; None: not known to be created.
    """

    launcher: Literal["slurm", "kubernetes"]
    name: str
    job: int | None = None
    namespace: str | None = None
    context: str | None = None
    uid: str | None = None
