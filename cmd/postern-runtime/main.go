// Command postern-runtime is the program of a sandbox's processes on the host. It is
// built into postern, which executes it; see package runsc.
package main

import (
	"fmt"
	"os"

	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/runsc"
)

func main() {
	if launch.IsPart(os.Args) {
		runsc.Main() // exits
	}
	fmt.Fprintln(os.Stderr, "postern-runtime: this is a part of postern, which executes it itself")
	os.Exit(2)
}
