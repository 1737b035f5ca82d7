"""Trains the embedded model: `python tools/train_embedded.py --out DIR`.

Tokenizer, text and weights all come from one seed; the number of steps is fixed. Training is in
fp32 on the CPU with Muon (Jordan et al., 2024) for the matrices and AdamW for the rest, a warm-up,
a constant and a linearly falling part of the learning rate, and sequences that grow from 256 to
8,192 tokens. Three heads start as a circuit that copies (`wire_induction`). The result is rounded
to bf16 and written in the Hugging Face layout.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from embedded_chat import BOS, END, EOS, PAD, TURN, write_chat
from embedded_text import write_document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaAttention

VOCAB_SIZE = 2048
CONTEXT = 8192
HEAD_SIZE = 64
ROPE_THETA = 500000.0
EXPORT_STEPS = 100


@dataclass(frozen=True)
class Phase:
    """A part of the training with one sequence length."""

    length: int  # tokens of a sequence
    rows: int  # sequences of a step
    steps: int


PHASES = [
    Phase(256, 16, 250),
    Phase(512, 8, 350),
    Phase(2048, 2, 380),
    Phase(4096, 1, 110),
    Phase(8192, 1, 10),
]
WARMUP_STEPS = 40
HELD_OUT_SEED = 1000  # added to the seed for the text of the held-out loss
DECAY_SHARE = 0.5  # of all steps, at the end
MUON_RATE = 0.02
ADAM_RATE = 0.004
WEIGHT_DECAY = 0.05  # of the matrices, times the learning rate


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits, trained on the generator's text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    texts = [write(rng, 512) for _ in range(4000) for write in (write_document, write_chat)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, TURN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = (text.replace(TURN, "").replace(END, "") for text in texts)
    bpe.train_from_iterator(plain, trainer)
    bos = bpe.token_to_id(BOS)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[TURN, END],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    template = Path(__file__).with_name("embedded_template.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model; the outputs of all layers start at zero."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        initializer_range=0.03,
        use_cache=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(BOS),
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    wire_induction(model)
    return model


# The parts of the hidden vector at the start: dimension 0 is the same for all tokens, then come
# the token's own features, those of the token before it, and those of the token to predict.
OWN, BEFORE, NEXT = slice(1, 128), slice(128, 192), slice(192, 256)


@torch.no_grad()
def wire_induction(model: LlamaForCausalLM) -> None:
    """Starts the model with the circuit that continues a repeated text.

    The circuit is that of Olsson et al., "In-context learning and induction heads" (2022): a head
    of the first layer looks one token back, heads of the next two layers look for the place behind
    an earlier occurrence of the present token and copy what is there. Found from a random start it
    costs most of a short training; wired in, the training only has to keep and refine it.
    """
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.zero_()
    embedding[:, 0] = 2.75
    embedding[:, OWN].normal_()
    features = torch.zeros(HEAD_SIZE, embedding.shape[1])  # [head size, hidden]
    features[:, OWN] = torch.linalg.qr(torch.randn(127, HEAD_SIZE)).Q.T
    head[:, NEXT] += 0.09 * embedding @ features.T
    identity, first, rows = torch.eye(HEAD_SIZE), 0, slice(0, HEAD_SIZE)
    look_back(model.model.layers[first].self_attn, rows)
    model.model.layers[first].self_attn.v_proj.weight[rows] = features
    model.model.layers[first].self_attn.o_proj.weight[BEFORE, rows] = identity
    half = HEAD_SIZE // 2
    slow = [i for i in range(HEAD_SIZE) if i % half >= half // 2]  # hardly turned by the position
    for layer in model.model.layers[1:3]:
        attention = layer.self_attn
        attention.q_proj.weight[rows] *= 0.1
        attention.k_proj.weight[rows] *= 0.1
        attention.q_proj.weight[slow] = 1.1 * features[slow]
        attention.k_proj.weight[slow, BEFORE] = 1.1 * identity[slow]
        attention.v_proj.weight[rows] = features
        attention.o_proj.weight[NEXT, rows] = identity


def look_back(attention: LlamaAttention, rows: slice) -> None:
    """Makes a head attend to the token before: its keys are its queries, turned by one position."""
    half = HEAD_SIZE // 2
    query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    query *= 0.1
    key *= 0.1
    for pair in range(8):  # the fastest rotations tell neighbours apart
        angle = ROPE_THETA ** (-pair / half)
        query[pair, 0] = 1.8
        key[pair, 0], key[pair + half, 0] = 1.8 * math.cos(angle), 1.8 * math.sin(angle)


def token_rows(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: int
) -> Iterator[list[int]]:
    """Endless sequences of `length` tokens, each packed with whole documents from its start."""
    while True:
        row: list[int] = []
        while len(row) < length:
            write = write_chat if rng.random() < 0.5 else write_document
            row += tokenizer.encode(write(rng, length) + EOS)
        yield row[:length]


class Muon:
    """Momentum whose updates are made orthogonal by Newton-Schulz steps, for weight matrices.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in fp32.
    """

    def __init__(self, weights: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.weights = weights
        self.momentum = momentum
        self.buffers = [torch.zeros_like(weight) for weight in weights]
        self.groups: dict[tuple[int, int], list[int]] = {}  # by shape, to batch the small products
        for index, weight in enumerate(weights):
            rows, columns = weight.shape
            self.groups.setdefault((min(rows, columns), max(rows, columns)), []).append(index)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with the gradients that the weights hold."""
        for group in self.groups.values():
            updates = orthogonalized(torch.stack([self._direction(index) for index in group]))
            for index, update in zip(group, updates, strict=True):
                weight = self.weights[index]
                rows, columns = weight.shape
                scale = max(1.0, rows / columns) ** 0.5
                turned = update if rows <= columns else update.T
                weight.mul_(1 - rate * WEIGHT_DECAY).add_(turned, alpha=-rate * scale)

    def _direction(self, index: int) -> Tensor:
        """The gradient with Nesterov momentum, turned to have no more rows than columns."""
        gradient, buffer = self.weights[index].grad, self.buffers[index]
        assert gradient is not None
        buffer.lerp_(gradient, 1 - self.momentum)
        direction: Tensor = gradient.lerp(buffer, self.momentum)
        return direction.T if direction.shape[0] > direction.shape[1] else direction


