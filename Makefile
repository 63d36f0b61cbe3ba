# Everything that Postern needs is installed and built from here. The two
# targets for a newcomer are demo and test; both work on a fresh Debian 12
# machine with Go, Node and root, demo on Ubuntu 24.04 too.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
export CGO_ENABLED := 0
export POSTERN_CACHE ?= /var/cache/postern
# The version is the tag or commit, where this is a checkout and not a tarball in somebody else's.
VERSION := $(shell [ -e .git ] && git describe --tags --always --dirty 2>/dev/null)
GOFLAGS_BUILD := -trimpath -ldflags='-s -w -X main.stamp=$(VERSION)'
LINT := go tool -modfile=tools/go.mod golangci-lint

.PHONY: help demo test build screenshots template deps-demo deps-test vet lint licenses generate check-generated unit race e2e bench fuzz soak-boot clean

help:
	@echo 'make demo    build everything, start Postern and play the whole story'
	@echo 'make test    install what the tests need and pass them all'
	@echo 'make build   bin/postern, with the guest inside'
	@echo 'make bench   measure, as ratios in one run'
	@echo 'make fuzz    each fuzz target for FUZZTIME (10s)'
	@echo 'make soak-boot  boot BOOTS (3000) sandboxes beside LOAD (24) busy processes, and say which hung'
	@echo 'make screenshots  the pictures in docs/reference/console.md, anew'
	@echo 'make lint    golangci-lint, as configured in .golangci.yml'
	@echo 'make licenses  bin/licenses: the texts that go with the built program'

build: cmd/postern/guestbin/postern-guest
	@[ -e bin/postern ] || echo 'building postern with gVisor inside; the first time this takes some minutes'
	go build $(GOFLAGS_BUILD) -o bin/postern ./cmd/postern

# Go decides whether anything changed.
.PHONY: cmd/postern/guestbin/postern-guest
cmd/postern/guestbin/postern-guest:
	go build $(GOFLAGS_BUILD) -o $@ ./cmd/postern-guest

deps-demo:
	@test/install mmdebstrap mount e2fsprogs debian-archive-keyring
	@test/install-npm demo

deps-test: deps-demo
	@test/install postgresql postfix nginx-light dovecot-imapd dovecot-lmtpd swaks libnet-ssleay-perl chromium protobuf-compiler libprotobuf-dev python3 iproute2 curl jq fonts-dejavu-core gcc libc6-dev
	@test/install-npm test/browser
	@go tool -modfile=tools/pebble/go.mod -n pebble >/dev/null
	@test/install-npm test/conformance
	@test/install-npm test/webhook
	@test/install-npm test/mail
	@test/install-npm test/mcp

template: build deps-demo
	bin/postern template build

demo: template
	node demo/story.mjs bin/postern .demo

test: deps-test template
	test/run

# The pictures in docs/reference/console.md, taken anew.
screenshots:
	@test/install chromium fonts-dejavu-core
	@test/install-npm test/browser
	rm -rf .screenshots
	POSTERN_DOCS_SCREENSHOTS=$(CURDIR)/.screenshots go test -count=1 -run 'TestBrowser$$' ./internal/console
	rm -f docs/screenshots/*.png
	go run ./test/screenshots .screenshots docs/screenshots
	rm -rf .screenshots

vet:
	go vet ./...

lint:
	$(LINT) run ./...

# The licences and notices of all modules that are in the program, from these.
licenses:
	rm -rf bin/licenses
	mkdir -p bin/licenses
	cp LICENSE NOTICE bin/licenses/
	cp "$$(go env GOROOT)/LICENSE" bin/licenses/go
	go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}' ./cmd/postern ./cmd/postern-guest | sort -u | while read -r name dir; do \
		mkdir -p "bin/licenses/$$name"; \
		find "$$dir" -maxdepth 1 -type f -iregex '.*/\(sqlite-\)?\(licen[sc]e\|copying\|notice\|copyright\|authors\|patents\).*' -exec cp -t "bin/licenses/$$name" {} +; \
	done

generate:
	proto/generate.sh

check-generated: generate
	git diff --exit-code -- internal proto

# DENSITY is how many sandboxes are alive at once; each takes about 50 MiB.
DENSITY ?= 50
bench: template
	go test -run '^$$' -bench . -benchmem ./internal/oversight ./internal/mailbox ./internal/egress ./internal/guest/...
	go test -run '^$$' -bench Inbound -benchtime 2000x ./test/e2e
	test/with-postgres go test -run '^$$' -bench Gate -benchtime 800x ./test/e2e
	go test -run '^$$' -bench IdleInbox -benchtime 2000x ./test/e2e
	node test/bench.mjs bin/postern 20 $(DENSITY)

FUZZTIME ?= 10s
fuzz:
	test/fuzz $(FUZZTIME)

# Boots of the base template, PARALLEL at a time. Of each that hangs, what it was
# doing is in .soakboot.
BOOTS ?= 3000
LOAD ?= 24
PARALLEL ?= 6
soak-boot: template
	go build -o bin/soakboot ./test/soakboot
	nice bin/soakboot -boots $(BOOTS) -load $(LOAD) -parallel $(PARALLEL) -out .soakboot \
		-rootfs "$$(ls -td $(POSTERN_CACHE)/templates/base-*/rootfs | head -n 1)"

clean:
	rm -rf bin .demo .soakboot cmd/postern/guestbin/postern-guest
