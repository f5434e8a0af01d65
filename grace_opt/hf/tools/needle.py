"""Seeded needle-in-a-haystack prompts: plain-English filler, password facts, and a question about one of them.

Use it to build retrieval prompts of a chosen token length for any tokenizer. The pocket model is trained on documents
of the same grammar, so its prompts are in-distribution; for other models the text is ordinary English.
Source: the task follows Kamradt's needle-in-a-haystack test (2023); grammar and word lists are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ..._util.parameters import integer, number
from ...errors import OptionError

CITIES = """Accra Amman Ankara Athens Bangkok Beirut Bergen Berlin Bogota Boston Cairo Chicago Dakar Delhi Dublin
Durban Geneva Glasgow Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Milan
Montreal Munich Nairobi Oslo Paris Prague Riga Rome Seoul Sofia Sydney Tokyo Toronto Venice Vienna Warsaw
Zurich""".split()
COLOURS = """amber azure beige black blue bronze brown coral crimson cyan ebony emerald golden green grey indigo
ivory jade khaki lilac magenta maroon mauve olive orange pearl pink purple red ruby russet saffron scarlet silver
tan teal turquoise violet white yellow""".split()
ANIMALS = """badger bear beaver bison camel cheetah cobra condor crane deer dolphin eagle falcon ferret fox gecko
gibbon goose hamster hawk heron ibex jackal jaguar koala lemur leopard lion llama lynx mole moose otter owl panda
panther parrot pelican penguin puma rabbit raven salmon seal shark spider stork swan tiger trout turtle viper walrus
weasel whale wolf wombat wren yak zebra""".split()
_ADJECTIVES = """ancient awkward bitter brave broken careful clever cold curious dusty early eager faint famous
foggy gentle graceful heavy hidden honest humble idle kind large late lonely loud narrow noisy old patient polite
proud quiet restless rough rusty secret sharp shy silent simple sleepy slow small steady strange tall tired warm
weary wild wooden young""".split()
_PEOPLE = """actor artist baker barber captain carpenter clerk cook dancer doctor driver farmer fisherman gardener
guard hunter judge king knight lawyer librarian merchant miller miner monk nurse painter pilot poet porter potter
priest queen sailor scholar shepherd singer smith soldier student tailor teacher thief traveller waiter weaver widow
writer""".split()
_THINGS = """apple basket bell blanket book bottle box bread candle carpet chair clock coat coin compass crown cup
curtain drum flute hammer hat key knife ladder lamp lantern letter map mirror needle notebook orchid painting parcel
pen pipe ribbon ring rope sack scarf shovel spoon statue stone sword table telescope ticket trumpet umbrella violin
wagon wheel window""".split()
_VERBS = """borrowed bought broke buried carried cleaned copied counted drew dropped examined forgot found gave
guarded hid inspected kept left lost mended moved noticed opened painted polished pulled pushed repaired returned
saw searched sold stole studied threw took touched traded watched wrapped""".split()
_PLACES = """attic barn beach bridge castle cave cellar chapel church corner courtyard desert farm field forest
garden gate hall harbour hill hotel inn island kitchen lake library market meadow mill mountain museum orchard
palace park river road roof ruin school shed shore shop stable station street temple theatre tower town tunnel
valley village wall well wood workshop""".split()
_PREPOSITIONS = """above across at before behind below beside by inside near outside past through under""".split()


@dataclass(frozen=True)
class NeedlePrompt:
    """One retrieval task: `text` ends where the model has to continue with `answer`.

    `passwords` has all that the text states, by city; the one that is asked for comes first.
    """

    text: str
    answer: str
    city: str
    depth: float
    passwords: tuple[tuple[str, str], ...] = ()

    @property
    def context(self) -> str:
        """The text before the question."""
        return self.text.removesuffix(question(self.city)).rstrip()

    def found_in(self, generated: str) -> bool:
        """Return whether the continuation starts with the answer, ignoring case and spacing."""
        return " ".join(generated.lower().split()).startswith(self.answer)


def vocabulary() -> list[str]:
    """Return all lower-case tokens of the grammar, sorted; a city before its password and its colon are one token.

    Examples
    --------
    >>> len(vocabulary()) < 700 and "lisbon" in vocabulary()
    True
    """
    words = {w.lower() for ws in (CITIES, COLOURS, ANIMALS, _ADJECTIVES, _PEOPLE, _THINGS, _VERBS, _PLACES) for w in ws}
    keys = {f"{city.lower()}:" for city in CITIES}
    return sorted(words | keys | {*_PREPOSITIONS, *"the what is password of and then that . ? ,".split()})


def filler(rng: random.Random) -> str:
    """Return one sentence that contains no fact."""
    pick = rng.choice
    text = f"The {pick(_ADJECTIVES)} {pick(_PEOPLE)} {pick(_VERBS)} the {pick(_ADJECTIVES)} {pick(_THINGS)}"
    if rng.random() < 0.7:
        text += f" {pick(_PREPOSITIONS)} the {pick(_PLACES)}"
    if rng.random() < 0.3:
        text += f", and then {pick(_VERBS)} that {pick(_THINGS)}"
    return text + "."


def fact(city: str, answer: str) -> str:
    """Return the sentence that states a city's password."""
    return f"Password of {city}: {answer}."


