package guest

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type tarEntry struct {
	name, content, link string
	kind                byte
	mode                int64
}

func tarOf(t testing.TB, es ...tarEntry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range es {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		if e.mode == 0 {
			e.mode = 0o644
		}
		if err := w.WriteHeader(&tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: int64(len(e.content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// tree returns the files below a directory, with what is in them.
func tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		name := strings.TrimPrefix(p, dir+"/")
		switch d.Type() {
		case fs.ModeDir:
			out[name] = "/"
		case fs.ModeSymlink:
			to, err := os.Readlink(p)
			out[name] = "-> " + to
			return err
		default:
			b, err := os.ReadFile(p)
			out[name] = string(b)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestUnpackPutsFilesWhereCopyDoes: the rules of COPY for files, directories and names
// with a slash at the end.
func TestUnpackPutsFilesWhereCopyDoes(t *testing.T) {
	project := tarOf(t,
		tarEntry{name: "./app/", kind: tar.TypeDir, mode: 0o750}, tarEntry{name: "./app/main.py", content: "m", mode: 0o755}, tarEntry{name: "./app/lib/x", content: "x"},
		tarEntry{name: "./app/link", kind: tar.TypeSymlink, link: "../../etc/passwd"}, tarEntry{name: "./application", content: "no"})
	for name, tt := range map[string]struct {
		source, dest string
		want         map[string]string
	}{
		"a file to a path":           {"app/main.py", "/to/run.py", map[string]string{"to/run.py": "m"}},
		"a file into a directory":    {"app/main.py", "/to/", map[string]string{"to/main.py": "m"}},
		"a file into one that is":    {"app/main.py", "/there", map[string]string{"there/main.py": "m"}},
		"a file in a file's place":   {"app/main.py", "/there/old", map[string]string{"there/old": "m"}},
		"a directory's content":      {"app", "/to", map[string]string{"to/main.py": "m", "to/lib/x": "x", "to/link": "-> ../../etc/passwd"}},
		"merged into one that is":    {"./app/", "/there/", map[string]string{"there/main.py": "m", "there/old": "old", "there/lib/x": "x", "there/lib/y": "y"}},
		"everything":                 {".", "/to", map[string]string{"to/app/main.py": "m", "to/application": "no"}},
		"a name that begins as it":   {"application", "/to/", map[string]string{"to/application": "no"}},
		"a source that leads out":    {"../app/main.py", "/to/", map[string]string{"to/main.py": "m"}},
		"what lies below nothing is": {"app/lib", "/a/b/c", map[string]string{"a/b/c/x": "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for p, c := range map[string]string{"there/old": "old", "there/lib/y": "y"} {
				if err := os.MkdirAll(filepath.Join(root, filepath.Dir(p)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, p), []byte(c), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			u := unpacking{source: tt.source, dest: root + tt.dest, uid: os.Getuid(), gid: os.Getgid()}
			if err := u.run(bytes.NewReader(project)); err != nil {
				t.Fatal(err)
			}
			got := tree(t, root)
			for p, c := range tt.want {
				if got[p] != c {
					t.Errorf("%s: got %q, want %q", p, got[p], c)
				}
			}
			if tt.source != "." && got["to/application"] == "no" && tt.source != "application" {
				t.Error("it copied a neighbour")
			}
		})
	}
}

// hostile are archives that try to write out of their place.
func hostile(t testing.TB) map[string][]byte {
	return map[string][]byte{
		"dots":                  tarOf(t, tarEntry{name: "../evil", content: "x"}),
		"dots within":           tarOf(t, tarEntry{name: "a/../../evil", content: "x"}),
		"absolute":              tarOf(t, tarEntry{name: "/evil", content: "x"}),
		"through its link":      tarOf(t, tarEntry{name: "l", kind: tar.TypeSymlink, link: ".."}, tarEntry{name: "l/evil", content: "x"}),
		"through the image's":   tarOf(t, tarEntry{name: "out/evil", content: "x"}),
		"over the image's":      tarOf(t, tarEntry{name: "out", content: "x"}),
		"directory over a link": tarOf(t, tarEntry{name: "out", kind: tar.TypeDir}, tarEntry{name: "out/evil", content: "x"}),
		"hard link out":         tarOf(t, tarEntry{name: "h", kind: tar.TypeLink, link: "../secret"}, tarEntry{name: "h", content: "x"}),
		"hard link by a link":   tarOf(t, tarEntry{name: "l", kind: tar.TypeSymlink, link: "../secret"}, tarEntry{name: "h", kind: tar.TypeLink, link: "l"}),
		"hard link by out":      tarOf(t, tarEntry{name: "h", kind: tar.TypeLink, link: "out/secret"}),
		"device":                tarOf(t, tarEntry{name: "d", kind: tar.TypeChar}),
		"block device":          tarOf(t, tarEntry{name: "d", kind: tar.TypeBlock}),
		"pipe":                  tarOf(t, tarEntry{name: "p", kind: tar.TypeFifo}),
		"empty":                 tarOf(t),
		"no archive":            []byte(strings.Repeat("x", 1024)),
		"cut":                   tarOf(t, tarEntry{name: "f", content: strings.Repeat("x", 3000)})[:1500],
		"gzip of nothing":       {0x1f, 0x8b, 8},
	}
}

// unpackHostile unpacks an archive into a directory beside others and fails if anything
// outside of it has changed.
func unpackHostile(t testing.TB, source string, archive []byte) error {
	root, err := os.MkdirTemp("", "unpack-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	for _, d := range []string{"in", "beside"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../beside", filepath.Join(root, "in/out")); err != nil {
		t.Fatal(err)
	}
	u := unpacking{source: source, dest: filepath.Join(root, "in"), uid: os.Getuid(), gid: os.Getgid()}
	result := u.run(bytes.NewReader(archive))
	es, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(es) != 3 {
		t.Errorf("beside the place: %v", es)
	}
	if es, err := os.ReadDir(filepath.Join(root, "beside")); err != nil || len(es) > 0 {
		t.Errorf("it wrote through a link: %v, %v", es, err)
	}
	if b, err := os.ReadFile(filepath.Join(root, "secret")); err != nil || string(b) != "secret" {
		t.Errorf("a file outside: %q, %v", b, err)
	}
	err = filepath.WalkDir(filepath.Join(root, "in"), func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type()&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket) != 0 {
			t.Errorf("it made a device or a pipe: %s", p)
		}
		if err == nil && d.Type().IsRegular() {
			if b, err := os.ReadFile(p); err == nil && string(b) == "secret" {
				t.Errorf("it has a file from outside: %s", p)
			}
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return result
}

// TestUnpackStaysInItsPlace: no archive writes or links out of the place.
func TestUnpackStaysInItsPlace(t *testing.T) {
	harmless := map[string]bool{"absolute": true, "over the image's": true, "hard link by a link": true} // below the place; what is linked or replaced is the link itself
	for name, a := range hostile(t) {
		if err := unpackHostile(t, "", a); err == nil && !harmless[name] {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzUnpack(f *testing.F) {
	for _, a := range hostile(f) {
		f.Add("", a)
		f.Add("a", a)
	}
	f.Fuzz(func(t *testing.T, source string, archive []byte) {
		if len(archive) > 1<<16 || len(source) > 1<<10 {
			return
		}
		_ = unpackHostile(t, source, archive)
	})
}

// TestAddUserNeedsNoProgram: in an image with nothing but two files.
func TestAddUserNeedsNoProgram(t *testing.T) {
	root := t.TempDir()
	for p, c := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh", // no end of line
		"etc/group":  "root:x:0:\nuser:x:1000:\nstaff:x:50:\nextra:x:1001:\n", "etc/shadow": "root:*:1:0:99999:7:::\n", "etc/skel/.profile": "x", "bin/sh": "",
	} {
		if err := os.MkdirAll(filepath.Join(root, filepath.Dir(p)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, p), []byte(c), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		sudo bool
	}{{"worker", true}, {"worker", false}, {"staff", false}, {"user", true}} {
		if err := addUser(root, c.name, c.sudo); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
	}
	for name, want := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\nworker:x:1002:1002::/home/worker:/bin/sh\nstaff:x:1001:50::/home/staff:/bin/sh\n",
		"etc/group":  "root:x:0:\nuser:x:1000:\nstaff:x:50:\nextra:x:1001:\nworker:x:1002:\n",
		"etc/shadow": "root:*:1:0:99999:7:::\nworker:!:19000:0:99999:7:::\nstaff:!:19000:0:99999:7:::\n",

		"home/worker/.profile": "x", "etc/sudoers.d/postern-worker": "worker ALL=(ALL:ALL) NOPASSWD: ALL\n", "etc/sudoers.d/postern-user": "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
	} {
		if b, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(b) != want {
			t.Errorf("%s: got %q, %v, want %q", name, b, err, want)
		}
	}
	for _, bad := range []string{"", "Root", "a:b", "a\nb", "-a", "../x", "1001", strings.Repeat("a", 33)} {
		if err := addUser(root, bad, false); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
