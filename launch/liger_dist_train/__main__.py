"""``python -m liger_dist_train``: what torchrun can start."""

import sys

from .command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
