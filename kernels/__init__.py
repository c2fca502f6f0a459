"""Array kernels: each beside its plain torch twin."""
