package registry_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/publicnet"
	"postern/internal/registry"
	"postern/internal/registry/registrytest"
)

const (
	public = "registry.example.com" // of a caller, who may be hostile
	ecr    = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"
)

// A world has hosts with public names, which are really on loopback. The package
// reaches them as it reaches the Internet: addresses of this machine are refused.
type world struct {
	config   registry.Config
	handlers map[string]http.Handler // by host

	mu   sync.Mutex
	seen []string // "HOST METHOD PATH AUTHORIZATION"
}

func newWorld(t *testing.T, handlers map[string]http.Handler) *world {
	t.Helper()
	w := &world{config: config(t), handlers: handlers}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		DNSNames: []string{"*.example.com", ecr, "api.ecr.eu-central-1.amazonaws.com"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	w.config.Roots = x509.NewCertPool()
	w.config.Roots.AddCert(cert)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.seen = append(w.seen, strings.Join([]string{r.Host, r.Method, r.URL.Path, r.Header.Get("Authorization")}, " "))
		h := w.handlers[strings.TrimSuffix(r.Host, ":443")]
		w.mu.Unlock()
		h.ServeHTTP(rw, r)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	s.StartTLS()
	t.Cleanup(s.Close)
	guarded := w.config.Dial
	w.config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if host, ok := strings.CutSuffix(address, ":443"); ok && w.handlers[host] != nil {
			var d net.Dialer
			return d.DialContext(ctx, network, s.Listener.Addr().String())
		}
		return guarded(ctx, network, address)
	}
	return w
}

func (w *world) saw(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Contains(strings.Join(w.seen, "\n"), text)
}

// content serves an image's parts.
func content(p registrytest.Parts) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			w.Write(p.Manifest)
			return
		}
		b, ok := p.Blobs[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		if !ok {
			http.Error(w, "{}", http.StatusNotFound)
			return
		}
		w.Write(b)
	})
}

func small(t *testing.T, body string) registrytest.Image {
	t.Helper()
	return registrytest.Image{Layers: [][]byte{registrytest.Layer(t, registrytest.File{Name: "a", Body: body})}}
}

