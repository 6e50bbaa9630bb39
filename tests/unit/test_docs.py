"""README and the pages of docs: their links lead somewhere, and they leave nothing out.

That their examples run is tested in `tests/docs`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import shlex
import statistics
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import mpidist
from mpidist.commands import job
from mpidist.commands.job_control import VERBS
from mpidist.commands.main import COMMANDS
from mpidist.options import Settings
from tests.helpers.pages import GUIDE, PAGES, ROOT, blocks, commands
from tests.helpers.parsed import parsed

README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"(?:^\$ |`|^)make ([a-z][a-zN0-9-]*)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


# -- examples ---------------------------------------------------------------------------------------------------------


def test_every_output_that_the_guide_shows_is_that_of_an_example():
    shown = [block for block in blocks() if block.page in GUIDE and block.printed is not None]
    assert [block.place for block in shown if block.how is not None] == []
    assert len(shown) == sum(page.read_text().count("```text") for page in GUIDE) > 5


def test_examples_were_found_in_every_page_that_has_some():
    found = {block.page for block in blocks()}
    assert found == {page for page in PAGES if "```python" in page.read_text()}
    assert {"README.md", "quickstart.md", "extending.md", "loops.md"} <= {page.name for page in found}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```bash\n#!" in page.read_text()], ids=lambda page: page.stem
)
def test_every_batch_script_is_one_that_bash_can_read(page):
    for script in re.findall(r"^```bash\n(#!.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
        assert (read.returncode, read.stderr) == (0, "")


def test_the_mismatch_that_readme_shows_is_what_is_raised():
    import numpy

    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        rows = 4 if strategy.extended.replica_id == 2 else 3
        strategy.reduce("sum", numpy.ones((rows, 10), "float32"), axis=None)

    with pytest.raises(mpidist.errors.CollectiveMismatchError) as caught:
        mpidist.testing.run_ranks(4, on_rank)
    assert _words(str(caught.value)).partition(": ")[2] in _words(README)


@pytest.mark.parametrize(
    ("error", "rows", "calls"),
    [(mpidist.errors.CollectiveMismatchError, 4, 15), (mpidist.errors.TransportTimeoutError, 3, 14)],
)
def test_the_errors_that_the_page_on_stopped_jobs_shows_are_what_is_raised(error, rows, calls):
    import numpy

    raised = threading.Event()

    def on_rank():
        rank = mpidist.rank()
        for call in range(1, 15 + 1):
            if rank and call > calls:
                assert raised.wait(60)
            try:
                limit = 0.5 if call > calls else None
                mpidist.all_reduce(numpy.ones(rows if call == 15 and rank else 3), timeout_seconds=limit)
            except error:
                raised.set()
                raise

    with pytest.raises(error) as caught:
        mpidist.testing.run_ranks(2, on_rank)
    text = _words(str(caught.value)).replace("localhost", "vm").partition(" raised on")[0]
    text = re.sub(r"waited [\d.]+ s", "waited 1.0 s", text)
    assert text.partition(": ")[2] in _words((ROOT / "docs" / "why-stopped.md").read_text())


# -- commands and targets ---------------------------------------------------------------------------------------------


def test_every_subcommand_that_readme_names_exists_and_is_named():
    named = set(re.findall(r"\bmpidist ([a-z]+)(?= -|`|\n| +#|$)", _code_of(README)))
    assert named == set(COMMANDS)


def test_every_make_target_that_the_pages_name_exists():
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z%-]+):", makefile, re.MULTILINE)
    named = {target for page in PAGES for target in _MAKE.findall(_code_of(page.read_text()))}
    assert {"train", "test"} <= named
    assert [name for name in sorted(named) if not any(_fits(name, rule) for rule in rules)] == []


def _fits(name: str, rule: str) -> bool:
    return re.fullmatch(re.escape(rule).replace("%", "[0-9N]+"), name) is not None


def commands_shown(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of mpidist in the terminal sessions of a page, those behind `srun` included."""
    for command in commands(page):
        words = [] if command.text.startswith("conda") else shlex.split(command.text, comments=True)
        at = words.index("mpidist") if "mpidist" in words else len(words)
        taken = list(itertools.takewhile(lambda word: word not in ("|", ">", ";", "&&"), words[at + 1 :]))
        if taken and "..." not in taken:
            yield taken


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_shown(page))], ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_one_that_mpidist_takes(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in (Path("train.py"), Path("examples", "train.py")):
        script.parent.mkdir(exist_ok=True)
        script.touch()
    for name, *words in commands_shown(page):
        parser = importlib.import_module(COMMANDS[name][0]).parser()
        if name == "run":
            assert parser.parse_known_args(words)[1] == []
        elif name != "job":
            parser.parse_args(words)
        elif words[0] not in VERBS:
            job.make_job(vars(job.parse(words)[0]), [], {})


def _code_of(text: str) -> str:
    """Return what a page shows as code, in blocks and in lines."""
    spans = re.findall(r"`[^`\n]+`", _FENCED.sub("", text))
    return "\n".join([*_FENCED.findall(text), *spans])


# -- the reader -------------------------------------------------------------------------------------------------------

_READER = re.compile(r"# [^\n]+\n\nFor [^:\n]+: after this page you can [^\n]+\.\n\n")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT or page.name == "README.md"], ids=lambda page: page.stem
)
def test_every_page_says_first_who_reads_it_and_what_they_can_do_after_it(page):
    assert _READER.match(page.read_text())


