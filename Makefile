# Everything that Postern needs is installed and built from here. The two
# targets for a newcomer are demo and test; both work on a fresh Debian 12
# machine with Go, Node and root, demo on Ubuntu 24.04 too.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
export CGO_ENABLED := 0
export POSTERN_CACHE ?= /var/cache/postern
# The version is the tag or commit, where this is a checkout and not a tarball in somebody else's.
VERSION := $(shell [ -e .git ] && git describe --tags --always --dirty 2>/dev/null)
BUILD := go build -ldflags='-s -w -X main.stamp=$(VERSION)'
# Everything is built with gVisor as the patches in patches/gvisor change it, and with
# -trimpath, so that nothing is compiled twice. Where a patch does not fit, nothing is built.
ifneq ($(filter-out help clean,$(or $(MAKECMDGOALS),help)),)
export GOFLAGS := $(shell go run ./patches/apply)
ifeq ($(GOFLAGS),)
$(error gVisor could not be patched, see above and CONTRIBUTING.md)
endif
endif
# Linters read gVisor without the patches: golang.org/x/tools/go/packages also runs the Go
# command with modules off, which -modfile in GOFLAGS makes fail.
LINT := GOFLAGS=-trimpath go tool -modfile=tools/go.mod golangci-lint

# What unit, race and e2e run. See "make help".
PKG ?= $(filter-out postern postern/test/e2e,$(shell go list ./...))
RUN ?=
DB ?= sqlite
ifeq ($(DB),postgres)
WITH_DB := test/with-postgres
else ifneq ($(DB),sqlite)
$(error DB=$(DB): want sqlite or postgres)
endif

.PHONY: help demo test quick unit race e2e fuzz soak soak-tests soak-fuzz soak-boot bench build screenshots template deps-demo deps-test vet lint deadcode licenses generate check-generated proof access hundred clean

help:
	@echo 'Start here:'
	@echo '  make demo         build everything, start Postern and play the whole story'
	@echo '  make build        bin/postern, with the guest and the runtime inside'
	@echo '  make template     bin/postern and the template base, in POSTERN_CACHE ($(POSTERN_CACHE));'
	@echo '                    TEMPLATES=--all or names for others'
	@echo
	@echo 'Between two edits:'
	@echo '  make quick        format, vet, layers, and the tests on SQLite of the packages that differ from'
	@echo '                    BASE (main) and of those that import them; under a minute'
	@echo '  make unit         the tests of packages; PKG=./internal/mailbox, RUN=TestName and DB=postgres'
	@echo '                    select (a PostgreSQL of its own is started; both databases are tested)'
	@echo '  make race         the tests that share state, with the race detector; PKG and RUN select'
	@echo '  make e2e          the tests of the real program; RUN=TestName selects'
	@echo '  make lint         golangci-lint, as configured in .golangci.yml, and deadcode'
	@echo '  make vet          go vet alone'
	@echo '  make deadcode     the functions that the programs cannot reach'
	@echo
	@echo 'Before a change lands:'
	@echo '  make test         install what the tests need and pass them all: 20 minutes on 2 cores. If its last'
	@echo '                    lines say "run twice", a test of the real program failed and then passed: that is a'
	@echo '                    defect too (see CONTRIBUTING.md)'
	@echo '  make bench AGAINST=main BENCH=egress,create'
	@echo '                    for changes of a hot path: run these parts of main and of this checkout in turns,'
	@echo '                    in ROUNDS (5), and fail if a figure lost more than 5 %; minutes for each part'
	@echo '  make generate     the Go code of proto/ anew; make check-generated fails if that changes it'
	@echo '  make access       check every page of the console with axe-core: 10 minutes'
	@echo '  make hundred      play a reviewer who decides a hundred actions in a browser, with ten traps: 5 minutes'
	@echo '  make proof        prove with Coq what docs/background/proof.md says, and that wrong rules cannot be proved'
	@echo '  make screenshots  the pictures in docs/reference/console.md anew'
	@echo '  make licenses     bin/licenses: the texts that go with the built program'
	@echo
	@echo 'For longer:'
	@echo '  make fuzz         each fuzz target for FUZZTIME (10s): 15 minutes; for changes of parsers'
	@echo '  make soak         what only repeats: soak-tests and soak-fuzz, 1.5 hours'
	@echo '  make soak-tests   the tests with random cases, with many times as many of them: 30 minutes'
	@echo '  make soak-fuzz    each fuzz target for SOAKFUZZTIME (60s): 1 hour'
	@echo '  make soak-boot    boot BOOTS (3000) sandboxes, PARALLEL (6) at once beside LOAD (24) busy'
	@echo '                    processes, and say which hung: 2 hours'
	@echo '  make bench        measure, as ratios in one run; DENSITY (50) sandboxes at once: 15 minutes.'
	@echo '                    BENCH=egress,create runs these parts alone'
	@echo
	@echo 'Installing and removing:'
	@echo '  make deps-demo    the Debian and npm packages that demo needs'
	@echo '  make deps-test    those that test needs too'
	@echo '  make clean        remove what was built here, not the templates in POSTERN_CACHE'

