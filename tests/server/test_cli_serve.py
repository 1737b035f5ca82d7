"""``vmserve serve``: options to configuration, and which engines; errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from tests.support.serving import Logs, Patch, Start
from vmserve.cli import serve as cli_serve
from vmserve.cli.engines import EngineChoice
from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import ServeCommand, repeat_option, serve_command
from vmserve.client.engines.on_ray import place_engines
from vmserve.errors import ChatTemplateError, ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME, resolve_model
from vmserve.options.rules import check
from vmserve.server.config import ServerConfig
from vmserve.server.models.dialect import check_template
from vmserve.server.models.specs import ModelSpec
from vmserve.testing import ByteTokenizer
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

app = typer.Typer()
app.command("serve", cls=ServeCommand)(serve_command)
app.command("other")(lambda: None)


class Served(NamedTuple):
    """What a command line would serve."""

    config: ServerConfig
    options: dict[str, Any]
    several: Sequence[ModelSpec]

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_names


Parse = Callable[..., Served]


@pytest.fixture
def parse(monkeypatch: Patch) -> Parse:
    """Runs the command line."""
    seen: list[Served] = []
    monkeypatch.delenv("VMSERVE_API_KEY", raising=False)
    monkeypatch.setattr(
        cli_serve,
        "_run",
        lambda config, options, pinned, *, several, **_: seen.append(
            Served(config, options, several)
        ),
    )

    def run(*args: str) -> Served:
        app(["serve", *args], standalone_mode=False)
        return seen.pop()

    return run


def test_defaults(parse: Parse) -> None:
    config, options, _ = parse()
    assert config == ServerConfig(served_model_names=(EMBEDDED_NAME,))
    assert (config.host, config.port, config.uds) == ("127.0.0.1", 8000, None)
    assert options == {"model": None}


@pytest.mark.parametrize(
    ("args", "model", "name"),
    [
        (["m"], "m", "m"),
        (["--model", "m"], "m", "m"),
        (["m", "--model", "m"], "m", "m"),
        (["--model", "small=some/where"], "some/where", "small"),
    ],
)
def test_the_model_and_its_name(parse: Parse, args: list[str], model: str, name: str) -> None:
    served = parse(*args)
    assert (served.options["model"], served.names) == (model, (name,))


def test_a_directory_with_an_equals_sign_is_no_name(parse: Parse, tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert parse(str(odd)).options["model"] == str(odd)


def test_several_models(parse: Parse, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    file = tmp_path / "models.toml"
    file.write_text(
        f"""
        [models.c]
        model = "somewhere/c"
        weight = 2
        kv_floor = "64MiB"
        kv_cap = 1_000_000_000
        preload = false
        dtype = "float32"
        chat_template = "{template}"
        idle_unload = 60
        pin_prefix = ["{template}"]
        [models."org/d"]
        """
    )
    args = ["--model", "a", "--model", "b=x/y", "--models-config", str(file)]
    a, b, c, d = parse(*args, "--max-num-seqs", "8", "--dtype", "bfloat16").several
    assert [a.name, b.name, c.name, d.name] == ["a", "b", "c", "org/d"]
    assert [each.model for each in (a, b, c, d)] == ["a", "x/y", "somewhere/c", "org/d"]
    assert [each.engine["dtype"] for each in (a, c, d)] == ["bfloat16", "float32", "bfloat16"]
    assert {each.engine["max_num_seqs"] for each in (a, b, c, d)} == {8}
    assert (a.weight, a.kv_floor, a.kv_cap, a.preload) == (1, None, None, True)
    assert (c.weight, c.kv_floor, c.kv_cap, c.preload) == (2, "64MiB", 10**9, False)
    assert (c.prefixes, d.prefixes) == ({template: "{{ messages }}"}, {})
    server = ServerConfig(served_model_names=("a",), tool_call_parser="hermes", idle_unload=600.0)
    config = c.config(server)
    assert (config.idle_unload, d.config(server).idle_unload) == (60, 600)
    assert config.served_model_names == ("c",)
    assert (config.chat_template, config.tool_call_parser) == ("{{ messages }}", "hermes")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"cannot read .*models\.toml"),
        ("[models.a", "is not TOML"),
        ("x = 1", "must have tables"),
        ("[models]", "must have tables"),
        ("[models]\na = 1", "a in .* must be a table"),
        ("[other.a]\n[models.a]", "other"),
        ("[models.a]\nnonsense = 1", "model a: unknown engine option nonsense"),
        ("[models.a]\nweight = 0", "model a: weight"),
        ("[models.a]\nkv_floor = 'much'", "model a: kv_floor"),
        ("[models.a]\nmax_num_seqs = 'x'", "model a: max_num_seqs"),
        ("[models.a]\nkv_cache_memory = '1GiB'", "model a: kv_cache_memory .* kv_cap"),
        ("[models.a]\nchat_template = 'none.jinja'", "model a: chat_template: cannot read"),
        ("[models.a]\ntool_call_parser = 'none'", "model a: .*none"),
        ("[models.a]\npin_prefix = [7]", "model a: pin_prefix: .* a list of files"),
    ],
)
def test_files_of_models_that_cannot_be_used(
    parse: Parse, tmp_path: Path, text: str | None, told: str
) -> None:
    file = tmp_path / "models.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        parse("--model", "m", "--models-config", str(file))


TWO = ["--model", "a", "--model", "b"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["a", "--model", "b"], "two models"),
        (["--model", "=x"], "NAME=PATH"),
        (["--model", "x="], "NAME=PATH"),
        ([*TWO, "--served-model-name", "x"], "served_model_name: .* one model, and several"),
        ([*TWO, "--pin-prefix", "x.txt"], "pin_prefix: .* one model, and several"),
        ([*TWO, "--data-parallel-size", "2"], "data_parallel_size: .* one model, and several"),
        ([*TWO, "--in-process-engine"], "in_process_engine: .* one model, and several"),
        (["--idle-unload", "60", "--in-process-engine"], "idle_unload: an engine in the server's"),
        (["--port", "70000"], "port: 70000"),
        (["--root-path", "llm"], "root_path"),
        (["--api-key", ""], "api_key"),
        (["--api-key", " padded"], "api_key: no HTTP header carries"),
        (["--api-key", "\udcff"], "api_key: no HTTP header carries"),
        (["--served-model-name", ""], "served_model_name"),
        (["--chat-template", "/nowhere/at.all"], "chat_template: cannot read"),
    ],
)
def test_what_cannot_be_served(parse: Parse, args: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse(*args)


@pytest.mark.parametrize(
    "args", [["--no-such"], ["--port", "x"], ["--kv-regime", "x"], ["--served-model-name"]]
)
def test_wrong_options_end_with_status_2(args: list[str]) -> None:
    assert CliRunner().invoke(app, ["serve", *args]).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ["m", "--served-model-name", "a", "b", "c", "--port", "1"],
        ["--served-model-name", "a", "b", "c", "--port", "1", "m"],
        ["--port", "1", "m", "--served-model-name", "a", "b", "--served-model-name", "c"],
        ["--served-model-name=a", "--served-model-name", "b", "c", "--model=m", "--port=1"],
    ],
)
def test_several_names(parse: Parse, args: list[str]) -> None:
    served = parse(*args)
    assert (served.names, served.config.port) == (("a", "b", "c"), 1)
    assert served.options["model"] == "m"


def test_what_follows_two_dashes_is_no_option() -> None:
    args = ["--n", "a", "b", "--", "--n", "c", "d"]
    assert repeat_option(args, "--n") == ["--n", "a", "--n", "b", "--", "--n", "c", "d"]


def test_keys_share_fairly_unless_told_otherwise(parse: Parse, monkeypatch: Patch) -> None:
    keys = ("--api-key", "a", "--api-key", "b")
    for args, fair in (
        ((), None),
        (("--fair-sharing",), True),
        (keys[:2], None),
        (keys, True),
        ((*keys, "--no-fair-sharing"), False),
    ):
        assert parse(*args).options.get("fair_sharing") is fair
    monkeypatch.setenv("VMSERVE_API_KEY", "secret")
    assert parse().config.api_keys == ("secret",)
    assert parse("--api-key", "other").config.api_keys == ("other",)


ORIGINS = ("http://a", "https://b:1")
#: What is given, the field that has it, and its value. Some are accepted and do nothing.
SERVER_OPTIONS: tuple[tuple[str, str, object], ...] = (
    ("--host ::1", "host", "::1"),
    ("--port 0", "port", 0),
    ("--api-key a --api-key b", "api_keys", ("a", "b")),
    ("--root-path /llm/", "root_path", "/llm"),
    ("--chat-template {template}", "chat_template", "{{ messages }}"),
    ("--enable-auto-tool-choice --tool-call-parser hermes", "tool_call_parser", "hermes"),
    ("--shutdown-timeout 0", "shutdown_timeout", 0.0),
    ("--max-queued-requests 5", "max_queued_requests", 5),
    ("--max-queued-tokens 6", "max_queued_tokens", 6),
    ("--no-vllm-metrics", "vllm_metrics", False),
    ("--allowed-origins http://a --allowed-origin HTTPS://b:1/", "allowed_origins", ORIGINS),
    ("--allowed-host A.example", "allowed_hosts", ("a.example",)),
    ("--max-connections 9", "max_connections", 9),
    ("--max-connections-per-address 8", "max_connections_per_address", 8),
    ("--open-status-routes", "open_status_routes", True),
    ("--enable-server-load-tracking --enable-force-include-usage", "force_include_usage", True),
    ("--return-tokens-as-token-ids", "return_tokens_as_token_ids", True),
    ("--enable-prompt-tokens-details --enable-per-request-metrics", "per_request_metrics", True),
)


def test_options_of_the_server(parse: Parse, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    words = " ".join(given for given, _, _ in SERVER_OPTIONS).split()
    config, options, _ = parse(*(word.format(template=template) for word in words))
    assert options == {"model": None, "fair_sharing": True}
    fields: dict[str, Any] = {field: value for _, field, value in SERVER_OPTIONS}
    assert config == ServerConfig(served_model_names=(EMBEDDED_NAME,), **fields)


@pytest.mark.parametrize("name", sorted(ENGINE_OPTIONS.keys() - {"model"}))
def test_every_option_of_the_engine_arrives(
    parse: Parse, name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)  # --kv-persist makes its directory
    option = ENGINE_OPTIONS[name]
    flag, _, opposite = option.flags[0].partition("/")
    if option.type is bool:
        given: list[tuple[list[str], object]] = [([flag], True)]
        given += [([opposite], False)] if opposite else []
    else:
        value = option.type(7) if option.type in (int, float) else "text"
        value = option.choices[-1] if option.choices else value
        given = [([spelling, str(value)], value) for spelling in option.flags]
    for args, expected in given:
        assert parse(*args).options == {"model": None, name: expected}


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[bytes], Tokenizer]:
    """The embedded model's tokenizer with another chat template in its directory."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model(None) / name).read_bytes())

    def load(template: bytes) -> Tokenizer:
        (tmp_path / "chat_template.jinja").write_bytes(template)
        return load_tokenizer(tmp_path)

    return load


