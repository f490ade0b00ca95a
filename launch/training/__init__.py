"""The parts of ``launch/train.py``; copy the folder and start from it."""
