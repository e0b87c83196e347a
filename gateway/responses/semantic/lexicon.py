"""The words that the guard knows: opposites, negations, numbers, times, units, words without content. Tables only.

English, as the encoder is. Whatever stands in a table is general language; nothing here is of a domain or a data set.
"""

from __future__ import annotations

from typing import Final


def _words(text: str) -> list[str]:
    return text.split()


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS: Final = _set("""
no not never none nobody nothing nowhere neither nor without cannot cant dont doesnt didnt isnt arent wasnt werent
wont wouldnt shouldnt couldnt hasnt havent hadnt aint mustnt neednt except excluding exclude excludes excluded besides
unless non lacking lack lacks hardly barely
""")

_OPPOSITES: Final = """
increase decrease|increase reduce|gain lose|raise lower|rise fall|grow shrink|expand contract|improve worsen
buy sell|purchase sell|lend borrow|give take|give receive|send receive|win lose|pass fail|succeed fail|accept reject
accept refuse|accept decline|approve reject|approve deny|allow forbid|allow prevent|allow block|permit forbid
start stop|start end|start finish|begin end|begin finish|open close|enable disable|activate deactivate|install uninstall
connect disconnect|mount unmount|lock unlock|encrypt decrypt|compress decompress|zip unzip|pack unpack|block unblock
add remove|add delete|add subtract|create delete|create remove|create destroy|insert delete|attach detach
include exclude|upload download|import export|push pull|enter exit|enter leave|enter quit|arrive depart|arrive leave
arrival departure|inbound outbound|incoming outgoing|join leave|hire fire|show hide|appear disappear|follow unfollow
subscribe unsubscribe|like dislike|love hate|like hate|agree disagree|attack defend|build destroy|save spend|save waste
remember forget|live die|birth death|born died|alive dead|marry divorce|sleep wake|laugh cry|sit stand|teach learn
maximum minimum|max min|maximal minimal|maximize minimize|more less|more fewer|most least|most fewest|many few
highest lowest|high low|higher lower|biggest smallest|big small|bigger smaller|largest smallest|large small
larger smaller|greatest least|greatest smallest|greater less|greater fewer|greater smaller|longest shortest|long short
longer shorter|tallest shortest|tall short|taller shorter|deep shallow|wide narrow|thick thin|fat thin|heavy light
heavier lighter|heaviest lightest|oldest youngest|oldest newest|old new|old young|older younger|older newer|first last
earliest latest|early late|earlier later|before after|previous next|past future|ancient modern|past upcoming
cheap expensive|cheaper expensive|cheapest expensive|rich poor|richest poorest|wealthy poor|fast slow|faster slower
fastest slowest|quick slow|quickly slowly|strong weak|stronger weaker|strongest weakest|hard easy|difficult easy
hard soft|harder easier|hardest easiest|rough smooth|hot cold|warm cool|warm cold|wet dry|full empty|clean dirty
best worst|good bad|good evil|good terrible|better worse|great terrible|advantage disadvantage|pro con|benefit drawback
benefit harm|benefit risk|strength weakness|right wrong|true false|positive negative|optimistic pessimistic
optimist pessimist|happy sad|happy unhappy|happy angry|kind cruel|kind mean|polite rude|friendly hostile|brave coward
brave cowardly|calm anxious|calm nervous|confident insecure|confident shy|humble arrogant|humble proud|smart stupid
smart dumb|intelligent stupid|intelligent dumb|clever stupid|lazy hardworking|lazy active|active passive|active inactive
introvert extrovert|introverted extroverted|shy outgoing|loud quiet|noisy quiet|beautiful ugly|pretty ugly
attractive ugly|healthy sick|healthy ill|safe dangerous|safe risky|safe unsafe|legal illegal|guilty innocent
public private|internal external|inner outer|inside outside|indoor outdoor|interior exterior|domestic foreign
domestic international|local remote|local global|single married|single multiple|male female|man woman|boy girl
husband wife|brother sister|mother father|mom dad|mum dad|son daughter|uncle aunt|king queen|boyfriend girlfriend
gentleman lady|actor actress|he she|him her|his her|his hers|himself herself|guy girl|groom bride|nephew niece
left right|up down|upper lower|upward downward|top bottom|front back|above below|over under|north south|east west
northern southern|eastern western|ascending descending|ascend descend|asc desc|increasing decreasing|forward backward
vertical horizontal|row column|input output|read write|odd even|plus minus|multiply divide|sum difference
day night|morning evening|morning night|morning afternoon|afternoon evening|sunrise sunset|summer winter|spring autumn
weekday weekend|today tomorrow|today yesterday|yesterday tomorrow|breakfast dinner|breakfast lunch|lunch dinner
always never|everyone nobody|everything nothing|all none|both neither|with without|on off|yes no|employer employee
doctor patient|teacher student|buyer seller|parent child|liberal conservative|democrat republican|asset liability
debit credit|profit loss|income expense|supply demand|deposit withdraw|deposit withdrawal|import export|export import
undergraduate graduate|junior senior|minor major|minority majority|natural artificial|organic inorganic
soluble insoluble|acid base|acidic basic|acidic alkaline|simple complex|temporary permanent|theory practice
cause prevent|cause cure|cause treat|cause treatment|cause effect|symptom treatment|symptom cause|symptom cure
before since|until since|only also|require optional|mandatory optional|voluntary mandatory|oneway roundtrip
hyperthyroidism hypothyroidism|hypertension hypotension|hyperglycemia hypoglycemia|hyperthyroid hypothyroid
hide unhide|wrap unwrap|tie untie|fold unfold|load unload|cover uncover|visible invisible|known unknown|usual unusual
present absent|presence absence|near far|nearest farthest|closest farthest|closest furthest|recent old|absolute relative
question answer|ask answer|solution problem|virtual physical|digital analog|online offline|synchronous asynchronous
static dynamic|mutable immutable|serial parallel|sender receiver|source destination|client server|parent child
sweet sour|raw cooked|fresh stale|sharp dull|bright dark|light dark|tight loose|war peace|friend enemy|hero villain
rural urban|urban rural|victory defeat|heaven hell|angel devil|tragedy comedy|fiction nonfiction|pull push
forbid may|forbidden may|forbidden can|forbidden allow|forbidden allowed|forbidden permitted|forbidden permit
forbidden legal|prohibited may|prohibited can|prohibited allowed|prohibited permitted|prohibited legal|banned allowed
banned permitted|banned legal|banned may|banned can|illegal may|illegal allowed|illegal permitted|must optional
compulsory optional|necessary optional|obligatory optional|compulsory voluntary|required voluntary|required optional
need optional|fee free|fees free|paid free|pay free|charge free|charged free|price free|cost free|complimentary paid
gratis paid|cancel confirm|cancel keep|cancel renew|cancel resume|cancel book|cancel activate|pause resume
suspend resume|terminate renew|expire renew|refund charge|refundable nonrefundable|earn spend|rent buy|lease buy
own rent|alone together|individual group|same different|similar different|automatic manual|automatically manually
gain loss|prepaid postpaid|wholesale retail|oneway return|included extra
dominant recessive|acute chronic|benign malignant|systolic diastolic|contagious noncontagious|inhale exhale
enter exit|entrance exit|theist atheist|religious atheist|carnivore herbivore|vegetarian carnivore
"""

