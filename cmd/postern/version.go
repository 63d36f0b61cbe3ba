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
			version, gvisor := "development", "unknown"
			if b, ok := debug.ReadBuildInfo(); ok {
				for _, s := range b.Settings {
					if s.Key == "vcs.revision" && len(s.Value) >= 12 {
						version = s.Value[:12]
					}
				}
				for _, d := range b.Deps {
					if d.Path == "gvisor.dev/gvisor" {
						gvisor = d.Version
					}
				}
			}
			_, err := fmt.Fprintf(out, "postern %s (%s %s/%s, gVisor %s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH, gvisor)
			return err
		},
	}
}
