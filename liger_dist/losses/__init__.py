"""Losses: autograd functions and functionals on local tensors, possibly over a process group."""
