"""What a process imports before its first token, and what the processes of a server never do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.harness import Server

pytestmark = pytest.mark.timeout(400)

OFFLINE = """
import json, sys
from vmserve import LLM, SamplingParams
with LLM(kv_cache_memory="64MiB", max_model_len=256) as llm:
    [result] = llm.generate("Once", SamplingParams(max_tokens=1, temperature=0))
    assert len(result.outputs[0].token_ids) == 1
print(json.dumps(sorted(sys.modules)))
"""
#: What else our own decoder and sampler are asked for, in both regimes, with too little memory.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # to import it is an error
from vmserve import LLM, BeamSearchParams, SamplingParams
prompts = ["Once upon a time", "Once upon a day", "The cat"] * 4
for regime, preemption in (("auto", "recompute"), ("virtual", "swap"), ("paged", "swap")):
    with LLM(kv_cache_memory="1MiB", max_model_len=256, kv_regime=regime, preemption=preemption,
             swap_space="8MiB", dtype="bfloat16" if regime == "paged" else "auto") as llm:
        greedy = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=3,
                                prompt_logprobs=2)
        drawn = SamplingParams(max_tokens=60, n=3, seed=1, top_p=0.9, top_k=50, min_p=0.01,
                               repetition_penalty=1.1, logit_bias={7: 1.0}, stop=["xyz"])
        assert len(llm.generate(prompts, greedy)) == 12
        assert all(len(each.outputs) == 3 for each in llm.generate(prompts, drawn))
        assert llm.engine.scheduler.totals.preemptions > 0 or regime == "virtual"
        beams = BeamSearchParams(beam_width=3, max_tokens=8)
        assert len(llm.generate(prompts[:1], beams)[0].outputs) == 3
print("done")
"""
#: Each of them would add more than a tenth of a second, or drags such modules in.
HEAVY = {
    "fastapi",
    "httpx",
    "huggingface_hub.file_download",
    "huggingface_hub.hf_api",
    "jinja2",
    "llguidance",
    "matplotlib",
    "numpy.ma",
    "pydantic",
    "rich",
    "importlib.metadata",
    "tempfile",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "vmserve.attention.cuda",
    "vmserve.models.foreign",
    "zmq",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process whose path has nothing of the tests, which import more."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def test_the_first_token_without_heavy_modules() -> None:
    done = run(OFFLINE)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert "vmserve.models.native" in imported
    assert sorted(imported & HEAVY) == []


def test_requests_of_every_kind_without_torch() -> None:
    done = run(WITHOUT_TORCH)
    assert done.stdout == "done\n", done.stderr


def test_the_processes_of_a_server_have_no_torch(tmp_path: Path) -> None:
    def maps(pid: int, name: str) -> bool:
        return name in Path(f"/proc/{pid}/maps").read_text()

    server = Server(tmp_path / "log")
    try:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for path, body in (
            ("chat/completions", chat),
            ("completions", {"prompt": "Once", "max_tokens": 2}),
        ):
            reply = server.http.post(f"/v1/{path}", json=body)
            assert reply.status_code == 200, reply.text
        assert maps(server.engine.pid, "vmserve/_core")
        assert not maps(server.engine.pid, "libtorch")
        assert not maps(server.popen.pid, "libtorch")
    finally:
        server.close()
