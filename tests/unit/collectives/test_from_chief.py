"""What the first rank does for all: every rank hears the result, or the error with its type."""

import builtins

from mpidist.collectives.from_chief import from_chief
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


def outcome(fn):
    return run_ranks(3, lambda: from_chief(world_communicator(), fn, "a try"))


def test_a_result_is_known_to_all_and_made_by_the_first_alone():
    def on_rank():
        communicator = world_communicator()
        return from_chief(communicator, lambda: [communicator.rank, {"a": 1.5}], "a try")

    assert [tuple(each) for each in run_ranks(3, on_rank)] == [([0, {"a": 1.5}], "", "", None)] * 3


def test_an_error_is_raised_on_all_with_its_type_and_on_the_first_it_is_itself():
    error = FileNotFoundError("no such folder")

    def fail():
        raise error

    def on_rank():
        try:
            from_chief(world_communicator(), fail, "a try").checked(lambda kind: getattr(builtins, kind))
        except Exception as raised:
            return raised

    first, *others = run_ranks(3, on_rank)
    assert first is error
    assert [(type(each), str(each)) for each in others] == [(FileNotFoundError, "no such folder")] * 2


def test_a_result_that_json_cannot_hold_is_an_error_on_all():
    found = outcome(object)
    assert [each.kind for each in found] == ["TypeError"] * 3
    assert all("not JSON serializable" in each.text for each in found)
    assert isinstance(found[0].error, TypeError) and found[1].error is None


def test_an_error_that_cannot_be_told_is_known_to_all_and_the_next_call_is_another():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail():
        raise Mute

    def on_rank():
        found = from_chief(world_communicator(), fail, "a try")
        return found.kind, found.text, from_chief(world_communicator(), lambda: 5, "a try").result

    assert run_ranks(2, on_rank) == [("Mute", "(its text cannot be made: RuntimeError)", 5)] * 2
