PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
# Only where torch brings none (CPU builds): the kernels then run in Triton's interpreter.
TRITON := 3.6.0

.PHONY: venv demo demo-distillation smoke affected test test-all record golden test-gpu test-oldest test-newest test-verl \
	test-skyrl test-axolotl test-hosts check docs site matrix combinations families peft benchmarks benchmarks-page benchmarks-age \
	contact-sheet format wheel test-wheel release-check publish clean

venv: $(VENV)/.installed

# torch first and alone: DeepSpeed's build looks for it, and a later resolver must not exchange it.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools wheel ninja
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) triton==$(TRITON)
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	$(PIP) --editable ".[dev]"
	touch $@

demo: venv
	$(BIN)/python launch/demo/python_sources.py runs/demo/python.jsonl
	rm -rf runs/demo/tokenizer
	$(BIN)/liger-dist tokenizer runs/demo/tokenizer runs/demo/python.jsonl --vocab_size 384
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m liger_dist_train launch/demo/demo.yaml --overwrite true
	rm -rf runs/demo/exported
	$(BIN)/liger-dist export runs/demo
	$(BIN)/liger-dist generate runs/demo/exported "    def " --temperature 0.7

# Two students of 4 layers: from the text alone, and from the model of make demo.
STUDENT := -m torch.distributed.run --standalone --nproc-per-node 2 -m liger_dist_train launch/demo/demo.yaml --overwrite true \
	--seed 1 --steps 100 --eval_every 10 --checkpoint_every 0
demo-distillation: venv
	test -d runs/demo/exported || $(MAKE) demo
	$(BIN)/python $(STUDENT) --output_dir runs/from_text
	$(BIN)/python $(STUDENT) --output_dir runs/from_teacher --teacher runs/demo/exported
	$(BIN)/python launch/demo/compare_runs.py runs/distillation.png runs/from_text runs/from_teacher

# Apart from the rest: transformers imports torchao wherever it is installed, which prints warnings.
$(VENV)/.torchao: $(VENV)/.installed
	$(PIP) --editable ".[torchao]"
	touch $@

# verl and OpenRLHF without their requirements, which are older releases than this project's.
$(VENV)/.engines: $(VENV)/.installed
	$(PIP) ray tensordict hydra-core codetiming dill pylatexenc torchdata cachetools fastapi uvicorn
	$(PIP) --no-deps verl "openrlhf; python_version == '3.11'"
	touch $@

# A file's processes and runs are shared by its tests; conftest.py puts the longest files first.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Pairs of everything the conformance suite combines, and one case of each feature: no host frameworks.
smoke: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m smoke

# Tests of what differs from the last commit, or from the one that SINCE names: make affected SINCE=main
SINCE ?= HEAD
affected: $(VENV)/.torchao $(VENV)/.engines
	mkdir -p build
	$(BIN)/python tests_multi_gpu/affected.py choose $(SINCE) > build/affected.txt
	test ! -s build/affected.txt || $(BIN)/python -m pytest $(PARALLEL) --tests-from build/affected.txt tests_multi_gpu

test: $(VENV)/.torchao $(VENV)/.engines
	$(BIN)/python -m pytest $(PARALLEL) -m "not nightly"

# With the tests that take minutes each (links between hosts that are cut, 200,000 documents) and all combinations.
test-all: $(VENV)/.torchao $(VENV)/.engines
	$(BIN)/python -m pytest $(PARALLEL)

# make test, which notes the lines that each test runs; then writes tests_multi_gpu/affected.json.
record: $(VENV)/.torchao $(VENV)/.engines
	rm -rf build/recording && mkdir -p build/recording
	LIGER_DIST_RECORD=$(CURDIR)/build/recording $(BIN)/python -m pytest $(PARALLEL) -m "not nightly" || true
	$(BIN)/python tests_multi_gpu/affected.py read build/recording

# Writes the losses that tests_multi_gpu/conformance/test_golden.py expects; the commit says why they have moved.
golden: $(VENV)/.installed
	$(BIN)/python tests_multi_gpu/golden.py --write

# On GPUs, by an interpreter that has torch and what the tests need: make test-gpu GPU_PYTHON=python3. Every part takes
# less than ten minutes and can be run alone, such as make test-gpu-losses. The last two need two GPUs.
GPU_PYTHON ?= $(BIN)/python
GPU_WORKERS ?= 10
GPU_PARTS := kernels losses fused_layers fused_head conformance sharding

test-gpu: $(GPU_PARTS:%=test-gpu-%)
test-gpu-%:
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/launch:$$PYTHONPATH $(GPU_PYTHON) -m pytest \
		--numprocesses $(GPU_WORKERS) --dist worksteal -m "not nightly" tests_multi_gpu/$*

