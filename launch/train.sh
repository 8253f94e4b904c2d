#!/usr/bin/env bash
# Trains a recipe under an accelerate config, in the environment that is active: accelerate launch, but that signals
# reach training, and that its exit code comes back (75: start the same again).
#   ./launch/train.sh RECIPE.yaml ACCELERATE.yaml [options of accelerate launch --] [settings of the recipe]
#   ./launch/train.sh launch/configs/gsm8k_8gb.yaml accelerate_configs/zero2_offload.yaml --num_processes 2 -- --seed 1
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/arguments.sh
shift 2

options=()
for word in "$@"; do
    if [ "$word" = -- ]; then
        while [ "$1" != -- ]; do options+=("$1"); shift; done
        shift
        break
    fi
done
exec python -m grpo_math.train.ranks --config_file "$config" "${options[@]}" -m grpo_math.train --config "$recipe" "$@"
