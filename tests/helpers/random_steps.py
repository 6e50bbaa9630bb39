"""Random steps: two optimizers over variables between each other, in any order, with whatever a user may do in between.

`Play.of(seed)` says what is done, `play` does it on this rank.  Gradients are small multiples of 1/8, so their sums are
exact in every dtype, and any number of ranks has to end with the same bits as one rank that has the sums.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy

import mpidist
from mpidist.optimizers.base import rule_of
from tests.helpers.random_training import LIMITS, MAKERS, RATES, SCHEDULES, SIZES, STRATEGIES

DTYPES = ("float16", "float32", "float64")
SHAPES = ((), (1,), (3,), (2, 2), (0,), (5,), (17,), (4, 33), (5000,))

#: A gradient is cut into so many parts, which are dealt to the ranks.
PARTS = max(SIZES)

ACTIONS = ("step", "step", "step", "step", "renew", "copy", "assign", "save", "restore", "restore anew")


@dataclass(frozen=True)
class Play:
    """What is done; see `of` for what there is."""

    seed: int
    strategy: str
    size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    owners: tuple[int, ...]
    families: tuple[str, str]
    schedule: str
    options: tuple[dict[str, Any], dict[str, Any]]
    actions: tuple[tuple[str, int], ...]
    is_fused: bool

    @classmethod
    def of(cls, seed: int) -> Play:
        """Return the play of a seed."""
        random = numpy.random.default_rng([seed, 5])

        def one_of(*choices: Any) -> Any:
            return choices[random.integers(len(choices))]

        count, same = int(random.integers(2, 12)), one_of(*DTYPES, None)
        return cls(
            seed=seed,
            strategy=one_of(*STRATEGIES),
            size=one_of(*SIZES),
            shapes=tuple(one_of(*SHAPES) for _ in range(count)),
            dtypes=tuple(same or one_of(*DTYPES) for _ in range(count)),
            owners=(0, 1, *(int(random.integers(2)) for _ in range(count - 2))),
            families=(one_of(*MAKERS), one_of(*MAKERS)),
            schedule=one_of("constant", *SCHEDULES),
            options=(_options(random), _options(random)),
            actions=tuple((one_of(*ACTIONS), int(random.integers(1 << 30))) for _ in range(random.integers(4, 16))),
            is_fused=bool(random.random() < 0.5),
        )


def _options(random: Any) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if random.random() < 0.3:
        limit = sorted(LIMITS)[random.integers(len(LIMITS))]
        options[limit] = LIMITS[limit]
    if random.random() < 0.3:
        options["weight_decay"] = 0.01
    if random.random() < 0.3:
        options["skip_nonfinite"] = True
    if random.random() < 0.2:
        options["loss_scale_factor"] = 8.0
    return options


class Player:
    """A play under way, on this rank."""

    def __init__(self, case: Play) -> None:
        self.case = case
        self.strategy = getattr(mpidist, case.strategy)()
        self.replicas, self.rank = self.strategy.num_replicas_in_sync, self.strategy.extended.replica_id
        self.made = 0
        self.variables = [self._new_variable(n) for n in range(len(case.shapes))]
        self.optimizers = [self._new_optimizer(which) for which in range(2)]
        self.states: dict[int, Any] = {}
        self.has_copies = False

    def _new_variable(self, n: int) -> Any:
        random = numpy.random.default_rng([self.case.seed, 6, self.made])
        self.made += 1
        value = random.integers(-8, 9, size=self.case.shapes[n]) / 4
        with self.strategy.scope():
            return mpidist.Variable(numpy.asarray(value).astype(self.case.dtypes[n]), name=f"v{n}_{self.made}")

    def _new_optimizer(self, which: int) -> Any:
        family = self.case.families[which]
        with self.strategy.scope():
            rate = SCHEDULES[self.case.schedule](RATES[family])
            made = MAKERS[family](rate, **self.case.options[which])
            made.exclude_from_weight_decay(var_names=["v1"])
            return made

    def step(self, random: Any) -> None:
        """Make a step with some of an optimizer's variables, in some order."""
        which, numbers, gradients = self._drawn(random)
        pairs = [(gradient, self.variables[n]) for n, gradient in zip(numbers, gradients, strict=True)]
        self.strategy.run(self.optimizers[which].apply_gradients, args=(pairs,))

    def _drawn(self, random: Any) -> tuple[int, list[int], list[Any]]:
        """Return an optimizer, some of its variables, and this rank's gradients of these, None where there is none."""
        which = int(random.integers(2))
        own = [n for n, owner in enumerate(self.case.owners) if owner == which]
        if random.random() < 0.3:
            random.shuffle(own)
        absent = {n for n in own[1:] if random.random() < 0.2}
        return which, own, [None if n in absent else self._gradient(n, random) for n in own]

    def _gradient(self, n: int, random: Any) -> Any:
        shape = self.case.shapes[n]
        parts = random.integers(-8, 9, size=(PARTS, *shape)) / 8
        if random.random() < 0.1:
            parts[int(random.integers(PARTS))] = numpy.inf if self._skips(n) else 0
        mine = numpy.asarray(parts[self.rank :: self.replicas].sum(axis=0)).astype(self.case.dtypes[n])
        if len(shape) == 2 and random.random() < 0.3:
            if random.random() < 0.5:
                return mine.T.copy().T
            rows = numpy.arange(shape[0])[:: 1 + self.case.seed % 2]
            return mpidist.IndexedSlices(mine[rows], rows, shape)
        return mine

    def _skips(self, n: int) -> bool:
        return "skip_nonfinite" in self.case.options[self.case.owners[n]]

    def renew(self, random: Any) -> None:
        """Make a new variable in the place of one."""
        n = int(random.integers(len(self.variables)))
        self.variables[n] = self._new_variable(n)
        self.states.clear()

    def copy(self, random: Any) -> None:
        """Put a copy in the place of a variable."""
        n = int(random.integers(len(self.variables)))
        self.variables[n], self.has_copies = copy.deepcopy(self.variables[n]), True
        self.states.clear()

    def assign(self, random: Any) -> None:
        """Set a variable, of which somebody holds a view."""
        variable = self.variables[int(random.integers(len(self.variables)))]
        view = variable.value
        variable.assign(numpy.full(variable.shape, 0.5, variable.dtype))
        assert numpy.array_equal(view, variable.value)

    def save(self, random: Any) -> None:
        """Keep the state of an optimizer."""
        which, paths = int(random.integers(2)), {id(each): str(n) for n, each in enumerate(self.variables)}
        self.states[which] = copy.deepcopy(self.optimizers[which].state(paths))

    def restore(self, random: Any) -> None:
        """Go back to a state that has been kept."""
        for which, state in sorted(self.states.items()):
            self.optimizers[which].restore(state, {str(n): each for n, each in enumerate(self.variables)})

    def restore_anew(self, random: Any) -> None:
        """Go on from a state with an optimizer that has met no variables; it finds them by path, as in a checkpoint."""
        if self.made > len(self.variables) or self.has_copies:
            return
        for which, state in sorted(self.states.items()):
            self.optimizers[which] = self._new_optimizer(which)
            self.optimizers[which].restore(state, {str(n): each for n, each in enumerate(self.variables)})

    def found(self) -> Iterator[tuple[str, Any]]:
        """Yield what has to be alike, by name."""
        for n, variable in enumerate(self.variables):
            yield f"variable {n}", variable.numpy()
            for name, slot in sorted(self.optimizers[self.case.owners[n]].slots(variable).items()):
                yield f"{name} of variable {n}", numpy.array(slot)
        for which, optimizer in enumerate(self.optimizers):
            yield f"steps of optimizer {which}", numpy.array([optimizer.iterations, optimizer.skipped_steps])


