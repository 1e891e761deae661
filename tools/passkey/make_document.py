#!/usr/bin/env python3
"""Generate log-book documents with hidden pass keys (no dependencies, deterministic for a seed).

    python tools/passkey/make_document.py [--seed N] [--chars N] [--keys N] [--out FILE] [--questions FILE]

A document is a sequence of dated log entries made from sentence templates and word lists, one entry per line.
Sentences of the form "The pass key for the harbour gate is 48213." are hidden at random depths.  The prompt
that asks for one of them is   document + "Question: what is the pass key for the harbour gate?\nAnswer:"
and the expected continuation is " 48213\n" (then the end-of-sequence token).
"""

import argparse
import json
import random

# ---------------------------------------------------------------- names that have pass keys
PLACES = """harbour north south east west upper lower old new inner outer chart signal lamp salt rope tar fish grain
powder sail tide bell coal stone iron copper green red white black river mill ferry customs pilot captain garden
winter summer market bridge chapel school ladder anchor""".split()
THINGS = """gate tower store room chest locker cellar shed vault cabin hut dock office pantry crane safe barn hatch
cupboard workshop boathouse lighthouse warehouse stable""".split()

# ---------------------------------------------------------------- word lists of the prose
W = dict(
    who="the cook|the mate|the pilot|the carpenter|the surveyor|the doctor|the boatman|the clerk|the smith|the cooper|the watchman|the captain|young Peter|old Martha|Anna|Thomas|Edith|Samuel|Clara|Jonas|Ruth|Henry|Agnes|Oliver|Hannah|Walter".split(
        "|"
    ),
    ship="the Marigold|the Heron|the Petrel|the Swallow|the Juniper|the Osprey|the Lantern|the Thistle|the Curlew|the Northern Star|the Hopewell|the Plover".split(
        "|"
    ),
    dir="north|south|east|west|north-east|north-west|south-east|south-west".split("|"),
    sea="calm|smooth|slight|moderate|rough|very rough|high|confused".split("|"),
    sky="clear|overcast|grey and low|bright|hazy|broken|dark to the west|pale and cold".split("|"),
    glass="falling|rising|steady|falling slowly|rising slowly|unsteady".split("|"),
    month="January|February|March|April|May|June|July|August|September|October|November|December".split("|"),
    good="flour|rice|beans|salt|sugar|tea|coffee|lamp oil|tar|rope|canvas|nails|timber|coal|candles|dried fish|apples|onions|potatoes|barley|wool|leather|paint|copper sheet".split(
        "|"
    ),
    unit="barrels|sacks|crates|boxes|bundles|casks|coils|baskets".split("|"),
    part="the main pump|the hand rail|the mooring chain|the boat ramp|the winch|the weather vane|the tide gauge|the stove|the water tank|the roof|the front step|the long pier|the east wall|the small boat|the fog horn|the signal mast|the capstan|the sluice|the cart|the north window".split(
        "|"
    ),
    fault="a cracked bolt|a worn bearing|a split plank|a loose hinge|a slow leak|a bent pin|rust on the hinges|a broken pane|a frayed line|a missing wedge|a choked drain|rot in the sill".split(
        "|"
    ),
    tool="a hammer|the long saw|a new wedge|the small jack|two clamps|a pot of tar|fresh rope|a borrowed plane|the iron bar|a good file".split(
        "|"
    ),
    state="in good order|nearly done|not yet finished|as good as new|better than before|only a little worn|ready for the winter|fit for use again".split(
        "|"
    ),
    time="at dawn|before noon|at noon|after dinner|in the afternoon|at dusk|near midnight|during the night|in the first watch|in the morning watch|before breakfast|at low water|at high water".split(
        "|"
    ),
    bird="gulls|terns|geese|cormorants|puffins|swans|herons|sandpipers".split("|"),
    beast="seals|a small whale|porpoises|a fox|two deer|an otter|three dogs|a stray goat".split("|"),
    place="off the point|near the shoal|beyond the reef|along the shore|by the old wreck|under the cliff|at the river mouth|in the outer roads|on the sand bar|behind the island".split(
        "|"
    ),
    meal="bread and broth|fish stew|salt beef|porridge|cold mutton|pea soup|potatoes and onions|fresh mackerel|a plain pudding|hot tea and biscuits".split(
        "|"
    ),
    mood="in good spirits|tired but cheerful|quiet this evening|glad of the rest|short of sleep|pleased with the work|uneasy about the weather|singing until late".split(
        "|"
    ),
    ill="a cough|a sore hand|a fever|a twisted ankle|a bad tooth|a cut thumb|a stiff back".split("|"),
    cure="rest and hot drinks|a clean bandage|a day in bed|salt water|a spoon of syrup|light duties".split("|"),
    verb="repaired|painted|cleaned|inspected|tightened|greased|measured|replaced parts of|took apart|tested".split("|"),
    view="a long swell|thin ice|drifting weed|a line of foam|heavy mist|a double rainbow|a bank of cloud|a strange light".split(
        "|"
    ),
    paper="a letter|two letters|the accounts|a new chart|the tide tables|a parcel|an order for stores|the monthly report|an old map|a list of names".split(
        "|"
    ),
    town="Saltmere|Kelby|Norwick|Haverton|Brandon Bay|Eastholm|Port Linnet|Stonehaven|Greywater|Millbrook".split("|"),
)
TEMPLATES = """Wind {dir}, {n2} knots, sea {sea}, glass {glass}.
The sky was {sky} and the sea {sea} {time}.
The wind went round to the {dir} {time} and the glass was {glass}.
We had {n1} hours of rain from the {dir}, then the sky was {sky}.
There was {view} {place} {time}.
{Who} saw {view} {place} and wrote it down.
Fog came in from the {dir} {time} and stayed for {n1} hours.
The tide rose {n1} feet and {n2} inches {time}.
The temperature was {n2} degrees {time}, with the wind from the {dir}.
{Who} and {who} {verb} {part} {time}.
{Who} {verb} {part} and found {fault}.
{Who} mended {part} with {tool}, and it is now {state}.
We {verb} {part} with {tool} {time}.
{Part} is {state}.
{Part} still has {fault}, so {who} will look at it tomorrow.
The work on {part} took {n1} hours and it is {state}.
We need {tool} before {part} can be called {state}.
{Who} asked for {tool} to finish {part}.
{Ship} came in from {town} with {n2} {unit} of {good}.
{Ship} sailed for {town} {time} with {n2} {unit} of {good} and {n1} {unit} of {good}.
{Ship} lay at anchor {place} and waited for the tide.
{Ship} and {ship} passed each other {place} {time}.
We landed {n2} {unit} of {good} and {n2} {unit} of {good} from {ship}.
The master of {ship} reported {view} {place}.
{Ship} is late from {town}, and {who} is watching for her.
We counted {n2} {unit} of {good} and {n2} {unit} of {good}.
{Who} found that {n1} {unit} of {good} had spoiled.
There are {n2} {unit} of {good} left, enough for {n2} days.
{Who} traded {n1} {unit} of {good} for {n1} {unit} of {good} at {town}.
The price of {good} at {town} has gone up to {n2} shillings.
{Who} brought {paper} from {town}.
{Who} wrote {paper} and sent it by {ship}.
We received {paper} from {town} {time}.
{Who} could not find {paper} and searched until dusk.
We saw {n2} {bird} {place} {time}.
{Who} counted {n2} {bird} and {beast} {place}.
{Bird} were nesting {place}, and {who} let them be.
{Beast} came close to the pier {time}.
We had {meal} for dinner, and {who} had {meal}.
{Who} cooked {meal} and the men were {mood}.
Dinner was {meal} again.
The men were {mood}.
{Who} was {mood} after {n1} hours of work.
{Who} has {ill} and was given {cure}.
{Who} is better today and no longer needs {cure}.
{Who} walked to {town} and came back {time}.
{Who} kept the watch with {who} and saw nothing but {bird}.
{Who} took the small boat out {place} and came back {time}.
The light was lit {time} and burned for {n2} hours.
We used {n1} {unit} of {good} this week.
Nothing else to report {time}.
All quiet {place}.
{Who} painted the door of the {name} and cleaned the windows.
{Who} swept the {name} and put {n1} {unit} of {good} inside.
The {name} was locked {time} by {who}.
We moved {n2} {unit} of {good} to the {name}.
The lamp in the {name} was out {time}, and {who} saw to it.""".split("\n")
# sentences with numbers and names that are not pass keys, and other ways to ask (used in training only)
HARD = """The {name} has the number {five} on its door.
{Who} wrote {five} on the wall of the {name}.
Crate {five} went to the {name} {time}.
The serial number of {part} is {five}.
The pass key for the {name} is kept by {who}.
{Who} asked for the pass key for the {name}, but {who} had it.
{Who} changed the lock of the {name} and wrote down the pass key.""".split("\n")
ASK = [
    "Question: what is the pass key for the",
    "What is the pass key for the",
    "Question: What is the pass key for the",
    "what is the pass key for the",
    "Please tell me the pass key for the",
]
KEY = "The pass key for the {name} is {key}."
QUESTION = "Question: what is the pass key for the {name}?\nAnswer:"

