"""Words: the glossary has the terms that modules and classes are named by, and no two public classes have one name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT
from tests.helpers.parsed import parsed

PACKAGE = ROOT / "mpidist"

_GLOSSARY = re.compile(r"^```\{glossary\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")

#: Words that need no entry: they mean what they mean in every English book about programs.
EVERYDAY = set(
    """
    about accumulation adapter all alone an and answer argument array assignment at auto
    backend backward bar base bench but by
    cache cancelled cause chart check chooser class clock command communication comparison completion
    conformance content
    core counted crossing current
    data deadline death default dependency derived destination device differ doctor dtype during
    ended entered entry epoch error evaluation exact
    failed failure fault file fixed folder foreign formula found framework from function fused
    gathered generated given
    handover here hint host hostlist
    identity implausible implementation info injected input
    job join joining
    key killed kind
    lambda launch lazy leftover level limit line list log lone loopback lost
    machine main manager mapping max measure measured membership merge message method min missing mode
    monitoring
    name nest network no norm not number
    object of on once open option order origin out outcome output own owner ownership
    package packed page pair pretended parallel parameter parser part path per pickle piped pipeline
    placement plain planned private
    point probe process program progress proof protocol
    quantity question
    random range read reader reading record recording reduction remote reordered reporting request resolution restore
    room row runner runtime
    saved script seen sent served setting shape sharding shared short simple simulate simulation single slice slow spec
    site split stall start started state stop stopwatch store stored stream structure submitted supervisor
    temporary terminal termination test testing text time timeout timing to total traceback tracing traffic
    tune tuning two
    union unlike unowned unsupported up use
    waiting watchdog whole window word
    zero
    """.split()
)

#: Names that TensorFlow, Keras, papers, formats and programs gave.
GIVEN = set(
    """
    absolute accuracy adagrad adam aggregating aggregation arg asynchronous auc autograd autoshard
    b backup binary binomial
    callback categorical central checkpoint classifier clipping comm compile concatenate config confusion constant
    context coordinator cosine cross csv
    cuda dataset decay distribute distributed distribution doubling
    estimator eval evaluate experimental exponential extended
    feature filter float ftrl
    handler hdf hierarchical history horovod
    indexed inverse iterator
    jax
    k keras
    lamb lars layer learning linear logger loss lr
    map mean metric mirrored model monitor mpi mpidist mpirun multi
    n na nan nccl numeric numpy
    op ops optimizer optional
    partitioner physical piecewise plateau policy polynomial power precision prediction preemption prefetcher
    prefetching python
    rabenseifner rate recall recent recursive reduce regression regressor repeat replication ring rm rmsprop
    sampler saver scale scheduler session sgd shuffle sidecar sitecustomize slurm sparse sprop squared stale
    stopping storage sync synchronization synchronous
    tensor tensorboard terminate tf threshold top torch tpu train trainer training
    unbatch unpack
    value variable
    w warm
    zip zipped
    """.split()
)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def classes() -> dict[str, list[str]]:
    """Return where each class is, by its name, private ones included."""
    found = defaultdict(list)
    for path in modules():
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def named() -> Iterator[tuple[str, str]]:
    """Yield each word of the name of a module or a public class, in the singular, and that name."""
    for path in modules():
        for part in path.relative_to(PACKAGE).with_suffix("").parts:
            yield from ((singular(word), part) for word in _WORD.findall(part) if part != "__init__")
    for name in classes():
        if not name.startswith("_"):
            yield from ((singular(word.lower()), name) for word in _WORD.findall(name))


def singular(word: str) -> str:
    """Return the singular of a regular plural; names, and "ss", "us" and "is" at the end, are none."""
    if word.endswith(("ss", "us", "is")) or len(word) < 4 or word in ("keras", "lars"):
        return word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word.removesuffix("s")


def terms() -> list[str]:
    """Return the terms of the glossary, without what stands in brackets behind them."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    lines = [line for block in _GLOSSARY.findall(text) for line in block.splitlines()]
    return [line.partition(" (")[0] for line in lines if line and not line.startswith(" ")]


TERMS = terms()


def test_no_two_public_classes_have_one_name() -> None:
    public = {name: there for name, there in classes().items() if not name.startswith("_")}
    assert len(public) > 300
    assert {name: there for name, there in public.items() if len(there) > 1} == {}


def test_no_term_is_explained_twice() -> None:
    assert len(TERMS) > 100
    assert [term for term in set(TERMS) if TERMS.count(term) > 1] == []


def test_every_word_of_a_name_is_in_the_glossary_or_everyday_english() -> None:
    known = EVERYDAY | GIVEN | {singular(word) for term in TERMS for word in term.split()}
    unknown = defaultdict(set)
    for word, name in named():
        if word not in known:
            unknown[word].add(name)
    assert dict(unknown) == {}


def test_the_lists_of_words_without_an_entry_have_no_others() -> None:
    used = {word for word, _ in named()}
    explained = {singular(word) for term in TERMS for word in term.split()}
    assert {"unused": (EVERYDAY | GIVEN) - used, "twice": EVERYDAY & GIVEN} == {"unused": set(), "twice": set()}
    assert (EVERYDAY | GIVEN) & explained == set()


@cache
def words_of_the_code() -> frozenset[str]:
    sources = [*modules(), *(ROOT / "benchmarks").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources).lower()
    return frozenset(singular(word) for word in re.findall(r"[a-z]+", text.replace("_", " ")))


@pytest.mark.parametrize("term", TERMS)
def test_every_term_is_used_in_the_code(term: str) -> None:
    assert [word for word in term.split() if singular(word) not in words_of_the_code()] == []


#: They say how a value was come by, and not what it is: good for a line or two.
PARAPHRASES = ("found", "each", "given")
MOST_LINES = 3


def long_paraphrases(tree: ast.AST) -> list[str]:
    """Values of functions that live longer, under such a name; what a comprehension calls so has its own scope."""
    return [
        f"{function.name}: {name} in lines {min(lines)} to {max(lines)}"
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in PARAPHRASES
        for places in [[node for part in function.body for node in _of_scope(part, name)]]
        if any(isinstance(node.ctx, ast.Store) for node in places)
        for lines in [[node.lineno for node in places]]
        if max(lines) - min(lines) > MOST_LINES
    ]


def _of_scope(node: ast.AST, name: str) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name) and node.id == name:
        yield node
    if isinstance(node, ast.Lambda) and any(argument.arg == name for argument in node.args.args):
        return
    parts: Iterator[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) and any(
        isinstance(inner, ast.Name) and inner.id == name for each in node.generators for inner in ast.walk(each.target)
    ):
        parts = iter((node.generators[0].iter,))
    for part in parts:
        yield from _of_scope(part, name)


def test_values_that_live_longer_than_three_lines_have_nouns_as_names() -> None:
    long = {path: long_paraphrases(parsed(path.read_text())) for path in modules()}
    assert {name: there for name, there in long.items() if there} == {}


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["found = 1", "", "", "return found"], 0),
        (["found = 1", "", "", "", "return found"], 1),
        (["for each in ():", "    a", "    b", "    c", "    each"], 1),
        (["a = [each for each in ()]", "", "", "", "b = [each for each in ()]"], 0),
        (["given = [", "    given for given in ()", "]", "", "", "return given"], 1),
    ],
)
def test_a_long_paraphrase_is_found(lines: list[str], count: int) -> None:
    text = "\n".join(["def f():", *(f"    {line}" for line in lines)])
    assert len(long_paraphrases(parsed(text))) == count
