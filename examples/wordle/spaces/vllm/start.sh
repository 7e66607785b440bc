#!/usr/bin/env bash
# vLLM with the plug-in on an inner port, its agent, and a proxy in front. When one of them ends, all do.
#
#   CHANNEL     hf://buckets/OWNER/NAME, where the trainer publishes          (variable)
#   MODEL       the checkpoint that training began from                       (variable)
#   HF_TOKEN    may read the bucket, and write to it for heartbeats           (secret)
#   API_KEY     what trainers must send; without it anybody may ask           (secret)
#   EVERY       seconds between two polls of the bucket, 1 by default          (variable)
#   VLLM_ARGS   more arguments of vLLM                                        (variable)
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
: "${CHANNEL:?set it to the bucket, such as hf://buckets/me/wordle}"
: "${MODEL:?set it to the checkpoint that training began from}"
PORT=${PORT:-7860} INNER=${INNER:-8000} MIRROR=${MIRROR:-$HOME/mirror}
engine=http://127.0.0.1:$INNER

key=()
if [[ -n ${API_KEY:-} ]]; then key=(--api-key "$API_KEY"); fi
# shellcheck disable=SC2086 # several arguments
python -m vllm.entrypoints.openai.api_server --model "$MODEL" --host 127.0.0.1 --port "$INNER" \
    --served-model-name wordle "$MODEL" \
    --weight-transfer-config '{"backend": "weightcast"}' \
    --middleware weightcast_vllm.Middleware "${key[@]}" ${VLLM_ARGS:-} &
until curl --silent --fail --output /dev/null "$engine/health"; do
    kill -0 $! || exit 1
    sleep 1
done
weightcast attach "$CHANNEL" --engine "$engine" --mirror "$MIRROR" --every "${EVERY:-1}" --json &
python -m examples.wordle.spaces.proxy --engine "$engine" --port "$PORT" &
wait -n
exit 1
