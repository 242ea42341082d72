#!/usr/bin/env bash
# Everything that can be said about the code without running it, in seconds. CI calls this too.
#
#   scripts/check.sh            check
#   scripts/check.sh --fix      format, and fix what the linter can
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[ -x .venv/bin/ruff ] || die "run scripts/setup.sh first"

shopt -s nullglob
native=(csrc/*.cc csrc/*.h tests/cpp/*.cc tests/cpp/*.h)
if [ "${1:-}" = --fix ]; then
  ruff check --fix-only --quiet .
  ruff format --quiet .
  [ ${#native[@]} -eq 0 ] || clang-format -i "${native[@]}"
  say "formatted"
fi

failed=()
step() {
  local name=$1
  shift
  if "$@"; then say "$name: ok"; else
    say "$name: FAILED"
    failed+=("$name")
  fi
}
step "ruff format" ruff format --check .
step "ruff check" ruff check --quiet .
step "mypy --strict" mypy --strict sharded_ckpt
[ ${#native[@]} -eq 0 ] || step "clang-format" clang-format --dry-run -Werror "${native[@]}"
shell_syntax() { for script in scripts/*.sh .ci/run; do bash -n "$script" || return 1; done; }
step "shell syntax" shell_syntax
step "house rules" python -m pytest -q -p no:cacheprovider tests/test_house.py
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]} (scripts/check.sh --fix repairs formatting)"
