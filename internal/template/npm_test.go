package template

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// npmArchive returns an archive of entries.
func npmArchive(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write([]byte("text")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// npmCases are archives, and whether they may be unpacked.
func npmCases(t testing.TB) map[string]struct {
	archive []byte
	good    bool
} {
	t.Helper()
	a := func(h ...tar.Header) []byte {
		return npmArchive(t, append([]tar.Header{{Name: "package/bin/x", Mode: 0o4755}}, h...)...)
	}
	return map[string]struct {
		archive []byte
		good    bool
	}{
		"a package":                  {a(tar.Header{Name: "package/README", Mode: 0o666}), true},
		"another first directory":    {npmArchive(t, tar.Header{Name: "other/bin/x"}), true},
		"attacker: above":            {a(tar.Header{Name: "package/../../etc/x"}), false},
		"attacker: absolute":         {a(tar.Header{Name: "/etc/x"}), false},
		"attacker: a link":           {a(tar.Header{Name: "package/bin/l", Typeflag: tar.TypeSymlink, Linkname: "/"}), false},
		"attacker: a hard link":      {a(tar.Header{Name: "package/bin/l", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}), false},
		"attacker: a device":         {a(tar.Header{Name: "package/bin/d", Typeflag: tar.TypeChar}), false},
		"attacker: the file twice":   {a(tar.Header{Name: "package/bin/x"}), false},
		"without what is asked for":  {npmArchive(t, tar.Header{Name: "package/bin/y"}), false},
		"not below a directory":      {npmArchive(t, tar.Header{Name: "x"}), false},
		"not an archive":             {[]byte("x"), false},
		"the end is missing":         {a()[:20], false},
		"a similar name is not it":   {npmArchive(t, tar.Header{Name: "package/bin/xy"}), false},
		"attacker: through its name": {npmArchive(t, tar.Header{Name: "package/bin/x/../../../y"}), false},
	}
}

func TestNPMArchivesAreConfined(t *testing.T) {
	for name, tt := range npmCases(t) {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			at := filepath.Join(dir, "root")
			// The attacker's package wrote through a link that another one has made.
			write(t, filepath.Join(at, "usr/keep"), "")
			root, err := os.OpenRoot(at)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			n := npmPackage{Package: "x", Files: map[string]string{"bin/x": "/usr/bin/x"}}
			if err := unpackNPM(root, bytes.NewReader(tt.archive), n); (err == nil) != tt.good {
				t.Errorf("got %v, want success: %v", err, tt.good)
			}
			if tt.good {
				i, err := root.Lstat("usr/bin/x")
				if err != nil || i.Size() != 4 || i.Mode()&^0o111 != 0o644 {
					t.Errorf("got %v, %v, want a file that is not setuid", i, err)
				}
			}
			if es, err := os.ReadDir(dir); err != nil || len(es) != 1 {
				t.Errorf("outside: got %v, %v", es, err)
			}
		})
	}
	t.Run("a link in the way", func(t *testing.T) {
		at, outside := t.TempDir(), t.TempDir()
		if err := os.Symlink(outside, filepath.Join(at, "usr")); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(at)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		n := npmPackage{Package: "x", Files: map[string]string{"bin/x": "/usr/bin/x"}}
		if err := unpackNPM(root, bytes.NewReader(npmArchive(t, tar.Header{Name: "package/bin/x"})), n); err == nil {
			t.Error("got no error")
		}
		if es, err := os.ReadDir(outside); err != nil || len(es) != 0 {
			t.Errorf("outside: got %v, %v", es, err)
		}
	})
}

// TestNPMPackagesArePinned: whatever the registry serves, only the archive of the
// definition's digest is unpacked.
func TestNPMPackagesArePinned(t *testing.T) {
	c, _ := newCache(t, t.TempDir(), "guest")
	served := npmArchive(t, tar.Header{Name: "package/bin/x", Mode: 0o755})
	bin := t.TempDir()
	write(t, filepath.Join(bin, "served"), string(served))
	// In npm's place.
	write(t, filepath.Join(bin, "npm"), "#!/bin/sh\nfor a; do case $a in --pack-destination=*) cp "+bin+"/served \"${a#*=}/x-1.0.0.tgz\";; esac; done\n[ \"$a\" = @x/x@1.0.0 ]\n")
	if err := os.Chmod(filepath.Join(bin, "npm"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	sum := sha512.Sum512(served)
	n := npmPackage{Package: "@x/x", Version: "1.0.0", Integrity: "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}
	f, err := c.fetchNPM(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	kept := filepath.Join(c.cfg.Dir, "npm", hex.EncodeToString(sum[:16])+".tgz")
	if b, err := os.ReadFile(kept); err != nil || !bytes.Equal(b, served) {
		t.Errorf("kept: got %d bytes, %v", len(b), err)
	}
	// From the cache, but not what somebody has put there.
	write(t, filepath.Join(bin, "served"), "another archive")
	if f, err = c.fetchNPM(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	f.Close()
	write(t, kept, "another archive")
	if _, err := c.fetchNPM(t.Context(), n); err == nil || !strings.Contains(err.Error(), "SHA-512") {
		t.Errorf("another archive: got %v, want it refused", err)
	}
	if es, err := filepath.Glob(filepath.Join(c.cfg.Dir, "npm", "fetch-*")); err != nil || len(es) != 0 {
		t.Errorf("left: got %v, %v", es, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.fetchNPM(ctx, n); err == nil {
		t.Error("canceled: got no error")
	}
	n.Version = "2.0.0"
	if _, err := c.fetchNPM(t.Context(), n); err == nil || !strings.Contains(err.Error(), "npm pack @x/x@2.0.0") {
		t.Errorf("a version that is not there: got %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := c.fetchNPM(t.Context(), n); err == nil || !strings.Contains(err.Error(), "install Node") {
		t.Errorf("no npm: got %v, want it to say what to install", err)
	}
}

func FuzzNPM(f *testing.F) {
	for _, tt := range npmCases(f) {
		f.Add(tt.archive)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "root"), 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(filepath.Join(dir, "root"))
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		// An error is right for most; nothing may be outside.
		_ = unpackNPM(root, bytes.NewReader(b), npmPackage{Files: map[string]string{".": "/usr"}})
		if es, err := os.ReadDir(dir); err != nil || len(es) != 1 {
			t.Fatalf("outside: got %v, %v", es, err)
		}
	})
}
