"""Random parameters of one variant: drawn from a name, so that the same seed gives the same bytes everywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = (
    "amber apple arch ash axe barn basil bay bean beet birch bird blue bolt book box bread brick brook cabin "
    "cake calm cape card cart cave cedar chalk cherry clay cliff cloud clove coal coast coin cone copper "
    "coral corn cove crab crane cup dawn deer dew dill dove drum dune dust eagle elm ember fern field fig fir "
    "fish flag flame flint fog fox frost fruit gate glen gold grape grass green grove gull hail harp hawk "
    "hazel hedge herb heron hill hive holly honey horn ice iris iron ivy jade jar juniper kale kelp kite lake "
    "lamp lark leaf lemon lily lime linen log lotus lynx maple marsh meadow melon mill mint mist moon moss "
    "moth nest north nut oak oat olive onion opal otter owl palm park peach pear pebble pine pipe plum pond "
    "poppy port pot quail quartz rain raven reed reef ridge river road robin rock rope rose rust rye sage "
    "salt sand seal seed shell shore silk silver sky slate snow song south spruce star stem stone storm straw "
    "sun swan thyme tide tin topaz tree tulip vale vine wave well west wheat willow wind wolf wood wren yarn "
    "yew zinc"
)

WORDS: tuple[str, ...] = tuple(_TEXT.split())
"""Short and plain, so that a byte-level model can copy them. None is part of another: searching for one finds no other."""


@dataclass(slots=True)
class Draw:
    """The parameters of one variant; no word comes twice."""

    random: random.Random
    used: set[str]

    @classmethod
    def named(cls, name: str) -> Draw:
        return cls(random.Random(name), set())

    def word(self) -> str:
        return self.words(1)[0]

    def words(self, count: int) -> list[str]:
        free = [word for word in WORDS if word not in self.used]
        drawn = self.random.sample(free, count)
        self.used.update(drawn)
        return drawn

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def lines(self, low: int, high: int) -> list[str]:
        """Between `low` and `high` lines of one unused word each, not marked as used."""
        free = [word for word in WORDS if word not in self.used]
        return self.random.choices(free, k=self.number(low, high))

    def shuffled(self, items: list[str]) -> list[str]:
        return self.random.sample(items, len(items))
