"""``python -m benchmarks``: a case of the suite, or pairs of checkouts."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["pairs"]:
        from benchmarks.pairs.command import main

        sys.exit(main(sys.argv[2:]))
    from benchmarks.suite.command import main

    sys.exit(main(sys.argv[1:]))
