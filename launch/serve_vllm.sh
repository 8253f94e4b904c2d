#!/usr/bin/env bash
# A vLLM server for a recipe with `vllm_mode: server`: its model, with log-probs as TRL needs them. With a LoRA it takes
# adapters while it runs; otherwise it takes whole weights over NCCL. GRPO_MATH_VLLM names another vllm to run. Only this
# machine reaches it; another --host needs VLLM_API_KEY, without which whoever reaches it could change its weights. TRL's
# sync of whole weights knows no key: there it is a warning.
#   ./launch/serve_vllm.sh RECIPE.yaml [options of vllm serve, for example --port 8000 --tensor-parallel-size 2]
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
recipe=$1
shift

field() { sed -n "s/^$1: *\([^ #]*\).*/\1/p" "$recipe"; }

options=(--logprobs-mode processed_logprobs --max-logprobs -1)
if [ "$(field use_peft)" = true ]; then
    rank=$(field lora_r)
    for served in 8 16 32 64 128 256 320 512; do  # what vLLM takes
        if [ "${rank:-16}" -le "$served" ]; then break; fi
    done
    options+=(--enable-lora --max-lora-rank "$served")
    export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
else
    options+=(--weight-transfer-config '{"backend": "nccl"}')
fi
host=127.0.0.1
words=("$@")
for i in "${!words[@]}"; do
    case ${words[i]} in
    --host) host=${words[i + 1]:-} ;;
    --host=*) host=${words[i]#--host=} ;;
    esac
done
if [[ ! $host =~ ^(127\.0\.0\.1|localhost|::1)$ && -z ${VLLM_API_KEY:-} ]]; then
    if [ "$(field use_peft)" = true ]; then
        echo "error: --host $host lets other machines use the server: set VLLM_API_KEY in the environment" >&2
        exit 2
    fi
    echo "warning: --host $host lets whoever reaches it change the weights: only serve to a closed network" >&2
fi

export VLLM_SERVER_DEV_MODE=1
exec "${GRPO_MATH_VLLM:-vllm}" serve "$(field model_name_or_path)" --host 127.0.0.1 --dtype bfloat16 "${options[@]}" "$@"