def test_the_first_page_has_five_groups_and_a_card_of_each_names_its_pages():
    index = (ROOT / "docs" / "index.md").read_text()
    groups = re.findall(r"^:caption: ([^\n]+)\n:maxdepth: 1\n:hidden:\n\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    cards = dict(re.findall(r"^:::\{grid-item-card\} ([^\n]+)\n(\[.*?)^:::$", index, re.MULTILINE | re.DOTALL))
    assert [name for name, _ in groups] == list(cards) and len(groups) == 5
    for name, pages in groups:
        assert set(pages.split()) <= set(re.findall(r"\]\((\w[\w-]*)\.md", cards[name])), name


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page):
    text = _FENCED.sub("", page.read_text())
    local = [target for target in _LINK.findall(text) if not re.match(r"https?://|mailto:", target)]
    assert [target for target in local if not _leads_somewhere(page, target)] == []


def _leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or anchor in _anchors(path))


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# -- names of the code ------------------------------------------------------------------------------------------------


def test_files_and_constants_that_the_architecture_names_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([A-Z_]+)` in\s+`([a-z_/]+\.py)`", text)
    assert len(named) > 2
    assert [pair for pair in named if pair[0] not in (ROOT / "mpidist" / pair[1]).read_text()] == []
    assert [path for path in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|json))`", text) if not _is_file(path)] == []


