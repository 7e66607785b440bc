#!/usr/bin/env bash
# The Wordle environment: sessions over WebSocket, and a page to play on. It needs no variable and no secret.
set -euo pipefail
exec python -m examples.wordle.environment --host 0.0.0.0 --port "${PORT:-7860}"
