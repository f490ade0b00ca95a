"""One file for each host that people train in. Each puts :func:`liger_dist.wrap` in the host's one right place; nothing
else of liger_dist knows them, and none is imported unless asked for."""
