"""The ``mpidist`` command: one file a subcommand, listed in `main.COMMANDS`."""
