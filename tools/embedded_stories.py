"""Stories that the embedded model is trained on, with what may be asked about them.

A fact of the first lines (who hid what where, a number, a colour) is used again at the end of every
story, so that a model of it has to look back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from embedded_words import (
    ANIMALS,
    BOYS,
    COLOURS,
    DAYS,
    FOODS,
    GIRLS,
    GOODS,
    HOMES,
    JOBS,
    MONTHS,
    MOODS,
    OBJECTS,
    SPOTS,
    TRAITS,
    WEATHER,
    a_or_an,
    join_and,
    pick,
    pick_some,
)

Fact = tuple[str, str]  # a question and its full-sentence answer


@dataclass(frozen=True)
class Hero:
    """A character of a story, with the pronouns that go with the name."""

    name: str
    he: str
    his: str
    him: str


@dataclass(frozen=True)
class Story:
    """A finished story and what may be asked about it."""

    hero: str
    title: str
    text: str
    facts: list[Fact]


def hero(rng: random.Random, name: str | None = None) -> Hero:
    """A hero with the given name, or with one of the lists'."""
    name = name or pick(rng, GIRLS if rng.random() < 0.5 else BOYS)
    return Hero(name, "he", "his", "him") if name in BOYS else Hero(name, "she", "her", "her")


def two_heroes(rng: random.Random, first: str | None = None) -> tuple[Hero, Hero]:
    """Two heroes with different names."""
    one = hero(rng, first)
    two = hero(rng)
    while two.name == one.name:
        two = hero(rng)
    return one, two


def opening(rng: random.Random, who: Hero) -> tuple[str, list[Fact]]:
    """The first sentences of a story, and the facts in them."""
    home, job, trait = pick(rng, HOMES), pick(rng, JOBS), pick(rng, TRAITS)
    start = pick(rng, ["Once upon a time there was", "Long ago there was", "There once was"])
    child = "girl" if who.he == "she" else "boy"
    if rng.random() < 0.6:
        text = f"{start} a {trait} {child} named {who.name}. {who.name} lived in {home}."
    else:
        text = (
            f"{start} {a_or_an(job)} named {who.name}. {who.name} was {trait} and lived in {home}."
        )
    return text, [(f"Where did {who.name} live?", f"{who.name} lived in {home}.")]


def lost_story(rng: random.Random, name: str | None = None) -> Story:
    """Something is lost, a friend and an animal help to look, and it is found."""
    one, two = two_heroes(rng, name)
    thing = f"{pick(rng, COLOURS)} {pick(rng, OBJECTS)}"
    spot, animal = pick(rng, SPOTS), pick(rng, ANIMALS)
    weather, feel = pick(rng, WEATHER)
    intro, facts = opening(rng, one)
    look = [s for s in pick_some(rng, SPOTS, 3) if s != spot][:2]
    text = (
        f"{intro} {one.name} had {a_or_an(thing)} and loved it very much.\n"
        f"One {feel} day, when {weather}, the {thing} was gone. "
        f"{one.name} looked {look[0]}, but it was not there. "
        f"{one.name} looked {look[1]}, but it was not there.\n"
        f'"Have you seen my {thing}?" {one.name} asked {two.name}. '
        f'"No," said {two.name}, "but I will help you."\n'
        f'Then {a_or_an(animal)} came by. "I saw the {thing} {spot}," said the {animal}. '
        f"{one.name} and {two.name} ran there, and there it was.\n"
        f'"Thank you, {animal}," said {one.name}. So the {thing} was found {spot}, and '
        f"{one.name} was {pick(rng, MOODS)} again."
    )
    facts += [
        (f"What did {one.name} lose?", f"{one.name} lost the {thing}."),
        (f"Where was the {thing}?", f"The {thing} was {spot}."),
        (f"Who helped {one.name}?", f"{two.name} and the {animal} helped {one.name}."),
    ]
    return Story(one.name, f"The Lost {thing.split()[1].capitalize()}", text, facts)


def hidden_story(rng: random.Random, name: str | None = None) -> Story:
    """Something is hidden, some time passes, and it is fetched from where it was hidden."""
    one, two = two_heroes(rng, name)
    thing, spot = f"{pick(rng, COLOURS)} {pick(rng, OBJECTS)}", pick(rng, SPOTS)
    day, count, food = pick(rng, DAYS), rng.randint(2, 12), pick(rng, FOODS)
    intro, facts = opening(rng, one)
    text = (
        f"{intro}\nOn {day} {one.name} hid {a_or_an(thing)} {spot}. Nobody knew about it.\n"
        f"Many weeks went by. {one.name} worked hard and ate {count} {food} every day. "
        f"One evening {two.name} came to visit. "
        f'"I need {a_or_an(thing)}," said {two.name}. "Can you help me?"\n'
        f'{one.name} thought for a while. "I hid one on {day}," said {one.name}. '
        f'"It is {spot}. Come with me."\n'
        f"They went together and found the {thing} {spot}. {one.name} gave it to {two.name}, and "
        f"they both ate {count} {food}."
    )
    facts += [
        (f"What did {one.name} hide?", f"{one.name} hid the {thing}."),
        (f"Where did {one.name} hide the {thing}?", f"{one.name} hid the {thing} {spot}."),
        (f"On which day did {one.name} hide it?", f"{one.name} hid it on {day}."),
    ]
    return Story(one.name, f"The Secret of {one.name}", text, facts)


