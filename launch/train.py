"""Trains a causal language model with liger_dist.

    torchrun --standalone --nproc-per-node 2 launch/train.py launch/demo.yaml --steps 100
    python launch/train.py --model small --data notes.txt

``--help`` lists every option.
"""

from __future__ import annotations

import sys

from training.arguments import parse
from training.ending import run
from training.loop import train
from training.process import start


def main() -> None:
    arguments = parse(sys.argv[1:])
    start()
    train(arguments)


if __name__ == "__main__":
    run(main)
