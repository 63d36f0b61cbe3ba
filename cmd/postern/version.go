package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
)

func versionCommand() *command {
	return &command{
		name: "version", short: "print the version",
		long: `Prints the version of Postern, of Go, and of the gVisor inside.`,
		run: func(_ context.Context, args []string, out io.Writer) error {
			if err := noArgs(args); err != nil {
				return err
			}
			gvisor := "unknown"
			if b, ok := debug.ReadBuildInfo(); ok {
				for _, d := range b.Deps {
					if d.Path == "gvisor.dev/gvisor" {
						gvisor = d.Version
					}
				}
			}
			_, err := fmt.Fprintf(out, "postern %s (%s %s/%s, gVisor %s)\n", revision(), runtime.Version(), runtime.GOOS, runtime.GOARCH, gvisor)
			return err
		},
	}
}

// revision returns the version of this program.
func revision() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return s.Value[:12]
			}
		}
	}
	return "development"
}
