"""Subjects of the comparison: engines with their weights and options.

Written on the command line as ENGINE[:WEIGHTS][:OPTION=VALUE,...]; a variant of vmserve as
NAME[:OPTION=VALUE,...] with its own engine options. Two options are of this benchmark: ``isa``, the
instruction set, and for a variant ``weights``, the GGUF file that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: By engine, the weights it can read here, and their bits; those of 4 bits run when asked for.
#: 16 bit: what the checkpoint has, whatever a processor without such arithmetic makes of it.
WEIGHTS: Mapping[str, Mapping[str, int]] = {
    "transformers": {"bf16": 16},
    "llama.cpp": {"bf16": 16, "f16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "q4_k_m": 4},
    "openvino": {"f16": 16, "int8": 8, "int4": 4},
    "vllm": {"bf16": 16},
}
#: Files that llama.cpp and vmserve read.
GGUF_WEIGHTS = WEIGHTS["llama.cpp"]
#: Engines that can be held to an instruction set, and those.
ISA_ENGINES, ISAS = ("vmserve", "llama.cpp"), ("avx2",)
#: Default of ``--peers``: every engine with all its weights of 8 and 16 bit.
DEFAULT_PEERS = (*WEIGHTS, "transformers:bf16:batching=continuous")


@dataclass(frozen=True, slots=True)
class Subject:
    """``weights`` of vmserve: its file's, its ``quantization`` option, else the checkpoint's.

    ``isa``: "" is the processor's own.
    """

    engine: str
    weights: str
    variant: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    isa: str = ""

    @property
    def name(self) -> str:
        """Unique in a run: it names the results."""
        if self.engine == "vmserve":
            return f"vmserve {self.variant}"
        options = {**self.options, **({"isa": self.isa} if self.isa else {})}
        told = ",".join(f"{key}={value}" for key, value in options.items())
        return f"{self.engine} {self.weights}" + (f" ({told})" if told else "")

    @property
    def width(self) -> str:
        """Which peers it is compared with."""
        of_vmserve = {self.weights: 8 if "8" in self.weights else 16}
        known = GGUF_WEIGHTS if self.reads_gguf else WEIGHTS.get(self.engine, of_vmserve)
        return f"{known[self.weights]} bit"

    @property
    def reads_gguf(self) -> bool:
        return self.engine in ("vmserve", "llama.cpp") and self.weights in GGUF_WEIGHTS

    @property
    def is_played(self) -> bool:
        """Whether served requests are played to it in process: it has no server here."""
        is_continuous = self.options.get("batching") == "continuous"
        return self.engine == "openvino" or (self.engine == "transformers" and is_continuous)

    def is_comparable(self, other: Subject) -> bool:
        """Whether the instruction set and the width are the same, and the file if both read one."""
        if self.reads_gguf and other.reads_gguf and self.weights != other.weights:
            return False
        return (self.width, self.isa) == (other.width, other.isa)


def value_of(text: str) -> Any:
    """Parse ``"4"`` as 4, ``"true"`` as True, ``"none"`` as None, else keep the text."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


def options_of(text: str, engine: str) -> tuple[dict[str, Any], str]:
    """Parse ``a=1,isa=x``: the options, and the instruction set. Raises ValueError."""
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise ValueError(f"{part!r} is no OPTION=VALUE")
        options[name.strip().replace("-", "_")] = value_of(value.strip())
    isa = options.pop("isa", "")
    if isa and (engine not in ISA_ENGINES or isa not in ISAS):
        known = f"{', '.join(ISAS)} of {' and '.join(ISA_ENGINES)}"
        raise ValueError(f"{engine} with isa={isa}: instruction sets to choose are {known}")
    return options, isa


def variant_of(text: str) -> Subject:
    """``native:linear_backend=native`` as a subject. Raises ValueError."""
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ValueError(f"{text!r} has no name: write NAME:OPTION=VALUE,...")
    options, isa = options_of(rest, "vmserve")
    weights = options.pop("weights", None)
    if weights not in (None, *GGUF_WEIGHTS):
        raise ValueError(f"weights={weights}: GGUF files here are {', '.join(GGUF_WEIGHTS)}")
    weights = weights or options.get("quantization") or options.get("dtype") or "checkpoint"
    return Subject("vmserve", str(weights), name.strip(), options, isa)


def peers_of(text: str) -> list[Subject]:
    """``openvino:int8:max_num_seqs=32`` as subjects; one for each of its weights where none
    are named. Raises ValueError.
    """
    engine, *rest = text.split(":")
    if engine not in WEIGHTS:
        raise ValueError(f"no peer is called {engine!r}: choose from {', '.join(WEIGHTS)}")
    options, isa = options_of(rest.pop() if rest and "=" in rest[-1] else "", engine)
    known = WEIGHTS[engine]
    if len(rest) > 1 or (rest and rest[0] not in known):
        raise ValueError(f"{text!r}: the weights of {engine} are {', '.join(known)}")
    weights = rest or [name for name, bits in known.items() if bits > 4]
    return [Subject(engine, each, options=options, isa=isa) for each in weights]


def subjects_of(variants: list[str], peers: list[str]) -> list[Subject]:
    """Parse all subjects, vmserve first. Raises ValueError for two of one name."""
    found = [variant_of(text) for text in variants]
    found += [each for text in peers for each in peers_of(text)]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice: give variants names of their own")
    return found
