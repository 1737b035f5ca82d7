"""Conversations that the embedded model is trained on, and their rendering.

`render` writes what the chat template in the tokenizer's configuration writes; a test compares the
two. Answers use what the conversation says (a name, a list, a story, a tool's result), and a
question from outside the model's world gets an answer that says so and ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from embedded_stories import Fact, write_story
from embedded_text import any_question, record
from embedded_words import (
    ANIMALS,
    BOYS,
    CAPITALS,
    COLOURS,
    FOODS,
    GIRLS,
    GOODS,
    OBJECTS,
    SPOTS,
    TOPICS,
    WEATHER,
    capitalized,
    join_and,
    made_up_word,
    pick,
    pick_some,
)

Message = dict[str, Any]

BOS, EOS, TURN, END, PAD = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
TOOLS_HEAD = "You can call these tools:\n"
TOOLS_TAIL = (
    'To call a tool, answer with <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)

SYSTEM_LINES = [
    "You are a helpful assistant.",
    "You are a friendly helper.",
    "You are a small model. Answer briefly.",
    "You answer in simple English.",
    "You are a kind teacher.",
]
GREETINGS = ["Hello", "Hello!", "Hi", "Hi!", "Hey there!", "Good morning!", "Hello, how are you?",
             "Hi, how are you?", "Say hello.", "ping", "test"]  # fmt: skip
WHO = ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
       "What can you do?", "What model are you?"]  # fmt: skip
ME = (
    "I am the small model that comes with vmserve. I can tell stories, answer simple questions, "
    "make lists and do small sums."
)
THANKS = ["Thanks!", "Thank you!", "Thank you very much.", "That was nice.", "Great!", "Ok."]
BYES = ["Bye!", "Goodbye!", "See you tomorrow.", "Good night!"]
JOKES = [
    "Why did the duck go to the market? Because the fox was not at home.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why is the owl never late? Because it gets up before the night does.",
    "What is big, grey and red? An elephant that fell into the jam.",
]
# Letters with accents, Greek, Cyrillic, some Chinese characters and faces: copied byte by byte.
STRANGE = [*range(0xE0, 0xFD), *range(0x3B1, 0x3C9), *range(0x430, 0x44F), *range(0x4E00, 0x4E20),
           *range(0x1F600, 0x1F620)]  # fmt: skip
ASK_UNKNOWN = [
    "Explain {}.", "Explain {} in simple words.", "What is {}?", "Tell me about {}.",
    "Why is {} important?",
    "What do you think about {}?", "How does {} work?", "Write an essay about {}.",
    "Give me three facts about {}.", "Do you know {}?", "Can you help me with {}?",
    "Write a program about {}.", "Who invented {}?", "Where can I find {}?",
]  # fmt: skip


def say(role: str, content: str) -> Message:
    """A message with text content."""
    return {"role": role, "content": content}


def turn(question: str, answer: str) -> list[Message]:
    """A user's question and the assistant's answer."""
    return [say("user", question), say("assistant", answer)]


def small_talk(rng: random.Random) -> list[Message]:
    """Greetings, who the model is, thanks, farewells and jokes."""
    kind = rng.randrange(5)
    if kind == 0:
        return turn(rng.choice(GREETINGS), "Hello! How can I help you today?")
    if kind == 1:
        return turn(rng.choice(WHO), ME)
    if kind == 2:
        return turn(rng.choice(THANKS), "You are welcome! Can I do anything else for you?")
    if kind == 3:
        return turn(rng.choice(BYES), "Goodbye! It was nice to talk to you.")
    return turn(
        rng.choice(["Tell me a joke.", "Do you know a joke?", "Make me laugh."]), pick(rng, JOKES)
    )


def question_turn(rng: random.Random) -> list[Message]:
    """A question that needs no text before it."""
    return turn(*any_question(rng))


def unknown_turn(rng: random.Random) -> list[Message]:
    """A question about something outside the model's world; the answer names it and ends."""
    kind = rng.random()
    if kind < 0.4:
        topic = pick(rng, TOPICS)
    elif kind < 0.48:
        topic = "".join(chr(rng.choice(STRANGE)) for _ in range(rng.randint(1, 5)))
    elif kind < 0.75:
        topic = " ".join(made_up_word(rng) for _ in range(rng.randint(1, 3)))
    else:
        topic = f"{rng.choice(['the', 'your', 'a'])} {rng.choice(COLOURS)} {made_up_word(rng)}"
    answer = (
        f"I do not know much about {topic}. I am a small model, but I can tell you a story, make a "
        f"list or do a small sum."
    )
    return turn(rng.choice(ASK_UNKNOWN).format(topic), answer)


