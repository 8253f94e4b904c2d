# shellcheck shell=bash
# For the sbatch scripts to source, with the recipe and its settings: where a job's run lies, and how a job ends or is
# queued again. Sets `run` (the settings that name the run), `port` (its own, so that two jobs can share a node) and
# `sent` (what is sent to the recipe's vLLM server: adapter or weights; none without a server), and exports the
# key of that server, which srun hands to every node in the environment.

run_dir=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
# shellcheck disable=SC2034
run=(--output_dir "$run_dir") # the same command resumes from the saved checkpoint
# shellcheck disable=SC2034
port=$((20000 + 3 * (SLURM_JOB_ID % 4000))) # and the next two, for its vLLM server and the transfer of weights
# shellcheck disable=SC2034
sent=$(grpo-math serve --check --config "$@")
[ "$sent" != weights ] || run+=(--vllm_group_port "$((port + 2))")
export VLLM_API_KEY=${VLLM_API_KEY:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

# SLURM sends USR1 ten minutes before the job's time is up (#SBATCH --signal). srun passes it on to training, which
# finishes its step, saves, and ends with 75. A step that takes longer is lost: half a minute before the end the job is
# queued again all the same. TERM comes with a preemption and with scancel. SLURM sends it to the tasks too.
asked='' training='' server='' clock=''
stop() {
    [ -z "$asked" ] || return 0
    asked=yes
    [ -z "$training" ] || kill -USR1 "$training" || true
    { sleep 570 && requeue; } >/dev/null &
    clock=$!
}
trap stop TERM USR1

# Queues the job again, under the same number, so that the next start finds the checkpoint. Once a job is COMPLETING,
# SLURM has decided: a preempted job comes back by itself, and one that was cancelled must not.
requeue() {
    case $(scontrol --oneliner show job "$SLURM_JOB_ID") in
    *" JobState=RUNNING "*) scontrol requeue "$SLURM_JOB_ID" ;;
    esac
}

# Trains with one task a node, ends the vLLM server after it, and ends the job with the code of training.
#   train_on NODES COUNT COMMAND ...      COMMAND runs on each node, with its number in SLURM_PROCID
train_on() {
    local nodes=$1 count=$2 code=75 stopped=75 attempts=slurm-$SLURM_JOB_ID.attempts
    shift 2
    codes=slurm-$SLURM_JOB_ID.codes # a file for each task, on the file system that all nodes share
    export codes
    rm -rf "$codes"
    mkdir -p "$codes"
    if [ -z "$asked" ]; then
        # srun does not take these over from sbatch. --export: after `sbatch --export=NONE`, srun hands on no variables.
        # --kill-on-bad-exit: the other nodes would wait for one that failed.
        srun --nodes="$count" --ntasks="$count" --nodelist="$nodes" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
            --export=ALL --label --kill-on-bad-exit bash launch/slurm/task.sh "$@" &
        training=$!
        while kill -0 "$training" 2>/dev/null; do
            # shellcheck disable=SC2086  # without a server there is one word
            wait -n "$training" $server || true # a trap ends a wait
            if [ -z "$server" ] || kill -0 "$server" 2>/dev/null; then continue; fi
            server=''
            # Training would wait half an hour for the server. SLURM ends both when it preempts or cancels the job.
            if [ -z "$asked" ]; then
                echo "error: the vLLM server has ended: see its lines above" >&2
                stopped=69
                kill -USR1 "$training" || true
            fi
        done
        code=0
        wait "$training" || code=$?
        code_of_tasks
        [ "$code" != 75 ] || code=$stopped
    fi
    rm -rf "$codes"
    [ -z "$server" ] || kill "$server" || true
    [ -z "$clock" ] || kill "$clock" || true
    case $code in
    0 | 1 | 2) [ -z "$asked" ] || [ "$code" = 0 ] || queue_unless_stuck ;;
    75) requeue ;;
    69 | 1[2-9]?) queue_unless_stuck ;; # a process, a machine or the vLLM server was lost
    esac
    [ "$code" != 0 ] || rm -f "$attempts"
    exit "$code"
}

# Sets `code` to what the tasks ended with: that of the first that failed, since srun ends the others because of it, else
# 69 (another rank, or the vLLM server, was lost), 75 (saved) or 0.
code_of_tasks() {
    local file task of_task node
    while read -r file; do
        read -r of_task node <"$file"
        task=${file##*/}
        case $of_task in
        0) ;;
        69) code=69 ;;
        75) [ "$code" = 69 ] || code=75 ;;
        *)
            code=$of_task
            echo "error: node $node ended with exit code $code: see the lines that begin with \"$task:\" in this log" >&2
            return
            ;;
        esac
    done < <(find "$codes" -type f -printf '%T@ %p\n' | sort -n | cut -d ' ' -f 2)
}

# Queues the job again, but not a third time without a new checkpoint.
queue_unless_stuck() {
    local newest
    newest=$(find "$run_dir" -maxdepth 1 -name 'checkpoint-*' 2>/dev/null | sort -V | tail -n 1) || true # no run yet
    echo "${newest##*/}" >>"$attempts"
    if [ "$(grep -cx -- "${newest##*/}" "$attempts")" -lt 2 ]; then
        requeue
    else
        echo "error: two attempts ended at the same step (${newest##*/}): the job is not queued again" >&2
    fi
}
