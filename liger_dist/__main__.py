"""``python -m liger_dist``: what torchrun can start."""

import os
import sys

from .cli import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Threads of a process group may outlive it and abort the interpreter's shutdown; there is nothing left to do.
os._exit(status)