def test_functions_that_the_architecture_names_are_in_the_files_beside_them():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([A-Za-z_][\w.]*)` in\s+`([a-z_0-9/]+\.py)`", text)
    assert len(named) > 60
    assert [pair for pair in named if not _is_defined(*pair)] == []


def test_files_that_the_list_of_changes_names_are_there():
    text = (ROOT / "docs" / "extending.md").read_text().partition("## Where a change goes")[2].partition("\n## ")[0]
    assert text.count("\n| a") + text.count("\n| the ") == 10
    paths = re.findall(r"`([\w/]+(?:/|\.py))`", text)
    assert len(paths) > 20 and [path for path in paths if not _is_file(path)] == []


def _is_defined(name: str, path: str) -> bool:
    """Return whether a module has a function, class, constant, or method of a class, of this dotted name."""
    body: list[ast.AST] = [parsed((ROOT / "mpidist" / path).read_text())]
    for part in name.split("."):
        inside = [node for each in body for node in ast.iter_child_nodes(each)]
        body = [node for node in inside if part in _names_of(node)]
    return bool(body)


def _names_of(node: ast.AST) -> set[str]:
    """Return what a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _is_file(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / "mpidist" / path).exists()


# -- what was measured ------------------------------------------------------------------------------------------------


def test_no_page_has_a_placeholder_for_a_table():
    pages = [*PAGES, *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert ROOT / "benchmarks" / "README.md" in pages
    assert [page for page in pages if re.search(r"\b[A-Z]+-TABLE\b", page.read_text())] == []


def test_calls_of_a_gradient_are_in_files_of_the_package_and_counted_as_the_page_says():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    lists = json.loads((RESULTS / "calls-2.json").read_text())["lists"]
    named = {name.partition(":")[0] for counted in lists.values() for name in counted["names"]}
    own = {path for path in named if not path.startswith("numpy/")}
    assert len(own) > 10 and [path for path in own if not (ROOT / "mpidist" / path).is_file()] == []
    counts = ("calls", "functions", "files", "depth", "board_depth", "c_calls")
    rows = [" | ".join([title, *(str(counted[each]) for each in counts)]) for title, counted in lists.items()]
    assert [row for row in rows if f"| {row} |" not in page] == []


def median_of(launches: list[dict[str, float]], who: str, to: str | None = None) -> float:
    """Return the median over launches of a contender's time, or of its ratio to another one's."""
    return statistics.median(each[who] / (each[to] if to else 1) for each in launches)


def launches_of(file: str, work: str, nbytes: int | None = None) -> list[dict[str, float]]:
    """Return for each launch in a file of results the microseconds of each contender."""
    found = json.loads((RESULTS / f"{file}.json").read_text())
    chosen = found["launches"] if "launches" in found else found["new"]
    launches = [
        {
            each["who"]: each["time_us"]
            for each in launch["rows"]
            if each["work"] == work and nbytes in (None, each["size"])
        }
        for launch in chosen
        if launch["subcommand"] != "native"
    ]
    return [launch for launch in launches if launch]


def cells(page: str, title: str) -> list[str]:
    """Return the cells of the row of a table that begins with a title, which is not among them."""
    (row,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", page, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


_MICROSECONDS = {"us": 1, "ms": 1e3}


def _is_rounded(shown: str, measured: float) -> bool:
    """Return whether a figure is another one to as many digits as it has, or without its zeros at the end."""
    bare = shown.lstrip("-")
    digits = bare.replace(".", "").lstrip("0") if "." in bare else bare.strip("0")
    return float(shown) == float(f"{measured:.{len(digits)}g}")


@pytest.mark.parametrize(
    ("shown", "measured", "expected"),
    [
        *(("44600", 44641.5, True), ("44600", 44661.5, False), ("363", 362.9, True), ("1.74", 1.7427, True)),
        *(("0.68", 0.6815, True), ("0.69", 0.6815, False), ("3360", 3362.3, True), ("3370", 3362.3, False)),
        *(("2.50", 2.5016, True), ("2.50", 2.516, False), ("86", 85.85, True), ("-15.6", -15.585, True)),
        *(("-15.6", 15.585, False), ("-15.6", -15.685, False)),
    ],
)
def test_how_a_figure_is_rounded(shown, measured, expected):
    assert _is_rounded(shown, measured) is expected


#: The rows of the README's table: how each begins, the file and the work in it, the contender and its unit.
_SPEED = (
    ("gradients of ResNet-50: 161 arrays, 102 MB", "gradients-2", "resnet50", None, "Gloo DDP", "ms"),
    ("the same", "gradients-2", "resnet50", None, "Allreduce each", "ms"),
    ("1000 gradients of 1 KB", "gradients-2", "small", None, "Allreduce packed", "ms"),
    ("one array of 4 B", "all-reduce-openmpi-2", "all_reduce", 4, "Allreduce", "us"),
    ("steps of Adam on a parameter server", "ps-4", "1 float, Adam", None, "TensorFlow", "a second"),
)
#: How README links the command of a row, and how its page links the file.
_BY = r"\[(\d)\]\(docs/benchmarks\.md#the-first-table\)"
_LINKED = r"\[`{0}\.json`\]\(\.\./benchmarks/results/{0}\.json\)"


def command_of(by: str, file: str, program: str) -> str:
    """Return the command that the page shows for a row of the README's table, with its file."""
    number = re.fullmatch(_BY, by)
    assert number
    (command,) = re.findall(rf"^{number[1]}\. `{program} (.*)`, {_LINKED.format(file)}$", BENCHMARKS, re.MULTILINE)
    return command


@pytest.mark.parametrize(("title", "file", "work", "nbytes", "peer", "unit"), _SPEED)
def test_the_table_of_readme_has_what_was_measured(title, file, work, nbytes, peer, unit):
    ours, _, theirs, ratio, by = cells(README, title)
    launches = launches_of(file, work, nbytes)
    assert len(launches) == 3
    for cell, who in ((ours, "mpidist"), (theirs, peer)):
        figure = cell.removesuffix(f" {unit}").replace(" ", "")
        time = median_of(launches, who)
        assert _is_rounded(figure, 1e6 / time if unit == "a second" else time / _MICROSECONDS[unit])
    assert _is_rounded(ratio, median_of(launches, peer, "mpidist"))
    command = command_of(by, file, "python -m")
    ran = json.loads((RESULTS / f"{file}.json").read_text())["launches"][0]["command"]
    assert sorted(command.split()) == sorted(" ".join(ran).partition(" --json")[0].split())


#: The row of training steps, and the model in `benchmarks/results/torch_steps-2.json`.
_STEP, _STEP_OF = "training step of a PyTorch MLP of 2.2 million parameters", "MLP, 2.2 million"


def test_the_row_of_training_steps_has_what_was_measured():
    ours, _, theirs, ratio, by = cells(README, _STEP)
    run = json.loads((RESULTS / "torch_steps-2.json").read_text())
    seconds = [launch["seconds"][_STEP_OF] for launch in run["launches"]]
    assert len(seconds) == 7
    for cell, who in ((ours, "mpidist"), (theirs, "DDP")):
        assert _is_rounded(cell.removesuffix(" ms"), 1e3 * median_of(seconds, who))
    assert _is_rounded(ratio, median_of(seconds, "DDP", "mpidist"))
    command = command_of(by, "torch_steps-2", "mpidist")
    assert command == " ".join(run["command"][:5])


#: Tables of training steps: the page, the file, the contenders, and the models by title and name there.
_STEP_TABLES = (
    (
        *("torch.md", "torch_steps-2", ["nothing", "mpidist", "DDP", "fused", "naive"]),
        {name: name for name in ("MLP, 150,000", "MLP, 2.2 million", "ResNet-18, 11 million", "MLP, 25 million")},
    ),
    (
        *("jax.md", "jax_trees-2", ["bare", "ours", "weighted", "Horovod's pattern"]),
        {
            "150,000": "150 thousand, 6 tensors",
            "2.2 million": "2.2 million, 6 tensors",
            "ResNet-18, 11 million": "ResNet-18, 11 million, 62 tensors, 8 rows",
            "25 million": "25 million, 20 tensors, 4 rows",
        },
    ),
    *(
        (
            *("keras.md", f"keras_step-{backend.lower().removeprefix('py')}-2"),
            ["alone", "mpi4py", "distributed", "reduction", "seam"],
            {
                f"{backend}, 9,000": "8970 parameters",
                f"{backend}, 150,000": "149110 parameters",
                f"{backend}, 2.2 million": "2212710 parameters",
                f"{backend}, ResNet-18, 11 million": "11183562 parameters",
                f"{backend}, 25 million": "24978570 parameters",
            },
        )
        for backend in ("JAX", "PyTorch")
    ),
)


def steps_in(file: str, model: str) -> list[dict[str, float]]:
    """Return the milliseconds of a model's training step in each launch of a file."""
    launches = json.loads((RESULTS / f"{file}.json").read_text())["launches"]
    return [
        launch["milliseconds"][model]
        if "milliseconds" in launch
        else {who: 1e3 * seconds for who, seconds in launch["seconds"][model].items()}
        for launch in launches
    ]


@pytest.mark.parametrize(
    ("page", "file", "contenders", "title", "model"),
    [(*table[:3], *names) for table in _STEP_TABLES for names in table[3].items()],
)
def test_a_training_step_takes_what_was_measured(page, file, contenders, title, model):
    launches = steps_in(file, model)
    assert len(launches) == 7
    for cell, who in zip(cells((ROOT / "docs" / page).read_text(), title), contenders, strict=True):
        assert _is_rounded(cell, median_of(launches, who))


def _overlaps():
    """Yield the title of each row of sums in the backward pass, the medians over its launches, and the wire, in ms."""
    launches = json.loads((RESULTS / "torch_overlap.json").read_text())["launches"]
    for rate in ("100mbit", "1000mbit"):
        of_rate = [launch["cases"] for launch in launches if launch["rate"] == rate]
        assert len(of_rate) == 1
        mbit = int(rate.removesuffix("mbit"))
        for name, case in of_rate[0].items():
            seconds = [each[name]["seconds"] for each in of_rate]
            yield f"{mbit} Mbit/s, {name}", seconds, case["bytes"] * 8 / (mbit * 1e3)


@pytest.mark.parametrize(("title", "seconds", "wire"), list(_overlaps()))
def test_sums_during_the_backward_pass_take_what_was_measured(title, seconds, wire):
    names = ("nothing", "forward", "mpidist DDP", "no overlap", "DDP")
    times = [1e3 * median_of(seconds, who) for who in names]
    *shown, of_bound = cells((ROOT / "docs" / "torch.md").read_text(), title)
    for cell, time in zip(shown, times, strict=True):
        assert _is_rounded(cell, time)
    alone, forward, ours, *_ = times
    assert of_bound == f"{ours / max(alone, forward + wire):.2f}"


def test_how_far_sums_in_the_backward_pass_are_from_their_aim_is_what_was_measured():
    found = [
        f"{median_of(seconds, 'mpidist DDP') / max(median_of(seconds, 'nothing'), wire / 1e3):.2f}"
        for _, seconds, wire in _overlaps()
    ]
    assert f"it is {', '.join(found[:-1])} and {found[-1]} times." in (ROOT / "docs" / "torch.md").read_text()


#: The rows of the table of the second machine: the file, the work, the contenders and the unit.
_SECOND = {
    "ResNet-50, 102 MB": ("gradients-intel-2", "resnet50", "mpidist", "Gloo DDP", "ms"),
    "ResNet-50, once more": ("gradients-intel-2", "resnet50", "mpidist", "Allreduce each", "ms"),
    "ResNet-50, in `gradient_buffers`": ("gradients-intel-2", "resnet50", "mpidist, in buffers", "copy", "ms"),
    "1000 x 1 KB": ("gradients-intel-2", "small", "mpidist", "Allreduce packed", "ms"),
    "steps of Adam on a server": ("ps-intel-4", "1 float, Adam", "mpidist", "TensorFlow", "a second"),
}


@pytest.mark.parametrize("title", _SECOND)
def test_the_rows_of_the_second_machine_have_what_was_measured(title):
    file, work, own, peer, unit = _SECOND[title]
    ours, _, theirs, ratio = cells(BENCHMARKS, title)
    launches = launches_of(file, work)
    for cell, who in ((ours, own), (theirs, peer)):
        figure, time = cell.removesuffix(f" {unit}").replace(" ", ""), median_of(launches, who)
        assert _is_rounded(figure, 1e6 / time if unit == "a second" else time / _MICROSECONDS[unit])
    assert _is_rounded(ratio, median_of(launches, peer, own))


def test_readme_tells_the_ratios_of_the_second_machine():
    titles = ("ResNet-50, 102 MB", "ResNet-50, once more", "1000 x 1 KB", "steps of Adam on a server")
    found = [cells(BENCHMARKS, title)[-1] for title in titles]
    found.insert(3, f"{median_of(launches_of('all-reduce-intel-2', 'all_reduce', 4), 'Allreduce', 'mpidist'):.2f}")
    page = re.sub(r"\s+", " ", README)
    assert f"are {', '.join(found[:-1])} and {found[-1]} times as fast." in page


def test_the_table_of_readme_has_no_other_rows():
    (table,) = re.findall(r"^\| Measured \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert {line.split(" | ")[0][2:] for line in table.splitlines()[2:] if line} == {_STEP, *(row[0] for row in _SPEED)}


@pytest.mark.parametrize(
    ("title", "who"),
    [
        ("copy", "copy"),
        ("mpidist", "mpidist"),
        ("mpidist, in `gradient_buffers`", "mpidist, in buffers"),
        ("mpi4py's `Allreduce`, each array", "Allreduce each"),
        ("mpi4py's `Allreduce`, packed", "Allreduce packed"),
        ("mpi4py's `Iallreduce`, packed", "Iallreduce packed"),
        ("PyTorch's Gloo, one flat tensor", "Gloo flat"),
        ("PyTorch's DistributedDataParallel over Gloo", "Gloo DDP"),
        ("PyTorch's Gloo, each tensor", "Gloo each"),
        ("TensorFlow, ring", "TensorFlow RING"),
    ],
)
def test_lists_of_gradients_take_what_was_measured(title, who):
    for cell, work in zip(cells(BENCHMARKS, title), ("resnet50", "small"), strict=True):
        launches = launches_of("gradients-2", work)
        time, ratio = median_of(launches, who), median_of(launches, who, "copy")
        shown = re.fullmatch(r"([\d.]+) ms(?: \(([\d.]+)x\))?", cell)
        assert _is_rounded(shown[1], time / 1e3) and _is_rounded(shown[2] or "1", ratio)


@pytest.mark.parametrize(
    ("title", "nbytes"), [("4 B", 4), ("64 KiB", 1 << 16), ("1 MiB", 1 << 20), ("16 MiB", 1 << 24)]
)
def test_one_array_takes_what_was_measured(title, nbytes):
    shown = cells(BENCHMARKS, title)
    of_mpi = [("pairs-2", "one array", 7), ("all-reduce-mpich-2", "all_reduce", 3)]
    for (file, work, count), time, ours in zip(of_mpi, shown[::2], shown[1::2], strict=True):
        launches = launches_of(file, work, nbytes)
        assert len(launches) == count
        figure, unit = time.split()
        assert _is_rounded(figure, median_of(launches, "Allreduce") / _MICROSECONDS[unit])
        if ours.startswith("+"):
            more = statistics.median(each["mpidist"] - each["Allreduce"] for each in launches)
            assert ours == f"+{more:.1f} us"
        else:
            assert ours == f"{median_of(launches, 'mpidist', 'Allreduce'):.2f}x"


@pytest.mark.parametrize(
    ("title", "work"), [("SGD", "1 float"), ("SGD with momentum", "1 float, momentum"), ("Adam", "1 float, Adam")]
)
def test_steps_on_parameter_servers_are_the_medians_over_the_launches(title, work):
    rate, ratio = cells(BENCHMARKS, title)
    launches = launches_of("ps-4", work)
    assert len(launches) == 3
    assert _is_rounded(rate.replace(" ", ""), 1e6 / median_of(launches, "mpidist"))
    assert _is_rounded(ratio, median_of(launches, "TensorFlow", "mpidist"))


def test_predictions_hold_as_often_as_the_page_says():
    launches = json.loads((RESULTS / "predictions-2.json").read_text())["launches"]
    assert len(launches) == 6 and {each["count"] for each in launches} == {32}
    turns, again = [turn for each in launches for turn in each["predicted"]], [each["again"] for each in launches]
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "simulate.md").read_text())
    assert f"{min(turns)} to {max(turns)} of the 32 predictions were within 15 %" in page
    assert f"within 15 % for {min(again)} to {max(again)} of 32" in page


# -- the changelog ----------------------------------------------------------------------------------------------------


def test_what_is_new_in_a_version_is_a_screen():
    first, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first.startswith("# Changelog\n")
    assert versions
    assert {version.partition("\n")[0]: version.count("\n") for version in versions if version.count("\n") > 80} == {}


# -- environment variables --------------------------------------------------------------------------------------------


def test_every_variable_is_documented_with_its_default():
    text = (ROOT / "docs" / "reference.md").read_text()
    rows = dict(re.findall(r"^\| `(MPIDIST_\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    defaults = {f"MPIDIST_{name.upper()}": value for name, value in vars(Settings()).items()}
    assert rows == {name: _shown(value) for name, value in defaults.items()}


def _shown(default: object) -> str:
    """Return how the page shows a default: as it would be set."""
    return str(int(default) if isinstance(default, bool) else default) or '""'


def test_no_page_names_a_variable_that_does_not_exist():
    known = {f"MPIDIST_{name.upper()}" for name in vars(Settings())} | {"MPIDIST_TEST_ON"}  # of tests/gpu
    named = {name for page in PAGES for name in re.findall(r"\bMPIDIST_[A-Z_]+[A-Z]\b", page.read_text())}
    assert named <= known


# -- public names -----------------------------------------------------------------------------------------------------


def public_names(module: ModuleType = mpidist, above: str = "") -> dict[str, object]:
    """Return every public name below a module, namespaces opened, with its value."""
    found = {}
    for name in set(module.__all__) - {"__version__"}:
        value = getattr(module, name)
        found.update(public_names(value, f"{above}{name}.") if inspect.ismodule(value) else {f"{above}{name}": value})
    return found


NAMES = public_names()


def test_public_names_were_found():
    assert {"Variable", "data.Dataset", "optimizers.SGD", "errors.LaunchError", "testing.run_ranks"} <= set(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_in_the_reference(name):
    text = (ROOT / "docs" / "reference.md").read_text()
    is_member = name.startswith("errors.") and ".. automodule:: mpidist.errors" in text
    assert is_member or re.search(rf"\bmpidist\.{re.escape(name)}(?!\w)", text)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_has_a_docstring(name):
    assert inspect.getdoc(NAMES[name])


class Documented(NamedTuple):
    """A public function or method, and what its help shows."""

    name: str
    text: str


#: Classes of which no method sends anything: they are values.
_VALUES = (
    *("ClusterSpec", "CommunicationOptions", "InputContext", "Faults"),
    *("RunConfig", "TrainOp", "SessionRunArgs", "SessionRunValues", "SlowReplica"),
)


def communicating() -> Iterator[Documented]:
    """Yield the public functions and methods of which a user must know whether they are collective."""
    for name, value in NAMES.items():
        if inspect.isfunction(value) and not name.startswith("testing."):  # those start ranks of their own
            yield Documented(name, inspect.getdoc(value) or "")
        elif inspect.isclass(value) and not issubclass(value, BaseException) and not _always_local(value):
            for attribute, _ in inspect.getmembers(value, inspect.isroutine):
                # What subclasses write ("..._implementation") does what the public method says.
                if not attribute.startswith("_") and not attribute.endswith("_implementation"):
                    yield Documented(f"{name}.{attribute}", inspect.getdoc(getattr(value, attribute)) or "")


def _always_local(cls: type) -> bool:
    return cls.__name__ in _VALUES or any("All methods are Local" in (base.__doc__ or "") for base in cls.__mro__)


@pytest.mark.parametrize("subject", sorted(communicating()), ids=lambda subject: subject.name)
def test_docstrings_say_what_is_collective(subject):
    assert re.search(r"\b(Collective|Local|collective)\b", subject.text), subject.text


# -- errors -----------------------------------------------------------------------------------------------------------


def test_every_error_that_the_pages_name_exists():
    named = {name for page in PAGES for name in re.findall(r"\b[A-Z]\w+Error\b", page.read_text())}
    known = set(dir(mpidist.errors)) | set(dir(importlib.import_module("builtins"))) | {"ScheduleError"}
    known |= {*dir(mpidist.metrics), *dir(mpidist.estimator)}  # MeanSquaredError is none
    assert named <= known


def test_every_message_that_troubleshooting_starts_from_is_in_the_source():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [_plain(message) for message in re.findall(r"^\*\*`(.*)`\*\*$", text, re.MULTILINE)]
    assert len(messages) > 15
    sources = [path.read_text() for path in (ROOT / "mpidist").rglob("*.py")]
    constants = [_plain(value) for source in sources for value in _strings(source)]
    assert [message for message in messages if not any(_shares_words(message, value) for value in constants)] == []


def _strings(source: str) -> Iterator[str]:
    """Yield the string constants of a module, and the constant parts of its f-strings."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _plain(text: str) -> str:
    return _words(re.sub("[`:;]", "", text))


def _shares_words(message: str, value: str, count: int = 3) -> bool:
    words = message.split()
    return any(" ".join(words[at : at + count]) in value for at in range(len(words) - count + 1))


def _words(text: str) -> str:
    return " ".join(text.split())


# -- the tests themselves ---------------------------------------------------------------------------------------------


def test_examples_are_valid_python_with_lines_of_at_most_120_characters():
    for block in blocks():
        ast.parse(block.code)
        assert max(map(len, block.code.splitlines())) <= 120, block.place
