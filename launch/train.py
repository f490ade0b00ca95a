"""Trains a causal language model with liger_dist.

    torchrun --standalone --nproc-per-node 2 launch/train.py run.yaml --steps 100
    python launch/train.py --model small --tokenizer my-tokenizer --data notes.txt

``--help`` lists every option.
"""

from __future__ import annotations

import sys


def main() -> None:
    # Here, not above: processes that tokenise import this file, and need nothing of it.
    from training.config import parse
    from training.distributed import start
    from training.run import train

    config = parse(sys.argv[1:])
    start()
    train(config)


if __name__ == "__main__":
    from training.fault_tolerance import run

    run(main)
