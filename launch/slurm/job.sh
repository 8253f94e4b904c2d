# shellcheck shell=bash
# For the sbatch scripts to source, with the recipe and its settings: where a job's run lies, and how a job that was
# preempted goes on. Sets `run` (the settings that name the run), `port` (its own, so that two jobs can share a node)
# and `sent` (what goes to the vLLM server of the recipe: adapter or weights; none where it has no server), and exports
# the key of that server, which srun hands to every node in the environment.

run_dir=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
# shellcheck disable=SC2034
run=(--output_dir "$run_dir") # the same command goes on with what is there
# shellcheck disable=SC2034
port=$((20000 + SLURM_JOB_ID % 10000))
# shellcheck disable=SC2034
sent=$(grpo-math serve --check --config "$@")
export VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

# SLURM sends USR1 ten minutes before the job's time is up (#SBATCH --signal), and TERM before it preempts the job. It
# is passed on as USR1, since srun answers TERM by killing its tasks. Training finishes its step, saves, and ends with
# 75; the job then goes back into the queue, under the same number, so that the next start finds the checkpoint. A step
# that takes longer than that is lost: half a minute before the end the job goes back all the same.
asked='' training='' clock=''
stop() {
    [ -z "$asked" ] || return 0
    asked=yes
    [ -z "$training" ] || kill -USR1 "$training" || true
    { sleep 570 && scontrol requeue "$SLURM_JOB_ID"; } >/dev/null &
    clock=$!
}
trap stop TERM USR1

# Runs a command so that the trap above need not wait for it, ends the vLLM server after it, and the job with its code.
until_done() {
    local code=75
    if [ -z "$asked" ]; then
        "$@" &
        training=$!
        while kill -0 "$training" 2>/dev/null; do wait "$training" || true; done # a trap ends a wait
        code=0
        wait "$training" || code=$?
    fi
    [ -z "${server:-}" ] || kill "$server" || true
    [ -z "$clock" ] || kill "$clock" || true
    if [ "$code" = 75 ] || { [ -n "$asked" ] && [ "$code" != 0 ]; }; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
