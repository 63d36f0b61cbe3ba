package registry_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/registry"
	"postern/internal/registry/registrytest"
)

// layout returns the files of an OCI layout of an image.
func layout(t testing.TB, i registrytest.Image) (files map[string][]byte, digest string) {
	t.Helper()
	p := registrytest.Make(t, i)
	d := registrytest.Describe("application/vnd.oci.image.manifest.v1+json", p.Manifest)
	files = map[string][]byte{
		"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`),
		"index.json": []byte(`{"schemaVersion":2,"manifests":[{"mediaType":"` + d.MediaType + `","digest":"` + d.Digest + `","size":` + itoa(d.Size) + `,"annotations":{"org.opencontainers.image.ref.name":"app:1"}}]}`),
	}
	for digest, b := range p.Blobs {
		files["blobs/sha256/"+strings.TrimPrefix(digest, "sha256:")] = b
	}
	files["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")] = p.Manifest
	return files, d.Digest
}

func itoa(n int64) string {
	var b []byte
	for ; n > 0; n /= 10 {
		b = append([]byte{byte('0' + n%10)}, b...)
	}
	return string(b)
}

// saved returns the entries of a file of docker save before version 25, in which a layer
// that two images share is a link.
func saved(t testing.TB) []tarEntry {
	t.Helper()
	layer := registrytest.Layer(t, registrytest.File{Name: "a", Body: "x"})
	config := []byte(`{"os":"linux","config":{"Env":["A=1"]},"rootfs":{"type":"layers","diff_ids":["` + registrytest.Describe("", layer).Digest + `"]}}`)
	return []tarEntry{
		{"one/", "", nil},
		{"one/layer.tar", "", layer},
		{"two/layer.tar", "../one/layer.tar", nil},
		{"config.json", "", config},
		{"manifest.json", "", []byte(`[{"Config":"config.json","RepoTags":["app:1"],"Layers":["one/layer.tar"]},{"Config":"config.json","RepoTags":null,"Layers":["two/layer.tar"]}]`)},
	}
}

type tarEntry struct {
	name, link string
	body       []byte
}

func archive(t testing.TB, entries []tarEntry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: 0o644, Size: int64(len(e.body)), Typeflag: tar.TypeReg}
		if e.link != "" {
			h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
		} else if strings.HasSuffix(e.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func write(t testing.TB, b []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestImportTakesLayoutsAndSavedImages(t *testing.T) {
	image := registrytest.Image{Layers: [][]byte{registrytest.Layer(t, registrytest.File{Name: "a", Body: "x"})}, Env: []string{"A=1"}}
	files, digest := layout(t, image)
	dir := t.TempDir()
	var entries []tarEntry
	for name, b := range files {
		entries = append(entries, tarEntry{"./" + name, "", b})
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	zipped, _ := registrytest.Compress(t, archive(t, entries), "gzip")
	p := newPuller(t, config(t))
	for name, c := range map[string]struct {
		path, digest string
		images       int
	}{
		"layout":         {dir, digest, 1},
		"layout archive": {write(t, archive(t, entries)), digest, 1},
		"compressed":     {write(t, zipped), digest, 1},
		"docker save":    {write(t, archive(t, saved(t))), "", 2},
	} {
		got, err := p.Import(t.Context(), c.path)
		if err != nil || len(got) != c.images || got[0].Name != "app:1" || len(got[0].Layers) != 1 || c.digest != "" && got[0].Digest != c.digest || len(got[0].Env) != 1 {
			t.Errorf("%s: got %+v, %v", name, got, err)
			continue
		}
		if b, err := os.ReadFile(got[0].Layers[0].Path); err != nil || !bytes.Equal(b, image.Layers[0]) {
			t.Errorf("%s: its layer has %d bytes, %v", name, len(b), err)
		}
	}
}

func TestImportRefusesHostileArchives(t *testing.T) {
	p := newPuller(t, config(t))
	one := func(e ...tarEntry) []byte { return archive(t, e) }
	manifest := func(config, layer string) tarEntry {
		return tarEntry{"manifest.json", "", []byte(`[{"Config":"` + config + `","Layers":["` + layer + `"]}]`)}
	}
	good := saved(t)
	for name, b := range map[string][]byte{
		"name that leads out":   one(tarEntry{"../evil", "", nil}),
		"absolute name":         one(tarEntry{"/etc/passwd", "", nil}),
		"twice":                 one(good[3], good[3]),
		"circle of links":       one(tarEntry{"a", "b", nil}, tarEntry{"b", "a", nil}, manifest("a", "b")),
		"link that leads out":   one(tarEntry{"a", "../../../../etc/passwd", nil}, manifest("a", "a")),
		"configuration outside": one(manifest("/etc/passwd", "/etc/passwd")),
		"missing layer":         one(good[3], manifest("config.json", "three/layer.tar")),
		"other layer":           one(good[3], tarEntry{"l", "", []byte("y")}, manifest("config.json", "l")),
		"nothing":               one(),
		"empty":                 nil,
		"text":                  []byte(strings.Repeat("text ", 1000)),
		"cut off":               archive(t, good)[:1000],
	} {
		if got, err := p.Import(t.Context(), write(t, b)); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%s: got %v, %v, want ErrInvalid", name, got, err)
		}
	}
	// In a directory, links that lead out of it.
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "index.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Import(t.Context(), dir); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
}

func FuzzImport(f *testing.F) {
	f.Add(archive(f, saved(f)))
	files, _ := layout(f, registrytest.Image{Layers: [][]byte{registrytest.Layer(f, registrytest.File{Name: "a"})}})
	var entries []tarEntry
	for name, b := range files {
		entries = append(entries, tarEntry{name, "", b})
	}
	f.Add(archive(f, entries))
	c := config(f)
	c.MaxBytes = 1 << 20
	p := newPuller(f, c)
	file := filepath.Join(f.TempDir(), "image.tar")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		images, err := p.Import(t.Context(), file)
		if err != nil && !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%v, want ErrInvalid", err)
		}
		for _, img := range images {
			for _, l := range img.Layers {
				if b, err := os.ReadFile(l.Path); err != nil || registrytest.Describe("", b).Digest != l.DiffID {
					t.Errorf("layer %+v holds other bytes (%v)", l, err)
				}
			}
		}
	})
}

func FuzzReference(f *testing.F) {
	for _, s := range []string{"debian:12", "a.example:5000/b/c@sha256:" + strings.Repeat("0", 64), "docker.io/library/x", "[::1]:5/x", "x\ny"} {
		f.Add(s, "user", "password", "", `{"type":"service_account"}`)
	}
	f.Fuzz(func(t *testing.T, ref, user, password, region, gcp string) {
		for _, c := range []registry.Credentials{{Username: user, Password: password}, {AWSKeyID: user, AWSSecret: password, AWSRegion: region}, {GCPKey: gcp}} {
			host, err := registry.Host(ref, c)
			if err != nil && !errors.Is(err, registry.ErrInvalid) {
				t.Errorf("%v, want ErrInvalid", err)
			}
			if strings.ContainsAny(host, "/@\\ \r\n\x00") {
				t.Errorf("%q is asked at %q", ref, host)
			}
		}
	})
}

func FuzzChallenges(f *testing.F) {
	f.Add(`Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a:pull", Basic realm=x`)
	f.Add(`Basic realm="a\"b`)
	f.Fuzz(func(t *testing.T, s string) {
		if n := registry.Challenges(s); n > len(s) {
			t.Errorf("%d challenges in %q", n, s)
		}
	})
}
