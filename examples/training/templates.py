"""Templates of arithmetic word problems, all our own.

A question names variables as {a} and words as {name}, {they}, {their}, {item}, {box}, {place}; <x|y> is a choice.
`ranges` bound the variables. Each step is one line of the worked answer with one [x op y] over variables and earlier
results r1, r2; the last is the answer. `whole` is that answer as one formula, which tests compute on their own.
"""

from dataclasses import dataclass, field

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Ella", "Finn", "Gita", "Hugo", "Ines", "Jack", "Kira", "Leo", "Mina", "Noah"),
    *("Olga", "Paul", "Quinn", "Rosa", "Sam", "Tess", "Uma", "Vera", "Will", "Xenia", "Yusuf", "Zoe", "Anna", "Boris"),
    *("Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jonas", "Kate", "Lars", "Maria", "Nils"),
)
ITEMS = (
    *("apples", "pears", "plums", "lemons", "eggs", "rolls", "cakes", "cookies", "carrots", "beans", "books", "pens"),
    *("stamps", "coins", "marbles", "cards", "shells", "stones", "toys", "balls", "cups", "plates", "spoons", "keys"),
    *("maps", "hats", "shirts", "socks", "roses", "tulips", "seeds", "nuts", "bricks", "tiles", "nails", "ropes"),
)
BOXES = ("boxes", "bags", "baskets", "crates", "jars", "trays", "shelves", "packs")
PLACES = ("shop", "farm", "school", "market", "library", "garden", "kitchen", "harbour")

Range = tuple[int, int]


@dataclass(frozen=True)
class Template:
    """One kind of problem; `weight` is how often it is drawn beside the others."""

    question: str
    ranges: dict[str, Range]
    steps: tuple[str, ...]
    whole: str
    weight: int = field(default=2)


def _t(question: str, whole: str, *steps: str, weight: int = 2, **ranges: Range) -> Template:
    return Template(question, ranges, steps, whole, weight)


_TWO, _SMALL, _DIGIT = (2, 99), (2, 30), (2, 12)

