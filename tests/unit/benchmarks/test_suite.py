"""The benchmarks without ranks: arguments, what it makes, how it counts, and what it concludes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.table import PEERS, able, name_of
from benchmarks.suite import all_reduce, command, first_steps, markdown, plot, results, scaling, slot_adding, targets
from benchmarks.suite import measured as measured_module
from benchmarks.suite.cache_mode import CHANGED, ONE_CACHE, TWO_CACHES, UNKNOWN, classify
from benchmarks.suite.command import main
from benchmarks.suite.contender import Contender, Copy
from benchmarks.suite.ranks import seconds_of
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import BOUND, Row, all_reduce_factor, rows_of, table
from benchmarks.suite.step import Update
from benchmarks.suite.tensor_lists import MODELS, shapes_of
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import FEWEST, Budget, Timing, Turns, order, shares
from benchmarks.suite.update_rules import BLOCK, RULES
from mpidist.errors import MissingDependencyError


class FakeProbe:
    """A probe that finds what it is told to."""

    def __init__(self, modes=()):
        self.modes = list(modes)

    def look(self):
        return self.modes.pop(0) if self.modes else ONE_CACHE


class FakeRanks:
    """One rank, which needs no MPI."""

    rank, size = 0, 1

    def __init__(self, modes=()):
        self.comm, self.probe, self.said = self, FakeProbe(modes), []

    def Barrier(self):
        pass

    def say(self, text):
        self.said.append(text)

    def slowest(self, seconds):
        return seconds

    def elapsed(self, start, stop):
        return stop - start

    def total(self, count):
        return count

    def first_problem(self, problem):
        return problem

    def existing(self, tensors):
        return [numpy.zeros(shape, tensors.dtype) for shape in tensors.shapes]


class Recorder(Contender):
    """Gives back what it got, and writes down when, with whom alive."""

    log: list = []

    def __init__(self, ranks, tensors, name="recorder"):
        super().__init__(ranks, tensors)
        self.name = name

    def run(self, prepared):
        self.log.append((self.name, [id(array) for array in prepared]))
        return prepared


# -- the lists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, tensors, elements",
    [
        ("resnet50", 161, 25_557_032),
        ("bert-base", 199, 109_482_240),
        ("gpt2-small", 148, 124_439_808),
        ("small", 1000, 256_000),
    ],
)
def test_models_have_the_parameters_that_their_papers_count(model, tensors, elements):
    shapes = shapes_of(model)
    assert (len(shapes), sum(map(prod, shapes))) == (tensors, elements)


def test_every_model_was_counted():
    assert set(MODELS) == {"resnet50", "bert-base", "gpt2-small", "small"}


# -- values -----------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, size=st.integers(1, 8), step=st.integers(0, 100), dtype=st.sampled_from(["f2", "f4", "f8", "i4"]))
def test_the_sums_of_all_ranks_are_the_expected_ones(shapes, size, step, dtype):
    lists = [TensorList(shapes, dtype, rank, size) for rank in range(size)]
    sums = [sum(parts) for parts in zip(*(each.new(step) for each in lists), strict=True)]
    assert [array.dtype for array in lists[0].new(step)] == [numpy.dtype(dtype)] * len(shapes)
    assert [each.wrong(sums, step) for each in lists] == [0] * size


def test_every_wrong_element_is_counted():
    tensors = TensorList([(3, 4), (5,)], "float32", 0, 1)
    right = tensors.new(3)
    right[0][1, 2] += 1
    right[1][:2] = numpy.nan
    assert tensors.wrong(right, 3) == 3
    assert tensors.wrong(tensors.new(4), 3) == 17, "results of another step are wrong as a whole"
    assert tensors.wrong(tensors.new(3)[:1], 3) == 5, "a tensor is missing"
    assert tensors.wrong([numpy.zeros(1), tensors.new(3)[1]], 3) == 12, "a shape is another one"


def test_every_step_has_arrays_of_its_own():
    tensors = TensorList([(4,), (2, 2)], "float32", 0, 1)
    arrays = [array for step in range(3) for array in tensors.new(step)]
    assert not any(numpy.shares_memory(a, b) for a in arrays for b in arrays if a is not b)


# -- turns ------------------------------------------------------------------------------------------------------------

COSTS = st.lists(st.floats(1e-6, 10), min_size=1, max_size=8)


@given(costs=COSTS, seconds=st.floats(0.01, 100), rounds=st.integers(FEWEST, 50))
def test_turns_fit_into_the_time_but_for_the_fewest(costs, seconds, rounds):
    counts = shares(costs, Budget(seconds, rounds))
    assert all(FEWEST <= count <= rounds for count in counts)
    above = sum(cost * count for cost, count in zip(costs, counts, strict=True) if count > FEWEST)
    assert above <= seconds * (1 + 1e-9)


def test_time_that_the_quick_do_not_need_goes_to_the_slow():
    assert shares([1.0, 0.001], Budget(seconds=10, rounds=9)) == [9, 9]


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_everybody_gets_the_turns_that_are_due(counts):
    rounds = [order(counts, round_) for round_ in range(max(counts))]
    assert all(len(set(each)) == len(each) for each in rounds)
    flat = [each for round_ in rounds for each in round_]
    assert [flat.count(index) for index in range(len(counts))] == counts


def test_who_is_first_changes_from_round_to_round():
    assert [order([4, 4, 4], round_)[0] for round_ in range(4)] == [0, 1, 2, 0]


def test_every_turn_has_new_arrays_while_the_result_before_is_kept():
    ranks, tensors, Recorder.log = FakeRanks(), TensorList([(8,)] * 3, "float32", 0, 1), []
    contenders = [Recorder(ranks, tensors, name) for name in "ab"]
    timings = Turns(contenders, tensors, ranks, Budget(seconds=5, rounds=6)).run()
    assert [len(timing.seconds) for timing in timings] == [6, 6]
    assert [timing.wrong for timing in timings] == [0, 0]
    for name in "ab":
        own = [ids for who, ids in Recorder.log if who == name]
        pairs = zip(own, own[1:], strict=False)
        assert not any(set(ids) & set(after) for ids, after in pairs), "the result before was given up too early"


def test_ranks_that_take_turns_on_a_core_take_the_time_of_all_of_them():
    spans = [(1.0, 2.0), (1.25, 2.5), (2.0, 3.0), (2.5, 3.75)]
    assert seconds_of(spans, one_clock=True) == 2.75
    assert seconds_of(spans, one_clock=False) == 1.25
    assert seconds_of([(5.0, 5.5)], one_clock=True) == seconds_of([(5.0, 5.5)], one_clock=False) == 0.5


def test_a_wrong_result_is_counted_in_the_first_and_in_the_last_step():
    class Wrong(Recorder):
        def run(self, prepared):
            prepared[0][0] += 1
            return prepared

    ranks, tensors = FakeRanks(), TensorList([(8,)], "float32", 0, 1)
    (timing,) = Turns([Wrong(ranks, tensors)], tensors, ranks, Budget(rounds=3)).run()
    assert timing.wrong == 2


def test_turns_know_their_cache_mode_and_whether_it_changed_meanwhile():
    modes = [ONE_CACHE, ONE_CACHE, ONE_CACHE, TWO_CACHES, TWO_CACHES]  # one look before it warms up, one behind
    ranks, tensors = FakeRanks(modes), TensorList([(8,)], "float32", 0, 1)
    (timing,) = Turns([Recorder(ranks, tensors)], tensors, ranks, Budget(rounds=3)).run()
    assert timing.modes == [ONE_CACHE, CHANGED, TWO_CACHES]
    assert timing.within(ONE_CACHE) == timing.seconds[:1]
    assert timing.within(CHANGED) == timing.seconds


def test_who_had_no_turn_in_the_mode_of_the_table_is_named(monkeypatch):
    modes = [[TWO_CACHES] * 9, [ONE_CACHE] * 3]
    timings = [Timing([1.0] * len(each), each, 0) for each in modes]
    monkeypatch.setattr(measured_module, "Turns", lambda *_: SimpleNamespace(run=lambda: timings))
    ranks, tensors = FakeRanks(), TensorList([(8,)], "float32", 0, 2)
    measured, makers = measured_module.Measured(), [partial(Recorder, name=name) for name in ("first", "slow")]
    rows = measured.add("work", makers, tensors, ranks, Budget(), "first", 1.0)
    assert [(row.who, row.cache) for row in rows] == [("first", TWO_CACHES)]
    assert measured.missing == {"slow": "no turn of it on work was in two caches"}
    assert ranks.said == ["# without slow: no turn of it on work was in two caches"]


# -- the cache mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trips, mode", [([], UNKNOWN), ([120.0], ONE_CACHE), ([490.0], TWO_CACHES), ([120.0, 130.0, 480.0], TWO_CACHES)]
)
def test_the_slowest_pair_decides_the_mode(trips, mode):
    assert classify(trips) == mode


# -- rows -------------------------------------------------------------------------------------------------------------


def measured(copy=1.0, ours=2.0, modes=(ONE_CACHE,) * 3):
    """Return the rows of a copy and a contender on four ranks, whose three turns took these times, more or less."""
    ranks, tensors = FakeRanks(), TensorList([(250,)], "float32", 0, 4)
    timings = [Timing([t * s for t in (0.5, 1, 9)], list(modes), w) for s, w in ((copy, None), (ours, 0))]
    contenders = [Copy(ranks, tensors), Recorder(ranks, tensors, "mpidist")]
    return rows_of("work", contenders, timings, tensors, "copy", all_reduce_factor(4))


def test_a_row_has_the_columns_of_nccl_tests():
    copy, ours = measured(copy=1e-6, ours=2e-6)
    assert (ours.size, ours.count, ours.type, ours.who, ours.wrong) == (1000, 250, "float32", "mpidist", 0)
    assert ours.time_us == pytest.approx(2.0)
    assert ours.algbw == pytest.approx(0.5)
    assert ours.busbw == pytest.approx(0.5 * 2 * 3 / 4)
    assert (ours.ratio, ours.more_us) == (pytest.approx(2.0), pytest.approx(1.0))
    assert (copy.ratio, copy.busbw, copy.wrong) == (1.0, 0.0, None)


def test_only_turns_of_the_common_mode_count():
    rows = measured(modes=(TWO_CACHES, ONE_CACHE, ONE_CACHE))
    assert [(row.cache, row.turns) for row in rows] == [(ONE_CACHE, 2)] * 2
    assert rows[0].time_us == pytest.approx(5e6)  # the median of 1 and 9 s


def test_a_table_says_what_its_ratios_refer_to():
    lines = table(measured()).splitlines()
    assert lines[0].startswith("#") and "busbw" in lines[0] and "#wrong" in lines[0]
    assert len(lines) == 5
    assert lines[-1] == f"# ratio and more: against copy; {ONE_CACHE}"
    assert table([]) == ""


# -- results ----------------------------------------------------------------------------------------------------------


def launch(rows, subcommand="gradients", ranks=2):
    return Launch(subcommand, ["bench", subcommand], ranks, "An MPI 1.0", f"1 node x {ranks} ranks", {}, rows)


def test_launches_are_read_as_they_were_written(tmp_path):
    launches = [launch(measured()), launch([], ranks=4)]
    results.write(tmp_path / "found.json", launches)
    assert results.read(tmp_path / "found.json") == launches


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}'])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(ValueError, match="found.json"):
        results.read(tmp_path / "found.json")


RESULTS = [
    path
    for path in sorted((Path(__file__).resolve().parents[3] / "benchmarks" / "results").glob("*.json"))
    if json.loads(path.read_text()).get("format") == "mpidist bench 1"
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_stored_results_are_shown(path):
    found = results.read(path)
    assert "medians over" in results.summary(found)
    assert all(row.time_us > 0 for each in found for row in each.rows)


def test_launches_are_summed_up_for_each_cache_mode():
    launches = [launch(measured(ours=ours)) for ours in (2.0, 3.0, 10.0)]
    launches.append(launch(measured(ours=50.0, modes=(TWO_CACHES,) * 3)))
    found = {key: results.medians(rows) for key, rows in results.kinds(launches).items()}
    assert [(row.ratio, row.launches) for row in found["gradients", 2, ONE_CACHE]] == [(1.0, 3), (3.0, 3)]
    assert [(row.ratio, row.launches) for row in found["gradients", 2, TWO_CACHES]] == [(1.0, 1), (50.0, 1)]
    assert "never came up" not in results.summary(launches)


def test_a_mode_that_never_came_up_is_told():
    assert f"{TWO_CACHES!r} never came up in 2 launches" in results.summary([launch(measured())] * 2)
    alone = [launch(measured(modes=(UNKNOWN,) * 3))]
    assert "never found out" in results.summary(alone)


def test_wrong_elements_of_all_launches_count():
    good = measured()[1]
    (row,) = results.medians([good, replace(good, wrong=3)])
    assert row.wrong == 3


# -- targets ----------------------------------------------------------------------------------------------------------


def row(who, time_us, work="resnet50", kind="peer", size=102228128, cache=ONE_CACHE):
    numbers = {"turns": 3, "algbw": 1.0, "busbw": 1.0, "ratio": 1.0, "more_us": 0.0, "wrong": 0}
    return Row(
        work, size, size // 4, "float32", who, kind, time_us, (time_us, time_us), reference="", cache=cache, **numbers
    )


def verdicts(launches, work, what):
    lines = targets.report(launches).splitlines()
    return [line for line in lines if line.split()[:1] == [work.split()[0]] and f" {what} " in line]


def test_ratios_of_a_launch_are_held_against_the_targets():
    rows = [row("copy", 10.0, kind="reference"), row("mpidist", 12.0, kind="ours"), row("Allreduce each", 18.0)]
    lines = verdicts([launch(rows)], "resnet50", "against a copy")
    assert lines[0].split()[-3:] == ["1.20", "1", "reached"]
    lines = verdicts([launch(rows)], "resnet50", "best peer / ours")
    assert "1.50" in lines[0] and "missed (in 1 of 1 launches)" in lines[0]
    assert "not measured" in lines[1], "two caches never came up"


def test_the_worst_size_decides():
    pairs = [(4, 3.0), (1024, 5.5), (1 << 20, 900.0)]
    rows = [row("Allreduce", 1.0, "all_reduce", size=size) for size, _ in pairs]
    rows += [row("mpidist", 1.0 + more, "all_reduce", "ours", size) for size, more in pairs]
    (line,) = verdicts([launch(rows, "all-reduce")], "all_reduce", "us above Allreduce")
    assert "5.50" in line and "missed" in line
    (line,) = verdicts([launch(rows, "all-reduce")], "all_reduce", "us above Allreduce, 4 B")
    assert line.split()[-3:] == ["3.00", "1", "reached"]


@pytest.mark.parametrize(("nbytes", "time_us", "reached"), [(1 << 20, 1.1, 2), (1 << 20, 1.2, 0), (1 << 24, 1.2, 1)])
def test_long_arrays_by_the_public_call_and_by_native_are_held_against_mpi(nbytes, time_us, reached):
    sizes = {1 << 20: 1.0, nbytes: time_us}
    rows = [row("Allreduce", 1.0, "all_reduce", size=size) for size in sizes]
    rows += [
        row(who, each, "all_reduce", "ours", size) for size, each in sizes.items() for who in ("mpidist", "native")
    ]
    lines = [
        verdicts([launch(rows, "all-reduce")], "all_reduce", what)
        for what in ("1 MiB by Allreduce", "native by Allreduce")
    ]
    assert [line.split()[-1] == "reached" for (line,) in lines].count(True) == reached


@pytest.mark.parametrize(("time_us", "verdict"), [(1.4, "reached"), (1.6, "missed")])
def test_the_adding_of_slots_is_held_against_numpy(time_us, verdict):
    rows = [row("numpy.add.reduce", 1.0, "8 slots", size=4096), row("mpidist", time_us, "8 slots", "ours", 4096)]
    text = targets.report_of(slot_adding.TARGETS, [launch(rows, "slot-adding", ranks=1)])
    (line,) = [line for line in text.splitlines() if "8 slots" in line and "4096 B" in line]
    assert verdict in line and text.count("not measured") == len(slot_adding.TARGETS) - 1


def test_targets_without_a_measurement_say_so_and_those_of_other_subcommands_say_nothing():
    lines = targets.report([launch([], subcommand) for subcommand in ("step", "two-levels")]).splitlines()
    assert len(lines) == 1 + sum(target.subcommand in ("step", "two-levels") for target in targets.TARGETS) > 1
    assert all(line.endswith("not measured") for line in lines[1:])


def test_every_target_is_launched_or_measured_by_a_script():
    launched = {(ranks, words[0]) for ranks, words in targets.LAUNCHES}
    missing = [target for target in targets.TARGETS if (target.ranks, target.subcommand) not in launched]
    assert {target.subcommand for target in missing} == {"two-levels", "gpu", "gpu-steps"}


@pytest.mark.parametrize(("placement", "ring_ms", "reached"), [("block", 540, True), ("cyclic", 540, False)])
def test_two_hosts_are_held_against_their_link_a_ring_and_mpi(placement, ring_ms, reached):
    work, size = f"2 hosts, {placement}, 100mbit", 5_000_000
    times_ms = {"two_level": 400.0, "ring": ring_ms, "Allreduce": 399.0, BOUND: 360.0}
    rows = [row(who, 1e3 * time, work, size=size) for who, time in times_ms.items()]
    lines = [line for line in targets.report([launch(rows, "two-levels", ranks=4)]).splitlines() if placement in line]
    assert [line.split()[-1] == "reached" for line in lines] == [True, reached, False]
    assert "0.90" in lines[0] and "1.35" in lines[1] and "1.00" in lines[2]


def test_scaling_shows_every_rank_count_and_the_best_peer():
    def rows(scale):
        ours = [row("copy", 10.0 * scale, kind="reference"), row("mpidist", 20.0 * scale, kind="ours")]
        return [*ours, row("Allreduce each", 50.0 * scale), row("Allreduce packed", 40.0 * scale)]

    lines = scaling.report([launch(rows(2), ranks=4), launch(rows(1), ranks=2)]).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["2", "10", "20", "2.00"], ["4", "20", "40", "2.00"]]
    assert lines[1].endswith("40  Allreduce packed")


# -- all-reduce -------------------------------------------------------------------------------------------------------


def test_sizes_grow_fourfold():
    assert all_reduce.sizes(4, 300) == [4, 16, 64, 256]


def test_the_bound_of_a_link_is_its_time_for_one_buffer():
    bound = all_reduce.link_bound([row("Allreduce", 1e6, "all_reduce", size=5_000_000)], link_mbit=100)
    assert (bound.time_us, bound.ratio) == (pytest.approx(400_000), pytest.approx(0.4))


# -- adding alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots, nbytes", [(2, 4), (8, 4), (9, 36)])
def test_the_engine_adds_its_slots_in_rank_order(slots, nbytes):
    ours, numpys = slot_adding.measured(slots, nbytes, turns=1)
    assert (ours.who, ours.wrong, ours.size, ours.reference) == ("mpidist", 0, nbytes, numpys.who)


# -- first steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "spans"), [(None, 2), (120, 2), (119, 1), (20, 1), (1, 1)])
def test_later_steps_are_left_out_where_fewer_are_asked_for(rounds, spans, monkeypatch):
    ranks, made = FakeRanks([ONE_CACHE] * 9), []

    def quick(ranks, tensors):
        made.append(Recorder(ranks, tensors, f"{len(made)}"))
        return made[-1]

    monkeypatch.setattr(first_steps, "_CONTENDERS", (quick, quick))
    monkeypatch.setattr(first_steps, "shapes_of", lambda model: [(3,)])
    monkeypatch.setattr(Recorder, "log", [])
    found = first_steps.measure(SimpleNamespace(model="small", rounds=rounds), ranks).rows
    titles = ["small, steps 1 to 20", "small, steps 100 to 120"][:spans]
    assert [row.work for row in found] == [title for title in titles for _ in made]
    assert len(Recorder.log) == (20, 120)[spans - 1] * len(made)


def test_first_steps_have_their_mean_against_the_better_of_mpi():
    ranks, tensors = FakeRanks(), TensorList([(1,)], "float32", 0, 2)
    contenders = [Recorder(ranks, tensors, name) for name in ("mpidist", "slow", "quick")]
    contenders[0].kind = "ours"
    rows = first_steps.rows_of("steps", contenders, [[1.0, 5.0], [9.0, 9.0], [1.0, 3.0]], [0, 0, 2], tensors, ONE_CACHE)
    assert [(row.time_us, row.ratio, row.reference, row.turns, row.wrong) for row in rows] == [
        *((3e6, 1.5, "quick", 2, 0), (9e6, 4.5, "quick", 2, 0), (2e6, 1.0, "quick", 2, 2))
    ]


# -- whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@given(steps=st.integers(1, 4), elements=st.sampled_from([1, 5, BLOCK, BLOCK + 3]), seed=st.integers(0, 99))
def test_a_rule_in_blocks_is_the_rule_of_the_textbook(name, steps, elements, seed):
    rule, random = RULES[name], numpy.random.default_rng(seed)
    wide, blocked = numpy.ones(elements), numpy.ones(elements)
    slots = [[numpy.zeros(elements) for _ in range(rule.slots)] for _ in range(2)]
    scratch = [numpy.zeros(BLOCK) for _ in range(rule.scratch)]
    for step in range(1, steps + 1):
        gradient = random.normal(size=elements)
        rule.textbook(wide, gradient, slots[0], step)
        rule.in_blocks(blocked, gradient, slots[1], scratch, step)
    numpy.testing.assert_allclose(blocked, wide, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_of_mpidist_is_the_rule_of_the_textbook(name):
    import mpidist

    rule, optimizer = RULES[name], RULES[name].optimizer()
    variable, wide = mpidist.Variable(numpy.ones(7)), numpy.ones(7)
    slots = [numpy.zeros(7) for _ in range(rule.slots)]
    for step in range(1, 4):
        gradient = numpy.arange(7.0) - step
        rule.textbook(wide, gradient, slots, step)
        optimizer.apply_gradients([(gradient, variable)])
    numpy.testing.assert_allclose(variable.value, wide, rtol=1e-12)


def test_parameters_that_are_off_are_counted():
    class Kept(Update):
        parameters = property(lambda self: self.kept)

    ranks, tensors = FakeRanks(), TensorList([(4, 5), (7,)], "float64", 0, 1)
    update, rule = Kept(ranks, tensors, RULES["sgd"]), RULES["sgd"]
    update.kept = [numpy.ones(shape) for shape in tensors.shapes]
    slots = [[numpy.zeros_like(each)] for each in update.kept]
    for step in range(1, 4):
        for parameter, gradient, slot in zip(update.kept, update.prepare(tensors.new(step)), slots, strict=True):
            rule.textbook(parameter, gradient, slot, step)
    assert update.wrong(None, 3) == 0
    update.kept[0][1, 1] += 0.01
    update.kept[1][3] = numpy.nan
    assert update.wrong(None, 3) == 2


# -- peers ------------------------------------------------------------------------------------------------------------


def test_peers_have_names_of_their_own():
    names = [name_of(peer) for peer in PEERS]
    assert all(names) and len(set(names)) == len(names) == 7


def test_a_peer_that_cannot_run_says_why_in_one_line():
    class Missing(Contender):
        name = "missing"

        def __init__(self, ranks, tensors):
            raise MissingDependencyError("needs nothing that is here\nand more")

    ranks, tensors = FakeRanks(), TensorList([(3,)], "float32", 0, 1)
    found, missing = able([Copy, Missing], ranks, tensors)
    assert [each.name for each in found] == ["copy"]
    assert missing == {"missing": "needs nothing that is here"}


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_has_help_and_is_documented(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "SUBCOMMAND"),
        (["gradient"], "invalid choice: 'gradient'"),
        (["gradients", "--model", "resnet"], "invalid choice: 'resnet'"),
        (["gradients", "-n", "0"], "expected a whole number, 1 or more"),
        (["gradients", "--launches", "none"], "expected a whole number"),
        (["show"], "FILE"),
        (["gradients", "--dtype", "float33"], "invalid dtype value: 'float33'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gradients", "-n", "2"], "this process is a rank already"),
        (["gradients", "--launches", "3"], "this process is a rank already"),
        (["scaling"], "starts launches of its own"),
    ],
)
def test_a_rank_starts_no_ranks(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(command, "detect_launcher", lambda: None)
    assert main(["gradients", "--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(option, name, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["gradients", option, str(tmp_path / name)])
    assert left.value.code == 2
    assert "cannot be written; name a file in a folder that there is" in capsys.readouterr().err


def test_what_was_measured_is_shown_again_with_its_targets(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "detect_launcher", lambda: None)
    rows = [row("copy", 10.0, kind="reference"), row("mpidist", 12.0, kind="ours")]
    results.write(tmp_path / "a.json", [launch(rows)])
    assert main(["show", str(tmp_path / "a.json"), "--targets"]) == 0
    printed = capsys.readouterr().out
    assert "gradients on 2 ranks, one cache: medians over 1 launches" in printed
    assert "reached" in printed
    assert main(["show", str(tmp_path / "b.json")]) == 1
    assert "b.json" in capsys.readouterr().err


def test_tables_of_markdown_have_lines_for_sizes_or_for_contenders(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "detect_launcher", lambda: None)

    def rows(size, times=1):
        found = [row("Allreduce", 2.0 * times, "all_reduce", size=size), row("mpidist", 7.0 * times, "all_reduce")]
        return [replace(each, size=size, reference="Allreduce", ratio=each.time_us / 2 / times) for each in found]

    sizes = [size for nbytes in (4, 65536, 1 << 20) for size in rows(nbytes)]
    slower = [size for nbytes in (4, 65536, 1 << 20) for size in rows(nbytes, 3)]
    found = [launch(sizes, "all-reduce"), launch(slower, "all-reduce"), launch(rows(5_000_000), "all-reduce", ranks=4)]
    results.write(tmp_path / "a.json", found)
    assert main(["show", str(tmp_path / "a.json"), "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "all_reduce on 2 ranks, An MPI 1.0:",
        "",
        "| size | Allreduce | mpidist |",
        "|---|---|---|",
        "| 4 B, one cache, 2 launches | 4 us | 14 us (3.50x) |",
        "| 64 KiB, one cache, 2 launches | 4 us | 14 us (3.50x) |",
        "| 1 MiB, one cache, 2 launches | 4 us | 14 us (3.50x) |",
        "",
        "all_reduce on 4 ranks, An MPI 1.0:",
        "",
        "|  | 5 MB, one cache |",
        "|---|---|",
        "| Allreduce | 2 us |",
        "| mpidist | 7 us (3.50x) |",
    ]
    assert main(["show", str(tmp_path / "a.json"), "--markdown", "--who", "mpidist,ring"]) == 0
    assert "| size | mpidist |" in capsys.readouterr().out


def test_auto_is_held_against_the_quickest_algorithm_of_each_size_and_number_of_ranks(capsys, monkeypatch, tmp_path):
    """By medians over the launches; neither MPI's own, nor the public call, nor a copy is an algorithm to choose."""
    monkeypatch.setattr(command, "detect_launcher", lambda: None)

    def rows(size, **times_us):
        kinds = {"Allreduce": "peer", "copy": "reference"}
        return [
            row(who, time_us, "all_reduce", kinds.get(who, "ours"), size)
            for who, time_us in {"copy": 0.1, "Allreduce": 1.0, "mpidist": 1.0, **times_us}.items()
        ]

    found = [
        launch([*rows(1 << 20, auto=30.0, ring=20.0), *rows(4096, auto=6.0, ring=99.0, native=5.0)], "all-reduce", 16),
        *(launch(rows(4096, auto=auto, ring=4.0, native=5.0), "all-reduce") for auto in (4.0, 3.0, 400.0)),
        launch(rows(4096, ring=4.0), "all-reduce", 8),
        launch(rows(4096, auto=4.0, ring=1.0), "gradients", 4),
    ]
    results.write(tmp_path / "a.json", found)
    assert main(["show", str(tmp_path / "a.json"), "--choices"]) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "The quickest algorithm, and AUTO's time by its, An MPI 1.0:",
        "",
        "| size | 2 ranks | 16 ranks |",
        "|---|---|---|",
        "| 4 KiB | ring, 1.00 | native, 1.20 |",
        "| 1 MiB |  | ring, 1.50 |",
    ]
    assert markdown.choices(found[-2:]) == ""