build: cmd/postern/guestbin
	@[ -e bin/postern ] || echo 'building postern with gVisor inside; the first time this takes some minutes'
	$(BUILD) -o bin/postern ./cmd/postern

# The programs that are built into postern. Go decides whether anything changed.
.PHONY: cmd/postern/guestbin
cmd/postern/guestbin:
	$(BUILD) -o $@/ ./cmd/postern-guest ./cmd/postern-runtime

deps-demo:
	@test/install mmdebstrap mount e2fsprogs debian-archive-keyring
	@test/install-npm demo

deps-test: deps-demo
	@test/install postgresql postfix nginx-light dovecot-imapd dovecot-lmtpd swaks libnet-ssleay-perl python3-django ruby-actionmailer libphp-phpmailer php-cli chromium protobuf-compiler libprotobuf-dev python3 iproute2 curl jq openssh-client rsync fonts-dejavu-core busybox-static xfsprogs gcc libc6-dev default-jre-headless
	@test/install isync mutt coq
	@test/install-npm test/browser
	@go tool -modfile=tools/pebble/go.mod -n pebble >/dev/null
	@test/install-npm test/conformance
	@test/install-npm test/webhook
	@test/install-npm test/mail
	@test/install-npm test/gmail
	@test/install-npm test/mcp

TEMPLATES ?=
template: build deps-demo
	bin/postern template build $(TEMPLATES)

demo: template
	node demo/story.mjs bin/postern .demo

test: deps-test template
	test/run

quick: cmd/postern/guestbin
	@test/quick

unit: cmd/postern/guestbin
	$(WITH_DB) go test -timeout 30m $(if $(RUN),-run '$(RUN)') $(PKG)

race: cmd/postern/guestbin
	RUN='$(RUN)' test/race $(if $(filter file,$(origin PKG)),,$(PKG))

e2e: template
	test/with-postgres go test -count=1 -timeout 45m $(if $(RUN),-v -run '$(RUN)') ./test/e2e

# The rules that are proved are those of the Go code, as TestProofRules checks; that
# the proof fails with wrong ones takes some minutes.
proof:
	@test/install coq
	test/proof
	go test -count=1 -run 'TestProofRules' ./internal/oversight
	POSTERN_TEST_PROOF=1 go test -count=1 -timeout 30m -run 'TestProofFinds' ./internal/oversight