# The oldest releases that setup.cfg allows (see docs/versions.md), in an environment of their own. torch comes with CUDA
# there; PIP_CONSTRAINT of the caller does not count.
OLDEST ?= .venv-oldest
OLDEST_PIP := PIP_CONSTRAINT=/dev/null DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check
OLDEST_RELEASES := transformers==5.0.0 peft==0.21.0 accelerate==1.15.0 trl==1.16.0
# torch's state dict of FSDP1 ends in a segmentation fault under Trainer.save_model there, on CPUs.
OLDEST_CRASHES := trains_and_evaluates_as_before and fsdp1
OLDEST_TESTS := repository/test_canary fused_layers/test_layers kernels/test_layer_kernels \
	fused_layers/test_lora_layers conformance/test_families \
	fused_layers/test_attention fused_head/test_wrap fused_head/test_calls integrations/test_peft \
	losses/test_vocab_parallel_loss integrations/test_trl integrations/test_trainer

$(OLDEST)/.installed: setup.cfg Makefile
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) torch==2.11.0 setuptools wheel ninja
	$(OLDEST_PIP) --no-build-isolation deepspeed==0.18.0
	$(OLDEST_PIP) $(OLDEST_RELEASES) --editable ".[train]" liger-kernel==0.8.5 pytest pytest-timeout pytest-xdist
	touch $@

test-oldest: $(OLDEST)/.installed test-verl
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not nightly" -k "not ($(OLDEST_CRASHES))" $(OLDEST_TESTS:%=tests_multi_gpu/%.py)

# make smoke with the newest releases that setup.cfg allows, in an environment that is made anew each time. The extra dev
# pins liger-kernel and trl. PIP_CONSTRAINT of the caller does not count.
NEWEST ?= .venv-newest

test-newest:
	rm -rf $(NEWEST)
	PIP_CONSTRAINT=/dev/null $(MAKE) smoke VENV=$(NEWEST) CONSTRAINTS=/dev/null

# The releases of transformers that verl allows, first and last.
VERL ?= .venv-verl
VERL_PIP := PIP_CONSTRAINT=/dev/null DS_BUILD_OPS=0 $(VERL)/bin/python -m pip install --quiet --disable-pip-version-check
VERL_TRANSFORMERS := 5.5.4 5.10.2
VERL_TESTS := integrations/test_verl conformance/test_conformance fused_layers/test_layers fused_head/test_wrap

$(VERL)/.installed: setup.cfg Makefile
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL_PIP) torch==2.11.0 setuptools wheel ninja
	$(VERL_PIP) --no-build-isolation deepspeed==0.19.8
	$(VERL_PIP) --editable ".[train]" "transformers<5.11" liger-kernel==0.8.5 pytest pytest-timeout pytest-xdist torchvision==0.26.0
	$(VERL_PIP) ray==2.60.0 tensordict==0.10.0 hydra-core codetiming dill
	$(VERL_PIP) --no-deps verl==0.9.1
	touch $@

test-verl: $(VERL)/.installed
	for release in $(VERL_TRANSFORMERS); do \
		$(VERL_PIP) transformers==$$release && \
		$(VERL)/bin/python -m pytest $(PARALLEL) -m "not nightly" $(VERL_TESTS:%=tests_multi_gpu/%.py) || exit 1; \
	done

# SkyRL and Axolotl need Python 3.12 or newer: make test-skyrl PYTHON312=/path/to/python3.12
PYTHON312 ?= $(shell for python in python3.12 python3.13 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[234].*/bin/python); \
	do $$python -c "" 2>/dev/null && echo $$python && break; done)
NO_PYTHON312 := no Python 3.12 or newer was found, so SkyRL and Axolotl were not tested; give one by PYTHON312=/path

SKYRL ?= .venv-skyrl
SKYRL_PIP := PIP_CONSTRAINT=/dev/null $(SKYRL)/bin/python -m pip install --quiet --disable-pip-version-check
SKYRL_RELEASES := 0.3.0 0.4.0

$(SKYRL)/.installed: setup.cfg Makefile
	test -n "$(PYTHON312)" || { echo "$(NO_PYTHON312)"; exit 1; }
	test -x $(SKYRL)/bin/python || $(PYTHON312) -m venv $(SKYRL)
	$(SKYRL_PIP) torch==2.13.0 setuptools wheel
	$(SKYRL)/bin/python -c "import triton" 2>/dev/null || $(SKYRL_PIP) triton==$(TRITON)
	$(SKYRL_PIP) transformers==5.16.1 accelerate peft==0.18.1 ray==2.57.0 tensordict hydra-core loguru jaxtyping polars \
		func_timeout aiohttp fastapi uvicorn datasets matplotlib tensorboard torchdata pillow orjson pybase64 cloudpathlib \
		zstandard pytest pytest-timeout pytest-xdist
	$(SKYRL_PIP) --no-deps skyrl-gym==0.4.0 --editable .
	touch $@

test-skyrl: $(SKYRL)/.installed
	for release in $(SKYRL_RELEASES); do \
		$(SKYRL_PIP) --no-deps skyrl==$$release && \
		$(SKYRL)/bin/python -m pytest tests_multi_gpu/integrations/test_skyrl.py || exit 1; \
	done

# Axolotl without the requirements that its tested trainers do not import. torch comes with CUDA there.
AXOLOTL ?= .venv-axolotl
AXOLOTL_PIP := PIP_CONSTRAINT=/dev/null $(AXOLOTL)/bin/python -m pip install --quiet --disable-pip-version-check

