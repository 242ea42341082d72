#!/usr/bin/env bash
# The main job on two processes: train GPT-2 under ZeRO-3, lose a rank to SIGKILL in the middle of a
# save, launch again, resume, finish, consolidate, and load the result with transformers.
#
#   scripts/demo.sh [directory]      by default runs/demo, which is emptied first
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
scripts/setup.sh

RUN=${1:-runs/demo}
STEPS=30
SAVE_EVERY=5
DIE_AT=15
RESUME_FROM=$((DIE_AT - SAVE_EVERY))
LAUNCH_TIMEOUT_S=240
# Only a directory that a demo made is emptied.
if [ -e "$RUN" ] && [ -n "$(ls -A "$RUN")" ]; then
  [ -f "$RUN/.demo" ] || die "$RUN exists and was not made by this script; give another directory"
  rm -rf -- "$RUN"
fi
mkdir -p "$RUN" && touch "$RUN/.demo"

train() {
  timeout --kill-after=10 "$LAUNCH_TIMEOUT_S" python -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc-per-node 2 examples/train_gpt2.py "$RUN" --steps "$STEPS" --save-every "$SAVE_EVERY" "$@"
}
export PYTHONWARNINGS=ignore::FutureWarning
# Shows what the ranks say, keeps what the launchers and libraries say for the case of a failure.
shown() { tee -a "$RUN/output.txt" | grep -E --line-buffered '^(step|rank|starting|resuming)' || true; }
title() { printf '\n=== %s\n' "$*"; }
started=$SECONDS

title "first launch: rank 1 dies while it saves step $DIE_AT"
if train --die-at "$DIE_AT" 2>&1 | shown; then
  die "the first launch ended well, although a rank should have died (see $RUN/output.txt)"
fi
grep -q '^rank 1: SIGKILL while it writes' "$RUN/output.txt" || {
  tail -40 "$RUN/output.txt" >&2
  die "the first launch failed before rank 1 killed itself"
}
echo "the launch failed, as it should; committed so far:"
python -m sharded_ckpt ls "$RUN/checkpoints"

title "second launch: resumes, and trains to step $STEPS"
train 2>&1 | shown || {
  tail -40 "$RUN/output.txt" >&2
  die "the second launch failed"
}
grep -q "^resuming after step $RESUME_FROM\$" "$RUN/output.txt" ||
  die "the second launch did not resume after step $RESUME_FROM"
python examples/compare_losses.py "$RUN"

title "what blocked and what overlapped"
python examples/timeline.py "$RUN"

title "offline: ls, verify, consolidate, from_pretrained"
python -m sharded_ckpt ls "$RUN/checkpoints"
python -m sharded_ckpt verify "$RUN/checkpoints"
python -m sharded_ckpt consolidate "$RUN/checkpoints" "$RUN/model" --copy-config "$RUN/config"
python examples/check_logits.py "$RUN" "$RUN/model"

say "took $((SECONDS - started)) s after set-up"
echo "demo passed"
