"""``vmserve generate``: answer prompts from options, a file or standard input."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import vmserve  # loads names lazily: `vmserve --help` must not wait for torch
from vmserve.cli.options import ENGINE_OPTIONS, parameters_of, with_parameters
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.sampling.params import SAMPLING_OPTIONS

__all__ = ["generate_command"]

_STRUCTURED = "Structured output"
#: Sampling fields that are options, in the order of the help.
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "beam_width",
    "length_penalty",
    "stop",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


class OutputFormat(enum.StrEnum):
    text = "text"
    json = "json"
    jsonl = "jsonl"


def _structured(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=_STRUCTURED)


@with_parameters(
    [
        *parameters_of(SAMPLING_OPTIONS[name] for name in _SAMPLING),
        *parameters_of(ENGINE_OPTIONS.values()),
    ]
)
def generate_command(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; repeatable. Without it, --file or stdin."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines: each a string, or an object with prompt or prompt_token_ids and "
            "any sampling fields."
        ),
    ] = None,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="text, one JSON document, or JSON Lines.")
    ] = OutputFormat.text,
    structured_json: Annotated[
        str | None, _structured("JSON schema that answers must match: its text, or @FILE.")
    ] = None,
    regex: Annotated[str | None, _structured("Regex that a whole answer must match.")] = None,
    choice: Annotated[list[str] | None, _structured("A possible answer; repeatable.")] = None,
    grammar: Annotated[
        str | None, _structured("Grammar of the answers, EBNF or Lark: its text, or @FILE.")
    ] = None,
    **options: Any,
) -> None:
    """Generate text offline and print it.

    The engine's --seed feeds the samples, so that a run can be repeated.
    """
    fields = {name: options.pop(name) for name in _SAMPLING if name in options}
    beam_width, length_penalty = fields.pop("beam_width", None), fields.pop("length_penalty", None)
    structured = {
        "json": _text_or_file(structured_json),
        "regex": regex,
        "choice": choice or None,
        "grammar": _text_or_file(grammar),
    }
    if any(value is not None for value in structured.values()):
        fields["structured_outputs"] = structured
    if length_penalty is not None and beam_width is None:
        raise ConfigurationError("--length-penalty is for beams: give --beam-width, too")
    requests = _read_requests(prompt, file)
    # Errors are reported before the model is loaded, which may take minutes.
    beam = None
    if beam_width is not None:
        beam = _beam_params(beam_width, length_penalty, fields)
    for _, own, where in requests:
        if beam is not None and own:
            raise ConfigurationError(
                f"{where}: --beam-width does not go with fields of its own: {', '.join(own)}"
            )
        _sampling_params(vmserve.SamplingParams, {**fields, **own}, where)
    with vmserve.LLM(**options) as llm:
        if beam is not None:
            results = llm.beam_search([p for p, _, _ in requests], beam)
        else:
            params = [
                _sampling_params(llm.default_sampling_params, {**fields, **own}, where)
                for _, own, where in requests
            ]
            results = llm.generate(
                [p for p, _, _ in requests], params, use_tqdm=len(requests) > 1 and _is_watched()
            )
        _print(results, output_format)


def _text_or_file(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{path}: {reason}") from None


def _beam_params(width: int, length_penalty: float | None, fields: dict[str, Any]) -> Any:
    known = {"max_tokens", "ignore_eos", "logprobs", "temperature", "structured_outputs"}
    surplus = sorted(set(fields) - known)
    if surplus:
        raise ConfigurationError(
            f"--beam-width does not go with {', '.join(surplus)}: beams are not sampled"
        )
    if length_penalty is not None:
        fields = {**fields, "length_penalty": length_penalty}
    return vmserve.BeamSearchParams(beam_width=width, **fields)


def _sampling_params(make: Callable[..., Any], fields: dict[str, Any], where: str) -> Any:
    """Call ``make`` with ``fields``. ``where``: their line of --file for errors, or ""."""
    known = {field.name for field in dataclasses.fields(vmserve.SamplingParams)}
    if unknown := sorted(set(fields) - known):
        raise InvalidRequestError(f"{where}: there is no sampling field {', '.join(unknown)}")
    try:
        return make(**fields)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}" if where else str(error)) from None


def _read_requests(
    prompts: list[str] | None, file: Path | None
) -> list[tuple[Any, dict[str, Any], str]]:
    """Read each prompt, its own sampling fields and its line of the file.

    Prompts are as ``LLM.generate`` takes them.
    """
    if prompts and file is not None:
        raise ConfigurationError("--prompt and --file exclude each other: give one of them")
    if prompts:
        return [(text, {}, "") for text in prompts]
    if file is not None:
        return _read_lines(file)
    text = sys.stdin.read()
    if not text:
        raise ConfigurationError("no prompt: give --prompt, --file, or text on standard input")
    return [(text, {}, "")]


def _read_lines(file: Path) -> list[tuple[Any, dict[str, Any], str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"--file {file}: {reason}") from None
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}:{number}"
            requests.append((*_parse_line(line, where), where))
    if not requests:
        raise ConfigurationError(f"--file {file}: no prompt in it; write one JSON value per line")
    return requests


def _parse_line(line: str, where: str) -> tuple[Any, dict[str, Any]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"{where}: not JSON: {error.msg} at column {error.colno}"
        ) from None
    if isinstance(value, dict):
        keys = {"prompt", "prompt_token_ids"} & set(value)
        if not keys:
            raise InvalidRequestError(f"{where}: needs prompt or prompt_token_ids")
        own = {name: item for name, item in value.items() if name not in keys}
        if not isinstance(value.get("prompt", ""), str):
            raise InvalidRequestError(
                f"{where}: prompt is a string, not {type(value['prompt']).__name__}"
            )
        return {name: value[name] for name in keys}, own
    if isinstance(value, str | list):
        return value, {}
    raise InvalidRequestError(f"{where}: a string, a list of ids or an object, not {value!r}")


def _print(results: list[Any], output_format: OutputFormat) -> None:
    if output_format is OutputFormat.text:
        for result in results:
            for choice in result.outputs:
                print((result.prompt or "") + choice.text)
        return
    documents = [_document(result) for result in results]
    if output_format is OutputFormat.jsonl:
        for document in documents:
            print(json.dumps(document, ensure_ascii=False))
    else:
        whole = documents[0] if len(documents) == 1 else documents
        print(json.dumps(whole, ensure_ascii=False, indent=2))


def _document(result: Any) -> dict[str, Any]:
    outputs = []
    for choice in result.outputs:
        document = {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "cumulative_logprob": choice.cumulative_logprob,
        }
        if choice.logprobs is not None:
            document["logprobs"] = [
                {str(token): dataclasses.asdict(item) for token, item in position.items()}
                for position in choice.logprobs
            ]
        outputs.append(document)
    return {
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "outputs": outputs,
        "metrics": dataclasses.asdict(result.metrics),
    }


def _is_watched() -> bool:
    return sys.stderr.isatty()
