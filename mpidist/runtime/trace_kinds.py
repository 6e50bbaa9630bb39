"""Kinds of events of a trace, by number; names of calls follow."""

KINDS = ("step", "call", "arrive", "pack", "reduce", "send", "unpack", "apply", "trace")
STEP, CALL, ARRIVE, PACK, REDUCE, SEND, UNPACK, APPLY, TRACE = range(len(KINDS))

#: Numbers of an event: kind, begin and end in nanoseconds, number of the collective call, part of the call.
FIELDS = 5