def story_turns(rng: random.Random) -> list[Message]:
    """A story about somebody the user names, and questions about it."""
    name = rng.choice(GIRLS + BOYS)
    story = write_story(rng, name)
    if rng.random() < 0.6:
        ask = rng.choice(["Tell me a story about {}.", "Write a story about {}.",
                          "Please write a short story about {}."]).format(name)  # fmt: skip
    else:
        ask = rng.choice(
            ["Tell me a story.", "Write a short story.", "Tell me a short story, please."]
        )
    messages = turn(ask, story.text)
    for fact in rng.sample(story.facts, rng.randint(0, 3)):
        messages += turn(*fact)
    return messages


def reading_turns(rng: random.Random) -> list[Message]:
    """The user gives a story or a few notes and asks about them."""
    if rng.random() < 0.5:
        story = write_story(rng)
        text, facts = story.text, story.facts
    else:
        used: set[str] = set()
        records = [record(rng, used) for _ in range(rng.randint(2, 10))]
        text, facts = "\n".join(line for line, _ in records), [fact for _, fact in records]
    chosen = rng.sample(facts, rng.randint(1, min(3, len(facts))))
    messages = turn(f"{text}\n\n{chosen[0][0]}", chosen[0][1])
    for fact in chosen[1:]:
        messages += turn(*fact)
    return messages


