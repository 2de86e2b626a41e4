# The front door: each target sets up what it needs, once. `make help` lists them.
.NOTPARALLEL:
.DEFAULT_GOAL := help

PREFIX ?= /usr/local
FILES ?=
ARGS ?=
JOBS ?= $(shell scripts/jobs.sh)
INSTALLED := tessera tessera_corpus tessera_models tessera_tool tessera_train tessera_inspect tessera_export tessera_tokenize tessera_bench_comm tessera_bench_compile \
  tessera_bench_hooks tessera_bench_memory tessera_bench_save

# TESSERA_TORCH_VERSION=2.14.1: that libtorch, in an environment of its own, .venv-2.14.1, and built into build/torch-2.14.1.
PRESET := release
BUILD := build/release
ifneq ($(TESSERA_TORCH_VERSION),)
  FOR_VERSIONS := help setup setup-tests build test install wheel deb clean
  ifneq ($(filter-out $(FOR_VERSIONS),$(MAKECMDGOALS)),)
    $(error make $(filter-out $(FOR_VERSIONS),$(MAKECMDGOALS)): TESSERA_TORCH_VERSION is for setup, build, test, install, wheel and deb)
  endif
  PRESET := torch
  BUILD := build/torch-$(TESSERA_TORCH_VERSION)
endif
RESULTS := benchmarks/results/$(shell date +%F)

# TSan of g++ 12 needs the address layout that a kernel with much randomisation does not give.
STEADY_ADDRESSES = $$(setarch -R true 2>/dev/null && echo setarch -R)

CLANG ?= $(firstword $(notdir $(wildcard $(addprefix /usr/bin/clang++,-20 -19 -18 -17 -16))) clang++)

# $(call configure,preset[,settings]) and $(call build,preset[,targets])
folder = $(if $(filter $(PRESET),$(1)),$(BUILD),build/$(1))
define configure
	@torch=$$(scripts/find_torch.sh) && cmake --preset $(1) -DTESSERA_TORCH="$$torch" $(2) \
	  $$(test -e $(folder)/CMakeCache.txt || ! command -v ninja >/dev/null || echo -G Ninja) >/dev/null
endef
define build
	$(call configure,$(1))
	@cmake --build $(folder) --parallel $(JOBS) $(if $(2),--target $(2))
endef

.PHONY: help setup setup-tests build test test-all train bench bench-job docs format tidy test-dtensor gallery test-compose test-graphs test-soak test-mutants test-asan test-fuzz test-tsan test-clang check-arm test-cuda test-multi-gpu test-multi-gpu-here build-cuda deps install wheel deb clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## packages, libtorch, formatters (other targets call it)
	@scripts/setup.sh

setup-tests:
	@scripts/setup.sh --tests

build: setup  ## the library, tools, examples and tests into build/release
	$(call build,$(PRESET))

test: setup-tests build  ## all tests but those that need a GPU; leaves build/release/test-results.xml (TESSERA_TORCH_VERSION=2.14.1: that libtorch, in build/torch-2.14.1)
	@rm -rf $(BUILD)/test-results; ctest --preset $(PRESET); status=$$?; \
	  python3 scripts/summarize_tests.py $(BUILD)/test-results --ctest $(BUILD)/test-results.xml && \
	  echo "tests that need a GPU: make test-cuda" && exit $$status

