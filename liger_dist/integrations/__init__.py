"""Integrations, one file per host framework. Each calls :func:`liger_dist.wrap` at the right point of its host; no
other module of liger_dist imports them."""