WithTemplate = Callable[[bytes], Tokenizer]
GOOD = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("a\n{% if %}", "chats will be refused with 400: the chat template is broken at line 2: "),
        ("{% for %}", "chats will be refused with 400: the chat template is broken at line 1: "),
        ("{{ x | no_such }}", "chats will be refused with 400: the chat template is broken at "),
        ("{{ x.y.z }}", "a chat of one user's message will be refused: the chat template refuses"),
        (GOOD, None),
        ("", None),
    ],
)
def test_a_models_own_template_is_tried_at_start(
    with_template: WithTemplate, caplog: Logs, template: str, told: str | None
) -> None:
    tokenizer = with_template(template.encode())
    check_template(tokenizer, None)
    assert [text.startswith(told or "") for text in caplog.messages] == ([True] if told else [])
    caplog.clear()
    check_template(tokenizer, GOOD)  # --chat-template mends it
    assert caplog.records == []


def test_a_template_that_was_asked_for_must_be_one(with_template: WithTemplate) -> None:
    tokenizer = with_template(GOOD.encode())
    with pytest.raises(ConfigurationError, match="broken at line 3"):
        check_template(tokenizer, "\n\n{% endfor %}")
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja is not UTF-8 text"):
        with_template(b"\xff")


def test_a_broken_template_refuses_chats_and_nothing_else(start: Start, monkeypatch: Patch) -> None:
    def broken(self: object, messages: object, **options: object) -> None:
        raise ChatTemplateError("the chat template is broken at line 2: no end; mend it")

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", broken)
    server = start()
    messages = [{"role": "user", "content": "Hi"}]
    error = server.error("/v1/chat/completions", {"messages": messages})
    assert error["message"].startswith("the chat template is broken at line 2")
    assert error["param"] == "messages"
    assert "line 2" in server.error("/v1/responses", {"input": "Hi"})["message"]
    assert server.complete()["choices"][0]["text"] == "hello"


