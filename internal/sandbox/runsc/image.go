package runsc

import (
	"errors"
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"postern/internal/sandbox/launch"
)

// needsGofer reports whether gVisor starts a gofer for a sandbox whose root file system
// is an image.
func needsGofer(spec *specs.Spec) bool {
	for _, m := range spec.Mounts {
		if m.Type == "bind" {
			return true
		}
	}
	return false
}

// filestoreNumber marks the file for a sandbox's writes among the files that gVisor
// passes on. Without a gofer gVisor passes files only for programs inside, by the
// number that they would have there. No program could have this one.
const filestoreNumber = 1 << 30

// newFilestore creates the file for what a sandbox writes. It has no name, so it
// disappears with the last process that has it open, also after a crash. With a
// gofer gVisor creates it, in the same way.
func newFilestore(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, launch.Filestore)
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// filestoreFlag returns the flag with which the sentry takes the file for writes,
// given the one with which it would pass it to programs inside.
func filestoreFlag(arg string) (string, bool) {
	v, ok := strings.CutPrefix(arg, "--pass-fd=")
	if !ok {
		return "", false
	}
	fd, ok := strings.CutSuffix(v, ":"+strconv.Itoa(filestoreNumber))
	return "--gofer-filestore-fds=" + fd, ok
}
