"""Measurements of the kernels on a GPU, beside bare GEMMs, a plain copy and other libraries."""