def test_wrong_results_make_the_command_fail(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "detect_launcher", lambda: None)
    results.write(tmp_path / "a.json", [launch([replace(row("mpidist", 1.0), wrong=2)])])
    assert main(["show", str(tmp_path / "a.json")]) == 1
    assert "wrong elements: mpidist on resnet50" in capsys.readouterr().err


def test_a_picture_has_a_panel_for_each_work_and_mode():
    rows = [row("mpidist", 1.0, work) for work in ("resnet50", "small")] + [row("mpidist", 1.0, cache=TWO_CACHES)]
    assert [title for title, _ in plot.panels([launch(rows)])] == [
        "gradients: resnet50, 2 ranks, one cache",
        "gradients: small, 2 ranks, one cache",
        "gradients: resnet50, 2 ranks, two caches",
    ]


@pytest.mark.parametrize("sizes", [[1000], [4, 64, 1024, 4096]])
def test_a_picture_is_drawn_of_bars_or_curves(sizes, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(who, 9.0, "all_reduce", kind, size)
        for size in sizes
        for who, kind in (("copy", "reference"), ("a", "ours"))
    ]
    plot.draw([launch(rows), launch([replace(each, cache=TWO_CACHES) for each in rows])], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["all-reduce", "--smallest", "0"], ["collectives", "--sizes", "-1"]])
def test_sizes_below_one_byte_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"format": "mpidist bench 1"}', '{"format": "mpidist bench 1", "launches": [{"x": 1}]}']
)
def test_show_says_what_is_no_file_of_bench(text, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    assert main(["show", str(tmp_path / "bad.json")]) == 1
    assert "was not written by python -m benchmarks --json" in capsys.readouterr().err
