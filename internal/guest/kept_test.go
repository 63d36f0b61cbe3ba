package guest

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKeptFilesFollowTheirPath: a program of root put something else in place of a
// file that the guest has open. The next content goes where the path leads, and
// never to a file that has become somebody else's.
func TestKeptFilesFollowTheirPath(t *testing.T) {
	for name, attack := range map[string]func(path, elsewhere string) error{
		"nothing": func(string, string) error { return nil },
		"another file": func(path, _ string) error {
			return errors.Join(os.Rename(path, path+".old"), os.WriteFile(path, []byte("same length"), 0o644))
		},
		"removed": func(path, _ string) error { return os.Remove(path) },
		"moved, and link": func(path, elsewhere string) error {
			return errors.Join(os.Rename(path, elsewhere), os.Symlink(elsewhere, path))
		},
		"another name": func(path, elsewhere string) error { return os.Link(path, elsewhere) },
		"given away":   func(path, _ string) error { return os.Chown(path, 1000, 1000) },
		"readable":     func(path, _ string) error { return os.Chmod(path, 0o666) },
		"longer":       func(path, _ string) error { return os.WriteFile(path, []byte("something longer"), 0o644) },
		"a directory":  func(path, _ string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o755)) },
	} {
		t.Run(name, func(t *testing.T) {
			var k keptFiles
			dir := t.TempDir()
			path, elsewhere := filepath.Join(dir, "file"), filepath.Join(dir, "elsewhere")
			if err := k.put(path, "same length", 0o644); err != nil {
				t.Fatal(err)
			}
			defer k.forget(path)
			if err := attack(path, elsewhere); err != nil {
				t.Fatal(err)
			}
			err := k.put(path, "SAME LENGTH", 0o644)
			if name == "a directory" {
				if err == nil {
					t.Error("a directory was replaced")
				}
				return
			}
			if got := readFile(t, path); err != nil || got != "SAME LENGTH" {
				t.Errorf("got %q, %v", got, err)
			}
			if b, err := os.ReadFile(elsewhere); !errors.Is(err, fs.ErrNotExist) && string(b) != "same length" {
				t.Errorf("the other name: got %q, %v, want that it was left alone", b, err)
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil || st.Mode != unix.S_IFREG|0o644 || st.Uid != uint32(os.Geteuid()) {
				t.Errorf("the file has mode %o and owner %d, %v", st.Mode, st.Uid, err)
			}
			if got, err := k.read(path); err != nil || string(got) != "SAME LENGTH" {
				t.Errorf("read: got %q, %v", got, err)
			}
		})
	}
}

// TestKeptTrustStoresFollowTheirName is the same for bundles of certificates.
func TestKeptTrustStoresFollowTheirName(t *testing.T) {
	public := newCertificate(t, "public")
	for name, attack := range map[string]func(tr trustStore, path string) error{
		"nothing": func(trustStore, string) error { return nil },
		"made anew": func(_ trustStore, path string) error {
			return errors.Join(os.WriteFile(path+".new", []byte(public), 0o644), os.Rename(path+".new", path))
		},
		"other content of the same length": func(_ trustStore, path string) error {
			return os.WriteFile(path, []byte(public+strings.Repeat("#", trustSize)), 0o644)
		},
		"another name": func(tr trustStore, path string) error { return os.Link(path, tr.path("/mnt/other")) },
		"a link to others": func(tr trustStore, path string) error {
			return errors.Join(os.Rename(path, tr.path("/mnt/other")), os.Symlink(tr.path("/mnt/other"), path))
		},
		"a pipe": func(_ trustStore, path string) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o644)) },
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTrust(t, map[string]string{"etc/ssl/certs/ca-certificates.crt": public, "mnt/x": ""})
			tr.kept = map[string]*keptFile{}
			tr.mustInstall(t, newCertificate(t, "first"))
			tr.mustInstall(t, newCertificate(t, "former"))
			if tr.kept[trustBundle] == nil || tr.kept[localCertificate] == nil {
				t.Error("nothing is kept")
			}
			path := tr.path(trustBundle)
			if err := attack(tr, path); err != nil {
				t.Fatal(err)
			}
			tr.mustInstall(t, newCertificate(t, "ours"))
			if b, err := os.ReadFile(tr.path("/mnt/other")); err == nil && !strings.Contains(names(t, string(b)), "former") {
				t.Errorf("the other name was written: %q", names(t, string(b)))
			}
			if fi := must(os.Lstat(path)); fi.Mode().IsRegular() && name != "another name" {
				if got := names(t, strings.ReplaceAll(readFile(t, path), strings.Repeat("#", trustSize), "")); got != "public ours" {
					t.Errorf("certificates %q", got)
				}
			}
			if got := names(t, readFile(t, tr.path(localCertificate))); got != "ours" {
				t.Errorf("certificates %q", got)
			}
		})
	}
}

// BenchmarkRestored is POST /init of a sandbox that was started from a snapshot as
// another one. Inside, count its system calls: strace -c -f.
func BenchmarkRestored(b *testing.B) {
	g := newRig(b)
	root := b.TempDir()
	if err := os.CopyFS(root+"/etc/ssl/certs", os.DirFS("/etc/ssl/certs")); err != nil {
		b.Log(err) // only links may be missing
	}
	g.s.trust.root = root
	g.s.conf.HostsFile = filepath.Join(root, "etc/hosts")
	certs := []string{newCertificate(b, "a"), newCertificate(b, "b")}
	key := testToken
	for i := 0; b.Loop(); i++ {
		next := strings.Repeat(string("0123456789"[i%10]), 64)
		body := must(json.Marshal(map[string]any{
			"envVars": map[string]string{}, "restored": true, "channelSHA256": hashOf(next), "sandboxID": "i" + next[:20], "templateID": "base", "authority": certs[i%2], "defaultUser": testUser,
		}))
		if code, text := g.ask(key, "POST", "/init", string(body)); code != 204 {
			b.Fatal(code, text)
		}
		key = next
	}
}