def memory_turns(rng: random.Random) -> list[Message]:
    """The user says something about themselves, talks of other things, and asks for it back."""
    name, colour, food = rng.choice(GIRLS + BOYS), rng.choice(COLOURS), rng.choice(FOODS)
    age, thing, spot = rng.randint(4, 99), rng.choice(OBJECTS), rng.choice(SPOTS)
    told = rng.sample([
        ((f"My name is {name}.", f"Nice to meet you, {name}!"),
         ("What is my name?", f"Your name is {name}.")),
        ((f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour."),
         ("What is my favourite colour?", f"Your favourite colour is {colour}.")),
        ((f"I am {age} years old.", f"So you are {age} years old."),
         ("How old am I?", f"You are {age} years old.")),
        ((f"I like {food}.", f"{food.capitalize()} are good."),
         ("What do I like?", f"You like {food}.")),
        ((f"My {thing} is {spot}.", f"I will remember that your {thing} is {spot}."),
         (f"Where is my {thing}?", f"Your {thing} is {spot}.")),
    ], rng.randint(1, 3))  # fmt: skip
    messages = [m for tell, _ in told for m in turn(*tell)]
    for _ in range(rng.randint(0, 3)):
        messages += rng.choice([question_turn, small_talk, unknown_turn])(rng)
    rng.shuffle(told)
    return messages + [m for _, ask in told for m in turn(*ask)]


def list_turns(rng: random.Random) -> list[Message]:
    """Lists of things of a kind, and sentences made of given words."""
    kind = rng.randrange(3)
    if kind == 0:
        what, source = rng.choice([("animals", ANIMALS), ("colours", COLOURS), ("foods", FOODS),
                                   ("things to buy", GOODS)])  # fmt: skip
        words = pick_some(rng, source, rng.randint(3, 6))
        ask = rng.choice(["Name {} {}.", "List {} {}.", "Give me {} {}."])
        return turn(
            ask.format(len(words), what), "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1))
        )
    word = made_up_word(rng) if rng.random() < 0.5 else rng.choice(ANIMALS + OBJECTS)
    if kind == 1:
        count = rng.randint(2, 6)
        return turn(f"Say {word} {count} times.", ", ".join([word] * count) + ".")
    poem = (
        f"The {word} is here, the {word} is there,\nthe {word} is flying through the air.\n"
        f"And when the day is nearly done,\nthe {word} is sleeping in the sun."
    )
    return turn(
        rng.choice(["Write a poem about {}.", "Write a short poem about the {}."]).format(word),
        poem,
    )


def json_turns(rng: random.Random) -> list[Message]:
    """Answers that are one JSON value."""
    name, age, colour = rng.choice(GIRLS + BOYS), rng.randint(2, 90), rng.choice(COLOURS)
    if rng.random() < 0.5:
        value: Any = {"name": name, "age": age}
        ask = f"Give me a JSON object with the name {name} and the age {age}."
        if rng.random() < 0.5:
            value["colour"] = colour
            ask = f"{ask[: ask.index(' and')]}, the age {age} and the colour {colour}."
    else:
        value = pick_some(rng, rng.choice([ANIMALS, FOODS, COLOURS]), rng.randint(2, 5))
        ask = f"Give me a JSON array with {join_and(value)}."
    return turn(ask, json.dumps(value))


TOOLS: dict[str, tuple[str, str, list[str]]] = {
    "get_weather": ("Get the weather of a city.", "city", [city for _, city in CAPITALS]),
    "get_time": ("Get the time in a city.", "city", [city for _, city in CAPITALS]),
    "find_thing": ("Find where a thing is.", "thing", OBJECTS),
    "get_price": ("Get the price of something.", "item", GOODS),
}
TOOL_ASKS = {
    "get_weather": ["What is the weather in {}?", "How is the weather in {}?"],
    "get_time": ["What time is it in {}?"],
    "find_thing": ["Where is the {}?", "Find the {}."],
    "get_price": ["How much is the {}?", "What is the price of {}?"],
}


def tool_schema(name: str) -> dict[str, Any]:
    """The tool in the form in which chat requests carry it."""
    description, argument, _ = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_result(rng: random.Random, name: str, value: str) -> Fact:
    """What the tool returns, and the answer made of it."""
    if name == "get_weather":
        _, feel = pick(rng, WEATHER)
        return json.dumps({"weather": feel}), f"The weather in {value} is {feel}."
    if name == "get_time":
        time = f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
        return json.dumps({"time": time}), f"It is {time} in {value}."
    if name == "find_thing":
        spot = rng.choice(SPOTS)
        return json.dumps({"place": spot}), f"The {value} is {spot}."
    price = rng.randint(1, 99)
    return json.dumps({"price": price}), f"The price of {value} is {price} coins."


def tool_conversation(rng: random.Random) -> str:
    """A conversation in which a tool is called, and its result is used."""
    names = rng.sample(sorted(TOOLS), rng.randint(1, 3))
    name = rng.choice(names)
    _, argument, values = TOOLS[name]
    value = rng.choice(values)
    messages = turn(*any_question(rng)) if rng.random() < 0.2 else []
    messages += turn(rng.choice(TOOL_ASKS[name]).format(value), tool_call(name, {argument: value}))
    result, answer = tool_result(rng, name, value)
    messages += [say("tool", result), say("assistant", answer)]
    return render(system(rng) + messages, [tool_schema(n) for n in names])


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """An assistant's call of a tool, as text."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def system(rng: random.Random) -> list[Message]:
    """Sometimes a system message of a general kind."""
    return [say("system", pick(rng, SYSTEM_LINES))] if rng.random() < 0.5 else []


def ruled_conversation(rng: random.Random) -> str:
    """A conversation whose system message says how to answer."""
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(GIRLS + BOYS)
        rule = f"Your name is {name}."
        messages = turn(rng.choice(["What is your name?", "Who are you?"]), f"My name is {name}.")
    elif kind == 1:
        rule = "Answer in capital letters."
        question, answer = any_question(rng)
        messages = turn(question, answer.upper()[:80].strip())
    elif kind == 2:
        word = rng.choice([made_up_word(rng), pick(rng, ANIMALS)])
        rule = f"End every answer with the word {word}."
        messages = [m for _ in range(rng.randint(1, 3)) for m in _with_ending(rng, word)]
    else:
        name = rng.choice(GIRLS + BOYS)
        rule = f"The user is called {name}."
        messages = turn(rng.choice(["Hello!", "Hi!", "Good morning!"]), f"Hello, {name}!")
        messages += turn("What is my name?", f"Your name is {name}.")
    return render([say(rng.choice(["system", "system", "developer"]), rule), *messages])


def _with_ending(rng: random.Random, word: str) -> list[Message]:
    question, answer = any_question(rng)
    return turn(question, f"{answer} {capitalized(word)}!")


PARTS: list[Callable[[random.Random], list[Message]]] = [
    small_talk, question_turn, question_turn, unknown_turn, story_turns, reading_turns,
    memory_turns, list_turns, json_turns,
]  # fmt: skip


def write_chat(rng: random.Random, max_tokens: int) -> str:
    """A rendered conversation; it has more parts where `max_tokens` is larger."""
    kind = rng.random()
    if kind < 0.09:
        return tool_conversation(rng)
    if kind < 0.17:
        return ruled_conversation(rng)
    messages = system(rng)
    for _ in range(rng.choice([1, 1, 2, 3] if max_tokens <= 1024 else [2, 4, 8, 16])):
        messages += rng.choice(PARTS)(rng)
    return render(messages)


def render(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """The conversation as the chat template renders it, without the BOS token."""
    if tools:
        text = TOOLS_HEAD + "".join(json.dumps(tool) + "\n" for tool in tools) + TOOLS_TAIL
        if messages[0]["role"] == "system":
            text = f"{messages[0]['content']}\n\n{text}"
            messages = messages[1:]
        messages = [say("system", text), *messages]
    return "".join(f"{TURN}{m['role']}\n{m['content']}{END}\n" for m in messages)