# The pictures in docs/reference/console.md, taken anew.
screenshots: template
	@test/install chromium fonts-dejavu-core
	@test/install-npm test/browser
	rm -rf .screenshots
	POSTERN_TEST_DOCS=$(CURDIR)/.screenshots go test -count=1 -run 'TestBrowser$$' ./internal/console
	POSTERN_TEST_DOCS=$(CURDIR)/.screenshots go test -count=1 -run 'TestBrowserSandbox$$' ./test/e2e
	rm -f docs/screenshots/*.png
	go run ./test/screenshots .screenshots docs/screenshots
	rm -rf .screenshots

vet:
	go vet ./...

lint: deadcode
	$(LINT) run ./...

deadcode:
	test/deadcode

# The licences and notices of all modules that are in the program, from these.
licenses:
	rm -rf bin/licenses
	mkdir -p bin/licenses
	cp LICENSE NOTICE bin/licenses/
	cp "$$(go env GOROOT)/LICENSE" bin/licenses/go
	go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}' ./cmd/postern ./cmd/postern-guest ./cmd/postern-runtime | sort -u | while read -r name dir; do \
		mkdir -p "bin/licenses/$$name"; \
		find "$$dir" -maxdepth 1 -type f -iregex '.*/\(sqlite-\)?\(licen[sc]e\|copying\|notice\|copyright\|authors\|patents\).*' -exec cp -t "bin/licenses/$$name" {} +; \
	done
	cp patches/gvisor/*.patch bin/licenses/gvisor.dev/gvisor/

generate:
	proto/generate.sh

check-generated: generate
	git diff --exit-code -- internal proto
	@new=$$(git ls-files --others --exclude-standard -- internal proto); \
		[ -z "$$new" ] || { echo "not committed: $$new"; exit 1; }

# BENCH is the parts to run, with commas between (bench -help names them), AGAINST a commit to
# compare with in ROUNDS turns. DENSITY is how many sandboxes are alive at once; each takes
# about 31 MiB.
BENCH ?=
AGAINST ?=
ROUNDS ?= 5
BENCHTIME ?=
RUNS ?= 0
DENSITY ?= 50
bench: deps-demo
	@test/install postgresql postfix
	go run ./test/bench -parts '$(BENCH)' -against '$(AGAINST)' -rounds $(ROUNDS) -benchtime '$(BENCHTIME)' -runs $(RUNS) -density $(DENSITY)

FUZZTIME ?= 10s
fuzz:
	test/fuzz $(FUZZTIME)

soak: soak-tests soak-fuzz

# The tests that repeat or make random cases do few of them in "make test", and the
# same ones each time. These variables have them do many.
SOAK := POSTERN_TEST_SOAK=120s POSTERN_TEST_KILLS=300 POSTERN_TEST_CYCLES=10
soak-tests: template
	$(SOAK) test/with-postgres go test -count=1 -v -timeout 3h -run '^(TestSoak|TestOthersShowNothingMore|TestEveryOctetIsAccounted|Test.*Cycles.*|TestManyStartsLeaveNothing|TestCrashesLeaveNothingAndLoseNoLayer)$$' ./internal/sandbox/... ./internal/build ./internal/mail
	$(SOAK) test/with-postgres go test -count=1 -v -timeout 3h -run '^(TestCrash|TestKilledUnderLoad|TestReception.*|TestCyclesLeaveNothing)$$' ./test/e2e
	$(SOAK) test/with-postgres go test -count=1 -v -timeout 3h -run '^TestConformance$$/^lifecycle$$' ./test/e2e

SOAKFUZZTIME ?= 60s
soak-fuzz:
	test/fuzz $(SOAKFUZZTIME)

# Boots of the base template, PARALLEL at a time. Of each that hangs, what it was
# doing is in .soakboot.
BOOTS ?= 3000
LOAD ?= 24
PARALLEL ?= 6
soak-boot: template
	go build -o bin/soakboot ./test/soakboot
	nice bin/soakboot -boots $(BOOTS) -load $(LOAD) -parallel $(PARALLEL) -out .soakboot \
		-template "$$(dirname "$$(dirname "$$(readlink -f $(POSTERN_CACHE)/base-current)")")"

clean:
	rm -rf bin .demo .soakboot .cache/gvisor cmd/postern/guestbin/postern-guest cmd/postern/guestbin/postern-runtime

# Every page that a link leads to, in four forms, with axe-core.
access: deps-test
	POSTERN_TEST_ACCESS=all go test -count=1 -v -timeout 30m -run 'TestBrowserAccess$$' ./internal/console

# A hundred actions by keys and by pointer, thirty on a phone, ten without JavaScript.
hundred: deps-test
	POSTERN_TEST_HUNDRED=all go test -count=1 -v -timeout 30m -run 'TestHundred$$' ./internal/console