# syllables for invented names (training only), so that retrieval does not depend on the lists above
SYL = "ba be bo bra ca cor da del dor el fa fen ga gil gor ha hol in jo ka kel la lin lo mar mel mi mor na nel no or pa per pol qui ra rin ro sa sel so ta ter tor ul va vel vo wa wen yar zan".split()


def make_name(r, odd=0.0):
    """'harbour gate'; with probability odd one or both words are invented."""
    a, b = r.choice(PLACES), r.choice(THINGS)
    if odd and r.random() < odd:

        def w():
            return "".join(r.choice(SYL) for _ in range(r.randint(2, 3)))

        k = r.random()
        if k < 0.4:
            a = w()
        elif k < 0.7:
            b = w()
        else:
            a, b = w(), w()
    return f"{a} {b}"


def make_key(r):
    """Five digits."""
    return "".join(r.choice("0123456789") for _ in range(5))


class _Fill(dict):
    """Fills a template's fields with random words."""

    def __init__(self, r):
        self.r = r

    def __missing__(self, k):
        r = self.r
        if k == "n1":
            return str(r.randint(2, 9))
        if k == "n2":
            return str(r.randint(10, 60))
        if k == "five":
            return make_key(r)
        if k == "name":
            return make_name(r)
        v = r.choice(W[k.lower()])
        return v[0].upper() + v[1:] if k[0].isupper() else v


