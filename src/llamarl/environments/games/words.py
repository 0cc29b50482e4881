"""Common English words of five letters, by the alphabet, without plurals: for ``wordle`` and ``alphabet_sort``."""

from __future__ import annotations

__all__ = ["FIVE_LETTERS", "some_words"]

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