func TestRegistriesCannotSendTheServerToOtherHosts(t *testing.T) {
	// What the operator allows to callers by its name, and must not be reached otherwise.
	var inside atomic.Int64
	internal := registrytest.Serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			inside.Add(1)
			h.ServeHTTP(w, r)
		})
	})
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inside.Add(1) }))
	defer other.Close()
	_, port, _ := net.SplitHostPort(internal)
	realm := func(u string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+u+`",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		})
	}
	redirect := func(u string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, u, http.StatusTemporaryRedirect) })
	}
	for name, h := range map[string]http.Handler{
		"token server at a cloud's metadata": realm("http://169.254.169.254/latest/meta-data/"),
		"the same with TLS":                  realm("https://169.254.169.254/latest/"),
		"token server on loopback":           realm("https://127.0.0.1:" + port + "/token"),
		"token server at an allowed host":    realm("http://" + internal + "/token"),
		"redirect to loopback":               redirect(other.URL + "/v2/"),
		"redirect to an allowed host":        redirect("http://" + internal + "/v2/x"),
		"redirect to IPv6":                   redirect("https://[::1]:443/"),
		"redirect to a mapped address":       redirect("https://[::ffff:127.0.0.1]:443/"),
		"redirect to a name of loopback":     redirect("https://localhost/"),
		"redirect to a file":                 redirect("file:///etc/passwd"),
		"redirect with a password":           redirect("https://a:b@registry.example.com/"),
		"redirect to itself":                 redirect("/v2/"),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, map[string]http.Handler{public: h})
			w.config.Allow = []string{"http://" + internal}
			before := inside.Load()
			_, err := newPuller(t, w.config).Pull(t.Context(), public+"/x", registry.Credentials{Username: "ann", Password: "hunter2"}, nil)
			if err == nil || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("got %v, want an error without the password", err)
			}
			if inside.Load() != before {
				t.Errorf("the server reached a host inside: %v", err)
			}
		})
	}
	for _, ref := range []string{"127.0.0.1/x", "localhost:443/x", "169.254.169.254/latest", "10.0.0.1:5000/x", "[::1]:443/x", other.Listener.Addr().String() + "/x"} {
		before := inside.Load()
		_, err := newPuller(t, config(t, internal)).Pull(t.Context(), ref, registry.Credentials{}, nil)
		if err == nil || inside.Load() != before {
			t.Errorf("%s: got %v, want it refused", ref, err)
		}
		if !errors.Is(err, publicnet.ErrRefused) && !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%s: %v, want a refusal", ref, err)
		}
	}
}

func TestAuthorizationStaysAtTheRegistry(t *testing.T) {
	parts := registrytest.Make(t, small(t, "x"))
	w := newWorld(t, map[string]http.Handler{
		"auth.example.com": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); u != "ann" || p != "hunter2" || r.FormValue("service") != `s, "t"` || r.FormValue("scope") != "repository:team/app:pull" || r.FormValue("a") != "b" {
				http.Error(w, "no", http.StatusForbidden)
				return
			}
			fmt.Fprint(w, `{"access_token":"tok"}`)
		}),
	})
	cdn := "cdn.example.com"
	w.handlers[cdn] = content(parts)
	w.handlers[public] = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer tok":
			rw.Header().Set("WWW-Authenticate", `Basic realm="old", Bearer realm="https://auth.example.com/token?a=b",service="s, \"t\"",scope="x"`)
			rw.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(rw, r, "https://"+cdn+r.URL.Path, http.StatusFound)
		default:
			content(parts).ServeHTTP(rw, r)
		}
	})
	if _, err := newPuller(t, w.config).Pull(t.Context(), public+"/team/app:1", registry.Credentials{Username: "ann", Password: "hunter2"}, nil); err != nil {
		t.Fatal(err)
	}
	for _, line := range w.seen {
		if f := strings.SplitN(line, " ", 4); strings.HasPrefix(f[0], cdn) && f[3] != "" {
			t.Errorf("the CDN got %q", line)
		}
	}
	if !w.saw(cdn) {
		t.Error("nothing came from the CDN")
	}
	_, err := newPuller(t, w.config).Pull(t.Context(), public+"/team/other", registry.Credentials{Username: "ann", Password: "hunter2"}, nil)
	if !errors.Is(err, registry.ErrDenied) || !strings.Contains(err.Error(), "403 Forbidden") {
		t.Errorf("got %v, want the token server's refusal", err)
	}
}

func TestCloudCredentialsGoToTheirCloudAlone(t *testing.T) {
	aws := registry.Credentials{AWSKeyID: "AKIDEXAMPLEAKIDEXAMP", AWSSecret: "s3cr3t", AWSRegion: "eu-central-1"}
	gcp := registry.Credentials{GCPKey: `{"type":"service_account","private_key":"s3cr3t"}`}
	w := newWorld(t, map[string]http.Handler{public: http.NotFoundHandler(), "evil.example.com": http.NotFoundHandler()})
	p := newPuller(t, w.config)
	for ref, c := range map[string]registry.Credentials{
		public + "/a":                                      aws,
		public + "/b":                                      gcp,
		"evil.example.com:443/" + ecr + "/app":             aws,
		ecr + ".evil.example.com/app":                      aws,
		"123456789012.dkr.ecr.us-east-1.amazonaws.com/app": aws,
		"gcr.io.example.com/app":                           gcp,
		public + "/c":                                      {Username: "a", GCPKey: "{}"},
		public + "/d":                                      {Username: "a:b", Password: "c"},
		public + "/e":                                      {GCPKey: "not json"},
		ecr + "/f":                                         {AWSKeyID: "a\r\nb: c", AWSSecret: "x", AWSRegion: "eu-central-1"},
		ecr + "/g":                                         {AWSKeyID: aws.AWSKeyID, AWSSecret: "x", AWSRegion: "x.evil.example.com/"},
	} {
		if _, err := p.Pull(t.Context(), ref, c, nil); !errors.Is(err, registry.ErrInvalid) || strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("%s: got %v, want ErrInvalid", ref, err)
		}
	}
	if len(w.seen) > 0 {
		t.Errorf("asked %q, want nothing", w.seen)
	}
}

func TestAmazonECR(t *testing.T) {
	parts := registrytest.Make(t, small(t, "x"))
	w := newWorld(t, map[string]http.Handler{
		"api.ecr.eu-central-1.amazonaws.com": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			a := r.Header.Get("Authorization")
			if string(b) != "{}" || r.Header.Get("X-Amz-Target") != "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken" || !strings.HasPrefix(a, "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLEAKIDEXAMP/") {
				http.Error(w, "{}", http.StatusBadRequest)
				return
			}
			fmt.Fprintf(w, `{"authorizationData":[{"authorizationToken":%q}]}`, base64.StdEncoding.EncodeToString([]byte("AWS:pass")))
		}),
		ecr: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); u != "AWS" || p != "pass" {
				w.Header().Set("WWW-Authenticate", `Basic realm="https://`+ecr+`/",service="ecr.amazonaws.com"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			content(parts).ServeHTTP(w, r)
		}),
	})
	img, err := newPuller(t, w.config).Pull(t.Context(), ecr+"/app:1", registry.Credentials{AWSKeyID: "AKIDEXAMPLEAKIDEXAMP", AWSSecret: "s3cr3t", AWSRegion: "eu-central-1"}, nil)
	if err != nil || len(img.Layers) != 1 {
		t.Errorf("got %+v, %v", img, err)
	}
}

