"""Fixtures of several files, and the group of tests that need the default model."""

from __future__ import annotations

import os

# Before anything imports Triton (transformers does), which decides there and then whether kernels
# are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # each has a core to itself, and so has what it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from forked import Server

from infllm_cli.models import catalog

# The user's own settings are none of the tests' business.
for _name in [name for name in os.environ if name.startswith("INFLLM_")]:
    del os.environ[_name]
# Nor is the size of a terminal that is not there; workers of xdist bring one.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
os.environ["XDG_CONFIG_HOME"] = os.devnull
# Most tests are about reading: only those of saved memories (`--save`) find what others have read.
os.environ["INFLLM_SAVE"] = "false"
# Nor is a sentence encoder fetched by a test that does not ask for one.
os.environ["INFLLM_ENCODER"] = "off"

torch.set_num_threads(1)  # tiny tensors: a second thread only waits for the first

WITHOUT_MODEL = pytest.StashKey[int]()


@pytest.fixture
def cache(tmp_path):
    """A cache folder that does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def server():
    """Runs the command in forks of one process that has imported everything."""
    server = Server()
    yield server
    server.close()


@pytest.hookimpl(trylast=True)  # after -m and -k: what they leave out is not ours to count
def pytest_collection_modifyitems(config, items):
    """Leave the model's tests out where it was not pulled; in CI they run, and fail."""
    needing = [item for item in items if item.get_closest_marker("model")]
    if not needing or os.environ.get("CI") == "true" or default_model_present():
        return
    items[:] = [item for item in items if not item.get_closest_marker("model")]
    config.hook.pytest_deselected(items=needing)
    config.stash[WITHOUT_MODEL] = len(needing)


def default_model_present() -> bool:
    """Whether the default model lies whole in the user's cache; nothing is loaded."""
    listed = catalog.installed(catalog.default_cache_dir())
    return any(model.name == catalog.DEFAULT_MODEL and model.present for model in listed)


def pytest_terminal_summary(terminalreporter, config):
    """Say how many tests were left out, and what brings them back."""
    left_out = config.stash.get(WITHOUT_MODEL, 0)
    if left_out:
        terminalreporter.write_line(
            f"{left_out} tests need the default model: run `infllm model pull`"
        )
