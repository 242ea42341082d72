"""Loads a consolidated model with transformers and compares its logits with the trained model's.

python examples/check_logits.py runs/demo runs/demo/model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory that train_gpt2.py wrote")
    parser.add_argument("model", type=Path, help="what `sharded_ckpt consolidate` made of it")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(args.run / "tokens.npy"))).logits.numpy()
    expected = np.load(args.run / "logits.npy")
    parameters = sum(p.numel() for p in model.parameters())
    if np.array_equal(logits, expected):
        print(f"{logits.size} logits of {parameters} parameters: all equal to the last bit")
        return 0
    print(f"logits differ by up to {np.abs(logits - expected).max():.3g}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
