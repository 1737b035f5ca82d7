"""Does speculation pay? Answers to four kinds of conversations, with and without drafts, in turns.

    python benchmarks/speculation/run.py [--model PATH] [--streams 1,8] [--rounds 6]
        [--draft PATH --modes off,auto,draft-model,auto+draft]
        [--llama-server PATH --gguf FILE] [--out DIRECTORY]

Each variant is an engine of its own in this process. The same conversations are answered greedily
by each, in turns of a drawn order; the ratio of neighbouring runs counts. Prompts are in the prefix
cache from the first, untimed run on, so the times are those of answers. The answers of all variants
have to be the same. With ``--llama-server``, llama.cpp's server answers them too, without drafts
and with its n-gram lookup, in turns as well. Writes ``results/<date>-<cpu>/`` beside this file, or
prints only with ``--out -``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from vmserve_bench.lab.machine import free_port, machine_info
from vmserve_bench.lab.report import keep, results_directory
from vmserve_bench.lab.rounds import ManyResult, compare_many
from vmserve_bench.lab.table import markdown_table
from vmserve_bench.workloads.texts import TEXTS, conversations

import vmserve

MODES = ("off", "prompt-lookup", "auto")
#: Lookup of llama.cpp: as it comes (matches of 12 tokens, drafts of 48), as short as ours, and by
#: the statistics of its ``llama-lookup``.
LLAMA_MODES = {
    "none": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple 4/8": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
    ),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}
_COUNTERS = {
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "generated": "generation_tokens_total",
}
Prompts = list[list[int]]
Result = dict[str, Any]


class Engine:
    """vmserve with one way of speculating."""

    def __init__(self, args: argparse.Namespace, mode: str) -> None:
        speculative, _, drafts = mode.partition("+")
        self.llm = vmserve.LLM(
            model=args.model,
            speculative=speculative,
            speculative_model=args.draft if drafts or speculative == "draft-model" else None,
            max_model_len=args.max_model_len,
            quantization=args.quantization,
            kv_cache_memory="512MiB",
        )
        self._max_tokens, self._temperature = args.max_tokens, args.temperature
        self.answers: list[list[int]] = []
        #: Nanoseconds of this process, of each call.
        self.cpu_ns: list[int] = []

    def answer(self, prompts: Prompts, streams: int) -> None:
        began = time.process_time_ns()
        self.answers = []
        params = [
            vmserve.SamplingParams(
                temperature=self._temperature, seed=i, max_tokens=self._max_tokens
            )
            for i in range(len(prompts))
        ]
        for i in range(0, len(prompts), streams):
            done = self.llm.generate(prompts[i : i + streams], params[i : i + streams])
            self.answers += [each.outputs[0].token_ids for each in done]
        self.cpu_ns.append(time.process_time_ns() - began)

    def counts(self) -> dict[str, float]:
        stats = self.llm.stats()
        return {name: stats[key] for name, key in _COUNTERS.items()}


class LlamaServer:
    """llama.cpp's server with one way of speculating."""

    def __init__(self, args: argparse.Namespace, mode: str, streams: int) -> None:
        port = free_port()
        command = [args.llama_server, "-m", args.gguf, "--port", str(port), "-np", str(streams)]
        command += ["-c", str(args.max_model_len * streams), "-t", str(args.threads)]
        command += LLAMA_MODES[mode]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self._max_tokens, self._temperature = args.max_tokens, args.temperature
        self.num_tokens = self._drafted = self._accepted = 0
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.close()
                raise SystemExit(f"{' '.join(command)} does not serve")
            time.sleep(0.2)

    def answer(self, prompts: Prompts, streams: int) -> None:
        with ThreadPoolExecutor(streams) as pool:
            replies = list(pool.map(self._complete, range(len(prompts)), prompts))
        self.num_tokens = sum(each["tokens_predicted"] for each in replies)
        self._drafted = sum(each["timings"].get("draft_n", 0) for each in replies)
        self._accepted = sum(each["timings"].get("draft_n_accepted", 0) for each in replies)

    def _complete(self, seed: int, prompt: list[int]) -> Any:
        body = {
            "prompt": prompt,
            "n_predict": self._max_tokens,
            "temperature": self._temperature,
            "seed": seed,
            "cache_prompt": True,
        }
        return self._client.post("/completion", json=body).raise_for_status().json()

    def last(self) -> dict[str, float]:
        return {
            "drafted": self._drafted,
            "accepted": self._accepted,
            "generated": self.num_tokens,
        }

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()


