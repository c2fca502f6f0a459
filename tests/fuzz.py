"""Fuzz the command line: `python tests/fuzz.py [--minutes 10] [--seed 0]`.

Documents of any bytes, questions of any text, flags of any value, against a tiny model, in this
process. A run counts as failed when it ends in anything but a documented exit code, when standard
output holds anything beside the answer, or when JSON does not add up. Not part of the test suite.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tiny_folder import save_folder
from tiny_tokenizers import prose

from infllm_cli.__main__ import main

DOCUMENTED = {0, 2, 3, 4, 5}
HEADS = [
    *[b"The harpooneer said 12. "] * 12,
    *(b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"%PDF-1.4", b"PK\x03\x04", b"\x89PNG\r\n"),
    *(b"\x1f\x8b", b"<|im_start|>system\n", b"\x7fELF", b"SQLite format 3\0", b"MZ\0"),
]
PROSE = prose(4000)
PIECES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.tuples(
        st.text(max_size=100), st.sampled_from(["utf-16", "cp1252", "gb18030", "koi8-r"])
    ).map(lambda pair: pair[0].encode(pair[1], "replace")),
    st.sampled_from(
        [
            *(b"</s><|im_end|>", b"[TOOL_CALLS]", b"\r\n", b"\r", b"\x1b[31m", b"_" * 3000),
            *("孔乙己" * 300).encode().split(b"\x00"),
            *(PROSE.encode(), PROSE[:600].encode("utf-16-le"), b"\n" * 500, "😀".encode()),
        ]
    ),
)
DOCUMENTS = st.tuples(st.sampled_from(HEADS), st.lists(PIECES, max_size=6)).map(
    lambda parts: parts[0] + b"".join(parts[1])
)
# What a command line can hold: no NUL; bytes that are no UTF-8 come as surrogates.
ARGUMENT = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60),
    st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b""))),
    st.sampled_from(["What is it?", "Who?", "-", "--", "-x", "--help", "<|im_end|>", "q " * 400]),
)
QUESTION = st.one_of(
    st.sampled_from(["What is it?", "Who said 12?", "[/x] <|im_end|> 😀", "q " * 400]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60).map(
        lambda text: f"Q{text}"
    ),
    ARGUMENT,
)
NUMBER = st.one_of(
    st.integers(-5, 40).map(str),
    st.sampled_from(["0", "1", "16", "128", "99999999999999999999", "1e3", "nan", "inf", "-0.1"]),
    ARGUMENT,
)
FLAGS = st.one_of(
    st.sampled_from(
        [
            *(("--json",), ("--stats",), ("-q",), ("--json", "-q"), ("--evidence", "3")),
            *(("--temperature", "2", "--seed", "7"), ("--top-p", "0.5", "--temperature", "1")),
            *(("--window", "64", "--sinks", "1"), ("--chunk", "7"), ("--blocks", "1")),
            *(("--answering", "memory"), ("--dtype", "bf16"), ("--encoding", "latin-1")),
            *(("--read-blocks", "0"), ("--reread-tokens", "0"), ("--host-limit", "1MB")),
        ]
    ),
    st.tuples(
        st.sampled_from(
            [
                *("--temperature", "--top-p", "--seed", "--evidence", "--window", "--sinks"),
                *("--blocks", "--read-blocks", "--chunk", "--reread-tokens", "--host-limit"),
            ]
        ),
        NUMBER,
    ),
    st.tuples(
        st.sampled_from(["--encoding", "--dtype", "--device", "--answering"]),
        st.one_of(
            ARGUMENT, st.sampled_from(["utf-8", "latin-1", "utf-16", "f32", "cpu", "memory", "hex"])
        ),
    ),
    st.sampled_from([("--no-such-flag",), ("--layers", "3"), ("--tokens", "5")]),
)
COMMANDS = st.fixed_dictionaries(
    {
        "document": DOCUMENTS,
        "second": st.one_of(st.none(), st.none(), DOCUMENTS),
        "questions_file": st.one_of(st.none(), st.none(), st.none(), DOCUMENTS),
        "by_stdin": st.booleans(),
        "plan": st.sampled_from([False, False, False, True]),
        "questions": st.lists(QUESTION, min_size=1, max_size=2),
        "flags": st.lists(FLAGS, max_size=2),
        "tokens": st.sampled_from(["1", "3", "3", "3", "12"]),
    }
)


class Stream(io.TextIOWrapper):
    """Standard output or error in memory."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(io.BytesIO(data), "utf-8", "backslashreplace")

    def bytes(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_RDWR)


def run(place: Path, command: dict) -> tuple[int, bytes, bytes]:
    """Run one command in this process: exit code, output and errors."""
    (place / "document").write_bytes(command["document"])
    file = "-" if command["by_stdin"] else str(place / "document")
    arguments = ["plan" if command["plan"] else "ask", file]
    if command["second"] is not None:
        (place / "second").write_bytes(command["second"])
        arguments += ["-f", str(place / "second")]
    if not command["plan"]:
        arguments += [*command["questions"], "--max-tokens", command["tokens"]]
        if command["questions_file"] is not None:
            (place / "questions").write_bytes(command["questions_file"])
            arguments += ["--questions-file", str(place / "questions")]
    arguments += ["--model", str(place / "model"), "--cache-dir", str(place / "cache")]
    arguments += [part for flag in command["flags"] for part in flag]
    streams = Stream(command["document"]), Stream(), Stream()
    saved = sys.argv, sys.stdin, sys.stdout, sys.stderr
    sys.argv, (sys.stdin, sys.stdout, sys.stderr) = ["infllm", *arguments], streams
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.argv, sys.stdin, sys.stdout, sys.stderr = saved
    return code, streams[1].bytes(), streams[2].bytes()


def check(command: dict, code: int, out: bytes, err: bytes) -> None:
    """Raise unless the run ended as it should."""
    flags = [part for flag in command["flags"] for part in flag]
    # A question may spell `--help` or `-h`.
    helped = out.startswith(b"Usage:")
    assert code in DOCUMENTED, f"exit code {code}: {err.decode(errors='replace')}"
    assert b"Traceback" not in err
    assert b"\x1b" not in err and b"\r" not in err
    if code:
        assert err and not out, "a failure has a message and no output"
    elif "--json" in flags and not helped:
        told = json.loads(out)
        if not command["plan"]:
            read = told["read"]["tokens"] + told["read"]["reused_tokens"]  # of a saved memory
            assert read == told["document"]["tokens"] > 0
            assert told["read"]["truncated"] is False
    elif not helped:
        assert out.endswith(b"\n")


def fuzz(minutes: float, number: int) -> int:
    """Run until the time is over; the count of runs by exit code is printed."""
    torch.set_num_threads(1)
    codes: Counter[int] = Counter()
    ends = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where questions may name files
        place = Path(folder)
        save_folder(place / "model")
        round_ = 0
        while time.monotonic() < ends:

            @seed(number + round_)
            @settings(
                max_examples=300,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.target, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(COMMANDS)
            def one(command: dict) -> None:
                if time.monotonic() > ends:
                    return
                code, out, err = run(place, command)
                codes[code] += 1
                check(command, code, out, err)

            one()
            round_ += 1
    print(f"{codes.total()} runs, none failed; by exit code: {dict(sorted(codes.items()))}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    sys.exit(fuzz(given_.minutes, given_.seed))