TEMPLATES = (
    # plain sums
    _t("What is {a} plus {b}?", "a+b", "[a+b].", a=(2, 199), b=(2, 199), weight=4),
    _t("What is {a} minus {b}?", "a-b", "[a-b].", a=(10, 250), b=(2, 199), weight=4),
    _t("What is {a} times {b}?", "a*b", "[a*b].", a=_DIGIT, b=_SMALL, weight=4),
    _t("What is {a} divided by {b}?", "a/b", "[a/b].", a=(4, 240), b=_DIGIT, weight=4),
    _t("What is the sum of {a}, {b} and {c}?", "a+b+c", "[a+b].", "[r1+c].", a=_TWO, b=_TWO, c=_TWO),
    # one step
    _t(
        "{name} has {a} {item}. {they} <buys|gets|finds|picks up> {b} more. How many {item} does {name} have now?",
        "a+b", "{name} has [a+b] {item}.", a=_TWO, b=_TWO,
    ),
    _t(
        "{name} has {a} {item} and <gives away|loses|sells|drops> {b} of them. How many {item} are left?",
        "a-b", "[a-b] {item} are left.", a=(10, 150), b=_TWO,
    ),
    _t(
        "There are {a} {box} with {b} {item} in each. How many {item} are there?",
        "a*b", "There are [a*b] {item}.", a=_DIGIT, b=_SMALL,
    ),
    _t(
        "{name} <shares|splits|divides> {a} {item} equally among {b} friends. How many {item} does each friend get?",
        "a/b", "Each friend gets [a/b] {item}.", a=(4, 240), b=_DIGIT,
    ),
    _t(
        "A {place} has {a} {item}, and {name} needs {b}. How many <more {item} must be found|{item} are missing>?",
        "b-a", "[b-a] {item} are missing.", a=_TWO, b=(10, 150),
    ),
    _t(
        "{name} walks {a} kilometres each day. How many kilometres does {name} walk in {b} days?",
        "a*b", "{name} walks [a*b] kilometres.", a=_DIGIT, b=_SMALL,
    ),
    _t(
        "{name} is {a} years old, and {name2} is {b} years <older|more>. How old is {name2}?",
        "a+b", "{name2} is [a+b] years old.", a=(3, 70), b=(2, 30),
    ),
    # two steps
    _t(
        "{name} has {a} {item}. {they} buys {b} more and then gives {c} to {name2}. How many {item} does {name} keep?",
        "a+b-c", "After buying, {name} has [a+b] {item}.", "{name} keeps [r1-c].", a=_TWO, b=_TWO, c=_TWO,
    ),
    _t(
        "{name} fills {a} {box} with {b} {item} each and has {c} {item} left over. How many {item} were there?",
        "a*b+c", "The {box} hold [a*b] {item}.", "In all there were [r1+c].", a=_DIGIT, b=_SMALL, c=_TWO,
    ),
    _t(
        "A {place} gets {a} {box} of {b} {item}. It sells {c} {item}. How many {item} are left?",
        "a*b-c", "It gets [a*b] {item}.", "[r1-c] are left.", a=_DIGIT, b=_SMALL, c=_TWO,
    ),
    _t(
        "{name} pays {a} dollars for each of {b} {item} and {c} dollars for a bag. How many dollars is that?",
        "a*b+c", "The {item} cost [a*b] dollars.", "In all it is [r1+c] dollars.", a=_DIGIT, b=_DIGIT, c=_SMALL,
    ),
    _t(
        "{name} buys {a} {item} at {b} dollars each and pays with {c} dollars. How much change does {name} get?",
        "c-a*b", "The {item} cost [a*b] dollars.", "The change is [c-r1] dollars.", a=_DIGIT, b=_DIGIT, c=(10, 150),
    ),
    _t(
        "{name} has {a} {item}, {name2} has {b}. They put them <together|into one heap> and fill {c} {box} equally. "
        "How many {item} are in one of the {box}?",
        "(a+b)/c", "Together they have [a+b] {item}.", "Each holds [r1/c].", a=_TWO, b=_TWO, c=_DIGIT,
    ),
    _t(
        "Of {a} {item} in the {place}, {b} are broken. The others go into {c} {box} equally. How many {item} are in "
        "each?",
        "(a-b)/c", "[a-b] {item} are good.", "Each holds [r1/c].", a=(10, 200), b=_SMALL, c=_DIGIT,
    ),
    _t(
        "{name} has {a} {item}. {name2} has {b} times as many. How many {item} do they have together?",
        "a+a*b", "{name2} has [a*b] {item}.", "Together they have [a+r1].", a=(2, 40), b=(2, 6),
    ),
    _t(
        "{name} has {a} {item}, which is {b} more than {name2} has. How many {item} do they have together?",
        "a+a-b", "{name2} has [a-b] {item}.", "Together they have [a+r1].", a=_TWO, b=_SMALL,
    ),
    _t(
        "{name} reads {a} pages a day for {b} days. The book has {c} pages. How many pages are left to read?",
        "c-a*b", "{name} reads [a*b] pages.", "[c-r1] pages are left.", a=_SMALL, b=_DIGIT, c=(30, 300),
    ),
    _t(
        "A bus has {a} people. At the first stop {b} get off and {c} get on. How many people are on the bus?",
        "a-b+c", "After {b} get off there are [a-b].", "Then there are [r1+c] people.", a=(10, 90), b=_TWO, c=_SMALL,
    ),
    _t(
        "{name} earns {a} dollars an hour. {they} works {b} hours on Monday and {c} hours on Tuesday. How many dollars "
        "does {name} earn?",
        "a*(b+c)", "{name} works [b+c] hours.", "{name} earns [a*r1] dollars.", a=_DIGIT, b=(2, 9), c=(2, 9),
    ),
    _t(
        "{name} cuts a rope of {a} metres into pieces of {b} metres and uses {c} of the pieces. How many pieces are "
        "left?",
        "a/b-c", "There are [a/b] pieces.", "[r1-c] pieces are left.", a=(10, 240), b=_DIGIT, c=_SMALL,
    ),
    _t(
        "{a} {item} fit into one of the {box}. How many {box} do {b} red and {c} blue {item} fill?",
        "(b+c)/a", "There are [b+c] {item}.", "They fill [r1/a] {box}.", a=_DIGIT, b=_TWO, c=_TWO,
    ),
    # three steps
    _t(
        "{name} buys {a} {item} at {b} dollars each and {c} {item2} at {d} dollars each. How many dollars does {name} "
        "pay?",
        "a*b+c*d", "The {item} cost [a*b] dollars.", "The {item2} cost [c*d] dollars.", "In all it is [r1+r2] dollars.",
        a=_DIGIT, b=_DIGIT, c=_DIGIT, d=_DIGIT,
    ),
    _t(
        "{name} has {a} {box} of {b} {item}. {they} gives {c} {item} to {name2} and then buys {d} more. How many "
        "{item} does {name} have?",
        "a*b-c+d", "{name} starts with [a*b] {item}.", "After giving there are [r1-c].", "Now there are [r2+d].",
        a=_DIGIT, b=_SMALL, c=_TWO, d=_TWO,
    ),
    _t(
        "On Monday {name} picks {a} {item}, on Tuesday {b} and on Wednesday {c}. {they} sells {d} of them. How many "
        "{item} are left?",
        "a+b+c-d", "On two days {name} picks [a+b].", "On three days it is [r1+c].", "[r2-d] {item} are left.",
        a=_TWO, b=_TWO, c=_TWO, d=_TWO,
    ),
    _t(
        "A {place} packs {a} {item} into {box} of {b} and sells each for {c} dollars. The costs are {d} dollars. How "
        "many dollars does it gain?",
        "a/b*c-d", "It packs [a/b] {box}.", "It gets [r1*c] dollars.", "The gain is [r2-d] dollars.",
        a=(10, 240), b=_DIGIT, c=_DIGIT, d=_TWO,
    ),
    _t(
        "{name} and {name2} each collect {a} {item} a day for {b} days. They give away {c}. How many {item} are left?",
        "2*a*b-c", "Together they collect [2*a] a day.", "In all it is [r1*b] {item}.", "[r2-c] are left.",
        a=_DIGIT, b=_DIGIT, c=_TWO,
    ),
    _t(
        "{name} saves {a} dollars a week for {b} weeks and gets {c} dollars as a gift. How many {item} at {d} dollars "
        "each can {name} buy?",
        "(a*b+c)/d", "{name} saves [a*b] dollars.", "With the gift it is [r1+c].", "{name} can buy [r2/d] {item}.",
        a=_DIGIT, b=_DIGIT, c=_TWO, d=_DIGIT,
    ),
    _t(
        "In the {place} there are {a} rows of {b} chairs. {c} chairs are taken, and {d} guests come. How many chairs "
        "stay free?",
        "a*b-c-d", "There are [a*b] chairs.", "[r1-c] are free at first.", "Then [r2-d] stay free.",
        a=_DIGIT, b=_SMALL, c=_TWO, d=_SMALL,
    ),
)  # fmt: skip
