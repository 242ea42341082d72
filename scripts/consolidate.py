#!/usr/bin/env python3
"""Whole tensors out of a sharded checkpoint: ``scripts/consolidate.py CHECKPOINT OUTPUT``.

The same as ``python -m sharded_ckpt consolidate``. Needs numpy only (and tensorstore for
``--to orbax``): neither a GPU, nor torch, nor deepspeed, nor an installed package.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "sharded_ckpt" / "__init__.py").is_file():
    sys.path.insert(0, str(ROOT))

from sharded_ckpt.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["consolidate", *sys.argv[1:]]))
