# Sourced by the other scripts: where we are, and the environment every run of ours has.
#
# DeepSpeed builds a helper at its first start and a process that dies then leaves a lock on which
# every later start hangs without a word: TORCH_EXTENSIONS_DIR keeps that build private to this
# checkout, and scripts/setup.sh makes it once, in one process.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export TORCH_EXTENSIONS_DIR="$ROOT/.cache/torch_extensions"
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export PATH="$ROOT/.venv/bin:$PATH"
export VIRTUAL_ENV="$ROOT/.venv"
cd "$ROOT"

say() { printf '[%s] %s\n' "$(basename "$0")" "$*"; }
die() { printf '[%s] error: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
