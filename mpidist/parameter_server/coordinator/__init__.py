"""A chief that schedules functions on workers: the coordinator style of `ParameterServerStrategy`."""