class PlainPlayer(Player):
    """A play without saves on one rank, by `Rule.update` alone: variable by variable, on whole arrays of its own."""

    def __init__(self, case: Play) -> None:
        super().__init__(case)
        self.rules, self.skipped = [rule_of(each) for each in self.optimizers], [0, 0]
        self.arrays = [each.numpy().reshape(-1).copy() for each in self.variables]
        self.kept = [self._new_slots(n) for n in range(len(self.variables))]

    def _new_slots(self, n: int) -> list[Any]:
        rule, array = self.rules[self.case.owners[n]], self.arrays[n]
        return [numpy.full_like(array, rule.initial_slots().get(name, 0.0)) for name in rule.slot_names]

    def step(self, random: Any) -> None:
        which, numbers, gradients = self._drawn(random)
        rule, options = self.rules[which], self.case.options[which]
        dense = {n: _dense(each) for n, each in zip(numbers, gradients, strict=True) if each is not None}
        if "skip_nonfinite" in options and not all(numpy.isfinite(each).all() for each in dense.values()):
            self.skipped[which] += 1
            return
        rate, factor = rule.learning_rate, 1 / options.get("loss_scale_factor", 1.0)
        coefficients = rule.coefficients(rate, rule.iterations)
        for n, gradient in dense.items():
            step = rule.step_of(self.variables[n], rate, coefficients, factor)
            rule.update(self.arrays[n], gradient, self.kept[n], step)
        rule.iterations += 1

    def renew(self, random: Any) -> None:
        n = int(random.integers(len(self.variables)))
        self.variables[n] = self._new_variable(n)
        self.arrays[n] = self.variables[n].numpy().reshape(-1).copy()
        self.kept[n] = self._new_slots(n)

    def copy(self, random: Any) -> None:
        n = int(random.integers(len(self.variables)))
        self.variables[n], self.kept[n] = copy.deepcopy(self.variables[n]), self._new_slots(n)

    def assign(self, random: Any) -> None:
        self.arrays[int(random.integers(len(self.variables)))][...] = 0.5

    def found(self) -> Iterator[tuple[str, Any]]:
        for n, array in enumerate(self.arrays):
            shape, names = self.case.shapes[n], self.rules[self.case.owners[n]].slot_names
            yield f"variable {n}", array.reshape(shape)
            for name, slot in sorted(zip(names, self.kept[n], strict=True)):
                yield f"{name} of variable {n}", slot.reshape(shape)
        for which, rule in enumerate(self.rules):
            yield f"steps of optimizer {which}", numpy.array([rule.iterations, self.skipped[which]])


