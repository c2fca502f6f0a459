"""Loading a model without torch's compiler: the same numbers, and nothing that stays changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_folder import save_folder

CODE = """
import json, sys, torch
from pathlib import Path
from infllm_cli.models import lean_import
from infllm_cli.models.loading import load_model
how, folder = sys.argv[1], Path(sys.argv[2])
if how != "usual":
    lean_import.want()
if how == "refused":
    def missing(module, name):
        raise AttributeError(name)
    lean_import._Stub.__getattr__ = missing
available = torch.distributed.is_available
loaded = load_model(folder, "tiny", dtype="f32")
compiler = "torch._dynamo" in sys.modules
ids = torch.arange(24)[None]
again = load_model(folder, "tiny", dtype="f32")
from infllm_cli.attention import MemoryCall
from infllm_cli.reader import Reader
from infllm_cli.document import decode_document
logits = []
for model in (loaded, again):
    reader = Reader(model)
    memory = reader.read(decode_document(b"The lamp was lit by the boat. " * 40, "text"))
    logits.append(reader.ask(memory, "Who lit the lamp?").text)
same = torch.distributed.is_available is available and "_dynamo" not in vars(torch)
double = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(3)).tolist()
print(json.dumps([compiler, logits, same, double, "torch._dynamo" in sys.modules]))
"""


def outcome(how: str, folder) -> list:
    run = subprocess.run(
        [sys.executable, "-c", CODE, how, folder], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("how", ["lean", "refused"])
def test_a_model_answers_the_same_and_a_compiler_can_be_used_afterwards(tmp_path, how):
    folder = save_folder(tmp_path / "model")
    usual = outcome("usual", folder)
    assert usual[0], "then there is nothing to leave out"
    compiler, answers, same, double, later = outcome(how, folder)
    assert compiler == (how == "refused")  # where a version does not come along, it is imported
    assert answers == usual[1] and answers[0] == answers[1]
    assert same or how == "refused"
    assert double == [2.0, 2.0, 2.0] and later
