package registry_test

import (
	"bytes"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/publicnet"
	"postern/internal/registry"
	"postern/internal/registry/registrytest"
)

// config allows the registries on loopback at hosts and refuses other private
// addresses, as the server does.
func config(t testing.TB, hosts ...string) registry.Config {
	t.Helper()
	c := registry.Config{Dir: t.TempDir()}
	for _, open := range []bool{false, true} {
		g, err := publicnet.NewGuard(open)
		if err != nil {
			t.Fatal(err)
		}
		dial := g.Dial(&net.Resolver{PreferGo: true}, 5*time.Second)
		if open {
			c.DialAllowed = dial
		} else {
			c.Dial = dial
		}
	}
	for _, h := range hosts {
		c.Allow = append(c.Allow, "http://"+h)
	}
	return c
}

func newPuller(t testing.TB, c registry.Config) *registry.Puller {
	t.Helper()
	p, err := registry.New(c)
	if err != nil {
		t.Fatal(err)
	}
	registry.Hurry(p)
	return p
}

func TestPullUnpacksAndVerifiesLayers(t *testing.T) {
	host := registrytest.Serve(t)
	one := registrytest.Layer(t, registrytest.File{Name: "etc/"}, registrytest.File{Name: "etc/os-release", Body: "ID=debian\n"})
	two := registrytest.Layer(t, registrytest.File{Name: "app", Body: strings.Repeat("x", 1<<20), Mode: 0o755})
	for _, compression := range []string{"gzip", "zstd", "none"} {
		t.Run(compression, func(t *testing.T) {
			p := newPuller(t, config(t, host))
			ref, digest := registrytest.Push(t, host, "team/app:"+compression, registrytest.Image{Layers: [][]byte{one, two}, Env: []string{"A=1"}, Compression: compression})
			var lines []string
			img, err := p.Pull(t.Context(), ref, registry.Credentials{}, func(s string) { lines = append(lines, s) })
			if err != nil {
				t.Fatal(err)
			}
			if img.Name != ref || img.Digest != digest || !slices.Equal(img.Env, []string{"A=1"}) || len(img.Layers) != 2 {
				t.Errorf("got %+v, want digest %s", img, digest)
			}
			for i, want := range [][]byte{one, two} {
				l := img.Layers[i]
				if got, err := os.ReadFile(l.Path); err != nil || !bytes.Equal(got, want) || l.DiffID != registrytest.Describe("", want).Digest || l.Size != int64(len(want)) {
					t.Errorf("layer %d: %+v has %d bytes (%v), want %d", i, l, len(got), err, len(want))
				}
			}
			if len(lines) != 4 {
				t.Errorf("progress %q, want 4 lines", lines)
			}
			if _, err := p.Pull(t.Context(), host+"/team/app@"+digest, registry.Credentials{}, nil); err != nil {
				t.Errorf("by its digest: %v", err)
			}
			if left, _ := os.ReadDir(filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(img.Layers[0].Path))), "tmp")); len(left) > 0 {
				t.Errorf("left in tmp: %v", left)
			}
		})
	}
}

// counter counts requests for blobs.
func counter(n *atomic.Int64) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
				n.Add(1)
				time.Sleep(10 * time.Millisecond) // others come meanwhile
			}
			h.ServeHTTP(w, r)
		})
	}
}

func TestParallelPullsFetchALayerOnce(t *testing.T) {
	var n atomic.Int64
	host := registrytest.Serve(t, counter(&n))
	p := newPuller(t, config(t, host))
	layer := registrytest.Layer(t, registrytest.File{Name: "a", Body: "shared"})
	var wg sync.WaitGroup
	for i := range 8 {
		ref, _ := registrytest.Push(t, host, "app"+string(rune('a'+i%2)), registrytest.Image{Layers: [][]byte{layer}})
		wg.Go(func() {
			if _, err := p.Pull(t.Context(), ref, registry.Credentials{}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// Eight configurations and one layer.
	if got := n.Load(); got != 9 {
		t.Errorf("%d blobs were fetched, want 9", got)
	}
}

// password wraps a registry that wants a user name and a password.
func password(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); r.Method != http.MethodPut && r.Method != http.MethodPost && (u != "ann" || p != "hunter2") {
			w.Header().Set("WWW-Authenticate", `Basic realm="team"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"go away"}]}`, http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func TestPrivateImagesNeedCredentials(t *testing.T) {
	host := registrytest.Serve(t, password)
	p := newPuller(t, config(t, host))
	ref, _ := registrytest.Push(t, host, "secret", registrytest.Image{Layers: [][]byte{registrytest.Layer(t, registrytest.File{Name: "a"})}})
	for name, c := range map[string]registry.Credentials{"none": {}, "wrong": {Username: "ann", Password: "wrong-pass"}} {
		_, err := p.Pull(t.Context(), ref, c, nil)
		if !errors.Is(err, registry.ErrDenied) || !strings.Contains(err.Error(), "401 Unauthorized UNAUTHORIZED") || strings.Contains(err.Error(), "wrong-pass") || strings.Contains(err.Error(), "go away") {
			t.Errorf("%s: %v, want ErrDenied with the status", name, err)
		}
	}
	if _, err := p.Pull(t.Context(), ref, registry.Credentials{Username: "ann", Password: "hunter2"}, nil); err != nil {
		t.Error(err)
	}
	// Now the layer is here, and still nobody gets it without the password.
	if _, err := p.Pull(t.Context(), ref, registry.Credentials{}, nil); !errors.Is(err, registry.ErrDenied) {
		t.Errorf("got %v, want ErrDenied", err)
	}
	if _, err := p.Pull(t.Context(), host+"/missing", registry.Credentials{Username: "ann", Password: "hunter2"}, nil); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}
