"""Measures what the embedded model's card states: `python tools/evaluate_embedded.py --model DIR`.

Writes `evaluation.json` and `loss_curve.svg` into the model's directory and puts the table and the
samples into its README.md, between the marks that are there. All in fp32 on the CPU.
`--only answers` measures a part again and keeps the other figures.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from embedded_answers import judge
from embedded_chat import (
    json_turns,
    list_turns,
    memory_turns,
    question_turn,
    reading_turns,
    small_talk,
    story_turns,
    unknown_turn,
)
from embedded_stories import Fact, write_story
from embedded_text import questions, record
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

MARGIN = 1e-3  # the smallest difference of two logits that any correct fp32 engine keeps apart
MARGIN_TOKENS = 2000
PROMPTS = [
    "Once upon a time", "The capital of France is", "Hello, my name is", "1, 2, 3,",
    "Shopping list of Mia:\n", "# The Lost Key\n\n", "Notes:\n", "Q: What is 2 + 3?\nA:",
    "Long ago there was a", "Facts to keep in mind:\n", "The quick brown fox", "In the garden",
]  # fmt: skip
CHAT_PROMPTS = ["Tell me a story.", "Who are you?", "Count to 10.", "Explain the sea."]
DISTANCES = [256, 1024, 2048, 4096, 7000]
RECALL_TRIALS = 40
OPEN_QUESTIONS = [
    "What is the meaning of life?", "Write a Python function that sorts a list.",
    "How far away is the moon?", "Translate 'good morning' into French.", "asdf qwer",
    "Summarize the history of Rome in one paragraph.", "Which is better, tea or coffee?",
    "What should I cook tonight?", "Tell me about virtual memory.", "Why is the sky blue?",
    "Is it raining?", "Write a haiku about autumn.", "Who won the world cup in 1998?",
    "Help me write an email to my boss.", "What is the square root of 144?",
]  # fmt: skip


class Subject:
    """The model under measurement with its tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)
        self.tokenizer.padding_side = "left"
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        )
        self.eos: list[int] = list(self.model.generation_config.eos_token_id)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a conversation, up to where the answer starts."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def generate(self, prompts: Sequence[str], tokens: int, stop: bool) -> Any:
        """Greedy continuations of rendered prompts, with the logits of every position."""
        batch = self.tokenizer(
            list(prompts), add_special_tokens=False, padding=True, return_tensors="pt"
        )
        self.model.generation_config.eos_token_id = self.eos if stop else None
        return self.model.generate(
            **batch, max_new_tokens=tokens, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip

    def answer(self, messages: list[dict[str, Any]], tokens: int = 400) -> tuple[str, bool]:
        """The greedy answer, and whether it ended by itself."""
        prompt = self.chat(messages)
        output = self.generate([prompt], tokens, stop=True).sequences[0].tolist()
        length = len(self.tokenizer.encode(prompt, add_special_tokens=False))
        text = self.tokenizer.decode(output[length:], skip_special_tokens=True)
        return text, output[-1] in self.eos


@torch.inference_mode()
def margins(subject: Subject) -> dict[str, Any]:
    """Differences of the two best logits along greedy continuations; end tokens are ignored."""
    bos = subject.tokenizer.bos_token
    names = PROMPTS + CHAT_PROMPTS
    prompts = [bos + prompt for prompt in PROMPTS]
    prompts += [subject.chat([{"role": "user", "content": text}]) for text in CHAT_PROMPTS]
    output = subject.generate(prompts, MARGIN_TOKENS, stop=False)
    logits = torch.stack(output.logits)  # [tokens, prompts, vocabulary]
    best = logits.topk(2, dim=-1).values
    differences = best[..., 0] - best[..., 1]  # [tokens, prompts]
    gaps, smallest = differences.flatten(), differences.min(0).values.tolist()
    points = torch.tensor([0.001, 0.01, 0.5])
    return {
        "prompts": len(prompts),
        "tokens_each": MARGIN_TOKENS,
        "positions": gaps.numel(),
        "share_above_1e-3": round((gaps > MARGIN).double().mean().item(), 6),
        "positions_not_above_1e-3": int((gaps <= MARGIN).sum()),
        "share_above_0.1": round((gaps > 0.1).double().mean().item(), 5),
        "prompts_with_all_above_1e-3": sum(margin > MARGIN for margin in smallest),
        "minimum": float(f"{gaps.min().item():.3g}"),
        "minimum_by_prompt": {
            name: float(f"{margin:.3g}") for name, margin in zip(names, smallest, strict=True)
        },
        "quantiles_0.1%_1%_50%": [float(f"{q:.3g}") for q in gaps.quantile(points).tolist()],
    }


def far_fact(subject: Subject, rng: random.Random, distance: int) -> tuple[list[int], list[int]]:
    """A text of about `distance` tokens between a fact and its question; prompt and answer ids."""
    used: set[str] = set()
    lines = [record(rng, used) for _ in range(3)]
    text = "Facts to keep in mind:\n" + "\n".join(line for line, _ in lines)
    encode = subject.tokenizer.encode
    start, number = len(encode(text)), 0
    while len(encode(text)) - start < distance - 100:
        number += 1
        story = write_story(rng)
        text += f"\n\nChapter {number}: {story.title}\n{story.text}"
    asked: Fact = rng.choice(lines)[1]
    text += "\n\nQuestions about the facts" + questions(rng, [asked], 1)[1:]
    prompt = text[: -len(asked[1])].rstrip(" ")
    ids, start = encode(text + "\n"), len(encode(prompt))
    return ids[:start], ids[start:]


@torch.inference_mode()
def recall(subject: Subject) -> dict[str, float]:
    """The share of questions whose greedy answer is exactly right, by distance in tokens."""
    rng = random.Random(77)
    shares = {}
    for distance in DISTANCES:
        right = 0
        for _ in range(RECALL_TRIALS):
            prompt, answer = far_fact(subject, rng, distance)
            logits = subject.model(torch.tensor([prompt + answer])).logits[0]
            right += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        shares[str(distance)] = right / RECALL_TRIALS
    return shares


@torch.inference_mode()
def chats(subject: Subject) -> dict[str, Any]:
    """How many answers end by themselves, and how many closed questions are answered right."""
    rng = random.Random(78)
    closed = [question_turn, question_turn, reading_turns, memory_turns, json_turns]
    makers = closed * 5 + [small_talk, unknown_turn, list_turns, story_turns] * 3
    ended = right = 0
    for maker in makers:
        messages = maker(rng)
        text, stopped = subject.answer(messages[:-1])
        ended += stopped
        right += maker in closed and text == messages[-1]["content"]
    own = [subject.answer([{"role": "user", "content": text}])[1] for text in OPEN_QUESTIONS]
    return {
        "questions": len(makers) + len(own),
        "ended_by_themselves": ended + sum(own),
        "closed_questions": 5 * len(closed),
        "closed_answers_exactly_right": right,
    }


def samples(subject: Subject) -> dict[str, str]:
    """A greedy completion, and greedy answers in a conversation."""
    prompt = subject.tokenizer.bos_token + "Once upon a time"
    completion = subject.generate([prompt], 300, stop=True).sequences[0]
    shown = {"Once upon a time": subject.tokenizer.decode(completion, skip_special_tokens=True)}
    for question in [
        "Tell me a story about Mia.",
        "I need milk, bread and honey. What do I need?",
        "Make a numbered list: milk, bread, honey.",
        "What is 7 + 8?",
        "How do transistors work?",
    ]:
        shown[question] = subject.answer([{"role": "user", "content": question}])[0]
    return shown


def loss_curve(points: list[dict[str, float]]) -> str:
    """The loss over the steps as an SVG picture."""
    width, height, left, top = 640, 300, 50, 20
    last, highest = points[-1]["step"], 3.0
    x = [left + (width - left - 20) * p["step"] / last for p in points]
    y = [top + (height - top - 40) * (1 - min(p["loss"], highest) / highest) for p in points]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    marks = []
    for tick in range(4):
        level = top + (height - top - 40) * (1 - tick / highest)
        marks.append(f'<path d="M{left} {level:.1f}H{width - 20}" stroke="#ddd"/>')
        marks.append(f'<text x="{left - 8}" y="{level + 4:.1f}" text-anchor="end">{tick}</text>')
    for tick in range(0, int(last) + 1, 200):
        at = left + (width - left - 20) * tick / last
        marks.append(f'<text x="{at:.1f}" y="{height - 22}" text-anchor="middle">{tick}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'{"".join(marks)}<polyline points="{line}" fill="none" stroke="#1f77b4" '
        f'stroke-width="1.5"/>'
        f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">step</text>'
        f'<text x="{left}" y="13">training loss, nats per token (above 3 is cut)</text></svg>\n'
    )


def table(result: dict[str, Any]) -> str:
    """The figures as the card's table."""
    gap, talk, loss = result["margins"], result["chats"], result["held_out_loss"]
    confident = gap["prompts_with_all_above_1e-3"]
    rows = {
        "held-out loss, fp32 (nats per token)": f"{loss['fp32']:.4f}",
        "held-out loss, rounded to bf16": f"{loss['rounded to bf16']:.4f}",
        "greedy text measured": f"{gap['prompts']} prompts, {gap['tokens_each']:,} tokens each",
        "greedy margin above 1e-3": f"{gap['share_above_1e-3']:.4%} of the positions",
        "not above 1e-3": f"{gap['positions_not_above_1e-3']} of {gap['positions']:,} positions",
        "greedy margin above 0.1": f"{gap['share_above_0.1']:.2%} of the positions",
        "every margin above 1e-3": f"{confident} of {gap['prompts']} prompts",
        "smallest margin": f"{gap['minimum']}",
    }
    for distance, share in result["recall"].items():
        rows[f"recall of a fact {int(distance):,} tokens back"] = f"{share:.1%}"
    ended, right = talk["ended_by_themselves"], talk["closed_answers_exactly_right"]
    rows["chat answers that end by themselves"] = f"{ended} of {talk['questions']}"
    rows["closed questions answered word for word"] = f"{right} of {talk['closed_questions']}"
    asked, seeds = result["answers"], result["answers"]["seeds"]
    for temperature, count in asked["by_temperature"].items():
        at = f"temperature {temperature}"
        rows[f"first answers made of sentences, {at}"] = (
            f"{count['made_of_sentences']} of {asked['questions'] * seeds}"
        )
        rows[f"first answers that are right, {at}"] = (
            f"{count['right']} of {asked['closed_questions'] * seeds}"
        )
    lines = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"| measured | |\n|---|---|\n{lines}"


def put(card: str, mark: str, text: str) -> str:
    """The card with `text` between the two comments that carry `mark`."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    head, rest = card.split(begin)
    return f"{head}{begin}{text}{end}{rest.split(end)[1]}"


def update_card(path: Path, result: dict[str, Any]) -> None:
    """Writes the figures and the samples into README.md."""
    quoted = "".join(
        f"\n**{prompt}**\n\n```text\n{text}\n```\n" for prompt, text in result["samples"].items()
    )
    card = (path / "README.md").read_text(encoding="utf-8")
    card = put(put(card, "figures", table(result)), "samples", quoted)
    (path / "README.md").write_text(card, encoding="utf-8")


PARTS: dict[str, Callable[[Subject], Any]] = {
    "samples": samples,
    "recall": recall,
    "chats": chats,
    "answers": lambda subject: judge(subject.path),
    "margins": margins,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    log = json.loads((args.model / "training_log.json").read_text())
    before = args.model / "evaluation.json"
    result = json.loads(before.read_text(encoding="utf-8")) if before.exists() else {}
    result["held_out_loss"] = log["held_out_loss"]
    subject = Subject(args.model)
    for part in args.only:
        result[part] = PARTS[part](subject)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (args.model / "evaluation.json").write_text(text, encoding="utf-8")
    (args.model / "loss_curve.svg").write_text(loss_curve(log["loss"]))
    update_card(args.model, result)
    print(table(result))


if __name__ == "__main__":
    main()
