# shellcheck shell=bash
# For the sbatch scripts to source, with the recipe: where a job's run lies, and how a job that was preempted goes on.
# Sets `run` (the settings that name and resume the run), `port` (its own, so that two jobs can share a node) and
# `has_server` (whether the recipe wants a vLLM server).

run_dir=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
run=(--output_dir "$run_dir")
if compgen -G "$run_dir/checkpoint-*" >/dev/null; then
    run+=(--resume_from_checkpoint true)
else
    rm -f "$run_dir/history.jsonl" # of a start that ended before its first checkpoint
fi
# shellcheck disable=SC2034
port=$((20000 + SLURM_JOB_ID % 10000))
# shellcheck disable=SC2034
has_server=$(sed -n 's/^vllm_mode: *server.*/yes/p' "$1")

# SLURM sends TERM before it preempts the job and before its time is up (#SBATCH --signal): back into the queue, under
# the same number, so that the next start finds the checkpoints.
trap 'scontrol requeue "$SLURM_JOB_ID"' TERM

# Runs a command so that the trap above need not wait for it; ends the vLLM server after it.
until_done() {
    local code=0
    "$@" &
    wait "$!" || code=$?
    [ -z "${server:-}" ] || kill "$server" || true
    exit "$code"
}
