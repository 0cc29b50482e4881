"""Two games of words: Wordle, and lists to be sorted by the alphabet over several turns.

environment = "examples/games/word_games.py:Wordle"
environment = "examples/games/word_games.py:AlphabetSort"
"""

from __future__ import annotations

import random
import re
from collections import Counter
from difflib import SequenceMatcher

from pydantic import NonNegativeInt, PositiveInt

from llamarl.data.items import TaskItem
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.games.game import Game, Outcome, Style, checked

_WORDS = """
about above acted added admit adult after again agent agree ahead alarm alike alive allow alone along aloud altar among
angel anger angle angry apart apple apply apron arise armed arose arrow aside asked avoid awake aware bacon badly baked
based basic basis beach beard beast began begin begun being below bench birth black blade blame blank blend blind block
blood blown board bound brain brass brave bread break brick brief bring broad broke brown brush build built bunch burnt
burst cabin canal candy canoe cargo carry catch cause chain chair chalk chart chase check cheek cheer chest chief child
chord chose civil claim class clean clear clerk cliff climb clock close cloth cloud coach coast color count court cover
crack craft crash crazy cream creek cried cross crowd crown cruel crust cubic curve cycle daily dairy dance death depth
digit dirty doing doubt dozen drama drank drawn dream dress dried drill drink drive drove dwell dying eager eagle early
earth eaten eight empty ended enemy enjoy enter entry equal error event every exact exist extra faced faint faith false
fancy fault favor feast fence fever fewer field fifth fifty fight final fired first fixed flame flash fleet flesh float
flood floor flour force forth forty found frame fresh front fruit fully funny ghost giant given glass globe glory going
goose grace grade grain grand graph grass grave great green group grown guard guess guest guide habit happy hatch hated
heard heart heavy hello hence honey honor hoped horse hotel house human hurry ideal image index inner input issue joint
judge juice knife knock known label labor large later laugh layer learn least leave legal level lever light liked limit
lived local loose loved lower lucky lunch lying magic major march marry match maybe mayor meant mercy merry metal meter
midst might minor mixed model moist money month moral motor mouse mouth moved movie music named nerve never newly night
noise noisy north noted novel occur ocean offer often older opera orbit order organ other ought outer owned owner paint
paper party paste patch pause peace penny phone piano piece piled pilot pitch place plain plane plant plate point porch
pound power press price pride prime print prize proof proud prove pupil queen quick quiet quite raced radio rainy raise
ranch range rapid ratio reach ready refer reply rhyme rider rifle right river rocky rough round route royal ruled ruler
rural sadly sandy saved scale scene score screw sense serve seven shade shake shall shame shape share sharp sheep sheet
shelf shell shift shine shiny shirt shock shone shook shore short shout shown sight silly since sixth sixty skill skirt
slant sleep slept slice slide slope small smart smell smile smoke snake solar solid solve sorry sound south space spare
speak spear speed spell spend spent spite split spoke sport staff stage stall stamp stand start state steam steel steep
stick stiff still stock stone stood store storm story stove straw strip stuck study stuff style sugar sunny sweat sweet
swept swift swing sword swung table taken taste teach teeth tense thank their theme there these thick thing think third
those three threw throw thumb tiger tight tired title today token tooth topic total touch tough tower trace track trade
trail train treat trial tribe trick tried truck truly trunk trust truth twice twist uncle under union unity until upper
upset urged using usual value vapor verse visit vital vocal voice vowel wagon waste watch water waved weary weigh whale
wheat wheel where which while white whole whose wider widow width wiped witch woman women world worry worse worst worth
would wound wrong wrote yield young youth
"""

FIVE_LETTERS: tuple[str, ...] = tuple(_WORDS.split())


