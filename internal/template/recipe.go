package template

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
)

//go:embed recipe/packages.txt
var basePackages string

//go:embed recipe/exclude.txt
var baseExclude string

//go:embed recipe/finish.sh
var baseFinish string

//go:embed recipe/interpreter/*.py
var baseInterpreter embed.FS

//go:embed recipe/services
var baseServices string

//go:embed recipe/profile
var baseProfile string

// buildVersion is part of every key: raise it when build.go changes what comes
// out for the same recipe.
const buildVersion = "1"

// A recipe is all that decides what a root file system contains, but for the
// versions of the packages: those are what Debian has at the time.
type recipe struct {
	name     string
	suite    string   // Debian release
	variant  string   // of mmdebstrap: the set of packages to begin with
	packages []string // Debian packages, sorted
	exclude  []string // paths that dpkg leaves out
	finish   string   // shell script that ends the build, run inside
	files    []file   // written before finish
	ready    *Ready   // of what its services are; it changes nothing of what is built
}

// A file is written into the root file system as it is, owned by root.
type file struct {
	path string // absolute, inside
	text string
}

func baseRecipe() (recipe, error) {
	r := recipe{
		name:     "base",
		suite:    "bookworm",
		variant:  "apt", // the essential packages and apt
		packages: lines(basePackages),
		exclude:  lines(baseExclude),
		finish:   baseFinish,
		files: []file{
			{ServicesPath, baseServices},
			{"/etc/profile", baseProfile},
		},
		// The interpreter says OK once its first kernel has executed something.
		ready: &Ready{Port: 49999, Path: "/health"},
	}
	programs, err := baseInterpreter.ReadDir("recipe/interpreter")
	if err != nil {
		return recipe{}, fmt.Errorf("read recipe: %w", err)
	}
	for _, p := range programs {
		text, err := baseInterpreter.ReadFile("recipe/interpreter/" + p.Name())
		if err != nil {
			return recipe{}, fmt.Errorf("read recipe: %w", err)
		}
		r.files = append(r.files, file{"/opt/postern/interpreter/" + p.Name(), string(text)})
	}
	slices.Sort(r.packages)
	// They become arguments of a program that splits on commas and blanks.
	for _, p := range r.packages {
		if strings.Trim(p, "abcdefghijklmnopqrstuvwxyz0123456789.+-") != "" || p[0] == '-' {
			return recipe{}, fmt.Errorf("read recipe: %q is not the name of a Debian package", p)
		}
	}
	if len(r.packages) == 0 {
		return recipe{}, errors.New("read recipe: no packages")
	}
	return r, nil
}

// key returns the SHA-256, in hex, of all that decides what is built.
func (r recipe) key() string {
	h := sha256.New()
	// Each part with its length: what moves from one part to the next must
	// change the key.
	add := func(parts ...string) {
		for _, p := range parts {
			fmt.Fprintf(h, "%d:", len(p))
			_, _ = io.WriteString(h, p)
		}
	}
	add(buildVersion, runtime.GOARCH, r.name, r.suite, r.variant, r.finish, fmt.Sprint(len(r.packages), len(r.exclude), len(r.files)))
	add(r.packages...)
	add(r.exclude...)
	for _, f := range r.files {
		add(f.path, f.text)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (r recipe) id() string { return r.name + "-" + r.key()[:16] }

// lines returns the lines of s without comments, blanks around them and empty ones.
func lines(s string) []string {
	var out []string
	for l := range strings.Lines(s) {
		if l = strings.TrimSpace(l); l != "" && l[0] != '#' {
			out = append(out, l)
		}
	}
	return out
}
