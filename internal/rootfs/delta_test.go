package rootfs_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/rootfs"
)

// clamp is the time of the tests' layers.
func clamp() time.Time { return time.Unix(1000, 0) }

// delta returns the layer between two upper layers.
func delta(t testing.TB, below *rootfs.Tree, before, after []entry) ([]byte, error) {
	t.Helper()
	var b bytes.Buffer
	upper := stored(t, archive(t, after...))
	earlier := stored(t, archive(t, before...))
	if before == nil {
		earlier = nil
	}
	digest, err := rootfs.Delta(&b, below, earlier, upper, clamp())
	if err != nil {
		return nil, err
	}
	if want := fmt.Sprintf("sha256:%x", sha256.Sum256(b.Bytes())); digest != want {
		t.Errorf("digest: got %s, want %s", digest, want)
	}
	return b.Bytes(), nil
}

// lines returns a line for each entry of a layer, in their order.
func lines(t testing.TB, layer []byte) []string {
	t.Helper()
	var got []string
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return got
		} else if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("%c %s %o %d", h.Typeflag, h.Name, h.Mode, h.ModTime.Unix())
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		if len(body) > 0 {
			line += " " + string(body)
		}
		if len(h.PAXRecords) > 0 {
			t.Errorf("%s: records %v", h.Name, h.PAXRecords)
		}
		got = append(got, line)
	}
}

func TestDeltaHoldsWhatChanged(t *testing.T) {
	base := []entry{
		dir("d"), file("d/a", "A"), file("d/b", "B"), dir("e"), file("e/x", "X"), dir("e/s"), file("e/s/y", "Y"),
		file("h1", "H"), hard("h2", "h1"), hard("h3", "h1"), link("l", "d"),
	}
	late := time.Unix(5000, 123)
	for _, tt := range []struct {
		name          string
		before, after []entry
		want          []string
	}{
		{"nothing", nil, []entry{dir(".")}, nil},
		{
			"new files, sorted, with clamped times", nil,
			[]entry{dir("."), file("./z", "Z").at(late), dir("./m").mode(0o700).at(late), file("./m/b", "1"), link("./m/a", "../x"), file("./m/su", "2").mode(0o6755)},
			[]string{"5 m/ 700 1000", "2 m/a 777 0 -> ../x", "0 m/b 644 7 1", "0 m/su 6755 7 2", "0 z 644 1000 Z"},
		},
		{"a directory of which only the time changed", nil, []entry{dir("./d").at(late), file("./d/a", "A")}, nil},
		{"a changed mode", nil, []entry{dir("d").mode(0o700), file("d/a", "A").mode(0o600)}, []string{"5 d/ 700 7", "0 d/a 600 7 A"}},
		{"a changed owner", nil, []entry{dir("d"), file("d/a", "A").owner(5, 0)}, []string{"0 d/a 644 7 A"}},
		{"a change of content alone", nil, []entry{dir("d"), file("d/a", "Z")}, []string{"0 d/a 644 7 Z"}},
		{"a deleted file", nil, []entry{dir("d"), whiteout("d/a")}, []string{"0 d/.wh.a 0 1000"}},
		{"a deleted directory", nil, []entry{whiteout("e")}, []string{"0 .wh.e 0 1000"}},
		{"a whiteout of what never was there", nil, []entry{dir("tmp"), whiteout("tmp/x7f3"), dir("d"), whiteout("d/sedA9x")}, []string{"5 tmp/ 755 7"}},
		{"a directory that was made anew", nil, []entry{opaque("e"), file("e/new", "N")}, []string{"0 e/new 644 7 N", "0 e/.wh.s 0 1000", "0 e/.wh.x 0 1000"}},
		{"a directory that became a file", nil, []entry{file("e", "E")}, []string{"0 e 644 7 E"}},
		{"a file that became a directory", nil, []entry{dir("d"), opaque("d/a"), file("d/a/b", "1")}, []string{"5 d/a/ 755 7", "0 d/a/b 644 7 1"}},
		{"made and changed since", []entry{file("n", "1")}, []entry{file("n", "2")}, []string{"0 n 644 7 2"}},
		{"made before", []entry{dir("m"), file("m/n", "1")}, []entry{dir("m"), file("m/n", "1")}, nil},
		{"made before, deleted since", []entry{dir("m"), file("m/n", "1")}, []entry{dir("m")}, []string{"0 m/.wh.n 0 1000"}},
		{"deleted before", []entry{whiteout("e")}, []entry{whiteout("e")}, nil},
		{"deleted before, made since", []entry{whiteout("e")}, []entry{file("e", "2")}, []string{"0 e 644 7 2"}},
		{"made anew in the same way", []entry{opaque("e")}, []entry{opaque("e")}, nil},
		{
			"new hard links, whichever name the archive has first", nil,
			[]entry{dir("m"), file("m/z", "L"), hard("m/a", "m/z"), hard("m/k", "m/z")},
			[]string{"5 m/ 755 7", "0 m/a 644 7 L", "1 m/k 644 7 -> m/a", "1 m/z 644 7 -> m/a"},
		},
		{
			"one more name of a file",
			[]entry{file("n", "1")},
			[]entry{file("n", "1"), hard("o", "n")},
			[]string{"0 n 644 7 1", "1 o 644 7 -> n"},
		},
		{"one of the names below changed", nil, []entry{file("h2", "new")}, []string{"0 h2 644 7 new"}},
		{"one of the names below is a copy now", nil, []entry{file("h2", "H")}, []string{"0 h2 644 7 H"}},
		{"one of the names below is gone", nil, []entry{whiteout("h1")}, []string{"0 .wh.h1 0 1000"}},
		{"pipes and devices", nil, []entry{entry{}.named("p").typed(tar.TypeFifo), entry{}.named("dev").typed(tar.TypeBlock)}, nil},
		{"attributes", nil, []entry{file("n", "1").record("SCHILY.xattr.user.x", "y")}, []string{"0 n 644 7 1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			below := made(t, base)
			was := listed(t, below)
			got, err := delta(t, below, tt.before, tt.after)
			if err != nil {
				t.Fatal(err)
			}
			// The order of names is what counts, whatever kind they are.
			if d := cmp.Diff(sorted(tt.want), sorted(lines(t, got))); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
			if d := cmp.Diff(was, listed(t, below)); d != "" {
				t.Errorf("the tree below changed (-want +got)\n%s", d)
			}
			// The layer on the earlier state gives the later one.
			layers := [][]entry{base}
			if tt.before != nil {
				layers = append(layers, tt.before)
			}
			tree, want := made(t, layers...), made(t, base, tt.after)
			if err := tree.Apply(stored(t, got), rootfs.Limits{}); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(untimed(listed(t, want)), untimed(listed(t, tree))); d != "" {
				t.Errorf("the layers give another tree (-want +got)\n%s", d)
			}
		})
	}
}

