#!/usr/bin/env bash
# Runs the tests: the C++ ones under the sanitizers, then pytest.
#
#   scripts/test.sh                      everything but what is marked slow
#   scripts/test.sh --all                the slow ones too
#   scripts/test.sh tests/test_plan.py   only this (no sanitizers); other arguments go to pytest as well
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
scripts/setup.sh

args=()
partial=no
for arg in "$@"; do
  case $arg in
    --all) args+=(--slow) ;;
    *)
      args+=("$arg")
      case $arg in tests/* | *::*) partial=yes ;; esac
      ;;
  esac
done

python scripts/prebuild_deepspeed.py
if [ "$partial" = no ]; then
  say "C++ tests under the address and thread sanitizers"
  scripts/sanitize.sh
fi
say "pytest"
exec python -m pytest -q --durations=15 ${args[@]+"${args[@]}"}
