"""Losses of tokens on tensors and process groups: autograd functions. Preference losses are their trainers'."""
