"""``vmserve bench ab``: which engine options are better for these requests on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmserve.cli.options import with_engine_options
from vmserve.errors import ConfigurationError
from vmserve.models.hub import is_embedded
from vmserve_bench import options as opt
from vmserve_bench.ab.experiment import Engines, Settings, run_workload
from vmserve_bench.ab.plan import (
    PROMPTS_OUTPUT,
    TEXT_OUTPUT,
    LoadOptions,
    check_positive,
    fresh_output,
    make_search,
    make_workloads,
    objectives,
    sources,
    within_context,
)
from vmserve_bench.ab.results import (
    busy_warning,
    describe_variants,
    document,
    workload_table,
    write,
)
from vmserve_bench.ab.search import search_rate
from vmserve_bench.ab.tables import search_table
from vmserve_bench.ab.traces import HASH_BLOCK_TOKENS
from vmserve_bench.ab.traffic import KINDS, get_kind
from vmserve_bench.ab.variants import parse_variants
from vmserve_bench.lab.report import make_console, make_directory, watch
from vmserve_bench.lab.table import print_table
from vmserve_bench.workloads.texts import TEXTS

if TYPE_CHECKING:
    from vmserve_bench.ab.experiment import WorkloadResult

__all__ = ["HELP", "ab_command"]

#: Requests of a run, unless the workload was published with a number of its own.
_REQUESTS = 20
#: Context that workloads are scaled to on the embedded model: two cores serve it in seconds.
EMBEDDED_MAX_LEN = 1024

HELP = f"""Compare engine options on the same requests, with error bars.

Every round serves the same requests, seeds and arrival times by each variant in turn; ratios are
taken round by round, with 99 % bootstrap intervals and verdicts only where these allow one.
Without arguments: virtual, paged and auto on the embedded model, in under three minutes on two
quiet cores. Options of the engine hold for all variants.

\b
Workloads:
{chr(10).join(f"  {kind.name:<19}{kind.summary}" for kind in KINDS.values())}
{chr(10).join(f"  {name:<19}{summary}" for name, summary in TEXTS.items())}

\b
Examples:
  vmserve bench ab
  vmserve bench ab --workload chat,beam,mix --rounds 12
  vmserve bench ab --model PATH --workload azure-code --rate 2.5 --price-per-hour 1.2
  vmserve bench ab --variants virtual --variants small=kv_page_size=64KiB,kv_mapper=off
  vmserve bench ab --search --slo-ttft 200ms --slo-tpot 20ms --goodput 0.9
  vmserve bench ab --trace requests.jsonl --variants virtual,paged
  vmserve bench ab --model PATH --workload copying,stories --concurrency 1
    --variants off=speculative=off --variants auto=speculative=auto
