"""``vmserve top``: a running server's memory, queues and requests, live in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Annotated, Any, Final

import httpx
import typer
from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vmserve.cli.options import server_url
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.numbers.sizes import format_size

__all__ = ["Monitor", "Screen", "top_command"]

Data = dict[str, Any]

#: Fields that a document must have to be shown: servers of other versions may have fewer.
_FIELDS: Final = frozenset({"stats", "pool", "requests", "latency", "num_failed"})
#: Character and colour of each use.
_LOOKS: Final = {
    "virtual": ("█", "blue"),
    "paged": ("█", "dark_orange"),
    "both": ("█", "magenta"),
    "cached": ("▓", "cyan"),
    "parked": ("▒", "blue"),
    "spare": ("░", "blue"),
    "waiting": ("▒", "yellow"),
    "held": ("▒", "red"),
    "free": ("░", "white"),
    "absent": ("·", "bright_black"),
}
_MAP_ROWS: Final = 8
_MODEL_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("model", "left"),
    ("state", "left"),
    ("requests", "right"),
    ("waiting", "right"),
    ("in use", "right"),
    ("lent", "right"),
    ("floor/cap", "right"),
    ("weight", "right"),
)
_STATES: Final = {"ready": "green", "waking": "yellow", "failed": "red", "leaving": "yellow"} | {
    "draining": "yellow",
    "suspect": "red",
    "down": "red",
}
_NUMBERS: Final = ("prompt", "generated", "age", "TTFT", "ITL")
#: Columns that shrink in a narrow terminal, in this order, and their least widths. Then columns are
#: left out.
_CUT: Final = (("request", 20), ("why", 12), ("request", 12), ("why", 6), ("request", 8))
_LEFT_OUT: Final = ("why", "slots", "state", "regime")
#: Seconds over which tokens per second are averaged.
_RATE_SECONDS: Final = 3.0
_LONGEST_WAIT: Final = 15.0


class Monitor:
    """Asks a server for its live figures.

    Raises :class:`~vmserve.errors.ConfigurationError` for what is no URL.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self.url = server_url(url)
        self._query = {} if model is None else {"model": model}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=10.0, trust_env=False)

    def ask(self) -> Data:
        """Raises :class:`~vmserve.errors.VmserveError`, ``ConnectionError`` while it is away."""
        try:
            reply = self._client.get(f"{self.url}/v1/kv/live", params=self._query)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ConnectionError(f"no answer from {self.url}: {reason}") from error
        if reply.status_code == 200:
            return _document(reply, self.url)
        if reply.status_code == 401:
            raise VmserveError(
                f"{self.url} needs an API key that it knows: --api-key, or VMSERVE_API_KEY"
            )
        if reply.status_code == 404:
            raise VmserveError(_reason(reply)) if self._query else _not_vmserve(self.url)
        raise ConnectionError(f"{self.url} answered {reply.status_code}: {_reason(reply)}")

    def close(self) -> None:
        self._client.close()


def _document(reply: httpx.Response, url: str) -> Data:
    try:
        data = reply.json()
    except ValueError as error:
        raise _not_vmserve(url) from error
    if not isinstance(data, dict) or not data.keys() >= _FIELDS:
        raise _not_vmserve(url)
    return data


def _not_vmserve(url: str) -> VmserveError:
    return VmserveError(f"{url} has no live figures: is it a vmserve server of this version?")


