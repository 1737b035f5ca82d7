"""How fast is each family of models, beside llama.cpp on the same file?

    python benchmarks/families/run.py [--families llama gemma3 ...] [--weights Q4_0 BF16]
        [--rounds 3] [--threads 2] [--out DIRECTORY]

Each engine is run in a process of its own by the workers of ``benchmarks/peers``, in turns; files
and llama.cpp are kept in ``$VMSERVE_PEERS_CACHE``. ``--out -`` keeps no results.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "peers")]

from environments import NotInstalledError, ensure, stamp  # noqa: E402
from launch import run_engine, variables  # noqa: E402
from report import one_line  # noqa: E402
from subjects import Subject  # noqa: E402
from summary import metrics_of  # noqa: E402
from traffic import SMOKE, Sizes, longest, make_workloads, warmup_requests  # noqa: E402

from tests.models import gguf_checkpoints  # noqa: E402
from vmserve_bench.lab import script  # noqa: E402

Json = dict[str, Any]

VOCABULARY = 2048  # of the embedded tokenizer
#: 88 million parameters that a token reads; those with experts have 244 million.
SIZES: Json = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4,
}  # fmt: skip
HEADS: Json = {"head_dim": 64}
GEMMA: Json = {**HEADS, "query_pre_attn_scalar": 64, "sliding_window": 512}
EXPERTS: Json = {"moe_intermediate_size": 256, "num_experts": 32}
LATENT: Json = {
    "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "moe_intermediate_size": 256, "n_routed_experts": 32,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA: Json = {
    "head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 12,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
GPT_OSS: Json = {
    "head_dim": 64, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4,
    "sliding_window": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
}  # fmt: skip
MIXTRAL: Json = {"intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
#: By name: the class of the configuration, and its fields besides SIZES.
FAMILIES: dict[str, tuple[str, Json]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "mixtral": ("MixtralConfig", MIXTRAL),
    "qwen3moe": ("Qwen3MoeConfig", HEADS | EXPERTS | {"num_experts_per_tok": 8}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        EXPERTS | {"shared_expert_intermediate_size": 512, "num_experts_per_tok": 6},
    ),
    "gpt-oss": ("GptOssConfig", GPT_OSS),
    "deepseek-v2": ("DeepseekV2Config", LATENT | {"n_group": 1, "topk_group": 1}),
    "deepseek-v3": ("DeepseekV3Config", LATENT | {"n_group": 4, "topk_group": 2}),
    "qwen3next": (
        "Qwen3NextConfig",
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 256, "num_experts_per_tok": 7},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA),
}
#: Types of the experts' matrices where files in the wild have others than elsewhere.
EXPERT_WEIGHTS = {"gpt-oss": "MXFP4"}
ENGINES = ("vmserve", "llama.cpp")
SHORT = Sizes(
    num_decodes=2, decode_context=128, decode_tokens=64, num_prefills=2, prefill_tokens=1024,
    num_streams=8, stream_context=64, stream_tokens=64,
)  # fmt: skip
#: Beyond the windows: one stream whose attention reads much.
LONG = replace(SHORT, decode_context=3072, decode_tokens=32)
#: By workload.
FIGURES = {
    "decode": "one stream, tokens/s",
    "long": f"at {LONG.decode_context:,} tokens",
    "streams": f"{SHORT.num_streams} streams, tokens/s",
    "prefill": "prompt, tokens/s",
}


def main() -> None:
    args = script.parser(
        __doc__, families=tuple(FAMILIES), smoke=False, weights=["Q4_0"], rounds=3, threads=2,
        time_limit=600.0, out="",
    ).parse_args()  # fmt: skip
    cache = script.PEERS_CACHE
    short, long = (SMOKE, SMOKE) if args.smoke else (SHORT, LONG)
    asked = make_workloads(["decode", "prefill", "streams"], short, VOCABULARY, 0, 1.0)
    asked["long"] = make_workloads(["decode"], long, VOCABULARY, 0, 1.0)["decode"]
    environments, absent = {}, ""
    for engine in ENGINES:
        try:
            environments[engine] = ensure(engine, cache, print)
        except NotInstalledError as error:
            absent = f"{engine} is not here: {one_line(str(error))}"
    runs: list[Json] = []
    for weights, family in itertools.product(args.weights, args.families):
        file = ensure_file(family, weights, args.smoke)
        job = job_of(file, weights, asked, args.threads)
        for engine, environment in script.turns(environments.items(), args.rounds):
            subject = Subject(engine, weights.lower())
            added = variables(subject, environment, args.threads, cache, 0)
            run = run_engine(environment.python, job, subject, added, args.time_limit)
            found = {"error": run["error"]} if "error" in run else figures_of(run, asked)
            runs.append({"family": family, "weights": weights, "engine": engine, **found})
            print(runs[-1], file=sys.stderr, flush=True)
    columns: dict[str, script.Cell] = {
        "family": lambda row: row[0],
        "weights": lambda row: row[1],
        **{title: partial(cell, runs, name) for name, title in FIGURES.items()},
    }
    rows = itertools.product(args.families, args.weights)
    note = "A smoke run: no figure means anything." if args.smoke else ""
    table = script.table_of("tokens/s (times llama.cpp's; by processor time)", rows, columns, note)
    script.publish(__file__, args, [table], {"runs": runs})
    if absent or any("error" in run for run in runs):
        sys.exit(absent or 1)


def ensure_file(family: str, weights: str, is_smoke: bool) -> Path:
    """The family's GGUF file, written now if it is not there; a tiny one for a smoke run."""
    kind, own = FAMILIES[family]
    fields = SIZES | own
    if is_smoke:
        fields |= {"num_hidden_layers": 2, "intermediate_size": 256}
    made_from = stamp(kind, repr(fields))["made_from"][:12]
    path = script.PEERS_CACHE / "models" / f"{family}-{made_from}-{weights}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            transformers.set_seed(0)
            config = getattr(transformers, kind)(**fields)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
            partial_file = Path(scratch) / path.name
            add = gguf_checkpoints.add_embedded_tokenizer
            experts = EXPERT_WEIGHTS.get(family, weights)
            gguf_checkpoints.convert(Path(scratch), partial_file, add, weights, experts)
            partial_file.replace(path)  # an interrupted conversion leaves nothing that looks whole
    return path


