package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"postern/patches"
)

// stamp is the output of "git describe" for the source, set by the linker (see
// Makefile). It is empty in builds without the Makefile.
var stamp string

func versionCommand() *command {
	return &command{
		use: "version", at: onFiles, short: "print the version", facts: true,
		long: `Prints the version of Postern, of Go, and of the gVisor inside. Postern's is the
tag it was built from, or the last tag with the number of commits since and the
commit, or the commit alone; "dirty" means that files were changed. A build from
source without version control says so.`,
		run: func(_ context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			gvisor := "unknown"
			if b, ok := debug.ReadBuildInfo(); ok {
				for _, d := range b.Deps {
					if d.Path == patches.Module {
						gvisor = d.Version
					}
				}
				if patches.Check(b) == nil {
					gvisor += " with patches"
				}
			}
			facts := map[string]string{"postern": revision(), "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH, "gvisor": gvisor}
			return out.facts(facts, func() error {
				_, err := fmt.Fprintf(out, "postern %s (%s %s/%s, gVisor %s)\n", revision(), runtime.Version(), runtime.GOOS, runtime.GOARCH, gvisor)
				return err
			})
		},
	}
}

// revision returns the version of this program.
func revision() string {
	b, _ := debug.ReadBuildInfo()
	return versionOf(stamp, b)
}

// versionOf returns a version from the linker's stamp, or else from Go's build
// info b, which may be nil.
func versionOf(stamp string, b *debug.BuildInfo) string {
	if stamp != "" {
		return stamp
	}
	if b == nil {
		return unversioned
	}
	if v := b.Main.Version; v != "" && v != "(devel)" { // go install MODULE@VERSION, or a tag that Go found
		return v
	}
	commit, dirty := "", ""
	for _, s := range b.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if commit == "" {
		return unversioned
	}
	return commit + dirty
}

const unversioned = "unknown (built without version control)"
