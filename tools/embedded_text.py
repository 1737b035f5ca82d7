"""Text that the embedded model is trained on: stories, questions, lists, records, chapters.

Everything is written by small seeded grammars. Facts that a text introduces early are asked for or
used again later, near and far, so that a model of this text has to look back. `write_document` is
the entry point; chats are in `embedded_chat`.
"""

from __future__ import annotations

import random

from embedded_stories import Fact, hero, two_heroes, write_story
from embedded_words import (
    ANIMALS,
    BOYS,
    CAPITALS,
    CATEGORIES,
    COLOURS,
    DAYS,
    FOODS,
    GIRLS,
    GOODS,
    HOMES,
    JOBS,
    MONTHS,
    NUMBER_WORDS,
    OBJECTS,
    OPPOSITES,
    ORDINALS,
    SOUNDS,
    SPOTS,
    THING_COLOURS,
    TRAITS,
    a_or_an,
    capitalized,
    join_and,
    made_up_word,
    pick,
    pick_some,
)

# Facts on one line, and questions that need no text


def record(rng: random.Random, used: set[str]) -> tuple[str, Fact]:
    """One line to remember, about a name that `used` does not hold yet, with its question."""
    free = [n for n in GIRLS + BOYS if n not in used]
    name = pick(rng, free) if free and rng.random() < 0.8 else made_up_word(rng).capitalize()
    used.add(name)
    kind = rng.randrange(5)
    if kind == 0:
        code = rng.randint(100, 9999)
        return f"The code of {name} is {code}.", (
            f"What is the code of {name}?",
            f"The code of {name} is {code}.",
        )
    if kind == 1:
        colour = rng.choice(COLOURS)
        line = f"{name} likes the colour {colour}."
        return line, (f"Which colour does {name} like?", line)
    if kind == 2:
        word = made_up_word(rng)
        return f"The password of {name} is {word}.", (
            f"What is the password of {name}?",
            f"The password of {name} is {word}.",
        )
    if kind == 3:
        thing, spot = rng.choice(OBJECTS), rng.choice(SPOTS)
        return f"{name} put the {thing} {spot}.", (
            f"Where is the {thing} of {name}?",
            f"The {thing} of {name} is {spot}.",
        )
    animal = rng.choice(ANIMALS)
    return f"{name} has {a_or_an(animal)}.", (
        f"Which animal does {name} have?",
        f"{name} has {a_or_an(animal)}.",
    )


def arithmetic(rng: random.Random) -> Fact:
    """A small sum, difference or product."""
    kind = rng.randrange(5)
    if kind < 2:
        top = 10 if kind == 0 else 20
        a, b = rng.randint(0, top), rng.randint(0, top)
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    if kind == 2:
        a, b = sorted((rng.randint(0, 20), rng.randint(0, 20)), reverse=True)
        return f"What is {a} - {b}?", f"{a} - {b} = {a - b}."
    if kind == 3:
        a, b = rng.randint(1, 10), rng.randint(1, 10)
        return f"What is {a} times {b}?", f"{a} times {b} is {a * b}."
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return (
        f"How much is {NUMBER_WORDS[a]} plus {NUMBER_WORDS[b]}?",
        f"{NUMBER_WORDS[a].capitalize()} plus {NUMBER_WORDS[b]} is {NUMBER_WORDS[a + b]}.",
    )


def general_question(rng: random.Random) -> Fact:
    """A question about words, days, animals or capitals."""
    kind = rng.randrange(9)
    if kind == 0:
        country, city = pick(rng, CAPITALS)
        return f"What is the capital of {country}?", f"The capital of {country} is {city}."
    if kind == 1:
        pair = pick(rng, OPPOSITES)
        a, b = pair if rng.random() < 0.5 else pair[::-1]
        return f"What is the opposite of {a}?", f"The opposite of {a} is {b}."
    if kind == 2:
        animal, sound = pick(rng, SOUNDS)
        return (
            f"What sound does {a_or_an(animal)} make?",
            f"{capitalized(a_or_an(animal))} says {sound}.",
        )
    if kind == 3:
        thing, colour = pick(rng, THING_COLOURS)
        return f"What colour is the {thing}?", f"The {thing} is {colour}."
    if kind == 4:
        i = rng.randrange(7)
        return f"Which day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."
    if kind == 5:
        i = rng.randrange(12)
        return (
            f"Which month comes after {MONTHS[i]}?",
            f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.",
        )
    if kind == 6:
        n = rng.randint(1, 98)
        return f"Which number comes after {n}?", f"The number {n + 1} comes after {n}."
    if kind == 7:
        category = pick(rng, sorted(CATEGORIES))
        word = rng.choice(CATEGORIES[category])
        return (
            f"Is {word} an animal, a colour, a food, a day or a month?",
            f"{capitalized(word)} is {a_or_an(category)}.",
        )
    word = rng.choice(ANIMALS + OBJECTS)
    return (
        f"What is the first letter of {word}?",
        f"The first letter of {word} is {word[0].upper()}.",
    )


