"""`SessionRunHook` and `CheckpointSaverListener`: what users have called around steps and around saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpidist import nest
from mpidist.errors import quoted
from mpidist.variables import DistributedVariable


class Session:
    """What hooks may ask of a training or an evaluation under way.  All methods are Local.

    Attributes
    ----------
    global_step : int
        Training steps made by now.
    loss : float or None
        The mean loss of the last step over the rows of all replicas; in an evaluation, of this rank's rows.
    """

    def __init__(self, global_step: int = 0) -> None:
        self.global_step = global_step
        self.loss: float | None = None

    def run(self, fetches: Any) -> Any:
        """Return what is asked for, in the same structure.

        Parameters
        ----------
        fetches : "loss", "global_step" or Variable, or nested lists, tuples and dicts of these
            Of a variable, a copy of its value.

        Raises
        ------
        ValueError
            There is nothing of that name.
        """
        return nest.pack(fetches, [self._fetched(each) for each in nest.flatten(fetches)])

    def _fetched(self, fetch: Any) -> Any:
        if isinstance(fetch, DistributedVariable):
            return fetch.value.copy()
        if fetch not in ("loss", "global_step"):
            raise ValueError(f"a session has 'loss', 'global_step' and the values of variables, got {fetch!r}")
        return getattr(self, fetch)


class SessionRunArgs(NamedTuple):
    """What a hook asks for before a step.

    Parameters
    ----------
    fetches : as for `Session.run`
    """

    fetches: Any


class SessionRunValues(NamedTuple):
    """What a hook gets after a step.

    Attributes
    ----------
    results : Any
        What it has asked for; None if nothing.
    """

    results: Any


class SessionRunContext:
    """A step, as a hook sees it.  All methods are Local.

    Attributes
    ----------
    session : Session
    original_args : SessionRunArgs or None
        What the hook has asked for.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.original_args: SessionRunArgs | None = None
        self._stop_requested = False

    @property
    def stop_requested(self) -> bool:
        """Whether an end was asked for."""
        return self._stop_requested

    def request_stop(self) -> None:
        """Ask for the end after this step.  One rank that asks ends the loop on all ranks, after the same step."""
        self._stop_requested = True


class SessionRunHook:
    """Base of the hooks.  Methods that a subclass leaves out do nothing.

    All methods are Local, unless a subclass calls a collective: then it must do so on all ranks.  Hooks run on every
    rank, outside of replicas.
    """

    def begin(self) -> None:
        """Take note that a loop is about to begin: the model is built, and not restored."""

    def after_create(self, session: Session) -> None:
        """Take note that the model is built, and restored if there was a checkpoint."""

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Do the same; TensorFlow's name, with an argument that is None here.  Calls `after_create`."""
        self.after_create(session)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Return what `after_run` is to get of the step that begins now."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Look at the step that has just been made."""

    def end(self, session: Session) -> None:
        """Take note that the loop has ended, without an exception."""


class StopAtStepHook(SessionRunHook):
    """Ends a training after a number of steps.

    Parameters
    ----------
    num_steps : int, optional
        Steps from the beginning of the loop.
    last_step : int, optional
        The global step to end at.

    Raises
    ------
    ValueError
        Both are given, or none.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(f"give num_steps or last_step, one of them; got {num_steps} and {last_step}")
        self._num_steps, self._last_step = num_steps, last_step

    def after_create(self, session: Session) -> None:
        """Work out the last step."""
        if self._num_steps is not None:
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ask for the end at the last step."""
        assert self._last_step is not None
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()


class CheckpointSaverListener:
    """Base of what is called around saves, on every rank.

    All methods are Local, unless a subclass calls a collective: then it must do so on all ranks.  Of workers that train
    by themselves (parameter servers), saves are the first one's.
    """

    def begin(self) -> None:
        """Take note that a training is about to begin."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Take note that a checkpoint is about to be saved."""

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Look at a checkpoint that has been saved; True asks for the end of the training."""
        return None

    def end(self, session: Session, global_step_value: int) -> None:
        """Take note that the training has ended, after the last save."""


class Hooks:
    """The hooks of one loop, called in their order."""

    def __init__(self, hooks: Sequence[SessionRunHook], session: Session) -> None:
        self._hooks = hooks
        self.session = session
        self._contexts: list[SessionRunContext] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def begin(self) -> None:
        """Call `begin` of each."""
        for hook in self._hooks:
            hook.begin()

    def created(self) -> None:
        """Call `after_create_session` of each."""
        for hook in self._hooks:
            hook.after_create_session(self.session, None)

    def before(self) -> None:
        """Call `before_run` of each."""
        self._contexts = [SessionRunContext(self.session) for _ in self._hooks]
        for hook, context in zip(self._hooks, self._contexts, strict=True):
            args = hook.before_run(context)
            if args is not None and not isinstance(args, SessionRunArgs):
                raise TypeError(
                    f"before_run of {type(hook).__name__} must return a SessionRunArgs or None, got {args!r}"
                )
            context.original_args = args

    def after(self) -> bool:
        """Call `after_run` of each; return whether one asks for the end."""
        for hook, context in zip(self._hooks, self._contexts, strict=True):
            args = context.original_args
            hook.after_run(context, SessionRunValues(None if args is None else self.session.run(args.fetches)))
        return any(context.stop_requested for context in self._contexts)

    def end(self) -> None:
        """Call `end` of each."""
        for hook in self._hooks:
            hook.end(self.session)


def checked_hooks(hooks: Iterable[SessionRunHook] | None) -> list[SessionRunHook]:
    """Return hooks as a list; TypeError if one is none.  Local."""
    return _checked("Hooks must be a SessionRunHook", hooks, SessionRunHook)


def checked_listeners(listeners: Iterable[CheckpointSaverListener] | None) -> list[CheckpointSaverListener]:
    """Return listeners as a list; TypeError if one is none.  Local."""
    return _checked("saving_listeners must be a list of CheckpointSaverListener", listeners, CheckpointSaverListener)


def _checked(what: str, given: Iterable[Any] | None, kind: type) -> list[Any]:
    try:
        items = list(given or ())
    except TypeError:
        raise TypeError(f"{what}, in a list; got {type(given).__name__}") from None
    for each in items:
        if not isinstance(each, kind):
            raise TypeError(f"{what}, given: {quoted(each)}")
    return items