func sorted(list []string) map[string]bool {
	m := map[string]bool{}
	for _, l := range list {
		m[l] = true
	}
	return m
}

// untimed returns a list of files without their times.
func untimed(list map[string]string) map[string]string {
	for k, v := range list {
		f := strings.SplitN(v, " ", 4)
		f[2] = ""
		list[k] = strings.Join(f, " ")
	}
	return list
}

// TestDeltasOfTwoSandboxesAreEqual: gVisor writes entries in a random order, and each
// sandbox has its own identity and temporary names.
func TestDeltasOfTwoSandboxesAreEqual(t *testing.T) {
	const public = "-----BEGIN CERTIFICATE-----\npublic\n-----END CERTIFICATE-----\n"
	below := made(t, []entry{dir("etc"), dir("etc/ssl"), dir("etc/ssl/certs"), file("etc/ssl/certs/ca-certificates.crt", public), file("etc/machine-id", "old")})
	if err := below.Provision(); err != nil {
		t.Fatal(err)
	}
	layer := func(n int) []byte {
		ours := fmt.Sprintf("# Postern begins: the certificate authority of this sandbox.\nauthority %d\n# Postern ends.\n", n)
		list := []entry{
			dir("etc"), file("etc/hosts", fmt.Sprint("127.0.1.1 sandbox", n)), file("etc/hostname", fmt.Sprint("sandbox", n)), file("etc/machine-id", fmt.Sprint(n)),
			dir("etc/ssl"), dir("etc/ssl/certs"), file("etc/ssl/certs/ca-certificates.crt", public+ours), link("etc/ssl/certs/65ab4b79.0", "/x"),
			dir("etc/pki"), dir("etc/pki/tls"), dir("etc/pki/tls/certs"), file("etc/pki/tls/certs/ca-bundle.crt", "other\n"+ours+"more\n"),
			dir("usr"), dir("usr/local").mode(0o1775).owner(0, 1000), dir("usr/local/share").owner(1000, 1000), dir("usr/local/share/ca-certificates").owner(1000, 1000),
			file("usr/local/share/ca-certificates/postern.crt", ours),
			dir("run"), dir("run/postern"), file("run/postern/generation", fmt.Sprint(n)), dir("run/e2b"), file("run/e2b/.E2B_SANDBOX_ID", fmt.Sprint(n)),
			dir("var"), dir("var/log"), file("var/log/dpkg.log", time.Now().String()), dir("app"), file("app/a", "A").at(time.Now()), file("app/b", "B"), hard("app/c", "app/b"),
			dir("root"), dir("root/.npm"), dir("root/.npm/_logs"), file(fmt.Sprint("root/.npm/_logs/", n), "x"), dir("tmp").mode(0o1777), whiteout(fmt.Sprintf("tmp/pip-%d", n)), whiteout("etc/gone"),
		}
		rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		// A directory comes before what is in it, and a link after its file.
		slices.SortStableFunc(list, func(a, b entry) int {
			return strings.Count(strings.TrimSuffix(a.h.Name, "/"), "/") - strings.Count(strings.TrimSuffix(b.h.Name, "/"), "/")
		})
		var first, last []entry
		for _, e := range list {
			if e.h.Typeflag == tar.TypeLink {
				last = append(last, e)
			} else {
				first = append(first, e)
			}
		}
		got, err := delta(t, below, nil, append(first, last...))
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	a := layer(1)
	for n := range 20 {
		if b := layer(n + 2); !bytes.Equal(a, b) {
			t.Fatalf("(-one +other)\n%s", cmp.Diff(lines(t, a), lines(t, b)))
		}
	}
	want := []string{
		"5 app/ 755 7", "0 app/a 644 1000 A", "0 app/b 644 7 B", "1 app/c 644 7 -> app/b",
		"5 etc/pki/ 755 7", "5 etc/pki/tls/ 755 7", "5 etc/pki/tls/certs/ 755 7", "0 etc/pki/tls/certs/ca-bundle.crt 644 7 other\nmore\n",
		"5 root/ 755 7", "5 root/.npm/ 755 7", "5 var/log/ 755 7",
	}
	if d := cmp.Diff(want, lines(t, a)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestDeltaKeepsWhatPythonCompiled: it would compile again in each sandbox, as the time
// of the source is another one in the layer.
func TestDeltaKeepsWhatPythonCompiled(t *testing.T) {
	compiled := func(source uint32, flags byte) string {
		return "\xa7\r\r\n" + string([]byte{flags, 0, 0, 0}) + string(binary.LittleEndian.AppendUint32(nil, source)) + "size" + "code"
	}
	below := made(t, []entry{dir("lib"), file("lib/old.py", "O").at(time.Unix(7000, 0))})
	got, err := delta(t, below, nil, []entry{
		dir("lib"), dir("lib/__pycache__"), file("lib/new.py", "N").at(time.Unix(9000, 0)), file("lib/older.py", "N").at(time.Unix(500, 0)),
		file("lib/__pycache__/new.cpython-311.pyc", compiled(8999, 0)), file("lib/__pycache__/new.cpython-312.pyc", compiled(9000, 3)),
		file("lib/__pycache__/old.cpython-311.pyc", compiled(7000, 0)), file("lib/__pycache__/older.cpython-311.pyc", compiled(500, 0)),
		file("lib/__pycache__/no.pyc", "short"), file("lib/__pycache__/gone.pyc", compiled(9000, 0)), file("lib/new.pyc", compiled(9000, 0)),
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"5 lib/__pycache__/ 755 7",
		"0 lib/__pycache__/gone.pyc 644 7 " + compiled(9000, 0),
		"0 lib/__pycache__/new.cpython-311.pyc 644 7 " + compiled(1000, 0),
		"0 lib/__pycache__/new.cpython-312.pyc 644 7 " + compiled(9000, 3),
		"0 lib/__pycache__/no.pyc 644 7 short",
		"0 lib/__pycache__/old.cpython-311.pyc 644 7 " + compiled(7000, 0),
		"0 lib/__pycache__/older.cpython-311.pyc 644 7 " + compiled(500, 0),
		"0 lib/new.py 644 1000 N",
		"0 lib/new.pyc 644 7 " + compiled(9000, 0),
		"0 lib/older.py 644 500 N",
	}
	if d := cmp.Diff(want, lines(t, got)); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestDeltaCannotBeTricked: the agent makes files whose names mean something in layers.
func TestDeltaCannotBeTricked(t *testing.T) {
	base := []entry{dir("etc"), file("etc/passwd", "root:x:0:0::/:/bin/sh\n"), dir("secret")}
	for _, tt := range []struct {
		name  string
		after []entry
		want  string
	}{
		{"a file that is a whiteout", []entry{dir("etc"), file("etc/.wh.passwd", "")}, "begins with"},
		{"a directory that is a whiteout", []entry{dir("etc"), dir("etc/.wh.passwd"), file("etc/.wh.passwd/x", "")}, "begins with"},
		{"a file that makes its directory opaque", []entry{dir("etc"), file("etc/.wh..wh..opq", "")}, "begins with"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := delta(t, made(t, base), nil, tt.after); !errors.Is(err, rootfs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	for _, after := range [][]entry{
		{file("etc/new", "x")}, {file("a", "1"), file("a", "2")}, {link("etc", "/secret"), file("etc/x", "x")}, {whiteout("etc"), dir("etc")},
	} {
		if _, err := delta(t, made(t, base), nil, after); !errors.Is(err, rootfs.ErrInvalid) || !strings.Contains(err.Error(), "appears twice") {
			t.Errorf("%s: got %v", after[0].h.Name, err)
		}
	}
	t.Run("links where the guest's traces are", func(t *testing.T) {
		below := made(t, base)
		if err := below.Provision(); err != nil {
			t.Fatal(err)
		}
		was := listed(t, below)
		if _, err := delta(t, below, nil, []entry{link("etc", "/run/postern"), dir("run"), link("run/e2b", "/run/postern"), dir("run/postern"), file("run/postern/hosts", "x")}); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(was, listed(t, below)); d != "" {
			t.Errorf("the tree below changed (-want +got)\n%s", d)
		}
	})
}
