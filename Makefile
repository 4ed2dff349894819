PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: compiling all of torch's takes as long as unpacking it.
PIP := $(BIN)/python -m pip install -q --no-compile -c $(or $(CONSTRAINTS),constraints.txt)
PAIR := examples/tiny-pair
DEMO := build/demo
PROMPT := Customer: Hi, I would like to book a table for two in San Jose.

.PHONY: demo demo-stages test test-all mutants models-page check docs newest clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/outrider export --target $(PAIR)/target --draft $(PAIR)/draft -o $(DEMO)/onnx
	$(BIN)/outrider build-engine $(DEMO)/onnx -o $(DEMO)/bundle --backend onnxruntime --k 1,2,4,8 --capacity 512
	$(BIN)/outrider generate $(DEMO)/bundle --prompt "$(PROMPT)" --max-new-tokens 96 --k 4 --show

# The text of the pair with its target in two stages, each in a process, is that of the whole target.
demo-stages: $(VENV)/.installed-ray
	rm -rf $(DEMO)-stages
	$(BIN)/outrider export --target $(PAIR)/target --draft $(PAIR)/draft -o $(DEMO)-stages/onnx
	$(BIN)/outrider build-engine $(DEMO)-stages/onnx -o $(DEMO)-stages/whole --backend onnxruntime --k 4 --capacity 512
	$(BIN)/outrider build-engine $(DEMO)-stages/onnx -o $(DEMO)-stages/bundle --backend onnxruntime --k 4 --capacity 512 --stages 2
	$(BIN)/outrider generate $(DEMO)-stages/whole --prompt "$(PROMPT)" --max-new-tokens 96 --k 0 > $(DEMO)-stages/whole.txt
	$(BIN)/outrider generate $(DEMO)-stages/bundle --prompt "$(PROMPT)" --max-new-tokens 96 --k 4 --stage-cores 1 > $(DEMO)-stages/text.txt
	cat $(DEMO)-stages/text.txt
	cmp $(DEMO)-stages/whole.txt $(DEMO)-stages/text.txt
	@echo "the whole target's text is the same, to the byte"

test: $(VENV)/.installed-dev
	scripts/test

test-all: $(VENV)/.installed-dev
	scripts/test -m ""

mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/plant.py

# Write docs/models.md from what the tests of exports find, the slow ones too: tens of minutes.
models-page: $(VENV)/.installed-dev
	scripts/test -m "" --models-page tests/export/test_architectures.py tests/export/test_eagle3.py tests/export/test_forms.py \
	    tests/export/test_sweep.py

check: $(VENV)/.installed-dev
	scripts/check

docs: $(VENV)/.installed-docs
	VENV=$(VENV) scripts/docs

newest:
	scripts/newest

clean:
	rm -rf build dist *.egg-info $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) -e '.[export,cpu]'
	touch $@

$(VENV)/.installed-ray: pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) -e '.[export,cpu,ray]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) -e '.[export,cpu,openvino,serve,ray,dev,docs,rtx,quantize]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-ray $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml constraints.txt $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	touch $@