def job_of(file: Path, weights: str, asked: dict[str, list[Json]], num_threads: int) -> Json:
    return {
        "model": str(file),
        "files": {"gguf": str(file)},
        "weights": weights.lower(),
        "isa": "",
        "options": {},
        "num_threads": num_threads,
        "max_num_seqs": SHORT.num_streams,
        "max_model_len": max(256 * -(-longest(each) // 256) for each in asked.values()),
        "num_checked": 0,
        "warmup": warmup_requests(VOCABULARY, 0),
        "workloads": asked,
    }


def figures_of(run: Json, asked: dict[str, list[Json]]) -> dict[str, float]:
    """Tokens per second, and processor seconds of each workload as a whole."""
    measured = run["workloads"]
    found = metrics_of(run, asked)
    long = metrics_of({"workloads": {"decode": measured["long"]}}, {})
    found["long_tokens_per_s"] = long["decode_tokens_per_s"]
    figures = {name: found[f"{name}_tokens_per_s"] for name in FIGURES}
    return figures | {f"{name}_cpu_s": measured[name]["cpu_s"] for name in FIGURES}


def cell(runs: list[Json], name: str, row: tuple[str, str]) -> str:
    """Medians over rounds: ours, how many times llama.cpp's that is, and by how much more processor
    time that takes for the workload, prompts included."""

    def middle(engine: str, name: str) -> float:
        mine = (
            run for run in runs if (run["family"], run["weights"], run["engine"]) == (*row, engine)
        )
        found = [run[name] for run in mine if name in run]
        return median(found) if found else float("nan")

    ours, theirs = (middle(engine, name) for engine in ENGINES)
    cpu, their_cpu = (middle(engine, f"{name}_cpu_s") for engine in ENGINES)
    return f"{ours:,.0f} ({ours / theirs:.2f}; {their_cpu / cpu:.2f})"


if __name__ == "__main__":
    main()