"""


@with_engine_options
def ab_command(
    variants: Annotated[
        list[str] | None,
        typer.Option(
            help="virtual,paged,auto, or name=option=value,option=value with any engine option; "
            "repeatable, the first is what others are compared with. Default: virtual,paged,auto.",
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Some of the above, with commas between. Default: chat.")
    ] = None,
    trace: opt.Trace = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Real prompts: one a line, or .jsonl as of vmserve generate."),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Of each run. Default: {_REQUESTS}, or as the workload was published; of a trace "
            "all.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each variant that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Runs of each before, that do not.")] = 1,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Scale workloads to this context. Default: that of the model, "
            f"{EMBEDDED_MAX_LEN} for the embedded one.",
        ),
    ] = None,
    scale: opt.Scale = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens of each answer to --prompts (default {PROMPTS_OUTPUT}) and to real text "
            f"({TEXT_OUTPUT}).",
        ),
    ] = None,
    trace_block_size: opt.TraceBlockSize = HASH_BLOCK_TOKENS,
    concurrency: opt.Concurrency = None,
    rate: opt.Rate = None,
    burstiness: opt.Burstiness = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that meets the objectives.")
    ] = False,
    goodput: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet them.")
    ] = 0.9,
    search_steps: Annotated[
        int, typer.Option(min=1, help="Halvings of each search; 6 find the rate to 6 %.")
    ] = 6,
    slo_ttft: opt.SloTtft = None,
    slo_tpot: opt.SloTpot = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of the machine: adds the cost of a million tokens.")
    ] = None,
    rebuild_engines: Annotated[
        bool,
        typer.Option(
            "--rebuild-engines",
            help="A new engine for every run, where memory has no room for one per variant.",
        ),
    ] = False,
    renew: Annotated[
        int,
        typer.Option(
            min=0,
            help="Make and warm up engines anew every so many rounds: what one owes to its place "
            "in memory is then not taken for its options'. 0: never.",
        ),
    ] = 0,
    all_metrics: Annotated[
        bool, typer.Option("--all-metrics", help="Show every metric in the tables.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory for results.json and report.html. Default: ./vmserve-ab-<date>.",
        ),
    ] = None,
    **engine_options: Any,
) -> None:
    load = LoadOptions(concurrency, rate, burstiness, search)
    slo = objectives(slo_ttft, slo_tpot)
    load.check(bool(slo))
    check_positive(scale=scale, price_per_hour=price_per_hour)
    parsed = parse_variants(variants or ["virtual,paged,auto"])
    names = _workload_names(workload, has_files=trace is not None or prompts is not None)
    if renew and (search or rebuild_engines):
        other = "--search keeps its engines" if search else "--rebuild-engines does so in every run"
        raise ConfigurationError(f"--renew: {other}: give one of them")
    seed = engine_options.get("seed", 0)
    settings = Settings(rounds, warmup, seed, slo, price_per_hour, renew_every=renew)
    if output is not None:
        make_directory(output)
    console = make_console()
    if busy := busy_warning():
        console.print(busy)
    measured: list[WorkloadResult] = []
    searched: list[dict[str, Any]] = []
    with Engines(parsed, engine_options, rebuild=rebuild_engines) as engines:
        described = describe_variants(parsed, engines)
        context = min(int(one["resolved"]["max_model_len"]) for one in described)
        usual = EMBEDDED_MAX_LEN if is_embedded(engine_options.get("model")) else context
        told = "every variant can serve: lower it, or raise --max-model-len"
        length = within_context(max_len, context, min(context, usual), told)
        with engines.use(parsed[0].name) as engine:
            found = sources(
                names,
                trace,
                prompts,
                num_requests=num_requests,
                usual=_REQUESTS,
                block_tokens=trace_block_size,
                num_output_tokens=output_len,
                tokenizer=engine.tokenizer,
            )
        directory = output or fresh_output("vmserve-ab")
        make_directory(directory)
        if search:
            searches = [
                make_search(
                    one, load, max_len=length, scale=scale, goodput=goodput, steps=search_steps
                )
                for one in found
            ]
            per_search = len(parsed) * (1 + rounds * search_steps)
            with watch(len(searches) * per_search) as progress:
                for one_search in searches:
                    searched.append(search_rate(engines, one_search, settings, progress))
                    print_table(console, search_table(searched[-1]))
        else:
            workloads = [
                each
                for one in found
                for each in make_workloads(one, load, max_len=length, scale=scale)
            ]
            with watch(len(workloads) * len(parsed) * settings.num_runs) as progress:
                for one_workload in workloads:
                    measured.append(run_workload(engines, one_workload, settings, progress))
                    print_table(console, workload_table(measured[-1], everything=all_metrics))
    given = {"variants": variants, "workload": workload, "max_len": length, "scale": scale}
    result = document({**given, **engine_options}, described, settings, measured, searched)
    for path in write(result, directory):
        console.print(f"written: {path}")


def _workload_names(text: str | None, *, has_files: bool) -> list[str]:
    """Names of the workloads asked for; chat if there are neither names nor files."""
    if text is None:
        return [] if has_files else ["chat"]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TEXTS:
            get_kind(name)
    if not names:
        raise ConfigurationError(f"--workload: choose from {', '.join([*KINDS, *TEXTS])}")
    return names
