"""Read documents of any length with a frozen language model on bounded device memory."""

__version__ = "0.1.0"
