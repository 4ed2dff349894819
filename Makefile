PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PAIR := examples/tiny-pair
DEMO := build/demo
PROMPT := Customer: Hi, I would like to book a table for two in San Jose.

.PHONY: demo test check clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/outrider export --target $(PAIR)/target --draft $(PAIR)/draft -o $(DEMO)/onnx
	$(BIN)/outrider build-engine $(DEMO)/onnx -o $(DEMO)/bundle --backend onnxruntime --k 1,2,4,8 --capacity 512
	$(BIN)/outrider generate $(DEMO)/bundle --prompt "$(PROMPT)" --max-new-tokens 96 --k 4 --show

test: $(VENV)/.installed-dev
	scripts/test

check: $(VENV)/.installed-dev
	scripts/check

clean:
	rm -rf build dist *.egg-info $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[export,cpu]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[export,cpu,bench,serve,ray,dev,rtx,quantize]'
	touch $@ $(VENV)/.installed