// TestSignatureIsAWSs uses cases of AWS's Signature Version 4 test suite.
func TestSignatureIsAWSs(t *testing.T) {
	for _, c := range []struct{ contentType, body, want string }{
		{"", "", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
		{"application/x-www-form-urlencoded", "Param1=value1", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"},
	} {
		req := httptest.NewRequest(http.MethodPost, "https://example.amazonaws.com/", http.NoBody)
		if c.contentType != "" {
			req.Header.Set("Content-Type", c.contentType)
		}
		registry.SignV4(req, []byte(c.body), "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-east-1", "service", time.Date(2015, 8, 30, 12, 36, 0, 0, time.UTC))
		if got := req.Header.Get("Authorization"); !strings.HasSuffix(got, "Signature="+c.want) {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

// forged serves parts, but f may answer first. It returns what Pull says.
func forged(t *testing.T, parts registrytest.Parts, f func(w http.ResponseWriter, r *http.Request) bool, change func(*registry.Config)) error {
	t.Helper()
	w := newWorld(t, map[string]http.Handler{public: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f == nil || !f(w, r) {
			content(parts).ServeHTTP(w, r)
		}
	})})
	if change != nil {
		change(&w.config)
	}
	p := newPuller(t, w.config)
	_, err := p.Pull(t.Context(), public+"/x", registry.Credentials{}, nil)
	for _, d := range []string{"tmp", "blobs/sha256"} {
		if left, err := os.ReadDir(filepath.Join(w.config.Dir, d)); err != nil || len(left) > 0 {
			t.Errorf("%s holds %v, want nothing (%v)", d, left, err)
		}
	}
	return err
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// edit changes a manifest, whose own digest nobody has named.
func edit(t *testing.T, p registrytest.Parts, f func(m map[string]any)) registrytest.Parts {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(p.Manifest, &m); err != nil {
		t.Fatal(err)
	}
	f(m)
	p.Manifest = marshal(t, m)
	return p
}

func layerOf(m map[string]any) map[string]any { return m["layers"].([]any)[0].(map[string]any) }

func TestHostileImagesAreRefused(t *testing.T) {
	good := func() registrytest.Parts { return registrytest.Make(t, small(t, "x")) }
	blob := func(r *http.Request, d any) bool { return strings.HasSuffix(r.URL.Path, fmt.Sprint(d)) }
	var layer string
	edit(t, good(), func(m map[string]any) { layer = layerOf(m)["digest"].(string) })
	bomb := func(compression string) registrytest.Parts {
		return registrytest.Make(t, registrytest.Image{Layers: [][]byte{make([]byte, 64<<20)}, Compression: compression})
	}
	tiny := func(c *registry.Config) { c.MaxBytes = 1 << 20 }
	endless := func(w http.ResponseWriter) {
		for w := io.Writer(w); ; {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}
	// Each blob is right, and the configuration pairs them wrongly.
	lying := registrytest.Make(t, registrytest.Image{Layers: [][]byte{registrytest.Layer(t, registrytest.File{Name: "a", Body: "1"}), registrytest.Layer(t, registrytest.File{Name: "a", Body: "2"})}})
	lying = edit(t, lying, func(m map[string]any) {
		l := m["layers"].([]any)
		l[0], l[1] = l[1], l[0]
	})
	var junk bytes.Buffer
	z := gzip.NewWriter(&junk)
	z.Write([]byte("x"))
	z.Flush() // without its end
	damaged := good()
	d := registrytest.Describe("application/vnd.oci.image.layer.v1.tar+gzip", junk.Bytes())
	damaged.Blobs[d.Digest] = junk.Bytes()
	damaged = edit(t, damaged, func(m map[string]any) { m["layers"] = []any{d} })
	for _, c := range []struct {
		name   string
		parts  registrytest.Parts
		answer func(w http.ResponseWriter, r *http.Request) bool
		change func(*registry.Config)
		want   string
	}{
		{"other bytes", good(), func(w http.ResponseWriter, r *http.Request) bool {
			if !blob(r, layer) {
				return false
			}
			w.Write(bytes.Repeat([]byte("y"), len(good().Blobs[layer])))
			return true
		}, nil, "do not match"},
		{"fewer bytes", good(), func(w http.ResponseWriter, r *http.Request) bool {
			if !blob(r, layer) {
				return false
			}
			w.Write(good().Blobs[layer][:20])
			return true
		}, nil, "ended early"},
		{"more bytes", good(), func(w http.ResponseWriter, r *http.Request) bool {
			if !blob(r, layer) {
				return false
			}
			endless(w)
			return true
		}, nil, "larger than the manifest"},
		{"endless manifest", good(), func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			endless(w)
			return true
		}, nil, "larger than 4194304 bytes"},
		{"endless refusal", good(), func(w http.ResponseWriter, r *http.Request) bool {
			w.WriteHeader(http.StatusTeapot)
			endless(w)
			return true
		}, nil, "418"},
		{"gzip bomb", bomb("gzip"), nil, tiny, "more than 1048576 bytes"},
		{"zstd bomb", bomb("zstd"), nil, tiny, "more than 1048576 bytes"},
		{"damaged", damaged, nil, nil, "damaged"},
		{"lying configuration", lying, nil, nil, "does not contain the layer"},
		{"a million layers", edit(t, good(), func(m map[string]any) {
			l := make([]any, 1_000_000)
			for i := range l {
				l[i] = layerOf(m)
			}
			m["layers"] = l
		}), nil, nil, "larger than"},
		{"200 layers", edit(t, good(), func(m map[string]any) {
			l := make([]any, 200)
			for i := range l {
				l[i] = layerOf(m)
			}
			m["layers"] = l
		}), nil, nil, "200 layers"},
		{"four megabytes of nothing", registrytest.Parts{Manifest: []byte(`{"schemaVersion":2,"layers":[` + strings.Repeat("{},", 1<<20) + "{}]}")}, nil, nil, "parts"},
		{"foreign layer", edit(t, good(), func(m map[string]any) {
			layerOf(m)["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
		}), nil, nil, "not a tar archive"},
		{"layer elsewhere", edit(t, good(), func(m map[string]any) { layerOf(m)["urls"] = []string{"https://127.0.0.1/"} }), nil, nil, "external URLs"},
		{"no size", edit(t, good(), func(m map[string]any) { layerOf(m)["size"] = -1 }), nil, nil, "size"},
		{"digest that is a path", edit(t, good(), func(m map[string]any) { layerOf(m)["digest"] = "sha256:../../../../etc/passwd" }), nil, nil, "malformed"},
		{"other digest algorithm", edit(t, good(), func(m map[string]any) { layerOf(m)["digest"] = "md5:d41d8cd98f00b204e9800998ecf8427e" }), nil, nil, "malformed"},
		{"artifact", edit(t, good(), func(m map[string]any) {
			m["config"].(map[string]any)["mediaType"] = "application/vnd.cncf.helm.config.v1+json"
		}), nil, nil, "not a container image"},
		{"schema 1", edit(t, good(), func(m map[string]any) {
			m["schemaVersion"], m["mediaType"] = 1, "application/vnd.docker.distribution.manifest.v1+json"
		}), nil, nil, "obsolete"},
		{"index and manifest", edit(t, good(), func(m map[string]any) { m["manifests"] = []any{} }), nil, nil, "also an index"},
		{"other machine", registrytest.Make(t, registrytest.Image{Arch: "s390x"}), nil, nil, "s390x"},
		{"environment with NUL", registrytest.Make(t, registrytest.Image{Env: []string{"A=\x00"}}), nil, nil, "NAME=value"},
		{"environment of a megabyte", registrytest.Make(t, registrytest.Image{Env: []string{"A=" + strings.Repeat("x", 1<<20)}}), nil, nil, "bytes of them"},
		{"disk without space", good(), nil, func(c *registry.Config) { c.KeepFreeMB = 1 << 40 }, "free"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := forged(t, c.parts, c.answer, c.change)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err != nil && len(err.Error()) > 1000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestIndexesEndInAManifest(t *testing.T) {
	index := func(ds ...registrytest.Descriptor) []byte {
		return marshal(t, map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": ds})
	}
	parts := registrytest.Make(t, small(t, "x"))
	manifests := map[string][]byte{}
	w := newWorld(t, map[string]http.Handler{public: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b, ok := manifests[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]; ok {
			w.Write(b)
			return
		}
		content(parts).ServeHTTP(w, r)
	})})
	p := newPuller(t, w.config)
	d := registrytest.Describe("application/vnd.oci.image.manifest.v1+json", parts.Manifest)
	manifests[d.Digest] = parts.Manifest
	other := d
	other.Digest, other.Platform = "sha256:"+strings.Repeat("0", 64), map[string]string{"os": "linux", "architecture": "s390x"}
	attestation := other
	attestation.Platform = map[string]string{"os": "unknown", "architecture": "unknown"}
	b := index(attestation, other, d)
	for depth := 1; depth <= 6; depth++ {
		manifests["tag"] = b
		img, err := p.Pull(t.Context(), public+"/app:tag", registry.Credentials{}, nil)
		if depth <= 2 && (err != nil || img.Digest != d.Digest) {
			t.Errorf("%d indexes: got %v, %v, want %s", depth, img.Digest, err, d.Digest)
		}
		if depth > 2 && !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%d indexes: got %v, want ErrInvalid", depth, err)
		}
		next := registrytest.Describe("application/vnd.oci.image.index.v1+json", b)
		manifests[next.Digest] = b
		b = index(next)
	}
	manifests["other"] = index(other)
	if _, err := p.Pull(t.Context(), public+"/app:other", registry.Credentials{}, nil); !errors.Is(err, registry.ErrInvalid) || !strings.Contains(err.Error(), "s390x") {
		t.Errorf("got %v, want the platforms that there are", err)
	}
	if _, err := p.Pull(t.Context(), public+"/app@sha256:"+strings.Repeat("1", 64), registry.Credentials{}, nil); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("another manifest than was asked for: got %v, want ErrInvalid", err)
	}
}

// TestNobodyGetsAPrivateLayerByItsDigest: a layer that is here is for those to whom a
// registry gives it. An attacker who knows its digest names it in his own manifest.
func TestNobodyGetsAPrivateLayerByItsDigest(t *testing.T) {
	parts := registrytest.Make(t, small(t, "the plan"))
	// config serves an image without its layers, and says that it has them.
	config := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for digest, b := range parts.Blobs {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, digest) && !json.Valid(b) {
				http.NotFound(w, r)
				return
			}
		}
		content(parts).ServeHTTP(w, r)
	})
	w := newWorld(t, map[string]http.Handler{
		public: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasPrefix(r.URL.Path, "/v2/team/"):
				password(content(parts)).ServeHTTP(w, r)
			case r.Method == http.MethodHead:
				http.NotFound(w, r)
			default: // a repository of the attacker's at the same registry
				config.ServeHTTP(w, r)
			}
		}),
		"evil.example.com": config,
	})
	p := newPuller(t, w.config)
	ann := registry.Credentials{Username: "ann", Password: "hunter2"}
	if _, err := p.Pull(t.Context(), public+"/team/secret", ann, nil); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{public + "/mallory/x", "evil.example.com/x"} {
		if _, err := p.Pull(t.Context(), ref, registry.Credentials{}, nil); !errors.Is(err, registry.ErrNotFound) {
			t.Errorf("%s: got %v, want ErrNotFound", ref, err)
		}
	}
	// Who may read it there gets it without another transfer.
	if _, err := p.Pull(t.Context(), public+"/team/copy", ann, nil); err != nil {
		t.Error(err)
	}
	if got := strings.Count(strings.Join(w.seen, "\n"), public+" GET /v2/team/copy/blobs"); got > 2 { // the configuration, challenged
		t.Errorf("%d transfers from the copy, want those of its configuration", got)
	}
}