def list_question(rng: random.Random) -> Fact:
    """A list in the question that the answer repeats, reverses, counts or indexes."""
    source = rng.choice([GOODS, ANIMALS, OBJECTS, COLOURS])
    words = pick_some(rng, source, rng.randint(3, 7))
    if rng.random() < 0.3:
        words = [made_up_word(rng) for _ in words]
    text, kind = ", ".join(words), rng.randrange(6)
    if kind == 0:
        return f"Repeat this list: {text}.", f"{text}."
    if kind == 1:
        return f"Read this list backwards: {text}.", f"{', '.join(reversed(words))}."
    if kind == 2:
        return (
            f"How many words are in this list: {text}?",
            f"There are {len(words)} words in the list.",
        )
    if kind == 3:
        i = rng.randrange(len(words))
        return (
            f"What is the {ORDINALS[i]} word of this list: {text}?",
            f"The {ORDINALS[i]} word is {words[i]}.",
        )
    if kind == 4:
        return f"Make a numbered list: {text}.", numbered(words)
    return f"Make a list with dashes: {text}.", "\n".join(f"- {word}" for word in words)


def numbered(words: list[str]) -> str:
    """The words as a numbered list, one to a line."""
    return "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def counting(rng: random.Random) -> Fact:
    """Counting up or down, in figures or words."""
    start, length = rng.choice([1, 1, 1, rng.randint(2, 80)]), rng.randint(4, 19)
    if rng.random() < 0.2:
        low, high = 1, rng.randint(5, 20)
        return f"Count from {high} down to {low}.", ", ".join(
            str(n) for n in range(high, 0, -1)
        ) + "."
    if rng.random() < 0.2:
        high = rng.randint(4, 20)
        return f"Count to {NUMBER_WORDS[high]} in words.", ", ".join(
            NUMBER_WORDS[1 : high + 1]
        ) + "."
    ask = (
        f"Count to {length + start}." if start == 1 else f"Count from {start} to {start + length}."
    )
    return ask, ", ".join(str(n) for n in range(start, start + length + 1)) + "."


RECIPES = {
    "pancakes": ["Mix the flour, the eggs and the milk.", "Heat the pan with some butter.",
                 "Pour the mix into the pan.", "Turn the pancake when it is brown.",
                 "Eat it with honey."],
    "tea": ["Boil some water.", "Put the tea into a cup.", "Pour the hot water over the tea.",
            "Wait for three minutes.", "Add some sugar and drink it."],
    "soup": ["Wash the carrots and the potatoes.", "Cut them into small pieces.",
             "Boil them in water with some salt.", "Stir the soup from time to time.",
             "Serve it hot with bread."],
    "bread": ["Mix the flour, the water and the salt.", "Let the dough rest for one hour.",
              "Form a round loaf.", "Bake it until it is brown.", "Let it cool before you cut it."],
    "a kite": ["Tie two sticks into a cross.", "Glue paper onto the sticks.",
               "Add a long tail.", "Tie a string to the middle.", "Wait for wind and let it fly."],
}  # fmt: skip


def steps(rng: random.Random) -> Fact:
    """How to make one of a few things, in numbered steps."""
    what = pick(rng, list(RECIPES))
    return (
        f"How do I make {what}?",
        f"To make {what}, follow these steps:\n{numbered(RECIPES[what])}",
    )


def any_question(rng: random.Random) -> Fact:
    """A question of any kind that needs no text before it."""
    maker = rng.choice([arithmetic, arithmetic, general_question, general_question, list_question,
                        list_question, counting, steps])  # fmt: skip
    return maker(rng)


# Whole documents


def story_document(rng: random.Random) -> str:
    """A story, most often with a title, sometimes with questions at the end."""
    story = write_story(rng)
    head = f"# {story.title}\n\n" if rng.random() < 0.4 else ""
    return head + story.text + (questions(rng, story.facts) if rng.random() < 0.6 else "\nThe end.")


def questions(rng: random.Random, facts: list[Fact], limit: int = 4) -> str:
    """Some of the facts as `Q:` and `A:` lines, in any order."""
    chosen = rng.sample(facts, min(len(facts), rng.randint(1, limit)))
    return "\n\n" + "\n".join(f"Q: {question}\nA: {answer}" for question, answer in chosen)


def quiz_document(rng: random.Random) -> str:
    """Unrelated questions and answers."""
    pairs = [any_question(rng) for _ in range(rng.randint(2, 7))]
    return "\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs)