def question(city: str) -> str:
    """Return the question about a city's password, and the start of its answer."""
    return f"What is the password of {city}? Password of {city}:"


def random_answer(rng: random.Random) -> str:
    """Return a random password: a colour and an animal."""
    return f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}"


def make_prompt(
    tokens: int, depth: float, *, count: Callable[[str], int], seed: int = 0, distractors: int = 4
) -> NeedlePrompt:
    """Build a haystack of about `tokens` tokens with the needle at relative `depth` (0 = first sentence, 1 = last).

    Parameters
    ----------
    tokens : int
        Largest prompt length, in tokens, the question included.
    depth : float
        Position of the needle, in [0, 1].
    count : callable
        Returns the number of tokens of a text, for example ``lambda s: len(tokenizer(s).input_ids)``.
    seed : int
        Equal seeds give equal prompts.
    distractors : int
        Number of other cities' passwords, inserted at random depths.

    Returns
    -------
    NeedlePrompt

    Raises
    ------
    OptionError
        If `depth` or `distractors` is out of range, or `tokens` has no room for the facts and the question.

    Examples
    --------
    >>> p = make_prompt(200, 0.5, count=lambda s: len(s.split()), seed=1)
    >>> p.answer in p.text, p.text.endswith(f"Password of {p.city}:")
    (True, True)
    >>> p.context.endswith("."), p.passwords[0] == (p.city, p.answer), len(p.passwords)
    (True, True, 5)
    """
    depth = number(
        "depth", depth, at_least=0, at_most=1, hint="0 puts it in the first sentence of the haystack, 1 in the last"
    )
    distractors = integer("distractors", distractors, at_least=0, at_most=len(CITIES) - 1)
    tokens = integer("tokens", tokens, at_least=1)
    rng = random.Random(integer("seed", seed, at_least=0))
    city, *others = rng.sample(CITIES, distractors + 1)
    answer = random_answer(rng)
    asked = question(city)
    passwords = ((city, answer), *((c, random_answer(rng)) for c in others))
    needle, *noise = (fact(*pair) for pair in passwords)
    room = tokens - count(" ".join([needle, *noise, asked]))
    if room < 0:
        raise OptionError(
            f"tokens={tokens}: the facts and the question alone need {tokens - room}; give at least that."
        )
    hay: list[str] = []
    while (cost := integer("count(sentence)", count(sentence := filler(rng)), at_least=1)) <= room:
        hay.append(sentence)
        room -= cost
    for sentence in noise:
        hay.insert(rng.randint(0, len(hay)), sentence)
    hay.insert(round(depth * len(hay)), needle)
    return NeedlePrompt(" ".join([*hay, asked]), answer, city, depth, passwords)
