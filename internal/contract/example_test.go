package contract_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/contract"
)

// TestExamples checks the contracts of real jobs. Each must be valid and allow the
// command and the artifact of its row in the README. Its wider twin must be wider in
// the clause that the row names, and in no other.
func TestExamples(t *testing.T) {
	const dir = "../../examples/contracts/"
	read := func(name string) string {
		b, err := os.ReadFile(dir + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	jobs := 0
	for line := range strings.Lines(read("README.md")) {
		cells := strings.Split(strings.Trim(line, "|\n "), " | ")
		name, _, ok := strings.Cut(strings.TrimPrefix(cells[0], "["), "]")
		if len(cells) != 5 || !ok {
			continue
		}
		jobs++
		t.Run(name, func(t *testing.T) {
			c, twin := parse(t, read(name+".yaml")), parse(t, read(name+".wider.yaml"))
			if c.Name != name || twin.Name != name || len(c.Explain()) != 12 {
				t.Errorf("name %q and %q", c.Name, twin.Name)
			}
			args := strings.Fields(strings.Trim(cells[1], "`"))
			if m := c.Start(contract.Started{Path: "/usr/bin/" + args[0], Name: "/usr/bin/" + args[0], Dir: c.Dir(), Args: args, Fixed: true}); !m.Allowed || m.Ask {
				t.Errorf("%s: %+v", cells[1], m)
			}
			artifact := c.Dir() + "/" + strings.Trim(cells[2], "`")
			if _, ok := c.MatchArtifact(artifact); !ok {
				t.Errorf("%s is not an artifact", artifact)
			}
			if d := twin.Wider(c); len(d) == 0 {
				t.Error("the twin is not wider")
			} else {
				for _, one := range d {
					if one.Clause != cells[4] {
						t.Errorf("clause %s, the README says %s: %s", one.Clause, cells[4], one)
					}
				}
			}
			if d := c.Wider(c); d != nil {
				t.Errorf("wider than itself: %v", d)
			}
			inputs(t, dir, name, c)
		})
	}
	if files, err := filepath.Glob(dir + "*.yaml"); err != nil || jobs != 20 || len(files) != 2*jobs {
		t.Errorf("%d jobs, %d files, %v", jobs, len(files), err)
	}
}

// inputs checks that the contract accepts each file in the directory of its job.
func inputs(t *testing.T, dir, name string, c *contract.Contract) {
	t.Helper()
	found := 0
	err := filepath.WalkDir(filepath.Join(dir, name), func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		found++
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(filepath.Join(dir, name), p)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(b)
		in, ok := c.MatchInput(c.Dir() + "/" + filepath.ToSlash(rel))
		if !ok || in.Size != 0 && int64(in.Size) < int64(len(b)) || in.SHA256 != "" && in.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("%s with %d bytes and the SHA-256 %x: %+v", rel, len(b), sum, in)
		}
		return nil
	})
	if err != nil || found == 0 {
		t.Errorf("%d inputs, %v", found, err)
	}
}
