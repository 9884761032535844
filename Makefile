# Thin: each line is a command that one could type. `make help` lists what there is.

# A LIBTORCH of the user's is respected; else it is the folder that scripts/libtorch fills.
ifdef LIBTORCH
PREPARE := scripts/libtorch
else
PREPARE := env -u LIBTORCH scripts/libtorch
LIBTORCH := $(shell scripts/libtorch path)
endif
export LIBTORCH
CACHE := $(or $(SKEIN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/skein)
BIN := $(or $(CARGO_TARGET_DIR),target)/debug
CARGO := cargo
# What is built without libtorch. Built together with the node it would be linked to it.
PLAIN := -p skein-protocol -p skein-coordinator -p skein-sim
LOCKED := --locked
# Without cargo-nextest cargo's own runner does; it has no guards against hanging.
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo nextest)
RUN_TESTS := $(if $(NEXTEST),nextest run,test)
# The same prose for the same Cargo.lock and script; a text of one's own is prepared anew each time.
TEXT_KEY = $(shell cat Cargo.lock scripts/prose | sha256sum | cut -c1-16)
TEXT_DIR = $(CACHE)/text/$(if $(TEXT),own-$(shell sha256sum < "$(TEXT)" | cut -c1-16),$(TEXT_KEY))
DEMO = $(BIN)/skein-sim demo --text $(TEXT_DIR) --data $(TEXT_DIR)/data $(if $(RESUME),--resume) $(if $(FRESH),--fresh)

.PHONY: help libtorch build text demo demo-compare test fmt lint unit doc deny layers test-hf bench soak test-the-tests

help: ## this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

libtorch: ## fetch libtorch once, into a cache that all checkouts share
	@$(PREPARE)

build: libtorch ## the three programs
	$(CARGO) build $(LOCKED) -p skein-coordinator -p skein-sim
	$(CARGO) build $(LOCKED) -p skein-node

text: build ## the text the demo learns from (TEXT=file for your own)
	@[ -f "$(TEXT_DIR)/about.json" ] || scripts/prose $(if $(TEXT),--own "$(TEXT)") "$(TEXT_DIR)"

demo: text ## train a swarm of four nodes, kill one, go on, export, write (RESUME=1 goes on, FRESH=1 begins anew)
	$(DEMO)

demo-compare: text ## the same, and an undisturbed process beside it
	$(DEMO) --compare

test: fmt lint build unit doc layers deny ## everything CI runs

fmt:
	$(CARGO) fmt --all --check

# The feature sets that are built: everything, the machines alone, the node without libtorch.
lint: libtorch ## clippy, warnings are errors
	$(CARGO) clippy $(LOCKED) --workspace --all-targets -- -D warnings
	$(CARGO) clippy $(LOCKED) $(PLAIN) -p skein-node --no-default-features -- -D warnings
	$(CARGO) clippy $(LOCKED) -p skein-node --no-default-features --features shell -- -D warnings

unit: build
	$(CARGO) $(RUN_TESTS) $(LOCKED) $(PLAIN) -p skein-tests
	$(CARGO) $(RUN_TESTS) $(LOCKED) -p skein-node
	$(CARGO) test $(LOCKED) $(PLAIN) --doc
	$(CARGO) test $(LOCKED) -p skein-node --no-default-features --features shell --doc

doc: libtorch ## the documentation of the code, warnings are errors
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" $(CARGO) doc $(LOCKED) --workspace --no-deps

# What the crates must never depend on; see README, invariants.
layers:
	scripts/layers

deny:
	@if cargo deny --version >/dev/null 2>&1; then $(CARGO) deny check bans licenses sources; \
	else echo "cargo-deny is not installed, so licences and sources are not checked: cargo install --locked cargo-deny"; fi

test-hf: build ## the exported folder in Python's transformers (own virtual environment)
	scripts/test-hf $(BIN)

soak: build ## real programs under an hour of faults, then a million drawn schedules (hours); MINUTES=N SEEDS=N
	scripts/soak $(BIN) --minutes $(or $(MINUTES),60)
	$(BIN)/skein-sim run --seed 1000000 --seeds $(or $(SEEDS),1000000)

test-the-tests: ## breaks rules of the protocol on purpose; a test must notice each (three quarters of an hour)
	scripts/test-the-tests

bench: build ## all benchmarks; bench-NAME for one
	for bench in scripts/bench/*; do $$bench $(BIN) || exit 1; done

bench-%: build
	scripts/bench/$* $(BIN)
