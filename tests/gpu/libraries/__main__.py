"""Print why these checks cannot run here; nothing where they can."""

from tests.gpu import libraries

print(libraries.missing(), end="")
