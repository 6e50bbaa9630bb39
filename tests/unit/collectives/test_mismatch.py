"""The text of a mismatch: who differs from whom, in what."""

import pytest

from mpidist.collectives.call import Call
from mpidist.collectives.mismatch import explain, fact


def _call(name, *tensors):
    return {"call": name, "tensors": [list(tensor) for tensor in tensors]}


W = ("w", "float32", (4, 3))
WIDER = ("w", "float32", (4, 5))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            [_call("all_reduce(sum)", W), _call("all_reduce(sum)", WIDER), _call("all_reduce(sum)", W)],
            "tensor 0: rank 1 passed 'w' float32 (4, 5), ranks 0, 2 passed 'w' float32 (4, 3)",
        ),
        (
            [_call("all_reduce(sum)", W, W), _call("all_reduce(sum)", W)],
            "rank 1 passed 1 tensor to all_reduce(sum), rank 0 passed 2 tensors; "
            "tensor 1: rank 1 passed none, rank 0 passed 'w' float32 (4, 3)",
        ),
        (
            [_call("barrier"), _call("all_reduce(sum)", W)],
            "rank 1 called all_reduce(sum) on 'w' float32 (4, 3), rank 0 called barrier",
        ),
        (
            [_call("a", W), _call("b", W), _call("c", W)],
            "rank 1 called b on 'w' float32 (4, 3), rank 0 called a on 'w' float32 (4, 3); rank 2 called c",
        ),
        ([_call("a", W)] * 2, "do all ranks run the same version"),
    ],
)
def test_what_is_said(calls, expected):
    text = explain(calls, 7, 0)
    assert text.startswith(f"rank 0 of {len(calls)}: ranks differ in collective call 7: ")
    assert expected in text


def test_long_lists_of_ranks_are_cut():
    text = explain([_call("a", W)] * 20 + [_call("b", W)], 1, 0)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, and 12 more" in text


def test_facts_are_said_with_both_values():
    calls = [_call("a", W, fact("seed", seed), fact("rows", 3)) for seed in (0, 1, 0)]
    assert ": in a, seed: 1 on rank 1, 0 on ranks 0, 2. Every rank" in explain(calls, 1, 2)


def test_facts_are_not_counted_as_tensors():
    calls = [_call("a", W, fact("seed", 0)), _call("a", WIDER, fact("seed", 1), fact("rows", 1))]
    assert "in a, tensor 0: rank 1 passed 'w' float32 (4, 5)" in explain(calls, 1, 0)
    assert "rank 1 called b, rank 0 called a on" in explain([calls[0], _call("b", fact("seed", 0))], 1, 0)


def test_many_ranks_that_all_differ_do_not_fill_the_screen():
    text = explain([_call("a", fact("seed", seed)) for seed in range(1000)], 1, 0)
    assert "seed: 8 on rank 8, 0 on rank 0; 991 more ranks differ" in text and "seed: 9 on" not in text


def test_many_facts_that_differ_do_not_fill_the_screen():
    calls = [_call("a", *(fact(f"lr {number}", value) for number in range(300))) for value in (0, 1)]
    text = explain(calls, 1, 0)
    assert "lr 7: 1 on rank 1, 0 on rank 0, and 292 more" in text and "lr 8:" not in text


def test_facts_come_with_advice_of_their_own_unless_something_else_differs():
    calls = [{**_call("a", W, fact("lr", value)), "advice": "Change it alike"} for value in (0, 1)]
    assert explain(calls, 1, 0).endswith("lr: 1 on rank 1, 0 on rank 0. Change it alike")
    wider = {**_call("a", WIDER, fact("lr", 1)), "advice": "Change it alike"}
    assert explain([calls[0], wider], 1, 0).endswith("to the same calls")


def test_facts_that_change_are_compared_with_a_call():
    first, second = Call("a", [W]), Call("a", [W])
    plain = first.digest
    first.compare_too(5, lambda: ([fact("lr", 1)], "Change it alike"))
    assert first.digest != second.digest == plain
    second.compare_too(5, lambda: ([fact("lr", 1)], "Change it alike"))
    assert first.digest == second.digest and first.description == second.description
    assert first.description == {**_call("a", W, fact("lr", 1)), "packs": [], "advice": "Change it alike"} | {
        "tensors": [["w", "float32", [4, 3]], ["lr: 1", "", []]]
    }
    first.compare_too(0, lambda: ([], ""))
    assert first.digest == plain
