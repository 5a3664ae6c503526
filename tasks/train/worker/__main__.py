"""Entry of one rank.

Before anything heavy is imported: die with torchrun, and write to this rank's own log.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from infini_llama.configs.errors import ExitCode, PipelineError, error_message
from infini_llama.tasks.runs.exec_wrapper import LAUNCHER, die_with_parent


def log_to(path: Path) -> None:
    """Redirect everything this process prints, from any library, to `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> int:
    parent = int(os.environ.get(LAUNCHER, os.getppid()))
    die_with_parent(signal.SIGKILL, parent)
    attempt_dir = Path(sys.argv[1])
    # Without RANK, the patch `rendezvous` makes this worker the only one.
    rank = int(os.environ.get("RANK", "0"))
    log_to(attempt_dir / f"rank-{rank}.log")
    # Imported here: this takes a second, in which a rank that is stopped would outlive torchrun and
    # keep the run's lock.
    from infini_llama.tasks.records.status import RankError
    from infini_llama.tasks.runs.status import write_status

    try:
        from infini_llama.tasks.patch_environment.patches import apply
        from infini_llama.tasks.runs.run_folder import read_attempt_plan

        attempt = read_attempt_plan(attempt_dir)
        apply(attempt.plan.patches)
        from infini_llama.tasks.train.worker.rank import run_rank
    except Exception as error:
        logging.exception("rank %d cannot start", rank)
        code = (
            error.exit_code if isinstance(error, PipelineError) else ExitCode.UNEXPECTED
        )
        about = RankError(
            type=type(error).__name__,
            message=error_message(error),
            traceback=traceback.format_exc(),
        )
        write_status(attempt_dir, rank, "failed", code, error=about)
        return code
    return run_rank(attempt, attempt_dir, rank)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not `sys.exit`: what libraries do at the exit may wait for a network, as W&B's does.
    os._exit(code)
