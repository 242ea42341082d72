"""``python -m sharded_ckpt``."""

import sys

from sharded_ckpt.cli import main

sys.exit(main())
