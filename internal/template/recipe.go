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

// buildVersion is part of every key. Increment it if build.go changes the result of
// the same recipe.
const buildVersion = "1"

// A recipe determines the content of a root file system, except for the versions of
// the packages: those are Debian's current ones.
type recipe struct {
	name     string
	suite    string   // Debian release
	variant  string   // of mmdebstrap: the initial set of packages
	packages []string // Debian packages, sorted
	exclude  []string // paths that dpkg does not unpack
	finish   string   // shell script that runs inside at the end of the build
	files    []file   // written before finish
	ready    *Ready   // probe of its services; not part of the key
}

// A file is written into the root file system, owned by root.
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
		// The interpreter answers OK when its first kernel has executed something.
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
	// They become arguments of a program that splits on commas and spaces.
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

// key returns the SHA-256, in hex, of everything that determines the result.
func (r recipe) key() string {
	h := sha256.New()
	// With the length of each part, so that moving text from one part to the next
	// changes the key.
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

// lines returns the lines of s without comments, surrounding spaces and empty
// lines.
func lines(s string) []string {
	var out []string
	for l := range strings.Lines(s) {
		if l = strings.TrimSpace(l); l != "" && l[0] != '#' {
			out = append(out, l)
		}
	}
	return out
}
