"""Writes the most likely tokens of a teacher for each token of the data, to distil from without the teacher.

    torchrun --standalone --nproc-per-node 8 launch/score.py --model teacher/ --data chats.jsonl
    torchrun --standalone --nproc-per-node 8 launch/train.py --model student/ --data runs/scores/data --top_k 64

Start it again to go on after the shards that are finished. ``--help`` lists every option.
"""

from __future__ import annotations

import sys


def main() -> None:
    # Here, not above: processes that tokenise import this file, and need nothing of it.
    from training.config import parse_as
    from training.distributed import start
    from training.scoring import ScoreConfig, score

    config = parse_as(sys.argv[1:], ScoreConfig)
    start()
    score(config)


if __name__ == "__main__":
    from training.fault_tolerance import run

    run(main)
