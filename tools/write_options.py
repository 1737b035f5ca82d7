"""Writes docs/options.md from the declarations of options, and the last section of docs/features.md
from the rules of what does not go together.

``python tools/write_options.py [--check]``. With ``--check`` nothing is written; the exit status is
1 if one of them is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from vmserve.cli.options import ENGINE_OPTIONS
from vmserve.cli.serve import SERVE_OPTIONS
from vmserve.options import Declared, in_words
from vmserve.options.rules import RULES
from vmserve.sampling.params import LIMITS, SAMPLING_OPTIONS

DOCUMENT = Path(__file__).parents[1] / "docs" / "options.md"
FEATURES = DOCUMENT.with_name("features.md")

_INTRODUCTION = """\
# Options

`scripts/options` writes this page from the declarations of the options; `vmserve COMMAND --help`
has the same texts.

## Engine

`vmserve serve`, `engine`, `batch`, `generate`, `chat`, `bench ab`, `bench profile` and
`bench startup` take these options. `LLM` and `AsyncLLM` take them as keywords: `--max-num-seqs 8`
is `LLM(max_num_seqs=8)`. A size is a number of bytes, or a number with a unit: `512MiB`, `4GiB`.
The options are declared in `vmserve/config.py`.
"""
_SERVER = """
## Server

`vmserve serve` takes these options and those of the engine. They are declared in
`vmserve/server/config.py` and `vmserve/cli/serve.py`.
"""
_SAMPLING = """
## Sampling

Fields of `SamplingParams` and `BeamSearchParams`. An HTTP request may have those that its route has
(`/openapi.json`); `vmserve generate` has options for the usual ones. A model's
`generation_config.json` may set other defaults. The fields are declared in
`vmserve/sampling/params.py`.

| field | values | default | |
|---|---|---|---|
"""


_RULES = """
## What does not go together

`scripts/options` writes this section from the table in `vmserve/options/rules.py`. Each pair is
refused with a text that says what to do. All other options go together.

| this | does not go with |
|---|---|
"""


def features(page: str) -> str:
    """The page with its last section as the rules are now."""
    kept, _, _ = page.partition(_RULES.splitlines()[1])
    rows = {f"| {_cell(rule.this.says)} | {_cell(rule.other.says)} |\n": None for rule in RULES}
    return kept.rstrip() + "\n" + _RULES + "".join(rows)


def document() -> str:
    """The whole page."""
    engine = "".join(_tables(ENGINE_OPTIONS.values()))
    server = "".join(_tables(SERVE_OPTIONS))
    sampling = "".join(_sampling_row(option) for option in SAMPLING_OPTIONS.values())
    return _INTRODUCTION + engine + _SERVER + server + _SAMPLING + sampling


def _tables(options: Iterable[Declared]) -> Iterator[str]:
    """A table for each group, with the options in their order."""
    by_group = sorted(options, key=lambda option: _first(option, options))
    for group, members in groupby(by_group, key=lambda option: option.option.group):
        yield f"\n### {group}\n\n| option | values | default | |\n|---|---|---|---|\n"
        for option in members:
            flags = ", ".join(f"`{flag}`" for flag in option.flags).replace("/--no-", "` / `--no-")
            default = _cell(option.default_text or "")
            yield f"| {flags} | {_values(option)} | {default} | {_cell(option.option.help)} |\n"


def _first(option: Declared, options: Iterable[Declared]) -> int:
    """Where the option's group begins."""
    groups = [each.option.group for each in options]
    return groups.index(option.option.group)


def _values(option: Declared) -> str:
    if option.choices:
        return ", ".join(option.choices)
    if option.option.bounds is not None:
        return str(option.option.bounds)
    return {"SIZE": "a size", "PATH": "a path", "URL": "a URL"}.get(option.option.metavar or "", "")


def _sampling_row(option: Declared) -> str:
    bounds = LIMITS.get(option.name)
    values = "" if bounds is None else str(bounds)
    default = "" if option.default is None else in_words(option.default)
    return f"| `{option.name}` | {values} | {default} | {_cell(option.option.help)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    pages = {
        DOCUMENT: document(),
        FEATURES: features(FEATURES.read_text(encoding="utf-8")),
    }
    for path, text in pages.items():
        if not is_check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"docs/{path.name} is out of date: run scripts/options", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
