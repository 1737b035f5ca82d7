"""Word lists of the embedded model's little world.

Order matters: `pick` prefers the words at the front of a list, which gives the text the skewed
word frequencies of real text, and the trained model a clear first choice at open positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_DECAY = 0.93  # each word is this much rarer than the one before it


def words(text: str) -> list[str]:
    """The words of `text`."""
    return text.split()


def pairs(text: str) -> list[list[str]]:
    """The pairs of words of `text`, each written `one-other`."""
    return [pair.split("-") for pair in text.split()]


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One of `items`, the earlier ones more often (geometric weights)."""
    return rng.choices(items, weights=[_DECAY**rank for rank in range(len(items))])[0]


def pick_some(rng: random.Random, items: Sequence[T], count: int) -> list[T]:
    """`count` different items, the earlier ones more often; `count` is at most `len(items)`."""
    rest = list(items)
    return [rest.pop(rest.index(pick(rng, rest))) for _ in range(count)]


GIRLS = words(
    "Mia Anna Lily Emma Rosa Nora Ella Zoe Clara Ida Lucy Maya Eva Ruby Sara Tina Vera Wendy Olga "
    "Paula Hanna Greta Julia Kira"
)
BOYS = words(
    "Tom Ben Max Leo Sam Paul Oscar Finn Jack Hugo Noah Adam Carl David Emil Felix George Henry "
    "Ivan Jonas Karl Luke Martin Nils"
)
ANIMALS = words(
    "cat dog fox owl bear rabbit mouse frog horse duck goat sheep wolf crow turtle hedgehog bee "
    "squirrel swan donkey lion tiger monkey elephant"
)
OBJECTS = words(
    "key kite ball lamp map boat drum hat book cup ring clock bell coat flute basket coin rope "
    "scarf mirror wagon whistle lantern umbrella"
)
COLOURS = words("red blue green yellow white black brown golden silver purple orange pink")
FOODS = words(
    "apples pears eggs carrots plums cherries onions potatoes tomatoes lemons nuts beans "
    "mushrooms pancakes cookies grapes peaches melons"
)
GOODS = (
    words(
        "bread milk cheese butter honey rice salt sugar tea flour soap jam coffee pepper oil juice "
        "soup pasta"
    )
    + FOODS
)
SPOTS = [
    "under the bridge", "behind the old mill", "in the hollow tree", "on the top shelf",
    "beside the well", "in the garden shed", "under the bed", "behind the church",
    "in the deep cave", "near the lake", "on the hill", "in the kitchen", "under a flat stone",
    "behind the barn", "in the tall tower", "on the roof", "by the river", "in the cellar",
    "between two rocks", "at the edge of the forest", "inside the big chest", "next to the fire",
    "below the stairs", "in the old boat",
]  # fmt: skip
HOMES = [
    "a small village", "a town by the sea", "a house in the forest", "a farm on a hill",
    "a city with tall towers", "a valley full of flowers", "a cottage near the lake",
    "an old castle", "a street with many shops", "an island in the north",
]  # fmt: skip
JOBS = words(
    "baker farmer sailor teacher doctor gardener painter miller tailor smith fisher singer "
    "carpenter shepherd"
)
WEATHER = [
    ("the sun was shining", "warm"), ("it was raining", "wet"), ("snow was falling", "cold"),
    ("the wind was blowing", "windy"), ("the fog was thick", "grey"),
    ("the sky was clear", "bright"),
]  # fmt: skip
MOODS = words("happy proud glad calm cheerful thankful")
TRAITS = words("kind brave clever quiet curious patient funny careful gentle lazy")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
ORDINALS = words("first second third fourth fifth sixth seventh eighth")
OPPOSITES = pairs(
    "hot-cold big-small tall-short happy-sad fast-slow old-young light-dark full-empty "
    "open-closed up-down left-right day-night good-bad hard-soft wet-dry early-late rich-poor "
    "strong-weak loud-quiet near-far clean-dirty high-low sweet-sour thick-thin first-last "
    "love-hate buy-sell come-go begin-end yes-no"
)
CAPITALS = pairs(
    "France-Paris Germany-Berlin Italy-Rome Spain-Madrid England-London Japan-Tokyo "
    "Portugal-Lisbon Greece-Athens Austria-Vienna Poland-Warsaw Norway-Oslo Sweden-Stockholm "
    "Finland-Helsinki Denmark-Copenhagen Ireland-Dublin Russia-Moscow China-Beijing "
    "Egypt-Cairo Canada-Ottawa Cuba-Havana Hungary-Budapest Belgium-Brussels Kenya-Nairobi "
    "Peru-Lima"
)
SOUNDS = pairs(
    "cat-meow dog-woof cow-moo duck-quack sheep-baa owl-hoot bee-buzz frog-croak horse-neigh "
    "lion-roar mouse-squeak crow-caw"
)
THING_COLOURS = pairs(
    "sky-blue grass-green snow-white coal-black sun-yellow blood-red lemon-yellow milk-white "
    "frog-green chocolate-brown"
)
CATEGORIES = {"animal": ANIMALS, "colour": COLOURS, "food": FOODS, "day": DAYS, "month": MONTHS}
TOPICS = [
    topic.replace("_", " ")
    for topic in words(
        "physics music computers history Python science football the_moon the_sea space robots art "
        "chemistry politics money maths memory cooking travel language paging caches attention "
        "GPUs dinosaurs plants philosophy engines servers poetry medicine weather energy networks"
    )
]
SYLLABLES = words(
    "ba ra lo mi tu ken dor vel sha pri qu ist on ar em ul tan gro fi ne xo zy ch ing er est al wo"
)


def made_up_word(rng: random.Random) -> str:
    """A word outside the lists, so that copying is learnt and not only recalling."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def join_and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def a_or_an(words: str) -> str:
    """`words` with its indefinite article."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def capitalized(text: str) -> str:
    """`text` with its first letter in upper case and the rest as it was."""
    return text[:1].upper() + text[1:]