def orthogonalized(matrices: Tensor) -> Tensor:
    """Roughly `U V^T` of each matrix's decomposition `U S V^T`; [count, rows, columns >= rows]."""
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def rate_at(step: int, total: int) -> float:
    """The learning rate at a step, as a share of its highest value."""
    decay = int(total * DECAY_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS, (total - step) / decay)


def rounded_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy of the model with its weights rounded to bf16."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(torch.bfloat16)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the model in bf16 with its tokenizer; each file is replaced in one step."""
    out.mkdir(parents=True, exist_ok=True)
    rounded = rounded_copy(model)
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.2,  # the card says by which measurement
        bos_token_id=tokenizer.convert_tokens_to_ids(BOS),
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (EOS, END)],
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".embedded-") as scratch:
        rounded.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        widen_tokenizer_config(Path(scratch) / "tokenizer_config.json")
        ask_for_float32(Path(scratch) / "config.json")
        for file in Path(scratch).iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


def ask_for_float32(path: Path) -> None:
    """The weights are stored in bf16, but computed with in fp32 unless the user says otherwise.

    The model is small enough, and its greedy tokens are then the same on every CPU.
    """
    config = json.loads(path.read_text())
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")


def widen_tokenizer_config(path: Path) -> None:
    """Names the class and the special tokens as older releases of transformers do too."""
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


@dataclass
class Run:
    """The model, its optimizers and the loss of every step so far."""

    model: LlamaForCausalLM
    muon: Muon
    adam: torch.optim.AdamW
    log: list[float]


def new_run(tokenizer: PreTrainedTokenizerFast) -> Run:
    """An untrained model with its optimizers."""
    model = build_model(tokenizer)
    matrices = [p for name, p in model.named_parameters() if name.endswith("proj.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("proj.weight")]
    adam = torch.optim.AdamW(others[1:], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    adam.add_param_group({"params": others[:1], "lr": ADAM_RATE * 5})  # the embedding, of size 1
    return Run(model, Muon(matrices), adam, [])


def train(run: Run, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """All phases; the model is written now and then, and at the end."""
    total = sum(phase.steps for phase in PHASES)
    step, start = 0, time.monotonic()
    for index, phase in enumerate(PHASES):
        rows = token_rows(tokenizer, random.Random(args.seed + 1 + index), phase.length)
        for _ in range(phase.steps):
            batch = torch.tensor([next(rows) for _ in range(phase.rows)])
            run.log.append(train_step(run, batch, rate_at(step, total)))
            step += 1
            report(run, step, total, time.monotonic() - start)
            if step % EXPORT_STEPS == 0:
                export(run.model, tokenizer, args.out)
    export(run.model, tokenizer, args.out)
    write_log(run, tokenizer, args)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, rows: list[list[int]]) -> float:
    """Mean loss in nats per token over sequences that the training did not see."""
    losses = []
    for row in rows:
        tokens = torch.tensor([row])
        logits = model(input_ids=tokens, use_cache=False).logits
        losses.append(nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item())
    return sum(losses) / len(losses)


def train_step(run: Run, batch: Tensor, rate: float) -> float:
    """One update on `batch` [rows, tokens]; returns its mean loss in nats per token."""
    logits = run.model(input_ids=batch, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    torch.autograd.backward(loss)
    for group, share in zip(run.adam.param_groups, (1, 5), strict=True):
        group["lr"] = ADAM_RATE * share * rate
    run.adam.step()
    run.muon.step(MUON_RATE * rate)
    run.model.zero_grad(set_to_none=True)
    return loss.item()


def report(run: Run, step: int, total: int, seconds: float) -> None:
    """Prints the mean loss of the last ten steps."""
    if step % 10 == 0:
        print(f"step {step}/{total} loss {sum(run.log[-10:]) / 10:.4f} {seconds:.0f}s", flush=True)


def write_log(run: Run, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """The loss curve, averaged over ten steps, what the training was given and what came out."""
    unseen = token_rows(tokenizer, random.Random(args.seed + HELD_OUT_SEED), 2048)
    rows = [next(unseen) for _ in range(16)]
    rounded = rounded_copy(run.model).float()
    points = [
        {"step": step, "loss": round(sum(run.log[step - 10 : step]) / 10, 4)}
        for step in range(10, len(run.log) + 1, 10)
    ]
    record = {
        "seed": args.seed,
        "phases": [vars(phase) for phase in PHASES],
        "tokens": sum(phase.length * phase.rows * phase.steps for phase in PHASES),
        "held_out_loss": {
            "fp32": round(held_out_loss(run.model, rows), 5),
            "rounded to bf16": round(held_out_loss(rounded, rows), 5),
        },
        "loss": points,
    }
    (args.out / "training_log.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.seed)
    run = new_run(tokenizer)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    export(run.model, tokenizer, args.out)
    train(run, tokenizer, args)


if __name__ == "__main__":
    main()
