# shellcheck shell=bash
# For the launch scripts to source, with their arguments: sets `recipe` and `config`, or ends with one line.
# shellcheck disable=SC2034
recipe=${1:-} config=${2:-}
if [ $# -lt 2 ]; then
    echo "error: two arguments are needed: RECIPE.yaml ACCELERATE.yaml, then options (docs/scaling.md)" >&2
elif [ ! -f "$recipe" ] && [ ! -f "launch/configs/$recipe.yaml" ]; then
    echo "error: recipe=$recipe is not a file: give the path of a recipe, or a name of grpo-math train --list" >&2
elif [ ! -f "$config" ]; then
    echo "error: config=$config is not a file: give an accelerate config, such as accelerate_configs/zero2.yaml" >&2
else
    return 0
fi
exit 2
