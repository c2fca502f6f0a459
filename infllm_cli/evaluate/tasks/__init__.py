"""The tasks of `infllm eval`, one file per family."""