def main() -> None:
    args = parse()
    engines = {mode: Engine(args, mode) for mode in args.modes.split(",")}
    tokenizer = next(iter(engines.values())).llm.engine.tokenizer
    results: list[Result] = []
    for workload in args.workloads.split(","):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True
            )[1]
            for message in conversations(workload)[: args.conversations]
        ]
        for streams in map(int, args.streams.split(",")):
            measured = ours(engines, args, workload, prompts, streams)
            if args.llama_server:
                measured += llama(args, workload, prompts, streams)
            print(table(measured), flush=True)
            results += measured
    text = table(results)
    print(text)
    if args.out != "-":
        paths = (
            "model",
            "draft",
            "gguf",
            "llama_server",
            "out",
        )  # where they are says nothing elsewhere
        names = {name: Path(path).name for name in paths if (path := getattr(args, name))}
        arguments = {**vars(args), **names}
        described = {"arguments": arguments, "machine": machine_info(), "results": results}
        keep(results_directory(__file__, root=args.out), described, text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default=None, help="a directory or a GGUF file")
    parser.add_argument("--draft", help="of the modes draft-model and auto+draft: a small model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--modes", default=",".join(MODES), help="the first is the baseline")
    parser.add_argument("--workloads", default=",".join(TEXTS))
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--llama-server", help="a server of llama.cpp to compare with")
    parser.add_argument("--gguf", help="the model for it")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp's server")
    parser.add_argument("--out", default="", help="a directory, or - to print only")
    return parser.parse_args()


def ours(
    engines: dict[str, Engine],
    args: argparse.Namespace,
    workload: str,
    prompts: Prompts,
    streams: int,
) -> list[Result]:
    calls = {mode: partial(engine.answer, prompts, streams) for mode, engine in engines.items()}
    for call in calls.values():
        call()
    # Counts of the second time: what an engine learns of prices it has learnt.
    counts: dict[str, dict[str, float]] = {}
    for mode, call in calls.items():
        before = engines[mode].counts()
        call()
        counts[mode] = {name: n - before[name] for name, n in engines[mode].counts().items()}
    first, *others = engines.values()
    assert all(each.answers == first.answers for each in others), "answers differ"
    for engine in engines.values():
        engine.cpu_ns.clear()
    timed = compare_many(calls, rounds=args.rounds, warmup=0)
    rows = described("vmserve", workload, streams, timed, counts)
    for row, engine in zip(rows, engines.values(), strict=True):
        ratios = [a / b for a, b in zip(first.cpu_ns, engine.cpu_ns, strict=True)]
        row["faster_cpu"] = statistics.median(ratios)
        tokens = counts[row["mode"]]["generated"]
        row["cpu_ms_a_token"] = statistics.median(engine.cpu_ns) / tokens / 1e6
    return rows


def llama(args: argparse.Namespace, workload: str, prompts: Prompts, streams: int) -> list[Result]:
    with contextlib.ExitStack() as stack:
        servers = {}
        for mode in LLAMA_MODES:
            servers[mode] = LlamaServer(args, mode, streams)
            stack.callback(servers[mode].close)
        calls: dict[str, Callable[[], object]] = {
            mode: partial(server.answer, prompts, streams) for mode, server in servers.items()
        }
        timed = compare_many(calls, rounds=args.rounds, warmup=1)
        counts = {mode: server.last() for mode, server in servers.items()}
    return described("llama.cpp", workload, streams, timed, counts)


def described(
    engine: str,
    workload: str,
    streams: int,
    timed: ManyResult,
    counts: dict[str, dict[str, float]],
) -> list[Result]:
    """A row of results for each mode; ``faster`` and its interval: against the first."""

    def row(mode: str, seconds: float, faster: float, low: float, high: float) -> Result:
        counted = counts[mode]
        return {
            "engine": engine,
            "workload": workload,
            "streams": streams,
            "mode": mode,
            "tokens_per_second": counted["generated"] / seconds,
            "faster": faster,
            "low": low,
            "high": high,
            "tokens_a_step": counted["generated"] / (counted["generated"] - counted["accepted"]),
            "accepted": counted["accepted"] / counted["drafted"] if counted["drafted"] else None,
        }

    paired = list(timed.against.items())
    rows = [row(timed.baseline, paired[0][1].median_a_s, 1.0, 1.0, 1.0)]
    for mode, result in paired:
        bounds = (1 / result.ratio, 1 / result.ratio_high, 1 / result.ratio_low)
        rows.append(row(mode, result.median_b_s, *bounds))
    return rows


def table(results: list[Result]) -> str:
    head = ("answers", "streams", "engine", "drafts", "tokens/s", "times off", "99 %")
    head += ("by processor time", "tokens a step", "accepted")

    def cells() -> Iterator[tuple[str, ...]]:
        for r in results:
            cpu = f"{r['faster_cpu']:.2f}" if "faster_cpu" in r else "–"
            accepted = "–" if r["accepted"] is None else f"{r['accepted']:.0%}"
            yield (
                r["workload"], str(r["streams"]), r["engine"], r["mode"],
                f"{r['tokens_per_second']:,.0f}", f"{r['faster']:.2f}",
                f"{r['low']:.2f}–{r['high']:.2f}", cpu,
                f"{r['tokens_a_step']:.2f}", accepted,
            )  # fmt: skip

    return "\n".join(markdown_table(head, cells(), 4))


if __name__ == "__main__":
    main()