def some_words(count: int) -> tuple[str, ...]:
    """``count`` of the words, spread evenly over the list; 0: all of them."""
    return tuple(FIVE_LETTERS[i * len(FIVE_LETTERS) // count] for i in range(count)) if count else FIVE_LETTERS


_KNOWN = frozenset(FIVE_LETTERS)


def marks(guess: str, secret: str) -> str:
    """One mark a letter: ``=`` in the right place, ``+`` elsewhere in the word, ``#`` not in it.

    A letter of the word is marked once: those in place first, then from the left.
    """
    rest = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    shown = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            shown.append("=")
        elif rest[g]:
            rest[g] -= 1
            shown.append("+")
        else:
            shown.append("#")
    return "".join(shown)


class Wordle(Game):
    """Find a word of five letters from marks under each letter of a guess.

    Args:
        num_words: The secret is one of so many of the list's words; 0: of all.
        listed: Whether a guess must be a word of the list; else any five letters are one.
        max_moves, style: See ``Game``.
    """

    @checked
    def __init__(
        self,
        *,
        num_words: NonNegativeInt = 0,
        listed: bool = False,
        max_moves: PositiveInt = 6,
        style: Style = "words",
    ) -> None:
        super().__init__(max_moves=max_moves, style=style)
        if num_words > len(FIVE_LETTERS):
            raise ValueError(f"num_words must be 0 to {len(FIVE_LETTERS)}, got {num_words}")
        self._words = some_words(num_words)
        self._listed = listed
        self._secret = ""

    def begin(self, seed: int) -> str:
        self._secret = self.rng.choice(self._words)
        if self.compact:
            return "word of 5"
        return (
            "I think of an English word of five letters. Guess it: write one word a turn, and I mark each of its letters: "
            f"= in the right place, + elsewhere in the word, # not in it. You have {self.max_moves} guesses."
        )

    def move(self, said: str) -> Outcome:
        guesses = re.findall(r"(?<![a-z])[a-z]{5}(?![a-z])", said)
        if not guesses:
            return self.unclear("Write one word of five letters.", "word of 5")
        guess = guesses[-1]
        if self._listed and guess not in _KNOWN:
            return self.unclear(f"{guess} is not in my list. Write another word of five letters.", f"no {guess}")
        shown = marks(guess, self._secret)
        if guess == self._secret:
            return Outcome(text="right" if self.compact else f"Right, it is {guess}.", ending="won")
        if self.compact:
            return Outcome(text=f"{guess}\n{shown}")
        return Outcome(text=f"{guess}\n{shown}\n{self.moves_left} guess{'es' * (self.moves_left != 1)} left.")

    def random_reply(self, rng: random.Random) -> str:
        return rng.choice(FIVE_LETTERS)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class AlphabetSort:
    """Sort words by the alphabet, over turns: each turn brings more words, and the whole list is sorted again.

    Every turn is scored, so an episode has rewards at several places.

    Args:
        turns: Lists to sort in one episode, each longer than the one before.
        first: Words of the first list.
        more: Words that each further turn brings.
        partial: Whether a list that is nearly right is worth something: its similarity to the right one (twice the matched
            words over the words of both) to the power 4; else only the whole list counts.
        style: ``words``, or ``compact``: single letters without sentences, for ``bundled:tiny``; at most 26 in all.
    """

    @checked
    def __init__(
        self,
        *,
        turns: PositiveInt = 3,
        first: PositiveInt = 4,
        more: PositiveInt = 2,
        partial: bool = True,
        style: Style = "words",
    ) -> None:
        self._turns, self._first, self._more, self._partial = turns, first, more, partial
        self._compact = style == "compact"
        known = len(_LETTERS) if self._compact else len(FIVE_LETTERS)
        if first + more * (turns - 1) > known:
            raise ValueError(f"first + more * (turns - 1) must be <= {known}, got {first + more * (turns - 1)}")
        self._words: list[str] = []
        self._turn = turns
        self._all_right = True

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode; the item is not looked at."""
        number = self._first + self._more * (self._turns - 1)
        self._words = random.Random(seed).sample(_LETTERS if self._compact else FIVE_LETTERS, number)
        self._turn, self._all_right = 0, True
        shown = " ".join(self._words[: self._first])
        if self._compact:
            return Observation(text=f"sort {shown}")
        return Observation(
            text=f"Sort these words by the alphabet, and write them in one line, separated by spaces: {shown}"
        )

    def step(self, reply: str) -> Step:
        """Score one list. ``parts``: ``moves``, ``invalid`` (no word of the list in the reply), ``correct`` (all lists right)."""
        if self._turn >= self._turns:
            raise EpisodeOver("AlphabetSort: the episode is over; reset begins the next one")
        held = self._first + self._more * self._turn
        right = sorted(self._words[:held])
        given = self._given(reply)
        clear = any(word in right for word in given)
        score = 1.0 if given == right else 0.0
        if self._partial and given != right:
            score = SequenceMatcher(None, given, right, autojunk=False).ratio() ** 4
        self._all_right &= given == right
        self._turn += 1
        done = self._turn == self._turns
        new = " ".join(self._words[held : held + self._more])
        if done:
            text = ""
        elif self._compact:
            text = f"add {new}"
        else:
            hint = "" if clear else "Write words separated by spaces. "
            text = f"{hint}Now sort the list again with these words added: {new}"
        return Step(
            text=text,
            reward=score / self._turns,
            done=done,
            parts={"moves": 1.0, "invalid": float(not clear), "correct": float(done and self._all_right)},
        )

    def close(self) -> None:
        """Nothing is held."""

    def random_reply(self, rng: random.Random) -> str:
        """Some words: for trying the environment out."""
        return " ".join(rng.sample(self._words, min(len(self._words), 4)))

    def _given(self, reply: str) -> list[str]:
        """The words of the reply's last line that has any of the list's; ``<answer>`` and the like around it do not matter."""
        told = set(self._words)
        lines = [re.findall(r"[a-z]+", line) for line in reply.rpartition("</think>")[2].lower().splitlines()]
        held = [line for line in lines if told & set(line)]
        words = held[-1] if held else []
        places = [place for place, word in enumerate(words) if word in told]
        return words[places[0] : places[-1] + 1] if places else []
