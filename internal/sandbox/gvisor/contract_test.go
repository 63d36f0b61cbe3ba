package gvisor

import (
	"context"
	"errors"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
)

func TestContract(t *testing.T) {
	needRoot(t)
	// Longer than the address of a socket may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 30))
	hosts := map[string]*host{}
	sandboxtest.Run(t, sandboxtest.Subject{
		Open: func(t *testing.T) sandbox.Runtime { return &preparing{Runtime: newRuntime(t, dir), t: t} },
		Spec: func(t *testing.T, id string) sandbox.Spec {
			h, link := newLink(t)
			hosts[id] = h
			s := specWith(t, link)
			s.ID = id
			return s
		},
		Inside: func(t *testing.T, id string) sandboxtest.Inside {
			hosts[id].doing = doing(newRuntime(t, dir), id)
			hosts[id].ping(t)
			return inside{t, hosts[id]}
		},
	})
}

// inside is a sandbox with the test's guest.
type inside struct {
	t *testing.T
	h *host
}

func (i inside) ask(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	return i.h.get(ctx, path)
}

func (i inside) run(args ...string) (string, error) {
	out, err := i.ask("/do?" + url.Values{"uid": {"0"}, "a": args}.Encode())
	if before, failed := strings.CutSuffix(out, "ended: exit status 1\n"); failed {
		return "", errors.New(before)
	}
	return out, err
}

func (i inside) Remember(v string) error {
	_, err := i.ask("/remember?" + url.Values{"v": {v}}.Encode())
	return err
}

func (i inside) Remembered() (string, error) { return i.ask("/remembered") }

func (i inside) Write(path, content string) error {
	if len(content) > 4096 { // more than fits into a request's first line
		_, err := i.run("fill", path, "1")
		return err
	}
	_, err := i.run("write", path, content)
	return err
}

func (i inside) Read(path string) (string, error) { return i.run("cat", path) }

func (i inside) Remove(path string) error {
	_, err := i.run("remove", path)
	return err
}

func (i inside) Hostname() (string, error) {
	out, err := i.run("hostname")
	return strings.TrimSpace(out), err
}
