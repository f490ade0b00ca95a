"""``python -m liger_dist``: what torchrun can start."""

import sys

from .cli import main

sys.exit(main())
