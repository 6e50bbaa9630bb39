"""Print why CUDA cannot be emulated here; nothing where it can."""

from tests.gpu import emulated

print(emulated.missing(), end="")
