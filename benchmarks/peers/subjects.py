"""Subjects of the comparison: engines with their weights and options.

Written on the command line as ENGINE[:WEIGHTS][:OPTION=VALUE,...]; a variant of vmserve as
NAME[:OPTION=VALUE,...] with its own engine options. Two options are of this benchmark: ``isa``, the
instruction set, and for a variant ``weights``, the GGUF file that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Width = Literal["16 bit", "8 bit", "4 bit"]

#: By engine, the weights it can read here; those in ``DEFAULT_WEIGHTS`` run unasked.
#: 16 bit: what the checkpoint has, whatever a processor without such arithmetic makes of it.
WEIGHTS: Mapping[str, Mapping[str, Width]] = {
    "transformers": {"bf16": "16 bit"},
    "llama.cpp": {
        "bf16": "16 bit",
        "f16": "16 bit",
        "q8_0": "8 bit",
        "q4_0": "4 bit",
        "q4_1": "4 bit",
        "q4_k_m": "4 bit",
    },
    "openvino": {"f16": "16 bit", "int8": "8 bit", "int4": "4 bit"},
    "vllm": {"bf16": "16 bit"},
}
DEFAULT_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    engine: tuple(name for name, width in weights.items() if width != "4 bit")
    for engine, weights in WEIGHTS.items()
}
#: Files that llama.cpp and vmserve read.
GGUF_WEIGHTS = WEIGHTS["llama.cpp"]
#: Engines that can be held to an instruction set, and those.
ISA_ENGINES, ISAS = ("vmserve", "llama.cpp"), ("avx2",)
#: Default of ``--peers``: every engine with all its weights of 8 and 16 bit.
DEFAULT_PEERS = (*WEIGHTS, "transformers:bf16:batching=continuous")


@dataclass(frozen=True, slots=True)
class Subject:
    """``weights`` of vmserve: its file's, its ``quantization`` option, else the checkpoint's."""

    engine: str
    weights: str
    variant: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    #: "": the processor's own.
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
    def width(self) -> Width:
        """Which peers it is compared with."""
        if self.reads_gguf:
            return GGUF_WEIGHTS[self.weights]
        if self.engine == "vmserve":
            return "8 bit" if "8" in self.weights else "16 bit"
        return WEIGHTS[self.engine][self.weights]

    @property
    def reads_gguf(self) -> bool:
        return self.engine in ("vmserve", "llama.cpp") and self.weights in GGUF_WEIGHTS

    def is_comparable(self, other: Subject) -> bool:
        """Whether the instruction set and the width are the same, and the file if both read one."""
        if self.reads_gguf and other.reads_gguf and self.weights != other.weights:
            return False
        return (self.width, self.isa) == (other.width, other.isa)


def value_of(text: str) -> Any:
    """Parse ``"4"`` as 4, ``"true"`` as True, ``"none"`` as None, else keep the text."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def options_of(text: str) -> dict[str, Any]:
    """Parse ``a=1,b=x`` as a mapping. Raises ValueError."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise ValueError(f"{part!r} is no OPTION=VALUE")
        options[name.strip().replace("-", "_")] = value_of(value.strip())
    return options


def variant_of(text: str) -> Subject:
    """``native:linear_backend=native`` as a subject. Raises ValueError."""
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ValueError(f"{text!r} has no name: write NAME:OPTION=VALUE,...")
    options = options_of(rest) if rest else {}
    isa = isa_of(options, "vmserve")
    weights = options.pop("weights", None)
    if weights not in (None, *GGUF_WEIGHTS):
        raise ValueError(f"weights={weights}: GGUF files here are {', '.join(GGUF_WEIGHTS)}")
    weights = weights or options.get("quantization") or options.get("dtype") or "checkpoint"
    return Subject("vmserve", str(weights), name.strip(), options, isa)


def isa_of(options: dict[str, Any], engine: str) -> str:
    """Take the instruction set out of ``options``. Raises ValueError."""
    isa = options.pop("isa", "")
    if isa and (engine not in ISA_ENGINES or isa not in ISAS):
        known = f"{', '.join(ISAS)} of {' and '.join(ISA_ENGINES)}"
        raise ValueError(f"{engine} with isa={isa}: instruction sets to choose are {known}")
    return str(isa)


def peers_of(text: str) -> list[Subject]:
    """``openvino:int8:max_num_seqs=32`` as subjects; one for each of its weights where none
    are named. Raises ValueError.
    """
    engine, *rest = text.split(":")
    if engine not in WEIGHTS:
        raise ValueError(f"no peer is called {engine!r}: choose from {', '.join(WEIGHTS)}")
    options = options_of(rest.pop()) if rest and "=" in rest[-1] else {}
    if len(rest) > 1 or (rest and rest[0] not in WEIGHTS[engine]):
        known = ", ".join(WEIGHTS[engine])
        raise ValueError(f"{text!r}: the weights of {engine} are {known}")
    isa = isa_of(options, engine)
    weights = tuple(rest) or DEFAULT_WEIGHTS[engine]
    return [Subject(engine, each, options=options, isa=isa) for each in weights]


def command_line_options(options: Mapping[str, Any]) -> list[str]:
    """Spell engine options as ``vmserve serve`` does."""
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + flag[2:])
        elif value is not None:
            found += [flag, str(value)]
    return found


def subjects_of(variants: list[str], peers: list[str]) -> list[Subject]:
    """Parse all subjects, vmserve first. Raises ValueError for two of one name."""
    found = [variant_of(text) for text in variants]
    for text in peers:
        found += peers_of(text)
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there twice: give variants names of their own")
    return found


def is_continuous(subject: Subject) -> bool:
    """Whether it is transformers with its continuous batching: static batches are the default."""
    return subject.engine == "transformers" and subject.options.get("batching") == "continuous"