# -- which engines

KEY: dict[str, Any] = {"engine_key_file": Path("key")}
ELSEWHERE: dict[str, Any] = {"engines": ("127.0.0.1:8100",), **KEY}


@pytest.mark.parametrize(
    ("given", "options", "why"),
    [
        ({"ray_num_cpus": 2}, {}, "ray_num_cpus: --distributed-executor ray is missing"),
        (KEY, {}, "engine_key_file: --engine HOST:PORT is missing"),
        ({"distributed_executor": "slurm"}, {}, "distributed_executor: .*process, ray"),
        ({**ELSEWHERE, "distributed_executor": "ray"}, {}, "distributed_executor: .*--engine"),
        ({**ELSEWHERE, "data_parallel_size": 2}, {}, "data_parallel_size: .*--engine"),
        (ELSEWHERE, {"max_num_seqs": 4}, "max_num_seqs: .*vmserve engine"),
        ({"engines": ("127.0.0.1:8100",)}, {}, "--engine-key-file FILE is missing"),
    ],
)
def test_what_does_not_go_together(given: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        EngineChoice(**given).check(options)


def test_options_of_our_own_engines_are_refused_with_ray(monkeypatch: Patch) -> None:
    choice = EngineChoice(distributed_executor="ray")
    with pytest.raises(ConfigurationError, match=r"engine_restarts: .*--distributed-executor ray"):
        check({**choice.facts, "idle_unload": False, "engine_restarts": True})
    check({**EngineChoice(data_parallel_size=2).facts, "engine_restarts": True})
    assert not choice.is_one_process
    assert EngineChoice(data_parallel_size=1).is_one_process
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vmserve\[ray\]'"):
        place_engines(2)
