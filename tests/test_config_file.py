"""The user's own defaults, and what they give way to."""

from __future__ import annotations

import sys

import pytest
import typer

from infllm_cli import cli, config_file
from infllm_cli.__main__ import main
from infllm_cli.config_file import SETTINGS, load_config
from infllm_cli.errors import UsageError


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the file; each test has a configuration folder of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "infllm" / "config.toml"

    def write(text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `infllm ask` would run with these arguments."""
    import infllm_cli.ask

    (tmp_path / "book.txt").write_text("text")
    requests = []
    monkeypatch.setattr(infllm_cli.ask, "run_ask", lambda request, *_: requests.append(request))

    def ask(*arguments):
        requests.clear()
        monkeypatch.setattr(sys, "argv", ["infllm", "ask"])  # what the help flag is looked for in
        cli.app(["ask", str(tmp_path / "book.txt"), "What?", *arguments], standalone_mode=False)
        return requests[0]

    return ask


def test_every_setting_has_a_flag_and_an_environment_variable_and_no_other_flag_has():
    flags = {}
    group = typer.main.get_command(cli.app)
    for command in group.commands.values():
        for one in getattr(command, "commands", {"": command}).values():
            for parameter in one.params:
                if getattr(parameter, "envvar", None):
                    name = max(parameter.opts, key=len).removeprefix("--")
                    flags[name] = parameter.envvar
    assert flags.keys() == SETTINGS.keys()
    for name, variable in flags.items():
        assert variable == f"INFLLM_{name.replace('-', '_').upper()}"


def test_flag_environment_file_default_in_this_order(config, asked, monkeypatch):
    assert asked().options.max_tokens == 256
    config(
        "store = 'full'\nmax-tokens = 11\ndtype = 'f32'\ntemperature = 1\n"
        "cache-dir = '~/models'\nwindow = 99"
    )
    request = asked()
    assert (request.options.max_tokens, request.options.temperature) == (11, 1.0)
    assert request.model.dtype.value == "f32"
    assert (request.sizes.window, request.sizes.store.value) == (99, "full")
    assert "~" not in str(request.model.cache_dir) and request.model.cache_dir.name == "models"
    monkeypatch.setenv("INFLLM_MAX_TOKENS", "22")
    assert asked().options.max_tokens == 22
    assert asked("--max-tokens", "33").options.max_tokens == 33
    assert asked("--dtype", "bf16").model.dtype.value == "bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle = 'x'", "unknown key 'modle'; did you mean 'model'"),
        ("[ask]\nmodel = 'x'", "unknown key 'ask'; known keys: model"),
        ("encoding = 'utf-8'", "unknown key 'encoding'"),
        ("max-tokens = 'many'", "max-tokens is 'many'; it must be a whole number"),
        ("max-tokens = true", "max-tokens is True; it must be a whole number"),
        ("max-tokens = 1.5", "max-tokens is 1.5"),
        ("model = 3", "model is 3; it must be a string"),
        ("quiet = 1", "quiet is 1; it must be true or false"),
        ("temperature = false", "temperature is False; it must be a number"),
        ("dtype = 'f64'", "dtype is 'f64'; choose auto, bf16, f16, f32"),
        ("max-tokens 3", "not valid TOML"),
        ("model = 'a'\nmodel = 'b'", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_key(config, monkeypatch, capsys, text, says):
    path = config(text)
    monkeypatch.setattr(sys, "argv", ["infllm", "model", "list"])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    assert stop.value.code == 2 and told.out == ""
    assert str(path) in told.err and says in told.err


def test_help_comes_whatever_the_file_holds(config, monkeypatch, capsys):
    config("nonsense")
    for command in (["ask"], ["plan"], ["model", "list"]):
        monkeypatch.setattr(sys, "argv", ["infllm", *command, "--help"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0 and "Usage:" in capsys.readouterr().out


def test_a_wrong_environment_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv("INFLLM_MAX_TOKENS", "many")
    monkeypatch.setattr(sys, "argv", ["infllm", "ask", "book.txt", "What?"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "INFLLM_MAX_TOKENS" in capsys.readouterr().err


def test_no_file_is_no_setting(tmp_path):
    assert load_config(tmp_path / "none.toml") == {}
    (tmp_path / "file").write_text("")
    assert load_config(tmp_path / "file" / "config.toml") == {}
    assert load_config(tmp_path / "file") == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"model = 'caf\xe9'")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_config(tmp_path / "latin.toml")


def test_the_file_lies_in_the_platforms_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_file.config_path() == tmp_path / "infllm" / "config.toml"


def test_settings_hold_for_every_command_but_measurements():
    told = cli._defaults(typer.main.get_command(cli.app), {"model": "x"})
    assert told["ask"] == told["memory"]["show"] == told["model"]["pull"] == {"model": "x"}
    assert "eval" not in told and "bench" not in told