def gift_story(rng: random.Random, name: str | None = None) -> Story:
    """A birthday, a present, and a number of things that are counted together."""
    one, two = two_heroes(rng, name)
    age, had, more = rng.randint(5, 12), rng.randint(1, 9), rng.randint(1, 9)
    food, thing = pick(rng, FOODS), f"{pick(rng, COLOURS)} {pick(rng, OBJECTS)}"
    month = pick(rng, MONTHS)
    intro, facts = opening(rng, one)
    text = (
        f"{intro} In {month} it was {one.name}'s birthday, and {one.he} was {age} years old.\n"
        f"{two.name} came with a present. {one.name} opened it and saw {a_or_an(thing)}. "
        f'"What a fine {thing.split()[1]}!" said {one.name}. "It is {thing.split()[0]}, '
        f'and I like it."\n'
        f"{one.name} had {had} {food}. {two.name} gave {one.him} {more} more. "
        f"Now {one.name} had {had + more} {food}. They ate them all and laughed.\n"
        f"In the evening {one.name} put the {thing} next to {one.his} bed. "
        f'"I am {age} years old now," said {one.name}, "and I have the best friend in the world."'
    )
    facts += [
        (f"How old was {one.name}?", f"{one.name} was {age} years old."),
        (f"What did {two.name} give to {one.name}?", f"{two.name} gave {one.name} the {thing}."),
        (f"In which month was the birthday of {one.name}?", f"It was in {month}."),
    ]
    return Story(one.name, f"A Birthday in {month}", text, facts)


def journey_story(rng: random.Random, name: str | None = None) -> Story:
    """A journey, an animal in need, and a reward that matters at the end."""
    one = hero(rng, name)
    animal, spot, trait = pick(rng, ANIMALS), pick(rng, SPOTS), pick(rng, TRAITS)
    thing, days = f"{pick(rng, COLOURS)} {pick(rng, OBJECTS)}", rng.randint(2, 9)
    tool = pick(rng, ["rope", "stick", "net", "ladder", "spade"])
    intro, facts = opening(rng, one)
    text = (
        f"{intro}\nOne morning {one.name} took a {tool} and went on a journey. "
        f"{one.he.capitalize()} walked for {days} days. "
        f"On the last day {one.he} heard a voice {spot}.\n"
        f'"Help me!" cried {a_or_an(animal)}. "I am stuck and cannot get out." '
        f"{one.name} was not afraid. {one.he.capitalize()} used the {tool} and pulled the {animal} "
        f"out.\n"
        f'"You are {trait}," said the {animal}. "Take this {thing}. It will bring you luck."\n'
        f"{one.name} walked home for {days} days with the {tool} and the {thing}. From then on "
        f"everybody said that {one.name} was {trait}, and the {animal} came to visit every summer."
    )
    facts += [
        (f"Which animal did {one.name} help?", f"{one.name} helped the {animal}."),
        (f"What did {one.name} use?", f"{one.name} used the {tool}."),
        (
            f"What did the {animal} give to {one.name}?",
            f"The {animal} gave {one.name} the {thing}.",
        ),
    ]
    return Story(one.name, f"{one.name} and the {animal.capitalize()}", text, facts)


def market_story(rng: random.Random, name: str | None = None) -> Story:
    """A shopping list that is bought item by item and read back at home."""
    one, two = two_heroes(rng, name)
    goods = pick_some(rng, GOODS, rng.randint(3, 5))
    price, forgot = rng.randint(3, 20), pick(rng, goods)
    found = [item for item in goods if item != forgot]
    bought = [f"{'Then' if i else 'First'} {one.he} bought {g}." for i, g in enumerate(found)]
    verb = "are" if forgot.endswith("s") else "is"
    intro, facts = opening(rng, one)
    text = (
        f'{intro}\n"Please go to the market," said {two.name}. "We need {join_and(goods)}."\n'
        f"{one.name} went to the market. {' '.join(bought)}"
        f" It cost {price} coins.\n"
        f'At home {two.name} looked into the basket. "Where {verb} the {forgot}?" asked '
        f'{two.name}. "Oh no," said {one.name}, "I forgot the {forgot}!" {one.name} ran back and '
        f"bought the {forgot} too.\n"
        f"That evening they had {join_and(goods)}, and both were {pick(rng, MOODS)}."
    )  # fmt: skip
    facts += [
        (f"What did {one.name} forget?", f"{one.name} forgot the {forgot}."),
        (f"What did {two.name} need?", f"{two.name} needed {join_and(goods)}."),
        ("How many coins did it cost?", f"It cost {price} coins."),
    ]
    return Story(one.name, f"{one.name} Goes to the Market", text, facts)


STORIES: list[Callable[[random.Random, str | None], Story]] = [
    lost_story, hidden_story, gift_story, journey_story, market_story,
]  # fmt: skip


def write_story(rng: random.Random, name: str | None = None) -> Story:
    """A story of any kind; `name` is the hero's, if given."""
    return rng.choice(STORIES)(rng, name)