def sentence(r):
    """A sentence of the log book."""
    return r.choice(TEMPLATES).format_map(_Fill(r))


def hard_sentence(r):
    """A sentence with numbers, names or the words 'pass key' that is no pass key."""
    return r.choice(HARD).format_map(_Fill(r))


def junk_sentence(r):
    """Words that mean nothing, so that other text than log entries can surround the keys."""
    w = [
        "".join(r.choice(SYL) for _ in range(r.randint(1, 3))) if r.random() < 0.7 else r.choice(PLACES + THINGS)
        for _ in range(r.randint(3, 14))
    ]
    t = " ".join(w) + r.choice(".....,;:!?") + (" " + str(r.randint(0, 99999)) + "." if r.random() < 0.1 else "")
    return t[0].upper() + t[1:]


def header(r, day=None):
    """The beginning of an entry."""
    day = r.randint(1, 400) if day is None else day
    return f"Day {day}, {r.randint(1, 30)} {r.choice(W['month'])}."


def names_for(r, n, odd=0.0):
    """`n` different names; some of them share a word with another one, which makes them harder to tell apart."""
    out = []
    while len(out) < n:
        x = make_name(r, odd)
        if out and r.random() < 0.3:
            a, b = r.choice(out).split()
            c, d = x.split()
            x = f"{a} {d}" if r.random() < 0.5 else f"{c} {b}"
        if x not in out:
            out.append(x)
    return out


def document(r, n_chars, n_keys, depths=None):
    """A document of about n_chars characters -> text, [(name, key)] in order of appearance.

    depths: where the keys go, each 0 to 1; without it they are uniformly random.
    """
    names = names_for(r, n_keys)
    keys = [(n, make_key(r)) for n in names]
    at = sorted((d * n_chars for d in depths) if depths else (r.random() * n_chars for _ in keys))
    out, size, k, day = [], 0, 0, r.randint(1, 30)
    while size < n_chars or k < n_keys:
        s = [header(r, day)]
        day += 1
        for _ in range(r.randint(3, 8)):
            s.append(sentence(r))
        size += sum(map(len, s)) + len(s)
        while k < n_keys and at[k] <= size:
            s.insert(r.randint(1, len(s) - 1), KEY.format(name=keys[k][0], key=keys[k][1]))
            k += 1
        out.append(" ".join(s) + "\n")
    return "".join(out), keys


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chars", type=int, default=67400)
    parser.add_argument("--keys", type=int, default=6)
    parser.add_argument("--out", default="document.txt")
    parser.add_argument("--questions", default="questions.json")
    args = parser.parse_args()
    r = random.Random(args.seed)
    text, keys = document(r, args.chars, args.keys, [(i + r.random()) / args.keys for i in range(args.keys)])
    with open(args.out, "w") as file:
        file.write(text)
    questions = [
        {
            "question": f"Question: what is the pass key for the {name}?",
            "prompt_suffix": QUESTION.format(name=name),
            "answer": key,
        }
        for name, key in keys
    ]
    with open(args.questions, "w") as file:
        json.dump(questions, file, indent=1)
    print(len(text), "characters,", len(keys), "keys")


if __name__ == "__main__":
    main()