def _dense(gradient: Any) -> Any:
    """Return a gradient as a flat array of all elements."""
    if not isinstance(gradient, mpidist.IndexedSlices):
        return numpy.ascontiguousarray(gradient).reshape(-1)
    whole = numpy.zeros(gradient.dense_shape, gradient.values.dtype)
    numpy.add.at(whole, gradient.indices, gradient.values)
    return whole.reshape(-1)


def plain(case: Play) -> Play:
    """Return a play of which `PlainPlayer` knows all: whole gradients are not looked at, and nothing is saved."""
    options = [{key: each[key] for key in each if key not in ("clipnorm", "global_clipnorm")} for each in case.options]
    dtypes = tuple("float32" if each == "float16" else each for each in case.dtypes)
    actions = tuple((verb, seed) for verb, seed in case.actions if not verb.startswith(("save", "restore")))
    return replace(case, options=(options[0], options[1]), dtypes=dtypes, actions=actions)


def play(case: Play, kind: type[Player] = Player) -> dict[str, Any]:
    """Play on this rank, and return what came of it.  Collective: every rank calls it in the same order."""
    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.filterwarnings("ignore", "gradients are None")
        player = kind(case)
        for verb, seed in case.actions:
            getattr(player, verb.replace(" ", "_"))(numpy.random.default_rng([case.seed, 7, seed]))
        return dict(player.found())
