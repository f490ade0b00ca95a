"""Entry points for host frameworks, one file each, which call :func:`liger_dist.wrap` at the right point of the host.
No other module of liger_dist imports them."""