# For a night: cases that no run before had. `make test` draws the same ones everywhere.
test-all:  ## test, test-dtensor, test-compose, test-graphs, test-fuzz and test-soak with a new seed (TESSERA_TEST_SEED=N: that one)
	@export TESSERA_TEST_SEED=$${TESSERA_TEST_SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	  echo "Seed of random tests: TESSERA_TEST_SEED=$$TESSERA_TEST_SEED"; \
	  $(MAKE) --keep-going test test-dtensor test-compose test-graphs test-fuzz test-soak || \
	  { echo "failed; the same cases again: make test-all TESSERA_TEST_SEED=$$TESSERA_TEST_SEED"; exit 1; }

train: setup  ## the main training job: a GPT learns this repository's pages and sources, on the GPU or two ranks (ARGS="--steps 50")
	$(call build,release,tessera_tool tessera_train tessera_inspect)
	@python3 scripts/main_job_text.py unpack build/text
	@flags=$$(scripts/train_flags.sh $(ARGS)) && build/release/bin/tessera train $$flags $(ARGS)

bench: build  ## measures; tables go into benchmarks/results
	@mkdir -p benchmarks/results
	build/release/bin/tessera bench comm --backends shm,gloo --ranks 2 --csv $(RESULTS)-comm-2ranks.csv
	build/release/bin/tessera bench comm --backends shm,gloo --ranks 4 --csv $(RESULTS)-comm-4ranks.csv
	build/release/bin/tessera bench train --jobs mlp,net2000,gpt --modes replicate \
	  --peer pytorch,pytorch_malloc,reducer_gloo,reducer_shm --csv $(RESULTS)-train-2ranks.csv
	build/release/bin/tessera bench hooks --csv $(RESULTS)-hooks.csv
	build/release/bin/tessera bench dtensor --peer pytorch --csv $(RESULTS)-dtensor.csv
	build/release/bin/tessera bench train --jobs mlp,net2000,gpt --modes tp \
	  --peer pytorch,pytorch_malloc --csv $(RESULTS)-train-tp-2ranks.csv
	build/release/bin/tessera bench train --jobs mlp,net2000,gpt --modes compile,replicate+compile,fully_shard+compile,tp+compile \
	  --peer eager --csv $(RESULTS)-train-compile-2ranks.csv
	build/release/bin/tessera bench train --ranks 1 --jobs mlp,net2000,gpt --modes eager,compile \
	  --peer pytorch,pytorch_malloc,pytorch_compile --csv $(RESULTS)-train-1rank.csv
	build/release/bin/tessera bench compile --peer pytorch --csv $(RESULTS)-compile.csv
	build/release/bin/tessera bench save --csv $(RESULTS)-save.csv
	build/release/bin/tessera bench memory --ranks 2 --blocks 24 --csv $(RESULTS)-memory-2ranks.csv
	build/release/bin/tessera bench memory --ranks 4 --blocks 24 --csv $(RESULTS)-memory-4ranks.csv
	for ranks in 1 2 4; do \
	  build/release/bin/tessera bench memory --ranks $$ranks --jobs attention --csv $(RESULTS)-memory-attention-$${ranks}ranks.csv || exit; \
	done
	python3 scripts/main_job_text.py unpack build/text
	.venv/bin/python benchmarks/job.py --csv $(RESULTS)-job-2ranks.csv

bench-job: setup  ## the main job against the same in PyTorch: losses, tokens per second, start, nats per byte (ARGS="--pairs 3")
	$(call build,release,tessera_tool tessera_train)
	@python3 scripts/main_job_text.py unpack build/text
	@mkdir -p benchmarks/results
	@.venv/bin/python benchmarks/job.py --csv $(RESULTS)-job-2ranks.csv $(ARGS)

docs:  ## the API reference from the public headers into build/docs (by doxygen)
	@scripts/setup.sh doxygen
	@python3 scripts/reference.py build/docs

format: setup  ## formats all sources
	@python3 tests/style/check_format.py --fix

tidy: setup  ## clang-tidy on what differs from main, or on FILES="..."
	$(call configure,release)
	@python3 scripts/tidy.py --jobs $(JOBS) $(FILES)

test-dtensor: setup  ## every sharding rule with every placement of its inputs; counts the operators
	$(call build,release,dtensor)
	@TESSERA_DTENSOR_SHARE=1 build/release/bin/tests/dtensor \
	  --gtest_filter='*BruteForce*' > build/release/test-dtensor.log 2>&1; status=$$?; \
	  grep -E '^(\[  (FAILED|PASSED)|[a-z]+ on |no case of )|Failure|operators ran' build/release/test-dtensor.log; \
	  rm -f build/release/op_db_store; build/release/bin/tessera run -n 2 -- sh -c '.venv/bin/python tests/dtensor/op_db_peer.py \
	    build/release/bin/tests/python/dtensor_python_ops.so $$TESSERA_RANK 2 file://$(CURDIR)/build/release/op_db_store $(or $(TESSERA_TEST_SEED),1) \
	    --csv $(RESULTS)-dtensor-op-db.csv --refusals $(RESULTS)-dtensor-op-db-refusals.csv' > build/release/op_db.log 2>&1 || status=1; \
	  tail -n 1 build/release/op_db.log; \
	  awk -F, 'NR == 2 && ($$4 > 0 || $$3 < 0.98 * $$2 || $$5 < 0.6 * $$2) {exit 1}' \
	    $(RESULTS)-dtensor-op-db.csv || status=1; \
	  exit $$status

gallery: setup  ## docs/gallery.md: reported wrong answers and hangs, in PyTorch and here, side by side (TABLE=write: onto the page)
	$(call build,$(PRESET),gallery)
	@TESSERA_GALLERY=$(or $(TABLE),print) $(BUILD)/bin/tests/gallery --gtest_brief=1

test-compose: setup  ## 240 drawn nestings of checkpoint, replicate, fully_shard and tensor parallelism
	$(call build,release,compose)
	@TESSERA_COMPOSE_SHARE=1 build/release/bin/tests/compose --gtest_filter='*Nestings*'

test-graphs: setup  ## 2,000 drawn graphs of each kind as kernels of the host, against their operators; prints the seed
	$(call build,release,compiler)
	@TESSERA_GRAPHS=2000 build/release/bin/tests/compiler --gtest_filter='*Random*Host'

test-soak: setup  ## 30 random kills of a training job in 20 minutes; its losses must be those of an undisturbed one
	$(call build,release,tessera_tool tessera_train)
	@python3 tests/train/soak.py build/release/bin/tessera --kills 30 --minutes 20 \
	  $(if $(TESSERA_TEST_SEED),--seed $(TESSERA_TEST_SEED))

test-asan: setup  ## tests with ranks as threads, under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call build,asan,sanitize_tests)
	@ctest --preset asan

test-fuzz: setup  ## 100,000 damaged files against the readers of checkpoints, under two sanitizers (MINUTES=2: as many as fit)
	$(call build,asan,fuzz_readers)
	@build/asan/bin/fuzz_readers 100000 $(or $(TESSERA_TEST_SEED),20240229) $(MINUTES)

test-tsan: setup  ## tests with ranks as threads, under ThreadSanitizer
	$(call build,tsan,sanitize_tests)
	@$(STEADY_ADDRESSES) ctest --preset tsan

test-clang: setup-tests setup  ## all tests, built by clang 16 or newer (CLANG=clang++-18) into build/clang
	$(call configure,clang,-DCMAKE_CXX_COMPILER=$(CLANG))
	@cmake --build build/clang --parallel $(JOBS)
	@ctest --preset clang

check-arm: setup  ## compiles src and tools for 64-bit ARM as far as their syntax goes (apt-get install g++-aarch64-linux-gnu)
	$(call configure,release)
	@python3 scripts/check_syntax.py --jobs $(JOBS) --compiler aarch64-linux-gnu-g++ $(FILES)

test-cuda:  ## tests that need a GPU, with several ranks on one, in build/cuda (ARGS="--filter REGEX --no-mps --sanitize"); no set-up
	@JOBS=$(JOBS) scripts/test_cuda.sh $(ARGS)

test-multi-gpu:  ## engines over NCCL, bandwidth and overlap on 2 to 8 GPUs; ends with build/cuda/multi-gpu-report.txt
	@scripts/test_cuda.sh --has-gpu || { status=$$?; [ $$status -ne 3 ] || exit 0; exit $$status; }; \
	  $(MAKE) --no-print-directory test-multi-gpu-here

test-multi-gpu-here:
	$(call build,cuda,tessera_tool multi_gpu_check)
	@scripts/test_multi_gpu.sh build/cuda

build-cuda:  ## into build/cuda, with the CUDA libtorch at TESSERA_TORCH or of the active environment; no set-up
	$(call build,cuda)

deps:  ## copies the build's headers into .deps, for machines where nothing can be installed
	@rm -rf .deps && mkdir -p .deps/cli11/include .deps/json/include .deps/toml/include .deps/src
	@cp -rL /usr/include/CLI .deps/cli11/include/
	@cp -rL /usr/include/nlohmann .deps/json/include/
	@cp -rL /usr/include/toml++ .deps/toml/include/
	@cp -rL /usr/src/googletest .deps/src/

install: setup  ## to PREFIX=/usr/local
	$(call build,$(PRESET),$(INSTALLED))
	@cmake --install $(BUILD) --prefix $(PREFIX)

wheel: setup  ## what install installs, as a Python package beside torch, into build/wheel
	$(call build,$(PRESET),$(INSTALLED))
	@python3 packaging/wheel/make_wheel.py $(BUILD) build/wheel

deb: setup  ## the same as a Debian package, which needs libtorch in /opt/libtorch, into build/deb
	$(call build,$(PRESET),$(INSTALLED))
	@cd $(BUILD) && cpack -G DEB -B $(CURDIR)/build/deb

clean:  ## removes build/; .venv and those of versions stay
	rm -rf build
