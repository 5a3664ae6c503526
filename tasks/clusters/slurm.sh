#!/bin/bash
# The batch script of one attempt, submitted by slurm.py: slurm.sh PYTHON ATTEMPT_DIR
# When the time is nearly up (USR1), the workers commit a checkpoint and the job goes back into the queue under its number. When
# somebody else asks (TERM), they commit one and the job ends. job-ended holds the exit code, for whoever watches.
set -u
python=$1 attempt=$2
asked=no again=no
step=
# shellcheck disable=SC2329    # the traps call it
stop() {
    asked=yes
    [ "$1" = cancel ] || again=yes
    pass_on
}
# To every process of the step: srun itself would take SIGTERM as an order to kill.
pass_on() {
    [ -z "$step" ] || scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap 'stop warning' USR1
trap 'stop cancel' TERM

ended() {
    echo "$1" >"$attempt/.job-ended.$SLURM_JOB_ID" && mv "$attempt/.job-ended.$SLURM_JOB_ID" "$attempt/job-ended"
    exit "$1"
}

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
"$python" -m infini_llama.tasks.clusters.restart "$attempt" "$SLURM_JOB_ID" || exit $?    # not this job's attempt: not its end either
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR NNODES="$SLURM_JOB_NUM_NODES"
# Every node's part ends by itself when another one's has ended; what srun returns is the highest exit code of all.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 "$python" -m infini_llama.tasks.clusters.node "$attempt" &
step=$!
[ "$asked" = no ] || pass_on    # asked before there was a step
while true; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break    # else a trap ended the wait, not the step
done
if [ "$code" = 75 ] && [ "$again" = yes ] && scontrol requeue "$SLURM_JOB_ID"; then
    exit 0
fi
ended "$code"
