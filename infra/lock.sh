#!/usr/bin/env bash
# Resolves infra/cpu.in into infra/cpu.lock. Run it again after changing pyproject.toml's
# dependencies; nothing else writes the lock.
#
# The CPU build of torch must be on an index that pip is configured for. Where it is not, name the
# CPU wheel index that PyTorch's installation page gives:  FP8RL_TORCH_INDEX=<url> infra/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/venv"
"$tools/venv/bin/pip" install --quiet uv

# uv does not read pip's configuration: pass on where pip looks for wheels.
sources=()
links="${PIP_FIND_LINKS:-} $(python3 -m pip config get global.find-links 2>/dev/null || true)"
for link in $links; do sources+=(--find-links "$link"); done
[ -n "${FP8RL_TORCH_INDEX:-}" ] && sources+=(--extra-index-url "$FP8RL_TORCH_INDEX" --index-strategy unsafe-best-match)

"$tools/venv/bin/uv" pip compile infra/cpu.in --override infra/cpu.overrides \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-emit-find-links --no-emit-index-url --no-emit-package fp8rl --no-annotate --no-header \
  --custom-compile-command infra/lock.sh "${sources[@]}" -o infra/cpu.lock "$@" > /dev/null
sed -i '1i # Written by infra/lock.sh from infra/cpu.in. Complete: install it with --no-deps.' infra/cpu.lock
echo "infra/cpu.lock: $(grep -c '==' infra/cpu.lock) packages"
