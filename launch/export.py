"""Writes a checkpoint as safetensors that transformers loads.

    python launch/export.py runs/train                        # the newest complete checkpoint, into runs/train/exported
    python launch/export.py runs/train --step 2000 --dtype bfloat16 --to my-model

``AutoModelForCausalLM.from_pretrained`` and ``launch/train.py --model`` read what it writes. No GPU, one process; it
needs memory for the weights in fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from training.export import DTYPES, export
from training.fault_tolerance import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what --output_dir was")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, help="of the checkpoint; default: the newest complete one")
    chosen.add_argument("--best", action="store_true", help="the checkpoint with the lowest held-out loss")
    parser.add_argument("--to", type=Path, help="folder to make; default: exported, in the run's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights; default: %(default)s")
    options = parser.parse_args()
    to = options.to or options.run / "exported"
    step = export(options.run, to, step=options.step, best=options.best, dtype=options.dtype)
    print(f"written to {to}: step {step} of {options.run}, in {options.dtype}")


if __name__ == "__main__":
    run(main)
