"""A job's own supervisor of its workers, since whoever submitted it may be on another machine, or gone.

    python -m infini_llama.tasks.clusters.job ATTEMPT_DIR

SIGTERM asks the workers for a checkpoint; one that hangs ends all of them, and its stacks are kept. One of several nodes is
left to `infini_llama.tasks.clusters.node`. The exit code is of docs/resume.md.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from infini_llama.tasks.clusters import node
from infini_llama.tasks.clusters.restart import superseded
from infini_llama.tasks.records.plan import EnvironmentPlan
from infini_llama.tasks.runs.outcome import classify
from infini_llama.tasks.runs.signals import debounced, hangup_as_termination
from infini_llama.tasks.runs.status import read_statuses
from infini_llama.tasks.storage.artifacts import write_atomic
from infini_llama.tasks.train import launch as local
from infini_llama.tasks.train.launcher import HUNG
from infini_llama.tasks.train.supervisor import Hung, Watch

POLL_SECONDS = 0.2
log = logging.getLogger("infini_llama.train")


class Asked(Exception):
    """This process was sent SIGTERM."""


def supervise(attempt_dir: Path) -> int:
    """Runs this node's workers of the attempt to their end; returns the exit code."""
    order = json.loads((attempt_dir / "order.json").read_text(encoding="utf-8"))
    plan, runtime = EnvironmentPlan.from_json(order["plan"]), order["config"]["runtime"]
    processes = plan.nproc_per_node
    # The job's environment has the plan's variables, those too that the order masks.
    command = local.torchrun(attempt_dir / "order.json", plan, local.rendezvous(plan.port))
    process = local.spawn(command, attempt_dir / "torchrun.log", {}, order["grace_period"], [], new_session=True)
    torchrun = local.Torchrun(process, attempt_dir, processes)
    ranks = Watch(attempt_dir, processes, runtime["hang_after"])
    try:
        while torchrun.poll() is None:
            ranks.poll()
            time.sleep(POLL_SECONDS)
    except Hung as hung:
        ranks.dump_stacks()
        write_atomic(attempt_dir / HUNG, str(hung))
        log.error("%s", hung)
        return 76
    except Asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.warning("stop requested; waiting up to %.0f s for a checkpoint", order["grace_period"])
        torchrun.stop(order["grace_period"])
    finally:
        torchrun.end()
    return classify(torchrun.process.returncode, read_statuses(attempt_dir, processes), str(attempt_dir)).code


def main() -> int:
    attempt_dir = Path(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if refused := superseded(attempt_dir):
        log.error("%s", refused)
        return 70
    number = os.environ.get("SLURM_NODEID", os.environ.get("JOB_COMPLETION_INDEX", "0"))
    if int(os.environ.get("NNODES", "1")) > 1:
        return node.main([str(attempt_dir), f"--node-rank={number}"])
    signal.signal(signal.SIGTERM, debounced(Asked))
    hangup_as_termination()
    return supervise(attempt_dir)


if __name__ == "__main__":
    sys.exit(main())
