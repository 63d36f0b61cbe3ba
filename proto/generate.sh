#!/bin/sh
# Writes the Go code of the .proto files into internal/guest. What it writes is
# committed; CI runs it and ends in `git diff --exit-code`. The plugins are
# pinned in tools/go.mod; protoc only parses (Debian's protobuf-compiler) and
# leaves no trace: the line with its version is taken out again.
set -eu
cd "$(dirname "$0")/.."
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for p in google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go; do
	go build -modfile=tools/go.mod -o "$bin/" "$p"
done
for name in process filesystem; do
	protoc -I proto \
		--plugin="$bin/protoc-gen-go" --plugin="$bin/protoc-gen-connect-go" \
		--go_out=. --go_opt=module=postern \
		--connect-go_out=. --connect-go_opt=module=postern,package_suffix= \
		"$name/$name.proto"
	sed -i '/^\/\/ \tprotoc  *v/d' "internal/guest/${name}pb/$name.pb.go"
done
