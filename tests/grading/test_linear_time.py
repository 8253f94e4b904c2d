"""No pattern that meets a text from outside takes more than linear time: the trainer's process has no limit.

Each compiled pattern of grading/, problems/ and checks/ is used as the package uses it, on texts that are made from the
pattern itself: one repeat of it goes on and on, or its characters, its words and letters of ten scripts repeat.
"""

import ast
import importlib
import inspect
import pkgutil
import random
import re
import signal
import time
import timeit
from functools import cache
from itertools import chain
from re import _constants as op
from re import _parser

import pytest

from grpo_math.grading import where
from grpo_math.grading.equal.compare import QUICK_CHARACTERS

PACKAGES = ("grading", "problems", "checks")
SEARCHES = {"search", "finditer", "findall", "sub", "subn", "split"}
METHODS = SEARCHES | {"match", "fullmatch"}
LENGTHS = (10, 20, 40, 80, 160, 320, 640, 1_000, 2_500, 5_000, 10_000)
SCRIPTS = "aZ яЖ αΩ אב بم हि তক த ไท 中の 한 é ७٣ 1 .,\n"
REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
CLASSES = {
    op.CATEGORY_DIGIT: ("1", r"\d"),
    op.CATEGORY_NOT_DIGIT: ("a", r"\D"),
    op.CATEGORY_SPACE: (" ", r"\s"),
    op.CATEGORY_NOT_SPACE: ("a", r"\S"),
    op.CATEGORY_WORD: ("я", r"\w"),
    op.CATEGORY_NOT_WORD: ("-", r"\W"),
}


def modules(package):
    folder = importlib.import_module(f"grpo_math.{package}")
    return [
        importlib.import_module(info.name) for info in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")
    ]


