"""One file per host framework. Each puts :func:`liger_dist.wrap` into the right place of its host; no other module of
liger_dist imports them."""
