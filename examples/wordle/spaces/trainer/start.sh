#!/usr/bin/env bash
# The trainer, for those without a GPU at home; its reports are the Space's page.
#
#   CHANNEL      hf://buckets/OWNER/NAME, where it publishes                   (variable)
#   ENVIRONMENT  https://OWNER-NAME.hf.space of the environment                (variable)
#   REPLICAS     https://OWNER-NAME.hf.space of each engine, with spaces between (variable)
#   HF_TOKEN     may write to the bucket                                       (secret)
#   WORDLE_API_KEY  the API_KEY of the engines                                 (secret)
#   STEPS        how long to train                                             (variable)
#   STATE        a folder that survives a restart, such as /data with storage  (variable)
set -euo pipefail
: "${CHANNEL:?set it to the bucket, such as hf://buckets/me/wordle}"
: "${ENVIRONMENT:?set it to the address of the environment}"
: "${REPLICAS:?set it to the addresses of the engines}"
PORT=${PORT:-7860} STATE=${STATE:-$HOME/state}
mkdir -p "$STATE/page"

python -m http.server "$PORT" --directory "$STATE/page" >/dev/null 2>&1 &
# shellcheck disable=SC2086 # several addresses
python -m examples.wordle.trainer --channel "$CHANNEL" --environment "$ENVIRONMENT" --replicas $REPLICAS \
    --steps "${STEPS:-1000}" --state "$STATE/trainer.pt" 2>&1 | tee -a "$STATE/page/index.txt"
wait # the page stays