func TestKilledPullsLeaveNothing(t *testing.T) {
	host := registrytest.Serve(t)
	c := config(t, host)
	ref, _ := registrytest.Push(t, host, "app", small(t, "x"))
	img, err := newPuller(t, c).Pull(t.Context(), ref, registry.Credentials{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Killed within a layer, and between a layer and its record.
	if err := os.WriteFile(filepath.Join(c.Dir, "tmp", "123"), make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	record := strings.TrimSuffix(img.Layers[0].Path, ".tar") + ".json"
	if err := os.Remove(record); err != nil {
		t.Fatal(err)
	}
	p := newPuller(t, c)
	if left, _ := os.ReadDir(filepath.Join(c.Dir, "tmp")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if _, err := p.Pull(t.Context(), ref, registry.Credentials{}, nil); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(record); err != nil {
		t.Error(err)
	}
}

func TestPruneKeepsWhatIsUsed(t *testing.T) {
	host := registrytest.Serve(t)
	p := newPuller(t, config(t, host))
	var images []registry.Image
	for _, tag := range []string{"kept", "old", "fresh"} {
		ref, _ := registrytest.Push(t, host, "app:"+tag, small(t, tag))
		img, err := p.Pull(t.Context(), ref, registry.Credentials{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, img)
	}
	long := time.Now().Add(-2 * time.Hour)
	for _, img := range images[:2] {
		if err := os.Chtimes(img.Layers[0].Path, long, long); err != nil {
			t.Fatal(err)
		}
	}
	gone, err := p.Prune(func(id string) bool { return id == images[0].Layers[0].DiffID })
	if err != nil || len(gone) != 1 || gone[0] != images[1].Layers[0].DiffID {
		t.Errorf("removed %v, %v, want %s", gone, err, images[1].Layers[0].DiffID)
	}
	if _, err := p.Pull(t.Context(), host+"/app:old", registry.Credentials{}, nil); err != nil {
		t.Error(err)
	}
}

func TestMirrorsStandForRegistriesWithoutCredentials(t *testing.T) {
	var asked atomic.Int64
	host := registrytest.Serve(t, counter(&asked))
	registrytest.Push(t, host, "cache/library/debian:12", small(t, "x"))
	w := newWorld(t, map[string]http.Handler{})
	w.config.Mirrors = map[string]string{"docker.io": "http://" + host + "/cache"}
	p := newPuller(t, w.config)
	if img, err := p.Pull(t.Context(), "debian:12", registry.Credentials{}, nil); err != nil || len(img.Layers) != 1 {
		t.Errorf("got %+v, %v", img, err)
	}
	before := asked.Load()
	w.handlers["index.docker.io"] = http.NotFoundHandler()
	if _, err := p.Pull(t.Context(), "debian:12", registry.Credentials{Username: "a", Password: "b"}, nil); err == nil || asked.Load() != before {
		t.Errorf("a pull with credentials asked the mirror: %v", err)
	}
}
