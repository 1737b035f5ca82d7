"""``vmserve serve``: options to configuration, errors in one line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.server.conftest import Running
from vmserve.cli import serve as cli_serve
from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import ServeCommand, repeat_option, serve_command
from vmserve.errors import ChatTemplateError, ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME, resolve_model
from vmserve.server.config import ServerConfig
from vmserve.server.models.dialect import check_template
from vmserve.server.models.specs import ModelSpec
from vmserve.testing import ByteTokenizer
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

Parse = Callable[..., tuple[ServerConfig, dict[str, Any]]]
app = typer.Typer()
app.command("serve", cls=ServeCommand)(serve_command)
app.command("other")(lambda: None)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Runs the command line, and returns what would be served."""
    seen: list[Any] = []
    monkeypatch.delenv("VMSERVE_API_KEY", raising=False)
    monkeypatch.setattr(
        cli_serve,
        "_run",
        lambda config, options, pinned, **how: seen.append((config, options)),
    )

    def run(*args: str) -> tuple[ServerConfig, dict[str, Any]]:
        app(["serve", *args], standalone_mode=False)
        config, options = seen.pop()
        return config, options

    return run


def test_defaults(parse: Parse) -> None:
    config, options = parse()
    assert config == ServerConfig(served_model_names=(EMBEDDED_NAME,))
    assert (config.host, config.port, config.uds) == ("127.0.0.1", 8000, None)
    assert options == {"model": None}


@pytest.mark.parametrize("args", [["m"], ["--model", "m"], ["m", "--model", "m"]])
def test_the_model(parse: Parse, args: list[str]) -> None:
    config, options = parse(*args)
    assert options["model"] == "m"
    assert config.served_model_names == ("m",)
    with pytest.raises(ConfigurationError, match="two models"):
        parse("a", "--model", "b")


def test_a_name_for_the_model(parse: Parse, tmp_path: Path) -> None:
    config, options = parse("--model", "small=some/where")
    assert (options["model"], config.served_model_names) == ("some/where", ("small",))
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert parse(str(odd))[1]["model"] == str(odd)
    for text in ("=x", "x="):
        with pytest.raises(ConfigurationError, match="NAME=PATH"):
            parse("--model", text)


@pytest.fixture
def parse_several(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sequence[ModelSpec]]:
    """Runs the command line, and returns the models that would be served."""
    seen: list[Sequence[ModelSpec]] = []
    monkeypatch.setattr(cli_serve, "_run", lambda *_, several, **__: seen.append(several))

    def run(*args: str) -> Sequence[ModelSpec]:
        app(["serve", *args], standalone_mode=False)
        return seen.pop()

    return run


