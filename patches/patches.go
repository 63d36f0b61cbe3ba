// Package patches holds the changes that Postern makes to gVisor, as patch files, and says
// whether a program was built with them. Package main in apply applies them to a copy of the
// module. CONTRIBUTING.md says how.
package patches

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"path"
	"runtime/debug"
)

// Module is the path of the module that the patches change.
const Module = "gvisor.dev/gvisor"

//go:embed gvisor/*.patch
var files embed.FS

// A Patch is a file of this directory: its reason, then a unified diff.
type Patch struct {
	Name string // path in the repository
	Text string
}

// All returns the patches in the order in which they are applied.
func All() []Patch {
	entries, err := files.ReadDir("gvisor") // sorted by name
	if err != nil {
		panic(err) // unreachable: embedded
	}
	var out []Patch
	for _, e := range entries {
		b, err := files.ReadFile(path.Join("gvisor", e.Name()))
		if err != nil {
			panic(err) // unreachable: embedded
		}
		out = append(out, Patch{Name: path.Join("patches/gvisor", e.Name()), Text: string(b)})
	}
	return out
}

// Dir returns the directory of the patched copy of a version of gVisor, relative to the
// root of the repository. The Go command writes it into each program that it builds from
// the copy. It depends on the patches, and so tells programs with other ones apart.
func Dir(version string) string {
	var b bytes.Buffer
	for _, p := range All() {
		fmt.Fprintf(&b, "%s %d\n%s", p.Name, len(p.Text), p.Text)
	}
	sum := sha256.Sum256(b.Bytes())
	return fmt.Sprintf("./.cache/gvisor/%s-%x", version, sum[:8])
}

// Check returns an error unless a program with the build information was built with
// exactly these patches. The error continues a sentence about the program.
func Check(built *debug.BuildInfo) error {
	for _, m := range built.Deps {
		if m.Path != Module {
			continue
		}
		if m.Replace == nil {
			return fmt.Errorf("built from %s without the patches in patches/gvisor: use make build", Module)
		}
		if got, want := m.Replace.Path, Dir(m.Version); got != want {
			return fmt.Errorf("built from %s, not from %s with the patches in patches/gvisor: use make build", got, want)
		}
		return nil
	}
	return fmt.Errorf("built without %s: use make build", Module)
}