def records_document(rng: random.Random) -> str:
    """Lines to remember, then questions about them."""
    used: set[str] = set()
    records = [record(rng, used) for _ in range(rng.randint(3, 16))]
    head = rng.choice(["Remember these facts.", "Notes:", "What we know:"])
    lines = "\n".join(line for line, _ in records)
    return f"{head}\n{lines}" + questions(rng, [fact for _, fact in records], 6)


def person_document(rng: random.Random) -> str:
    """Somebody says who they are; a friend repeats it."""
    one, two = two_heroes(rng)
    age, home, colour = rng.randint(5, 60), pick(rng, HOMES), pick(rng, COLOURS)
    food, animal, job = pick(rng, FOODS), pick(rng, ANIMALS), pick(rng, JOBS)
    return (
        f"Hello, my name is {one.name}. I am {age} years old and I live in {home}. I am "
        f"{a_or_an(job)}. I have {a_or_an(animal)}, I like {food}, and my favourite colour is "
        f'{colour}.\nMy friend is called {two.name}. {two.name} says: "{one.name} is {age} years '
        f"old and works as {a_or_an(job)}. {one.name} lives in {home}, likes {food} and has "
        f'{a_or_an(animal)}. The favourite colour of {one.name} is {colour}."'
    )


def lines_document(rng: random.Random) -> str:
    """Plain statements and sequences, as a completion prompt would start them."""
    kind = rng.randrange(5)
    if kind == 0:
        pairs = pick_some(rng, CAPITALS, rng.randint(3, 8))
        return "\n".join(f"The capital of {country} is {city}." for country, city in pairs)
    if kind == 1:
        return ", ".join(DAYS) + ".\n" + ", ".join(MONTHS) + "."
    if kind == 2:
        start = rng.choice([1, 1, rng.randint(2, 60)])
        return ", ".join(str(n) for n in range(start, start + rng.randint(10, 40))) + "."
    if kind == 3:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join(letters if rng.random() < 0.5 else letters.upper())
    who, goods = hero(rng), pick_some(rng, GOODS, rng.randint(3, 8))
    return f"Shopping list of {who.name}:\n{numbered(goods)}\n{who.name} buys {join_and(goods)}."


def book_document(rng: random.Random, sections: int) -> str:
    """A long text: facts first, then chapters, lists and notes, with questions far behind them.

    Each section may ask about any earlier one; the last section asks about the first facts.
    """
    used: set[str] = set()
    first = [record(rng, used) for _ in range(rng.randint(1, 4))]
    facts = [fact for _, fact in first]
    parts = ["Facts to keep in mind:\n" + "\n".join(line for line, _ in first)]
    for number in range(1, sections + 1):
        kind = rng.random()
        if kind < 0.65:
            free = [name for name in GIRLS + BOYS if name not in used]
            story = write_story(rng, pick(rng, free) if free else None)
            used.add(story.hero)
            parts.append(f"Chapter {number}: {story.title}\n{story.text}")
            facts += story.facts if free else []  # a second hero of one name would be ambiguous
        elif kind < 0.8:
            more = [record(rng, used) for _ in range(rng.randint(2, 8))]
            parts.append(f"Chapter {number}: Notes\n" + "\n".join(line for line, _ in more))
            facts += [fact for _, fact in more]
        else:
            parts.append(f"Chapter {number}: Questions" + questions(rng, facts, 5)[1:])
    parts.append("Questions about the facts" + questions(rng, [fact for _, fact in first], 4)[1:])
    return "\n\n".join(parts)


def echo_document(rng: random.Random) -> str:
    """Words in any order, written two or three times."""
    source = GIRLS + BOYS + ANIMALS + OBJECTS + COLOURS + GOODS + JOBS + TRAITS + NUMBER_WORDS
    count = rng.randint(5, 24)
    words = [rng.choice(source) if rng.random() < 0.8 else made_up_word(rng) for _ in range(count)]
    line = rng.choice([" ", ", ", "\n"]).join(words)
    return "\n".join(["Once more:\n" * (i > 0) + line for i in range(rng.randint(2, 3))])


def write_document(rng: random.Random, max_tokens: int) -> str:
    """A plain document; books grow with `max_tokens`, at some 160 tokens a section."""
    kind = rng.random()
    if max_tokens > 1024 and kind < 0.6:
        return book_document(rng, rng.randint(3, max(4, max_tokens // 160)))
    if kind < 0.35:
        return story_document(rng)
    if kind < 0.5:
        return quiz_document(rng)
    if kind < 0.7:
        return records_document(rng)
    if kind < 0.78:
        return person_document(rng)
    if kind < 0.84:
        return lines_document(rng)
    if kind < 0.9:
        return echo_document(rng)
    return book_document(rng, 2)