$(AXOLOTL)/.installed: setup.cfg Makefile
	test -n "$(PYTHON312)" || { echo "$(NO_PYTHON312)"; exit 1; }
	test -x $(AXOLOTL)/bin/python || $(PYTHON312) -m venv $(AXOLOTL)
	$(AXOLOTL_PIP) torch==2.13.0 torchvision==0.28.0 setuptools wheel
	$(AXOLOTL)/bin/python -c "import triton" 2>/dev/null || $(AXOLOTL_PIP) triton==$(TRITON)
	$(AXOLOTL_PIP) torch==2.13.0 transformers==5.20.1 accelerate==1.15.0 peft==0.21.2 trl==1.14.1 datasets==5.0.1 \
		kernels==0.17.2 liger-kernel==0.8.4 torchao==0.18.0 bitsandbytes==0.50.2 optimum==1.16.2 pydantic==2.13.5 \
		addict art colorama einops evaluate fastcore fire mistral-common numba nvidia-ml-py posthog python-dotenv \
		schedulefree scipy sentencepiece tensorboard typer wandb axolotl-contribs-lgpl axolotl-contribs-mit \
		pytest pytest-timeout pytest-xdist
	$(AXOLOTL_PIP) --no-deps axolotl==0.21.0 --editable .
	touch $@

test-axolotl: $(AXOLOTL)/.installed
	$(AXOLOTL)/bin/python -m pytest --override-ini timeout=600 tests_multi_gpu/integrations/test_axolotl.py

# Integrations whose hosts make test does not install.
test-hosts: test-verl
	test -z "$(PYTHON312)" || $(MAKE) test-skyrl test-axolotl
	test -n "$(PYTHON312)" || echo "$(NO_PYTHON312)"

docs: venv
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

# The pages of main, and those of each release in a folder with the name of its tag.
site: docs
	for tag in $$(git tag --list "v*"); do \
		git worktree add --force build/$$tag $$tag && \
		$(BIN)/python -m sphinx -q -b html build/$$tag/docs build/docs/$$tag && \
		git worktree remove --force build/$$tag || exit 1; \
	done

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

matrix: venv
	$(BIN)/python -m pytest tests_multi_gpu/conformance/test_conformance.py --write-pages

combinations: venv
	$(BIN)/python -m pytest tests_multi_gpu/repository/test_combinations.py --write-pages

peft: venv
	$(BIN)/python -m pytest tests_multi_gpu/conformance/test_peft_methods.py --write-pages

templates: venv
	$(BIN)/python -m pytest tests_multi_gpu/program/test_chat_templates.py --write-pages

families: venv
	$(BIN)/python -m pytest tests_multi_gpu/conformance/test_families.py tests_multi_gpu/conformance/test_packed_families.py --write-pages

# On a GPU, with the peers that are to be compared installed: pip install --editable ".[benchmarks]"
benchmarks:
	$(PYTHON) -m benchmarks.linear_cross_entropy
	$(PYTHON) -m benchmarks.linear_cross_entropy --only 4096x128256 --masked 0.75
	$(PYTHON) -m benchmarks.linear_cross_entropy --only 8192x4096 --peaked
	$(PYTHON) -m benchmarks.memory_bound
	$(PYTHON) -m benchmarks.norm_widths
	$(PYTHON) -m benchmarks.vocabularies
	$(PYTHON) -m benchmarks.sequences
	$(PYTHON) -m benchmarks.report

# From benchmarks/results, without a GPU: docs/benchmarks.md, docs/benchmarks/, their pictures and the README's table;
# which tables are older than the code that they measure; and all pictures on one sheet, to look at.
benchmarks-page: venv
	$(BIN)/python -m benchmarks.report

benchmarks-age: venv
	$(BIN)/python -m benchmarks.age

contact-sheet: venv
	$(BIN)/python -m benchmarks.plots

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An environment with the tools of a release alone: neither the wheel nor its checks import torch.
RELEASE := build/release-venv

$(RELEASE)/.installed: Makefile constraints.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build \
		"readme_renderer[md]"
	touch $@

# The wheel is built from the sdist.
wheel: $(RELEASE)/.installed
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist . > build/wheel.log || (cat build/wheel.log; exit 1)

# Installs the wheel into an empty environment, as a user does, and runs the README's quickstart and the training program.
WHEEL := build/wheel-venv
test-wheel: wheel
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[train]"
	$(WHEEL)/bin/python -I tests_multi_gpu/programs/installed_quickstart.py

release-check: wheel
	$(RELEASE)/bin/python tests_multi_gpu/programs/release_check.py "$(VERSION)"

# Puts dist/ and the section of CHANGELOG.md on the page of a tag that is on GitHub. gh reads GH_TOKEN.
publish:
	mkdir -p build
	$(PYTHON) tests_multi_gpu/programs/release_check.py --notes "$(VERSION)" > build/notes.md
	gh release create "v$(VERSION:v%=%)" dist/* --verify-tag --title "liger_dist $(VERSION:v%=%)" --notes-file build/notes.md

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-verl .venv-skyrl .venv-axolotl runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
