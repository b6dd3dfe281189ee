# The tasks of tiered_index. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# number of pytest workers for two cores: a third of the time, tests wait for processes that they start
WORKERS ?= 4
PYTEST_ARGS ?=
# Tests start many processes. If the environment forbids compiled files, each process would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup compiled ready demo test test-long test-all test-cluster test-readme test-lowest test-native test-s3 test-brokers lint docs bench dist clean

help: ## list the tasks
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# The virtualenv is made once. Each stamp names the extras in it, and is renewed when pyproject.toml or the lock changes. It
# is set if its set-up has succeeded, so that what needs it can be loaded.
$(VENV)/.stamp-python: deploy/make-venv.sh
	@bash deploy/make-venv.sh $(VENV)
	@touch $@

# the sources from which pip builds the package
SOURCES := pyproject.toml requirements.lock setup.py deploy/install.sh deploy/locked.py $(wildcard tiered_index/base/*.pyx tiered_index/base/*.pxd tiered_index/base/*.h)
# prints one line if the compiled core could not be built
CORE := $(BIN)/python -c 'from tiered_index.base import kernels; kernels.compiled() or print("no C compiler: NumPy does the work of the compiled core, more slowly")'

$(VENV)/.stamp-demo: $(VENV)/.stamp-python $(SOURCES)
	@echo "installing tiered_index with the extra 'demo': 75 packages of requirements.lock, and a compiled core; once, 1 to 4 minutes"
	@bash deploy/install.sh $(VENV) demo -e
	@$(CORE)
	@$(BIN)/python -c 'import tests.demo.command'
	@touch $@

# Only development needs Spark, its Java and a browser: the demo installs none. Java and browser come while pip runs, and all
# cores compile.
$(VENV)/.stamp-test: $(VENV)/.stamp-python $(SOURCES) deploy/find-java.sh deploy/find-chromium.sh
	@echo "installing tiered_index with the extras 'bench', 'client', 'demo', 'fast', 'kafka', 'server', 'spark' and 'test': 140 packages of requirements.lock, and a compiled core; once, some minutes"
	@{ bash deploy/find-java.sh && bash deploy/find-chromium.sh; } & found=$$!; \
	bash deploy/install.sh $(VENV) bench,client,demo,fast,kafka,server,spark,test -e --no-compile \
		|| { wait $$found; exit 1; }; \
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; \
	wait $$found
	@$(CORE)
	@touch $@ $(VENV)/.stamp-demo $(VENV)/.stamp-kafka $(VENV)/.stamp-serve

setup: $(VENV)/.stamp-test ## make the virtualenv with all packages for development

# `make demo` is the main job. DEMO=kafka: follow topics of a mock Kafka cluster, kill the follower, find records by key, header
# and JSON field. DEMO=serve: serve two million messages that a broker writes, by console, HTTP and RocketMQ's protocol.
DEMO ?= demo
# options of the demo, for example --messages 20000
DEMO_ARGS ?=

demo: $(VENV)/.stamp-$(DEMO) ## run the main job on millions of messages, with two crashes, and check every answer (DEMO=kafka, DEMO=serve)
	@$(BIN)/python -m tests.demo$(if $(filter kafka,$(DEMO)),.kafka) $(if $(filter serve,$(DEMO)),--serve) $(DEMO_ARGS)

$(VENV)/.stamp-serve: $(VENV)/.stamp-demo $(SOURCES)
	@echo "installing tiered_index with the extra 'server' (versions from requirements.lock); once, 1 to 2 minutes"
	@bash deploy/install.sh $(VENV) client,demo,server -e
	@$(BIN)/python -c 'import tests.demo.command, tiered_index.client, tiered_index.server.app'
	@touch $@

$(VENV)/.stamp-kafka: $(VENV)/.stamp-demo $(SOURCES)
	@echo "installing tiered_index with the extra 'kafka' (versions from requirements.lock); once, 1 to 2 minutes"
	@bash deploy/install.sh $(VENV) demo,kafka -e
	@$(BIN)/python -c 'import tests.demo.kafka'
	@touch $@

lint: $(VENV)/.stamp-test ## check style, formatting, prose and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/proselint check *.md docs/*.md docs/decisions/*.md deploy/*.md tiered_index/format/SPEC.md
	@$(BIN)/mypy

$(VENV)/.stamp-docs: $(VENV)/.stamp-test
	@echo "installing tiered_index with the extra 'docs'; once, some minutes"
	@bash deploy/install.sh $(VENV) docs -e
	@touch $@

# a dead link fails; pages load nothing from another host; the program itself makes the lists of commands, settings, HTTP and metrics
build/site/index.html: $(VENV)/.stamp-docs $(wildcard docs/*.md docs/decisions/*.md docs/images/* docs/site/* docs/site/assets/* deploy/*.md *.md) $(shell find tiered_index docs/examples docs/generators -name '*.py' -o -name '*.md')
	@$(BIN)/python -m docs.generators.reference build/reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -f docs/site/mkdocs.yml

docs: build/site/index.html ## build the site in build/site, and check it in a browser, desktop and phone
	@bash deploy/find-chromium.sh
	@$(BIN)/python docs/site/check.py build/site

# The lint leaves a core idle, which makes Java's archive of Spark's classes. If Java makes none, tests run without it.
$(VENV)/spark-classes.jsa: $(VENV)/.stamp-test
	@echo "writing Java's archive of Spark's classes for tests (once)"
	@timeout 300 $(BIN)/python -W ignore -m tests.support.spark_java >/dev/null 2>&1 || echo "no archive: each Java of tests loads its classes again"

# Once per clone: otherwise each worker of pytest would compile all tests.
compiled: $(VENV)/.stamp-test
	@test -d tests/unit/__pycache__ || $(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true

ready: $(VENV)/.stamp-test
	@$(MAKE) --no-print-directory -j 3 lint $(VENV)/spark-classes.jsa compiled

# The tests make tens of thousands of files, which takes minutes on a disk. `make test-long` and `make test-all` use the disk.
ROOM = $(shell if [ -w /dev/shm ] && [ "$$(df -k --output=avail /dev/shm | tail -1)" -gt 2097152 ]; then echo /dev/shm; fi)

test: export PYTEST_DEBUG_TEMPROOT = $(ROOM)
test: ready ## run every quality gate: lint, types, layering, unit, golden, property, fault and integration tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long and not real_s3 and not brokers" --durations=15 $(PYTEST_ARGS)

test-long: $(VENV)/.stamp-test ## run the tests that `make test` leaves out: whole programs, the console's pages, further backends and faults
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "long and not brokers" --durations=15 $(PYTEST_ARGS)

test-readme: $(VENV)/.stamp-python ## run the commands of the README in a clone, each in a virtualenv with only its own extras
	@$(BIN)/python -m tests.support.fresh_clone $(CLONE_ARGS)

# for example kafka
CLONE_ARGS ?=

# a separate virtualenv, whose workers of Spark load the package from here
LOWEST := $(VENV)-lowest

$(LOWEST)/.stamp: $(SOURCES) tests/support/lowest.py deploy/make-venv.sh deploy/find-java.sh
	@bash deploy/find-java.sh
	@bash deploy/make-venv.sh $(LOWEST)
	@$(LOWEST)/bin/python -m tests.support.lowest > $(LOWEST)/constraints.txt
	@echo "installing packages in $(LOWEST); once, some minutes"
	@$(LOWEST)/bin/python -m pip install -q --disable-pip-version-check --no-compile -c $(LOWEST)/constraints.txt '.[fast,server,spark]' pytest pytest-xdist hypothesis httpx cryptography duckdb 'moto[server]'
	@touch $@

# PySpark 4.0 refuses streams into an index: their tests expect that
test-lowest: $(LOWEST)/.stamp ## test codecs, golden files, the service and Spark on the lowest versions of dependencies that pyproject.toml declares
	@$(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" -W ignore::DeprecationWarning tests/unit/format tests/golden \
		tests/server/test_connections.py tests/server/test_health.py $(PYTEST_ARGS)
	@$(LOWEST)/bin/python -c "import tiered_index.storage.s3.boto"
	@for command in ingest query files merge; do $(LOWEST)/bin/python -m tiered_index $$command --help > /dev/null; done
	@PYTHONPATH=$(CURDIR) $(LOWEST)/bin/python -m pytest -m "not slow and not long" -n 2 --dist loadfile -W ignore::DeprecationWarning tests/spark --durations=5 $(PYTEST_ARGS)

test-cluster: $(VENV)/.stamp-test ## run Spark jobs on executors that fail, are killed and speculate, and the data sources over Spark Connect
	@$(BIN)/python -m pytest tests/spark/test_local_cluster.py tests/spark/test_shipping.py tests/spark/test_streaming_example.py::test_a_query_that_is_killed_while_it_is_looked_up_in \
		tests/spark/test_session.py::test_the_data_sources_work_over_spark_connect --durations=5 $(PYTEST_ARGS)

test-native: $(VENV)/.stamp-test ## run the compiled core under AddressSanitizer and UndefinedBehaviourSanitizer (needs gcc)
	@$(BIN)/python -m tests.support.native $(NATIVE_ARGS)

# for example --mutations --all
NATIVE_ARGS ?=

test-all: ready ## run `make test` and `make test-long`, the slow soaks, more examples of Hypothesis, and the mutants
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not real_s3 and not brokers" --durations=30 $(PYTEST_ARGS)
	@$(BIN)/python -m pytest -q -n $(WORKERS) -p no:cacheprovider tests/mutants/red.py

test-s3: $(VENV)/.stamp-test ## run tests against a real S3 server, started for them (or $TIERED_INDEX_TEST_S3_ENDPOINT)
	@$(BIN)/python -m tests.real_s3.server run -- $(BIN)/python -m pytest -m real_s3 tests/real_s3 --durations=15 $(PYTEST_ARGS)

# Maven fetches jars once, into build/brokers, and pip the PySparks of Spark's connectors. Kafka's tests are one worker's,
# RocketMQ's another's. Redis is Debian's package.
test-brokers: $(VENV)/.stamp-test ## run tests on real brokers of Kafka and RocketMQ and on Redis, started for them, and of Spark's connectors (needs Maven and Java)
	@bash tests/brokers/find-redis.sh
	@missing=$$($(BIN)/python -m tests.brokers.jars); \
	if [ -n "$$missing" ]; then \
		echo "test-brokers: no test was run: $$missing" >&2; \
		[ -z "$${TIERED_INDEX_TEST_REQUIRE_BROKERS:-}" ]; exit; \
	fi; \
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m brokers tests/brokers --durations=15 $(PYTEST_ARGS)

# Only these suites need the packages of other stores.
$(VENV)/.stamp-peers: $(VENV)/.stamp-test
	@echo "installing tiered_index with the extra 'peers'; once, some minutes"
	@bash deploy/install.sh $(VENV) peers -e
	@touch $@

$(VENV)/.stamp-cold: $(VENV)/.stamp-test tests/benchmarks/cold_peers/requirements.txt
	@echo "installing the stores that SUITE=cold compares with; once, some minutes"
	@$(BIN)/python deploy/locked.py pins > $(VENV)/pins.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/pins.txt -r tests/benchmarks/cold_peers/requirements.txt
	@touch $@

# `make bench SUITE=help` lists the suites
SUITE ?= quick
# options of the suite, for example --entries 1000000
BENCH_ARGS ?=

bench: $(VENV)/.stamp-test $(patsubst %,$(VENV)/.stamp-%,$(filter peers cold,$(SUITE))) ## measure SUITE=quick, machine, ranges, s3, spark, billion, service, files, peers, cold or another one (BENCH_ARGS: its options)
	@$(BIN)/python -m tests.benchmarks $(SUITE) $(BENCH_ARGS)

dist: $(VENV)/.stamp-python ## make the source distribution, the wheel that is built from it, and the site as an archive, in dist/
	@rm -rf build dist
	@$(BIN)/python -m pip install -q --disable-pip-version-check build
	@$(BIN)/python -m build . >build-dist.log 2>&1 || { cat build-dist.log; exit 1; }
	@rm -f build-dist.log
	@$(MAKE) --no-print-directory docs
	@tar -czf dist/tiered_index-site.tar.gz -C build site
	@ls dist/*

clean: ## remove the virtualenv and every cache
	@rm -rf $(VENV) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info tiered_index/base/_*.c tiered_index/base/_*.so
