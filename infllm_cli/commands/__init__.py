"""One file for each command or group of commands: parse, call, print.

Each has `add_to(app)`, which `infllm_cli.cli` calls. None imports torch at its top.
"""
