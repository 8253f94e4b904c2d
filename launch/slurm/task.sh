#!/usr/bin/env bash
# What srun runs on each node: a command, whose exit code goes to a file that the batch script reads. srun ends all
# tasks when one of them fails. 75 (saved, start again) and 69 (a rank elsewhere was lost) are no failures of this node:
# another node may still be saving.
trap : TERM USR1 # SLURM sends them to the command too, and this shell waits for it
code=0
"$@" || code=$?
# shellcheck disable=SC2154  # job.sh exports it
echo "$code $SLURMD_NODENAME" >"$codes/$SLURM_PROCID"
case $code in
69 | 75) exit 0 ;;
*) exit "$code" ;;
esac
