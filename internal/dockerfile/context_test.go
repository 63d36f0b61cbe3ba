package dockerfile_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/dockerfile"
)

// contextOf makes a directory. Names with a slash at the end are directories; the text "-> X"
// makes a symbolic link.
func contextOf(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "context")
	for name, text := range files {
		p := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(p), 0o755)
		to, isLink := strings.CutPrefix(text, "-> ")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(p, 0o755)
		case isLink:
			err = os.Symlink(to, p)
		default:
			err = os.WriteFile(p, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// packed returns what is in the archive of a source.
func packed(t *testing.T, dir, source string, limit int64) (names []string, raw string, err error) {
	t.Helper()
	c, err := dockerfile.OpenContext(dir, filepath.Join(dir, "Dockerfile"))
	if err != nil {
		return nil, "", err
	}
	defer c.Close()
	var b bytes.Buffer
	if source, err = dockerfile.Source(source); err == nil {
		err = c.Archive(t.Context(), &b, source, limit)
	}
	raw = b.String()
	for tr := tar.NewReader(&b); err == nil; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.TrimRight(fmt.Sprintf("%s %o %s", h.Name, h.Mode, string(text)+h.Linkname), " "))
	}
	return names, raw, err
}

func TestArchiveHasTheFilesOfItsSource(t *testing.T) {
	dir := contextOf(t, map[string]string{
		"Dockerfile": "FROM x", "a.txt": "a", "b.txt": "b", "page/index.html": "hi", "page/deep/x.txt": "x", "page/empty/": "",
		"page/here": "-> deep/x.txt", "page/none": "-> ../not/there", "alias": "-> page/deep", "all": "-> .", "page/secret.env": "key",
		"logs/1.log": "1", "logs/keep.log": "k", ".dockerignore": "# comment\n**/*.env\n/logs/\n!logs/keep.log\nall\n",
	})
	page := []string{"page/ 755", "page/deep/ 755", "page/deep/x.txt 644 x", "page/empty/ 755", "page/here 777 deep/x.txt", "page/index.html 644 hi", "page/none 777 ../not/there"}
	for source, want := range map[string][]string{
		"a.txt":         {"a.txt 644 a"},
		"/./a.txt":      {"a.txt 644 a"},
		"page/../a.txt": {"a.txt 644 a"},
		"page/":         page,
		"alias":         {"alias/ 755", "alias/x.txt 644 x"},
		"alias/x.txt":   {"alias/x.txt 644 x"},
		"*.txt":         {"a.txt 644 a", "b.txt 644 b"},
		"[a-b].*":       {"a.txt 644 a", "b.txt 644 b"},
		"pa?e":          page,
		"**/x.txt":      {"page/deep/x.txt 644 x"},
		"logs":          {"logs/keep.log 644 k"},
	} {
		got, _, err := packed(t, dir, source, 1<<20)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v (-want +got)\n%s", source, err, d)
		}
	}
	whole, _, err := packed(t, dir, ".", 1<<20)
	if err != nil || len(whole) != len(page)+6 {
		t.Errorf("all: %q, %v", whole, err)
	}
	for source, want := range map[string]error{
		"none": dockerfile.ErrNothing, "*.zip": dockerfile.ErrNothing, "page/secret.env": dockerfile.ErrNothing, "page/none": dockerfile.ErrNothing,
	} {
		if got, _, err := packed(t, dir, source, 1<<20); !errors.Is(err, want) {
			t.Errorf("%s: %q, %v, want %v", source, got, err, want)
		}
	}
	if _, _, err := packed(t, dir, "page", 2); !errors.Is(err, dockerfile.ErrTooLarge) {
		t.Errorf("three bytes where two are allowed: %v", err)
	}
	// The file beside the Dockerfile replaces that of the context, as in Docker.
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile.dockerignore"), []byte("page"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _, err := packed(t, dir, "page/secret.env", 1<<20); !errors.Is(err, dockerfile.ErrNothing) {
		t.Errorf("an excluded directory: %q, %v", got, err)
	}
	if got, _, err := packed(t, dir, "logs/1.log", 1<<20); err != nil || len(got) != 1 {
		t.Errorf("what only the other file excludes: %q, %v", got, err)
	}
}

// TestSameFilesGiveTheSameArchive: also elsewhere and at another time, so that the server
// finds their layer.
func TestSameFilesGiveTheSameArchive(t *testing.T) {
	files := map[string]string{"d/a": "a", "d/b/c": "c", "d/l": "-> a"}
	_, one, err := packed(t, contextOf(t, files), "d", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	other := contextOf(t, files)
	if err := os.Chtimes(filepath.Join(other, "d/a"), time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, two, err := packed(t, other, "d", 1<<20); err != nil || one != two {
		t.Errorf("the archives differ: %v", err)
	}
}

// TestContextKeepsOthersFilesOut: the context is a cloned repository whose author wants
// files of the person who builds it in the template: with "..", with links, with links in
// the way, and with what .dockerignore is.
func TestContextKeepsOthersFilesOut(t *testing.T) {
	const secret = "a-key-of-the-person"
	home := t.TempDir()
	if err := os.WriteFile(filepath.Join(home, "id_rsa"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(home, "keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	dir := contextOf(t, map[string]string{
		"ok/x": "x", "abs/key": "-> " + home + "/id_rsa", "rel/key": "-> ../../id_rsa", "far/deep/key": "-> ../../../../../../../../../../etc/passwd",
		"way": "-> " + home, "up": "-> ..", "chain/a": "-> b", "chain/b": "-> ../hop", "hop": "-> ../id_rsa", "loop": "-> loop",
		"dangling/key": "-> not/there/../../../../id_rsa", "inside/l": "-> ../up/id_rsa",
	})
	home2 := filepath.Dir(dir) // "up" and "rel" lead here
	if err := os.WriteFile(filepath.Join(home2, "id_rsa"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{
		"..", "../id_rsa", "/../id_rsa", "ok/../../id_rsa", "./../context/ok", "abs", "abs/key", "rel", "rel/key", "far", "far/deep/key", "way", "way/id_rsa", "way/keys",
		"up", "up/id_rsa", "up/context/ok", "chain", "chain/a", "hop", "dangling", "inside", ".", "*", "abs/*", "**/key",
	} {
		got, raw, err := packed(t, dir, source, 1<<20)
		if !errors.Is(err, dockerfile.ErrOutside) || strings.Contains(raw, secret) || strings.Contains(raw, "root:") {
			t.Errorf("%s: %q, %v, want ErrOutside", source, got, err)
		}
	}
	if got, raw, err := packed(t, dir, "way/*", 1<<20); !errors.Is(err, dockerfile.ErrNothing) || raw != "" {
		t.Errorf("a pattern through a link: %q, %v", got, err)
	}
	if got, _, err := packed(t, dir, "loop", 1<<20); err == nil {
		t.Errorf("a link to itself: %q", got)
	}
	if got, _, err := packed(t, dir, "ok", 1<<20); err != nil || len(got) != 2 {
		t.Errorf("a directory beside them: %q, %v", got, err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "ok/pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _, err := packed(t, dir, "ok", 1<<20); err == nil || !strings.Contains(err.Error(), "neither a file") {
		t.Errorf("a pipe: %q, %v", got, err)
	}
	if err := os.Symlink("../id_rsa", filepath.Join(dir, ".dockerignore")); err != nil {
		t.Fatal(err)
	}
	if got, _, err := packed(t, dir, "ok/x", 1<<20); err == nil || strings.Contains(err.Error(), secret) {
		t.Errorf("with .dockerignore elsewhere: %q, %v", got, err)
	}
}
