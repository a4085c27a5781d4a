# Everything from a fresh clone: `make train`, `make test`. Each target makes what it needs and reuses what is there.
#
#   make train CONFIG=launch/configs/quickstart.toml NPROC=2 ARGS="..."
#   make test ARGS="-k mxfp8"
#
# Needs Python >= 3.11, g++ and make; the network only until everything is installed.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
CONFIG ?= launch/configs/quickstart.toml
NPROC  ?= 2
JOBS   ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$(( n < 8 ? n : 8 )))
ARGS   ?=

RUN := $(VENV)/bin/python
# Without byte code, most of which nobody asks for: what is imported is compiled then.
# Without make's flags, in which ninja would find a jobserver with two jobs to give.
INSTALL := env -u MAKEFLAGS -u MFLAGS $(RUN) -m pip --disable-pip-version-check install --quiet --no-compile
SOURCES := CMakeLists.txt $(shell find csrc -type f)
TOOLS := import tomllib; print("cmake", "ninja", *tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
REQUIREMENTS := import tomllib, torch; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = p["optional-dependencies"]; \
	cuda = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"; \
	print(*p["dependencies"], *extras[cuda], *extras["train"], *extras["hf"], *extras["dev"], sep="\n")

# Threads multiply processes: tests and trainers run one thread per process unless told otherwise.
export OMP_NUM_THREADS ?= 1
# Processes are started by the dozen: none should compile again what another has.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: build train test sanitize lint types docs clean distclean
.DELETE_ON_ERROR:

# Packages are installed while the extension is compiled.
build:
	@+$(MAKE) --no-print-directory --jobs=2 $(VENV)/.built $(VENV)/.required

# An environment with torch: the interpreter's own where it has one.
$(VENV)/.torch:
	$(PYTHON) .ci/environment.py $(VENV) "$(TORCH)"
	@touch $@

$(VENV)/.tools: pyproject.toml $(VENV)/.torch
	$(RUN) -c '$(TOOLS)' > $(VENV)/tools.txt
	$(INSTALL) --requirement $(VENV)/tools.txt
	@touch $@

$(VENV)/.required: pyproject.toml $(VENV)/.tools
	$(RUN) -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	$(INSTALL) --requirement $(VENV)/requirements.txt
	@touch $@

# Editable: Python changes are seen at once; a change in csrc compiles again, without the network.
$(VENV)/.built: $(SOURCES) $(VENV)/.tools
	$(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

train: build
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) -m te_dist.launch.train $(CONFIG) $(ARGS)

test: build
	$(RUN) -m pytest --numprocesses $(JOBS) --dist loadgroup $(ARGS)

# Every kernel over small matrices under NVIDIA's checkers of memory accesses, races, uninitialized reads and barriers.
# Without torch's pool of memory, inside of which an access out of bounds would go unseen. All of them run; it fails at
# the end. Races are not looked for in products: their barriers are those of the bulk copy engine, which racecheck misses.
sanitize: build
	@command -v compute-sanitizer || { echo "make sanitize: wants NVIDIA's compute-sanitizer (CUDA toolkit) and a GPU"; exit 1; }
	$(RUN) -m tests.gpu.sanitize --compile
	failed=; for tool in memcheck racecheck initcheck synccheck; do \
		test $$tool = racecheck && calls=--without-products || calls=; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --kernel-name kernel_substring=te_dist_kernel --error-exitcode 1 \
			$(RUN) -m tests.gpu.sanitize $$calls || failed="$$failed $$tool"; done; \
	test -z "$$failed" || { echo "make sanitize: errors found by$$failed"; exit 1; }

lint: build
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Annotations, strictly in te_dist/formats and te_dist/tensor; tests/test_types.py runs it too.
types: build
	$(RUN) -m pyright --pythonpath $(RUN)

docs: build
	$(RUN) docs/generate.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(VENV)/.built
	find te_dist tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