def test_several_models(parse_several: Callable[..., Sequence[ModelSpec]], tmp_path: Path) -> None:
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
    a, b, c, d = parse_several(
        *("--model", "a", "--model", "b=x/y", "--models-config", str(file), "--max-num-seqs", "8"),
        *("--dtype", "bfloat16"),
    )
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
    parse_several: Callable[..., Sequence[ModelSpec]], tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "models.toml"
    with pytest.raises(ConfigurationError, match=r"cannot read .*models\.toml"):
        parse_several("--models-config", str(file))
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        parse_several("--model", "m", "--models-config", str(file))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--served-model-name", "x"], "served_model_name"),
        (["--pin-prefix", "x.txt"], "pin_prefix"),
        (["--data-parallel-size", "2"], "data_parallel_size"),
        (["--in-process-engine"], "in_process_engine"),
    ],
)
def test_options_that_go_with_one_model(
    parse_several: Callable[..., Sequence[ModelSpec]], args: list[str], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{told}: .* one model, and several"):
        parse_several("--model", "a", "--model", "b", *args)
    with pytest.raises(ConfigurationError, match="idle_unload: an engine in the server's own"):
        parse_several("--idle-unload", "60", "--in-process-engine")


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
    config, options = parse(*args)
    assert config.served_model_names == ("a", "b", "c")
    assert config.port == 1
    assert options["model"] == "m"


def test_what_follows_two_dashes_is_no_option() -> None:
    args = ["--n", "a", "b", "--", "--n", "c", "d"]
    assert repeat_option(args, "--n") == ["--n", "a", "--n", "b", "--", "--n", "c", "d"]


def test_keys_share_fairly_unless_told_otherwise(parse: Parse, tmp_path: Path) -> None:
    assert parse()[1] == {"model": None}
    assert parse("--fair-sharing")[1]["fair_sharing"] is True
    assert parse("--api-key", "a")[1] == {"model": None}
    keys = ("--api-key", "a", "--api-key", "b")
    assert parse(*keys)[1]["fair_sharing"] is True
    assert parse(*keys, "--no-fair-sharing")[1]["fair_sharing"] is False


def test_options_of_the_server(parse: Parse, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    config, options = parse(
        *("--host", "::1", "--port", "0", "--api-key", "a", "--api-key", "b"),
        *("--root-path", "/llm/", "--chat-template", str(template), "--shutdown-timeout", "0"),
        *("--max-queued-requests", "5", "--max-queued-tokens", "6", "--no-vllm-metrics"),
        *("--allowed-origins", "http://a", "--allowed-origin", "HTTPS://b:1/"),
        *("--allowed-host", "A.example", "--max-connections", "9"),
        *("--max-connections-per-address", "8"),
        *("--open-status-routes", "--enable-force-include-usage"),
        *("--return-tokens-as-token-ids", "--enable-per-request-metrics"),
        *("--enable-server-load-tracking", "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    assert options == {"model": None, "fair_sharing": True}
    assert config == ServerConfig(
        served_model_names=(EMBEDDED_NAME,),
        host="::1",
        port=0,
        api_keys=("a", "b"),
        root_path="/llm",
        chat_template="{{ messages }}",
        tool_call_parser="hermes",
        shutdown_timeout=0.0,
        max_queued_requests=5,
        max_queued_tokens=6,
        vllm_metrics=False,
        allowed_origins=("http://a", "https://b:1"),
        allowed_hosts=("a.example",),
        max_connections=9,
        max_connections_per_address=8,
        open_status_routes=True,
        force_include_usage=True,
        return_tokens_as_token_ids=True,
        per_request_metrics=True,
    )


@pytest.mark.parametrize("name", sorted(ENGINE_OPTIONS.keys() - {"model"}))
def test_every_option_of_the_engine_arrives(
    parse: Parse, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # --kv-persist makes its directory
    option = ENGINE_OPTIONS[name]
    value: object = "text"
    if option.choices:
        value = option.choices[-1]
    elif option.type in (int, float):
        value = option.type(7)
    if option.type is bool:
        flag, _, opposite = option.flags[0].partition("/")
        assert parse(flag)[1] == {"model": None, name: True}
        if opposite:
            assert parse(opposite)[1] == {"model": None, name: False}
        return
    for spelling in option.flags:
        assert parse(spelling, str(value))[1] == {"model": None, name: value}


def test_the_key_can_come_from_the_environment(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMSERVE_API_KEY", "secret")
    assert parse()[0].api_keys == ("secret",)
    assert parse("--api-key", "other")[0].api_keys == ("other",)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--port", "70000"], "port: 70000"),
        (["--root-path", "llm"], "root_path"),
        (["--api-key", ""], "api_key"),
        (["--api-key", " padded"], "api_key: no HTTP header carries"),
        (["--api-key", "\udcff"], "api_key: no HTTP header carries"),
        (["--served-model-name", ""], "served_model_name"),
        (["--chat-template", "/nowhere/at.all"], "chat_template: cannot read"),
    ],
)
def test_wrong_values(parse: Parse, args: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse(*args)


@pytest.mark.parametrize(
    "args", [["--no-such"], ["--port", "x"], ["--kv-regime", "x"], ["--served-model-name"]]
)
def test_wrong_options_end_with_status_2(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == 2


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[bytes], Tokenizer]:
    """The embedded model's tokenizer with another chat template in its directory."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model(None) / name).read_bytes())

    def load(template: bytes) -> Tokenizer:
        (tmp_path / "chat_template.jinja").write_bytes(template)
        return load_tokenizer(tmp_path)

    return load


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("a\n{% if %}", "chats will be refused with 400: the chat template is broken at line 2: "),
        ("{% for %}", "chats will be refused with 400: the chat template is broken at line 1: "),
        ("{{ x | no_such }}", "chats will be refused with 400: the chat template is broken at "),
        ("{{ x.y.z }}", "a chat of one user's message will be refused: the chat template refuses"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_models_own_template_is_tried_at_start(
    with_template: Callable[[bytes], Tokenizer],
    caplog: pytest.LogCaptureFixture,
    template: str,
    told: str | None,
) -> None:
    tokenizer = with_template(template.encode())
    check_template(tokenizer, None)
    assert [record.getMessage().startswith(told or "") for record in caplog.records] == (
        [True] if told else []
    )
    caplog.clear()
    check_template(tokenizer, "{{ messages[0].content }}")  # --chat-template mends it
    assert caplog.records == []


def test_a_template_that_was_asked_for_must_be_one(
    with_template: Callable[[bytes], Tokenizer],
) -> None:
    tokenizer = with_template(b"{{ messages[0].content }}")
    with pytest.raises(ConfigurationError, match="broken at line 3"):
        check_template(tokenizer, "\n\n{% endfor %}")
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja is not UTF-8 text"):
        with_template(b"\xff")


def test_without_a_template_nothing_is_tried(
    with_template: Callable[[bytes], Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    check_template(with_template(b""), None)
    assert caplog.records == []


def test_a_broken_template_refuses_chats_and_nothing_else(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
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
