import sys

from benchmarks.pairs.command import main

sys.exit(main(sys.argv[1:]))
