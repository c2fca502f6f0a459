"""Ways to keep a context: each is a `Layer` (see `infllm_cli.memory.layer`), chosen by name."""
