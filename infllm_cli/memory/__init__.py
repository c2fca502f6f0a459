"""The tiered context memory: sinks, local window, blocks in host memory, lookup.

Knows tensors; knows nothing of transformers, of documents or of the terminal.
"""
