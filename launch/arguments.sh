# shellcheck shell=bash
# For the launch scripts to source, with their arguments: sets `recipe` and `config`, or ends with one line.
# shellcheck disable=SC2034
recipe=${1:-} config=${2:-} wrong=
if [ $# -lt 2 ]; then
    wrong="two arguments are needed: RECIPE.yaml ACCELERATE.yaml, then options (docs/scaling.md)"
elif [ ! -f "$recipe" ] && [ ! -f "launch/configs/$recipe.yaml" ]; then
    wrong="recipe=$recipe is not a file: give the path of a recipe, or a name of grpo-math train --list"
elif [ ! -f "$config" ]; then
    wrong="config=$config is not a file: give an accelerate config, such as accelerate_configs/zero2.yaml"
fi
if [ -n "$wrong" ]; then
    echo "error: $wrong" >&2
    exit 2
fi
