#!/usr/bin/env bash
# The base model and what a run made of it, on the same problems: RUN_DIR/evaluation/base.json and trained.json, and the
# difference with its interval.
#   ./launch/evaluate.sh RUN_DIR DATA [options of grpo-math evaluate, for example --n 500 --samples 4 --temperature 0.6]
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
run=$1 data=$2
shift 2

field() { sed -n "s/^$1: *\([^ #]*\).*/\1/p" "$run/config.yaml"; }

base=$(field model_name_or_path)
trained=(--model "$run/model")
[ -d "$run/adapter" ] && trained=(--model "$base" --adapter "$run/adapter")
common=(--data "$data" --template "$(field template)" "$@")
mkdir -p "$run/evaluation"
grpo-math evaluate --model "$base" "${common[@]}" --output "$run/evaluation/base.json"
grpo-math evaluate "${trained[@]}" "${common[@]}" --output "$run/evaluation/trained.json"
grpo-math evaluate --compare "$run/evaluation/base.json" "$run/evaluation/trained.json"