def _reason(reply: httpx.Response) -> str:
    try:
        return _plain(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _plain(reply.reason_phrase)


class Screen:
    """Figures as text. Remembers some, for rates."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, float]] = deque()
        self.data: Data | None = None
        #: The last error; empty while all is well.
        self.note = ""

    def take(self, data: Data, now: float) -> None:
        self.data, self.note = data, ""
        self._tokens.append((now, float(data["stats"].get("generation_tokens_total", 0))))
        while len(self._tokens) > 2 and now - self._tokens[1][0] >= _RATE_SECONDS:
            self._tokens.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        """None until there are two figures to tell it from."""
        if len(self._tokens) < 2:
            return None
        (began, before), (ended, after) = self._tokens[0], self._tokens[-1]
        return max(0.0, after - before) / (ended - began)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.note:
            yield Text(self.note, style="bold red")
        if self.data is not None:
            rows = console.height if console.is_terminal else None
            yield Group(*self._parts(self.data, options.max_width, rows))

    def _parts(self, data: Data, width: int, height: int | None) -> Iterator[RenderableType]:
        draining = ", shutting down" if data["draining"] else ""
        title = f"{_plain(data['model'])}, vmserve {_plain(data['version'])}"
        up = f", up {_seconds(data['uptime_seconds'])}{draining}"
        yield Text.assemble((title, "bold"), up)
        figures = _in_lines(self._figures(data), width)
        yield from figures
        models, engines = data.get("models", ()), data.get("engines", ())
        if engines:
            yield Text()
            yield _engines(engines)
        if models:
            yield Text()
            yield _models(data)
        yield Text()
        pool_map = _pool_map(data["pool"], width)
        yield pool_map
        yield _legend(data["pool"])
        yield Text()
        above = len(figures) + str(pool_map).count("\n") + 10
        above += sum(len(rows) + 2 for rows in (models, engines) if rows)
        room = None if height is None else max(1, height - above)
        yield _requests(data, width, room)

    def _figures(self, data: Data) -> Iterator[Text]:
        stats, latency = data["stats"], data["latency"]
        speed = self.tokens_per_second
        asked = stats.get("prefix_cache_queries_total", 0)
        hits = stats.get("prefix_cache_hits_total", 0)
        running = stats.get("num_requests_running", 0)
        waiting = stats.get("num_requests_waiting", 0)
        ahead = stats.get("hidden_calls_total", 0)
        awaited = stats.get("unhidden_calls_total", 0)
        for name, value in (
            ("tokens/s", "–" if speed is None else f"{speed:,.0f}"),
            ("run/wait", f"{running}/{waiting}"),
            ("KV in use", _memory(stats)),
            ("TTFT p50/p99", _pair(latency["ttft_p50"], latency["ttft_p99"])),
            ("ITL p50/p99", _pair(latency["itl_p50"], latency["itl_p99"])),
            ("prefix hits", f"{hits / asked:.0%}" if asked else "–"),
            *_drafts(stats),
            *_persistence(stats),
            ("map calls ahead/waited for", f"{ahead}/{awaited}"),
            *_kinds(data),
        ):
            yield Text.assemble((name, "bright_black"), " ", (value, "bold"))
        for name, count, colour in (
            ("rejected", data["num_rejected"], "yellow"),
            ("failed", data["num_failed"], "red"),
            ("preempted", stats.get("num_preemptions_total", 0), "yellow"),
            ("swapped", stats.get("num_sequences_swapped", 0), "yellow"),
            ("restarts", stats.get("engine_restarts_total", 0), "red"),
        ):
            style = f"bold {colour}" if count else "bright_black"
            yield Text.assemble((name, "bright_black"), " ", (f"{count:,}", style))


def _drafts(stats: Data) -> Iterator[tuple[str, str]]:
    """Figures of drafts: the share that was accepted, and tokens of a sequence in a step."""
    accepted = stats.get("spec_decode_num_accepted_tokens_total", 0)
    if drafted := stats.get("spec_decode_num_draft_tokens_total", 0):
        generated = stats.get("generation_tokens_total", 0)
        yield "drafts accepted", f"{accepted / drafted:.0%}"
        yield "tokens a step", f"{generated / max(1, generated - accepted):.2f}"


def _persistence(stats: Data) -> Iterator[tuple[str, str]]:
    """What --kv-persist keeps, and what it was good for; without it all is 0."""
    figures = Counter(
        {
            name.removeprefix("persist_").removesuffix("_total"): value
            for name, value in stats.items()
            if name.startswith("persist_")
        }
    )
    if not any(figures.values()):
        return
    yield "on disk", format_size(figures["bytes"])
    written, read = format_size(figures["written_bytes"]), format_size(figures["read_bytes"])
    yield "written/read", f"{written}/{read}"
    yield "blocks hit/evicted", f"{figures['restored_blocks']:,}/{figures['evicted_blocks']:,}"
    if reading := figures["hidden_seconds"] + figures["wait_seconds"]:
        yield "reading hidden", f"{figures['hidden_seconds'] / reading:.0%}"


def _kinds(data: Data) -> Iterator[tuple[str, str]]:
    """The part of the KV cache of each kind of layers, if a model has several."""
    for kind in data.get("kinds", ()):
        sizes = (
            f"{format_size(kind[f'{use}_pages'] * kind['page_bytes'])} {use}"
            for use in ("used", "cached", "free")
        )
        yield f"KV {_plain(kind['name'])}", ", ".join(sizes)


def _models(data: Data) -> RenderableType:
    """A row for each of several models; of the pool they share, what was lent to none."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name, justify in _MODEL_COLUMNS:
        table.add_column(name, justify=justify, no_wrap=True)
    for model in data["models"]:
        memory = model.get("memory")
        sizes = (
            ("–", "–", "–")
            if memory is None
            else (
                format_size(memory["used_bytes"]),
                format_size(memory["granted_bytes"]),
                f"{format_size(memory['floor_bytes'])}/{format_size(memory['cap_bytes'])}",
            )
        )
        table.add_row(
            _plain(model["name"]),
            Text(_plain(model["state"]), _STATES.get(model["state"], "")),
            f"{model['num_active']:,}",
            f"{model['num_waiting']:,}",
            *sizes,
            f"{model['weight']:g}" if "weight" in model else "–",
        )
    pool = data.get("kv_pool")
    if pool is None:
        return table
    free = f"{format_size(pool['free_bytes'])} of {format_size(pool['size_bytes'])} lent to none"
    return Group(table, Text(free, style="bright_black"))


def _engines(rows: list[Data]) -> RenderableType:
    """A row for each of a model's engines, with the ranks of groups."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    have_ranks = any(row.get("num_ranks", 1) > 1 for row in rows)
    ranks = ("ranks",) if have_ranks else ()
    for name in ("engine", "state", *ranks, "run/wait", "KV in use", "prefix hits", "restarts"):
        table.add_column(name, justify="left" if name in ("engine", "state") else "right")
    for row in rows:
        asked, hits = row["prefix_cache_queries_total"], row["prefix_cache_hits_total"]
        table.add_row(
            _plain(row["id"]),
            Text(_plain(row["state"]), _STATES.get(row["state"], "")),
            *([f"{row['num_live_ranks']} of {row['num_ranks']}"] if have_ranks else []),
            f"{row['num_requests_running']}/{row['num_requests_waiting']}",
            f"{row['kv_cache_usage_perc']:.1%}",
            f"{hits / asked:.0%}" if asked else "–",
            f"{row['engine_restarts_total']:,}",
        )
    return table


def _in_lines(figures: Iterator[Text], width: int) -> list[Text]:
    """Put as many in a line as fit; none is broken."""
    lines = [Text()]
    for figure in figures:
        if lines[-1].cell_len and lines[-1].cell_len + 3 + figure.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1].cell_len else "").append_text(figure)
    return lines


def _memory(stats: Data) -> str:
    """Show how much of the KV cache requests hold, and its limit."""
    share = stats.get("kv_cache_usage_perc", 0.0)
    limit = stats.get("limit_pages", 0) * stats.get("page_bytes", 0)
    return f"{share:.1%} of {format_size(limit)}" if limit else f"{share:.1%}"


def _pool_map(pool: Data, width: int) -> Text:
    """The map in at most eight lines; a character stands for what most of its cells are."""
    cells: str = pool["cells"]
    uses: list[str] = pool["uses"]
    per_character = max(1, -(-len(cells) // (width * _MAP_ROWS)))
    text = Text()
    for number, first in enumerate(range(0, len(cells), per_character)):
        if number and number % width == 0:
            text.append("\n")
        [(code, _)] = Counter(cells[first : first + per_character]).most_common(1)
        character, colour = _LOOKS.get(uses[(ord(code) - 48) & 15], ("?", "red"))
        text.append(character, colour)
    return text


def _legend(pool: Data) -> Text:
    text = Text()
    for use, count in pool["counts"].items():
        if count:
            character, colour = _LOOKS.get(use, ("?", "red"))
            text.append(character, colour)
            text.append(f" {use} {count:,}   ")
    text.append(f"of {pool['num_pages']:,} pages, {pool['num_shared']:,} shared", "bright_black")
    return text


def _requests(data: Data, width: int, room: int | None) -> RenderableType:
    rows = data["requests"][:room]
    if not rows:
        return Text(_others(data, 0) or "no requests", style="bright_black")
    cells = [_row(row) for row in rows]
    widths = _widths(cells, width)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name, column in widths.items():
        justify: JustifyMethod = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=column)
    for texts in cells:
        if cell_len(texts["request"]) > widths["request"]:
            # What tells ids apart comes after "chatcmpl-".
            texts["request"] = texts["request"].partition("-")[2] or texts["request"]
        colour = _LOOKS.get(texts["regime"], ("", "white"))[1]
        table.add_row(*(Text(texts[name], colour if name == "regime" else "") for name in widths))
    more = _others(data, len(rows))
    return Group(table, Text(more, style="bright_black")) if more else table


def _row(row: Data) -> dict[str, str]:
    """A request's texts by column."""
    costs = row["costs"]
    parts = [f"{name} {_seconds(costs[name])}" for name in ("virtual", "paged") if name in costs]
    return {
        "request": _plain(row["request_id"]),
        "state": row["state"],
        "regime": row["regime"],
        "why": f"{row['reason']}{': ' if parts else ''}{', '.join(parts)}",
        "prompt": f"{row['num_prompt_tokens']:,}",
        "generated": f"{row['num_output_tokens']:,}/{row['max_tokens'] * row['num_branches']:,}",
        "slots": " ".join(map(str, row["slots"][:4])) or "–",
        "age": _seconds(row["age_seconds"]),
        "TTFT": _seconds(row["ttft_seconds"]),
        "ITL": _seconds(row["itl_seconds"]),
    }


def _widths(cells: list[dict[str, str]], width: int) -> dict[str, int]:
    """What each column needs. In a narrow terminal ids and reasons are cut, then columns left out;
    numbers are whole."""
    widths = {
        name: max(cell_len(name), *(cell_len(texts[name]) for texts in cells)) for name in cells[0]
    }
    excess = sum(widths.values()) + 2 * len(widths) - width
    for name, least in _CUT:
        cut = min(max(0, excess), max(0, widths[name] - least))
        widths[name] -= cut
        excess -= cut
    for name in _LEFT_OUT:
        if excess > 0:
            excess -= widths.pop(name) + 2
    return widths


def _others(data: Data, num_shown: int) -> str:
    others = data["num_others"]
    more = data["num_requests"] - others - num_shown
    parts = [f"{more:,} more"] if more else []
    return ", ".join([*parts, *([f"{others:,} of other keys"] if others else [])])


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def _pair(median: float | None, high: float | None) -> str:
    return "–" if median is None else f"{_seconds(median)}/{_seconds(high)}"


def _plain(text: object) -> str:
    """What comes from a server must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _watch(monitor: Monitor, console: Console, interval: float) -> None:
    """Watch until interrupted. A server that is away is asked less and less often."""
    screen = Screen()
    screen.take(monitor.ask(), time.monotonic())
    failures = 0
    with Live(screen, console=console, screen=True, auto_refresh=False) as live:
        while True:
            wait = interval if not failures else min(_LONGEST_WAIT, interval * 2**failures)
            time.sleep(wait)
            try:
                screen.take(monitor.ask(), time.monotonic())
                failures = 0
            except ConnectionError as error:
                failures = min(failures + 1, 6)
                screen.note = f"{error} (trying again)"
            live.refresh()


def top_command(
    url: Annotated[
        str, typer.Argument(help="A running server.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(help="The server's key, if it needs one.", envvar="VMSERVE_API_KEY"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Of several models, the one to look at.", metavar="NAME")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: what the server says, as JSON.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.25, max=3600)
    ] = 0.5,
) -> None:
    """Watch a running server: its memory, queues and requests."""
    if as_json and not once:
        raise ConfigurationError("--json prints one document: give --once with it")
    monitor = Monitor(url, api_key, model)
    console = Console()
    try:
        if as_json:
            print(json.dumps(monitor.ask()))
        elif once or not console.is_terminal:
            screen = Screen()
            screen.take(monitor.ask(), time.monotonic())
            console.print(screen)
        else:
            _watch(monitor, console, interval)
    except BrokenPipeError:  # of our own output, which nobody reads any more
        raise
    except ConnectionError as error:
        raise VmserveError(str(error)) from error
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        monitor.close()
