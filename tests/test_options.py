"""What is derived from the declarations of options, and what has to agree with them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import SERVE_OPTIONS
from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.options import Bounds, Option, check_options, declared_options
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve.sampling.params import LIMITS, SAMPLING_OPTIONS
from vmserve.server.config import ServerConfig
from vmserve.server.words.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    MessagesRequest,
    RequestModel,
    ResponsesRequest,
)

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One option of each kind."""

    count: Annotated[int, Option("A count.", "G", Bounds(1, 10))] = 4
    share: Annotated[float | None, Option("A share.", "G", Bounds(0, 1, open_low=True))] = None
    wait: Annotated[float | None, Option("A wait.", "G", Bounds(0, open_low=True), unit="days")] = (
        None
    )
    port: Annotated[int, Option("A port.", "G", Bounds(0, 99), unit="")] = 80
    flag: Annotated[bool, Option("A flag.", "G", negatable=True)] = True
    path: Annotated[str | None, Option("A path.", "G", default="here")] = None
    colour: Annotated[Literal["red", "blue"] | None, Option("A colour.", "G")] = None
    shape: Annotated[str, Option("A shape.", "G", choices=("round", "flat"))] = "flat"
    names: Annotated[tuple[str, ...], Option("Names.", "G", flags=("--name", "-n"))] = ("a", "b")
    derived: int = 3

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"count": 0}, "count: 0 is below the least value, 1"),
        ({"count": 11}, "count: 11 is above the greatest value, 10"),
        ({"count": True}, "count: True is not an integer"),
        ({"share": 0}, "share: 0 is not in (0, 1]"),
        ({"share": float("nan")}, "share: nan is not in (0, 1]"),
        ({"share": "1"}, "share: '1' is not a number"),
        ({"wait": 0.0}, "wait: 0.0 must be more than 0 days"),
        ({"port": 100}, "port: 100 is not between 0 and 99"),
        ({"flag": 2}, "flag: 2 is neither True nor False"),
        ({"path": 2}, "path: 2 is not a text or a path"),
        ({"colour": "green"}, "colour: 'green' is not one of red, blue"),
        ({"shape": None}, "shape: None is not one of round, flat"),
    ],
)
def test_errors_name_the_option_and_the_bound(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Config(**options)
    assert str(raised.value) == told


def test_a_path_becomes_its_text() -> None:
    assert Config(path=Path("/a/b")).path == "/a/b"  # type: ignore[arg-type]
    config = EngineConfig(model=Path("/a/model"), trace_file=Path("t.json"))  # type: ignore[arg-type]
    assert (config.model, config.trace_file) == ("/a/model", "t.json")


def test_what_a_declaration_says() -> None:
    declared = declared_options(Config)
    assert "derived" not in declared
    assert [option.flags for option in declared.values()][-1] == ("--name", "-n")
    assert declared["flag"].flags == ("--flag/--no-flag",)
    assert {name: option.default_text for name, option in declared.items()} == {
        "count": "4", "share": None, "wait": None, "port": "80", "flag": "on", "path": "here",
        "colour": None, "shape": "flat", "names": "a, b",
    }  # fmt: skip


def test_ranges_in_words() -> None:
    for bounds, text in (
        (Bounds(0, 1, open_low=True), "above 0 to 1"),
        (Bounds(0, open_low=True), "above 0"),
        (Bounds(1), "1 or more"),
        (Bounds(-(2**63), 2**40), "-2^63 to 2^40"),
        (Bounds(0, 86_400), "0 to 86,400"),
    ):
        assert str(bounds) == text


def test_every_field_is_declared() -> None:
    for owner in (EngineConfig, ServerConfig, SamplingParams, BeamSearchParams):
        names = {field.name for field in dataclasses.fields(owner)}
        other = {"tokenizer_info", "tenant_secret"} if owner is ServerConfig else set()
        assert names - declared_options(owner).keys() == other


def test_options_have_spellings_of_their_own_and_defaults_within_their_ranges() -> None:
    every = [*ENGINE_OPTIONS.values(), *SERVE_OPTIONS]
    for option in every:
        if option.option.bounds is not None and option.default is not None:
            option.check(option.default)
    spellings = [flag for option in every for flag in option.flags]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    "model", [ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
def test_requests_take_types_and_ranges_of_numbers(model: type[RequestModel]) -> None:
    shared = model.model_fields.keys() & LIMITS.keys()
    assert shared
    for name in shared:
        field = model.model_fields[name]
        kind = field.annotation
        if get_origin(kind) in (Union, types.UnionType):
            [kind] = set(get_args(kind)) - {types.NoneType}
        if (model, name) == (ChatCompletionRequest, "logprobs"):  # OpenAI's: a flag
            assert kind is bool
            continue
        assert kind is SAMPLING_OPTIONS[name].type, name
        found = {k: v for each in field.metadata for k, v in _bounds(each).items()}
        bounds = LIMITS[name]
        low = 1 if (model, name) == (MessagesRequest, "max_tokens") else bounds.low
        assert found == {"gt" if bounds.open_low else "ge": low, "le": bounds.high}, name


def _bounds(metadata: Any) -> dict[str, float]:
    return {name: getattr(metadata, name) for name in ("gt", "ge", "le") if hasattr(metadata, name)}


def test_the_document_is_up_to_date() -> None:
    script = ROOT / "tools" / "write_options.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
