package main

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

func digestOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func TestSavedNamesStayInTheirDirectory(t *testing.T) {
	for path, want := range map[string]string{
		"/work/out/report.csv":       "report.csv",
		"/work/../../etc/passwd":     "passwd",
		"/work/..":                   "artifact",
		"/":                          "artifact",
		"":                           "artifact",
		"/work/.bashrc":              "_bashrc",
		"/work/-rf":                  "_rf",
		"/work/a\\..\\b":             "a_.._b",
		"/work/a\nb\x1b[2J":          "a_b_[2J",
		"/work/invoice\u202efdp.exe": "invoice_fdp.exe",
		"/work/\xff\xfe.txt":         "__.txt",
		"/work/" + strings.Repeat("ü", 4096) + ".csv": strings.Repeat("ü", 98) + ".csv",
		"/work/数据.csv": "数据.csv",
	} {
		if got := savedName(path); got != want {
			t.Errorf("savedName(%q) = %q, want %q", path, got, want)
		}
	}
}

func FuzzSavedName(f *testing.F) {
	for _, s := range []string{"/work/report.csv", "../x", "/a/\x00", "/a/\u202e", "/" + strings.Repeat("x", 5000), "/a/~"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		name := savedName(path)
		if !filepath.IsLocal(name) || filepath.Base(name) != name || len(name) > maxSavedName || strings.HasPrefix(name, "-") || strings.HasPrefix(name, ".") || printable(name) != name {
			t.Errorf("savedName(%q) = %q", path, name)
		}
	})
}

func TestSaveKeepsWhatIsThereAndChecksTheDigest(t *testing.T) {
	dir, other := t.TempDir(), filepath.Join(t.TempDir(), "other")
	for _, name := range []string{filepath.Join(dir, "report.csv"), other} {
		if err := os.WriteFile(name, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(other, filepath.Join(dir, "link.csv")); err != nil {
		t.Fatal(err)
	}
	s, err := newSaver(dir, false)
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) string { return string(readFile(t, filepath.Join(dir, name))) }
	for _, name := range []string{"/work/report.csv", "/work/link.csv"} {
		if _, err := s.save(name, digestOf("new"), strings.NewReader("new")); err == nil || !strings.Contains(err.Error(), "--force") {
			t.Errorf("%s was overwritten without --force: %v", name, err)
		}
	}
	for _, c := range []struct{ path, name string }{{"/work/a.csv", "a.csv"}, {"/work/sub/a.csv", "2-a.csv"}, {"/work/../../b.csv", "b.csv"}} {
		if got, err := s.save(c.path, digestOf("new"), strings.NewReader("new")); err != nil || got != c.name || read(got) != "new" {
			t.Errorf("save %s: %q, %v, want %q", c.path, got, err, c.name)
		}
	}
	if _, err := s.save("/work/swapped", digestOf("approved"), strings.NewReader("other")); err == nil || !strings.Contains(err.Error(), "was approved") {
		t.Errorf("a file with another digest: %v", err)
	}
	if _, err := s.save("/work/half", digestOf("half"), iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader("half")))); err == nil {
		t.Error("half of a file was saved")
	}
	for _, name := range []string{"swapped", "half"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s was left behind", name)
		}
	}
	if s, err = newSaver(dir, true); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"report.csv", "link.csv"} {
		if _, err := s.save("/work/"+name, digestOf("new"), strings.NewReader("new")); err != nil || read(name) != "new" {
			t.Errorf("save %s with --force: %v", name, err)
		}
	}
	if string(readFile(t, other)) != "mine" {
		t.Error("--force wrote through a link")
	}
	if _, err := s.save("/work/report.csv", digestOf("x"), strings.NewReader("y")); err == nil || read("report.csv") != "new" {
		t.Errorf("a failed download replaced a file: %v", err)
	}
	err = fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if strings.HasPrefix(name, ".postern-") {
			t.Errorf("%s was left behind", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