PREFIXES: Final = ("un", "in", "im", "il", "ir", "dis", "non", "anti", "de", "mis")
"""A word and the same word behind one of these are opposites."""

_NUMBER_WORDS: Final = _words("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
""")
_TENS: Final = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_ORDINALS: Final = _words("""
zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
fifteenth sixteenth seventeenth eighteenth nineteenth
""")

NUMBERS: Final = (
    {word: str(number) for number, word in enumerate(_NUMBER_WORDS) if word != "one"}  # "the one that" is no number
    | {word: str(10 * number) for number, word in enumerate(_TENS, start=2)}
    | {word: str(number) for number, word in enumerate(_ORDINALS) if word not in ("first", "second")}
    | {"twentieth": "20", "thirtieth": "30", "hundred": "100", "thousand": "1000", "million": "1000000"}
    | {
        "billion": "1000000000",
        "lakh": "100000",
        "crore": "10000000",
        "dozen": "12",
        "half": "0.5",
        "twice": "2",
        "thrice": "3",
    }
)

UNITS: Final = {
    name: unit
    for unit, names in {
        "mg": "mg milligram milligrams",
        "mcg": "mcg ug microgram micrograms",
        "g": "g gm gram grams gms",
        "kg": "kg kgs kilo kilos kilogram kilograms",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "ml": "ml cc milliliter milliliters millilitre millilitres",
        "l": "l liter liters litre litres",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm cms centimeter centimeters centimetre centimetres",
        "m": "meter meters metre metres",
        "km": "km kms kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "mi": "mile miles",
        "ms": "ms millisecond milliseconds",
        "s": "sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "d": "day days",
        "w": "week weeks wk wks",
        "mo": "month months",
        "y": "year years yr yrs",
        "kb": "kb kib kilobyte kilobytes",
        "mb": "mb mib megabyte megabytes",
        "gb": "gb gib gigabyte gigabytes",
        "tb": "tb tib terabyte terabytes",
        "usd": "usd dollar dollars",
        "eur": "eur euro euros",
        "gbp": "gbp",
        "inr": "inr rs rupee rupees",
        "c": "celsius",
        "f": "fahrenheit",
        "%": "percent percentage",
    }.items()
    for name in names.split()
}

_TIMES: Final = """
monday mon mondays|tuesday tue tues tuesdays|wednesday wed wednesdays|thursday thu thur thurs thursdays
friday fri fridays|saturday saturdays|sunday sundays|january jan|february feb|march|april apr|june jun
july jul|august aug|september sep sept|october oct|november nov|december dec|morning mornings am
afternoon afternoons|evening evenings|night nights tonight midnight|noon midday|breakfast|lunch|dinner supper
today|tomorrow|yesterday|weekend weekends|spring|summer|autumn|winter|pm|weekday weekdays
"""
TIMES: Final = {
    name: names.split()[0] for line in _TIMES.splitlines() for names in line.split("|") for name in names.split()
}
"""Weekdays, months, seasons and parts of the day. May is left out: it is a verb more often."""

MOMENTS: Final = _set("""
today now tonight tomorrow yesterday currently latest newest recent recently nowadays presently
""")
"""Words that make an answer a matter of when it was asked."""

ROLES: Final = {
    word: role
    for role, words in {
        "source": "from",
        "goal": "to into onto towards toward",
        "before": "before until till",
        "after": "after since",
        "than": "than",
        "agent": "by",
        "over": "over above",
        "under": "under below beneath",
        "with": "with",
        "for": "for",
        "of": "of",
        "in": "in at inside",
        "about": "about",
        "as": "as",
        "condition": "if unless while whenever during despite provided assuming supposing",
    }.items()
    for word in words.split()
}
"""Prepositions, by what the word behind them is in the sentence."""

OPPOSED_ROLES: Final = frozenset(
    pair
    for one, other in (("source", "goal"), ("before", "after"), ("over", "under"))
    for pair in ((one, other), (other, one))
)

SWAPPED_ROLES: Final = ("source", "goal", "before", "after", "than", "agent", "over", "under")
"""Roles whose objects make another question when they change places."""

SYMMETRIC: Final = _set("""
marri relat close engag link connect similar identical equal adjacent next compar relativ attach opposit due
equivalent oppos
""")
"""Stems before a "to" whose two sides may change places."""

STOP_WORDS: Final = _set("""
a an the this that these those there here it its itself is are was were be been being am do does did doing done have
has had having will would shall should can could may might must of in on at to from by with for about into onto as
than then so such and or but if while because what which who whom whose when where why how i me my mine we us our you
your yours he him his she her hers they them their theirs one ones some any each every all both please tell show give
list find get hello hi hey thanks thank kindly just also too very really much many more most got s t re ve ll d m im
ive id dont cant not no ask know want like need let best way ways good able
""")
"""Words that say little of what a question is about."""

COURTESIES: Final = _set("""
help appreciate advance sorry dear sir madam everyone anyone somebody someone guys friend question wonder morning
afternoon evening cheers regards apologize apology greeting suppose possible team assistant bother mind pardon excuse
curious grateful welcome lot
""")
"""Words that add nothing to a question."""

FILLERS: Final = _set("""
ever exact exactly actual actually real really true truly indeed literally basic basically precise precisely specific
specifically general generally typical typically usual usually normal normally simply common commonly overall total
whole entire certain particular given various several proper properly main great greatest better top quick okay ok own
thing kind type sort term meaning reason fact people person human world earth time info information idea available
location located exist happen consider going provide explain describe tell think mean meant allow permit
between through within among around via per use using
""")
"""Words that ask for nothing more when they are added to a question: emphasis, "in the world", "can you explain". A
sentence of fillers alone still counts: it may be an instruction ("Be mean.")."""

INSTRUCTIONS: Final = _set("""
lie lies lying lied dishonest deceive deceptive mislead misleading fabricate invent hallucinate untruthful untrue
incorrect incorrectly wrong wrongly falsely false inaccurate inaccurately opposite sarcastic sarcasm sarcastically
ironic joke jokingly pretend roleplay imagine act persona pirate ignore disregard forget override instructions
instruction prompt jailbreak answer answers answering reply respond response output print write say claim insist
recommend mention repeat translate translated rhyme poem haiku rap json xml yaml markdown html csv bullet bullets table
paragraph sentence sentences word words letter letters emoji emojis brief briefly concise concisely short shortly detail
detailed details verbose exaggerate contradict convince persuade argue swear insult praise blame encourage discourage
quote cite summarize summarise abbreviate rewrite rephrase instead solely
english french german spanish italian portuguese latin greek dutch swedish polish russian turkish arabic hebrew hindi
chinese mandarin japanese korean vietnamese swahili free fee
""")
"""Words that say how to answer or in which language, and "for free": a question that lacks them is another one."""

INSTRUCTION_SYNONYMS: Final = (
    _set("answer answers answering reply respond response"),
    _set("detail details detailed information"),
    _set("write written wrote author"),
)
"""Groups of INSTRUCTIONS, and of words beside them, that mean the same."""

EXCLUSIVE: Final = (
    frozenset(["second", "minut", "hour", "day", "week", "month", "year", "decad", "centur", "century"]),
    frozenset(["red", "yellow", "green", "blue", "black", "white", "brown", "purpl", "orang", "pink", "grey", "gray"]),
)
"""Stems of which a text means one and no other."""


def _opposites() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _OPPOSITES.replace("\n", "|").split("|"):
        if pair:
            one, other = pair.split()
            found.setdefault(one, set()).add(other)
            found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


OPPOSITES: Final = _opposites()
"""word -> its opposites, not stemmed."""
