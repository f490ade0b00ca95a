"""Trials: the code of models, modules and other packages runs on made-up values, to find out what it computes."""
