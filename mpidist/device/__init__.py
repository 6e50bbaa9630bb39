"""GPUs as CuPy shows them: which one this rank has, and which ranks have the same."""