def patterns_in(value):
    """Yield the patterns in a value of a module: in lists, dictionaries and objects, too."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        yield from chain.from_iterable(map(patterns_in, value.values() if isinstance(value, dict) else value))
    elif isinstance(getattr(value, "strict", None), re.Pattern):  # a format
        yield value.strict


def used(package):
    """Yield (where, pattern, methods) for each pattern that a package compiles or passes to a function of re."""
    sources = {module: inspect.getsource(module) for module in modules(package)}
    whole = "\n".join(sources.values())
    yield from ((name, None, set()) for name in BUILT if f".{package}." in name and ": " not in name)
    for module, source in sources.items():
        for name, value in vars(module).items():
            methods = METHODS & set(re.findall(rf"\b{name}\b\.(\w+)", whole))
            methods |= {"match"} if re.search(rf"\.match\((?:notation\.)?{name}\b", whole) else set()
            for pattern in patterns_in(value):
                yield f"{module.__name__}.{name}", pattern, {"fullmatch"} if name == "FORMATS" else methods or {"sub"}
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).partition(".")[0] == "re" and call.args:
                method = ast.unparse(call.func).partition(".")[2]
                pattern = evaluated(call.args[0], module)
                flags = [evaluated(node, module) for node in (*call.args[1:], *(word.value for word in call.keywords))]
                flag = next((one for one in flags if isinstance(one, re.RegexFlag)), 0)
                if method in METHODS and isinstance(pattern, str):
                    yield f"{module.__name__}:{call.lineno}", re.compile(pattern, flag), {method}
                elif method in METHODS and isinstance(call.args[0], ast.Constant | ast.JoinedStr):
                    yield f"{module.__name__}: {ast.unparse(call.args[0])}", None, set()


def evaluated(node, module):
    """Return the value of an expression of constants and names of the module, or None for any other."""
    try:
        return eval(compile(ast.Expression(node), "pattern", "eval"), vars(module))
    except Exception:
        return None


# ------------------------------------------------------------------------------------------ texts from a pattern


@cache
def parsed(pattern):
    return _parser.parse(pattern.pattern, pattern.flags)


def inside(kind, value):
    """Return the sequences of nodes directly in one node of a parsed pattern."""
    if kind in REPEATS:
        return [value[2]]
    if kind is op.SUBPATTERN:
        return [value[3]]
    if kind is op.ATOMIC_GROUP:
        return [value]
    if kind in (op.ASSERT, op.ASSERT_NOT, op.BRANCH):
        return value[1] if kind is op.BRANCH else [value[1]]
    return [one for one in value[1:] if one] if kind is op.GROUPREF_EXISTS else []


def repeats(sequence, path=frozenset()):
    """Yield (the repeat, the sequences around it) for each repeat of a parsed pattern."""
    for kind, value in sequence:
        if kind in REPEATS:
            yield id(value), path
        for part in inside(kind, value):
            yield from repeats(part, path | {id(part)})


def literals(sequence):
    """Yield the characters of a pattern, and its literal words."""
    word = ""
    for kind, value in [*sequence, (None, None)]:
        if kind is op.LITERAL:
            word += chr(value)
            yield chr(value)
            continue
        if len(word) > 1:
            yield word
        word = ""
        if kind is op.IN:
            yield from (chr(one) for of, one in value if of is op.LITERAL)
            yield from (chr(edge) for of, one in value if of is op.RANGE for edge in (one[0], sum(one) // 2))
        for part in inside(kind, value):
            yield from literals(part)


def character(members, rng):
    """Return a character of a class."""
    if members[0][0] is op.NEGATE:
        excluded = "".join(
            re.escape(chr(one))
            if of is op.LITERAL
            else f"{re.escape(chr(one[0]))}-{re.escape(chr(one[1]))}"
            if of is op.RANGE
            else CLASSES[one][1]
            for of, one in members[1:]
        )
        return next(iter(re.findall(f"[^{excluded}]", "".join(rng.sample("a1 .;-яक中=(", 11)))), "a")
    of, one = rng.choice(members)
    return chr(one) if of is op.LITERAL else chr(rng.randint(*one)) if of is op.RANGE else CLASSES[one][0]


def example(sequence, rng, repeat=None, path=frozenset()):
    """Return a text that matches a parsed pattern, but for its look-around. One ``repeat`` of it goes on and on."""
    out = ""
    for kind, value in sequence:
        if kind is op.LITERAL:
            out += chr(value)
        elif kind is op.NOT_LITERAL or kind is op.ANY:
            out += rng.choice([one for one in "a1 .я" if one != chr(value or 0)])
        elif kind is op.IN:
            out += character(value, rng)
        elif kind in REPEATS:
            low, high, part = value
            times = low + rng.randint(0, min(2, high - low))
            times = min(high, 500) if id(value) == repeat else max(1, times) if id(part) in path else times
            same = example(part, rng, repeat, path) if times else ""
            once = rng.random() < 0.5 or len(same) > 20
            out += "".join(same if once else example(part, rng, repeat, path) for _ in range(times))
        elif kind is op.BRANCH:
            on_path = [one for one in value[1] if id(one) in path]
            out += example(rng.choice(on_path or value[1]), rng, repeat, path)
        elif kind is not op.ASSERT_NOT and kind is not op.ASSERT:
            out += "".join(example(part, rng, repeat, path) for part in inside(kind, value)[:1])
    return out


def texts(pattern, count, seed):
    """Yield (beginning, part that is repeated, end)."""
    rng, tree = random.Random(f"{pattern.pattern} {seed}"), parsed(pattern)
    signs = sorted({*(sign for sign in literals(tree) if not "\ud7ff" < sign[0] < "\ue000"), *SCRIPTS})
    single, loops = [sign for sign in signs if len(sign) == 1], list(repeats(tree))
    parts = [
        *rng.sample(single, min(count, len(single))),
        *rng.sample(signs, min(count, len(signs))),
        *("".join(rng.choices(single, k=rng.randint(2, 6))) for _ in range(count)),
        *(" ".join(rng.choices(signs, k=3)) + " " for _ in range(count // 2)),
        *(example(tree, rng, *loop) for loop in rng.sample(loops, min(2 * count, len(loops)))),
    ]
    for part in filter(None, parts):
        yield rng.choice(("", example(tree, rng)[:60])), part, rng.choice(("", "\0", " ", "!", "я", "\n", " 1"))


class TooSlow(Exception):
    pass


def stop(*_):
    raise TooSlow


def used_on(pattern, methods, text):
    for method in methods:
        if method in SEARCHES:
            pattern.sub("", text)
        else:
            getattr(pattern, method)(text)


def seconds(pattern, methods, text):
    """Return the CPU time of a pattern on a text, at most a second."""
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    start = time.process_time()
    try:
        used_on(pattern, methods, text)
    except TooSlow:
        return 1.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return time.process_time() - start


def slow(pattern, methods, limit, count, seed=0):
    """Return a text, at most ``limit`` long, on which the time of a pattern is not linear or above 0.2 s, or None."""
    for start, part, end in texts(pattern, count, seed):

        def made(length, start=start, part=part, end=end):
            return (start + part * (length // len(part) + 1))[:length] + end

        for length in (one for one in LENGTHS if one <= limit):
            # Twice, because another program may have had the core.
            if all(seconds(pattern, methods, made(length)) > 0.2 for _ in range(2)):
                return f"{length}: {made(60)!r}"
        if limit == LENGTHS[-1] and not is_linear(pattern, methods, made(limit // 10), made(limit)):
            return f"not linear: {made(60)!r}"
    return None


def is_linear(pattern, methods, short, long):
    """Compare the times of two texts, one ten times as long."""
    if wall(pattern, methods, long) <= 20 * max(wall(pattern, methods, short), 5e-5):
        return True
    # The clock of CPU time is coarse, and the other one counts other programs, too.
    ratios = (cpu(pattern, methods, long) / max(cpu(pattern, methods, short), 5e-5) for _ in range(2))
    return any(ratio <= 20 for ratio in ratios)


def wall(pattern, methods, text):
    return min(timeit.repeat(lambda: used_on(pattern, methods, text), number=1, repeat=3))


def cpu(pattern, methods, text):
    timer, number = timeit.Timer(lambda: used_on(pattern, methods, text), timer=time.process_time), 1
    while (spent := timer.timeit(number)) < 0.05:
        number *= 4
    return spent / number


@pytest.mark.slow
@pytest.mark.full(keep=["grading"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_pattern_takes_more_than_linear_time(package):
    found = {(name, pattern or BUILT[name], frozenset(methods or {"sub"})) for name, pattern, methods in used(package)}
    faults = {name: slow(pattern, methods, longest(name), 5) for name, pattern, methods in found}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def longest(name):
    """Return how long a text can be where a pattern of this name meets it."""
    if ".grading.equal." in name or ".grading.judge" in name:
        return QUICK_CHARACTERS  # compare.py gives longer texts to a worker, and judge.py none to Math-Verify
    return WINDOWS.get(name.rpartition(".")[2], where.TAIL)


# Patterns that are searched only in so many characters before a place.
WINDOWS = {"_VALUE_BEFORE": 60, "_NUMBER_BEFORE": 60, "_BETWEEN": 60, "_CHANGED": 60, "_CHANGED_ASCII": 60}
# Patterns that are made in a function, and one of each.
LETTER = re.compile(r"(?<![A-Za-z\\])n(?![A-Za-z])")
BUILT = {
    r"grpo_math.grading.equal.clean: f'(?<![A-Za-z\\\\]){integer[1]}(?![A-Za-z])'": LETTER,
    r"grpo_math.grading.equal.clean: f'(?<![A-Za-z\\\\]){multiple[1]}(?![A-Za-z])'": LETTER,
    r"""grpo_math.checks.golds: f"[\\s'{thousands}]" """.strip(): re.compile(r"[\s'.]"),
    "grpo_math.grading.where._label": where._label(*where.LABELS),
}


@pytest.mark.slow
def test_a_pattern_that_is_exponential_or_quadratic_is_found():
    letter = r"(?:[^\W\d_]|[\u0400-\u04ff])"
    assert slow(re.compile(rf"\d(?:\s?{letter}{{1,20}}){{0,2}}[,\s]*\Z"), {"search"}, where.TAIL, 6)
    assert slow(re.compile(r"a+b"), {"search"}, where.TAIL, 6)
    assert not slow(re.compile(r"a+b"), {"match"}, where.TAIL, 6)
