// Package registrytest runs a registry of container images for tests, and makes images.
// The registry is that of go-containerregistry, on loopback and without TLS.
package registrytest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/klauspost/compress/zstd"
)

// Serve runs a registry until the test ends and returns its HOST:PORT. Each of wrap may
// wrap its handler.
func Serve(t testing.TB, wrap ...func(http.Handler) http.Handler) string {
	t.Helper()
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0))) //nolint:forbidigo // its type
	for _, w := range wrap {
		h = w(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// An Image is what Push makes an image of.
type Image struct {
	Layers [][]byte // tar archives, from the bottom up
	Env    []string // NAME=value
	// Compression of the layers: "gzip", which is also the empty value, "zstd" or "none".
	Compression string
	Arch        string // empty means this machine's
}

// File is one entry of a layer.
type File struct {
	Name, Body string
	Mode       int64 // 0 means 0644, or 0755 for directories, whose names end with "/"
	UID, GID   int
	Link       string // target of a symbolic link
}

// Layer returns a tar archive of files.
func Layer(t testing.TB, files ...File) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.Name, Mode: f.Mode, Uid: f.UID, Gid: f.GID, Size: int64(len(f.Body)), Typeflag: tar.TypeReg}
		switch {
		case f.Link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.Link
		case strings.HasSuffix(f.Name, "/"):
			h.Typeflag = tar.TypeDir
			if f.Mode == 0 {
				h.Mode = 0o755
			}
		case f.Mode == 0:
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.Body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A Descriptor is a blob or a manifest, as manifests name it.
type Descriptor struct {
	MediaType string            `json:"mediaType"`
	Digest    string            `json:"digest"`
	Size      int64             `json:"size"`
	Platform  map[string]string `json:"platform,omitempty"`
	URLs      []string          `json:"urls,omitempty"`
}

// Describe returns the descriptor of b.
func Describe(mediaType string, b []byte) Descriptor {
	sum := sha256.Sum256(b)
	return Descriptor{MediaType: mediaType, Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(b))}
}

// Compress returns b compressed, and the media type of such a layer.
func Compress(t testing.TB, b []byte, compression string) ([]byte, string) {
	t.Helper()
	var out bytes.Buffer
	switch compression {
	case "", "gzip":
		w := gzip.NewWriter(&out)
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes(), "application/vnd.oci.image.layer.v1.tar+gzip"
	case "zstd":
		w, err := zstd.NewWriter(&out)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return out.Bytes(), "application/vnd.oci.image.layer.v1.tar+zstd"
	case "none":
		return b, "application/vnd.oci.image.layer.v1.tar"
	}
	t.Fatalf("compression %q", compression)
	return nil, ""
}

// Parts are an image's blobs by digest, and its manifest.
type Parts struct {
	Manifest []byte
	Blobs    map[string][]byte
}

// Make returns the parts of an image.
func Make(t testing.TB, i Image) Parts {
	t.Helper()
	if i.Arch == "" {
		i.Arch = runtime.GOARCH
	}
	p := Parts{Blobs: map[string][]byte{}}
	layers, diffs := []Descriptor{}, []string{}
	for _, l := range i.Layers {
		b, kind := Compress(t, l, i.Compression)
		d := Describe(kind, b)
		p.Blobs[d.Digest] = b
		layers, diffs = append(layers, d), append(diffs, Describe("", l).Digest)
	}
	config := marshal(t, map[string]any{
		"os": "linux", "architecture": i.Arch, "config": map[string]any{"Env": i.Env},
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	})
	c := Describe("application/vnd.oci.image.config.v1+json", config)
	p.Blobs[c.Digest] = config
	p.Manifest = marshal(t, map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": c, "layers": layers,
	})
	return p
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Push pushes an image to the registry at host and returns its reference and the digest
// of its manifest. name is like "library/debian:12".
func Push(t testing.TB, host, name string, i Image) (ref, digest string) {
	t.Helper()
	repo, tag, ok := strings.Cut(name, ":")
	if !ok {
		tag = "latest"
	}
	p := Make(t, i)
	for digest, b := range p.Blobs {
		Put(t, "http://"+host+"/v2/"+repo+"/blobs/uploads/?digest="+digest, "", b)
	}
	PutManifest(t, host, repo, tag, "application/vnd.oci.image.manifest.v1+json", p.Manifest)
	return host + "/" + repo + ":" + tag, Describe("", p.Manifest).Digest
}

// PutManifest pushes a manifest or an index.
func PutManifest(t testing.TB, host, repo, tag, mediaType string, b []byte) {
	t.Helper()
	Put(t, "http://"+host+"/v2/"+repo+"/manifests/"+tag, mediaType, b)
}

// Put sends b to url: with PUT if there is a media type, and else with POST.
func Put(t testing.TB, url, mediaType string, b []byte) {
	t.Helper()
	method := http.MethodPut
	if mediaType == "" {
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", mediaType)
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode >= 300 {
		text, _ := io.ReadAll(res.Body)
		t.Fatalf("%s %s: %s %s", method, url, res.Status, text)
	}
}
